"""Memory that the engine keeps from launch to launch: of the block that runs, of the race check, and of the logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arithmetic.mufu import coefficient_tables
from ..arithmetic.mufu_trig import sine_table, tanh_table
from ..checks.owned_reads import OwnedReads
from ..ptx.origins import Extent
from ..state.memory import RANGE, DeviceMemory
from ..state.store_log import Ranges
from ..state.undo import PAGE_BYTES
from .order_trace import TRACE_BYTES
from .program import Program
from .structures import FAULT, MBARRIERS, OWNED, STORE, Launch

FAULT_CAPACITY = 64
FIRST_STORES = 1 << 14
"""Stores that the log has room for at first."""
FIRST_PAGES = 1 << 9
"""Pages that can be taken back at first."""
WARPGROUP = 4
"""Warps of one."""
PRODUCTS_EACH = 16
"""wgmma on registers of their own that a warp may have on their way."""
TRANSFERS = 1 << 15
"""Bulk copies and st.async that may be on their way."""
BULK_STORES = 1 << 12
"""Bulk stores that may be on their way."""
_READ_AND_STORED = 3
_CHANGES = 6
_KEPT_BYTES = 1 << 26
"""Logs larger than this are given back after the launch."""


class Buffers:
    """Arrays by name that grow and are kept; new ones are zero."""

    def __init__(self) -> None:
        self._arrays: dict[str, npt.NDArray[Any]] = {}

    def get(self, name: str, count: int, dtype: Any = np.uint8) -> npt.NDArray[Any]:
        """At least ``count`` elements, with what they held."""
        found = self._arrays.get(name)
        if found is None or found.size < count:
            found = self._arrays[name] = np.zeros(max(count, 1), dtype)
        return found

    def grow(self, name: str, count: int) -> npt.NDArray[Any]:
        """The array with its contents and at least ``count`` elements."""
        old = self._arrays[name]
        if old.size < count:
            new = np.zeros(count, old.dtype)
            new[: old.size] = old
            self._arrays[name] = new
        return self._arrays[name]

    def clear(self, *names: str) -> None:
        """Set the arrays to zero."""
        for name in names:
            self._arrays[name][:] = 0

    def release(self, *names: str) -> None:
        """Give large arrays back."""
        for name in names:
            if self._arrays[name].nbytes > _KEPT_BYTES:
                del self._arrays[name]


@dataclass(frozen=True, eq=False)
class OwnedBits:
    """The owners of each owned cell of a range as bits, 64 in a word, and room for those of each resident block, and
    for the cell it read last."""

    owners: npt.NDArray[np.uint64]
    may_be: npt.NDArray[np.uint64]
    words: int
    last: npt.NDArray[np.int64]

    @classmethod
    def of(cls, rule: OwnedReads, residents: int) -> OwnedBits:
        """Of one range; no words where a block's owner is not asked for."""
        cells, count = rule.owners.shape
        words = -(-count // 64)
        bits = np.zeros((cells, 64 * words), np.bool_)
        bits[:, :count] = rule.owners
        packed = np.packbits(bits.reshape(-1), bitorder="little").view(np.uint64)
        return cls(packed, np.zeros(words * residents, np.uint64), words, np.zeros(residents, np.int64))


def reader_columns(program: Program, warps: int) -> int:
    """Marks of readers that a location of shared memory has: of warps, and of what works for them (``c/races.h``)."""
    columns = warps + program.is_asynchronous * -(-warps // WARPGROUP) + program.uses_bulk_stores * warps
    return -(-columns // 8) * 8


def agents_each(program: Program, warps: int) -> int:
    """Agents of a block of so many warps."""
    return reader_columns(program, warps) + MBARRIERS * program.is_asynchronous


class EngineState:
    """The ``Launch`` structure of the process and all that it points to."""

    MARKS = ("writers", "readers", "fine_writers", "fine_readers", "fine_atomics")

    def __init__(self) -> None:
        self.launch = Launch()
        self.buffers = Buffers()
        self.tables = {**coefficient_tables(), "sin": sine_table(), "tanh": tanh_table()}
        for name, table in self.tables.items():
            setattr(self.launch, f"{name}_table", table.ctypes.data)
        self._owned: list[OwnedBits] = []
        self._ranges = np.zeros(0, RANGE)
        self.used = np.zeros(0, np.uint8)
        """For each allocation, whether the launch reads it (1), stores to it (2), and uses atomics on it (4)."""

    def point(self, name: str, array: npt.NDArray[Any]) -> None:
        """Let a field point to an array that the caller keeps."""
        setattr(self.launch, name, array.ctypes.data)

    def set_memory(self, memory: DeviceMemory, site_count: int) -> None:
        """Device memory, its allocations, and a first guess for each site. ``set_logs`` comes after."""
        launch = self.launch
        self.point("data", memory.data.of[0])
        self.point("state", memory.state.of[0])
        self._ranges = memory.ranges
        self.point("ranges", self._ranges)
        launch.range_count = self._ranges.size
        hints = self.buffers.get("hints", site_count + 1, RANGE)
        hints[: site_count + 1] = np.zeros(1, RANGE)
        hints["begin"][: site_count + 1] = 1 << 63
        self.point("hints", hints)
        self.used = self.buffers.get("used", self._ranges.size)[: self._ranges.size]
        self.used[:] = 0
        self.point("used", self.used)
        self.point("saved_in", self.buffers.get("saved_in", memory.used_bytes // PAGE_BYTES + 2, np.uint32))

    def set_shared(self, nbytes: int, warps: int, program: Program, residents: int = 1, ranks: int = 1) -> None:
        """Shared memory of each block that may be resident, ``ranks`` of them a cluster, and the marks of its race
        check."""
        launch, buffers, granule_shift = self.launch, self.buffers, program.granule_shift
        is_async, has_atomics = program.is_asynchronous, program.has_shared_atomics
        rounded = -(-max(nbytes, 1) // 128) * 128
        self.point("shared", buffers.get("shared", rounded * residents))
        state = buffers.get("shared_state", rounded * residents)
        self.point("shared_state", state)
        launch.shared_room = state.size
        launch.shared_bytes, launch.resident_count, launch.ranks = nbytes, residents, ranks
        granules = rounded // 16
        every = granules * residents
        fine = every << (4 - granule_shift)
        stride = reader_columns(program, warps)
        self.point("writers", buffers.get("writers", every, np.uint32))
        self.point("readers", buffers.get("readers", every * stride, np.uint32))
        self.point("fine_writers", buffers.get("fine_writers", fine, np.uint32))
        self.point("fine_readers", buffers.get("fine_readers", fine * stride, np.uint32))
        self.point("fine_atomics", buffers.get("fine_atomics", fine * stride if has_atomics else 0, np.uint32))
        if not has_atomics:
            launch.fine_atomics = None
        self.point("has_fine", buffers.get("has_fine", every))
        self.point("lane_of", buffers.get("lane_of", every))
        self.point("fine_lane_of", buffers.get("fine_lane_of", fine if is_async else 1))
        launch.granules, launch.granule_shift, launch.reader_stride = granules, granule_shift, stride
        launch.races_on, launch.warp_count = int(nbytes > 0), warps
        launch.is_async = int(is_async)
        launch.agents_each = agents_each(program, warps)
        launch.products_each = PRODUCTS_EACH if program.uses_wgmma else 0
        launch.transfer_capacity = TRANSFERS if is_async else 0
        launch.bulk_capacity = BULK_STORES if program.uses_bulk_stores else 0

    def set_within(self, site_count: int, extents: Mapping[int, Extent]) -> None:
        """Where in the shared memory of its block each site's accesses have to stay; ``set_shared`` comes before."""
        within = self.buffers.get("within", 2 * (site_count + 1), np.int32)
        rows = within[: 2 * (site_count + 1)].reshape(-1, 2)
        rows[:] = 0, self.launch.shared_bytes
        for site, extent in extents.items():
            rows[site] = extent.begin, self.launch.shared_bytes if extent.end is None else extent.end
        self.point("within", within)

    def set_trace(self, flags: npt.NDArray[np.uint8], traced: tuple[int, int] | None, all_shared: bool) -> None:
        """Let the launch write down what it does with memory at these addresses, and what orders it (trace.h);
        ``all_shared``: with all that it does with shared memory, which nobody looks at otherwise then."""
        launch = self.launch
        launch.trace, launch.trace_bytes, launch.trace_step = None, 0, 0
        if traced is not None:
            room = self.buffers.get("trace", TRACE_BYTES)
            self.point("trace", room)
            launch.trace_room = room.size
            launch.trace_begin, launch.trace_end = traced
            if all_shared:
                launch.races_on = 0
                flags = self.buffers.get("trace_sites", flags.size)
                flags[:] = 1
            self.point("trace_sites", flags)

    @property
    def trace(self) -> npt.NDArray[np.uint8]:
        """What the launch wrote down."""
        return self.buffers.get("trace", 0)[: self.launch.trace_bytes]

    def changed(self) -> tuple[int, int] | None:
        """From where to where the allocations lie that the launch changes; None without any."""
        some = self._ranges[(self.used & _CHANGES) != 0]
        return (int(some["begin"].min()), int(some["end"].max())) if some.size else None

    def forget_marks(self) -> None:
        """All accesses of earlier blocks, before the clocks run out."""
        self.buffers.clear(*self.MARKS)
        self.launch.clock = 0

    def set_logs(self, most_stores: int) -> None:
        """Empty logs with room for at least one basic block."""
        launch, room = self.launch, 64 * most_stores + 64
        stores = self.buffers.get("stores", max(room, FIRST_STORES), STORE)
        self.buffers.get("saved_pages", max(room, FIRST_PAGES), np.int64)
        saved = self.buffers.get("saved", max(room, FIRST_PAGES) * 2 * PAGE_BYTES)
        launch.store_count = launch.saved_count = launch.fault_count = 0
        launch.launch_number += 1
        launch.fault_capacity = FAULT_CAPACITY
        self.point("faults", self.buffers.get("faults", FAULT_CAPACITY, FAULT))
        self._set_log_capacity(stores.size, saved.size // (2 * PAGE_BYTES))

    def set_owned(self, rules: Sequence[OwnedReads]) -> None:
        """Whose the cells of some ranges are, for the blocks that may be resident."""
        rows = self.buffers.get("owned", len(rules), OWNED)
        self._owned = [OwnedBits.of(rule, self.launch.resident_count) for rule in rules]
        for row, rule, bits in zip(rows, rules, self._owned, strict=False):
            row["begin"], row["end"], row["cell_bytes"] = rule.address, rule.address + rule.nbytes, rule.cell_bytes
            row["numbers"], row["owners"] = rule.numbers.ctypes.data, bits.owners.ctypes.data
            row["may_be"], row["words"] = bits.may_be.ctypes.data, bits.words
            row["last"] = bits.last.ctypes.data
        self.point("owned", rows)
        self.launch.owned_count = len(rules)

    def set_in_front(self, ranges: Ranges) -> None:
        """What launches in front wrote that may not have ended."""
        self.in_front = np.ascontiguousarray(ranges, np.int64)
        self.point("in_front", self.in_front)
        self.launch.in_front_count = len(ranges)

    def grow_logs(self, most_stores: int) -> None:
        """Room for more stores; a loop that writes a place again and again fills no memory."""
        launch, margin = self.launch, 64 * most_stores
        if launch.store_count + margin > launch.store_capacity:
            self._drop_equal_stores()
        stores = launch.store_capacity
        pages = launch.saved_capacity
        if launch.store_count + margin > stores // 2:
            stores = 2 * stores + margin
        if launch.saved_count + margin > pages:
            pages = 2 * pages + margin
        self._set_log_capacity(stores, pages)

    def _drop_equal_stores(self) -> None:
        """Keep one of a block's equal stores; their order does not matter to the checks at the end."""
        stores = self._logged
        fields = ("block", "begin", "bytes", "is_load", "first", "each")
        keys = np.stack([stores[name].astype(np.int64) for name in fields])
        order = np.lexsort(keys[::-1])
        fresh = np.ones(order.size, np.bool_)
        fresh[1:] = (np.diff(keys[:, order], axis=1) != 0).any(0)
        kept = stores[order[fresh]]
        stores[: kept.size] = kept
        self.launch.store_count = kept.size

    def _set_log_capacity(self, stores: int, pages: int) -> None:
        launch, buffers = self.launch, self.buffers
        self.point("stores", buffers.grow("stores", stores))
        self.point("saved_pages", buffers.grow("saved_pages", pages))
        self.point("saved", buffers.grow("saved", pages * 2 * PAGE_BYTES))
        launch.store_capacity, launch.saved_capacity = stores, pages

    def follow(self, first: EngineState, cursor: npt.NDArray[np.int64]) -> None:
        """Run blocks of another state's launch beside it, from the next one on that nobody has begun."""
        launch = self.launch
        launch.saved_in, launch.launch_number = first.launch.saved_in, first.launch.launch_number
        launch.next = int(cursor[0])
        cursor[0] += launch.step
        self.point("cursor", cursor)

    def absorb(self, other: EngineState) -> None:
        """Take over what another state that has followed this one did and wrote down."""
        launch, theirs = self.launch, other.launch
        stores, pages = launch.store_count + theirs.store_count, launch.saved_count + theirs.saved_count
        self._set_log_capacity(max(stores, launch.store_capacity), max(pages, launch.saved_capacity))
        self.buffers.get("stores", stores, STORE)[launch.store_count : stores] = other._logged
        numbers, saved = other.saved_pages()
        self.buffers.get("saved_pages", pages, np.int64)[launch.saved_count : pages] = numbers
        begin, end = launch.saved_count * 2 * PAGE_BYTES, pages * 2 * PAGE_BYTES
        self.buffers.get("saved", end)[begin:end] = saved.reshape(-1)
        launch.store_count, launch.saved_count = stores, pages
        launch.instructions += theirs.instructions
        self.used |= other.used
        other.release_logs()

    def release_logs(self) -> None:
        """Give the memory of a large launch back."""
        self.buffers.release("stores", "saved_pages", "saved")

    @property
    def stores(self) -> npt.NDArray[Any]:
        """Stores of the launch so far."""
        logged = self._logged
        return logged[logged["is_load"] == 0] if self.launch.watch_end else logged

    @property
    def loads(self) -> npt.NDArray[Any]:
        """Loads of the launch so far from the addresses that are watched."""
        logged = self._logged
        loads: npt.NDArray[Any] = logged[logged["is_load"] != 0]
        return loads

    @property
    def _logged(self) -> npt.NDArray[Any]:
        return self.buffers.get("stores", 0, STORE)[: self.launch.store_count]

    def used_twice(self) -> tuple[int, int] | None:
        """From where to where the allocations lie that the launch both reads and stores to; None without any."""
        twice = self._ranges[self.used == _READ_AND_STORED]
        return (int(twice["begin"].min()), int(twice["end"].max())) if twice.size else None

    @property
    def faults(self) -> npt.NDArray[Any]:
        """Faults of the launch so far."""
        return self.buffers.get("faults", 0, FAULT)[: self.launch.fault_count]

    def saved_pages(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """(numbers of the saved pages, their bytes and state bytes [n, 2, PAGE_BYTES])."""
        count = self.launch.saved_count
        pages = self.buffers.get("saved_pages", 0, np.int64)[:count]
        saved = self.buffers.get("saved", 0)[: count * 2 * PAGE_BYTES]
        return pages, saved.reshape(count, 2, PAGE_BYTES)
