"""What kernels stored to global memory: coverage of outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..ptx.sites import Site
from .lanes import LaneSet
from .memory import GLOBAL_BASE, DeviceMemory

Ranges = npt.NDArray[np.int64]
"""[n, 2] sorted, disjoint (begin, end) byte offsets in the arena."""


@dataclass(frozen=True)
class StoreEntry:
    """One executed store instruction: ``units`` are arena offsets divided by the store's size 1 << ``shift``."""

    units: npt.NDArray[np.int64]
    shift: int
    lanes: LaneSet
    site: Site
    is_atomic: bool


def empty_ranges() -> Ranges:
    """No ranges."""
    return np.empty((0, 2), np.int64)


def merge_ranges(begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> Ranges:
    """Sorted union of intervals given sorted by begin; touching intervals join."""
    if begins.size == 0:
        return empty_ranges()
    reach = np.maximum.accumulate(ends)
    fresh = np.flatnonzero(begins[1:] > reach[:-1]) + 1
    first = np.concatenate(([0], fresh))
    last = np.concatenate((fresh - 1, [begins.size - 1]))
    return np.stack((begins[first], reach[last]), 1)


def union_ranges(parts: Sequence[Ranges]) -> Ranges:
    """Union of several range lists."""
    if not parts:
        return empty_ranges()
    both = np.concatenate(list(parts))
    both = both[np.argsort(both[:, 0], kind="stable")]
    return merge_ranges(both[:, 0], both[:, 1])


def clip_ranges(ranges: Ranges, begin: int, end: int) -> Ranges:
    """Parts of the ranges inside [begin, end)."""
    inside = ranges[(ranges[:, 1] > begin) & (ranges[:, 0] < end)]
    return np.clip(inside, begin, end)


class WrittenRanges:
    """What launches stored to, allocation by allocation (by its begin in the arena)."""

    def __init__(self) -> None:
        self._parts: dict[int, list[Ranges]] = {}

    def add(self, ranges: Ranges, memory: DeviceMemory) -> None:
        """The ranges of one launch; none reaches over the end of an allocation."""
        first = 0
        while first < len(ranges):
            allocation = memory.find(int(ranges[first, 0]) + GLOBAL_BASE)
            if allocation is None:
                raise ValueError(f"a store at arena offset {ranges[first, 0]}, outside every allocation")
            last = int(np.searchsorted(ranges[:, 0], allocation.end - GLOBAL_BASE))
            self._parts.setdefault(allocation.begin - GLOBAL_BASE, []).append(ranges[first:last])
            first = last

    def of(self, begin: int) -> Ranges:
        """Sorted and merged ranges of the arena in the allocation."""
        parts = self._parts.get(begin)
        if not parts:
            return empty_ranges()
        if len(parts) > 1:
            self._parts[begin] = parts = [union_ranges(parts)]
        return parts[0]

    def clear(self, begin: int | None) -> None:
        """Forget the allocation's stores, or all."""
        if begin is None:
            self._parts.clear()
        else:
            self._parts.pop(begin, None)


def gaps(ranges: Ranges, begin: int, end: int) -> Ranges:
    """Parts of [begin, end) that no range covers."""
    inside = clip_ranges(ranges, begin, end)
    starts = np.concatenate(([begin], inside[:, 1]))
    stops = np.concatenate((inside[:, 0], [end]))
    found = np.stack((starts, stops), 1)
    return found[found[:, 1] > found[:, 0]]


_COMPACT_AT_LANES = 1 << 24
"""Logged stores at which equal ones are dropped; twice as many as are left then at the next time."""
_ENTRY_LANES = 64
"""An entry takes the memory of that many stores, however few it holds."""


class StoreLog:
    """All global stores of one launch."""

    def __init__(self) -> None:
        self.entries: list[StoreEntry] = []
        self._logged = 0
        self._compact_at = _COMPACT_AT_LANES

    def add(self, units: npt.NDArray[np.int64], shift: int, lanes: LaneSet, site: Site, is_atomic: bool) -> None:
        """Record one store; ``units`` is (1,) or (lanes,)."""
        if units.shape[0] == 1 and lanes.count > 1 and lanes.chunk.block_count > 1:
            units = np.repeat(units, lanes.count)
        self.entries.append(StoreEntry(units, shift, lanes, site, is_atomic))
        self._logged += max(units.size, _ENTRY_LANES)
        if self._logged > self._compact_at:
            self._compact()

    def _compact(self) -> None:
        """Keep the first of a block's equal stores; a loop that writes a place again and again fills no memory."""
        groups: dict[tuple[int, int, bool, int], list[StoreEntry]] = {}
        for entry in self.entries:
            key = (entry.site.number, entry.shift, entry.is_atomic, id(entry.lanes.chunk))
            groups.setdefault(key, []).append(entry)
        kept: list[StoreEntry] = []
        for group in groups.values():
            lanes = group[0].lanes
            units = np.concatenate([entry.units for entry in group])
            index = np.concatenate([entry.lanes.index[: entry.units.size] for entry in group])
            chunk = lanes.chunk
            _, first = np.unique(units * chunk.block_count + index // chunk.lanes_per_block, return_index=True)
            first.sort()
            chosen = type(lanes)(chunk, index.take(first))
            kept.append(StoreEntry(units.take(first), group[0].shift, chosen, group[0].site, group[0].is_atomic))
        self.entries = kept
        self._logged = sum(entry.units.size for entry in kept)
        self._compact_at = max(_COMPACT_AT_LANES, 2 * self._logged)

    def finish(self) -> Ranges:
        """The bytes stored."""
        if not self.entries:
            return empty_ranges()
        begins = np.concatenate([entry.units << entry.shift for entry in self.entries])
        sizes = {1 << entry.shift for entry in self.entries}
        if len(sizes) == 1:
            in_order = np.sort(begins)
            return merge_ranges(in_order, in_order + sizes.pop())
        lengths = np.concatenate([np.full(entry.units.size, 1 << entry.shift) for entry in self.entries])
        order = np.argsort(begins)
        return merge_ranges(begins[order], begins[order] + lengths[order])
