"""Thread block clusters: their barrier, and lanes that act on the shared memory of another block of their cluster.

A chunk holds whole clusters, their blocks side by side in the order of their ranks. ``mapa`` gives an address that
carries the rank it was made for above bit 24; the instructions that take such an address act for *remote lanes*, which
are the same threads with another block's shared memory. What they may rely on is checked there: the mbarrier of another
block has to be published (``fence.mbarrier_init`` or a releasing arrival, then the cluster's barrier) before its use.

Loads, stores and atomics reach there at once, as those of the block itself; it must not end before they are done.

The barrier has phases. An arrival says whether it releases: what a warp did before a relaxed one is not ordered by it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..checks.order import CLUSTER
from ..memory.access import Element, span_of
from ..ptx.sites import Site
from ..state.groups import Group
from ..state.lanes import WARP, ChunkState, LaneSet
from ..state.memory import GLOBAL_BASE, RANK_SHIFT, SHARED_WINDOW

Array = npt.NDArray[Any]
Counts = npt.NDArray[np.int64]

_OFFSET_MASK = (1 << RANK_SHIFT) - 1


class RemoteLanes(LaneSet):
    """Lanes of which each works on the shared memory of the block in slot ``slots``."""

    def __init__(self, lanes: LaneSet, slots: Counts) -> None:
        super().__init__(lanes.chunk, lanes.index)
        self.block_slot = slots
        self.shared_base = slots * self.chunk.shared_stride

    def subset(self, position: Counts) -> RemoteLanes:
        """The lanes at these positions of the set."""
        return RemoteLanes(super().subset(position), self.block_slot.take(position))

    def repeated(self, count: int) -> RemoteLanes:
        """Each lane so many times."""
        return RemoteLanes(super().repeated(count), np.repeat(self.block_slot, count))


@dataclass(frozen=True, eq=False)
class _Touch:
    """An access of a warp, in a segment of its work, to another block's shared memory."""

    segment: int
    site: Site
    lanes: LaneSet
    position: int


@dataclass
class _Waiting:
    """Lanes that sleep until the barrier's phase that they arrived in is over."""

    group: Group
    following: int
    site: Site


class Clusters:
    """The barriers of a chunk's clusters, and whose mbarriers the other blocks may use."""

    def __init__(self, chunk: ChunkState) -> None:
        self.chunk = chunk
        self.blocks = chunk.cluster_blocks
        self.count = chunk.block_count // self.blocks
        self.phase = np.zeros(self.count, np.int64)
        self.has_arrived = np.zeros(chunk.lane_count, np.bool_)
        self.arrived_in = np.zeros(chunk.lane_count, np.int64)
        """The phase of a lane's latest arrival."""
        self.seen = np.zeros(chunk.lane_count, np.int64)
        """The phase that had begun when a lane last waited."""
        self.waiting: list[_Waiting] = []
        self.touched: dict[tuple[int, int], _Touch] = {}
        """(block in the chunk, warp of another block) -> the warp's latest access to that block's shared memory."""

    def cluster_of(self, lanes: LaneSet) -> Counts:
        """Each lane's cluster in the chunk."""
        return lanes.index // (self.chunk.lanes_per_block * self.blocks)

    def arrive(self, lanes: LaneSet, releases: bool, site: Site) -> None:
        """barrier.cluster.arrive."""
        self._refuse(self.has_arrived[lanes.index], lanes, "arrives again without having waited", site)
        self.has_arrived[lanes.index] = True
        self.arrived_in[lanes.index] = self.phase[self.cluster_of(lanes)]
        if releases:
            self.chunk.mbarriers.publish(lanes)
            self.chunk.races.cluster_release(lanes)
            self.chunk.order.arrive(CLUSTER, lanes, self.cluster_of(lanes))
        self._complete()

    def wait(self, site: Site, following: int, group: Group) -> bool:
        """barrier.cluster.wait: True if the whole group may go straight on."""
        lanes = group.lanes
        self._refuse(~self.has_arrived[lanes.index], lanes, "waits without having arrived", site)
        going = self._settle(_Waiting(group, following, site))
        if going is group:
            return True
        if going is not None:
            self.chunk.wait_at(following, going)
        return False

    def lanes_exited(self) -> None:
        """Who has exited is not waited for. The shared memory of a block ends with it."""
        self._complete()
        if not self.touched:
            return
        lives = self._living_blocks()
        for (slot, row), touch in list(self.touched.items()):
            if not lives[slot]:
                del self.touched[slot, row]
                if not self.chunk.races.is_before_end(slot, row, touch.segment):
                    self._report_ended(slot, touch)

    def _living_blocks(self) -> list[bool]:
        """Which blocks of the chunk have not ended."""
        return [bool(each.any()) for each in self.chunk.alive_flags().reshape(self.chunk.block_count, -1)]

    def _touch(self, lanes: LaneSet, there: LaneSet, site: Site) -> None:
        """Lanes reach the shared memory of the blocks that ``there`` acts for: it must not end before."""
        lives = self._living_blocks()
        rows, slots = lanes.index // WARP, there.block_slot
        for row, slot in dict.fromkeys(zip(rows.tolist(), slots.tolist(), strict=True)):
            if row // (self.chunk.lanes_per_block // WARP) == slot:
                continue
            position = int(np.flatnonzero((rows == row) & (slots == slot))[0])
            touch = _Touch(self.chunk.races.segment_of(row), site, lanes, position)
            if lives[slot]:
                self.touched[slot, row] = touch
            else:
                self._report_ended(slot, touch)

    def _report_ended(self, slot: int, touch: _Touch) -> None:
        words = (
            f"access to shared memory of the block of rank {slot % self.blocks}, which may have ended by then: nothing "
            "makes it wait (the cluster's barrier behind the access would)"
        )
        self.chunk.run.collector.add("ended_block_access", words, touch.site, touch.lanes, touch.position, 1)

    def _refuse(self, wrong: npt.NDArray[np.bool_], lanes: LaneSet, words: str, site: Site) -> None:
        bad = np.flatnonzero(wrong)
        if bad.size:
            self.chunk.run.collector.add(
                "divergent_barrier", f"a thread {words} at the cluster's barrier", site, lanes, int(bad[0]), bad.size
            )

    def _pending(self) -> Counts:
        """Living threads of each cluster that have not arrived in its current phase."""
        chunk = self.chunk
        current = np.repeat(self.phase, chunk.lanes_per_block * self.blocks)
        absent = chunk.alive_flags() & ~(self.has_arrived & (self.arrived_in == current))
        return np.asarray(absent.reshape(self.count, -1).sum(1), np.int64)

    def _complete(self) -> None:
        chunk = self.chunk
        current = np.repeat(self.phase, chunk.lanes_per_block * self.blocks)
        any_arrived = (self.has_arrived & (self.arrived_in == current)).reshape(self.count, -1).any(1)
        complete = (self._pending() == 0) & any_arrived
        if not complete.any():
            return
        self.phase[complete] += 1
        chunk.mbarriers.show_published(np.repeat(complete, self.blocks), np.repeat(self.phase, self.blocks))
        chunk.races.cluster_completed(complete)
        chunk.order.phase_completed(CLUSTER, complete)
        sleeping, self.waiting = self.waiting, []
        for each in sleeping:
            going = self._settle(each)
            if going is not None:
                chunk.wait_at(each.following, going)

    def _settle(self, each: _Waiting) -> Group | None:
        """The lanes that may go on; the others sleep."""
        group = each.group
        lanes = group.lanes
        passed = self.arrived_in[lanes.index] < self.phase[self.cluster_of(lanes)]
        if not passed.any():
            self.waiting.append(each)
            return None
        if not passed.all():
            group, rest = group.split((np.flatnonzero(passed), np.flatnonzero(~passed)))
            self.waiting.append(_Waiting(rest, each.following, each.site))
        going = group.lanes
        self.has_arrived[going.index] = False
        self.seen[going.index] = self.arrived_in[going.index] + 1
        self.chunk.races.cluster_acquire(going)
        self.chunk.order.wait(CLUSTER, going, self.cluster_of(going))
        return group

    def report_deadlock(self) -> None:
        """Nothing can run and lanes still wait: raise that as a fault."""
        for each in self.waiting:
            lanes = each.group.lanes
            cluster = int(self.cluster_of(lanes)[0])
            per_block = self.chunk.alive_flags().reshape(self.count, self.blocks, -1)
            arrived = (self.has_arrived & (self.arrived_in == np.repeat(self.phase, per_block[0].size))).reshape(
                per_block.shape
            )
            missing = (per_block & ~arrived)[cluster].sum(1)
            ranks = ", ".join(f"{int(count)} of rank {rank}" for rank, count in enumerate(missing) if count)
            words = f"the cluster's barrier waits for threads that cannot run ({ranks})"
            self.chunk.run.collector.add("deadlock", words, each.site, lanes, 0, lanes.count)

    def remote(self, lanes: LaneSet, addresses: Counts, site: Site) -> tuple[LaneSet, Counts]:
        """(the lanes that act for the addresses' blocks, the offsets there); an address without a rank is one's own."""
        ranks, offsets = (addresses >> RANK_SHIFT) - 1, addresses & _OFFSET_MASK
        self.check_ranks(lanes, np.maximum(ranks, 0), site)
        own = lanes.block_slot
        return RemoteLanes(lanes, np.where(ranks < 0, own, own - own % self.blocks + ranks)), offsets

    def reach(self, lanes: LaneSet, base: Array, offset: int, site: Site) -> tuple[LaneSet, Counts]:
        """(the lanes that act for the blocks whose shared memory an access reaches, the offsets there)."""
        there, offsets = self.remote(lanes, _addresses(lanes, base, offset), site)
        self._touch(lanes, there, site)
        return there, offsets

    def of_rank(self, lanes: LaneSet, rank: int, site: Site) -> LaneSet:
        """The lanes acting for the block of this rank of their cluster."""
        self.check_ranks(lanes, np.full(lanes.count, rank), site)
        own = lanes.block_slot
        return RemoteLanes(lanes, own - own % self.blocks + rank)

    def check_ranks(self, lanes: LaneSet, ranks: Counts, site: Site) -> None:
        """Report lanes that name a block which the cluster does not have."""
        bad = np.flatnonzero(ranks >= self.blocks)
        if bad.size:
            words = f"rank {int(ranks[bad[0]])} of a cluster of {self.blocks} blocks"
            self.chunk.run.collector.add("illegal_instruction", words, site, lanes, int(bad[0]), bad.size)


def _addresses(lanes: LaneSet, base: Array, offset: int) -> Counts:
    return np.broadcast_to((base.astype(np.int64) + offset) & 0xFFFFFFFF, (lanes.count,))


def arrive_cluster(site: Site, releases: bool) -> Callable[[LaneSet], None]:
    """barrier.cluster.arrive: (lanes)."""

    def run(lanes: LaneSet) -> None:
        clusters: Clusters = lanes.chunk.clusters
        clusters.arrive(lanes, releases, site)

    return run


def map_shared(site: Site, is_generic: bool) -> Callable[..., Array]:
    """mapa: (lanes, address, rank) -> address that carries the rank; of 32 bits, or generic."""

    def run(lanes: LaneSet, base: Array, rank: Array) -> Array:
        clusters: Clusters = lanes.chunk.clusters
        ranks = np.broadcast_to(rank, (lanes.count,)).astype(np.int64)
        clusters.check_ranks(lanes, ranks, site)
        if is_generic:
            _require_shared(lanes, base, site)
        offsets = _addresses(lanes, base, 0) & _OFFSET_MASK
        mapped = offsets | ((ranks + 1) << RANK_SHIFT)
        return mapped.astype(np.uint64) + np.uint64(SHARED_WINDOW) if is_generic else mapped.astype(np.uint32)

    return run


def rank_of(site: Site, is_generic: bool) -> Callable[..., Array]:
    """getctarank: (lanes, address) -> the rank of the block whose shared memory it is."""

    def run(lanes: LaneSet, base: Array) -> Array:
        clusters: Clusters = lanes.chunk.clusters
        if is_generic:
            _require_shared(lanes, base, site)
        there, _ = clusters.remote(lanes, _addresses(lanes, base, 0), site)
        return (there.block_slot % clusters.blocks).astype(np.uint32)

    return run


def _require_shared(lanes: LaneSet, base: Array, site: Site) -> None:
    bad = np.flatnonzero((base < np.uint64(SHARED_WINDOW)) | (base >= np.uint64(GLOBAL_BASE)))
    if bad.size:
        words = f"address {int(base[bad[0]]):#x} is not in shared memory"
        count = lanes.count if base.size == 1 else bad.size
        lanes.chunk.run.collector.add("illegal_instruction", words, site, lanes, int(bad[0]), count)


def arrive_at_rank(site: Site, offset: int, arrives: bool, expects: bool) -> Callable[..., None]:
    """mbarrier.arrive, arrive.expect_tx and expect_tx at an mbarrier of the cluster: (lanes, address, arrival count,
    transaction bytes)."""

    def run(lanes: LaneSet, base: Array, count: Array, nbytes: Array) -> None:
        clusters: Clusters = lanes.chunk.clusters
        mbarriers = lanes.chunk.mbarriers
        counts, sizes = (np.broadcast_to(each, (lanes.count,)).astype(np.int64) for each in (count, nbytes))
        there, offsets = clusters.reach(lanes, base, offset, site)
        for number, part, position in mbarriers.parts(there, mbarriers.locate(there, offsets, 0, site)):
            if expects:
                mbarriers.expect(number, part, sizes if position is None else sizes[position], site)
            if arrives:
                mbarriers.arrive(number, part, counts if position is None else counts[position], site)

    return run


def push(site: Site, offset: int, mbarrier_offset: int, element: Element) -> Callable[..., None]:
    """st.async: (lanes, address, mbarrier, values): stores to shared memory of the cluster that an mbarrier counts."""

    def run(lanes: LaneSet, base: Array, mbarrier: Array, *values: Array) -> None:
        chunk = lanes.chunk
        clusters: Clusters = chunk.clusters
        there, offsets = clusters.remote(lanes, _addresses(lanes, base, offset), site)
        counting, barriers = clusters.remote(lanes, _addresses(lanes, mbarrier, mbarrier_offset), site)
        apart = np.flatnonzero(there.block_slot != counting.block_slot)
        if apart.size:
            words = "the mbarrier of an asynchronous store is in another block than the bytes"
            chunk.run.collector.add("illegal_instruction", words, site, lanes, int(apart[0]), apart.size)
        data = element.pack(values, chunk.shared.data.of[element.shift].dtype)
        if data.shape[0] == 1:
            data = np.repeat(data, lanes.count)
        order = np.argsort(there.block_slot, kind="stable")
        there, offsets, barriers, data = there.subset(order), offsets[order], barriers[order], data[order]
        units = chunk.shared.units(there, offsets, span_of(offsets), 0, element.shift, site)
        located = chunk.mbarriers.locate(there, barriers, 0, site)
        for number, part, position in chunk.mbarriers.parts(there, located):
            chosen = slice(None) if position is None else position
            chunk.bulk_copies.push(number, part, units[chosen], element.shift, data[chosen], site)

    return run


def publish_mbarriers() -> Callable[[LaneSet], None]:
    """fence.mbarrier_init: (lanes)."""

    def run(lanes: LaneSet) -> None:
        lanes.chunk.mbarriers.publish(lanes)

    return run
