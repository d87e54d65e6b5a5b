"""Races in shared memory of kernels with mbarriers, bulk copies and wgmma: every access is checked when it happens.

Vector clocks, one for each warp of each cluster, say which accesses of each *agent* come before what the warp does
next. Agents are the warps and all that works beside them: the wgmma of each warpgroup, the bulk stores of each warp,
and for each mbarrier the bulk copies and asynchronous stores that signal it. An agent numbers its work in segments; a
location remembers the segment of its last write and each agent's last read. What is ordered:

* all barriers, as in shared_races.py;
* an arrival on an mbarrier before what follows a wait for the phase that it completed;
* a releasing arrival at the cluster's barrier before what follows a wait there; a relaxed one orders nothing;
* an atomic that says acquire or release, with what its warp knows, before what follows a later one at its place;
* a bulk copy into shared memory before what follows a wait for the phase that its bytes completed;
* wgmma and bulk stores before what follows the wait for their group, and after what preceded their issue.

A second set of clocks knows only what a ``fence.proxy.async`` has made visible to the asynchronous proxy: wgmma and
bulk stores may read ordinary writes, ``st.async`` among them, only if those are in it; bulk copies into shared memory
may follow those of other blocks of the cluster only then. What a warp does between two barriers, arrivals or
``bar.warp.sync`` is one segment, in which its lanes are not ordered: the lane of a location's last write, and of each
warp's last read, is remembered beside it. Where all lanes of a warp shuffle, vote or load a matrix, a new *turn*
of it begins: what they read in an earlier one comes before their stores, as in shared_races.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..ptx.sites import Site
from ..state.lanes import ChunkState, LaneSet, distinct_pairs
from .conflicts import ACTIONS, READ, WRITE
from .shared_races import report_race, whole_warps

Array = npt.NDArray[Any]
Units = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_SEGMENT_SHIFT, _AGENT_SHIFT = 32, 20
_AGENT_MASK, _SITE_MASK = 0xFFF, 0xFFFFF
_FIRST_MBARRIERS = 8
_PUSH = "st.async"
"""Asynchronous, but an ordinary store to the asynchronous proxy."""
_SEVERAL = 255
"""Stands for a lane where several have read."""
_TURN_SHIFT = 8
"""Marks of reads have the turn of the warp above the lane."""
KNOWN, FENCED = 0, 1
"""The two sets of clocks: what is ordered, and what of it the asynchronous proxy sees."""


class ClockRaces:
    """Races of a chunk. Clocks are [2, warp of the chunk, agent]: the last segment of the agent that is ordered."""

    is_active = True

    def __init__(self, chunk: ChunkState, total_bytes: int, granule_shift: int) -> None:
        self.chunk = chunk
        self.granule_shift = granule_shift
        self.granules = total_bytes >> granule_shift
        self.block_warps = chunk.lanes_per_block // 32
        self.ranks = chunk.cluster_blocks
        self.warps = self.block_warps * self.ranks
        self.groups = -(-self.block_warps // 4)
        self.first_store_agent = self.warps + self.groups * self.ranks
        self.first_copy_agent = self.first_store_agent + self.warps
        self.agents = self.first_copy_agent + _FIRST_MBARRIERS * self.ranks
        total_warps = chunk.block_count * self.warps
        self.own = np.arange(total_warps) % self.warps
        self.rows = np.arange(total_warps)
        self.clocks = np.zeros((2, total_warps, self.agents), np.int32)
        self.clocks[KNOWN, self.rows, self.own] = 1
        self.last_write = np.zeros(self.granules, np.int64)
        self.last: dict[tuple[int, int], Units] = {}
        """(READ or ATOMIC, agent) -> last access of each location, packed like ``last_write``."""
        self.write_lane = np.zeros(self.granules, np.uint8)
        """One more than the lane of the last write of each location, 0 if no warp made it."""
        self.lane_of: dict[tuple[int, int], npt.NDArray[np.uint32]] = {}
        """The same of ``last``, for agents that are warps; of reads, with the turn."""
        self.turns = np.zeros(total_warps, np.uint32)
        """How often all lanes of each warp of the chunk gave each other values."""
        self.joining: list[npt.NDArray[np.int32]] = []
        """For each mbarrier [2, block, agent]: what arrivals in the current phase know."""
        self.completed: list[npt.NDArray[np.int32]] = []
        """The same of the latest completed phase."""
        self.met: dict[int, npt.NDArray[np.int32]] = {}
        """For each barrier number [block, warp]: what those that met there last knew of the warps."""
        self.published: dict[int, npt.NDArray[np.int32]] = {}
        """For each place [2, agent]: what those know that an ordered atomic there comes after."""
        clusters = chunk.block_count // self.ranks
        self.cluster_joining = np.zeros((2, clusters, self.agents), np.int32)
        """What arrivals in the current phase of the cluster's barrier release."""
        self.cluster_done = self.cluster_joining.copy()
        """The same of the latest completed phase."""

    def wgmma_agent(self, warp: Units) -> Units:
        """The agent of the wgmma of a warp's warpgroup: a wait by one of its warps is a wait for all four."""
        return self.warps + warp // self.block_warps * self.groups + warp % self.block_warps // 4

    def store_agent(self, warp: Units) -> Units:
        """The agent of a warp's bulk stores."""
        return warp + self.first_store_agent

    def copy_agent(self, mbarrier: int, blocks: Any = 0) -> Any:
        """The agent of bulk copies that signal an mbarrier of these blocks of the chunk."""
        return self.first_copy_agent + mbarrier * self.ranks + blocks % self.ranks

    def add_mbarrier(self) -> None:
        """Make room for one more mbarrier."""
        if self.copy_agent(len(self.joining) + 1) > self.agents:
            more = self.agents
            self.agents += more
            self.clocks = np.pad(self.clocks, ((0, 0), (0, 0), (0, more)))
            self.cluster_joining = np.pad(self.cluster_joining, ((0, 0), (0, 0), (0, more)))
            self.cluster_done = np.pad(self.cluster_done, ((0, 0), (0, 0), (0, more)))
            self.joining = [np.pad(known, ((0, 0), (0, 0), (0, more))) for known in self.joining]
            self.completed = [np.pad(known, ((0, 0), (0, 0), (0, more))) for known in self.completed]
        for kept in (self.joining, self.completed):
            kept.append(np.zeros((2, self.chunk.block_count, self.agents), np.int32))

    # Accesses

    def add(
        self,
        kind: int,
        units: Units,
        shift: int,
        lanes: LaneSet,
        site: Site,
        data: Array | None = None,
        held: Array | None = None,
        is_by_lane: bool = True,
    ) -> None:
        """An access by the lanes themselves; ``units`` are chunk offsets in units of 1 << shift bytes. Of a store that
        is in memory by now: ``data`` and what the units ``held`` before. ``is_by_lane``: of each lane for itself."""
        row = lanes.index // 32
        stored = None if held is None or data is None else (data, held)
        lane = (lanes.index % 32 + 1 if is_by_lane else np.ones(lanes.count)).astype(np.uint8)
        if site.opcode.startswith("ldmatrix"):
            lane[:] = _SEVERAL
        self._access(kind, units, shift, lanes, site, row, row % self.warps, None, stored, lane)

    def add_asynchronous(
        self, kind: int, units: Units, shift: int, lanes: LaneSet, site: Site, agent: Array, segment: Array
    ) -> None:
        """An access by ``agent`` in its ``segment`` on behalf of lanes that have just issued it, unit by unit."""
        self._access(kind, units, shift, lanes, site, lanes.index // 32, agent, segment)

    def _access(
        self,
        kind: int,
        units: Units,
        shift: int,
        lanes: LaneSet,
        site: Site,
        row: Array,
        agent: Array,
        segment: Array | None,
        stored: tuple[Array, Array] | None = None,
        lane: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        whole = units
        if units.size != lanes.count:
            units = np.repeat(units, lanes.count)
        by_proxy = segment is not None and not site.opcode.startswith(_PUSH)
        base = row * self.agents
        known = self.clocks[KNOWN].reshape(-1)
        if segment is None:
            segment = known.take(base + agent)
        packed = (segment.astype(np.int64) << _SEGMENT_SHIFT) | (agent << _AGENT_SHIFT) | site.number
        split = 1 << (shift - self.granule_shift)
        if split > 1:
            units = ((units * split)[:, None] + np.arange(split)).reshape(-1)
            base, packed = np.repeat(base, split), np.repeat(packed, split)
            lane = None if lane is None else np.repeat(lane, split)
        before = self.last_write.take(units)
        writer = base + ((before >> _AGENT_SHIFT) & _AGENT_MASK)
        written = before >> _SEGMENT_SHIFT
        clash, earlier = written > known.take(writer), before
        equal: Flags | None = None
        if clash.any() and stored is not None:
            # Of two warps that store one value it does not matter whose comes last; copies may not have arrived yet.
            equal = clash & self._same(*stored, whole, split, units.size) & (writer - base < self.warps)
            clash &= ~equal
        if clash.any():
            self._report(kind, WRITE, before, clash, packed, units, split, lanes, site)
        elif by_proxy:
            # A wait for bulk copies shows them to the proxy, too: they came through it.
            unfenced = written > self.clocks[FENCED].reshape(-1).take(writer)
            if kind == WRITE:
                slots = (units << self.granule_shift) // self.chunk.shared_stride
                unfenced &= self._is_foreign(writer - base, slots % self.ranks)
            if unfenced.any():
                self._report(kind, WRITE, before, unfenced, packed, units, split, lanes, site, needs_fence=True)
        if lane is not None:
            by = self.write_lane.take(units)
            clash = _is_one_segment(before, packed) & (by != 0) & (by != lane)
            if clash.any() and stored is not None:
                clash &= ~self._same(*stored, whole, split, units.size)
            if clash.any():
                self._report(kind, WRITE, before, clash, packed, units, split, lanes, site, by)
        for (other_kind, other), table in self.last.items():
            if kind == other_kind:
                continue
            before = table.take(units)
            clash = (before >> _SEGMENT_SHIFT) > known.take(base + other)
            if clash.any():
                self._report(kind, other_kind, before, clash, packed, units, split, lanes, site)
            elif lane is not None and (other_kind, other) in self.lane_of:
                mark = self.lane_of[other_kind, other].take(units)
                by = mark & np.uint32(_SEVERAL)
                clash = _is_one_segment(before, packed) & (by != lane)
                clash &= mark - by == self._turns(other_kind, base)
                if clash.any():
                    self._report(kind, other_kind, before, clash, packed, units, split, lanes, site, by)
        if kind == WRITE:
            was_by = self.write_lane.take(units)
            self.last_write[units] = packed
            self.write_lane[units] = 0 if lane is None else lane
            rival = self.last_write.take(units)
            clash = rival != packed
            if clash.any() and stored is not None:
                now = self.chunk.shared.data.of[shift].take(whole)
                clash &= ~self._same(stored[0], now, whole, split, units.size)
            if equal is not None and equal.any():
                self.last_write[units[equal]] = earlier[equal]
                self.write_lane[units[equal]] = was_by[equal]
            if clash.any():
                self._report(kind, WRITE, rival, clash, packed, units, split, lanes, site)
            return
        for each in sorted(set(np.ravel(agent).tolist())):
            table = self._table(kind, each)
            here = np.flatnonzero(((packed >> _AGENT_SHIFT) & _AGENT_MASK) == each)
            if lane is not None:
                mark = self._turns(kind, base)[here] | lane[here]
                self._note_lanes(kind, each, units[here], mark, table.take(units[here]), packed[here])
            table[units[here]] = packed[here]

    def _turns(self, kind: int, base: Array) -> npt.NDArray[np.uint32]:
        """What marks of accesses in the present turn have above the lane; ``base``: where a warp's clocks begin."""
        if kind != READ:
            return np.zeros(base.size, np.uint32)
        turns: npt.NDArray[np.uint32] = self.turns.take(base // self.agents) << np.uint32(_TURN_SHIFT)
        return turns

    def _note_lanes(
        self, kind: int, agent: int, units: Units, mark: npt.NDArray[np.uint32], before: Units, packed: Units
    ) -> None:
        """Lanes of a warp read, or several of them have in this segment and turn."""
        table = self.lane_of.get((kind, agent))
        if table is None:
            table = self.lane_of[kind, agent] = np.zeros(self.granules, np.uint32)
        several = mark | np.uint32(_SEVERAL)
        was = table.take(units)
        is_held = _is_one_segment(before, packed) & ((was | np.uint32(_SEVERAL)) == several)
        now = np.where(is_held & (was != mark), several, mark)
        table[units] = now
        differ = table.take(units) != now
        table[units[differ]] = several[differ]

    def exchanged(self, lanes: LaneSet, mask: Array) -> None:
        """Lanes gave each other values; ``mask`` of those of their warp that did."""
        self.turns[whole_warps(lanes, mask)] += np.uint32(1)

    def warp_barrier(self, lanes: LaneSet) -> None:
        """bar.warp.sync: what the lanes do from now on is another segment."""
        rows = lanes.warps
        self.clocks[KNOWN, rows, self.own[rows]] += 1

    def _is_foreign(self, agent: Array, rank: Array) -> Flags:
        """Whether agents that write are not the warps of the block of this rank."""
        return np.asarray((agent >= self.warps) | (agent // self.block_warps != rank), np.bool_)

    def _same(self, data: Array, other: Array, units: Units, split: int, count: int) -> Flags:
        """For each of ``count`` granules, ``split`` a unit, whether both values of its unit have the same bits."""
        size = units.size
        one, two = (
            np.ascontiguousarray(np.broadcast_to(values, (size,))).view(np.uint8).reshape(size * split, -1)
            for values in (data, other)
        )
        same: Flags = (one == two).all(1)
        return same if same.size == count else np.tile(same, count // same.size)

    def _table(self, kind: int, agent: int) -> Units:
        table = self.last.get((kind, agent))
        if table is None:
            table = self.last[kind, agent] = np.zeros(self.granules, np.int64)
        return table

    # Order

    def release(self, mbarrier: int, lanes: LaneSet) -> None:
        """Lanes arrive on an mbarrier: what their warps know is part of its current phase."""
        rows = lanes.warps
        if self.ranks == 1:
            self._join(self.joining[mbarrier], rows)
        else:  # the mbarrier may be another block's
            for row, slot in distinct_pairs(lanes.index // 32, lanes.block_slot):
                into = self.joining[mbarrier][:, slot]
                np.maximum(into, self.clocks[:, row], out=into)
        self.clocks[KNOWN, rows, self.own[rows]] += 1

    def synchronise(self, places: Units, lanes: LaneSet) -> None:
        """Lanes, in turn, make an atomic with acquire or release at ``places`` (bytes of the chunk's shared memory):
        their warps learn what was published there, and publish what they know."""
        rows = lanes.index // 32
        for place, row in dict.fromkeys(zip(np.broadcast_to(places, rows.shape).tolist(), rows.tolist(), strict=True)):
            before = self.published.get(place)
            if before is not None:
                into = self.clocks[:, row, : before.shape[1]]  # mbarriers may have been added since
                np.maximum(into, before, out=into)
            self.published[place] = self.clocks[:, row].copy()
        self.clocks[KNOWN, lanes.warps, self.own[lanes.warps]] += 1

    def cluster_release(self, lanes: LaneSet) -> None:
        """Lanes arrive at the cluster's barrier: what their warps know is part of its current phase."""
        rows = lanes.warps
        for row in rows:
            into = self.cluster_joining[:, row // self.warps]
            np.maximum(into, self.clocks[:, row], out=into)
        self.clocks[KNOWN, rows, self.own[rows]] += 1

    def segment_of(self, row: int) -> int:
        """The segment of its work that a warp (number in the chunk) is in."""
        return int(self.clocks[KNOWN, row, self.own[row]])

    def is_before_end(self, slot: int, row: int, segment: int) -> bool:
        """Whether a block that has ended knew of a warp's work up to a segment."""
        of_block = self.clocks[KNOWN, slot * self.block_warps : (slot + 1) * self.block_warps, self.own[row]]
        return bool(segment <= of_block.max())

    def cluster_completed(self, clusters: Flags) -> None:
        """The current phase of the flagged clusters' barrier ended."""
        self.cluster_done[:, clusters] = self.cluster_joining[:, clusters]
        self.cluster_joining[:, clusters] = 0

    def cluster_acquire(self, lanes: LaneSet) -> None:
        """Lanes have waited for the latest completed phase of the cluster's barrier."""
        rows = lanes.warps
        self.clocks[:, rows] = np.maximum(self.clocks[:, rows], self.cluster_done[:, rows // self.warps])

    def _join(self, into: npt.NDArray[np.int32], rows: Units) -> None:
        """Maximum of the warps' clocks into [2, block, agent]."""
        slots = rows // self.block_warps
        first = np.flatnonzero(np.diff(slots, prepend=-1))
        most = np.maximum.reduceat(self.clocks[:, rows], first, axis=1)
        into[:, slots[first]] = np.maximum(into[:, slots[first]], most)

    def copies_arrived(self, mbarrier: int, blocks: Units, delivered: Units, site: Site) -> None:
        """The first ``delivered`` bulk copies of each block's mbarrier are part of its current phase."""
        sets = (KNOWN,) if site.opcode.startswith(_PUSH) else (KNOWN, FENCED)
        for known in sets:
            self.joining[mbarrier][known, blocks, self.copy_agent(mbarrier, blocks)] = delivered

    def phase_completed(self, mbarrier: int, blocks: Flags) -> None:
        """The current phase of the flagged blocks' mbarrier ended."""
        self.completed[mbarrier][:, blocks] = self.joining[mbarrier][:, blocks]
        self.joining[mbarrier][:, blocks] = 0

    def acquire(self, mbarrier: int, lanes: LaneSet) -> None:
        """Lanes have waited for the latest completed phase of an mbarrier."""
        rows = lanes.warps
        self.clocks[:, rows] = np.maximum(self.clocks[:, rows], self.completed[mbarrier][:, rows // self.block_warps])

    def group_done(self, rows: Units, agent: Units, segment: Array) -> None:
        """Warps (numbers in the chunk) have waited for their own agents' work up to a segment."""
        for known in self.clocks:
            np.maximum.at(known, (rows, agent), segment)

    def proxy_fence(self, lanes: LaneSet) -> None:
        """fence.proxy.async: what the warps know is visible to the asynchronous proxy."""
        rows = lanes.warps
        self.clocks[FENCED, rows] = np.maximum(self.clocks[FENCED, rows], self.clocks[KNOWN, rows])
        self.clocks[KNOWN, rows, self.own[rows]] += 1

    def full_barrier(self, complete: Flags | None) -> None:
        """A barrier of all threads of the flagged blocks (None: all) completed."""
        blocks = np.arange(self.chunk.block_count) if complete is None else np.flatnonzero(complete)
        rows = (blocks[:, None] * self.block_warps + np.arange(self.block_warps)).reshape(-1)
        self._meet(rows, [])

    def signal(self, lanes: LaneSet) -> npt.NDArray[np.int32]:
        """Lanes arrive at a barrier without waiting; returns what their warps know, for ``partial_barrier``."""
        rows = lanes.warps
        known = self.clocks.copy()
        self.clocks[KNOWN, rows, self.own[rows]] += 1
        return known

    def partial_barrier(
        self, number: int, passed: list[LaneSet], signals: list[tuple[LaneSet, Any]], complete: Flags
    ) -> None:
        """A barrier of some warps completed; see ``RaceLog.partial_barrier``."""
        rows = np.unique(np.concatenate([lanes.warps for lanes in passed])) if passed else np.zeros(0, np.int64)
        joined = self._meet(rows, [(lanes.warps, known[:, lanes.warps]) for lanes, known in signals])
        of_warps = joined[KNOWN, :, : self.warps]
        self.met.setdefault(number, np.zeros_like(of_warps))[complete] = of_warps[complete]

    def is_after_meeting(self, number: int, warps: Units) -> Flags:
        """See ``RaceLog.is_after_meeting``."""
        met = self.met.get(number)
        if met is None:
            return np.ones(warps.size, np.bool_)
        known = self.clocks[KNOWN, warps, : self.warps]
        return np.asarray((known >= met[warps // self.block_warps]).all(1), np.bool_)

    def _meet(self, rows: Units, signals: list[tuple[Units, Array]]) -> npt.NDArray[np.int32]:
        """Join the clocks of warps that meet, and of signals, for each block; returns [2, block, agent]."""
        joined = np.zeros((2, self.chunk.block_count, self.agents), np.int32)
        if rows.size:
            self._join(joined, rows)
        for signalled, known in signals:
            for position, row in enumerate(signalled):
                into = joined[:, row // self.block_warps, : known.shape[2]]  # mbarriers may have been added since
                np.maximum(into, known[:, position], out=into)
        self.clocks[:, rows] = joined[:, rows // self.block_warps]
        self.clocks[KNOWN, rows, self.own[rows]] += 1
        return joined

    # Reports

    def _agent_words(self, agent: int) -> str:
        if agent < self.warps:
            rank = f" of rank {agent // self.block_warps}" if self.ranks > 1 else ""
            return f"warp {agent % self.block_warps}{rank}"
        if agent < self.first_store_agent:
            return f"wgmma of warpgroup {(agent - self.warps) % self.groups}"
        if agent < self.first_copy_agent:
            return f"a bulk store of warp {agent - self.first_store_agent}"
        return "a bulk copy"

    def _report(
        self,
        kind: int,
        other_kind: int,
        before: Units,
        clash: Flags,
        packed: Units,
        units: Units,
        split: int,
        lanes: LaneSet,
        site: Site,
        by: Array | None = None,
        needs_fence: bool = False,
    ) -> None:
        """``by``: the lanes of the earlier accesses, which are of the same warps."""
        place = int(np.flatnonzero(clash)[0])
        other = int(before[place])
        partner = self.chunk.run.kernel.sites[other & _SITE_MASK]
        own, rival = ((int(value) >> _AGENT_SHIFT) & _AGENT_MASK for value in (packed[place], other))
        if needs_fence:
            missing = "ordered, but without a fence.proxy.async between them"
        elif rival < self.warps:
            missing = "without a barrier between them"
        elif rival < self.first_copy_agent:
            missing = "whose group was not waited for"
        else:
            missing = "whose mbarrier phase was not waited for"
        line = partner.location.line or partner.ptx_line
        bad = np.flatnonzero(clash.reshape(-1, split).any(1))
        address = units[place : place + 1]
        one, two = self._agent_words(own), self._agent_words(rival)
        if by is not None:
            earlier = "other lanes" if by[place] == _SEVERAL else f"lane {int(by[place]) - 1}"
            one, two = f"lane {int(lanes.laneid[bad[0]])}", f"{earlier} of {two}"
            missing = "without a __syncwarp between them"
        at = f"({partner.opcode}, line {line}) {missing}"
        words = f"{ACTIONS[kind]}-after-{ACTIONS[other_kind]} race: {one} and {two} {at}"
        report_race(self.chunk, words, address, self.granule_shift, lanes, site, int(bad[0]), bad.size)

    def report(
        self, words: str, units: Units, shift: int, lanes: LaneSet, site: Site, position: int, count: int
    ) -> None:
        """Record a race that was found elsewhere at one lane's location."""
        report_race(self.chunk, words, units, shift, lanes, site, position, count)


def _is_one_segment(before: Units, packed: Units) -> Flags:
    """Whether two accesses are of one agent in one segment of its work."""
    return np.asarray((before ^ packed) >> _AGENT_SHIFT == 0, np.bool_)


def fence_proxy() -> Callable[[LaneSet], None]:
    """fence.proxy.async: (lanes)."""

    def run(lanes: LaneSet) -> None:
        lanes.chunk.races.proxy_fence(lanes)

    return run
