"""Products and sums that ptxas makes one instruction of.

PTX leaves it open whether ``mul`` and ``add`` without ``.rn`` are fused, and ptxas does so. What it does was read from
the machine code that ptxas 13.0 makes for sm_90 of 4,000 random straight-line programs over f32 (other types: single
patterns; sm_80 and sm_120: an earlier form of the rule, with the same counts): a product disappears into sums if every
use of it is a sum of the same basic block and it wins in each of them. Of two products in one sum the one with fewer
uses wins, else the first. With this rule 3,982 of the 4,000 came out as ptxas made them; the others hold chains of such
choices that no compiler's output was seen to have. What a register held before, or holds behind the sums, is another
value to ptxas, and is one here. Left alone here, though ptxas looks through them, are a product whose sign is changed
before the sum, and one of which a factor's register is written in between.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from .blocks import BasicBlock
from .instruction import Instruction, Register

_TYPES = r"((?:ftz\.)?f32|f64|b?f16(?:x2)?)"
_PRODUCT = re.compile(rf"mul\.{_TYPES}")
_SUM = re.compile(rf"(add|sub)\.{_TYPES}")
_NEGATED = {"f32": "neg.f32", "ftz.f32": "neg.ftz.f32", "f64": "neg.f64"}
"""How a subtrahend or a factor changes its sign, by type; halves are not subtracted from or with."""
_LONGEST_CHAIN = 100
"""Products that are asked in turn whether they win; behind these one is taken not to."""


@dataclass
class _Uses:
    """Who reads and who writes a register in the whole kernel: (block, place in it)."""

    readers: list[tuple[int, int]] = field(default_factory=list)
    writers: list[tuple[int, int]] = field(default_factory=list)


def contract(blocks: list[BasicBlock]) -> int:
    """Fuse what ptxas fuses, in place; returns how many sums took a product in."""
    if not any(_PRODUCT.fullmatch(instruction.opcode) for block in blocks for instruction in block.body):
        return 0
    uses: dict[Register, _Uses] = {}
    for number, block in enumerate(blocks):
        final = [block.final] if block.final is not None else []
        for place, instruction in enumerate([*block.body, *final]):
            for register in instruction.reads:
                uses.setdefault(register, _Uses()).readers.append((number, place))
            for register in instruction.writes:
                uses.setdefault(register, _Uses()).writers.append((number, place))
    before = [block.body for block in blocks]
    return sum(_Block(number, block, uses, before).contract() for number, block in enumerate(blocks))


class _Block:
    """A product is its place here: a register may hold several values, one after another."""

    def __init__(
        self, number: int, block: BasicBlock, uses: dict[Register, _Uses], before: list[list[Instruction]]
    ) -> None:
        self.number = number
        self.block = block
        self.uses = uses
        self.before = before
        self.sums_of: dict[int, list[int]] = {}
        """The sums of each product that nothing else uses."""
        self.product_at: dict[tuple[int, Register], int] = {}
        """Which product a sum's operand is."""
        self.decided: dict[int, bool] = {}

    def contract(self) -> int:
        body = self.block.body
        for place, instruction in enumerate(body):
            target = instruction.operands[0] if instruction.operands else None
            if self._is_product(instruction) and isinstance(target, Register):
                sums = self._sums(target, place)
                if sums:
                    self.sums_of[place] = sums
                    self.product_at |= {(at, target): place for at in sums}
        if not self.sums_of:
            return 0
        fused = 0
        out: list[Instruction] = []
        for place, instruction in enumerate(body):
            if place in self.sums_of and self._wins_everywhere(place):
                continue
            chosen = self._chosen(place)
            if chosen is None:
                out.append(instruction)
                continue
            fused += 1
            target = body[chosen].operands[0]
            out.extend(self._fused(instruction, body[chosen], target))  # type: ignore[arg-type]
        self.block.body = out
        return fused

    def _is_product(self, instruction: Instruction) -> bool:
        return (
            _PRODUCT.fullmatch(instruction.opcode) is not None
            and instruction.guard is None
            and len(instruction.operands) == 3
        )

    def _sums(self, target: Register, place: int) -> list[int]:
        """The places of the sums that use the product; none where something else does, or its factors are not what they
        were by then."""
        body, product = self.block.body, self.block.body[place]
        found = _PRODUCT.fullmatch(product.opcode)
        readers = self._readers(target, place)
        if found is None or not readers or readers[-1] >= len(body):
            return []
        if not all(self._is_sum_of(body[at], target, found.group(1)) for at in readers):
            return []
        factors = {operand for operand in product.operands[1:] if isinstance(operand, Register)}
        # The product itself may be written over a factor: if it goes, the factor stays.
        if any(factors.intersection(body[at].writes) for at in range(place + 1, readers[-1])):
            return []
        return readers

    def _readers(self, target: Register, place: int) -> list[int]:
        """The places that read what the register holds from ``place`` on; none where that is not known to end here."""
        uses = self.uses[target]
        here = sorted(at for number, at in uses.readers if number == self.number and at > place)
        later = [at for number, at in uses.writers if number == self.number and at > place]
        if later:
            end = min(later)
            is_whole = end >= len(self.block.body) or self.block.body[end].guard is None
            return [at for at in here if at <= end] if is_whole else []
        return [] if any(self._is_exposed(target, *reader) for reader in uses.readers) else here

    def _is_exposed(self, register: Register, number: int, place: int) -> bool:
        """Whether a reader may see what another block, or this one the time before, left in the register."""
        writers = (at for block, at in self.uses[register].writers if block == number and at < place)
        return not any(self.before[number][at].guard is None for at in writers)

    def _is_sum_of(self, instruction: Instruction, register: Register, kind: str) -> bool:
        found = _SUM.fullmatch(instruction.opcode)
        if found is None or found.group(2) != kind or instruction.guard is not None or len(instruction.operands) != 3:
            return False
        if found.group(1) == "sub" and kind not in _NEGATED:
            return False
        _, first, second = instruction.operands
        return (first is register) != (second is register)

    def _wins_everywhere(self, product: int, above: tuple[int, ...] = ()) -> bool:
        """Whether the product is taken in by each of its sums."""
        known = self.decided.get(product)
        if known is not None:
            return known
        if product in above or len(above) == _LONGEST_CHAIN:
            return False
        wins = all(self._wins(product, place, (*above, product)) for place in self.sums_of[product])
        if not above or not wins:
            self.decided[product] = wins
        return wins

    def _wins(self, product: int, place: int, above: tuple[int, ...]) -> bool:
        register = self.block.body[product].operands[0]
        _, first, second = self.block.body[place].operands
        other = second if first is register else first
        rival = self.product_at.get((place, other)) if isinstance(other, Register) else None
        if rival is None:
            return True
        mine, theirs = len(self.sums_of[product]), len(self.sums_of[rival])
        beats = theirs < mine or (theirs == mine and other is first)
        return not (beats and self._wins_everywhere(rival, above))

    def _chosen(self, place: int) -> int | None:
        """The product that a sum takes in."""
        instruction = self.block.body[place]
        if _SUM.fullmatch(instruction.opcode) is None:
            return None
        for operand in instruction.operands[1:]:
            product = self.product_at.get((place, operand)) if isinstance(operand, Register) else None
            if product is not None and self._wins_everywhere(product):
                return product
        return None

    def _fused(self, total: Instruction, product: Instruction, taken: Register) -> Iterable[Instruction]:
        word, kind = total.opcode.split(".", 1)
        target, first, second = total.operands
        left, right = product.operands[1:]
        opcode = f"fma.rn.{kind}"
        if word == "add":
            return [replace(total, opcode=opcode, operands=(target, left, right, second if first is taken else first))]
        # a * b - c and c - a * b: one operand of the fma with its sign changed.
        turned = second if first is taken else left
        register = Register("%contracted", "b64" if kind == "f64" else "b32")
        change = replace(total, opcode=_NEGATED[kind], operands=(register, turned))
        operands = (target, left, right, register) if first is taken else (target, register, right, first)
        return [change, replace(total, opcode=opcode, operands=operands)]
