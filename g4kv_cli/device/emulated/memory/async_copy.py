"""cp.async: copies from global to shared memory that take effect only when their group is waited for.

The source is read when the copy is issued; the destination changes at ``wait_group`` or ``wait_all``, so that a
forgotten wait shows as old or uninitialised data. Both moments count as writes for the race check.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..checks.conflicts import READ, WRITE
from ..checks.read_rules import check_read
from ..ptx.sites import Site
from ..state.lanes import ChunkState, LaneSet
from .access import check_initialised, global_units, span_of
from .shared_memory import IN_FLIGHT

Array = npt.NDArray[Any]
Units = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class PendingCopy:
    """One issued instruction: ``group`` numbers each lane's commit group."""

    lanes: LaneSet
    group: npt.NDArray[np.int32]
    units: Units
    shift: int
    data: Array
    site: Site


class CopyQueue:
    """Copies of a chunk that were issued and not yet waited for."""

    def __init__(self, chunk: ChunkState) -> None:
        self.chunk = chunk
        self.pending: list[PendingCopy] = []
        self._committed: npt.NDArray[np.int32] | None = None

    @property
    def committed(self) -> npt.NDArray[np.int32]:
        """How many groups each lane has committed."""
        if self._committed is None:
            self._committed = np.zeros(self.chunk.lane_count, np.int32)
        return self._committed

    def issue(self, lanes: LaneSet, units: Units, shift: int, data: Array, site: Site) -> None:
        """Queue a copy; ``units`` are checked shared offsets, ``data`` one unit for each lane."""
        if units.shape[0] == 1 and data.shape[0] > 1:
            units = np.repeat(units, data.shape[0])
        self.pending.append(PendingCopy(lanes, self.committed.take(lanes.index), units, shift, data, site))
        self.chunk.shared.races.add(WRITE, units, shift, lanes, site, data)
        self._mark(units, shift)

    def _mark(self, units: Units, shift: int) -> None:
        """The bytes have a copy in flight to them."""
        self.chunk.shared.state.of[0].reshape(-1, 1 << shift)[units] = IN_FLIGHT

    def line_of(self, begin: int, nbytes: int) -> str:
        """The copy in flight to any of these bytes of the chunk's shared memory, in words."""
        for copy in self.pending:
            at = copy.units << copy.shift
            if ((at < begin + nbytes) & (at + (1 << copy.shift) > begin)).any():
                return f"{copy.site.opcode}, line {copy.site.location.line or copy.site.ptx_line}"
        return "cp.async"

    def commit(self, lanes: LaneSet) -> None:
        """cp.async.commit_group."""
        self.committed[lanes.index] += 1

    def wait(self, lanes: LaneSet, open_groups: int) -> None:
        """Complete all but the latest ``open_groups`` committed groups of these lanes; -1: also uncommitted copies."""
        if not self.pending:
            return
        limit = np.full(self.chunk.lane_count, -1, np.int32)
        if open_groups < 0:
            limit[lanes.index] = np.iinfo(np.int32).max
        else:
            limit[lanes.index] = self.committed[lanes.index] - open_groups
        kept: list[PendingCopy] = []
        has_arrived = False
        for copy in self.pending:
            done = copy.group < limit.take(copy.lanes.index)
            has_arrived |= bool(done.any())
            if done.all():
                self._apply(copy)
                continue
            going, staying = np.flatnonzero(done), np.flatnonzero(~done)
            if going.size:
                self._apply(_part(copy, going))
            kept.append(_part(copy, staying))
        for copy in kept if has_arrived else ():
            self._mark(copy.units, copy.shift)  # what has arrived may lie where they go, too
        self.pending = kept

    def _apply(self, copy: PendingCopy) -> None:
        self.chunk.shared.store(copy.units, copy.shift, copy.data, copy.lanes, copy.site)


def _part(copy: PendingCopy, position: Units) -> PendingCopy:
    return PendingCopy(
        copy.lanes.subset(position),
        copy.group.take(position),
        copy.units.take(position),
        copy.shift,
        copy.data.take(position),
        copy.site,
    )


def copy_async(
    site: Site, destination_offset: int, source_offset: int, nbytes: int
) -> Callable[[LaneSet, Array, Array, Array], None]:
    """cp.async: (lanes, shared addresses, global addresses, source bytes)."""
    shift = nbytes.bit_length() - 1

    def run(lanes: LaneSet, destination: Array, source: Array, source_bytes: Array) -> None:
        chunk = lanes.chunk
        units = chunk.shared.units(lanes, destination, span_of(destination), destination_offset, shift, site)
        sizes = np.minimum(source_bytes, nbytes)
        data = np.zeros((lanes.count, nbytes), np.uint8)
        if (sizes == sizes[0]).all():
            if sizes[0]:
                data[:, : int(sizes[0])] = _read(lanes, source, source_offset, int(sizes[0]), nbytes, site)
        else:
            for size in np.unique(sizes[sizes > 0]):
                position = np.flatnonzero(sizes == size)
                base = source if source.shape[0] == 1 else source.take(position)
                data[position, : int(size)] = _read(
                    lanes.subset(position), base, source_offset, int(size), nbytes, site
                )
        view = chunk.shared.data.of[shift].dtype
        chunk.copies.issue(lanes, units, shift, data.view(view).reshape(-1), site)

    return run


def _read(lanes: LaneSet, base: Array, offset: int, size: int, nbytes: int, site: Site) -> Array:
    """``size`` bytes of each lane's source, [lanes or 1, size]."""
    memory = lanes.chunk.run.memory
    shift = nbytes.bit_length() - 1
    span = span_of(base)
    if size == nbytes:
        units, allocation = global_units(lanes, base, span, offset, shift, site)
        if lanes.chunk.read_rules:
            check_read(lanes, units, shift, allocation, site)
        if allocation is None or not allocation.fully_initialised:
            check_initialised(lanes, units, shift, allocation, site)
        lanes.chunk.run.accesses.add(READ, units, shift, lanes, site)
        raw = memory.data.of[shift].take(units)
        return raw.view(np.uint8).reshape(-1, size)
    columns = []
    for byte in range(size):
        units, allocation = global_units(lanes, base, span, offset + byte, 0, site)
        if byte == 0 and lanes.chunk.read_rules:
            check_read(lanes, units, 0, allocation, site)
        if allocation is None or not allocation.fully_initialised:
            check_initialised(lanes, units, 0, allocation, site)
        lanes.chunk.run.accesses.add(READ, units, 0, lanes, site)
        columns.append(memory.data.of[0].take(units))
    return np.stack(columns, 1)


def commit_group() -> Callable[[LaneSet], None]:
    """cp.async.commit_group: (lanes)."""

    def run(lanes: LaneSet) -> None:
        copies: CopyQueue = lanes.chunk.copies
        copies.commit(lanes)

    return run


def wait_group(open_groups: int) -> Callable[[LaneSet], None]:
    """cp.async.wait_group N, or wait_all (-1): (lanes)."""

    def run(lanes: LaneSet) -> None:
        copies: CopyQueue = lanes.chunk.copies
        copies.wait(lanes, open_groups)

    return run
