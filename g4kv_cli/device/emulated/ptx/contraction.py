"""Products and sums that ptxas makes one instruction of.

PTX leaves it open whether ``mul`` and ``add`` without ``.rn`` are fused, and ptxas does so. What it does was read from
the machine code that ptxas 13.0 makes for sm_90 of 4,000 random straight-line programs over f32 (other types: single
patterns; sm_80 and sm_120: an earlier form of the rule, with the same counts): a product disappears into sums if every
use of it is a sum of the same basic block and it wins in each of them. Of two products in one sum the one with fewer
uses wins, else the first. With this rule 3,982 of the 4,000 came out as ptxas made them; the others hold chains of such
choices that no compiler's output was seen to have. A product whose sign is changed before the sum is left alone here,
though ptxas looks through that; so is one that a ``max`` reads too, of which ptxas was seen to fuse the sum
(results/README.md: FlashInfer's prefill).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from .blocks import BasicBlock
from .instruction import Instruction, Operand, Register

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
    writers: int = 0


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
                uses.setdefault(register, _Uses()).writers += 1
    return sum(_Block(number, block, uses).contract() for number, block in enumerate(blocks))


class _Block:
    def __init__(self, number: int, block: BasicBlock, uses: dict[Register, _Uses]) -> None:
        self.number = number
        self.block = block
        self.uses = uses
        self.products: dict[Register, int] = {}
        """Results of products that only sums of this block use, and their places."""
        self.decided: dict[Register, bool] = {}

    def contract(self) -> int:
        body = self.block.body
        for place, instruction in enumerate(body):
            if self._is_product(instruction):
                target = instruction.operands[0]
                if isinstance(target, Register) and self._only_sums_use(target, instruction):
                    self.products[target] = place
        if not self.products:
            return 0
        fused = 0
        out: list[Instruction] = []
        for instruction in body:
            chosen = self._chosen(instruction)
            if chosen is None:
                out.append(instruction)
                continue
            fused += 1
            out.extend(self._fused(instruction, body[self.products[chosen]], chosen))
        read = {register for instruction in out for register in instruction.reads}
        dropped = {id(body[place]) for register, place in self.products.items() if register not in read}
        self.block.body = [instruction for instruction in out if id(instruction) not in dropped]
        return fused

    def _is_product(self, instruction: Instruction) -> bool:
        return (
            _PRODUCT.fullmatch(instruction.opcode) is not None
            and instruction.guard is None
            and len(instruction.operands) == 3
            and all(self._is_constant(operand) for operand in instruction.operands)
        )

    def _is_constant(self, operand: Operand | None) -> bool:
        """Whether it holds one value wherever it is read: a literal, or a register that is written once."""
        return not isinstance(operand, Register) or self.uses[operand].writers <= 1

    def _only_sums_use(self, register: Register, product: Instruction) -> bool:
        found = _PRODUCT.fullmatch(product.opcode)
        readers = self.uses[register].readers
        return bool(readers) and all(
            number == self.number
            and place < len(self.block.body)
            and found is not None
            and self._is_sum_of(self.block.body[place], register, found.group(1))
            for number, place in readers
        )

    def _is_sum_of(self, instruction: Instruction, register: Register, kind: str) -> bool:
        found = _SUM.fullmatch(instruction.opcode)
        if found is None or found.group(2) != kind or instruction.guard is not None or len(instruction.operands) != 3:
            return False
        if found.group(1) == "sub" and kind not in _NEGATED:
            return False
        _, first, second = instruction.operands
        return (first is register) != (second is register)

    def _wins_everywhere(self, register: Register, above: tuple[Register, ...] = ()) -> bool:
        """Whether the product is taken in by each of its sums."""
        known = self.decided.get(register)
        if known is not None:
            return known
        if register in above or len(above) == _LONGEST_CHAIN:
            return False
        wins = all(self._wins(register, place, (*above, register)) for _, place in self.uses[register].readers)
        if not above or not wins:
            self.decided[register] = wins
        return wins

    def _wins(self, register: Register, place: int, above: tuple[Register, ...]) -> bool:
        _, first, second = self.block.body[place].operands
        other = second if first is register else first
        if not isinstance(other, Register) or other not in self.products:
            return True
        mine, theirs = len(self.uses[register].readers), len(self.uses[other].readers)
        beats = theirs < mine or (theirs == mine and other is first)
        return not (beats and self._wins_everywhere(other, above))

    def _chosen(self, instruction: Instruction) -> Register | None:
        """The product that a sum takes in."""
        if _SUM.fullmatch(instruction.opcode) is None:
            return None
        for operand in instruction.operands[1:]:
            if isinstance(operand, Register) and operand in self.products and self._wins_everywhere(operand):
                return operand
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
