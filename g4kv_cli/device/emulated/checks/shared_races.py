"""Races between the warps of a block in shared memory.

Accesses are logged and looked at when a barrier of all threads completes: between two such barriers a location may
be touched by several warps only if none of them writes it (atomics may meet atomics). When a barrier of only some
warps completed in between, vector clocks decide which accesses it ordered. A warp counts as ordered in itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..ptx.sites import Site
from ..state.lanes import ChunkState, LaneSet

Array = npt.NDArray[Any]
Units = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

READ, WRITE, ATOMIC = 0, 1, 2
ACTIONS = ("read", "write", "atomic")
_SEVERAL = 255
_COMPACT_AT_LANES = 1 << 22
_ENTRY_LANES = 64
"""An entry takes the memory of that many accesses, however few it holds."""


@dataclass(frozen=True, eq=False)
class SharedAccess:
    """One executed shared access since the last barrier. ``units`` are chunk offsets in units of 1 << shift bytes.

    ``clocks`` [block, warp, warp] counts, for each warp, the partial barriers of the others that it knows of; None
    before the first partial barrier.
    """

    kind: int
    units: Units
    shift: int
    lanes: LaneSet
    site: Site
    clocks: npt.NDArray[np.int32] | None


class RaceLog:
    """Shared accesses of a chunk since each block's last full barrier."""

    def __init__(self, chunk: ChunkState, total_bytes: int, granule_shift: int) -> None:
        self.chunk = chunk
        self.granule_shift = granule_shift
        self.is_ordered = chunk.lanes_per_block > 32
        self.is_active = self.is_ordered and total_bytes > 0
        self.accesses: list[SharedAccess] = []
        self.logged_lanes = 0
        self.compact_at_lanes = _COMPACT_AT_LANES
        self.clocks: npt.NDArray[np.int32] | None = None
        self.met: dict[int, npt.NDArray[np.int32]] = {}
        """For each barrier number [block, warp]: what those that met there last knew of each other."""
        self.granules = total_bytes >> granule_shift
        self.writers = np.zeros(self.granules if self.is_active else 0, np.uint8)
        self.atomics = np.zeros(self.writers.size, np.uint8)

    def add(self, kind: int, units: Units, shift: int, lanes: LaneSet, site: Site) -> None:
        """Remember an access until the next barrier."""
        if not self.is_active:
            return
        self.accesses.append(SharedAccess(kind, units, shift, lanes, site, self.clocks))
        self.logged_lanes += max(units.size, _ENTRY_LANES)
        if self.logged_lanes > self.compact_at_lanes:
            self._compact()

    def full_barrier(self, complete: Flags | None) -> None:
        """Check all accesses since the last barrier; ``complete`` flags the blocks that passed it (None: all)."""
        chosen = self.accesses
        kept: list[SharedAccess] = []
        if complete is not None:
            chosen = []
            for access in self.accesses:
                inside = complete[access.lanes.block_slot]
                for group, flags in ((chosen, inside), (kept, ~inside)):
                    part = _part(access, np.flatnonzero(flags))
                    if part is not None:
                        group.append(part)
        self.accesses = kept
        self.logged_lanes = sum(access.units.size for access in kept)
        if any(access.kind != READ for access in chosen):
            if any(access.clocks is not None for access in chosen):
                self._check_by_clocks(chosen)
            else:
                self._check(chosen)
        if self.clocks is not None:
            if complete is None:
                self.clocks = None
                self.met.clear()
            else:
                self.clocks = self.clocks.copy()
                self.clocks[complete] = 0
                for known in self.met.values():
                    known[complete] = 0

    def _clocks_with(self, lanes: list[LaneSet]) -> tuple[npt.NDArray[np.int32], Flags]:
        """The clocks after one more event of the lanes' warps, and flags [block, warp] of those warps."""
        warps = self.chunk.lanes_per_block // 32
        shape = (self.chunk.block_count, warps)
        taking_part = np.zeros(shape, np.bool_)
        for part in lanes:
            taking_part[part.block_slot, part.thread // 32] = True
        clocks = np.zeros((*shape, warps), np.int32) if self.clocks is None else self.clocks.copy()
        own = np.arange(warps)
        clocks[:, own, own] += taking_part
        return clocks, taking_part

    def signal(self, lanes: LaneSet) -> npt.NDArray[np.int32] | None:
        """Lanes arrive at a barrier without waiting; returns what their warps know, for ``partial_barrier``."""
        if not self.is_ordered:
            return None
        self.clocks, _ = self._clocks_with([lanes])
        return self.clocks

    def partial_barrier(
        self, number: int, passed: list[LaneSet], signals: list[tuple[LaneSet, Any]], complete: Flags
    ) -> None:
        """Barrier ``number`` of some warps completed: what waited comes after all that had arrived.

        ``signals`` are the lanes of those blocks that arrived without waiting, with the clocks of that moment;
        ``complete`` flags the blocks.
        """
        if not self.is_ordered:
            return
        clocks, taking_part = self._clocks_with(passed)
        mask = taking_part[:, :, None]
        joined = np.where(mask, clocks, 0).max(1)
        for lanes, known in signals:
            slots, warps = lanes.block_slot, lanes.thread // 32
            np.maximum.at(joined, slots, known[slots, warps])
        self.clocks = np.where(mask, joined[:, None, :], clocks)
        self.met.setdefault(number, np.zeros_like(joined))[complete] = joined[complete]

    def is_after_meeting(self, number: int, warps: Units) -> Flags:
        """For each warp (numbers in the chunk), whether it comes after the latest meeting at a partial barrier."""
        met = self.met.get(number)
        if met is None or self.clocks is None:
            return np.ones(warps.size, np.bool_)
        slots, own = np.divmod(warps, met.shape[1])
        return np.asarray((self.clocks[slots, own] >= met[slots]).all(1), np.bool_)

    def _granules(self, access: SharedAccess, shift: int) -> tuple[Units, Array]:
        """(locations of 1 << shift bytes, warp tags), flat and of equal length."""
        granules, tags = access.units, access.lanes.warp_tag
        if granules.size == 1 and tags.size > 1:
            granules = np.repeat(granules, tags.size)
        split = 1 << (access.shift - shift)
        if split > 1:
            granules = ((granules * split)[:, None] + np.arange(split)).reshape(-1)
            tags = np.repeat(tags, split)
        return granules, tags

    def _check(self, accesses: list[SharedAccess]) -> None:
        shift = _finest_shift(accesses)
        located = [self._granules(access, shift) for access in accesses]
        for serial, (access, (granules, tags)) in enumerate(zip(accesses, located, strict=True)):
            if access.kind == READ:
                continue
            table = self.writers if access.kind == WRITE else self.atomics
            before = table.take(granules)
            table[granules] = tags
            clash = ((before != 0) & (before != tags)) | (table.take(granules) != tags)
            if clash.any():
                if access.kind == WRITE:
                    self._report_clash(accesses, serial, granules, clash)
                table[granules[clash]] = _SEVERAL
        for serial, (access, (granules, tags)) in enumerate(zip(accesses, located, strict=True)):
            clash = np.zeros(granules.size, np.bool_)
            if access.kind != WRITE:
                writer = self.writers.take(granules)
                clash |= (writer != 0) & (writer != tags)
            if access.kind != ATOMIC:
                atomic = self.atomics.take(granules)
                clash |= (atomic != 0) & (atomic != tags)
            if clash.any():
                self._report_clash(accesses, serial, granules, clash)
        for access, (granules, _) in zip(accesses, located, strict=True):
            if access.kind != READ:
                self.writers[granules] = 0
                self.atomics[granules] = 0

    def _check_by_clocks(self, accesses: list[SharedAccess]) -> None:
        """The exact check where partial barriers ordered some warps: latest segment of every warp at every location."""
        warps = self.chunk.lanes_per_block // 32
        shift = _finest_shift(accesses)
        latest = np.zeros((3, self.granules >> (shift - self.granule_shift), warps), np.int32)
        present = {access.kind for access in accesses}
        rivals = {
            kind: present & others
            for kind, others in ((READ, {WRITE, ATOMIC}), (WRITE, {READ, WRITE, ATOMIC}), (ATOMIC, {READ, WRITE}))
        }
        located = [self._granules(access, shift) for access in accesses]
        is_written = np.zeros(latest.shape[1], np.bool_)
        for access, (granules, _) in zip(accesses, located, strict=True):
            if access.kind != READ:
                is_written[granules] = True
        for serial, (access, (granules, tags)) in enumerate(zip(accesses, located, strict=True)):
            if access.kind == READ and not is_written.take(granules).any():
                continue
            split = granules.size // access.lanes.count
            slots = np.repeat(access.lanes.block_slot, split)
            own = tags.astype(np.int64) - 1
            clocks = access.clocks
            known = clocks[slots, own] if clocks is not None else np.zeros((granules.size, warps), np.int32)
            segment = known[np.arange(granules.size), own] + 1
            others = np.arange(warps) != own[:, None]
            clash = np.zeros(granules.size, np.bool_)
            for kind in rivals[access.kind]:
                clash |= ((latest[kind][granules] > known) & others).any(1)
            latest[access.kind][granules, own] = segment
            if access.kind == WRITE:
                clash |= ((latest[WRITE][granules] > known) & others).any(1)
            if clash.any():
                self._report_clash(accesses, serial, granules, clash)

    def _report_clash(self, accesses: list[SharedAccess], serial: int, granules: Units, clash: Flags) -> None:
        access = accesses[serial]
        split = granules.size // max(access.units.size, access.lanes.count)
        bad = np.flatnonzero(clash.reshape(-1, split).any(1))
        position = int(bad[0])
        granule = granules[int(np.flatnonzero(clash)[0])]
        warp = int(access.lanes.warp_tag[position])
        other = self._find_other(accesses, serial, int(granule), warp)
        if other is None:
            return
        first, second = sorted((serial, other[0]))
        hazard = "-after-".join(ACTIONS[accesses[index].kind] for index in (second, first))
        partner = accesses[other[0]].site
        line = partner.location.line or partner.ptx_line
        self.report(
            f"{hazard} race: warp {warp - 1} and warp {other[1] - 1} ({partner.opcode}, line {line}) without a barrier "
            "between them",
            access.units,
            access.shift,
            access.lanes,
            access.site,
            position,
            bad.size,
        )

    def _find_other(self, accesses: list[SharedAccess], serial: int, granule: int, warp: int) -> tuple[int, int] | None:
        """(serial, warp tag) of the nearest access by another warp to the location, at least one of the two writing."""
        kind, shift = accesses[serial].kind, _finest_shift(accesses)
        found: tuple[int, int] | None = None
        for index, access in enumerate(accesses):
            if access.kind == kind and kind != WRITE:
                continue
            if kind == READ and access.kind == READ:
                continue
            granules, tags = self._granules(access, shift)
            here = np.flatnonzero((granules == granule) & (tags != warp))
            if here.size and (found is None or index <= serial):
                found = index, int(tags[here[0]])
        return found

    def report(
        self, words: str, units: Units, shift: int, lanes: LaneSet, site: Site, position: int, count: int
    ) -> None:
        """Record a race at one lane's location."""
        report_race(self.chunk, words, units, shift, lanes, site, position, count)

    def _compact(self) -> None:
        """Keep one of the equal accesses of each warp; a loop without a barrier would otherwise grow the log."""
        groups: dict[tuple[int, int, int], list[SharedAccess]] = {}
        for access in self.accesses:
            groups.setdefault((access.site.number, access.kind, id(access.clocks)), []).append(access)
        kept: list[SharedAccess] = []
        for group in groups.values():
            head = group[0]
            units = np.concatenate([np.broadcast_to(part.units, (part.lanes.count,)) for part in group])
            index = np.concatenate([part.lanes.index for part in group])
            _, first = np.unique(units * 64 + index % self.chunk.lanes_per_block // 32, return_index=True)
            first.sort()
            lanes = type(head.lanes)(self.chunk, index.take(first))
            kept.append(SharedAccess(head.kind, units.take(first), head.shift, lanes, head.site, head.clocks))
        self.accesses = kept
        self.logged_lanes = sum(access.units.size for access in kept)
        self.compact_at_lanes = max(_COMPACT_AT_LANES, 2 * self.logged_lanes)


def report_race(
    chunk: ChunkState, words: str, units: Units, shift: int, lanes: LaneSet, site: Site, position: int, count: int
) -> None:
    """Add a shared_race fault at one lane's location."""
    base = lanes.shared_base
    unit = int(units[position] if units.size > 1 else units[0])
    address = (unit << shift) - int(base[position] if base.size > 1 else base[0])
    chunk.run.collector.add("shared_race", f"{words} at shared offset {address}", site, lanes, position, count, address)


def _finest_shift(accesses: list[SharedAccess]) -> int:
    """Locations as coarse as the accesses allow: an access is aligned to its size."""
    return min(access.shift for access in accesses)


def _part(access: SharedAccess, position: Units) -> SharedAccess | None:
    if position.size == 0:
        return None
    if position.size == access.lanes.count:
        return access
    units = access.units if access.units.size == 1 else access.units.take(position)
    return SharedAccess(access.kind, units, access.shift, access.lanes.subset(position), access.site, access.clocks)
