"""Barriers of the thread blocks of a chunk: arrivals, release, and barriers that completed for the wrong reason.

Threads that have exited do not count: a barrier of all threads waits for those that live, and a warp that arrives at a
barrier with a thread count stands for 32 there, whoever of it has exited.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..checks.barrier_counts import BarrierCounts
from ..ptx.sites import Site
from ..state.groups import Group
from ..state.lanes import WARP, ChunkState, LaneSet, distinct_pairs

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class BarrierCall:
    """How a barrier block waits. ``number`` and ``threads`` are None when they come from registers (or, for
    ``threads``, when all threads of the block take part); ``has_operands``: the block's function returns both."""

    number: int | None
    threads: int | None
    has_operands: bool
    site: Site


@dataclass
class Waiting:
    """A group that waits at a barrier."""

    group: Group
    following: int
    site: Site


@dataclass
class Signal:
    """Lanes that arrived without waiting, and what their warps knew then (see order.py and clock_races.py);
    ``is_open`` flags the blocks where the barrier has not completed since."""

    lanes: LaneSet
    known: tuple[Any, Any]
    site: Site
    is_open: Flags

    def part(self, blocks: Flags) -> LaneSet:
        """The lanes that the barrier still counts in the flagged blocks."""
        return self.lanes.subset(np.flatnonzero((blocks & self.is_open)[self.lanes.block_slot]))


@dataclass
class _Votes:
    """Predicates of a bar.red for each block: how many hold and how many were given, now and at the last release."""

    held: npt.NDArray[np.int64]
    given: npt.NDArray[np.int64]
    last_held: npt.NDArray[np.int64]
    last_given: npt.NDArray[np.int64]


@dataclass
class _Barrier:
    """One barrier number of all blocks of the chunk. ``expected`` holds the thread count of counted barriers, 0 for
    'all threads'."""

    waiting: list[Waiting]
    signals: list[Signal]
    arrived: npt.NDArray[np.int64]
    expected: npt.NDArray[np.int64]

    @property
    def present(self) -> list[tuple[LaneSet, Site]]:
        """Who has arrived and where, in that order but those that do not wait first."""
        signals = [(signal.part(signal.is_open), signal.site) for signal in self.signals]
        return signals + [(waiting.group.lanes, waiting.site) for waiting in self.waiting]


class Barriers:
    """Barriers 0 to 15 of every block of a chunk."""

    def __init__(self, chunk: ChunkState) -> None:
        self.chunk = chunk
        self.named: dict[int, _Barrier] = {}
        self.votes: dict[int, _Votes] = {}
        self.counts = BarrierCounts(chunk)

    @property
    def has_waiting(self) -> bool:
        """Whether lanes wait at any barrier."""
        return any(barrier.waiting for barrier in self.named.values())

    def arrive(self, call: BarrierCall, operands: Any, following: int, group: Group) -> bool:
        """A group reaches a barrier; True if it may go straight on."""
        if call.has_operands:
            self._arrive_by_value(call, operands, following, group)
            return False
        return self._arrive_at(call.number or 0, call.threads or 0, call.site, following, group)

    def _arrive_by_value(self, call: BarrierCall, operands: Any, following: int, group: Group) -> None:
        count = group.lanes.count
        numbers = np.broadcast_to(operands[0], (count,)).astype(np.int64)
        threads = np.broadcast_to(operands[1], (count,)).astype(np.int64) if len(operands) > 1 else numbers * 0
        pairs = distinct_pairs(numbers, threads)
        parts = [group]
        if len(pairs) > 1:
            parts = group.split([np.flatnonzero((numbers == n) & (threads == t)) for n, t in pairs])
        for part, (number, thread_count) in zip(parts, pairs, strict=True):
            if self._arrive_at(number, thread_count, call.site, following, part):
                self.chunk.wait_at(following, part)

    def _arrive_at(self, number: int, threads: int, site: Site, following: int, group: Group) -> bool:
        chunk = self.chunk
        lanes = group.lanes
        self._check_whole_warps(lanes, site)
        takes_all = threads in (0, chunk.threads, chunk.lanes_per_block)
        if takes_all and lanes.count == chunk.live_count and number not in self.named:
            # The usual case: every lane that still lives arrives at once.
            if self.counts.latest:
                self.counts.check_arrival(number, chunk.threads, lanes, site, ())
            chunk.full_barrier(None)
            self._close_votes(number, np.ones(chunk.block_count, np.bool_))
            return True
        barrier = self._barrier(number)
        # Where lanes arrive without waiting, not all are ordered: such a barrier is never one of the whole block.
        is_whole = takes_all and not barrier.signals
        arrivals = self._arrivals(lanes, counts_warps=not is_whole)
        self._check_counts(number, barrier, 0 if is_whole else threads, lanes, site)
        barrier.arrived += arrivals
        barrier.expected[arrivals > 0] = 0 if is_whole else threads or chunk.threads
        barrier.waiting.append(Waiting(group, following, site))
        self._release(number, barrier)
        return False

    def _barrier(self, number: int) -> _Barrier:
        barrier = self.named.get(number)
        if barrier is None:
            empty = np.zeros(self.chunk.block_count, np.int64)
            barrier = self.named[number] = _Barrier([], [], empty, empty.copy())
        return barrier

    def signal(self, number: int, threads: int, lanes: LaneSet, site: Site) -> None:
        """bar.arrive: count the lanes without making them wait."""
        self._check_whole_warps(lanes, site)
        barrier = self._barrier(number)
        arrivals = self._arrivals(lanes, counts_warps=True)
        self._check_counts(number, barrier, threads, lanes, site)
        barrier.arrived += arrivals
        barrier.expected[arrivals > 0] = threads
        barrier.signals.append(Signal(lanes, self._knowledge(lanes), site, arrivals > 0))
        self._release(number, barrier)

    def contribute(self, number: int, lanes: LaneSet, predicate: Flags) -> None:
        """Give predicates to the bar.red that the lanes are about to wait at."""
        count = self.chunk.block_count
        votes = self.votes.get(number)
        if votes is None:
            votes = self.votes[number] = _Votes(*(np.zeros(count, np.int64) for _ in range(4)))
        flags = np.broadcast_to(predicate, (lanes.count,))
        votes.held += np.bincount(lanes.block_slot[flags], minlength=count)
        votes.given += np.bincount(lanes.block_slot, minlength=count)

    def _close_votes(self, number: int, complete: Flags) -> None:
        votes = self.votes.get(number)
        if votes is not None:
            votes.last_held[complete] = votes.held[complete]
            votes.last_given[complete] = votes.given[complete]
            votes.held[complete] = 0
            votes.given[complete] = 0

    def _live_per_block(self) -> npt.NDArray[np.int64]:
        chunk = self.chunk
        if chunk.alive is None:
            return np.full(chunk.block_count, chunk.threads)
        return np.asarray(chunk.alive.reshape(chunk.block_count, -1).sum(1), np.int64)

    def _knowledge(self, lanes: LaneSet) -> tuple[Any, Any]:
        chunk = self.chunk
        return chunk.order.signal(lanes), chunk.races.signal(lanes) if chunk.has_clocks else None

    def _arrivals(self, lanes: LaneSet, counts_warps: bool) -> npt.NDArray[np.int64]:
        """How many threads of each block arrive; ``counts_warps``: a warp that is all here is 32 of them."""
        chunk = self.chunk
        arrivals = np.bincount(lanes.block_slot, minlength=chunk.block_count)
        if not counts_warps or lanes.frame.is_whole:
            return arrivals
        here = np.bincount(lanes.index // WARP, minlength=chunk.lane_count // WARP)
        alive = chunk.alive_flags().reshape(-1, WARP).sum(1)
        exited = np.where((here > 0) & (here == alive), WARP - here, 0)
        return np.asarray(arrivals + exited.reshape(chunk.block_count, -1).sum(1), np.int64)

    def _release(self, number: int, barrier: _Barrier) -> None:
        chunk = self.chunk
        needed = np.where(barrier.expected > 0, barrier.expected, self._live_per_block())
        complete = (barrier.arrived >= needed) & (barrier.arrived > 0)
        if not complete.any():
            return
        self._close_votes(number, complete)
        partial = complete & (barrier.expected > 0)
        if partial.any():
            self.counts.meet(number, needed, barrier.arrived, partial, barrier.present)
        if number == 0:  # the others are named so that different code can meet there
            self._check_sites(barrier, complete)
        kept: list[Waiting] = []
        passed: list[LaneSet] = []
        for waiting in barrier.waiting:
            inside = complete[waiting.group.lanes.block_slot]
            going, staying = np.flatnonzero(inside), np.flatnonzero(~inside)
            if going.size == 0:
                kept.append(waiting)
                continue
            released = waiting.group
            if staying.size:
                released, rest = waiting.group.split((going, staying))
                kept.append(Waiting(rest, waiting.following, waiting.site))
            passed.append(released.lanes)
            chunk.wait_at(waiting.following, released)
        if partial.any():
            signals = [(signal.part(complete), *signal.known) for signal in barrier.signals]
            chunk.order.partial_barrier(number, passed, [(lanes, known) for lanes, known, _ in signals], complete)
            if chunk.has_clocks:
                clocks = [(lanes, clock) for lanes, _, clock in signals]
                chunk.races.partial_barrier(number, passed, clocks, complete)
            for signal in barrier.signals:
                signal.is_open = signal.is_open & ~complete
            barrier.signals = [signal for signal in barrier.signals if signal.is_open.any()]
        whole = complete & ~partial
        if whole.any():
            chunk.full_barrier(None if whole.all() else whole)
        barrier.waiting = kept
        barrier.arrived[complete] = 0
        if not kept and not barrier.arrived.any():
            del self.named[number]

    def lanes_exited(self, lanes: LaneSet) -> None:
        """Lanes ended; that may complete barriers of their blocks."""
        for number, barrier in list(self.named.items()):
            self._release(number, barrier)

    def _check_counts(self, number: int, barrier: _Barrier, threads: int, lanes: LaneSet, site: Site) -> None:
        """Report lanes that a counted barrier does not count; ``threads`` 0 takes all threads of the block."""
        everyone = self.chunk.threads
        given = np.where(barrier.expected > 0, barrier.expected, everyone)
        self.counts.check_same(number, threads or everyone, lanes, site, given, barrier.arrived)
        self.counts.check_arrival(number, threads or everyone, lanes, site, barrier.present)

    def _check_whole_warps(self, lanes: LaneSet, site: Site) -> None:
        """Report a barrier that only some live lanes of a warp have reached."""
        chunk = self.chunk
        if lanes.count == chunk.live_count or lanes.frame.is_whole:
            return
        warps = lanes.index // WARP
        here = np.bincount(warps, minlength=chunk.lane_count // WARP)
        alive = chunk.alive_flags().reshape(-1, WARP).sum(1)
        bad = np.flatnonzero((here > 0) & (here != alive))
        if bad.size:
            position = int(np.flatnonzero(warps == bad[0])[0])
            chunk.run.collector.add(
                "divergent_barrier",
                f"a barrier was reached by {int(here[bad[0]])} of the {int(alive[bad[0]])} live threads of a warp",
                site,
                lanes,
                position,
                int(here[bad].sum()),
            )

    def _check_sites(self, barrier: _Barrier, complete: Flags) -> None:
        """Report blocks whose threads met at different barrier instructions."""
        sites = {waiting.site.number for waiting in barrier.waiting}
        if len(sites) < 2:
            return
        first = np.full(self.chunk.block_count, -1, np.int64)
        for waiting in barrier.waiting:
            lanes = waiting.group.lanes
            slots = lanes.block_slot
            clash = np.flatnonzero(complete[slots] & (first[slots] >= 0) & (first[slots] != waiting.site.number))
            if clash.size:
                other = self.chunk.run.kernel.sites[int(first[slots[clash[0]]])]
                line = other.location.line or other.ptx_line
                self.chunk.run.collector.add(
                    "divergent_barrier",
                    f"threads of one block met at different barrier instructions (the other is at line {line})",
                    waiting.site,
                    lanes,
                    int(clash[0]),
                    clash.size,
                )
            first[slots] = waiting.site.number

    def places(self) -> list[str]:
        """Where lanes wait, in words."""
        found = []
        for number, barrier in sorted(self.named.items()):
            for each in barrier.waiting:
                line = each.site.location.line or each.site.ptx_line
                found.append(f"{each.group.lanes.count} at barrier {number}, line {line}")
        return found

    def report_deadlock(self) -> None:
        """Nothing can run and lanes still wait: raise that as a fault."""
        for number, barrier in sorted(self.named.items()):
            for waiting in barrier.waiting:
                lanes = waiting.group.lanes
                slot = int(lanes.block_slot[0])
                expected = int(barrier.expected[slot]) or int(self._live_per_block()[slot])
                self.chunk.run.collector.add(
                    "deadlock",
                    f"barrier {number} has {int(barrier.arrived[slot])} of {expected} threads and no thread can run",
                    waiting.site,
                    lanes,
                    0,
                    lanes.count,
                )


def signal_barrier(site: Site) -> Callable[..., None]:
    """bar.arrive: (lanes, barrier number, thread count)."""

    def run(lanes: LaneSet, number: Any, threads: Any) -> None:
        barriers: Barriers = lanes.chunk.barriers
        numbers = np.broadcast_to(number, (lanes.count,)).astype(np.int64)
        counts = np.broadcast_to(threads, (lanes.count,)).astype(np.int64)
        pairs = distinct_pairs(numbers, counts)
        for one, count in pairs:
            part = lanes
            if len(pairs) > 1:
                part = LaneSet(lanes.chunk, lanes.index[(numbers == one) & (counts == count)])
            barriers.signal(one, count, part, site)

    return run


def contribute_to_barrier() -> Callable[..., None]:
    """First half of bar.red: (lanes, barrier number, predicate)."""

    def run(lanes: LaneSet, number: Any, predicate: Flags) -> None:
        if number.shape[0] > 1:
            raise ValueError("bar.red with a barrier number that differs between threads")
        barriers: Barriers = lanes.chunk.barriers
        barriers.contribute(int(number[0]), lanes, predicate)

    return run


def read_reduction(operation: str) -> Callable[..., Any]:
    """Second half of bar.red: (lanes, barrier number) -> count (popc) or predicate (and, or)."""

    def run(lanes: LaneSet, number: Any) -> Any:
        barriers: Barriers = lanes.chunk.barriers
        votes = barriers.votes[int(number[0])]
        held = votes.last_held[lanes.block_slot]
        if operation == "popc":
            return held.astype(np.uint32)
        return held > 0 if operation == "or" else held == votes.last_given[lanes.block_slot]

    return run
