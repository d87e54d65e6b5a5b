"""A PTX kernel as Python functions, one for each basic block, and what the scheduler must know about them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..faults import UnsupportedKernel, UnsupportedOpcode
from ..ptx.accumulators import accumulator_registers
from ..ptx.blocks import BasicBlock
from ..ptx.flow import build_flow
from ..ptx.instruction import Immediate, Register, Symbol, TensorAddress, Vector
from ..ptx.origins import shared_extents
from ..ptx.parse import ParsedKernel, ParsedModule
from ..ptx.parse_body import located
from ..ptx.sites import Site
from ..ptx.validated import validated_loads
from ..warp.barriers import BarrierCall
from .emit import (
    ENVIRONMENT_HALVES,
    GRID_WORKSPACE,
    RESERVED_SHARED,
    RESERVED_SHARED_BYTES,
    BlockEmitter,
    KernelContext,
    constant_array,
)
from .emit_atomic import emit_atomic
from .emit_basic import emit_basic
from .emit_calls import emit_calls
from .emit_clusters import check_cluster_wait, emit_clusters
from .emit_hopper import check_products, emit_hopper, phase_operands
from .emit_matrix import emit_matrix
from .emit_memory import emit_memory
from .emit_tensor_maps import emit_tensor_maps
from .emit_warp import emit_warp

_BARRIER = re.compile(r"(?:bar(?:\.cta)?|barrier(?:\.cta)?)\.sync(?:\.aligned)?")
_REDUCTION = re.compile(r"(?:bar(?:\.cta)?|barrier(?:\.cta)?)\.red\.(?:popc|and|or)(?:\.aligned)?\.(?:u32|pred)")

EMITTERS = (
    *(emit_basic, emit_memory, emit_warp, emit_atomic, emit_hopper, emit_tensor_maps, emit_clusters, emit_matrix),
    emit_calls,
)


@dataclass(frozen=True)
class CompiledBlock:
    """One basic block ready to run; ``live_in`` are register numbers, ``defined`` a bit set of those it may change."""

    function: Callable[..., Any]
    end: str
    successors: tuple[int, ...]
    live_in: tuple[int, ...]
    defined: int
    size: int
    site: Site | None
    barrier: BarrierCall | None
    waits: Site | None
    """Where a loop that begins here may wait for other threads."""


@dataclass(frozen=True, eq=False)
class Translation:
    """What the interpreter runs of a kernel."""

    local_bytes: int
    blocks: tuple[CompiledBlock, ...]
    entry: int
    initial_registers: tuple[Any, ...]
    sites: tuple[Site, ...]
    parameter_loads: tuple[tuple[int, int, bool, int], ...]
    granule_shift: int
    is_asynchronous: bool
    """Whether it uses mbarriers, bulk copies, wgmma or clusters."""
    zeroed_shared: range
    """Shared bytes that the system keeps, and clears at the start of a block."""


def _bits(flags: int) -> tuple[int, ...]:
    """Numbers of the bits that are set."""
    found = []
    while flags:
        lowest = flags & -flags
        found.append(lowest.bit_length() - 1)
        flags ^= lowest
    return tuple(found)


def _align(offset: int, align: int) -> int:
    return -(-offset // align) * align


@dataclass(frozen=True)
class Layout:
    """Where a kernel's variables lie: ``context`` knows their offsets; dynamic shared memory is behind the static."""

    context: KernelContext
    static_bytes: int
    dynamic_offset: int


def lay_out(module: ParsedModule, kernel: ParsedKernel) -> Layout:
    """A fresh context with the offsets of all variables and parameters."""
    context = KernelContext(kernel.name)
    context.refused = module.refused
    static_bytes, dynamic_offset = _layout_variables(context, module, kernel)
    for parameter in kernel.parameters:
        context.parameter_offsets[parameter.name] = parameter.offset
    return Layout(context, static_bytes, dynamic_offset)


def note_extents(context: KernelContext, module: ParsedModule, kernel: ParsedKernel) -> None:
    """Find out where in shared memory accesses have to stay, where there is more than one variable."""
    variables = {**module.variables, **kernel.variables}
    sizes = {name: variables[name].nbytes or None for name in context.shared_offsets if name in variables}
    if len(sizes) > 1:
        offsets = {name: context.shared_offsets[name] for name in sizes}
        context.extents = shared_extents(kernel, offsets, sizes)


def translate(module: ParsedModule, kernel: ParsedKernel) -> Translation:
    """Translate one kernel. Raises UnsupportedKernel with all that is not known of it."""
    problems = list(kernel.problems)
    try:
        flow = build_flow(kernel)
        context = lay_out(module, kernel).context
    except UnsupportedOpcode as error:
        raise _refusal(kernel, [*problems, error]) from error
    note_extents(context, module, kernel)
    context.validated = validated_loads(kernel)
    context.accumulators = accumulator_registers(each for block in flow.blocks for each in block.body)
    context.read = flow.reads
    emitters = [BlockEmitter(context, block, flow.register_index) for block in flow.blocks]
    source: list[str] = []
    for number, emitter in enumerate(emitters):
        emit_block(emitter, problems)
        source.append(f"def block_{number}(G):\n L = G.lanes; R = G.registers\n")
        source.extend(f" {line}\n" for line in emitter.lines)
    if problems:
        raise _refusal(kernel, problems)
    barriers = [_barrier_call(context, block) for block in flow.blocks]
    firsts = [block.final or (block.body[0] if block.body else None) for block in flow.blocks]
    sites = [context.sites.add(first) if first is not None else None for first in firsts]
    exec(compile("".join(source), f"<{kernel.name}>", "exec"), context.namespace)
    blocks = []
    for number, block in enumerate(flow.blocks):
        successors = block.successors
        if block.end == "branch" and block.final is not None and block.final.guard_negated:
            successors = (successors[1], successors[0])
        blocks.append(
            CompiledBlock(
                context.namespace[f"block_{number}"],
                block.end,
                successors,
                _bits(block.live_in),
                block.defined & block.live_out,
                block.size,
                sites[number],
                barriers[number],
                context.sites.add(block.waits, True) if block.waits is not None else None,
            )
        )
    reserved = context.shared_offsets.get(RESERVED_SHARED)
    zeros = {kind: constant_array(0, kind) for kind in ("b16", "b32", "b64", "pred")}
    return Translation(
        context.local_bytes,
        tuple(blocks),
        flow.entry,
        tuple(zeros[register.kind] for register in flow.registers),
        tuple(context.sites.sites),
        tuple(context.parameter_loads),
        context.smallest_shared_shift,
        context.is_asynchronous,
        range(reserved, reserved + RESERVED_SHARED_BYTES) if reserved is not None else range(0),
    )


def _layout_variables(context: KernelContext, module: ParsedModule, kernel: ParsedKernel) -> tuple[int, int]:
    """Place shared and local variables; returns (static shared bytes, offset of dynamic shared memory)."""
    mentioned = {operand.name for operand in _symbols(kernel)}
    static_bytes = 0
    local_bytes = 0
    dynamic_align = 16
    dynamic: list[str] = []
    variables = {**module.variables, **kernel.variables}
    for name, variable in variables.items():
        if variable.space == "shared":
            if variable.external and variable.nbytes == 0:
                if name in mentioned:
                    dynamic.append(name)
                    dynamic_align = max(dynamic_align, variable.align)
            elif name in kernel.variables or name in mentioned:
                static_bytes = _align(static_bytes, variable.align)
                context.shared_offsets[name] = static_bytes
                static_bytes += variable.nbytes
        elif variable.space == "local":
            local_bytes = _align(local_bytes, variable.align)
            context.local_offsets[name] = local_bytes
            local_bytes += variable.nbytes
        elif name in module.variables:
            if name in mentioned:
                if variable.space == "const":
                    context.constant_variables.append((len(context.device_variables), variable.nbytes))
                context.device_variables.append(name)
        else:
            raise UnsupportedOpcode(f".{variable.space}", 0, f"variable {name} inside a kernel")
    if RESERVED_SHARED in mentioned:
        static_bytes = context.shared_offsets[RESERVED_SHARED] = _align(static_bytes, 128)
        static_bytes += RESERVED_SHARED_BYTES
    if not mentioned.isdisjoint(ENVIRONMENT_HALVES):
        context.device_variables.append(GRID_WORKSPACE)
    context.local_bytes = local_bytes
    dynamic_offset = _align(static_bytes, dynamic_align) if dynamic else static_bytes
    for name in dynamic:
        context.shared_offsets[name] = dynamic_offset
    return static_bytes, dynamic_offset


def _symbols(kernel: ParsedKernel) -> list[Symbol]:
    found: list[Symbol] = []
    for instruction in kernel.instructions:
        for operand in instruction.operands:
            inner = operand.address if isinstance(operand, TensorAddress) else operand
            base = getattr(inner, "base", inner)
            if isinstance(base, Symbol):
                found.append(base)
            elif isinstance(base, Vector):
                found.extend(item for item in base.items if isinstance(item, Symbol))
    return found


_WHOLE_FAMILIES = {
    **dict.fromkeys(
        ("tex", "tld4", "txq", "suld", "sust", "sured", "suq", "istypep"),
        "textures and surfaces are not emulated; read the memory itself",
    ),
    "tcgen05": "the tensor memory and matrix units of compute capability 10 are not emulated",
    "multimem": "memory of several devices is not emulated",
}


def _reason(opcode: str) -> str:
    """What to say of an opcode of which the whole family is unknown."""
    return _WHOLE_FAMILIES.get(opcode.split(".", 1)[0], "")


def _refusal(kernel: ParsedKernel, problems: list[UnsupportedOpcode]) -> UnsupportedKernel:
    """Every problem once a source line, in the order of the PTX."""
    distinct = {
        (one.opcode, one.reason, one.source_file, one.source_line or one.ptx_line): one for one in problems[::-1]
    }
    return UnsupportedKernel(kernel.name, sorted(distinct.values(), key=lambda one: one.ptx_line))


def emit_block(emitter: BlockEmitter, problems: list[UnsupportedOpcode]) -> None:
    """Emit all instructions of one block and its return value; ``problems`` takes what is not known."""
    for number, instruction in enumerate(emitter.block.body):
        try:
            check_products(emitter, instruction)
            if not any(emit(emitter, number, instruction) for emit in EMITTERS):
                raise emitter.unsupported(instruction, _reason(instruction.opcode))
        except UnsupportedOpcode as error:
            problems.append(located(error, instruction.location))
    try:
        _emit_result(emitter)
    except UnsupportedOpcode as error:
        final = emitter.block.final
        problems.append(located(error, final.location) if final is not None else error)


def _emit_result(emitter: BlockEmitter) -> None:
    final = emitter.block.final
    result = "None"
    if final is not None and emitter.block.end == "branch" and final.guard is not None:
        result = emitter.read(final.guard)
    elif final is not None and emitter.block.end == "barrier":
        result = _barrier_operands(emitter)
    elif final is not None and emitter.block.end == "phase":
        result = phase_operands(emitter, final)
    elif final is not None and emitter.block.end == "cluster":
        check_cluster_wait(emitter, final)
    elif final is not None and emitter.block.end == "warp":
        result = emitter.source(final.operands[0], "b32", final)
    emitter.write_back()
    emitter.emit(f"return {result}")


def _barrier_operands(emitter: BlockEmitter) -> str:
    final = emitter.block.final
    if final is None or not (_BARRIER.fullmatch(final.opcode) or _REDUCTION.fullmatch(final.opcode)):
        raise UnsupportedOpcode(final.opcode if final else "barrier", final.ptx_line if final else 0)
    if all(isinstance(operand, Immediate) for operand in final.operands):
        return "None"
    parts = [emitter.source(operand, "b32", final) for operand in final.operands]
    return f"({', '.join(parts)},)"


def _barrier_call(context: KernelContext, block: BasicBlock) -> BarrierCall | None:
    final = block.final
    if block.end != "barrier" or final is None:
        return None
    numbers = [operand.bits if isinstance(operand, Immediate) else None for operand in final.operands]
    if len(numbers) > 2:
        raise UnsupportedOpcode(final.opcode, final.ptx_line, "wrong number of operands")
    dynamic = any(isinstance(operand, Register | Symbol) for operand in final.operands)
    number = numbers[0] if numbers else 0
    threads = numbers[1] if len(numbers) > 1 else None
    return BarrierCall(number, threads, dynamic, context.sites.add(final))
