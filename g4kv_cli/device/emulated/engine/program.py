"""A kernel bound to the library: tables of blocks and instructions, and the first frame of its warps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..interpreter.emit import RESERVED_SHARED, KernelContext
from ..ptx.flow import Flow
from ..ptx.ordering import learns, manner
from .frame import Frame, lay_out
from .library import Library
from .lower import Lowering, lower_basic
from .lower_atomics import lower_atomic
from .lower_calls import lower_calls
from .lower_hopper import lower_clusters, lower_hopper
from .lower_memory import lower_memory
from .lower_products import lower_products
from .lower_tensor_maps import lower_tensor_maps
from .lower_warp import lower_warp
from .operations import SLOT_BYTES, Constant, Lowered, LoweredBlock, NotLowered, Operation, Parameter, Slot, Variable
from .order_trace import flags_of
from .pieces import cut_pieces, mixes_in_shared, runs_together
from .structures import BLOCK, BLOCK_ENDS, FIELDS, INSTRUCTION

FAMILIES = (
    *(lower_basic, lower_memory, lower_atomic, lower_warp, lower_products),
    *(lower_hopper, lower_tensor_maps, lower_clusters, lower_calls),
)
COPIES_EACH = 512
"""Executed cp.async of a warp that may wait to be completed."""


def lower(context: KernelContext, flow: Flow, in_order: bool = False) -> Lowered:
    """Lower a kernel whose flow keeps every multiply by itself; ``in_order``: its warps and blocks make their accesses
    in the interpreter's order in any case. Raises NotLowered with all that is missing."""
    lowering = Lowering(context, flow)
    if RESERVED_SHARED in context.shared_offsets:
        lowering.missing["shared memory that the system clears"] = None
    together = in_order or runs_together(flow) or mixes_in_shared(flow, context.extents)
    if together:
        cut_pieces(flow)
    blocks = [lowering.block(block, FAMILIES) for block in flow.blocks]
    if together and lowering.is_asynchronous:
        lowering.missing["asynchronous work beside accesses whose order matters"] = None
    if lowering.missing:
        raise NotLowered(*lowering.missing)
    index, crossing = flow.register_index, 0
    for block in flow.blocks:
        crossing |= block.live_in | block.live_out
        for register in block.final.reads if block.final is not None else ():
            crossing |= 1 << index[register]  # what ends a block is read from the frame
    return Lowered(
        context.sites.kernel,
        blocks,
        flow.entry,
        {register: number for register, number in index.items() if crossing >> number & 1},
        [(block.live_in | block.live_out | block.defined) & crossing for block in flow.blocks],
        flow.blocks[flow.entry].live_in != 0,
        lowering.site_count,
        lowering.sites,
        lowering.within,
        lowering.granule_shift,
        _has(blocks, "copy_async"),
        _has(blocks, "atomic_shared", "atomic_generic"),
        _has(blocks, "wgmma_multiply", "wgmma_form"),
        _has(blocks, "store_tensor", "store_bytes"),
        lowering.is_asynchronous,
        any(
            learns(each.opcode) and not lowering.read.isdisjoint(each.writes)
            for block in flow.blocks
            for each in block.body
        ),
        together,
        context.local_bytes,
        list(lowering.calls.values()),
        lowering.atomic_forms,
        lowering.reads_clock,
        lowering.constants,
    )


def _has(blocks: Sequence[LoweredBlock], *names: str) -> bool:
    return any(operation.handler.startswith(names) for block in blocks for operation in block.operations)


class Program:
    """What the engine runs: built once a kernel and process."""

    def __init__(self, kernel: Lowered, library: Library) -> None:
        self.name = kernel.name
        self.entry = kernel.entry
        self.site_count = kernel.site_count
        self.sites, self.within = kernel.sites, kernel.within
        self.trace_flags = flags_of(kernel.sites)
        scopes = [manner(site.opcode, False) for site in kernel.sites if ".shared" not in site.opcode]
        self.has_block_scope = any(scope.in_block for scope in scopes)
        self.has_cluster_scope = any(scope.in_cluster for scope in scopes)
        self.writes_too_much = False
        """Whether there was no room for what orders a launch's accesses."""
        self.granule_shift = kernel.granule_shift
        self.copies_each = COPIES_EACH if kernel.uses_copies else 0
        self.has_shared_atomics = kernel.has_shared_atomics
        self.uses_wgmma = kernel.uses_wgmma
        self.uses_bulk_stores = kernel.uses_bulk_stores
        self.is_asynchronous = kernel.is_asynchronous
        self.learns = kernel.learns
        self.runs_together = kernel.runs_together
        self.reads_clock = kernel.reads_clock
        is_ordered = kernel.runs_together or self.scope_may_end(1) or kernel.reads_clock
        self.runs_apart = not is_ordered and not kernel.calls and len(kernel.atomic_forms) < 2
        """Whether several threads may run its blocks."""
        self.may_mix_atomics = len(kernel.atomic_forms) > 1 and not kernel.runs_together
        """Whether atomics of several kinds may meet in global memory, whose order this does not keep."""
        self.mixes_atomics = False
        """Whether a launch was seen to do so."""
        self.local_bytes = kernel.local_bytes
        self.calls = kernel.calls
        operations = [operation.handler for block in kernel.blocks for operation in block.operations]
        self._calls_each = operations.count("call") - operations.count("local_memory")  # not those of printf
        self._instructions = sum(block.size for block in kernel.blocks)
        self.clears_frames = kernel.reads_unset_registers
        self.most_stores = max(block.store_count for block in kernel.blocks)
        self.most_accesses = max(block.store_count + block.load_count for block in kernel.blocks)
        self.shares = False
        """Whether threads of a launch read what others of it stored, in memory that they also store to."""
        frame = lay_out(kernel)
        self.frame_bytes, self.image_bytes = frame.nbytes, frame.image_bytes
        self.stands_at = [block.stands_at for block in kernel.blocks]
        self.loops = 0
        """Loops in which threads may wait for others."""
        self._code: list[npt.NDArray[Any]] = []
        pool: list[int] = []
        self.blocks = np.zeros(len(kernel.blocks), BLOCK)
        for number, block in enumerate(kernel.blocks):
            self._bind(number, block, frame, library, pool)
        self.pool = np.array(pool or [0], np.int32)
        """Fields of instructions that have more than FIELDS."""
        self._image = np.zeros(frame.image_bytes, np.uint8)
        self._late: list[tuple[npt.NDArray[Any], Parameter | Variable]] = []
        for slot in kernel.constants:
            at = frame.shared[slot]
            view = self._image[at : at + SLOT_BYTES[slot.kind]].view(np.uint64 if slot.kind == "b64" else np.uint32)
            if isinstance(slot.key, Constant):
                view[:] = slot.key.bits
            elif isinstance(slot.key, Parameter | Variable):
                self._late.append((view, slot.key))

    def scope_may_end(self, cluster_blocks: int) -> bool:
        """Whether it has accesses of which the scope ends with their block, in clusters of so many blocks."""
        return self.has_block_scope or (self.has_cluster_scope and cluster_blocks == 1)

    def pays(self, warps: int) -> bool:
        """Whether so many warps are run sooner here than by the interpreter, loops left aside: it executes an
        instruction for all of them in about the time of one call."""
        return warps * self._calls_each <= self._instructions

    def _bind(self, number: int, block: LoweredBlock, frame: Frame, library: Library, pool: list[int]) -> None:
        row = self.blocks[number]
        for form in ("full", "masked"):
            row[form] = self._table(resolve(block.operations, number, frame, form == "masked"), library, pool)
        successors = (*block.successors, 0, 0)
        row["end"], row["size"], row["site"] = BLOCK_ENDS[block.end], block.size, block.site
        row["first"], row["second"], row["stores"] = successors[0], successors[1], block.store_count
        row["loads"] = block.load_count
        if block.look is not None:
            self.loops += 1
            row["waits"] = self.loops
            looks = [Operation(f"look_{slot.kind}", [slot], ()) for slot in block.look]
            row["look"] = self._table(resolve(looks, number, frame, False), library, pool)
        row["guard"] = frame.place(number, block.guard) if block.guard is not None else 0
        for name, operand in (("barrier", block.barrier), ("threads", block.threads)):
            row[name] = operand if isinstance(operand, int) else ~frame.place(number, operand)
        if block.address is not None:
            slot, row["is_wide"], row["offset"] = block.address
            row["address"] = frame.place(number, slot)

    def _table(self, code: Sequence[tuple[str, list[int]]], library: Library, pool: list[int]) -> int:
        """The address of instructions that are kept."""
        table = np.zeros(len(code) + 1, INSTRUCTION)
        run, field = table["run"], table["field"]
        for place, (handler, fields) in enumerate(code):
            run[place] = library.handler(handler)
            if len(fields) > FIELDS:
                fields, more = [*fields[: FIELDS - 1], len(pool)], fields[FIELDS - 1 :]
                pool.extend(more)
            field[place, : len(fields)] = fields
        self._code.append(table)
        return int(table.ctypes.data)

    def image(self, parameters: bytes, symbols: Sequence[int]) -> npt.NDArray[np.uint8]:
        """The first frame of a launch's warps. The array is used again by the next launch."""
        for view, key in self._late:
            if isinstance(key, Parameter):
                raw = parameters[key.begin : key.begin + key.nbytes]
                value = int.from_bytes(raw, "little", signed=key.is_signed)
            else:
                value = symbols[key.number] + key.offset
            view[:] = value & (0xFFFFFFFFFFFFFFFF if view.dtype.itemsize == 8 else 0xFFFFFFFF)
        return self._image


def resolve(operations: Sequence[Operation], block: int, frame: Frame, is_masked: bool) -> list[tuple[str, list[int]]]:
    """Handlers with frame offsets for one block. Where lanes elsewhere may have values in a place that is written
    (``is_masked``, or under a guard), the result goes to scratch and is blended in."""
    code: list[tuple[str, list[int]]] = []
    opened = 0
    local, shared = frame.local[block], frame.shared
    for operation in operations:
        fields: list[int] = []
        blends: list[tuple[str, list[int]]] = []
        for number, item in enumerate(operation.fields):
            if not isinstance(item, Slot):
                fields.append(item)
                continue
            place = local.get(item, -1)
            is_shared = place < 0
            if is_shared:
                place = shared[item]
            if number in operation.outs and (operation.is_guarded or (is_masked and is_shared)):
                scratch = frame.scratch + SLOT_BYTES["b64"] * len(blends)
                blends.append((f"blend_{item.kind}", [place, scratch]))
                place = scratch
            fields.append(place)
        if operation.handler == "guard":
            opened = len(code)
        elif operation.handler == "unguard":
            code[opened][1][2] = len(code) - opened - 1  # what a warp without a lane skips
        code.append((operation.handler, fields))
        code.extend(blends)
    return code
