"""One copy of a function in a kernel, and the pieces of ``.param`` variables in which arguments travel."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .flow import Flow, compute_liveness, cut
from .instruction import Address, Location, Operand, Register, Symbol
from .parse import ParsedKernel

PARAMETER_ACCESS = re.compile(r"(ld|st)\.param(?:::func)?(?:\.v([24]))?\.([busf])(8|16|32|64)")

Piece = tuple[int, int]
"""(offset, bytes) of what is stored to or loaded from a ``.param`` variable at once."""


def kind_of(nbytes: int) -> str:
    """The kind of register that holds so many bytes."""
    return f"b{max(nbytes, 2) * 8}"


@dataclass
class Instance:
    """One copy of a body: its own registers, labels and ``.param`` pieces. The kernel's own has the empty suffix."""

    body: ParsedKernel
    suffix: str
    leave: str
    """Label where ``ret`` goes; empty in a kernel."""
    call_location: Location | None = None
    recursive: Instance | None = None
    """The instance with a frame on the stack that this is a part of."""
    registers: dict[Register, Register] = field(default_factory=dict)
    pieces: dict[str, dict[Piece, Register]] = field(default_factory=dict)
    return_number: Register | None = None
    """Where the caller waits; None if there is one caller."""
    returns: list[str] = field(default_factory=list)
    frame: dict[str, int] = field(default_factory=dict)
    frame_bytes: int = 0

    def register(self, register: Register) -> Register:
        """This copy's register."""
        if not self.suffix:
            return register
        found = self.registers.get(register)
        if found is None:
            found = self.registers[register] = Register(register.name + self.suffix, register.kind)
        return found

    def piece(self, variable: str, piece: Piece) -> Register:
        """The register of a piece of a ``.param`` variable."""
        pieces = self.pieces.setdefault(variable, {})
        if piece not in pieces:
            pieces[piece] = Register(f"[{variable}+{piece[0]}]{self.suffix}", kind_of(piece[1]))
        return pieces[piece]


def pieces_of(body: ParsedKernel, variable: str, word: str) -> set[Piece]:
    """Pieces of a ``.param`` variable that a body loads (``word`` ld) or stores (st)."""
    found: set[Piece] = set()
    for instruction in body.instructions:
        match = PARAMETER_ACCESS.fullmatch(instruction.opcode)
        if match is None or match.group(1) != word:
            continue
        address = instruction.operands[word == "ld"]
        if isinstance(address, Address) and isinstance(address.base, Symbol) and address.base.name == variable:
            nbytes = int(match.group(4)) // 8
            found.update((address.offset + nbytes * k, nbytes) for k in range(int(match.group(2) or 1)))
    return found


def overlap(one: Piece, other: Piece) -> bool:
    """Whether two pieces share bytes."""
    return one[0] < other[0] + other[1] and other[0] < one[0] + one[1]


def moving_opcode(target: Operand | None, source: Operand | None, letter: str, nbytes: int) -> str:
    """The opcode that moves a piece into or out of its register."""
    bits = {"b16": 16, "b32": 32, "b64": 64}
    to = bits[target.kind] if isinstance(target, Register) and target.kind in bits else max(16, 8 * nbytes)
    of = bits[source.kind] if isinstance(source, Register) and source.kind in bits else to
    if nbytes == 1:
        return f"cvt.{'s' if letter == 's' else 'u'}{to}.{'s' if letter == 's' else 'u'}8"
    if to == of:
        return f"mov.b{to}"
    return f"cvt.{'s' if letter == 's' else 'u'}{to}.{'s' if letter == 's' else 'u'}{of}"


def alive_after_calls(body: ParsedKernel) -> dict[int, set[Register]]:
    """Registers that are read after each call of a body, by the number of the instruction."""
    blocks, _ = cut(body)
    flow = Flow(blocks)
    compute_liveness(flow)
    number = {id(instruction): index for index, instruction in enumerate(body.instructions)}
    found: dict[int, set[Register]] = {}
    for block in blocks:
        alive = {register for register in flow.registers if block.live_out >> flow.register_index[register] & 1}
        alive.update(block.final.reads if block.final is not None else ())
        for instruction in reversed(block.body):
            if instruction.opcode in ("call", "call.uni"):
                found[number[id(instruction)]] = set(alive)
            alive.difference_update(instruction.writes)
            alive.update(instruction.reads)
    return found
