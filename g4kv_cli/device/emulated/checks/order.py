"""What comes before what in a launch: one model for the lanes of a warp, the warps of a block, and blocks.

The launch counts moments; every barrier, fence, release and acquire begins a new one. For each thread it is kept up to
which moment the accesses of others come before what the thread does next:

* a barrier of a block orders all its threads, ``bar.warp.sync`` the lanes that are its members, a barrier of some warps
  all that arrived there before all that waited there. Threads that have exited have arrived everywhere;
* a store or atomic that others may wait for (volatile, relaxed, release, atomic) publishes what its thread's last fence
  covered, with release all that the thread knows; a barrier hands on what others had fenced before it;
* an arrival on an mbarrier, or a releasing one at the cluster's barrier, comes before what follows a wait for it;
* a volatile, relaxed or acquire load, or an atomic with a result, learns what was published at its address. A fence
  behind it is not asked for;
* what has the scope ``.cta`` publishes to its block, and learns of its block, alone; so does what has ``.cluster``
  where clusters have one block; elsewhere that is taken for the whole GPU;
* ``shfl.sync``, votes and their like order nothing, but hand on what a lane has fenced, and has learnt of other warps.
  What lanes of the warp read in shared memory before one of all its lanes comes before what they store there behind it,
  however: none goes on before all have come (shared_races.py);
* in shared memory no fence is asked for where threads wait for each other there: the stores of a thread arrive in
  their order. Where none waits only atomics publish, and behind a fence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..faults import EmulatorError
from ..ptx.ordering import STRONG, WEAK, Manner, manner
from ..ptx.sites import Site
from ..state.lanes import WARP, ChunkState, LaneSet, pack_lanes
from .known import BLOCK_OF, NOTHING, THREAD, WARP_OF, Known, key_of

Units = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
CLUSTER = -1
"""Stands for the number of an mbarrier where the cluster's barrier is meant."""
MOST_BYTES = 1 << 31
"""Host memory for what the threads of a launch know of each other."""


@dataclass(frozen=True, eq=False)
class Stand:
    """What the lanes of a chunk know, at a moment; never changed. ``block`` of its blocks, by full barriers; ``lane``
    of the lanes of each lane's own warp; ``known`` the number of what else each lane knows (see ``Order.known``)."""

    block: Units
    lane: Units
    known: npt.NDArray[np.int32]


_MANY = 4 * WARP
"""Numbers that are worth a look whether they are all the same."""
_NOBODY = np.zeros(0, np.int64), np.zeros(0, np.int64)


@dataclass
class _Published:
    """What a location hands on: to all, and to threads of the block that a ``fence.cta`` was made in."""

    known: Known
    in_block: Known
    block: int

    @property
    def nbytes(self) -> int:
        """The host memory that it takes."""
        return self.known.nbytes + (0 if self.in_block is self.known else self.in_block.nbytes)


class Order:
    """The order of one launch of blocks of so many ``threads``."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.now = 1
        self.known: list[Known] = [NOTHING]
        self.published: dict[tuple[int, int], _Published] = {}
        self.has_fences = False
        self._bytes = 0
        self._joined: dict[tuple[int, int], int] = {}
        self._numbers: dict[int, int] = {}

    def number_of(self, known: Known) -> int:
        """The number by which lanes hold it."""
        if known is NOTHING:
            return 0
        found = self._numbers.get(id(known))
        if found is None:
            found = self._numbers[id(known)] = len(self.known)
            self.known.append(known)
            self._hold(known.nbytes)
        return found

    def publish(self, key: tuple[int, int], found: _Published | None) -> None:
        """What a location hands on from now on."""
        before = self.published.pop(key, None)
        if before is not None:
            self._bytes -= before.nbytes
        if found is not None:
            self.published[key] = found
            self._hold(found.nbytes)

    def _hold(self, nbytes: int) -> None:
        self._bytes += nbytes
        if self._bytes > MOST_BYTES:
            raise EmulatorError(
                f"the order of the launch's accesses takes more than {MOST_BYTES >> 20} MiB to keep: too many threads "
                "wait for each other, or count, in memory; launch fewer blocks"
            )

    def join(self, number: int, known: Known) -> int:
        """The number of what both know."""
        key = number, self.number_of(known)
        found = self._joined.get(key)
        if found is None:
            mine = self.known[number]
            both = Known.joined((mine, known)).compact(self.threads)
            is_same = np.array_equal(both.keys, mine.keys) and np.array_equal(both.times, mine.times)
            found = self._joined[key] = number if is_same else self.number_of(both)
        return found

    def next_moment(self) -> int:
        """The moment that ends now."""
        self.now += 1
        return self.now - 1


class ChunkOrder:
    """The part of a chunk in the order of its launch."""

    def __init__(self, chunk: ChunkState, order: Order) -> None:
        self.chunk = chunk
        self.order = order
        self.warps = chunk.lanes_per_block // WARP
        self.stand = Stand(
            np.zeros(chunk.block_count, np.int64),
            np.zeros(chunk.lane_count, np.int64),
            np.zeros(chunk.lane_count, np.int32),
        )
        self.fenced: dict[str, Units] = {}
        """Moments of each lane's last fence, by its reach (gpu, cta); what was fenced before the last barrier of its
        block and of its warp; and what the lane knew at the fence."""
        self.met: dict[int, list[tuple[Units, Units]]] = {}
        """For each barrier number and block the warps that met there last, and the moment of each."""
        self.joining: dict[tuple[int, int], Known] = {}
        self.completed: dict[tuple[int, int], Known] = {}
        """For each mbarrier and block what arrivals in the current phase know, and in the last that is complete."""

    def first_lane(self, slot: int) -> int:
        """Number in the grid of the first thread of a block of the chunk; blocks have whole warps."""
        return int(self.chunk.block_ids[slot]) * self.chunk.lanes_per_block

    # ---- barriers ------------------------------------------------------------------------------------------------

    def block_barrier(self, complete: Flags | None) -> None:
        """A barrier of all threads of the flagged blocks (None: all)."""
        now, stand = self.order.next_moment(), self.stand
        block = np.full_like(stand.block, now) if complete is None else np.where(complete, now, stand.block)
        known = stand.known
        if known.any():
            known = known.copy()
            table = known.reshape(self.chunk.block_count, -1)
            for slot in range(self.chunk.block_count):
                parts = self._known_by(table[slot]) if complete is None or complete[slot] else []
                if len(parts) > 1:
                    table[slot] = self.order.number_of(Known.joined(parts))
        self.stand = Stand(block, stand.lane, known)
        inside = slice(None) if complete is None else np.repeat(complete, self.chunk.lanes_per_block)
        self._hand_on("block", inside)
        for met in self.met.values():
            for slot in range(len(met)):
                if complete is None or complete[slot]:
                    met[slot] = _NOBODY

    def _hand_on(self, where: str, inside: Any) -> None:
        """What the lanes have fenced is known to all that met."""
        for reach in ("gpu", "cta"):
            if reach in self.fenced:
                self.fenced[f"{reach} {where}"][inside] = self.fenced[reach][inside]

    def warp_barrier(self, lanes: LaneSet, mask: npt.NDArray[np.uint32]) -> None:
        """bar.warp.sync of these lanes."""
        chunk, stand = self.chunk, self.stand
        now = self.order.next_moment()
        here = lanes.frame.present_bits
        is_whole = (
            here == 0xFFFFFFFF
            if chunk.alive is None
            else here == pack_lanes(chunk.alive.reshape(-1, WARP))[lanes.warps]
        )
        has_all = lanes.frame.spread(mask) & here[:, None] == here[:, None]
        is_whole &= (has_all if lanes.frame.present is None else has_all | ~lanes.frame.present).all(1)
        lane, known = stand.lane.copy(), stand.known
        if is_whole.all():
            lane[lanes.index] = now
        else:
            row = np.repeat(is_whole, WARP).reshape(-1, WARP)
            lane[lanes.index[lanes.frame.collect(row)]] = now
        if known.any() or not is_whole.all():
            known = known.copy()
            for number, warp in enumerate(lanes.warps):
                members = lanes.index[lanes.index // WARP == warp]
                if is_whole[number]:
                    self._join_lanes(known, members, ())
                else:
                    self._part_of_a_warp(known, members, mask, lanes, now)
        self.stand = Stand(stand.block, lane, known)
        self._hand_on("warp", lanes.index)
        if chunk.has_clocks:
            chunk.races.warp_barrier(lanes)

    def exchange(self, lanes: LaneSet, mask: npt.NDArray[np.uint32]) -> None:
        """Members of the masks give each other values: what they have fenced and learnt goes with them."""
        self.chunk.exchanged(lanes, mask)
        known = self.stand.known
        fenced = self.fenced["cta"][lanes.index] if "cta" in self.fenced else np.zeros(0, np.int64)
        if not fenced.any() and (len(self.order.known) == 1 or not known[lanes.index].any()):
            return
        begins = np.flatnonzero(np.diff(lanes.index // WARP, prepend=-1))
        numbers = known[lanes.index]
        has_news = np.minimum.reduceat(numbers, begins) != np.maximum.reduceat(numbers, begins)
        if fenced.any():
            has_news |= np.maximum.reduceat(fenced, begins) > 0
        if not has_news.any():
            return
        changed = known.copy()
        masks = np.broadcast_to(mask, (lanes.count,))
        ends = np.append(begins[1:], lanes.count)
        for row in np.flatnonzero(has_news):
            here = slice(begins[row], ends[row])
            for value in _distinct(masks[here]):
                members = lanes.index[here][masks[here] == value]
                members = members[(value >> (members % WARP)) & 1 == 1]
                fences = members[self.fenced["cta"][members] > 0] if fenced.any() else members[:0]
                parts = self._known_by(known[members])
                parts += [self._fenced_by(int(lane), "cta") for lane in fences]
                if len(parts) > 1:
                    changed[members] = self.order.number_of(Known.joined(parts).compact(self.order.threads))
        self.stand = Stand(self.stand.block, self.stand.lane, changed)

    def _known_by(self, numbers: npt.NDArray[Any]) -> list[Known]:
        """What lanes with these numbers know, once each."""
        return [self.order.known[number] for number in _distinct(numbers)]

    def _part_of_a_warp(self, known: Any, members: Units, mask: Any, lanes: LaneSet, now: int) -> None:
        masks = np.broadcast_to(mask, (lanes.count,))[np.isin(lanes.index, members)]
        for value in np.unique(masks):
            group = members[(masks == value) & ((value >> (members % WARP)) & 1 == 1)]
            if group.size:
                threads = self.threads_of(group)
                warp = key_of(WARP_OF, int(threads[0]) // WARP)
                mine = [(key_of(THREAD, int(thread)), now) for thread in threads]
                self._join_lanes(known, group, [*mine, (warp, int(self.stand.lane[group].max()))])

    def _join_lanes(self, known: Any, members: Units, more: Any) -> None:
        parts = self._known_by(known[members])
        if len(parts) > 1 or len(more):
            known[members] = self.order.number_of(Known.joined([*parts, Known.of(more)]))

    def threads_of(self, index: Units) -> Units:
        """Numbers in the grid of lanes of the chunk."""
        each = self.chunk.lanes_per_block
        return np.asarray(self.chunk.block_ids[index // each] * each + index % each, np.int64)

    def _of_warps(self, rows: Units, now: int) -> Known:
        """All that warps (numbers in the chunk) of one block know and did."""
        first = self.threads_of(rows * WARP)
        slot = int(rows[0]) // self.warps
        pairs = [(key_of(WARP_OF, int(thread) // WARP), now) for thread in first]
        pairs.append((key_of(BLOCK_OF, int(self.chunk.block_ids[slot])), int(self.stand.block[slot])))
        return Known.joined([Known.of(pairs), *self._known_by(self.stand.known.reshape(-1, WARP)[rows])])

    def signal(self, lanes: LaneSet) -> dict[int, tuple[int, Known]]:
        """Lanes arrive at a barrier without waiting: the moment and what their warps know, by their numbers in the
        chunk."""
        now = self.order.next_moment()
        return {int(row): (now, self._of_warps(np.array([row]), now)) for row in lanes.warps}

    def partial_barrier(
        self, number: int, passed: list[LaneSet], signals: list[tuple[LaneSet, Any]], complete: Flags
    ) -> None:
        """Barrier ``number`` of some warps completed in the flagged blocks: what waited comes after all that arrived.

        ``signals`` are the lanes of those blocks that arrived without waiting, with what they knew then.
        """
        now, stand = self.order.next_moment(), self.stand
        rows = np.unique(np.concatenate([lanes.warps for lanes in passed])) if passed else np.zeros(0, np.int64)
        lane, known = stand.lane.copy(), stand.known.copy()
        met = self.met.setdefault(number, [_NOBODY] * self.chunk.block_count)
        for slot in np.flatnonzero(complete):
            inside = rows[rows // self.warps == slot]
            others = [
                (row, *each[int(row)]) for part, each in signals for row in part.warps if row // self.warps == slot
            ]
            met[slot] = (
                np.concatenate([inside, np.array([row for row, _, _ in others], np.int64)]),
                np.concatenate([np.full(inside.size, now), np.array([moment for _, moment, _ in others], np.int64)]),
            )
            if not inside.size:
                continue
            joined = Known.joined([self._of_warps(inside, now), *(known for _, _, known in others)])
            members = (inside[:, None] * WARP + np.arange(WARP)).reshape(-1)
            known[members] = self.order.number_of(joined)
            lane[members] = now
        self.stand = Stand(stand.block, lane, known)

    def is_after_meeting(self, number: int, rows: Units) -> Flags:
        """For each warp (numbers in the chunk), whether it comes after the latest meeting at a partial barrier."""
        found = np.ones(rows.size, np.bool_)
        for place, row in enumerate(rows if number in self.met else ()):
            others, moments = self.met[number][row // self.warps]
            is_other = others != row
            threads = self.threads_of(others[is_other] * WARP)
            known = self.order.known[self.stand.known[row * WARP]]
            if threads.size:
                blocks = threads // self.chunk.lanes_per_block
                found[place] = (known.of_threads(threads, threads // WARP, blocks) >= moments[is_other]).all()
        return found

    # ---- mbarriers -----------------------------------------------------------------------------------------------

    def arrive(self, mbarrier: int, lanes: LaneSet, slots: Units | None = None) -> None:
        """Lanes arrive on an mbarrier: what their warps know is part of its current phase. ``slots`` are the blocks
        whose mbarrier it is, for the cluster's barrier (``CLUSTER``) the clusters."""
        now = self.order.next_moment()
        slots = lanes.block_slot if slots is None else slots
        for row, slot in dict.fromkeys(zip((lanes.index // WARP).tolist(), slots.tolist(), strict=True)):
            key = mbarrier, slot
            before = self.joining.get(key, NOTHING)
            self.joining[key] = Known.joined((before, self._of_warps(np.array([row]), now)))

    def phase_completed(self, mbarrier: int, blocks: Flags) -> None:
        """The current phase of the flagged blocks' mbarrier ended."""
        for slot in np.flatnonzero(blocks):
            self.completed[mbarrier, int(slot)] = self.joining.pop((mbarrier, int(slot)), NOTHING)

    def wait(self, mbarrier: int, lanes: LaneSet, slots: Units | None = None) -> None:
        """Lanes have waited for the latest completed phase of an mbarrier; ``slots`` as of ``arrive``."""
        known = self.stand.known.copy()
        slots = lanes.block_slot if slots is None else slots
        for slot in np.unique(slots):
            learnt = self.completed.get((mbarrier, int(slot)), NOTHING)
            inside = lanes.index[slots == slot]
            for number in np.unique(known[inside]):
                here = inside[known[inside] == number]
                known[here] = self.order.join(int(number), learnt)
        self.stand = Stand(self.stand.block, self.stand.lane, known)

    # ---- fences and what is published ----------------------------------------------------------------------------

    def fence(self, lanes: LaneSet, reach: str) -> None:
        """A fence of these lanes: ``cta`` for their block, ``gpu`` for all."""
        now = self.order.next_moment()
        self.order.has_fences = True
        for name in ("gpu", "cta") if reach == "gpu" else ("cta",):
            for part in ("", " block", " warp", " lane", " known", " all"):
                if name + part not in self.fenced:
                    self.fenced[name + part] = np.zeros(self.chunk.lane_count, np.int64)
            index = lanes.index
            self.fenced[name][index] = now
            self.fenced[f"{name} lane"][index] = self.stand.lane[index]
            self.fenced[f"{name} known"][index] = self.stand.known[index]
            self.fenced[f"{name} all"][index] = self.stand.block[lanes.block_slot]

    def _fenced_by(self, lane: int, reach: str) -> Known:
        """What a lane makes visible with a store that is not a release."""
        if reach not in self.fenced:
            return NOTHING
        table, each = self.fenced, self.chunk.lanes_per_block
        slot = lane // each
        begin, thread = slot * each, self.first_lane(slot) + lane % each
        parts = []
        if table[reach][lane]:
            parts.append(
                Known.of(
                    [
                        (key_of(THREAD, thread), int(table[reach][lane])),
                        (key_of(WARP_OF, thread // WARP), int(table[f"{reach} lane"][lane])),
                        (key_of(BLOCK_OF, thread // each), int(table[f"{reach} all"][lane])),
                    ]
                )
            )
            parts.append(self.order.known[int(table[f"{reach} known"][lane])])
        warp = lane // WARP * WARP
        for name, first, count in (("block", begin, each), ("warp", warp, WARP)):
            moments = table[f"{reach} {name}"][first : first + count]
            others = np.flatnonzero(moments)
            if others.size:
                base = self.first_lane(slot) + first - begin
                parts.append(Known((base + others) << 2 | THREAD, moments[others]))
                parts.extend(self._known_by(table[f"{reach} known"][first + others]))
        return Known.joined(parts)

    def _all_of(self, lane: int, now: int, number: int) -> Known:
        """All that a lane knows and did."""
        each = self.chunk.lanes_per_block
        slot = lane // each
        thread = self.first_lane(slot) + lane % each
        own = [
            (key_of(THREAD, thread), now),
            (key_of(WARP_OF, thread // WARP), int(self.stand.lane[lane])),
            (key_of(BLOCK_OF, thread // each), int(self.stand.block[slot])),
        ]
        return Known.joined([Known.of(own), self.order.known[number]])

    def synchronise(
        self, lanes: LaneSet, addresses: Units, found: Manner, stores: bool, is_shared: bool, asks_fence: bool
    ) -> None:
        """Lanes, in turn, learn what was published at ``addresses`` (bytes; of the arena, or of the chunk's shared
        memory) and publish there: all that they know, or (``asks_fence``) what they have fenced."""
        order, each = self.order, self.chunk.lanes_per_block
        learns = found.acquires and (not is_shared or found.strength == STRONG)
        publishes = stores and (found.releases or not asks_fence or order.has_fences or bool(order.published))
        if not publishes and not (learns and order.published):
            return
        now = order.next_moment()
        known = self.stand.known.copy()
        addresses = np.broadcast_to(addresses, (lanes.count,))
        for place, lane in zip(addresses.tolist(), lanes.index.tolist(), strict=True):
            block = int(self.chunk.block_ids[lane // each])
            key = (block if is_shared else -1), place
            before = order.published.get(key)
            if learns and before is not None:
                elsewhere = NOTHING if found.in_block else before.known
                learnt = before.in_block if before.block == block else elsewhere
                known[lane] = order.join(int(known[lane]), learnt)
            if publishes:
                self._publish(key, lane, block, found, now, int(known[lane]), asks_fence)
        if (known != self.stand.known).any():
            self.stand = Stand(self.stand.block, self.stand.lane, known)

    def _publish(
        self, key: tuple[int, int], lane: int, block: int, found: Manner, now: int, number: int, asks_fence: bool
    ) -> None:
        order = self.order
        before = order.published.get(key)
        if found.releases or not asks_fence:
            known = in_block = self._all_of(lane, now, number)
        else:
            known = self._fenced_by(lane, "gpu")
            in_block = Known.joined((known, self._fenced_by(lane, "cta")))
        if found.in_block:
            known = NOTHING
        if found.is_atomic and before is not None:
            # What was published before goes on through an atomic.
            known = Known.joined((before.known, known))
            in_block = Known.joined((before.in_block if before.block == block else before.known, in_block))
        if in_block.keys.size:
            fewer = in_block.compact(order.threads)
            order.publish(key, _Published(fewer if known is in_block else known.compact(order.threads), fewer, block))
        else:
            order.publish(key, None)


def _distinct(numbers: npt.NDArray[Any]) -> list[int]:
    """The numbers in order, once each: np.unique takes longer for those of a few warps."""
    if numbers.size > _MANY and (numbers == numbers.flat[0]).all():
        return [int(numbers.flat[0])]
    return sorted(set(numbers.ravel().tolist()))


def fence(opcode: str) -> Callable[[LaneSet], None]:
    """membar and fence: (lanes)."""
    scope = opcode.rsplit(".", 1)[1]

    def run(lanes: LaneSet) -> None:
        is_block = scope == "cta" or (scope == "cluster" and lanes.chunk.cluster_blocks == 1)
        lanes.chunk.order.fence(lanes, "cta" if is_block else "gpu")

    return run


def synchronise(site: Site, lanes: LaneSet, addresses: Units, stores: bool, is_shared: bool) -> None:
    """What an access that was just made means for the order of what follows; the access itself comes before."""
    found = manner(site.opcode, site.in_wait)
    if found.in_cluster and found.ends_at_block(lanes.chunk.cluster_blocks):
        found = replace(found, in_block=True)
    if is_shared and found.is_ordered and lanes.chunk.run.kernel.is_asynchronous:
        lanes.chunk.races.synchronise(addresses, lanes)
    if found.strength > WEAK and lanes.chunk.run.learns_of[is_shared]:
        order: ChunkOrder = lanes.chunk.order
        asks_fence = not is_shared or not lanes.chunk.run.waits_on_shared
        stores = stores and (not is_shared or not asks_fence or found.is_atomic)
        order.synchronise(lanes, addresses, found, stores, is_shared, asks_fence)
