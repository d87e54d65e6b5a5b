"""A chunk of whole thread blocks in execution: the scheduler of its lane groups, and its barriers."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ..checks.clock_races import ClockRaces
from ..checks.early_reads import EarlyReads
from ..checks.order import ChunkOrder
from ..checks.read_rules import read_rules
from ..memory.async_copy import CopyQueue
from ..memory.bulk_copy import BulkCopies
from ..memory.local_memory import LocalMemory
from ..memory.shared_memory import SharedMemory
from ..state.groups import Group, merge_groups
from ..state.lanes import WARP, LaneSet, RunState
from ..warp.barriers import Barriers
from ..warp.clusters import Clusters
from ..warp.mbarriers import Mbarriers
from ..warp.spins import Spins
from ..warp.warp_meetings import WarpMeetings
from ..warp.wgmma import Wgmmas


class Chunk:
    """Blocks ``block_ids`` (linear numbers, in execution order, those of a cluster side by side) of a launch.

    Scheduling: the waiting group with the lowest block index runs first, which merges lanes again where their paths
    meet (see flow.py for the order).
    """

    def __init__(self, run: RunState, block_ids: npt.NDArray[np.int64]) -> None:
        self.run = run
        self.block_ids = block_ids
        self.block_count = block_ids.size
        self.cluster_blocks = run.cluster_blocks
        self.block_dim = run.block
        self.grid_dim = run.grid
        self.threads = run.block[0] * run.block[1] * run.block[2]
        self.lanes_per_block = -(-self.threads // WARP) * WARP
        self.lane_count = self.block_count * self.lanes_per_block
        self.shared_stride = -(-run.shared_bytes // 128) * 128
        self.full = LaneSet(self, np.arange(self.lane_count))
        self.alive: npt.NDArray[np.bool_] | None = None
        self.live_count = self.lane_count
        self.order = ChunkOrder(self, run.order)
        self.shared = SharedMemory(self, run.shared_bytes, self.shared_stride, run.kernel.granule_shift)
        self.local = LocalMemory(self, run.kernel.local_bytes)
        self.copies = CopyQueue(self)
        self.barriers = Barriers(self)
        self.early_reads = EarlyReads(self, run.in_front) if run.in_front.size else None
        self.read_rules = read_rules(self, run.owned_reads, self.early_reads)
        self.ready: dict[int, list[Group]] = {}
        self.spins = Spins(self)

    def coordinates(self, lane: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """(block, thread) coordinates of a lane."""
        block = int(self.block_ids[lane // self.lanes_per_block])
        return unravel(block, self.grid_dim), unravel(lane % self.lanes_per_block, self.block_dim)

    def alive_flags(self) -> npt.NDArray[np.bool_]:
        """Which lanes have not exited (padding lanes never lived)."""
        if self.alive is None:
            self.alive = np.ones(self.lane_count, np.bool_)
            if self.lanes_per_block != self.threads:
                self.alive &= np.arange(self.lane_count) % self.lanes_per_block < self.threads
        return self.alive

    def start(self) -> None:
        """Put all threads before the kernel's first block."""
        kernel = self.run.kernel
        lanes = self.full
        if self.lanes_per_block != self.threads:
            lanes = LaneSet(self, np.flatnonzero(self.alive_flags()))
            self.live_count = lanes.count
        self.ready[kernel.entry] = [Group(lanes, list(kernel.initial_registers))]

    def proceed(self) -> bool:
        """Run the chunk to its end (True), or until all that could run waits in loops for others.

        Bulk copies arrive and waits time out when nothing else can run.
        """
        kernel = self.run.kernel
        ready = self.ready
        while True:
            while ready:
                current = min(ready)
                groups = ready.pop(current)
                if len(groups) == 1:
                    self._advance(current, groups[0])
                else:
                    self._advance(current, merge_groups(groups, kernel.blocks[current].live_in, self.full))
            if self.live_count == 0:
                break
            if self.warp_meetings.release() or self.bulk_copies.deliver() or self.mbarriers.time_out():
                continue
            if self.spins.wake():
                continue
            if self.spins.waiting:
                return False
            self.mbarriers.report_deadlock()
            self.warp_meetings.report_deadlock()
            self.clusters.report_deadlock()
            self.barriers.report_deadlock()
        self.full_barrier(None)
        if kernel.is_asynchronous:
            self.bulk_copies.report_unfinished()
            self.wgmmas.report_uneven()
        return True

    @property
    def live_blocks(self) -> int:
        """How many of its blocks have not ended."""
        return int(self.alive_flags().reshape(self.block_count, -1).any(1).sum())

    @cached_property
    def mbarriers(self) -> Mbarriers:
        """mbarriers, made when first needed like all that only asynchronous kernels have."""
        return Mbarriers(self)

    @cached_property
    def warp_meetings(self) -> WarpMeetings:
        """Lanes that wait for others of their warp."""
        return WarpMeetings(self)

    @cached_property
    def clusters(self) -> Clusters:
        """The clusters' barriers."""
        return Clusters(self)

    @cached_property
    def bulk_copies(self) -> BulkCopies:
        """Bulk copies in flight."""
        return BulkCopies(self)

    @cached_property
    def wgmmas(self) -> Wgmmas:
        """wgmma in flight."""
        return Wgmmas(self)

    @property
    def races(self) -> ClockRaces:
        """The race check of a kernel that uses mbarriers, bulk copies or wgmma."""
        races = self.shared.races
        if not isinstance(races, ClockRaces):
            raise AssertionError("only an asynchronous kernel has clocks from its start")  # by Kernel.is_asynchronous
        return races

    @property
    def has_clocks(self) -> bool:
        """Whether there is such a check."""
        return isinstance(self.shared.races, ClockRaces)

    def exchanged(self, lanes: LaneSet, mask: npt.NDArray[np.uint32]) -> None:
        """Lanes gave each other values; what they did before was done then."""
        self.shared.races.exchanged(lanes, mask)

    def full_barrier(self, complete: npt.NDArray[np.bool_] | None) -> None:
        """A barrier of all threads of the flagged blocks (None: all) completed."""
        self.order.block_barrier(complete)
        self.shared.races.full_barrier(complete)

    def wait_at(self, block: int, group: Group) -> None:
        """Put a group in the queue of a basic block."""
        self.ready.setdefault(block, []).append(group)

    def _advance(self, current: int, group: Group) -> None:
        """Run a group from a block on, as far as no other group is due before it."""
        run = self.run
        blocks = run.kernel.blocks
        ready = self.ready
        while True:
            block = blocks[current]
            count = group.lanes.count
            run.count_instructions(block, count, group)
            result = block.function(group)
            group.dirty |= block.defined
            end = block.end
            before = current
            if end == "branch":
                following = self._branch(current, block.successors, result, group)
                if following is None:
                    return
                current = following
            elif end == "jump":
                current = block.successors[0]
            elif end == "barrier":
                if block.barrier is None or not self.barriers.arrive(block.barrier, result, block.successors[0], group):
                    return
                current = block.successors[0]
            elif end == "phase":
                if block.site is None or not self.mbarriers.wait(result, block.site, block.successors[0], group):
                    return
                current = block.successors[0]
            elif end == "cluster":
                if block.site is None or not self.clusters.wait(block.site, block.successors[0], group):
                    return
                current = block.successors[0]
            elif end == "warp":
                if block.site is None or not self.warp_meetings.arrive(result, block.site, block.successors[0], group):
                    return
                current = block.successors[0]
            elif end == "trap":
                self._trap(block.site, group)
                return
            else:
                self._exit(group)
                return
            if current <= before and blocks[current].waits is not None and self.spins.takes(current, group):
                return
            if ready and min(ready) <= current:
                self.wait_at(current, group)
                return

    def _branch(self, current: int, successors: tuple[int, ...], guard: Any, group: Group) -> int | None:
        taken, other = successors
        if guard.shape[0] == 1:
            return taken if guard[0] else other
        held = int(np.count_nonzero(guard))
        if held == guard.shape[0]:
            return taken
        if held == 0:
            return other
        first, second = group.split((np.flatnonzero(guard), np.flatnonzero(~guard)))
        for target, part in ((taken, first), (other, second)):
            waits = target <= current and self.run.kernel.blocks[target].waits is not None
            if not waits or not self.spins.takes(target, part):
                self.wait_at(target, part)
        return None

    def _trap(self, site: Any, group: Group) -> None:
        words = "a breakpoint (brkpt), and there is no debugger" if site.opcode == "brkpt" else "trap"
        self.run.collector.add("trap", f"the kernel executed {words}", site, group.lanes, 0, group.lanes.count)

    def _exit(self, group: Group) -> None:
        self.live_count -= group.lanes.count
        is_cluster = self.cluster_blocks > 1 and self.run.kernel.is_asynchronous
        if self.live_count == 0 and not self.barriers.has_waiting and not is_cluster:
            return
        self.alive_flags()[group.lanes.index] = False
        self.barriers.lanes_exited(group.lanes)
        if is_cluster:
            self.clusters.lanes_exited()


def unravel(number: int, extent: tuple[int, int, int]) -> tuple[int, int, int]:
    """Linear number -> (x, y, z), x fastest."""
    x, y, _ = extent
    return number % x, number // x % y, number // (x * y)
