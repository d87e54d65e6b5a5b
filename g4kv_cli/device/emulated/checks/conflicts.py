"""Accesses of one place that no order keeps apart: what a log of accesses of a launch is searched for.

Two accesses of different threads to one place conflict if one of them writes and neither comes before the other
(order.py). Atomics do not conflict with each other, nor do accesses that others wait for, if the scope of each has both
threads in it; nor does a read beside atomics of which a compare-and-swap makes sure. Two stores of one value do no
harm: they are counted. It is enough to hold each access against the last store before it and the next one: what lies
further away is in conflict with those, or ordered by them; and against the last and next atomics, of any thread and of
another block and warp.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..ptx.ordering import STRONG, VOLATILE, WEAK, manner
from ..ptx.sites import Site
from ..state.lanes import WARP, LaneSet
from .order import Order, Stand

Units = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
READ, WRITE, ATOMIC = 0, 1, 2
ACTIONS = ("read", "write", "atomic")
_LARGEST_SHIFT = 3
"""Places of up to 8 bytes are looked at as one, for their values are compared."""


@dataclass(frozen=True, eq=False)
class Access:
    """One executed access. ``units`` are offsets in units of 1 << shift bytes, (1,) or one for each lane; ``data`` the
    units that were stored. ``serial`` counts accesses."""

    serial: int
    kind: int
    units: Units
    shift: int
    lanes: LaneSet
    site: Site
    moment: int
    stand: Stand
    data: npt.NDArray[Any] | None

    @property
    def strength(self) -> int:
        """How it may meet others."""
        return manner(self.site.opcode, self.site.in_wait).strength

    @property
    def in_block(self) -> bool:
        """Whether its scope ends with the threads' blocks."""
        return manner(self.site.opcode, False).ends_at_block(self.lanes.chunk.cluster_blocks)

    @property
    def tells(self) -> bool:
        """Whether its thread learns by it what others did there: an atomic whose result is used, or a load that is
        volatile, relaxed or acquire."""
        if self.kind == READ:
            return manner(self.site.opcode, self.site.in_wait).acquires
        return self.kind == ATOMIC and self.site.is_used


@dataclass(frozen=True)
class Conflict:
    """Accesses at one instruction, the later ones, of which ``lane`` is the first of ``count``, with one earlier."""

    later: Access
    lane: int
    earlier: Access
    earlier_lane: int
    place: int
    count: int
    is_equal: bool
    read_sites: frozenset[int]
    """Numbers of the sites of the reads, if each conflict is of a read and an atomic; else empty."""

    @property
    def is_within_warp(self) -> bool:
        """Whether the first two are lanes of one warp."""
        first, second = self.later.lanes, self.earlier.lanes
        same = first.index[self.lane] // WARP == second.index[self.earlier_lane] // WARP
        return first.chunk is second.chunk and bool(same)

    @property
    def is_between_blocks(self) -> bool:
        """Whether the first two are of different blocks."""
        return block_of(self.later.lanes, self.lane) != block_of(self.earlier.lanes, self.earlier_lane)

    @property
    def hazard(self) -> str:
        """In the words of the field."""
        return f"{ACTIONS[self.later.kind]}-after-{ACTIONS[self.earlier.kind]}"


def block_of(lanes: LaneSet, position: int) -> int:
    """Linear number in the grid of a lane's block."""
    return int(lanes.chunk.block_ids[int(lanes.index[position]) // lanes.chunk.lanes_per_block])


class _Table:
    """Accesses place by place, in the order of places and then of time: parallel arrays."""

    def __init__(self, accesses: Sequence[Access], shift: int, chosen: Sequence[Units | None]) -> None:
        parts: list[tuple[npt.NDArray[Any], ...]] = []
        for entry, (access, positions) in enumerate(zip(accesses, chosen, strict=True)):
            place, lane, value = spread(access, shift)
            if positions is not None:
                place, lane, value = place[positions], lane[positions], value[positions]
            chunk, stand, index = access.lanes.chunk, access.stand, access.lanes.index[lane]
            slot = index // chunk.lanes_per_block
            block = chunk.block_ids[slot]
            thread = chunk.order.threads_of(index)
            whose = np.full(place.size, entry, np.int64)
            parts.append(
                (
                    place,
                    whose,
                    lane,
                    value,
                    block,
                    thread,
                    index // WARP,
                    stand.block[slot],
                    stand.lane[index],
                    stand.known[index],
                )
            )
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        order = np.argsort(columns[0], kind="stable")
        (
            self.place,
            self.entry,
            self.lane,
            self.value,
            self.block,
            self.thread,
            self.row,
            self.by_block,
            self.by_warp,
            self.known,
        ) = (column[order] for column in columns)
        self.kind = np.array([access.kind for access in accesses], np.int8)[self.entry]
        self.strength = np.array([access.strength for access in accesses], np.int8)[self.entry]
        self.moment = np.array([access.moment for access in accesses], np.int64)[self.entry]
        self.in_block = np.array([access.in_block for access in accesses])[self.entry]
        self.is_validated = np.array([access.site.is_validated for access in accesses])[self.entry]
        self.tells = np.array([access.tells for access in accesses])[self.entry]
        self.has_value = np.array([access.data is not None for access in accesses])[self.entry]

    def pairs(self) -> tuple[Units, Units]:
        """(earlier, later) rows that have to be ordered."""
        row = np.arange(self.place.size)
        found: list[tuple[Units, Units]] = []
        beside = (READ, WRITE, ATOMIC) if (self.in_block & (self.kind == ATOMIC)).any() else (READ, WRITE)
        for kind, of in ((WRITE, (READ, WRITE, ATOMIC)), (ATOMIC, beside)):
            is_kind = self.kind == kind
            if not is_kind.any():
                continue
            concerned = np.isin(self.kind, of)
            before = np.maximum.accumulate(np.where(is_kind, row, -1))
            before = np.concatenate(([-1], before[:-1]))
            good = concerned & (before >= 0) & (self.place[before] == self.place)
            found.append((before[good], row[good]))
            after = np.minimum.accumulate(np.where(is_kind, row, row.size)[::-1])[::-1]
            after = np.concatenate((after[1:], [row.size]))
            others = concerned & (self.kind != WRITE) & (after < row.size)
            others[others] = self.place[after[others]] == self.place[others]
            found.append((row[others], after[others]))
            if kind == ATOMIC:
                found.extend(self._beyond(row[is_kind], before, after, concerned & ~is_kind))
        if not found:
            return row[:0], row[:0]
        keys = _distinct(np.concatenate([first * row.size + second for first, second in found]))
        return keys // row.size, keys % row.size

    def _beyond(self, atomics: Units, before: Units, after: Units, concerned: Flags) -> Iterator[tuple[Units, Units]]:
        """The same where the nearest atomic is of the access's own block or warp, with the nearest of another: atomics
        do not order each other."""
        rows = np.flatnonzero(concerned)
        for group in (self.block, self.thread // WARP):
            is_new = np.ones(atomics.size + 1, np.bool_)
            is_new[1:-1] = group[atomics[1:]] != group[atomics[:-1]]
            is_new[1:-1] |= self.place[atomics[1:]] != self.place[atomics[:-1]]
            edges = np.flatnonzero(is_new)
            for nearest, step in ((before, 0), (after, 1)):
                here = rows[(nearest[rows] >= 0) & (nearest[rows] < self.place.size)]
                near = nearest[here]
                here = here[(group[near] == group[here]) & (self.place[near] == self.place[here])]
                # The run of atomics of one block or warp that the nearest is in, and the one beside it.
                at = np.searchsorted(atomics, nearest[here])
                beside = edges[np.searchsorted(edges, at, "right") - 1 + step] - 1 + step
                good = (beside >= 0) & (beside < atomics.size)
                here, other = here[good], atomics[beside[good]]
                good = (self.place[other] == self.place[here]) & (group[other] != group[here])
                pair = (other[good], here[good]) if step == 0 else (here[good], other[good])
                yield pair


def _distinct(values: Units) -> Units:
    """The values in order, once each: what np.unique gives, whose hashing takes minutes over evenly spaced numbers."""
    ordered: Units = np.sort(values)
    is_new = np.ones(ordered.size, np.bool_)
    is_new[1:] = ordered[1:] != ordered[:-1]
    return ordered.compress(is_new)


def spread(access: Access, shift: int) -> tuple[Units, Units, npt.NDArray[np.uint64]]:
    """(places of 1 << shift bytes, positions of their lanes, values) of an access."""
    count = access.lanes.count
    place = spread_places(access, shift)
    lane = np.repeat(np.arange(count), place.size // count)
    value = np.zeros(place.size, np.uint64)
    if access.data is not None:
        raw = np.ascontiguousarray(access.data).view(np.uint8).reshape(-1, 1 << shift)
        whole = raw.view({0: np.uint8, 1: np.uint16, 2: np.uint32, 3: np.uint64}[shift]).reshape(-1)
        value = np.tile(whole, count)[: place.size] if whole.size < place.size else whole
        value = value.astype(np.uint64)
    return place, lane, value


def finest_shift(accesses: Sequence[Access]) -> int:
    """Places as coarse as the accesses allow: an access is aligned to its size."""
    return min(min(access.shift for access in accesses), _LARGEST_SHIFT)


def find_conflicts(
    accesses: Sequence[Access],
    order: Order,
    checked: int = 0,
    allowed: Sequence[tuple[int, int]] = (),
    meetings: Sequence[tuple[int, Units]] | None = None,
) -> list[Conflict]:
    """Conflicts, one for each instruction of the later access (and for equal stores), in the order of time.

    ``checked``: pairs of accesses before this serial were looked at; ``allowed``: byte ranges where all may meet;
    ``meetings``: of accesses in shared memory, the first serial behind each exchange of whole warps, and the warps.
    """
    if not any(access.kind != READ for access in accesses):
        return []
    shift = finest_shift(accesses)
    chosen = _contested(accesses, shift)
    if chosen is None:
        return []
    table = _Table(accesses, shift, chosen)
    first, second = table.pairs()
    clash = (table.thread[first] != table.thread[second]) & ~_may_meet(table, first, second)
    if checked:
        serials = np.array([access.serial for access in accesses])
        clash &= serials[table.entry[second]] >= checked
    for begin, end in allowed:
        at = table.place[first] << shift
        clash &= (at < begin) | (at >= end)
    first, second = first[clash], second[clash]
    open_pairs = ~_is_before(table, first, second, order)
    if meetings is not None:
        open_pairs &= ~_is_read_before_meeting(accesses, table, first, second, meetings)
    first, second = first[open_pairs], second[open_pairs]
    harmful = ~_sees_the_same(table, first, second, order) & ~_is_told(table, first, second, order)
    return _grouped(accesses, table, first[harmful], second[harmful], shift)


def _is_read_before_meeting(
    accesses: Sequence[Access], table: _Table, first: Units, second: Units, meetings: Sequence[tuple[int, Units]]
) -> Flags:
    """Whether lanes of one warp read and then store, and all its lanes executed something together in between."""
    found = (table.kind[first] == READ) & (table.kind[second] != READ)
    found &= table.thread[first] // WARP == table.thread[second] // WARP
    here = np.flatnonzero(found)
    if not here.size:
        return np.asarray(found, np.bool_)
    together = np.array([".sync" in access.site.opcode for access in accesses])[table.entry[first[here]]]
    serials = np.array([access.serial for access in accesses])
    begin, end = serials[table.entry[first[here]]], serials[table.entry[second[here]]]
    row = table.row[second[here]]
    met = np.zeros(here.size, np.bool_)
    for warp in np.unique(row[~together]):
        at = np.array([serial for serial, warps in meetings if warp in warps], np.int64)
        of = np.flatnonzero(row == warp)
        met[of] = np.searchsorted(at, begin[of], "right") < np.searchsorted(at, end[of], "right")
    found[here] = together | met
    return np.asarray(found, np.bool_)


def _sees_the_same(table: _Table, first: Units, second: Units, order: Order) -> Flags:
    """Whether a read finds what it finds anyhow: an earlier store of the same value comes before it."""
    row = np.arange(table.place.size)
    before = np.maximum.accumulate(np.where(table.kind == WRITE, row, -1))
    before = np.concatenate(([-1], before[:-1]))
    store = np.where(table.kind[first] == READ, second, first)
    reader = np.where(table.kind[first] == READ, first, second)
    found = np.zeros(first.size, np.bool_)
    concerned = (table.kind[store] == WRITE) & (table.kind[reader] == READ)
    earlier = np.where(reader < store, before[reader], before[store])
    for _ in range(2 * WARP):
        concerned &= ~found & (earlier >= 0) & table.has_value[store] & table.has_value[earlier]
        concerned &= (table.place[earlier] == table.place[store]) & (table.value[earlier] == table.value[store])
        if not concerned.any():
            break
        here = np.flatnonzero(concerned)
        same = table.thread[earlier[here]] == table.thread[reader[here]]
        found[here] = same | _is_before(table, earlier[here], reader[here], order)
        earlier = np.where(earlier >= 0, before[earlier], -1)
    return found


def _is_told(table: _Table, first: Units, second: Units, order: Order) -> Flags:
    """Whether the later comes after an access whose result told of the earlier, an atomic or a store that others may
    wait for: as where the last of all who count resets the counter, or who waited for a turn gives it on."""
    concerned = (table.kind[first] == ATOMIC) | ((table.kind[first] == WRITE) & (table.strength[first] > WEAK))
    found = np.zeros(first.size, np.bool_)
    if not (concerned.any() and table.tells.any()):
        return found
    row = np.arange(table.place.size)
    own = np.lexsort((row, table.thread, table.place))
    group = table.place[own], table.thread[own]
    begins = np.ones(own.size, np.bool_)
    begins[1:] = (group[0][1:] != group[0][:-1]) | (group[1][1:] != group[1][:-1])
    begin = np.maximum.accumulate(np.where(begins, np.arange(own.size), 0))  # of the thread's rows at the place
    last = np.maximum.accumulate(np.where(table.tells[own], np.arange(own.size), -1))
    of_thread = np.full(row.size, -1, np.int64)
    of_thread[own[1:]] = np.where(last[:-1] >= begin[1:], own[last[:-1]], -1)
    teller = of_thread[second]
    found |= concerned & (teller > first) & _reaches(table, first, teller)
    before = np.maximum.accumulate(np.where(table.tells, row, -1))
    before = np.concatenate(([-1], before[:-1]))
    teller = before[second]
    for _ in range(2 * WARP):
        here = np.flatnonzero(concerned & ~found & (teller > first))
        if not here.size:
            break
        by = teller[here]
        found[here] = _is_before(table, by, second[here], order) & _reaches(table, first[here], by)
        teller = np.where(teller >= 0, before[teller], -1)
    return found


def _reaches(table: _Table, first: Units, teller: Units) -> Flags:
    """Whether the scopes of both have both threads in them."""
    in_block = table.in_block[first] | table.in_block[teller]
    return np.asarray(~in_block | (table.block[first] == table.block[teller]), np.bool_)


def _contested(accesses: Sequence[Access], shift: int) -> list[Units | None] | None:
    """Of each access the rows of ``spread`` whose places are stored to and touched by several; None without any."""
    places = [spread_places(access, shift) for access in accesses]
    stored = [place for access, place in zip(accesses, places, strict=True) if access.kind != READ]
    written = _distinct(np.concatenate(stored))
    owner = np.full(written.size, -1, np.int64)
    shared = np.zeros(written.size, np.bool_)
    found: list[tuple[Units, Units]] = []
    for access, place in zip(accesses, places, strict=True):
        at = np.minimum(np.searchsorted(written, place), written.size - 1)
        rows = np.flatnonzero(written[at] == place)
        at = at[rows]
        split = place.size // access.lanes.count
        thread = access.lanes.chunk.order.threads_of(access.lanes.index[rows // split])
        before = owner[at]
        shared[at[(before >= 0) & (before != thread)]] = True
        owner[at] = thread
        shared[at[owner[at] != thread]] = True
        found.append((rows, at))
    if not shared.any():
        return None
    return [rows[shared[at]] for rows, at in found]


def spread_places(access: Access, shift: int) -> Units:
    """Places of an access, lane by lane."""
    units = access.units if access.units.size == access.lanes.count else np.repeat(access.units, access.lanes.count)
    split = 1 << (access.shift - shift)
    return units if split == 1 else ((units * split)[:, None] + np.arange(split)).reshape(-1)


def _may_meet(table: _Table, first: Units, second: Units) -> Flags:
    strength = table.strength[first], table.strength[second]
    both = np.minimum(*strength) >= VOLATILE
    both &= (table.block[first] == table.block[second]) | ~(table.in_block[first] | table.in_block[second])
    made_sure = table.is_validated[first] & (table.kind[second] == ATOMIC)
    made_sure |= table.is_validated[second] & (table.kind[first] == ATOMIC)
    return np.asarray((both & (np.maximum(*strength) == STRONG)) | made_sure, np.bool_)


def _is_before(table: _Table, first: Units, second: Units, order: Order) -> Flags:
    """Whether the later access's thread knew of the earlier one."""
    moment, thread, other = table.moment[first], table.thread[first], table.thread[second]
    before = (table.block[first] == table.block[second]) & (moment <= table.by_block[second])
    before |= (thread // WARP == other // WARP) & (moment <= table.by_warp[second])
    known = table.known[second]
    for number in _distinct(known[~before]):
        if number == 0:
            continue
        here = np.flatnonzero(~before & (known == number))
        threads = thread[here]
        learnt = order.known[number].of_threads(threads, threads // WARP, table.block[first[here]])
        before[here] = moment[here] <= learnt
    return np.asarray(before, np.bool_)


def _grouped(accesses: Sequence[Access], table: _Table, first: Units, second: Units, shift: int) -> list[Conflict]:
    equal = (table.kind[first] == WRITE) & (table.kind[second] == WRITE) & table.has_value[first]
    equal &= table.has_value[second] & (table.value[first] == table.value[second])
    conflicts: list[Conflict] = []
    sites = np.array([access.site.number for access in accesses])[table.entry[second]]
    for is_equal in (False, True):
        for site in np.unique(sites[equal == is_equal]):
            here = np.flatnonzero((sites == site) & (equal == is_equal))
            lanes = _distinct(table.entry[second[here]] << 32 | table.lane[second[here]])
            in_time = here[np.lexsort((table.lane[second[here]], table.entry[second[here]]))]
            one, other = first[in_time[0]], second[in_time[0]]
            rows = np.concatenate([first[here], second[here]])
            is_read = table.kind[rows] == READ
            is_beside = (np.sort(table.kind[rows].reshape(2, -1), axis=0) == [[READ], [ATOMIC]]).all()
            readers = {accesses[entry].site.number for entry in np.unique(table.entry[rows[is_read]])}
            conflicts.append(
                Conflict(
                    accesses[table.entry[other]],
                    int(table.lane[other]),
                    accesses[table.entry[one]],
                    int(table.lane[one]),
                    int(table.place[other]) << shift,
                    lanes.size,
                    is_equal,
                    frozenset(readers if is_beside else ()),
                )
            )
    return sorted(conflicts, key=lambda conflict: (conflict.is_equal, conflict.later.serial))
