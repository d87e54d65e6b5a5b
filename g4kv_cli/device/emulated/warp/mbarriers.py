"""mbarrier objects of a chunk of thread blocks: arrivals, transaction bytes, phases, and lanes that wait for a phase.

A lane that waits (``try_wait``) sleeps until the phase completes. When nothing else can run, bulk copies arrive first;
then sleepers are told "not yet" a few times, as hardware does when its time limit ends, so that code which only peeks
goes on; if still no mbarrier changes, that is a deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..checks.shared_races import READ
from ..memory.access import span_of
from ..memory.shared_memory import SharedMemory
from ..ptx.sites import Site
from ..state.groups import Group
from ..state.lanes import ChunkState, LaneSet, distinct_pairs

Array = npt.NDArray[Any]
Counts = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

MBARRIER_SHIFT = 3
MAX_COUNT = (1 << 20) - 1
"""Largest arrival count and transaction count, PTX ISA, mbarrier object."""
_CONTENT = np.array([0x6D62_6172_7269_6572], np.uint64)
"""What shared memory holds where an mbarrier lives; opaque to programs, checked at every use."""
_PATIENCE = 8
_YES = np.ones(1, np.bool_)
_NEVER = np.iinfo(np.int64).max


@dataclass
class _Waiting:
    """Lanes that sleep until a phase of this parity completes."""

    group: Group
    following: int
    number: int
    parity: int
    site: Site


class _Mbarrier:
    """The mbarrier at one address of every block. Arrays are over the blocks of the chunk."""

    def __init__(self, address: int, blocks: int) -> None:
        self.address = address
        self.is_valid = np.zeros(blocks, np.bool_)
        self.expected = np.zeros(blocks, np.int64)
        self.pending = np.zeros(blocks, np.int64)
        self.transaction_bytes = np.zeros(blocks, np.int64)
        self.phase = np.zeros(blocks, np.int64)
        self.initialiser = np.full(blocks, -1, np.int64)
        """Number in the chunk of the warp that initialised it."""
        self.is_fenced = np.zeros(blocks, np.bool_)
        self.shown_in = np.full(blocks, _NEVER, np.int64)
        """Phase of the cluster's barrier from which on the other blocks may use it."""


class Mbarriers:
    """All mbarriers of a chunk, by the number of their address."""

    def __init__(self, chunk: ChunkState) -> None:
        self.chunk = chunk
        self.all: list[_Mbarrier] = []
        self.numbers: dict[int, int] = {}
        self.waiting: list[_Waiting] = []
        self.stalls = 0
        self.refused: Flags | None = None
        """Lanes whose last wait ended without its phase; None: none ever did."""

    def locate(self, lanes: LaneSet, base: Array, offset: int, site: Site) -> Counts:
        """Checked shared address of each lane's mbarrier, (lanes,)."""
        shared: SharedMemory = self.chunk.shared
        units = shared.units(lanes, base, span_of(base), offset, MBARRIER_SHIFT, site)
        return np.broadcast_to((units << MBARRIER_SHIFT) - lanes.shared_base, (lanes.count,))

    def parts(self, lanes: LaneSet, addresses: Counts) -> Iterator[tuple[int, LaneSet, Counts | None]]:
        """(mbarrier number, its lanes, their positions or None for all) of every address."""
        first = int(addresses[0])
        if (addresses == first).all():
            yield self._number(first), lanes, None
            return
        for address in np.unique(addresses):
            position = np.flatnonzero(addresses == address)
            yield self._number(int(address)), lanes.subset(position), position

    def _number(self, address: int) -> int:
        number = self.numbers.get(address)
        if number is None:
            number = self.numbers[address] = len(self.all)
            self.all.append(_Mbarrier(address, self.chunk.block_count))
            self.chunk.races.add_mbarrier()
        return number

    def misuse(self, words: str, number: int, lanes: LaneSet, wrong: Flags, site: Site) -> None:
        """Fault of the first lane for which ``wrong`` (lanes,) holds."""
        position = np.flatnonzero(wrong)
        address = self.all[number].address
        self.chunk.run.collector.add("mbarrier_misuse", words, site, lanes, int(position[0]), position.size, address)

    def use(self, number: int, lanes: LaneSet, site: Site) -> _Mbarrier:
        """The mbarrier, checked to be initialised and intact in the lanes' blocks."""
        mbarrier = self.all[number]
        absent = ~mbarrier.is_valid[lanes.block_slot]
        words = f"the 8 bytes at shared offset {mbarrier.address}"
        if absent.any():
            self.misuse(f"{words} are no mbarrier: it was not initialised, or invalidated", number, lanes, absent, site)
        units = (mbarrier.address + lanes.shared_base) >> MBARRIER_SHIFT
        torn = np.broadcast_to(self.chunk.shared.data.of[MBARRIER_SHIFT].take(units) != _CONTENT, (lanes.count,))
        if torn.any():
            self.misuse(f"{words} were an mbarrier and have been overwritten", number, lanes, torn, site)
        own = lanes.index // self.chunk.lanes_per_block
        if self.chunk.cluster_blocks > 1 and (own != lanes.block_slot).any():
            seen = self.chunk.clusters.seen[lanes.index]
            hidden = (seen < mbarrier.shown_in[lanes.block_slot]) & (own != lanes.block_slot)
            if hidden.any():
                why = "of another block: no fence.mbarrier_init and barrier of the cluster show the mbarrier here"
                self.misuse(f"{words} {why}", number, lanes, hidden, site)
            return mbarrier
        self.chunk.races.add(READ, units, MBARRIER_SHIFT, lanes, site, is_by_lane=False)
        return mbarrier

    def initialise(self, number: int, lanes: LaneSet, counts: Counts, site: Site) -> None:
        """mbarrier.init with an arrival count for each lane."""
        mbarrier = self.all[number]
        slots = lanes.block_slot
        wrong = (counts < 1) | (counts > MAX_COUNT)
        if wrong.any():
            self.misuse(f"arrival count {int(counts[wrong][0])}, must be 1 to {MAX_COUNT}", number, lanes, wrong, site)
        again = mbarrier.is_valid[slots]
        if again.any():
            self.misuse("init of an mbarrier that was not invalidated", number, lanes, again, site)
        units = np.broadcast_to((mbarrier.address + lanes.shared_base) >> MBARRIER_SHIFT, (lanes.count,))
        self.chunk.shared.store(units, MBARRIER_SHIFT, _CONTENT, lanes, site)
        mbarrier.is_valid[slots] = True
        mbarrier.expected[slots] = counts
        mbarrier.pending[slots] = counts
        mbarrier.transaction_bytes[slots] = 0
        mbarrier.phase[slots] = 0
        mbarrier.initialiser[slots] = lanes.index // 32
        mbarrier.is_fenced[slots] = False
        mbarrier.shown_in[slots] = _NEVER

    def publish(self, lanes: LaneSet) -> None:
        """The mbarriers that the lanes' warps have made are released to the cluster."""
        for mbarrier in self.all:
            mbarrier.is_fenced |= mbarrier.is_valid & np.isin(mbarrier.initialiser, lanes.warps)

    def show_published(self, blocks: Flags, phase: Counts) -> None:
        """All threads of the flagged blocks' clusters have met, which began this phase."""
        for mbarrier in self.all:
            now = mbarrier.is_fenced & blocks
            mbarrier.shown_in[now] = np.minimum(mbarrier.shown_in[now], phase[now])

    def invalidate(self, number: int, lanes: LaneSet, site: Site) -> None:
        """mbarrier.inval."""
        mbarrier = self.use(number, lanes, site)
        units = np.broadcast_to((mbarrier.address + lanes.shared_base) >> MBARRIER_SHIFT, (lanes.count,))
        self.chunk.shared.store(units, MBARRIER_SHIFT, np.zeros(1, np.uint64), lanes, site)
        mbarrier.is_valid[lanes.block_slot] = False

    def expect(self, number: int, lanes: LaneSet, nbytes: Counts, site: Site) -> None:
        """Add to the transaction bytes that the current phase waits for."""
        mbarrier = self.use(number, lanes, site)
        np.add.at(mbarrier.transaction_bytes, lanes.block_slot, nbytes)
        wrong = mbarrier.transaction_bytes[lanes.block_slot] > MAX_COUNT
        if wrong.any():
            self.misuse(f"more than {MAX_COUNT} transaction bytes expected", number, lanes, wrong, site)

    def arrive(self, number: int, lanes: LaneSet, counts: Counts, site: Site, drops: bool = False) -> Counts:
        """Take arrivals from the current phase, and complete it where that was the last; ``drops``: from all later
        ones too. Returns the phase that each lane found, which is its token."""
        mbarrier = self.use(number, lanes, site)
        found = mbarrier.phase[lanes.block_slot]
        wrong = counts < 1
        if wrong.any():
            self.misuse("arrival with a count of 0", number, lanes, wrong, site)
        left = np.zeros(self.chunk.block_count, np.int64)
        np.add.at(left, lanes.block_slot, counts)
        if drops:
            np.subtract.at(mbarrier.expected, lanes.block_slot, counts)
        while True:
            self.chunk.races.release(number, lanes)
            self.chunk.order.arrive(number, lanes)
            taken = np.minimum(left, mbarrier.pending)
            mbarrier.pending -= taken
            left -= taken
            complete = (taken > 0) & (mbarrier.pending == 0) & (mbarrier.transaction_bytes == 0)
            self._complete(number, complete)
            if not left.any():
                return found
            stuck = (left > 0) & ~complete
            if stuck.any():
                self.misuse(
                    "more arrivals than the current phase still waits for", number, lanes, stuck[lanes.block_slot], site
                )

    def transfer(self, number: int, blocks: Counts, nbytes: int | Counts) -> None:
        """A bulk copy has brought its bytes: complete_tx, in each of these blocks (ascending, distinct)."""
        mbarrier = self.all[number]
        mbarrier.transaction_bytes[blocks] -= nbytes
        complete = np.zeros(self.chunk.block_count, np.bool_)
        complete[blocks] = (mbarrier.pending[blocks] == 0) & (mbarrier.transaction_bytes[blocks] == 0)
        self._complete(number, complete)

    def _complete(self, number: int, blocks: Flags) -> None:
        self.stalls = 0
        if not blocks.any():
            return
        mbarrier = self.all[number]
        mbarrier.phase[blocks] += 1
        mbarrier.pending[blocks] = mbarrier.expected[blocks]
        self.chunk.races.phase_completed(number, blocks)
        self.chunk.order.phase_completed(number, blocks)
        sleeping, self.waiting = self.waiting, []
        for each in sleeping:
            if each.number != number:
                self.waiting.append(each)
            else:
                self._wake(each)

    def _has_passed(self, each: _Waiting) -> Flags:
        """Whether the phase that each lane waits for is the one before the current one."""
        current = self.all[each.number].phase[each.group.lanes.block_slot]
        return np.asarray((current & 1) != each.parity, np.bool_)

    def _wake(self, each: _Waiting) -> None:
        going = self._settle(each)
        if going is not None:
            self.chunk.wait_at(each.following, going)

    def _settle(self, each: _Waiting) -> Group | None:
        """The lanes that may go on; the others sleep."""
        passed = self._has_passed(each)
        if not passed.any():
            self.waiting.append(each)
            return None
        group = each.group
        if not passed.all():
            group, rest = group.split((np.flatnonzero(passed), np.flatnonzero(~passed)))
            self.waiting.append(_Waiting(rest, each.following, each.number, each.parity, each.site))
        self.chunk.races.acquire(each.number, group.lanes)
        self.chunk.order.wait(each.number, group.lanes)
        return group

    def wait(self, operands: tuple[Array, int, Array], site: Site, following: int, group: Group) -> bool:
        """A wait of (address, offset, parity or token): True if the whole group may go straight on."""
        base, offset, parity = operands
        lanes = group.lanes
        addresses = self.locate(lanes, base, offset, site)
        odd = np.broadcast_to(parity & np.uint32(1), (lanes.count,)).astype(np.int64)
        parts = [group]
        pairs = distinct_pairs(addresses, odd)
        if len(pairs) > 1:
            parts = group.split([np.flatnonzero((addresses == address) & (odd == bit)) for address, bit in pairs])
        for part, (address, bit) in zip(parts, pairs, strict=True):
            number = self._number(address)
            self.use(number, part.lanes, site)
            going = self._settle(_Waiting(part, following, number, bit, site))
            if going is group:
                return True
            if going is not None:
                self.chunk.wait_at(following, going)
        return False

    def outcome(self, lanes: LaneSet) -> Flags:
        """The result of the lanes' last wait: whether its phase completed."""
        if self.refused is None:
            return _YES
        refused = self.refused[lanes.index]
        self.refused[lanes.index] = False
        return np.asarray(~refused, np.bool_)

    def time_out(self) -> bool:
        """Nothing can run: let the sleepers look again. False if they have done so often enough."""
        if not self.waiting or self.stalls >= _PATIENCE:
            return False
        self.stalls += 1
        if self.refused is None:
            self.refused = np.zeros(self.chunk.lane_count, np.bool_)
        sleeping, self.waiting = self.waiting, []
        for each in sleeping:
            self.refused[each.group.lanes.index] = True
            self.chunk.wait_at(each.following, each.group)
        return True

    def report_deadlock(self) -> None:
        """Nothing can run and lanes still wait for a phase: raise that as a fault."""
        if not self.waiting:
            return

        def missing(each: _Waiting) -> tuple[int, int]:
            mbarrier, slot = self.all[each.number], int(each.group.lanes.block_slot[0])
            return int(mbarrier.pending[slot]), int(mbarrier.transaction_bytes[slot])

        # Where all have arrived only bytes are wrong, which is a cause and no consequence.
        each = min(self.waiting, key=lambda candidate: missing(candidate)[0] > 0)
        pending, nbytes = missing(each)
        lanes = each.group.lanes
        mbarrier = self.all[each.number]
        slot = int(lanes.block_slot[0])
        words = (
            f"the mbarrier at shared offset {mbarrier.address} stays in phase {int(mbarrier.phase[slot])}: "
            f"{pending} of {int(mbarrier.expected[slot])} arrivals "
            + (
                f"and {nbytes} transaction bytes are missing"
                if nbytes >= 0
                else f"are missing and {-nbytes} transaction bytes more than expected have come"
            )
            + ", and no thread can run"
        )
        self.chunk.run.collector.add("deadlock", words, each.site, lanes, 0, lanes.count, mbarrier.address)


def initialise_mbarrier(site: Site, offset: int) -> Callable[..., None]:
    """mbarrier.init: (lanes, address, arrival count)."""

    def run(lanes: LaneSet, base: Array, count: Array) -> None:
        mbarriers: Mbarriers = lanes.chunk.mbarriers
        counts = np.broadcast_to(count, (lanes.count,)).astype(np.int64)
        for number, part, position in mbarriers.parts(lanes, mbarriers.locate(lanes, base, offset, site)):
            mbarriers.initialise(number, part, counts if position is None else counts[position], site)

    return run


def invalidate_mbarrier(site: Site, offset: int) -> Callable[..., None]:
    """mbarrier.inval: (lanes, address)."""

    def run(lanes: LaneSet, base: Array) -> None:
        mbarriers: Mbarriers = lanes.chunk.mbarriers
        for number, part, _ in mbarriers.parts(lanes, mbarriers.locate(lanes, base, offset, site)):
            mbarriers.invalidate(number, part, site)

    return run


def arrive_mbarrier(site: Site, offset: int, arrives: bool, expects: bool, drops: bool = False) -> Callable[..., Any]:
    """mbarrier.arrive, arrive_drop, arrive.expect_tx and expect_tx: (lanes, address, arrival count, transaction
    bytes) -> token. A token is the number of the phase; a wait looks at its lowest bit."""

    def run(lanes: LaneSet, base: Array, count: Array, nbytes: Array) -> Array:
        mbarriers: Mbarriers = lanes.chunk.mbarriers
        counts = np.broadcast_to(count, (lanes.count,)).astype(np.int64)
        bytes_expected = np.broadcast_to(nbytes, (lanes.count,)).astype(np.int64)
        tokens = np.zeros(lanes.count, np.int64)
        for number, part, position in mbarriers.parts(lanes, mbarriers.locate(lanes, base, offset, site)):
            if expects:
                here = bytes_expected if position is None else bytes_expected[position]
                mbarriers.expect(number, part, here, site)
            if arrives:
                here = counts if position is None else counts[position]
                tokens[slice(None) if position is None else position] = mbarriers.arrive(
                    number, part, here, site, drops
                )
        return tokens.view(np.uint64)

    return run


def arrive_with_copies(site: Site, offset: int, counts: bool) -> Callable[..., None]:
    """cp.async.mbarrier.arrive: (lanes, address). The copies that these lanes issued before arrive now, and with
    ``.noinc`` (``counts``) so do the lanes; without it an arrival is added and taken."""

    def run(lanes: LaneSet, base: Array) -> None:
        mbarriers: Mbarriers = lanes.chunk.mbarriers
        lanes.chunk.copies.wait(lanes, -1)
        for number, part, _ in mbarriers.parts(lanes, mbarriers.locate(lanes, base, offset, site)):
            if counts:
                mbarriers.arrive(number, part, np.ones(part.count, np.int64), site)
            else:
                mbarriers.use(number, part, site)
                lanes.chunk.races.release(number, part)

    return run


def read_phase() -> Callable[..., Flags]:
    """Second half of try_wait: (lanes) -> whether the phase completed."""

    def run(lanes: LaneSet) -> Flags:
        mbarriers: Mbarriers = lanes.chunk.mbarriers
        return mbarriers.outcome(lanes)

    return run
