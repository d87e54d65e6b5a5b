"""Lowers loads and stores of all state spaces, and cp.async."""

from __future__ import annotations

import re

from ..interpreter.emit_memory import IN_SPACE, LOAD, STORE
from ..interpreter.emit_warp import COPY
from ..ptx.instruction import Address, Immediate, Instruction, Operand, Register, Symbol, Vector
from ..ptx.parse import TYPE_BYTES
from .lower import Lowering
from .operations import NotLowered, Parameter, Slot, Variable

_REGISTER_KIND = {1: "b32", 2: "b32", 4: "b32", 8: "b64"}
"""What the handlers load an element to, extended."""


def lower_memory(lowering: Lowering, instruction: Instruction) -> bool:
    """Lower the instruction if it belongs here."""
    opcode = instruction.opcode
    if (found := LOAD.fullmatch(opcode)) is not None:
        _lower_load(lowering, instruction, *found.groups())
    elif (found := STORE.fullmatch(opcode)) is not None:
        _lower_store(lowering, instruction, *found.groups())
    elif (found := IN_SPACE.fullmatch(opcode)) is not None and len(instruction.operands) == 2:
        _lower_in_space(lowering, instruction, found.group(1))
    elif (found := COPY.fullmatch(opcode)) is not None:
        _lower_copy(lowering, instruction, found)
    elif opcode == "cp.async.commit_group":
        lowering.emit("copy_commit", outs=())
    elif opcode == "cp.async.wait_all":
        lowering.emit("copy_wait", -1, outs=())
    elif opcode == "cp.async.wait_group" and isinstance(instruction.operands[0], Immediate):
        lowering.emit("copy_wait", instruction.operands[0].bits, outs=())
    else:
        return False
    return True


def _items(operand: Operand | None, count: int) -> list[Operand | None]:
    items: list[Operand | None] = list(operand.items) if isinstance(operand, Vector) else [operand]
    if len(items) != count:
        raise NotLowered(f"expected {count} vector elements")
    return items


_FORMS = frozenset({(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2), (8, 2), (1, 4), (2, 4), (4, 4)})
"""(bytes of an element, elements) of the handlers' accesses."""
_OF_32_BYTES = frozenset({(4, 8), (8, 4)})
"""Those of global memory alone."""
SPACES: dict[str | None, str] = {
    "global": "global",
    "const": "global",
    "shared": "shared",
    "shared::cta": "shared",
    "local": "local",
    None: "generic",
}
"""State spaces in names of handlers."""


def access(
    lowering: Lowering, opcode: str, space: str | None, address: Operand | None, nbytes: int
) -> tuple[str, tuple[int | Slot, ...]]:
    """(the state space in a handler's name, its first fields: address, offset, site, whether that is 64 bits wide)."""
    if space not in SPACES:
        raise NotLowered(opcode)
    where = SPACES[space]
    base, is_wide, offset = lowering.address(address)
    if where not in ("shared", "local") and not is_wide:
        raise NotLowered(f"{opcode} with a 32-bit address")
    if where in ("shared", "generic"):
        lowering.granule_shift = min(lowering.granule_shift, nbytes.bit_length() - 1)
    site = lowering.site()
    if where == "generic":
        inside = lowering.fresh("b64")
        lowering.emit("generic_space", inside, base, offset, site)
        base, offset = inside, 0
    return where, (base, offset, site, is_wide)


def _targets(lowering: Lowering, items: list[Operand | None], element_bytes: int, is_signed: bool) -> list[Slot]:
    found = []
    for item in items:
        if item is not None and (not isinstance(item, Register) or item.kind == "pred"):
            raise NotLowered("destination form")
        kind = _REGISTER_KIND[element_bytes]
        if item is not None and item.kind == "b16" and element_bytes <= 2 and not is_signed:
            kind = "b16"
        found.append(lowering.target(item, kind, is_signed))
    return found


def _lower_load(
    lowering: Lowering, instruction: Instruction, space: str | None, hint: str | None, vector: str | None, kind: str
) -> None:
    opcode, count, nbytes = instruction.opcode, int(vector or 1), TYPE_BYTES[kind]
    is_signed = kind[0] == "s" and nbytes < 8
    if len(instruction.operands) != (3 if hint else 2):
        raise NotLowered(f"{opcode} with these operands")
    items, address = _items(instruction.operands[0], count), instruction.operands[1]
    if space == "param":
        _lower_parameter(lowering, opcode, items, address, nbytes, is_signed)
        return
    if (nbytes, count) not in (_FORMS | _OF_32_BYTES if space in ("global", "const") else _FORMS):
        raise NotLowered(opcode)
    where, fields = access(lowering, opcode, space, address, nbytes * count)
    targets = _targets(lowering, items, nbytes, is_signed)
    name = f"load_{where}{'_signed' if is_signed and nbytes < 4 else ''}_v{count}_{8 * nbytes}"
    lowering.emit(name, *fields, *targets, outs=tuple(range(4, 4 + count)))


def _lower_parameter(
    lowering: Lowering,
    opcode: str,
    items: list[Operand | None],
    address: Operand | None,
    nbytes: int,
    is_signed: bool,
) -> None:
    if isinstance(address, Address) and isinstance(address.base, Symbol):
        offsets = lowering.context.parameter_offsets
        if address.base.name not in offsets:
            raise NotLowered(f"parameter {address.base.name}")
        begin = offsets[address.base.name] + address.base.offset + address.offset
        for place, target in enumerate(_targets(lowering, items, nbytes, is_signed)):
            parameter = Parameter(begin + place * nbytes, nbytes, is_signed, target.kind)
            handler = "mov_b64" if target.kind == "b64" else "mov_b32"
            lowering.emit(handler, target, lowering.filled(Slot(target.kind, parameter)))
        return
    base, is_wide, offset = lowering.address(address)
    if not is_wide or len(items) > 4:
        raise NotLowered(opcode)
    targets = _targets(lowering, items, nbytes, is_signed)
    padded: list[int | Slot] = [*targets, *([0] * (4 - len(targets)))]
    outs = tuple(range(4, 4 + len(targets)))
    lowering.emit(
        "load_parameter", base, offset, lowering.site(), nbytes, *padded, len(targets), int(is_signed), outs=outs
    )


def _lower_store(
    lowering: Lowering, instruction: Instruction, space: str | None, hint: str | None, vector: str | None, kind: str
) -> None:
    opcode, count, nbytes = instruction.opcode, int(vector or 1), TYPE_BYTES[kind]
    if len(instruction.operands) != (3 if hint else 2):
        raise NotLowered(f"{opcode} with these operands")
    if (nbytes, count) not in (_FORMS | _OF_32_BYTES if space in ("global", "const") else _FORMS):
        raise NotLowered(opcode)
    where, fields = access(lowering, opcode, space, instruction.operands[0], nbytes * count)
    values = []
    for item in _items(instruction.operands[1], count):
        if isinstance(item, Register) and item.kind != "pred":
            # The handler stores the low bytes of 32 bits, or 64.
            want = "b64" if nbytes == 8 else "b32" if item.kind == "b64" else item.kind
            values.append(lowering.source(item, want))
        elif isinstance(item, Immediate):
            values.append(lowering.source(item, f"b{max(16, 8 * nbytes)}"))
        else:
            raise NotLowered("source form")
    lowering.emit(f"store_{where}_v{count}_{8 * nbytes}", *fields, *values, outs=())


_ASKED = ("param", "local", "shared", "global", "const", "shared::cluster")
"""As in ``c/generic.c``."""
_MOST_CONSTANTS = 2


def _lower_in_space(lowering: Lowering, instruction: Instruction, space: str) -> None:
    target, address = instruction.operands
    constants = lowering.context.constant_variables
    is_known = isinstance(target, Register) and target.kind == "pred" and not isinstance(address, Address)
    if not isinstance(target, Register) or not is_known or len(constants) > _MOST_CONSTANTS:
        raise NotLowered(f"{instruction.opcode} with these operands")
    asked = _ASKED.index("shared" if space == "shared::cta" else space)
    given = lowering.source(address, "b64")
    bounds: list[int | Slot] = [
        lowering.filled(Slot("b64", Variable(number, offset))) for number, nbytes in constants for offset in (0, nbytes)
    ]
    bounds += [0] * (2 * _MOST_CONSTANTS - len(bounds))
    result = lowering.target(target, "pred")
    lowering.emit("is_in_space", result, given, asked, *bounds, len(constants))


def _lower_copy(lowering: Lowering, instruction: Instruction, found: re.Match[str]) -> None:
    operands = list(instruction.operands)
    if found.group(2) is not None:
        operands.pop()
    whole = operands[2] if len(operands) in (3, 4) else None
    if not isinstance(whole, Immediate) or whole.bits not in ((16,) if found.group(1) == "cg" else (4, 8, 16)):
        raise NotLowered(f"{instruction.opcode} with these operands")
    to, to_is_wide, to_offset = lowering.address(operands[0])
    source, source_is_wide, source_offset = lowering.address(operands[1])
    if not source_is_wide:
        raise NotLowered(f"{instruction.opcode} with a 32-bit source")
    lowering.granule_shift = min(lowering.granule_shift, whole.bits.bit_length() - 1)
    size = lowering.source(operands[3] if len(operands) == 4 else whole, "b32")
    fields = to, to_offset, lowering.site(), to_is_wide, source, source_offset, size
    lowering.emit(f"copy_async_{whole.bits}", *fields, outs=())
