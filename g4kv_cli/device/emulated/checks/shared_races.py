"""Races in shared memory between the lanes of a warp and the warps of a block.

Accesses are logged and searched for conflicts (conflicts.py) when a barrier of all threads completes, and at the end.
A lane may store where another lane of its warp has read, if all lanes of the warp shuffled, voted or loaded a matrix in
between: the load was made when any of them went on. A read behind a store is not ordered by that.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..ptx.sites import Site
from ..state.lanes import WARP, ChunkState, LaneSet, pack_lanes
from .conflicts import ACTIONS, ATOMIC, READ, WRITE, Access, Conflict, find_conflicts, finest_shift, spread_places
from .order import ChunkOrder

Array = npt.NDArray[Any]
Units = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_COMPACT_AT_LANES = 1 << 20
_FULL = 0xFFFFFFFF
_ENTRY_LANES = 64
"""An entry takes the memory of that many accesses, however few it holds."""


class RaceLog:
    """Shared accesses of a chunk since each block's last full barrier."""

    def __init__(self, chunk: ChunkState, total_bytes: int) -> None:
        self.chunk = chunk
        self.is_active = chunk.lanes_per_block > 1 and total_bytes > 0
        self.accesses: list[Access] = []
        self.logged_lanes = 0
        self.compact_at_lanes = _COMPACT_AT_LANES
        self.serial = 0
        self.checked = 0
        self.meetings: list[tuple[int, Units]] = []
        """Accesses there were, and warps of the chunk all of whose lanes gave each other values then."""
        self.owners = np.zeros(total_bytes if self.is_active else 0, np.uint16)
        """For each byte the thread of its block, plus one, that has touched it; all zero between two checks."""

    def add(
        self,
        kind: int,
        units: Units,
        shift: int,
        lanes: LaneSet,
        site: Site,
        data: Array | None = None,
        _held: Array | None = None,
    ) -> None:
        """Remember an access until the next barrier; what was there before is among the accesses."""
        self.chunk.run.note_addresses(units)
        if not self.is_active:
            return
        order: ChunkOrder = self.chunk.order
        access = Access(self.serial, kind, units, shift, lanes, site, order.order.now, order.stand, data)
        self.accesses.append(access)
        self.serial += 1
        self.logged_lanes += max(units.size, _ENTRY_LANES)
        if self.logged_lanes > self.compact_at_lanes:
            self._compact()

    def exchanged(self, lanes: LaneSet, mask: Array) -> None:
        """Lanes gave each other values; ``mask`` of those of their warp that did."""
        if self.accesses:
            warps = whole_warps(lanes, mask)
            if warps.size:
                self.meetings.append((self.serial, warps))

    def full_barrier(self, complete: Flags | None) -> None:
        """A barrier of all threads of the flagged blocks (None: all) completed: what came before is ordered."""
        if complete is None:
            self._check()
            self.accesses, self.meetings = [], []
            self.logged_lanes = 0

    def _check(self) -> None:
        """Report the conflicts among the accesses."""
        chosen = [access for access in self.accesses if access.serial >= self.checked]
        self.checked = self.serial
        if all(access.kind == READ for access in self.accesses) or not chosen or not self._has_contest():
            return
        order: ChunkOrder = self.chunk.order
        for conflict in find_conflicts(self.accesses, order.order, chosen[0].serial, meetings=self.meetings):
            self._report(conflict)

    def _has_contest(self) -> bool:
        """Whether several threads touched a place that one of them stored to: a quick look."""
        shift = finest_shift(self.accesses)
        owners = self.owners[: self.owners.size >> shift]
        places = [(access, spread_places(access, shift)) for access in self.accesses]
        stores = [(access, place) for access, place in places if access.kind != READ]
        found = False
        for access, place in stores:
            owners[place] = _threads(access, place)
        for access, place in places:
            owner = owners.take(place)
            if ((owner != 0) & (owner != _threads(access, place))).any():
                found = True
                break
        for _, place in stores:
            owners[place] = 0
        return found

    def _report(self, conflict: Conflict) -> None:
        later, earlier = conflict.later, conflict.earlier
        line = earlier.site.location.line or earlier.site.ptx_line
        at = f"({earlier.site.opcode}, line {line})"
        one, other = (int(each.lanes.thread[lane]) for each, lane in _both(conflict))
        if conflict.is_within_warp:
            if later is earlier:
                who = f"lanes {other % WARP} and {one % WARP} of a warp {ACTIONS[later.kind]} "
                words = f"{who}different values with one instruction ({conflict.hazard})"
            else:
                who = f"lane {one % WARP} and lane {other % WARP} of warp {one // WARP} {at}"
                words = f"{conflict.hazard} race: {who} without a __syncwarp between them"
        else:
            who = f"warp {one // WARP} and warp {other // WARP} {at}"
            words = f"{conflict.hazard} race: {who} without a barrier between them"
        base = later.lanes.shared_base
        place = conflict.place - int(base[conflict.lane] if base.size > 1 else base[0])
        kind = "shared_race"
        if conflict.is_equal:
            kind, words = "equal_stores", f"{who} store the same value"
        words += f" at shared offset {place}"
        self.chunk.run.collector.add(kind, words, later.site, later.lanes, conflict.lane, conflict.count, place)

    def report(
        self, words: str, units: Units, shift: int, lanes: LaneSet, site: Site, position: int, count: int
    ) -> None:
        """Record a race at one lane's location."""
        report_race(self.chunk, words, units, shift, lanes, site, position, count)

    def _compact(self) -> None:
        """Look at what is there, and keep what may still conflict: one of the equal accesses of each thread."""
        self._check()
        groups: dict[tuple[int, int, int], list[Access]] = {}
        for access in self.accesses:
            fresh = np.flatnonzero(access.moment > self.chunk.order.stand.block[access.lanes.block_slot])
            if fresh.size:
                groups.setdefault((access.site.number, access.kind, id(access.stand)), []).append(_part(access, fresh))
        kept: list[Access] = []
        for group in groups.values():
            head = group[-1]
            units = np.concatenate([np.broadcast_to(part.units, (part.lanes.count,)) for part in group])[::-1]
            index = np.concatenate([part.lanes.index for part in group])[::-1]
            _, first = np.unique(units * self.chunk.lane_count + index, return_index=True)
            data = None
            if all(part.data is not None and part.data.shape[0] == part.lanes.count for part in group):
                data = np.concatenate([part.data for part in group if part.data is not None])[::-1][first]
            lanes = type(head.lanes)(self.chunk, index[first])
            moment = head.moment
            kept.append(
                Access(head.serial, head.kind, units[first], head.shift, lanes, head.site, moment, head.stand, data)
            )
        self.accesses = sorted(kept, key=lambda access: access.serial)
        self.logged_lanes = sum(max(access.units.size, _ENTRY_LANES) for access in kept)
        self.compact_at_lanes = max(_COMPACT_AT_LANES, 2 * self.logged_lanes)


def _both(conflict: Conflict) -> tuple[tuple[Access, int], tuple[Access, int]]:
    return (conflict.later, conflict.lane), (conflict.earlier, conflict.earlier_lane)


def _threads(access: Access, place: Units) -> npt.NDArray[np.uint16]:
    thread = (access.lanes.thread + 1).astype(np.uint16)
    return thread if place.size == thread.size else np.repeat(thread, place.size // thread.size)


def _part(access: Access, position: Units) -> Access:
    count = access.lanes.count
    if position.size == count:
        return access
    units = access.units if access.units.size == 1 else access.units.take(position)
    data = access.data
    if data is not None and data.shape[0] == count:
        data = data[position]
    return Access(
        access.serial, access.kind, units, access.shift, access.lanes.subset(position), access.site, access.moment,
        access.stand, data,
    )  # fmt: skip


def whole_warps(lanes: LaneSet, mask: Array) -> Units:
    """The warps of the chunk all of whose living lanes are in ``mask`` and here."""
    frame = lanes.frame
    if frame.is_whole and mask.shape[0] == 1 and mask[0] == _FULL:
        return lanes.warps
    alive = pack_lanes(lanes.chunk.alive_flags().reshape(-1, WARP))[lanes.warps]
    every = frame.spread(mask) & alive[:, None] == alive[:, None]
    is_whole = (frame.present_bits == alive) & (every if frame.present is None else every | ~frame.present).all(1)
    warps: Units = lanes.warps[is_whole]
    return warps


def report_race(
    chunk: ChunkState, words: str, units: Units, shift: int, lanes: LaneSet, site: Site, position: int, count: int
) -> None:
    """Add a shared_race fault at one lane's location."""
    unit = int(units[position] if units.size > 1 else units[0])
    address = (unit << shift) % chunk.shared_stride
    chunk.run.collector.add("shared_race", f"{words} at shared offset {address}", site, lanes, position, count, address)


__all__ = ["ACTIONS", "ATOMIC", "READ", "WRITE", "RaceLog", "report_race"]
