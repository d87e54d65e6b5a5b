"""Sets of lanes that execute together, and the chunk of a launch that they are of.

A *lane* is a thread slot of a chunk of whole thread blocks; every block is padded to whole warps. Of the chunk and its
launch (interpreter/chunk.py and run.py) there stands here what the rooms above use; what belongs to one of these rooms
(shared memory, barriers, the race check, ...) is ``Any``, for each room knows its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..ptx.sites import Site
from .heap import Heap
from .memory import LOCAL_SHIFT, LOCAL_WINDOW, Allocation, DeviceMemory, Views

WARP = 32
Array = npt.NDArray[Any]
Index = npt.NDArray[np.int64]
Extent = tuple[int, int, int]


class WarpFrame:
    """The lanes of a set laid out as [warps, 32], for operations across the lanes of a warp."""

    def __init__(self, lanes: LaneSet) -> None:
        index = lanes.index
        count = lanes.count
        self.is_whole = bool(
            count % WARP == 0
            and count
            and not (index[::WARP] % WARP).any()
            and (index[WARP - 1 :: WARP] - index[::WARP] == WARP - 1).all()
        )
        self.present: npt.NDArray[np.bool_] | None = None
        self.position: Index | None = None
        if self.is_whole:
            self.rows = count // WARP
            return
        warps, row = np.unique(index // WARP, return_inverse=True)
        self.rows = warps.size
        self.position = (row.reshape(-1) * WARP + index % WARP).astype(np.int64)
        self.present = np.zeros((self.rows, WARP), np.bool_)
        self.present.reshape(-1)[self.position] = True

    def spread(self, values: Array) -> Array:
        """(lanes,) or (1,) -> (warps, 32); absent lanes hold zero."""
        if values.shape[0] == 1:
            return np.broadcast_to(values, (self.rows, WARP))
        if self.position is None:
            return values.reshape(self.rows, WARP)
        out = np.zeros(self.rows * WARP, values.dtype)
        out[self.position] = values
        return out.reshape(self.rows, WARP)

    def collect(self, table: Array) -> Array:
        """(warps, 32) -> (lanes,)."""
        flat = table.reshape(-1)
        return flat if self.position is None else flat.take(self.position)

    @cached_property
    def present_bits(self) -> npt.NDArray[np.uint32]:
        """Present lanes of each warp as a bit mask, shape (warps,)."""
        if self.present is None:
            return np.full(self.rows, 0xFFFFFFFF, np.uint32)
        return pack_lanes(self.present)


_LANE_BITS = (np.uint64(1) << np.arange(WARP, dtype=np.uint64)).astype(np.uint32)


def pack_lanes(flags: Array) -> npt.NDArray[np.uint32]:
    """(warps, 32) bool -> (warps,) bit masks."""
    return np.packbits(np.ascontiguousarray(flags), axis=1, bitorder="little").view("<u4").reshape(-1)


def unpack_lanes(masks: Array) -> npt.NDArray[np.bool_]:
    """(warps, ...) bit masks -> (warps, ..., 32) bool."""
    return np.asarray((masks[..., None] & _LANE_BITS) != 0, np.bool_)


def distinct_pairs(first: Index, second: Index) -> list[tuple[int, int]]:
    """The pairs that lanes give, in order, once each."""
    if (first == first[0]).all() and (second == second[0]).all():
        return [(int(first[0]), int(second[0]))]
    return sorted(set(zip(first.tolist(), second.tolist(), strict=True)))


class LaneSet:
    """Lanes of one chunk, ascending; what instructions ask about threads is computed on first use."""

    def __init__(self, chunk: ChunkState, index: Index) -> None:
        self.chunk = chunk
        self.index = index
        self.count = index.size

    def subset(self, position: Index) -> LaneSet:
        """The lanes at these positions of the set."""
        return LaneSet(self.chunk, self.index.take(position))

    def repeated(self, count: int) -> LaneSet:
        """Each lane so many times."""
        return LaneSet(self.chunk, np.repeat(self.index, count))

    @cached_property
    def frame(self) -> WarpFrame:
        """Warp layout."""
        return WarpFrame(self)

    @cached_property
    def block_slot(self) -> Index:
        """Block number inside the chunk."""
        return self.index // self.chunk.lanes_per_block

    @cached_property
    def thread(self) -> Index:
        """Linear thread number inside the block."""
        return self.index % self.chunk.lanes_per_block

    @cached_property
    def linear_block(self) -> Index:
        """Linear block number in the grid; (1,) if the chunk is one block."""
        ids = self.chunk.block_ids
        return ids if ids.size == 1 else ids.take(self.block_slot)

    @cached_property
    def local_window(self) -> Array:
        """Where each lane's local memory begins among generic addresses, uint64."""
        number = self.linear_block * self.chunk.threads + self.thread
        of_thread = (number % (1 << LOCAL_SHIFT)).astype(np.uint64) << np.uint64(LOCAL_SHIFT)
        window: Array = of_thread + np.uint64(LOCAL_WINDOW)
        return window

    @cached_property
    def shared_base(self) -> Index:
        """Where the lane's block begins in the chunk's shared memory; (1,) if the chunk is one block."""
        if self.chunk.block_count == 1:
            return np.zeros(1, np.int64)
        return self.block_slot * self.chunk.shared_stride

    @cached_property
    def warps(self) -> Index:
        """Numbers in the chunk of the warps that have lanes here, ascending."""
        numbers = self.index // WARP
        return numbers[np.flatnonzero(np.diff(numbers, prepend=-1))]

    @cached_property
    def tid(self) -> tuple[Array, Array, Array]:
        """%tid.x, .y, .z as uint32."""
        x, y, _ = self.chunk.block_dim
        thread = self.thread
        if y == 1 and self.chunk.block_dim[2] == 1:
            zero = np.zeros(1, np.uint32)
            return thread.astype(np.uint32), zero, zero
        return (
            (thread % x).astype(np.uint32),
            (thread // x % y).astype(np.uint32),
            (thread // (x * y)).astype(np.uint32),
        )

    @cached_property
    def ctaid(self) -> tuple[Array, Array, Array]:
        """%ctaid.x, .y, .z as uint32."""
        x, y, z = self.chunk.grid_dim
        block = self.linear_block
        zero = np.zeros(1, np.uint32)
        return (
            (block % x).astype(np.uint32) if x > 1 else zero,
            (block // x % y).astype(np.uint32) if y > 1 else zero,
            (block // (x * y)).astype(np.uint32) if z > 1 else zero,
        )

    @cached_property
    def cluster_rank(self) -> Array:
        """%cluster_ctarank as uint32."""
        return (self.block_slot % self.chunk.cluster_blocks).astype(np.uint32)

    @cached_property
    def cluster_ctaid(self) -> tuple[Array, ...]:
        """%cluster_ctaid.x, .y, .z as uint32."""
        return tuple(at % np.uint32(size) for at, size in zip(self.ctaid, self.chunk.run.cluster, strict=True))

    @cached_property
    def clusterid(self) -> tuple[Array, ...]:
        """%clusterid.x, .y, .z as uint32."""
        return tuple(at // np.uint32(size) for at, size in zip(self.ctaid, self.chunk.run.cluster, strict=True))

    @cached_property
    def laneid(self) -> Array:
        """%laneid as uint32."""
        return (self.index % WARP).astype(np.uint32)

    @cached_property
    def warpid(self) -> Array:
        """%warpid as uint32."""
        return (self.thread // WARP).astype(np.uint32)

    def sub(self, guard: Array, negated: bool) -> Masked | None:
        """The lanes where a guard holds; None if there are none."""
        if guard.shape[0] == 1:
            return Masked(self, None) if bool(guard[0]) != negated else None
        position = np.flatnonzero(~guard if negated else guard)
        if position.size == 0:
            return None
        if position.size == self.count:
            return Masked(self, None)
        return Masked(self.subset(position), position)


class Masked:
    """The lanes of a predicated instruction: cuts its operands and merges its results."""

    __slots__ = ("lanes", "position")

    def __init__(self, lanes: LaneSet, position: Index | None) -> None:
        self.lanes = lanes
        self.position = position

    def cut(self, values: Array) -> Array:
        """Operand values of the active lanes."""
        if self.position is None or values.shape[0] == 1:
            return values
        return values.take(self.position)

    def merge(self, new: Array, old: Array, count: int) -> Array:
        """``old`` with the active lanes' results put in."""
        if self.position is None:
            return new
        out = np.empty(count, old.dtype)
        out[:] = old
        out[self.position] = new
        return out


class Collector(Protocol):
    """Takes the faults of a launch (reports.py)."""

    stale_sites: frozenset[int]

    def add(
        self,
        kind: str,
        message: str,
        site: Site,
        lanes: LaneSet,
        position: int,
        count: int = 1,
        address: int | None = None,
        label: str | None = None,
        offset: int | None = None,
    ) -> None: ...


class Stores(Protocol):
    """Takes the stores of a launch (store_log.py)."""

    def add(self, units: Index, shift: int) -> None: ...


class KernelState(Protocol):
    """The kernel that runs. ``program`` is what the engine runs, or None; ``blocks`` what the interpreter does."""

    @property
    def name(self) -> str: ...
    @property
    def sites(self) -> tuple[Site, ...]: ...
    @property
    def blocks(self) -> tuple[Any, ...]: ...
    @property
    def entry(self) -> int: ...
    @property
    def initial_registers(self) -> tuple[Any, ...]: ...
    @property
    def parameter_loads(self) -> tuple[tuple[int, int, bool, int], ...]: ...
    @property
    def local_bytes(self) -> int: ...
    @property
    def granule_shift(self) -> int: ...
    @property
    def is_asynchronous(self) -> bool: ...
    @property
    def zeroed_shared(self) -> range: ...
    @property
    def program(self) -> Any: ...
    def shared_total(self, dynamic_shared_bytes: int) -> int: ...


class RunState(Protocol):
    """One launch: what all its chunks share."""

    @property
    def kernel(self) -> KernelState: ...
    @property
    def memory(self) -> DeviceMemory: ...
    @property
    def heap(self) -> Heap: ...
    @property
    def symbols(self) -> Sequence[npt.NDArray[np.uint64]]: ...
    @property
    def stale_sites(self) -> frozenset[int]: ...
    @property
    def collector(self) -> Collector: ...
    @property
    def stores(self) -> Stores: ...
    @property
    def hints(self) -> list[Allocation]: ...
    @property
    def grid(self) -> Extent: ...
    @property
    def block(self) -> Extent: ...
    @property
    def cluster(self) -> Extent: ...
    @property
    def cluster_blocks(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...
    @property
    def parameter_bytes(self) -> int: ...
    @property
    def parameter_views(self) -> Views: ...
    @property
    def owned_reads(self) -> Sequence[Any]: ...
    @property
    def in_front(self) -> npt.NDArray[np.int64]: ...
    @property
    def printed(self) -> list[str]: ...
    @property
    def accesses(self) -> Any: ...
    @property
    def dynamic_shared(self) -> npt.NDArray[np.uint32]: ...
    @property
    def waits_on_shared(self) -> bool: ...
    @property
    def learns_of(self) -> dict[bool, bool]: ...
    @property
    def order(self) -> Any: ...
    @property
    def watches_changes(self) -> bool: ...
    @property
    def undo(self) -> Any: ...
    @property
    def fill(self) -> Any: ...
    @property
    def changes(self) -> int: ...
    def changed(self) -> None: ...
    def note_addresses(self, units: Index) -> None: ...
    def count_instructions(self, block: Any, lanes: int, group: Any) -> None: ...


class ChunkState(Protocol):
    """Whole thread blocks that run together."""

    @property
    def run(self) -> RunState: ...
    @property
    def block_ids(self) -> npt.NDArray[np.int64]: ...
    @property
    def block_count(self) -> int: ...
    @property
    def cluster_blocks(self) -> int: ...
    @property
    def block_dim(self) -> Extent: ...
    @property
    def grid_dim(self) -> Extent: ...
    @property
    def threads(self) -> int: ...
    @property
    def lanes_per_block(self) -> int: ...
    @property
    def lane_count(self) -> int: ...
    @property
    def shared_stride(self) -> int: ...
    @property
    def live_count(self) -> int: ...
    @property
    def alive(self) -> npt.NDArray[np.bool_] | None: ...
    @property
    def full(self) -> LaneSet: ...
    @property
    def shared(self) -> Any: ...
    @property
    def local(self) -> Any: ...
    @property
    def copies(self) -> Any: ...
    @property
    def barriers(self) -> Any: ...
    @property
    def mbarriers(self) -> Any: ...
    @property
    def bulk_copies(self) -> Any: ...
    @property
    def clusters(self) -> Any: ...
    @property
    def wgmmas(self) -> Any: ...
    @property
    def races(self) -> Any: ...
    @property
    def has_clocks(self) -> bool: ...
    @property
    def order(self) -> Any: ...
    def exchanged(self, lanes: Any, mask: Any) -> None: ...
    def full_barrier(self, complete: Any) -> None: ...
    @property
    def read_rules(self) -> Any: ...
    @property
    def early_reads(self) -> Any: ...
    def coordinates(self, lane: int) -> tuple[Extent, Extent]: ...
    def alive_flags(self) -> npt.NDArray[np.bool_]: ...
    def wait_at(self, block: int, group: Any) -> None: ...
