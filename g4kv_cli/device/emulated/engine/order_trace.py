"""What threads of a launch on the engine did with memory that several of them use, judged as the interpreter judges it.

The engine writes down accesses, fences, barriers and what else orders them (c/trace.h); here they are told to
checks/order.py and checks/global_races.py, in the order and in the company in which the interpreter would.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..checks.conflicts import ATOMIC, READ, WRITE
from ..checks.global_races import GlobalLog
from ..checks.order import ChunkOrder, Order, synchronise
from ..checks.shared_races import RaceLog
from ..ptx.ordering import WEAK, learns, manner
from ..ptx.sites import Site
from ..request import LaunchRequest
from ..state.lanes import WARP, LaneSet
from ..state.memory import GLOBAL_BASE, DeviceMemory

_EVENT = struct.Struct("<qiiiiIIq")


class _Event(NamedTuple):
    """``Event`` of ``c/trace.h``."""

    step: int
    kind: int
    site: int
    row: int
    size: int
    lanes: int
    members: int
    more: int


_KINDS = (
    *("read", "write", "atomic", "shared read", "shared write", "shared atomic", "fence", "exchange"),
    *("warp barrier", "exit", "barrier", "chunk"),
)
"""As in ``c/trace.h``."""
_LAST = {"exit": 1 << 30, "barrier": (1 << 30) + 1}
"""Where in a step what ends it comes."""
TRACE_BYTES = 1 << 26
"""What a launch may write down; the interpreter judges one with more."""


def flags_of(sites: Sequence[Site]) -> npt.NDArray[np.uint8]:
    """For each site, whether threads may meet by its accesses."""
    return np.array([manner(site.opcode, site.in_wait).strength > WEAK for site in sites] or [False], np.uint8)


class _Unsure(Exception):
    """What was written down does not say in which company an instruction was executed."""


class _Run:
    """What the checks ask of a launch."""

    def __init__(self, sites: Sequence[Site], collector: _Conflicts) -> None:
        self.kernel, self.collector = self, collector
        self.is_asynchronous = False
        self.waits_on_shared = any(
            ".global" not in site.opcode for site in sites if site.in_wait and learns(site.opcode)
        )
        learners = [site for site in sites if site.is_used and learns(site.opcode)]
        self.learns_of = {
            False: any(".shared" not in site.opcode for site in learners),
            True: any(".global" not in site.opcode for site in learners),
        }

    def note_addresses(self, units: npt.NDArray[np.int64]) -> None:
        """Nothing depends on them here."""


class _Chunk:
    """Blocks that ran together, as lanes know their chunk."""

    def __init__(self, run: _Run, request: LaunchRequest, order: Order, block_ids: npt.NDArray[np.int64]) -> None:
        self.run = run
        self.block_ids, self.block_count = block_ids, block_ids.size
        self.block_dim, self.grid_dim, self.threads = request.block, request.grid, request.threads
        self.cluster_blocks = 1
        self.lanes_per_block = -(-self.threads // WARP) * WARP
        self.lane_count = self.block_count * self.lanes_per_block
        self.has_clocks = False
        self.live_count = self.lane_count
        self.alive: npt.NDArray[np.bool_] = np.arange(self.lane_count) % self.lanes_per_block < self.threads
        self.full = LaneSet(self, np.arange(self.lane_count))  # type: ignore[arg-type]
        self.order = ChunkOrder(self, order)  # type: ignore[arg-type]
        shared_bytes = request.kernel.shared_total(request.dynamic_shared_bytes)
        self.shared_stride = -(-shared_bytes // 128) * 128
        self.races = RaceLog(self, self.block_count * self.shared_stride)  # type: ignore[arg-type]

    def full_barrier(self, complete: npt.NDArray[np.bool_] | None) -> None:
        """A barrier of all threads of the flagged blocks (None: all) completed."""
        self.order.block_barrier(complete)
        self.races.full_barrier(complete)

    def exchanged(self, lanes: LaneSet, mask: npt.NDArray[np.uint32]) -> None:
        """Lanes gave each other values."""
        self.races.exchanged(lanes, mask)

    def alive_flags(self) -> npt.NDArray[np.bool_]:
        """Which lanes have not exited."""
        return self.alive


class _Conflicts:
    """Takes the conflicts that are found."""

    stale_sites: frozenset[int] = frozenset()

    def __init__(self) -> None:
        self.found = False

    def add(self, *what: Any) -> None:
        """Remember that there is one."""
        self.found = True


def has_conflicts(
    trace: npt.NDArray[np.uint8], sites: Sequence[Site], request: LaunchRequest, memory: DeviceMemory
) -> bool:
    """Whether accesses of a launch that ended are not ordered, or nobody can say."""
    order, conflicts = Order(request.threads), _Conflicts()
    run = _Run(sites, conflicts)
    log = GlobalLog(order, memory)
    chunk: _Chunk | None = None
    begin, blocks = 0, np.array(request.order, np.int64)
    try:
        for group in _groups(trace):
            kind = _KINDS[group[0][0].kind]
            if kind == "chunk":
                if chunk is not None:
                    chunk.full_barrier(None)
                count = group[0][0].size
                chunk = _Chunk(run, request, order, blocks[begin : begin + count])
                begin += count
            elif chunk is not None:
                _tell(chunk, log, kind, group, sites, memory)
    except _Unsure:
        return True
    if chunk is not None:
        chunk.full_barrier(None)
    collide = [(address - GLOBAL_BASE, address - GLOBAL_BASE + nbytes) for address, nbytes in request.may_collide]
    log.check(collide, conflicts)
    return conflicts.found


_Group = list[tuple[_Event, bytes]]


def _groups(trace: npt.NDArray[np.uint8]) -> Iterator[_Group]:
    """Events with what follows them: those of one instruction that warps executed together."""
    events: list[tuple[tuple[int, int, int], _Event, bytes]] = []
    raw, at = trace.tobytes(), 0
    while at < len(raw):
        event = _Event._make(_EVENT.unpack_from(raw, at))
        at += _EVENT.size
        kind = _KINDS[event.kind]
        place = -1 if kind == "chunk" else _LAST.get(kind, event.site)
        events.append(((event.step, place, event.kind), event, raw[at : at + event.more]))
        at += event.more
    events.sort(key=lambda item: item[0])  # stable: warps stay in their order
    group: _Group = []
    for number, (key, event, more_bytes) in enumerate(events):
        group.append((event, more_bytes))
        if number + 1 == len(events) or events[number + 1][0] != key:
            yield group
            group = []


def _lanes(group: _Group) -> npt.NDArray[np.int64]:
    """Numbers in the chunk of all lanes of a group, ascending."""
    masks = np.array([event.lanes for event, _ in group], "<u4")
    bits = np.unpackbits(masks.view(np.uint8).reshape(-1, 4), axis=1, bitorder="little").view(np.bool_)
    rows = np.array([event.row for event, _ in group], np.int64)
    index: npt.NDArray[np.int64] = (rows[:, None] * WARP + np.arange(WARP))[bits]
    if (np.diff(index) <= 0).any():
        raise _Unsure
    return index


def _tell(chunk: _Chunk, log: GlobalLog, kind: str, group: _Group, sites: Sequence[Site], memory: DeviceMemory) -> None:
    """What one group means for the order."""
    order = chunk.order
    if kind == "barrier":
        _meet(chunk, group)
        return
    index = _lanes(group)
    lanes: Any = LaneSet(chunk, index)  # type: ignore[arg-type]
    if kind == "exit":
        chunk.alive[index] = False
        chunk.live_count -= index.size
    elif kind == "fence":
        order.fence(lanes, "cta" if group[0][0].size else "gpu")
    elif kind in ("exchange", "warp barrier"):
        counts = [event.lanes.bit_count() for event, _ in group]
        masks = np.concatenate(
            [np.frombuffer(more, np.uint32, count) for (_, more), count in zip(group, counts, strict=True)]
        )
        (order.exchange if kind == "exchange" else order.warp_barrier)(lanes, masks)
    else:
        _access(lanes, log, kind, group, sites[group[0][0].site], memory)


def _access(lanes: Any, log: GlobalLog, kind: str, group: _Group, site: Site, memory: DeviceMemory) -> None:
    size = group[0][0].size
    counts = [event.lanes.bit_count() for event, _ in group]
    addresses = np.concatenate(
        [np.frombuffer(more, np.int64, count) for (_, more), count in zip(group, counts, strict=True)]
    )
    stores = not kind.endswith("read")
    shift = size.bit_length() - 1
    is_shared = kind.startswith("shared")
    places = addresses + lanes.block_slot * lanes.chunk.shared_stride if is_shared else addresses - GLOBAL_BASE
    units = places >> shift
    data = None
    if kind.endswith("write"):
        raw = b"".join(more[8 * count : (8 + size) * count] for (_, more), count in zip(group, counts, strict=True))
        data = np.frombuffer(raw, np.uint8).view(memory.data.of[shift].dtype)
    action = {"read": READ, "write": WRITE, "atomic": ATOMIC}[kind.removeprefix("shared ")]
    (lanes.chunk.races if is_shared else log).add(action, units, shift, lanes, site, data)
    synchronise(site, lanes, places, stores, is_shared)


def _meet(chunk: _Chunk, group: _Group) -> None:
    """Barriers of blocks that completed in one step."""
    warps = chunk.lanes_per_block // WARP
    for number, counts in dict.fromkeys((event.size, event.site) for event, _ in group):
        complete = np.zeros(chunk.block_count, np.bool_)
        passed = []
        for event, _ in group:
            if (event.size, event.site) != (number, counts):
                continue
            slot = event.row // warps
            if complete[slot]:
                raise _Unsure
            complete[slot] = True
            rows = [slot * warps + warp for warp in range(warps) if event.members >> warp & 1]
            passed.append(np.concatenate([np.arange(row * WARP, (row + 1) * WARP) for row in rows]))
        if counts:
            lanes: Any = LaneSet(chunk, np.sort(np.concatenate(passed)))  # type: ignore[arg-type]
            chunk.order.partial_barrier(number, [lanes], [], complete)
        else:
            chunk.full_barrier(None if complete.all() else complete)
