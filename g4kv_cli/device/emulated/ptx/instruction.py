"""Instructions and operands as the parser leaves them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Location:
    """Source position of an instruction: innermost line, and the line it was inlined into (0: none)."""

    file: str | None = None
    line: int = 0
    call_file: str | None = None
    call_line: int = 0


@dataclass(frozen=True, eq=False)
class Register:
    """A virtual register, one object for each; ``kind`` is b16, b32, b64 or pred."""

    name: str
    kind: str


@dataclass(frozen=True)
class Immediate:
    """A literal: ``bits`` of 0f, 0d and integers; ``real`` of decimal floats, whose width the opcode decides."""

    bits: int
    real: float | None = None


@dataclass(frozen=True)
class Symbol:
    """A special register (``%tid.x``) or the address of a variable, plus a byte offset."""

    name: str
    offset: int = 0


@dataclass(frozen=True)
class Address:
    """``[base + offset]``; base None: an absolute address."""

    base: Register | Symbol | None
    offset: int


@dataclass(frozen=True)
class Vector:
    """``{a, b, ...}``; None stands for the sink ``_``."""

    items: tuple[Operand | None, ...]


@dataclass(frozen=True)
class TensorAddress:
    """``[map, {x, y, ...}]``: the address of a tensor map and coordinates in it, innermost first."""

    address: Address
    coordinates: Vector


@dataclass(frozen=True)
class PredicatePair:
    """``p|q``: two results; None stands for the sink ``_``."""

    first: Register | None
    second: Register | None


@dataclass(frozen=True)
class Negated:
    """``!p`` as a source operand."""

    register: Register


@dataclass(frozen=True)
class Call:
    """What a call names: variables of the results, a function or a register that points to one, and variables of the
    arguments."""

    results: tuple[str, ...]
    target: Register | Symbol
    arguments: tuple[str, ...]


Operand = Register | Immediate | Symbol | Address | TensorAddress | Vector | PredicatePair | Negated | Call


CARRY = Register("%carry", "pred")
"""The condition-code flag that add.cc and its kin hand on."""

_NO_RESULT = frozenset(
    (
        *("st", "red", "stmatrix", "cp", "bra", "bar", "barrier", "membar", "fence", "prefetch", "prefetchu"),
        *("trap", "ret", "exit", "nanosleep", "discard", "brkpt", "pmevent", "griddepcontrol", "setmaxnreg"),
        *("call", "brx", "assertfail", "wild_call", "free", "applypriority", "tensormap", "stackrestore"),
    )
)
_NO_RESULT_PREFIXES = (
    "wmma.store",
    "mbarrier.init",
    "mbarrier.inval",
    "mbarrier.expect_tx",
    "mbarrier.complete_tx",
    "mbarrier.try_wait",
    "mbarrier.test_wait",
)
"""A try_wait or test_wait is cut into the wait, which this is, and a second half that has the result (see flow.py)."""

WGMMA = "wgmma.mma_async."
WGMMA_WAIT = "wgmma.wait_group.sync.aligned"
"""Both read what they write (the operands of the wait: see accumulators.py)."""


def operand_registers(operand: Operand | None) -> list[Register]:
    """Registers that an operand mentions."""
    if isinstance(operand, Register):
        return [operand]
    if isinstance(operand, Address):
        return [operand.base] if isinstance(operand.base, Register) else []
    if isinstance(operand, TensorAddress):
        return [*operand_registers(operand.address), *operand_registers(operand.coordinates)]
    if isinstance(operand, Vector):
        return [register for item in operand.items for register in operand_registers(item)]
    if isinstance(operand, Negated):
        return [operand.register]
    if isinstance(operand, Call):
        return operand_registers(operand.target)
    if isinstance(operand, PredicatePair):
        return [register for register in (operand.first, operand.second) if register is not None]
    return []


@dataclass(frozen=True, eq=False)
class Instruction:
    """One PTX instruction; ``guard`` is its predicate, executed where it equals not ``guard_negated``."""

    opcode: str
    operands: tuple[Operand | None, ...]
    guard: Register | None
    guard_negated: bool
    ptx_line: int
    location: Location

    @property
    def has_result(self) -> bool:
        """Whether the first operand is written."""
        if not self.operands or self.opcode.startswith(_NO_RESULT_PREFIXES):
            return False
        return self.opcode.split(".", 1)[0] not in _NO_RESULT

    @cached_property
    def writes(self) -> list[Register]:
        """Registers that the instruction writes."""
        if not self.has_result:
            return []
        found = operand_registers(self.operands[0])
        return [*found, CARRY] if ".cc." in self.opcode else found

    @cached_property
    def reads(self) -> list[Register]:
        """Registers that the instruction reads; under a guard also its results, which keep their value elsewhere."""
        found: list[Register] = []
        for operand in self.operands[1:] if self.has_result else self.operands:
            found.extend(operand_registers(operand))
        if self.opcode.startswith(("addc", "subc", "madc")):
            found.append(CARRY)
        if self.opcode.startswith((WGMMA, WGMMA_WAIT)):
            found.extend(self.writes)
        if self.guard is not None:
            found.append(self.guard)
            found.extend(self.writes)
        return found
