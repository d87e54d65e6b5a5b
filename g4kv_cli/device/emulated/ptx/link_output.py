"""What linking writes: a body of instructions, with labels and registers of the linker's own."""

from __future__ import annotations

from ..faults import UnsupportedOpcode
from .instances import Instance
from .instruction import Instruction, Location, Operand, Register
from .parse_body import located


class LinkedBody:
    """The instructions so far. ``at`` and ``instance``: what is being expanded, and the copy that it is of."""

    def __init__(self, problems: list[UnsupportedOpcode]) -> None:
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.problems = problems
        self.at: Instruction | None = None
        self.instance: Instance | None = None
        self._made = 0

    def number(self) -> int:
        """A number that was not given before."""
        self._made += 1
        return self._made

    def emit(
        self, opcode: str, *operands: Operand | None, guard: Register | None = None, negated: bool = False
    ) -> None:
        """Append an instruction that stands where the current one does."""
        at = self.at
        if at is None:
            raise AssertionError("nothing is being expanded")  # run sets it first
        self.instructions.append(Instruction(opcode, operands, guard, negated, at.ptx_line, self._location(at)))

    def _location(self, at: Instruction) -> Location:
        call = self.instance.call_location if self.instance is not None else None
        if call is None or at.location.call_line or not call.line:
            return at.location
        return Location(at.location.file, at.location.line, call.file, call.line)

    def label(self, name: str) -> None:
        """Put a label at the end of the output."""
        self.labels[name] = len(self.instructions)

    def fresh(self, kind: str) -> Register:
        """A register of the linker's own."""
        return Register(f"%link{self.number()}", kind)

    def fresh_label(self) -> str:
        """A label of the linker's own."""
        return f"$link{self.number()}"

    def refuse(self, reason: str, opcode: str | None = None) -> None:
        """Note that the current instruction cannot be emulated."""
        at = self.at
        if at is not None:
            self.problems.append(located(UnsupportedOpcode(opcode or at.opcode, at.ptx_line, reason), at.location))
