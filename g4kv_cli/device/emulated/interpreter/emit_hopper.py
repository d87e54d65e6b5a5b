"""Emitters of what compute_90a adds: mbarrier, bulk tensor copies, wgmma, proxy fences and setmaxnreg."""

from __future__ import annotations

import re

from ..arithmetic.mma_forms import ELEMENT_BITS, Form
from ..checks.clock_races import fence_proxy
from ..memory.atomics import update_function
from ..memory.bulk_bytes import copy_between, load_bytes, store_bytes
from ..memory.bulk_copy import Reduction, commit_bulk, load_tensor, store_tensor, wait_bulk
from ..ptx.flow import READ_PHASE
from ..ptx.instruction import (
    WGMMA,
    WGMMA_WAIT,
    Immediate,
    Instruction,
    Operand,
    Register,
    TensorAddress,
    Vector,
)
from ..ptx.parse import TYPE_BYTES
from ..warp.mbarriers import (
    MBARRIER_SHIFT,
    arrive_mbarrier,
    arrive_with_copies,
    initialise_mbarrier,
    invalidate_mbarrier,
    read_phase,
)
from ..warp.wgmma import Shape, commit_wgmma, fence_wgmma, multiply_async, require_finished, wait_wgmma
from .emit import BlockEmitter
from .emit_warp import is_dead

_SHARED = r"\.shared(?:::cta)?\.b64"
INIT_FORM = re.compile(r"mbarrier\.(init|inval)" + _SHARED)
ARRIVE_FORM = re.compile(
    r"mbarrier\.(?:(arrive|arrive_drop)(\.expect_tx|\.noComplete)?(?:\.(?:release|relaxed)\.(?:cta|cluster))?"
    r"|(expect_tx)(?:\.relaxed\.(?:cta|cluster))?)" + _SHARED
)
WAIT_FORM = re.compile(r"mbarrier\.(?:try|test)_wait(\.parity)?(?:\.(?:acquire|relaxed)\.(?:cta|cluster))?" + _SHARED)
COPIES_ARRIVE_FORM = re.compile(r"cp\.async\.mbarrier\.arrive(\.noinc)?" + _SHARED)
BULK_LOAD_FORM = re.compile(
    r"cp\.async\.bulk\.shared::(?:cluster|cta)\.global\.mbarrier::complete_tx::bytes(\.L2::cache_hint)?"
)
_BULK_REDUCE = re.compile(
    r"cp\.reduce\.async\.bulk\.global\.shared::cta\.bulk_group(\.L2::cache_hint)?\.(add|min|max|inc|dec|and|or|xor)"
    r"(\.noftz)?\.([usb](?:32|64)|b?f16|f32|f64)"
)
_BULK_BETWEEN = re.compile(r"cp\.async\.bulk\.shared::cluster\.shared::cta\.mbarrier::complete_tx::bytes()")
BULK_STORE_FORM = re.compile(r"cp\.async\.bulk\.global\.shared::cta\.bulk_group(\.L2::cache_hint)?")
LOAD_FORM = re.compile(
    r"cp\.async\.bulk\.tensor\.([1-5])d\.shared::(?:cluster|cta)\.global(?:\.tile)?\.mbarrier::complete_tx::bytes"
    r"(\.L2::cache_hint)?"
)
STORE_FORM = re.compile(
    r"cp\.async\.bulk\.tensor\.([1-5])d\.global\.shared::cta(?:\.tile)?\.bulk_group(\.L2::cache_hint)?"
)
_TENSOR_REDUCE = re.compile(
    r"cp\.reduce\.async\.bulk\.tensor\.([1-5])d\.global\.shared::cta\.(add|min|max|inc|dec|and|or|xor)(?:\.tile)?"
    r"\.bulk_group(\.L2::cache_hint)?"
)
WAIT_BULK_FORM = re.compile(r"cp\.async\.bulk\.wait_group(?:\.read)?")
WGMMA_FORM = re.compile(
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.(f16|f32|s32)\.(b?f16|tf32|e4m3|e5m2|[su]8|b1)"
    r"\.(b?f16|tf32|e4m3|e5m2|[su]8|b1)(\.satfinite|\.and\.popc)?"
)
_SMALL_FLOATS, _BYTES = ("e4m3", "e5m2"), ("s8", "u8")
_ACCUMULATORS = {
    **dict.fromkeys((*_BYTES, "b1"), ("s32",)),
    "bf16": ("f32",),
    "tf32": ("f32",),
    **dict.fromkeys(("f16", *_SMALL_FLOATS), ("f16", "f32")),
}
_ROW_BITS = 256
SETMAXNREG_FORM = re.compile(r"setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32")

NO_OPERATION = frozenset(
    {
        "fence.proxy.async.global",
        "fence.proxy.alias",
        *(f"prefetch{space}.tensormap" for space in ("", ".param", ".const")),
        *(f"cp.async.bulk.prefetch.L2.global{hint}" for hint in ("", ".L2::cache_hint")),
        *(
            f"cp.async.bulk.prefetch.tensor.{rank}d.L2.global{tile}{hint}"
            for rank in range(1, 6)
            for tile in ("", ".tile")
            for hint in ("", ".L2::cache_hint")
        ),
    }
)
"""What has no effect here: proxies are told apart in shared memory only."""

PROXY_FENCES = frozenset({"fence.proxy.async", *(f"fence.proxy.async.shared::{name}" for name in ("cta", "cluster"))})


def emit_hopper(emitter: BlockEmitter, number: int, instruction: Instruction) -> bool:
    """Emit the instruction if it belongs here."""
    opcode = instruction.opcode
    if opcode.startswith(READ_PHASE):
        target = instruction.operands[0]
        if WAIT_FORM.fullmatch(opcode[len(READ_PHASE) :]) is None or not isinstance(target, Register):
            raise emitter.unsupported(instruction, "no wait of this form is known")
        emitter.effect(number, instruction, [target], read_phase(), [])
        return True
    if not _emit(emitter, number, instruction):
        return False
    emitter.context.is_asynchronous |= opcode not in NO_OPERATION
    return True


def _emit(emitter: BlockEmitter, number: int, instruction: Instruction) -> bool:
    opcode = instruction.opcode
    for pattern, emit in (
        (INIT_FORM, _emit_init),
        (ARRIVE_FORM, _emit_arrive),
        (COPIES_ARRIVE_FORM, _emit_copies_arrive),
        (BULK_LOAD_FORM, _emit_bulk_load),
        (_BULK_BETWEEN, _emit_bulk_load),
        (BULK_STORE_FORM, _emit_bulk_store),
        (_BULK_REDUCE, _emit_bulk_store),
        (LOAD_FORM, _emit_load),
        (STORE_FORM, _emit_store),
        (_TENSOR_REDUCE, _emit_store),
        (WGMMA_FORM, _emit_wgmma),
    ):
        found = pattern.fullmatch(opcode)
        if found is not None:
            emit(emitter, number, instruction, found)
            return True
    operands = instruction.operands
    if opcode in NO_OPERATION:
        emitter.finish(number, instruction, {})
    elif opcode in PROXY_FENCES:
        emitter.effect(number, instruction, [], fence_proxy(), [])
    elif opcode == "cp.async.bulk.commit_group":
        emitter.effect(number, instruction, [], commit_bulk(), [])
    elif WAIT_BULK_FORM.fullmatch(opcode) and len(operands) == 1 and isinstance(operands[0], Immediate):
        emitter.effect(number, instruction, [], wait_bulk(operands[0].bits), [])
    elif opcode == "wgmma.fence.sync.aligned":
        emitter.effect(number, instruction, [], fence_wgmma(emitter.site(instruction)), [])
    elif opcode == "wgmma.commit_group.sync.aligned":
        emitter.effect(number, instruction, [], commit_wgmma(), [])
    elif opcode == "wgmma.wait_group.sync.aligned":
        _emit_wait(emitter, number, instruction)
    elif SETMAXNREG_FORM.fullmatch(opcode):
        _check_register_count(emitter, instruction)
        emitter.finish(number, instruction, {})
    else:
        return False
    return True


def _check_register_count(emitter: BlockEmitter, instruction: Instruction) -> None:
    count = instruction.operands[0] if instruction.operands else None
    if not isinstance(count, Immediate) or not 24 <= count.bits <= 256 or count.bits % 8:
        raise emitter.unsupported(instruction, "the register count must be a multiple of 8 from 24 to 256")


def phase_operands(emitter: BlockEmitter, instruction: Instruction) -> str:
    """What the block of a wait returns: (address base, offset, parity, or token whose lowest bit is that)."""
    if WAIT_FORM.fullmatch(instruction.opcode) is None:
        raise emitter.unsupported(instruction, "no wait of this form is known")
    _note_mbarrier(emitter)
    emitter.context.is_asynchronous = True
    base, _, offset = emitter.address(instruction.operands[0], instruction)
    parity = emitter.source(instruction.operands[1], "b32", instruction)
    return f"({base}, {offset}, {parity})"


def _note_mbarrier(emitter: BlockEmitter) -> None:
    context = emitter.context
    context.smallest_shared_shift = min(context.smallest_shared_shift, MBARRIER_SHIFT)


def _emit_init(emitter: BlockEmitter, number: int, instruction: Instruction, found: re.Match[str]) -> None:
    is_init = found.group(1) == "init"
    operands = instruction.operands
    if len(operands) != (2 if is_init else 1):
        raise emitter.unsupported(instruction, "wrong number of operands")
    _note_mbarrier(emitter)
    base, _, offset = emitter.address(operands[0], instruction)
    site = emitter.site(instruction)
    if is_init:
        count = emitter.source(operands[1], "b32", instruction)
        emitter.effect(number, instruction, [], initialise_mbarrier(site, offset), [base, count])
    else:
        emitter.effect(number, instruction, [], invalidate_mbarrier(site, offset), [base])


def _emit_arrive(emitter: BlockEmitter, number: int, instruction: Instruction, found: re.Match[str]) -> None:
    arrives, drops = found.group(1) is not None, found.group(1) == "arrive_drop"
    expects = found.group(2) == ".expect_tx" or found.group(3) is not None
    operands = list(instruction.operands)
    targets: list[Register | None] = []
    if arrives:
        token = operands.pop(0)
        if token is not None and not (isinstance(token, Register) and token.kind == "b64"):
            raise emitter.unsupported(instruction, "the token must be a 64-bit register")
        targets = [token if not is_dead(emitter, number, token) else None]
    if len(operands) not in ((2,) if expects else (1, 2)):
        raise emitter.unsupported(instruction, "wrong number of operands")
    _note_mbarrier(emitter)
    base, _, offset = emitter.address(operands[0], instruction)
    one: Operand = Immediate(1)
    value = emitter.source(operands[1] if len(operands) == 2 else one, "b32", instruction)
    count = emitter.source(one, "b32", instruction)
    arguments = [base, count, value] if expects else [base, value, count]
    function = arrive_mbarrier(emitter.site(instruction), offset, arrives, expects, drops)
    emitter.effect(number, instruction, targets, function, arguments)


def _emit_copies_arrive(emitter: BlockEmitter, number: int, instruction: Instruction, found: re.Match[str]) -> None:
    if len(instruction.operands) != 1:
        raise emitter.unsupported(instruction, "wrong number of operands")
    _note_mbarrier(emitter)
    base, _, offset = emitter.address(instruction.operands[0], instruction)
    function = arrive_with_copies(emitter.site(instruction), offset, found.group(1) is not None)
    emitter.effect(number, instruction, [], function, [base])


def _emit_bulk_load(emitter: BlockEmitter, number: int, instruction: Instruction, found: re.Match[str]) -> None:
    operands = instruction.operands
    if len(operands) != (5 if found.group(1) else 4):
        raise emitter.unsupported(instruction, "wrong number of operands")
    _note_mbarrier(emitter)
    shared, _, shared_offset = emitter.address(operands[0], instruction)
    source, _, source_offset = emitter.address(operands[1], instruction)
    nbytes = emitter.source(operands[2], "b32", instruction)
    mbarrier, _, mbarrier_offset = emitter.address(operands[3], instruction)
    form = copy_between if found.re is _BULK_BETWEEN else load_bytes
    function = form(emitter.site(instruction), shared_offset, source_offset, mbarrier_offset)
    emitter.effect(number, instruction, [], function, [shared, source, nbytes, mbarrier])


def _emit_bulk_store(emitter: BlockEmitter, number: int, instruction: Instruction, found: re.Match[str]) -> None:
    operands = instruction.operands
    if len(operands) != (4 if found.group(1) else 3):
        raise emitter.unsupported(instruction, "wrong number of operands")
    target, _, target_offset = emitter.address(operands[0], instruction)
    shared, _, shared_offset = emitter.address(operands[1], instruction)
    nbytes = emitter.source(operands[2], "b32", instruction)
    update = _reduction(emitter, instruction, *found.groups()[1:]) if len(found.groups()) > 1 else None
    function = store_bytes(emitter.site(instruction), shared_offset, target_offset, update)
    emitter.effect(number, instruction, [], function, [shared, target, nbytes])


def _reduction(
    emitter: BlockEmitter, instruction: Instruction, operation: str, noftz: str | None, kind: str
) -> Reduction:
    """What cp.reduce does to each element, which is what red does to it."""
    update = update_function(operation, kind, False, True)
    if update is None or (noftz is not None) != (kind in ("f16", "bf16") and operation == "add"):
        raise emitter.unsupported(instruction, "there is no such reduction")
    return Reduction(TYPE_BYTES[kind].bit_length() - 1, update)


def tensor_operand(
    emitter: BlockEmitter, instruction: Instruction, operand: Operand | None, rank: int
) -> tuple[str, int, list[str]]:
    """(map address base, its offset, coordinates)."""
    if not isinstance(operand, TensorAddress) or len(operand.coordinates.items) != rank:
        raise emitter.unsupported(instruction, f"expected a tensor map with {rank} coordinates")
    base, _, offset = emitter.address(operand.address, instruction)
    return base, offset, [emitter.source(item, "b32", instruction) for item in operand.coordinates.items]


def _emit_load(emitter: BlockEmitter, number: int, instruction: Instruction, found: re.Match[str]) -> None:
    rank, hint = int(found.group(1)), found.group(2)
    operands = instruction.operands
    if len(operands) != (4 if hint else 3):
        raise emitter.unsupported(instruction, "wrong number of operands")
    _note_mbarrier(emitter)
    shared, _, shared_offset = emitter.address(operands[0], instruction)
    tensor_map, map_offset, coordinates = tensor_operand(emitter, instruction, operands[1], rank)
    mbarrier, _, mbarrier_offset = emitter.address(operands[2], instruction)
    function = load_tensor(emitter.site(instruction), shared_offset, map_offset, mbarrier_offset)
    emitter.effect(number, instruction, [], function, [shared, tensor_map, mbarrier, *coordinates])


def _emit_store(emitter: BlockEmitter, number: int, instruction: Instruction, found: re.Match[str]) -> None:
    rank, hint = int(found.group(1)), found.groups()[-1]
    operation = found.group(2) if found.re is _TENSOR_REDUCE else None
    operands = instruction.operands
    if len(operands) != (3 if hint else 2):
        raise emitter.unsupported(instruction, "wrong number of operands")
    tensor_map, map_offset, coordinates = tensor_operand(emitter, instruction, operands[0], rank)
    shared, _, shared_offset = emitter.address(operands[1], instruction)
    function = store_tensor(emitter.site(instruction), shared_offset, map_offset, operation)
    emitter.effect(number, instruction, [], function, [shared, tensor_map, *coordinates])


def _flag(emitter: BlockEmitter, instruction: Instruction, operand: Operand | None, values: tuple[int, int]) -> bool:
    """An immediate that is the first (False) or the second (True) of two values."""
    if not isinstance(operand, Immediate) or operand.bits not in values:
        raise emitter.unsupported(instruction, f"expected an immediate of {values[0]} or {values[1]}")
    return operand.bits == values[1]


def _emit_wgmma(emitter: BlockEmitter, number: int, instruction: Instruction, found: re.Match[str]) -> None:
    try:
        columns, form = wgmma_form(found)
    except ValueError as error:
        raise emitter.unsupported(instruction, str(error)) from error
    if instruction.guard is not None:
        raise emitter.unsupported(instruction, "under a guard")
    operands = instruction.operands
    in_registers = len(operands) > 1 and isinstance(operands[1], Vector)
    has_signs, is_half = form.c != "s32", ELEMENT_BITS[form.a] == 16
    if len(operands) != 4 + 2 * has_signs + is_half * (2 - in_registers):
        raise emitter.unsupported(instruction, "wrong number of operands")
    shape = Shape(
        columns,
        form,
        in_registers,
        has_signs and _flag(emitter, instruction, operands[4], (1, -1)),
        has_signs and _flag(emitter, instruction, operands[5], (1, -1)),
        is_half and not in_registers and _flag(emitter, instruction, operands[6], (0, 1)),
        is_half and _flag(emitter, instruction, operands[-1], (0, 1)),
    )
    accumulators = _vector(emitter, instruction, operands[0], shape.registers)
    arguments = [
        emitter.source(operands[3], "pred", instruction),
        emitter.source(operands[2], "b64", instruction),
    ]
    if in_registers:
        fragment = _vector(emitter, instruction, operands[1], 4)
        arguments += [emitter.read(register) for register in fragment]
    else:
        arguments.append(emitter.source(operands[1], "b64", instruction))
    arguments += [emitter.read(register) for register in accumulators]
    function = multiply_async(emitter.site(instruction), shape)
    emitter.effect(number, instruction, [*accumulators], function, arguments)


def check_products(emitter: BlockEmitter, instruction: Instruction) -> None:
    """Emit a look at accumulators that an instruction reads: their wgmma has to have been waited for. Moves may be."""
    accumulators, opcode = emitter.context.accumulators, instruction.opcode
    held = [register for register in instruction.reads if register in accumulators] if accumulators else []
    is_move = opcode.startswith("mov.") and all(isinstance(item, Register) for item in instruction.operands)
    if not held or is_move or opcode.startswith((WGMMA, WGMMA_WAIT)):
        return
    look = emitter.context.bind(require_finished(emitter.site(instruction)), "F")
    names = [emitter.read(register) for register in held]
    if instruction.guard is None:
        emitter.emit(f"{look}(L, {', '.join(names)})")
        return
    mask, guard = emitter.temporary(), emitter.read(instruction.guard)
    emitter.emit(f"{mask} = L.sub({guard}, {instruction.guard_negated})")
    cut = ", ".join(f"{mask}.cut({name})" for name in names)
    emitter.emit(f"if {mask} is not None: {look}({mask}.lanes, {cut})")


def wgmma_form(found: re.Match[str]) -> tuple[int, Form]:
    """(N, types) of a wgmma that ``WGMMA_FORM`` found. Raises ValueError for what does not exist, or has a wrong N."""
    columns, depth = int(found.group(1)), int(found.group(2))
    c, a, b, last = found.groups()[2:]
    is_integer = c == "s32"
    exists = c in _ACCUMULATORS[a] and depth * ELEMENT_BITS[a] == _ROW_BITS
    exists &= a == b or any(a in mixed and b in mixed for mixed in (_BYTES, _SMALL_FLOATS))
    exists &= last == (".and.popc" if a == "b1" else ".satfinite" if is_integer and last else None)
    if not exists:
        raise ValueError("there is no such form")
    if columns % 8 or not 8 <= columns <= 256 or (is_integer and columns > 32 and columns % 16):
        more = ", of integers above 32 one of 16" if is_integer else ""
        raise ValueError(f"N must be a multiple of 8 from 8 to 256{more}")
    return columns, Form(a, b, c, last == ".satfinite", "and" if a == "b1" else "", is_warpgroup=True)


def _vector(emitter: BlockEmitter, instruction: Instruction, operand: Operand | None, count: int) -> list[Register]:
    items = operand.items if isinstance(operand, Vector) else (operand,)
    found = [item for item in items if isinstance(item, Register) and item.kind == "b32"]
    if len(found) != count or len(items) != count:
        raise emitter.unsupported(instruction, f"expected {count} 32-bit registers")
    return found


def _emit_wait(emitter: BlockEmitter, number: int, instruction: Instruction) -> None:
    """The operands are the registers that may hold results (see accumulators.py) and the count of open groups."""
    if instruction.guard is not None or len(instruction.operands) != 2:
        raise emitter.unsupported(instruction, "under a guard, or with these operands")
    held, groups = instruction.operands
    if not isinstance(held, Vector) or not isinstance(groups, Immediate):
        raise emitter.unsupported(instruction, "operand form not understood")
    registers = [item for item in held.items if isinstance(item, Register)]
    arguments = [emitter.read(register) for register in registers]
    emitter.effect(number, instruction, [*registers], wait_wgmma(groups.bits), arguments)
