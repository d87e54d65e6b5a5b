"""Lowers what compute_90a adds: mbarriers, bulk copies, wgmma, and clusters.

Other forms are left to the interpreter, with the whole kernel.
"""

from __future__ import annotations

import re

from ..arithmetic.mma_forms import ELEMENT_BITS
from ..interpreter.emit_clusters import ARRIVE_FORM as CLUSTER_ARRIVE
from ..interpreter.emit_clusters import INIT_FENCE, MAP_FORM, MULTICAST_FORM, PUSH_FORM, REMOTE_ARRIVE_FORM
from ..interpreter.emit_hopper import (
    ARRIVE_FORM,
    BULK_LOAD_FORM,
    BULK_STORE_FORM,
    COPIES_ARRIVE_FORM,
    INIT_FORM,
    LOAD_FORM,
    NO_OPERATION,
    PROXY_FENCES,
    SETMAXNREG_FORM,
    STORE_FORM,
    WAIT_BULK_FORM,
    WAIT_FORM,
    WGMMA_FORM,
    wgmma_form,
)
from ..ptx.flow import READ_PHASE
from ..ptx.instruction import WGMMA_WAIT, Immediate, Instruction, Operand, Register, TensorAddress, Vector
from ..ptx.parse import TYPE_BYTES
from .lower import Lowering
from .lower_products import form_field
from .operations import NotLowered, Slot

_ARRIVES, _EXPECTS, _DROPS, _RELEASES = 1, 2, 4, 8
_A_IN_REGISTERS, _B_IS_TRANSPOSED, _IS_F16, _NEGATES_A, _NEGATES_B, _A_IS_TRANSPOSED = 1, 2, 4, 8, 16, 32
_FORM_SHIFT = 8
"""Flags as in ``c/async.c`` and ``c/wgmma.c``."""
_MOST_DIMENSIONS = 5


def lower_hopper(lowering: Lowering, instruction: Instruction) -> bool:
    """Lower the instruction if it belongs here."""
    opcode, operands = instruction.opcode, instruction.operands
    if opcode in NO_OPERATION:
        return True
    if opcode.startswith(READ_PHASE) and WAIT_FORM.fullmatch(opcode[len(READ_PHASE) :]):
        lowering.emit("phase_passed", lowering.target(_register(operands[0], instruction), "pred"))
    elif (found := INIT_FORM.fullmatch(opcode)) is not None:
        fields = _mbarrier(lowering, operands[0])
        if found.group(1) == "init" and len(operands) == 2:
            lowering.emit("mbarrier_init", *fields, lowering.source(operands[1], "b32"), outs=())
        else:
            lowering.emit("mbarrier_invalidate", *fields, outs=())
    elif (found := ARRIVE_FORM.fullmatch(opcode)) is not None:
        form, more, alone = found.groups()
        flags = _ARRIVES * (form is not None) + _EXPECTS * (more == ".expect_tx" or alone is not None)
        _lower_arrive(lowering, instruction, flags + _DROPS * (form == "arrive_drop"), False)
    elif (found := COPIES_ARRIVE_FORM.fullmatch(opcode)) is not None and len(operands) == 1:
        lowering.emit("copy_wait", -1, outs=())  # of the lane's own copies: they arrive now, and then the lane
        flags = _ARRIVES if found.group(1) else _RELEASES  # else an arrival is added and taken
        fields = *_mbarrier(lowering, operands[0]), *[lowering.constant(1, "b32")] * 2, flags, 0
        lowering.emit("mbarrier_arrive", lowering.fresh("b64"), *fields, outs=(0,) if found.group(1) else ())
    elif (found := LOAD_FORM.fullmatch(opcode)) is not None:
        if len(operands) != (4 if found.group(2) else 3):
            raise _unknown(instruction)
        _lower_tensor(lowering, instruction, int(found.group(1)), None)
    elif (found := STORE_FORM.fullmatch(opcode)) is not None and len(operands) == (3 if found.group(2) else 2):
        _lower_tensor_store(lowering, instruction, int(found.group(1)))
    elif (found := BULK_LOAD_FORM.fullmatch(opcode)) is not None and len(operands) == (5 if found.group(1) else 4):
        shared, source = _pair(lowering, instruction, operands[0], operands[1])
        base, is_wide, offset = lowering.mbarrier_address(operands[3])
        size = lowering.source(operands[2], "b32")
        lowering.emit("copy_bytes", *shared, *source, base, offset, is_wide, lowering.site(), size, outs=())
    elif (found := BULK_STORE_FORM.fullmatch(opcode)) is not None and len(operands) == (4 if found.group(1) else 3):
        shared, target = _pair(lowering, instruction, operands[1], operands[0])
        lowering.emit("store_bytes", *shared, *target, lowering.site(), lowering.source(operands[2], "b32"), outs=())
    elif opcode == "cp.async.bulk.commit_group":
        lowering.emit("bulk_commit", outs=())
    elif WAIT_BULK_FORM.fullmatch(opcode) and len(operands) == 1 and isinstance(operands[0], Immediate):
        lowering.emit("bulk_wait", operands[0].bits, outs=())
    elif opcode in PROXY_FENCES:
        lowering.emit("proxy_fence", lowering.site(), outs=())
    elif (found := WGMMA_FORM.fullmatch(opcode)) is not None:
        _lower_wgmma(lowering, instruction, found)
    elif opcode == "wgmma.fence.sync.aligned":
        lowering.emit("wgmma_fence", lowering.site(), outs=())
    elif opcode == "wgmma.commit_group.sync.aligned":
        lowering.emit("wgmma_commit", lowering.site(), outs=())
    elif opcode == WGMMA_WAIT:
        _lower_wait(lowering, instruction)
    elif SETMAXNREG_FORM.fullmatch(opcode):
        count = operands[0]
        if not isinstance(count, Immediate) or not 24 <= count.bits <= 256 or count.bits % 8:
            raise _unknown(instruction)
    else:
        return False
    lowering.is_asynchronous = True
    return True


def lower_clusters(lowering: Lowering, instruction: Instruction) -> bool:
    """Lower the instruction if it belongs here."""
    opcode, operands = instruction.opcode, instruction.operands
    if (found := MAP_FORM.fullmatch(opcode)) is not None and found.groups() == ("mapa", ".shared::cluster", "32"):
        address, rank = (lowering.source(operand, "b32") for operand in operands[1:])
        result = lowering.target(_register(operands[0], instruction), "b32")
        lowering.emit("map_shared", result, address, rank, lowering.site())
    elif opcode == INIT_FENCE:
        lowering.emit("mbarrier_publish", outs=())
    elif (found := CLUSTER_ARRIVE.fullmatch(opcode)) is not None:
        lowering.emit("cluster_arrive", int(found.group(1) != "relaxed"), lowering.site(), outs=())
    elif (found := REMOTE_ARRIVE_FORM.fullmatch(opcode)) is not None:
        form, more, alone = found.groups()
        token = operands[0] if form is not None else None
        if token is not None and (not isinstance(token, Register) or token in lowering.read):
            raise _unknown(instruction)
        flags = _ARRIVES * (form is not None) + _EXPECTS * (more is not None or alone is not None)
        _lower_arrive(lowering, instruction, flags, True)
    elif (found := PUSH_FORM.fullmatch(opcode)) is not None:
        _lower_push(lowering, instruction, int(found.group(1) or 1), TYPE_BYTES[found.group(2)])
    elif (found := MULTICAST_FORM.fullmatch(opcode)) is not None:
        if len(operands) != (5 if found.group(2) else 4):
            raise _unknown(instruction)
        _lower_tensor(lowering, instruction, int(found.group(1)), operands[3])
    else:
        return False
    lowering.is_asynchronous = True
    return True


def _unknown(instruction: Instruction) -> NotLowered:
    return NotLowered(f"{instruction.opcode} with these operands")


def _register(operand: Operand | None, instruction: Instruction) -> Register | None:
    if operand is None or isinstance(operand, Register):
        return operand
    raise _unknown(instruction)


def _mbarrier(lowering: Lowering, operand: Operand | None) -> tuple[int | Slot, ...]:
    base, is_wide, offset = lowering.mbarrier_address(operand)
    return base, offset, lowering.site(), is_wide


def _lower_arrive(lowering: Lowering, instruction: Instruction, flags: int, is_of_cluster: bool) -> None:
    operands = list(instruction.operands)
    token = _register(operands.pop(0), instruction) if flags & _ARRIVES else None
    one: Operand = Immediate(1)
    if len(operands) == 1 and not flags & _EXPECTS:
        operands.append(one)
    if len(operands) != 2 or (token is not None and token.kind != "b64"):
        raise _unknown(instruction)
    base, offset, site, is_wide = _mbarrier(lowering, operands[0])
    if is_of_cluster and is_wide:
        raise _unknown(instruction)
    value, count = lowering.source(operands[1], "b32"), lowering.source(one, "b32")
    pair = (count, value) if flags & _EXPECTS else (value, count)
    result = lowering.target(token, "b64")
    fields: tuple[int | Slot, ...] = (base, offset, site, is_wide, *pair, flags, int(is_of_cluster))
    lowering.emit("mbarrier_arrive", result, *fields, outs=(0,) if flags & _ARRIVES else ())


def _lower_tensor(lowering: Lowering, instruction: Instruction, dimensions: int, ranks: Operand | None) -> None:
    destination, tensor, mbarrier = instruction.operands[:3]
    if not isinstance(tensor, TensorAddress) or len(tensor.coordinates.items) != dimensions:
        raise _unknown(instruction)
    to, to_is_wide, to_offset = lowering.address(destination)
    at, at_is_wide, at_offset = lowering.address(tensor.address)
    if not at_is_wide:
        raise _unknown(instruction)
    base, is_wide, offset = lowering.mbarrier_address(mbarrier)
    places = [lowering.source(item, "b32") for item in tensor.coordinates.items]
    places += places[:1] * (_MOST_DIMENSIONS - dimensions)
    mask = lowering.source(ranks, "b16") if ranks is not None else places[0]
    fields = (to, to_offset, to_is_wide, at, at_offset, base, offset, is_wide, lowering.site(), dimensions)
    lowering.emit("copy_tensor", *fields, *places, mask, int(ranks is not None), outs=())


def _pair(
    lowering: Lowering, instruction: Instruction, shared: Operand | None, outside: Operand | None
) -> tuple[tuple[int | Slot, ...], tuple[int | Slot, ...]]:
    """Fields of a shared address, and of one of 64 bits."""
    base, is_wide, offset = lowering.address(shared)
    other, other_is_wide, other_offset = lowering.address(outside)
    if not other_is_wide:
        raise _unknown(instruction)
    return (base, offset, is_wide), (other, other_offset)


def _lower_tensor_store(lowering: Lowering, instruction: Instruction, dimensions: int) -> None:
    tensor, source = instruction.operands[:2]
    if not isinstance(tensor, TensorAddress) or len(tensor.coordinates.items) != dimensions:
        raise _unknown(instruction)
    shared, at = _pair(lowering, instruction, source, tensor.address)
    places = [lowering.source(item, "b32") for item in tensor.coordinates.items]
    lowering.emit("store_tensor", *shared, *at, lowering.site(), dimensions, *places, outs=())


def _lower_push(lowering: Lowering, instruction: Instruction, count: int, nbytes: int) -> None:
    address, values, mbarrier = instruction.operands
    items = values.items if isinstance(values, Vector) else (values,)
    base, is_wide, offset = lowering.address(address)
    counting, counting_is_wide, counting_offset = lowering.mbarrier_address(mbarrier)
    if len(items) != count or count * nbytes > 16 or is_wide or counting_is_wide:
        raise _unknown(instruction)
    lowering.granule_shift = min(lowering.granule_shift, (count * nbytes).bit_length() - 1)
    parts = [lowering.source(item, f"b{8 * nbytes}") for item in items]
    fields = (base, offset, lowering.site(), counting, counting_offset, nbytes, count)
    lowering.emit("push", *fields, *parts, outs=())


def _registers(operand: Operand | None, count: int, instruction: Instruction) -> list[Register]:
    items = operand.items if isinstance(operand, Vector) else (operand,)
    found = [item for item in items if isinstance(item, Register) and item.kind == "b32"]
    if len(found) != count or len(items) != count:
        raise _unknown(instruction)
    return found


def _flag(instruction: Instruction, operand: Operand | None, values: tuple[int, int]) -> bool:
    """Whether an immediate is the second of two values."""
    if not isinstance(operand, Immediate) or operand.bits not in values:
        raise _unknown(instruction)
    return operand.bits == values[1]


def _lower_wgmma(lowering: Lowering, instruction: Instruction, found: re.Match[str]) -> None:
    operands = instruction.operands
    try:
        columns, form = wgmma_form(found)
    except ValueError as error:
        raise _unknown(instruction) from error
    in_registers = len(operands) > 1 and isinstance(operands[1], Vector)
    has_signs, is_half = form.c != "s32", ELEMENT_BITS[form.a] == 16
    if instruction.guard is not None or len(operands) != 4 + 2 * has_signs + is_half * (2 - in_registers):
        raise _unknown(instruction)
    flags = _A_IN_REGISTERS * in_registers + _IS_F16 * (form.a == "f16")
    if has_signs:
        flags += _NEGATES_A * _flag(instruction, operands[4], (1, -1))
        flags += _NEGATES_B * _flag(instruction, operands[5], (1, -1))
    if is_half:
        flags += _B_IS_TRANSPOSED * _flag(instruction, operands[-1], (0, 1))
        flags += _A_IS_TRANSPOSED * (not in_registers and _flag(instruction, operands[6], (0, 1)))
    count = columns // (4 if form.c == "f16" else 2)
    accumulators = [lowering.register(each) for each in _registers(operands[0], count, instruction)]
    scale, b = lowering.source(operands[3], "pred"), lowering.source(operands[2], "b64")
    if in_registers:
        a = [lowering.register(each) for each in _registers(operands[1], 4, instruction)]
    else:
        a = [lowering.source(operands[1], "b64")] * 4
    handler = "wgmma_multiply"
    if not is_half or form.c != "f32":
        handler = "wgmma_form"
        flags += form_field(form) << _FORM_SHIFT
    fields: tuple[int | Slot, ...] = (scale, b, *a, lowering.site(), len(accumulators), flags)
    lowering.emit(handler, *fields, *accumulators, outs=())


def _lower_wait(lowering: Lowering, instruction: Instruction) -> None:
    """The operands are the registers that may hold results (see ptx/accumulators.py) and the count of open groups."""
    if instruction.guard is not None or len(instruction.operands) != 2:
        raise _unknown(instruction)
    held, groups = instruction.operands
    if not isinstance(held, Vector) or not isinstance(groups, Immediate):
        raise _unknown(instruction)
    registers = [lowering.register(item) for item in held.items if isinstance(item, Register)]
    lowering.emit("wgmma_wait", groups.bits, lowering.site(), len(registers), *registers, outs=())
