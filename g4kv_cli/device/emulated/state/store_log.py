"""What kernels stored to global memory: coverage of outputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .memory import GLOBAL_BASE, DeviceMemory

Ranges = npt.NDArray[np.int64]
"""[n, 2] sorted, disjoint (begin, end) byte offsets in the arena."""


def empty_ranges() -> Ranges:
    """No ranges."""
    return np.empty((0, 2), np.int64)


NO_RANGES = empty_ranges()


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
"""Logged stores at which they become ranges; twice as many as there are ranges then at the next time."""
_ENTRY_LANES = 64
"""An entry takes the memory of that many stores, however few it holds."""


class StoreLog:
    """The bytes that one launch stores to."""

    def __init__(self) -> None:
        self.entries: list[tuple[npt.NDArray[np.int64], int]] = []
        """(units, shift) of each store instruction that is not in the ranges yet."""
        self._ranges = empty_ranges()
        self._logged = 0
        self._compact_at = _COMPACT_AT_LANES

    def add(self, units: npt.NDArray[np.int64], shift: int) -> None:
        """Record a store; ``units`` are arena offsets in units of 1 << shift bytes."""
        self.entries.append((units, shift))
        self._logged += max(units.size, _ENTRY_LANES)
        if self._logged > self._compact_at:
            self._ranges = self.finish()
            self.entries = []
            self._logged = len(self._ranges)
            self._compact_at = max(_COMPACT_AT_LANES, 2 * self._logged)

    def finish(self) -> Ranges:
        """The bytes stored."""
        parts = [self._ranges] if len(self._ranges) else []
        for shift in sorted({shift for _, shift in self.entries}):
            begins = np.sort(np.concatenate([units for units, of in self.entries if of == shift])) << shift
            parts.append(merge_ranges(begins, begins + (1 << shift)))
        return parts[0] if len(parts) == 1 else union_ranges(parts)
