"""Lowers atom and red, and says where their order matters."""

from __future__ import annotations

from ..interpreter.emit_atomic import ATOMIC
from ..memory.atomics import update_function
from ..ptx.instruction import Instruction, Operand, Register, Vector
from ..ptx.parse import REGISTER_KINDS, TYPE_BYTES
from .lower import Lowering
from .lower_memory import access
from .operations import NotLowered, Slot

_OPERATIONS = (
    *("add", "min.u", "max.u", "min.s", "max.s", "and", "or", "xor", "exch", "cas", "inc", "dec", "add.f"),
    *(f"{operation}.{kind}" for kind in ("f16", "bf16") for operation in ("add", "min", "max")),
)
"""As in ``c/atomics.c``."""
_COMMUTING = frozenset(_OPERATIONS[:8])
"""Of integers, where it does not matter who comes first if nobody reads what was there before."""
_LARGEST_VECTOR_BYTES = 16


def _name(operation: str, kind: str) -> str:
    if "f16" in kind:
        return f"{operation}.{kind.removesuffix('x2')}"
    if kind in ("f32", "f64"):
        return f"{operation}.f"
    return f"{operation}.{kind[0]}" if operation in ("min", "max") else operation


def kind_of(instruction: Instruction) -> tuple[str, int] | None:
    """(operation, bytes) of an atomic that may be one on shared memory; None for any other instruction."""
    found = ATOMIC.fullmatch(instruction.opcode)
    if found is None or found[2] == "global":
        return None
    return _name(found[3], found[7]), TYPE_BYTES[found[7]]


def commutes(instruction: Instruction, read: set[Register]) -> bool:
    """Whether an atomic may come before or after others without anybody seeing a difference."""
    found = ATOMIC.fullmatch(instruction.opcode)
    return found is not None and _name(found[3], found[7]) in _COMMUTING and read.isdisjoint(instruction.writes)


def lower_atomic(lowering: Lowering, instruction: Instruction) -> bool:
    """Lower the instruction if it belongs here."""
    found = ATOMIC.fullmatch(instruction.opcode)
    if found is None:
        return False
    word, space, operation, noftz, hint, vector, kind = found.groups()
    opcode, operands = instruction.opcode, list(instruction.operands)
    if hint is not None:
        operands.pop()
    count, nbytes = int(vector or 1), TYPE_BYTES[kind]
    targets = _targets(opcode, operands.pop(0), count) if word == "atom" else [None] * count
    is_half = "f16" in kind
    name = _name(operation, kind)
    is_known = name in _OPERATIONS and all(
        update_function(operation, kind, is_shared, word == "red") is not None for is_shared in (False, True)
    )
    is_known &= (noftz is not None) == is_half and (word == "atom" or operation not in ("exch", "cas"))
    if vector is not None:
        is_known &= space in ("global", None) and kind[-1] != "s" and count * nbytes <= _LARGEST_VECTOR_BYTES
        is_known &= is_half or kind == "f32"
    if not is_known or len(operands) != (3 if operation == "cas" else 2):
        raise NotLowered(opcode)
    given = [_items(opcode, operand, count) for operand in operands[1:]]
    where, fields = access(lowering, opcode, space, operands[0], nbytes * count)
    if where == "local":
        raise NotLowered(opcode)
    if where != "shared":
        lowering.atomic_forms.add((name, nbytes))
    if where != "global":
        lowering.granule_shift = min(lowering.granule_shift, nbytes.bit_length() - 1)
    base, offset, site, is_wide = fields
    if isinstance(offset, Slot):
        raise NotLowered(opcode)
    want = REGISTER_KINDS.get(kind, "b16")
    for place, target in enumerate(targets):
        values = [lowering.source(items[place], want) for items in given]
        aligned = nbytes * count if place == 0 else nbytes
        what = (lowering.target(target, want), values[0], values[-1], _OPERATIONS.index(name), aligned)
        at = base, offset + place * nbytes, site, is_wide
        lowering.emit(f"atomic_{where}_{8 * nbytes}", *at, *what, outs=(4,))
    return True


def _items(opcode: str, operand: Operand | None, count: int) -> list[Operand | None]:
    items: list[Operand | None] = list(operand.items) if isinstance(operand, Vector) else [operand]
    if len(items) != count:
        raise NotLowered(f"{opcode} with these operands")
    return items


def _targets(opcode: str, operand: Operand | None, count: int) -> list[Register | None]:
    found: list[Register | None] = []
    for item in _items(opcode, operand, count):
        if item is not None and (not isinstance(item, Register) or item.kind == "pred"):
            raise NotLowered(f"{opcode} into a predicate, or no register")
        found.append(item)
    return found
