"""Barriers that count: whether the threads that meet there are the ones that the count means.

A barrier with a thread count completes with the thread that makes the count full, whoever comes later. So more threads
than it counts meet in an order that nobody has laid down, and some of them pass without the others. What may not be:

* more threads arrive than are counted, and nothing makes the surplus come after the others have met;
* a warp arrives twice before the count is full, and stands for two;
* threads that meet there give different counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..ptx.sites import Site
from ..state.lanes import ChunkState, LaneSet

Units = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Arrivals = Iterable[tuple["LaneSet", Site]]
KIND = "barrier_count"


class BarrierCounts:
    """Checks of the counted barriers of a chunk; ``latest`` holds, for each barrier number and block, a site and a warp
    of the last meeting."""

    def __init__(self, chunk: ChunkState) -> None:
        self.chunk = chunk
        self.latest: dict[int, tuple[Units, Units]] = {}

    def check_arrival(self, number: int, threads: int, lanes: LaneSet, site: Site, present: Arrivals) -> None:
        """Lanes arrive at a counted barrier where others are ``present``: is it the meeting that counts them?"""
        warps = self.chunk.lanes_per_block // 32
        for others, other_site in present:
            twice = np.flatnonzero(np.isin(lanes.index, others.index))
            if twice.size:
                warp = int(lanes.thread[twice[0]]) // 32
                words = f"warp {warp} arrives twice (before that at {_line(other_site)}) and is counted for two"
                self._report(number, threads, words, lanes, site, twice)
        late = np.flatnonzero(~self.chunk.order.is_after_meeting(number, lanes.warps))
        if late.size:
            warp = int(lanes.warps[late[0]])
            sites, met = self.latest[number]
            other = self.chunk.run.kernel.sites[int(sites[warp // warps])]
            words = (
                f"warp {warp % warps} arrives beside those that it counted: nothing makes it wait until they have met "
                f"(warp {int(met[warp // warps])} among them, at {_line(other)})"
            )
            inside = np.flatnonzero(np.isin(lanes.index // 32, lanes.warps[late]))
            self._report(number, threads, words, lanes, site, inside)

    def check_same(
        self, number: int, threads: int, lanes: LaneSet, site: Site, expected: Units, arrived: Units
    ) -> None:
        """Lanes arrive where others wait: all must give the same count."""
        slots = lanes.block_slot
        other = np.flatnonzero((arrived[slots] > 0) & (expected[slots] != threads))
        if other.size:
            words = f"others that wait there give {int(expected[slots[other[0]]])} as its count"
            self._report(number, threads, words, lanes, site, other)

    def meet(self, number: int, needed: Units, arrived: Units, complete: Flags, present: Arrivals) -> None:
        """The count is full in the flagged blocks: note who met, and report where more came than are counted."""
        present = list(present)
        sites, met = self.latest.setdefault(
            number, (np.zeros(self.chunk.block_count, np.int64), np.zeros(self.chunk.block_count, np.int64))
        )
        for lanes, site in present:
            inside = np.flatnonzero(complete[lanes.block_slot])
            sites[lanes.block_slot[inside]] = site.number
            met[lanes.block_slot[inside]] = lanes.thread[inside] // 32
        surplus = np.flatnonzero(complete & (arrived > needed))
        if not surplus.size:
            return
        slot = int(surplus[0])
        lanes, site = next(pair for pair in reversed(present) if (pair[0].block_slot == slot).any())
        who = "; ".join(_warps_at(*pair, slot) for pair in present if (pair[0].block_slot == slot).any())
        words = f"{int(arrived[slot])} meet there, and nothing makes the surplus wait for the others to pass: {who}"
        inside = np.flatnonzero(np.isin(lanes.block_slot, surplus))
        self._report(number, int(needed[slot]), words, lanes, site, inside)

    def _report(self, number: int, threads: int, words: str, lanes: LaneSet, site: Site, inside: Units) -> None:
        message = f"barrier {number} counts {threads} threads, but {words}"
        self.chunk.run.collector.add(KIND, message, site, lanes, int(inside[0]), inside.size)


def _line(site: Site) -> str:
    return f"line {site.location.line or site.ptx_line}"


def _warps_at(lanes: LaneSet, site: Site, slot: int) -> str:
    warps: Any = np.unique(lanes.thread[lanes.block_slot == slot] // 32)
    names = f"warp {warps[0]}" if warps.size == 1 else f"warps {', '.join(str(warp) for warp in warps)}"
    return f"{names} at {_line(site)}"
