"""Emitters of warp-wide opcodes: shfl, vote, match, redux, elect, activemask, matrices, mma and cp.async."""

from __future__ import annotations

import re

from ..arithmetic.packed16 import Format
from ..memory.async_copy import commit_group, copy_async, wait_group
from ..ptx.flow import CONTRIBUTE, READ_REDUCTION
from ..ptx.instruction import Immediate, Instruction, Operand, PredicatePair, Register, Vector
from ..ptx.mma_batches import CHECKED, MULTIPLY, WHOLE_WARP
from ..warp.barriers import contribute_to_barrier, read_reduction, signal_barrier
from ..warp.matrix_ops import load_matrices, multiply, store_matrices, transpose_matrix, whole_warp
from ..warp.warp_ops import active_mask, elect, match, reduce_warp, shuffle, vote, warp_barrier
from .emit import BlockEmitter

SIGNAL = re.compile(r"(?:bar(?:\.cta)?|barrier(?:\.cta)?)\.arrive(?:\.aligned)?")
REDUCTION = re.compile(
    r"(?:bar(?:\.cta)?|barrier(?:\.cta)?)\.red\.(?:(popc)(?:\.aligned)?\.u32|(and|or)(?:\.aligned)?\.pred)"
)
SHUFFLE = re.compile(r"shfl\.sync\.(up|down|bfly|idx)\.b32")
VOTE = re.compile(r"vote\.sync\.(?:(all|any|uni)\.pred|(ballot)\.b32)")
MATCH = re.compile(r"match\.(any|all)\.sync\.b(32|64)")
REDUX = re.compile(r"redux\.sync\.(?:(add|min|max)\.([us])32|(and|or|xor)\.b32)")
MATRIX = re.compile(r"(ld|st)matrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16")
_MMA = re.compile(rf"(?:{re.escape(CHECKED)})?{MULTIPLY}")
COPY = re.compile(r"cp\.async\.(ca|cg)\.shared(?:::cta)?\.global(\.L2::cache_hint)?(?:\.L2::(?:64B|128B|256B))?")


def emit_warp(emitter: BlockEmitter, number: int, instruction: Instruction) -> bool:
    """Emit the instruction if it belongs here."""
    opcode = instruction.opcode
    for pattern, emit in (
        (SHUFFLE, _emit_shuffle),
        (VOTE, _emit_vote),
        (MATCH, _emit_match),
        (REDUX, _emit_redux),
        (MATRIX, _emit_matrix),
        (_MMA, _emit_mma),
        (COPY, _emit_copy),
    ):
        found = pattern.fullmatch(opcode)
        if found is not None:
            emit(emitter, number, instruction, found)
            return True
    operands = instruction.operands
    if opcode == "elect.sync":
        targets = _pair(emitter, instruction, operands[0])
        mask = emitter.source(operands[1], "b32", instruction)
        emitter.effect(number, instruction, targets, elect(emitter.site(instruction)), [mask])
    elif opcode == "movmatrix.sync.aligned.m8n8.trans.b16":
        value = emitter.source(operands[1], "b32", instruction)
        targets = [_register(emitter, instruction, operands[0])]
        emitter.effect(number, instruction, targets, transpose_matrix(emitter.site(instruction)), [value])
    elif opcode == WHOLE_WARP:
        emitter.effect(number, instruction, [], whole_warp(emitter.site(instruction)), [])
    elif opcode == "activemask.b32":
        emitter.effect(number, instruction, [_register(emitter, instruction, operands[0])], active_mask(), [])
    elif opcode == "bar.warp.sync":
        mask = emitter.source(operands[0], "b32", instruction)
        emitter.effect(number, instruction, [], warp_barrier(emitter.site(instruction)), [mask])
    elif SIGNAL.fullmatch(opcode) is not None and len(operands) == 2:
        values = [emitter.source(operand, "b32", instruction) for operand in operands]
        emitter.effect(number, instruction, [], signal_barrier(emitter.site(instruction)), values)
    elif opcode == CONTRIBUTE:
        values = [emitter.source(operands[0], "b32", instruction), emitter.source(operands[1], "pred", instruction)]
        emitter.effect(number, instruction, [], contribute_to_barrier(), values)
    elif opcode.startswith(READ_REDUCTION) and (reduction := REDUCTION.fullmatch(opcode[len(READ_REDUCTION) :])):
        values = [emitter.source(operands[1], "b32", instruction)]
        targets = [_register(emitter, instruction, operands[0])]
        emitter.effect(number, instruction, targets, read_reduction(reduction.group(1) or reduction.group(2)), values)
    elif opcode == "cp.async.commit_group":
        emitter.effect(number, instruction, [], commit_group(), [])
    elif opcode == "cp.async.wait_all":
        emitter.effect(number, instruction, [], wait_group(-1), [])
    elif opcode == "cp.async.wait_group" and isinstance(operands[0], Immediate):
        emitter.effect(number, instruction, [], wait_group(operands[0].bits), [])
    else:
        return False
    return True


def _register(emitter: BlockEmitter, instruction: Instruction, operand: Operand | None) -> Register | None:
    if operand is None or isinstance(operand, Register):
        return operand
    raise emitter.unsupported(instruction, "destination form not understood")


def _pair(emitter: BlockEmitter, instruction: Instruction, operand: Operand | None) -> list[Register | None]:
    if isinstance(operand, PredicatePair):
        return [operand.first, operand.second]
    return [_register(emitter, instruction, operand), None]


def is_dead(emitter: BlockEmitter, number: int, register: Register | None) -> bool:
    """Whether nobody reads the result of the block's instruction of this number."""
    if register is None:
        return True
    live_out = emitter.block.live_out >> emitter.index[register] & 1
    return emitter.last_use.get(register, number) == number and not live_out


def _emit_shuffle(emitter: BlockEmitter, number: int, instruction: Instruction, found: re.Match[str]) -> None:
    targets = _pair(emitter, instruction, instruction.operands[0])
    wants_predicate = not is_dead(emitter, number, targets[1])
    if not wants_predicate:
        targets[1] = None
    arguments = [emitter.source(operand, "b32", instruction) for operand in instruction.operands[1:]]
    if len(arguments) != 4:
        raise emitter.unsupported(instruction, "wrong number of operands")
    function = shuffle(emitter.site(instruction), found.group(1), wants_predicate)
    emitter.effect(number, instruction, targets, function, arguments)


def _emit_vote(emitter: BlockEmitter, number: int, instruction: Instruction, found: re.Match[str]) -> None:
    target, value, mask = instruction.operands
    arguments = [emitter.source(value, "pred", instruction), emitter.source(mask, "b32", instruction)]
    function = vote(emitter.site(instruction), found.group(1) or found.group(2))
    emitter.effect(number, instruction, [_register(emitter, instruction, target)], function, arguments)


def _emit_match(emitter: BlockEmitter, number: int, instruction: Instruction, found: re.Match[str]) -> None:
    target, value, mask = instruction.operands
    mode, bits = found.groups()
    pair = _pair(emitter, instruction, target)
    targets = pair if mode == "all" else pair[:1]
    arguments = [emitter.source(value, f"b{bits}", instruction), emitter.source(mask, "b32", instruction)]
    emitter.effect(number, instruction, targets, match(emitter.site(instruction), mode), arguments)


def _emit_redux(emitter: BlockEmitter, number: int, instruction: Instruction, found: re.Match[str]) -> None:
    target, value, mask = instruction.operands
    arguments = [emitter.source(operand, "b32", instruction) for operand in (value, mask)]
    operation = found.group(1) or found.group(3)
    function = reduce_warp(emitter.site(instruction), operation, found.group(2) == "s")
    emitter.effect(number, instruction, [_register(emitter, instruction, target)], function, arguments)


def _registers(emitter: BlockEmitter, instruction: Instruction, operand: Operand | None, count: int) -> list[Register]:
    items = operand.items if isinstance(operand, Vector) else (operand,)
    found = [item for item in items if isinstance(item, Register) and item.kind == "b32"]
    if len(found) != count or len(items) != count:
        raise emitter.unsupported(instruction, f"expected {count} 32-bit registers")
    return found


def _emit_matrix(emitter: BlockEmitter, number: int, instruction: Instruction, found: re.Match[str]) -> None:
    direction, matrices, transposed = found.group(1), int(found.group(2)), found.group(3) is not None
    site = emitter.site(instruction)
    first, second = instruction.operands
    if direction == "ld":
        targets: list[Register | None] = [*_registers(emitter, instruction, first, matrices)]
        base, _, offset = emitter.address(second, instruction)
        emitter.effect(number, instruction, targets, load_matrices(site, offset, matrices, transposed), [base])
        return
    base, _, offset = emitter.address(first, instruction)
    values = [emitter.read(register) for register in _registers(emitter, instruction, second, matrices)]
    emitter.effect(number, instruction, [], store_matrices(site, offset, matrices, transposed), [base, *values])


def _emit_mma(emitter: BlockEmitter, number: int, instruction: Instruction, found: re.Match[str]) -> None:
    k_halves = int(found.group(1)) // 8
    form: Format = "bf16" if found.group(2) == "bf16" else "f16"
    target, a, b, c = instruction.operands
    count = max(1, len(target.items) // 4) if isinstance(target, Vector) else 1
    targets = emitter.registers(instruction, target, 4 * count, "b32")
    arguments = [
        emitter.source(item, "b32", instruction)
        for operand, registers in ((a, 2 * k_halves), (b, k_halves), (c, 4))
        for item in emitter.items(instruction, operand, registers * count)
    ]
    site = None if instruction.opcode.startswith(CHECKED) else emitter.site(instruction)
    function = multiply(site, form, k_halves, count)
    emitter.effect(number, instruction, targets, function, arguments)


def _emit_copy(emitter: BlockEmitter, number: int, instruction: Instruction, found: re.Match[str]) -> None:
    operands = list(instruction.operands)
    if found.group(2) is not None:
        operands.pop()
    if len(operands) not in (3, 4) or not isinstance(operands[2], Immediate):
        raise emitter.unsupported(instruction, "operand form not understood")
    nbytes = operands[2].bits
    if nbytes not in ((16,) if found.group(1) == "cg" else (4, 8, 16)):
        raise emitter.unsupported(instruction, f"copy of {nbytes} bytes")
    destination, _, destination_offset = emitter.address(operands[0], instruction)
    source, _, source_offset = emitter.address(operands[1], instruction)
    size: Operand | None = operands[3] if len(operands) == 4 else Immediate(nbytes)
    source_bytes = emitter.source(size, "b32", instruction)
    shift = nbytes.bit_length() - 1
    emitter.context.smallest_shared_shift = min(emitter.context.smallest_shared_shift, shift)
    function = copy_async(emitter.site(instruction), destination_offset, source_offset, nbytes)
    emitter.effect(number, instruction, [], function, [destination, source, source_bytes])
