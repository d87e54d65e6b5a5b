"""Reads of what the launch in front may still be writing.

A launch that overlaps the one in front of it (programmatic stream serialization) begins before that has ended. What
the one in front wrote is there for a thread once it has waited (``griddepcontrol.wait``), or comes after a thread of
its block that has.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..ptx.sites import Site
from ..state.lanes import WARP, ChunkState, LaneSet
from ..state.memory import GLOBAL_BASE, Allocation
from ..state.store_log import Ranges
from .order import ChunkOrder

Units = npt.NDArray[np.int64]
KIND = "read_before_wait"


class EarlyReads:
    """Who of a chunk has waited. ``written``: [n, 2] ranges of the arena, ascending, that the launch in front wrote."""

    def __init__(self, chunk: ChunkState, written: Ranges) -> None:
        self.chunk, self.written = chunk, written
        self.waited_at = np.zeros(chunk.lane_count, np.int64)
        """The moment of each lane's wait; 0 before it."""

    def wait(self, lanes: LaneSet) -> None:
        """The launch in front has ended for these lanes."""
        order: ChunkOrder = self.chunk.order
        fresh = lanes.index[self.waited_at[lanes.index] == 0]
        self.waited_at[fresh] = order.order.next_moment()

    def check(self, lanes: LaneSet, units: Units, shift: int, allocation: Allocation | None, site: Site) -> None:
        """Look at a load of units of 1 << shift bytes, (1,) or (lanes,), by these lanes."""
        waits = self.waited_at[lanes.index] == 0
        if not waits.any():
            return
        begins = np.broadcast_to(units << shift, (lanes.count,))
        place = np.searchsorted(self.written[:, 0], begins + (1 << shift)) - 1
        is_early = waits & (place >= 0) & (self.written[place, 1] > begins)
        for lane in dict.fromkeys(lanes.index[is_early].tolist()):
            if self._comes_after_a_wait(lane):
                is_early &= lanes.index != lane
        if not is_early.any():
            return
        first = int(np.flatnonzero(is_early)[0])
        run, at = self.chunk.run, int(begins[first])
        label, inside, where = run.memory.describe(GLOBAL_BASE + at)
        run.collector.add(
            KIND,
            f"read of {1 << shift} bytes of {where}, which the launch in front may still be writing: the thread has "
            "not waited for it (griddepcontrol.wait, cudaGridDependencySynchronize)",
            site,
            lanes,
            first,
            int(np.count_nonzero(is_early)),
            GLOBAL_BASE + at,
            label,
            inside,
        )

    def _comes_after_a_wait(self, lane: int) -> bool:
        """Whether what the lane does now comes after another lane's wait."""
        order: ChunkOrder = self.chunk.order
        stand, each = order.stand, self.chunk.lanes_per_block
        waited = np.flatnonzero(self.waited_at)
        moments = self.waited_at[waited]
        of_block = (waited // each == lane // each) & (moments <= stand.block[lane // each])
        of_warp = (waited // WARP == lane // WARP) & (moments <= stand.lane[lane])
        threads = order.threads_of(waited)
        known = order.order.known[int(stand.known[lane])].of_threads(threads, threads // WARP, threads // each)
        return bool((of_block | of_warp | (known >= moments)).any())


def wait_for_the_one_in_front(lanes: LaneSet) -> None:
    """griddepcontrol.wait: (lanes)."""
    early: EarlyReads | None = lanes.chunk.early_reads
    if early is not None:
        early.wait(lanes)
