"""Lowers what changes tensor maps."""

from __future__ import annotations

from ..interpreter.emit_tensor_maps import COPY_MAP, MAP_FENCE, replacement_of
from ..memory.tensor_map import MAGIC
from ..ptx.instruction import Immediate, Instruction
from .lower import Lowering
from .lower_memory import access
from .operations import Constant, NotLowered, Slot

_CHUNK = Constant(0xFF, "pred"), 2, 8
"""Lanes that copy a map, and the elements of each, of so many bytes."""


def lower_tensor_maps(lowering: Lowering, instruction: Instruction) -> bool:
    """Lower the instruction if it belongs here."""
    opcode, operands = instruction.opcode, instruction.operands
    try:
        what = replacement_of(instruction)
    except ValueError as error:
        raise NotLowered(opcode) from error
    if what is not None:
        if what.field is None:
            if what.value is not None:
                lowering.emit("require_one", lowering.source(what.value, "b32"), lowering.site(), outs=())
            return True
        size = what.field.nbytes
        value = lowering.source(what.value, "b64" if size == 8 else "b32")
        if what.field.plus:
            held, value = value, lowering.fresh("b32")
            lowering.emit("add_b32", value, held, lowering.constant(what.field.plus, "b32"))
        mark = lowering.constant(int.from_bytes(MAGIC, "little"), "b64")
        for at, nbytes, stored in ((0, len(MAGIC), mark), (what.at, size, value)):
            where, fields = access(lowering, opcode, what.space, operands[0], nbytes)
            base, offset, site, is_wide = fields
            if isinstance(offset, Slot):
                raise NotLowered(opcode)
            lowering.emit(f"store_{where}_v1_{8 * nbytes}", base, offset + at, site, is_wide, stored, outs=())
    elif opcode == COPY_MAP and len(operands) == 3 and operands[2] == Immediate(128):
        _lower_copy(lowering, instruction)
    elif (found := MAP_FENCE.fullmatch(opcode)) is not None:
        lowering.emit("fence", lowering.site(), int(found.group(2) in ("cta", "cluster")), outs=())
    else:
        return False
    return True


def _lower_copy(lowering: Lowering, instruction: Instruction) -> None:
    if instruction.guard is not None:
        raise NotLowered(f"{instruction.opcode} under a guard")
    lanes, count, nbytes = _CHUNK
    lowering.emit("whole_warp", lowering.site(), outs=())
    start = len(lowering.out)
    lowering.emit("guard", lowering.filled(Slot("pred", lanes)), 0, 0, outs=())
    values = [lowering.fresh("b64") for _ in range(count)]
    places = []
    for operand, space in zip(instruction.operands, ("global", "shared"), strict=False):
        where, (base, offset, site, is_wide) = access(lowering, instruction.opcode, space, operand, count * nbytes)
        at = lowering.fresh("b64" if is_wide else "b32")
        by_lanes = 0, 0, 0, 0, 4, 1, 1, 8 * count * nbytes  # a row of such elements, one a lane
        lowering.emit("matrix_place", at, base, lowering.constant(0, "b32"), is_wide, *by_lanes)
        places.append((where, (at, offset, site, is_wide)))
    (target, to), (source, given) = places
    name = f"v{count}_{8 * nbytes}"
    lowering.emit(f"load_{source}_{name}", *given, *values, outs=tuple(range(4, 4 + count)))
    lowering.emit(f"store_{target}_{name}", *to, *values, outs=())
    lowering.close_guard(start)
    lowering.emit("fence", lowering.site(), 0, outs=())
