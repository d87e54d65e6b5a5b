"""Shared memory of a chunk of thread blocks: bounds, alignment and initialisation of every lane's bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..checks.clock_races import ClockRaces
from ..checks.conflicts import READ, WRITE
from ..checks.order import synchronise
from ..checks.shared_races import RaceLog
from ..checks.undefined import fill, state_bytes
from ..ptx.origins import Extent
from ..ptx.sites import Site
from ..state.lanes import ChunkState, LaneSet
from ..state.memory import RANK_SHIFT, Views
from .access import (
    ALL_INITIALISED,
    Element,
    Loader,
    Span,
    Storer,
    check_alignment,
    differs,
    is_change,
    report_outside,
    span_of,
)

Array = npt.NDArray[Any]
Units = npt.NDArray[np.int64]
IN_FLIGHT = 2
"""State of a byte that a cp.async is to write."""


class SharedMemory:
    """Shared memory of all blocks of a chunk, block after block at a stride; ``races`` checks between warps."""

    def __init__(self, chunk: ChunkState, nbytes: int, stride: int, granule_shift: int) -> None:
        self.chunk = chunk
        self.nbytes = nbytes
        total = chunk.block_count * stride
        self.data = Views(np.zeros(total, np.uint8))
        self.state = Views(np.zeros(total, np.uint8))
        if len(kept := chunk.run.kernel.zeroed_shared):
            self.state.of[0].reshape(chunk.block_count, -1)[:, kept.start : kept.stop] = 1
        self.races: RaceLog | ClockRaces
        if chunk.run.kernel.is_asynchronous:
            self.races = ClockRaces(chunk, total, granule_shift)
        else:
            self.races = RaceLog(chunk, total)

    def units(self, lanes: LaneSet, base: Array, span: Span, offset: int, shift: int, site: Site) -> Units:
        """Checked chunk offsets in units of 1 << shift bytes."""
        size = 1 << shift
        if span[0] + offset < 0 or span[1] + offset + size > self.nbytes:
            addresses = self._check_lanes(lanes, base, offset, size, site)
        else:
            addresses = base.astype(np.int64) + offset
        if site.within is not None:
            self._check_within(lanes, addresses, span, offset, size, site, site.within)
        if (span[2] | offset) & (size - 1):
            check_alignment(lanes, base, offset, size, site, "shared memory")
        units: Units = addresses + lanes.shared_base
        if shift:
            units >>= shift
        return units

    def _check_lanes(self, lanes: LaneSet, base: Array, offset: int, size: int, site: Site) -> Units:
        """The addresses lane by lane; a 32-bit register plus its offset wraps at 32 bits."""
        addresses: Units = base.astype(np.int64) + offset
        if base.dtype == np.uint32:
            addresses &= 0xFFFFFFFF
        given = "" if lanes.chunk.run.dynamic_shared.any() else "; the launch gave it no dynamic shared memory"
        report_outside(
            lanes,
            site,
            "shared_out_of_bounds",
            lambda at: f"access of {size} bytes at shared offset {at}, outside the block's {self.nbytes} bytes{given}",
            addresses,
            (0, self.nbytes - size),
        )
        return addresses

    def _check_within(
        self, lanes: LaneSet, addresses: Units, span: Span, offset: int, size: int, site: Site, within: Extent
    ) -> None:
        """Report lanes whose access leaves the variable of whose address theirs is made."""
        end = self.nbytes if within.end is None else within.end
        if span[0] + offset >= within.begin and span[1] + offset + size <= end:
            return
        report_outside(
            lanes,
            site,
            "shared_variable_overrun",
            lambda at: f"access of {size} bytes at shared offset {at}, outside {within} at {within.begin} to {end}",
            addresses,
            (within.begin, end - size),
        )

    def check_initialised(self, lanes: LaneSet, units: Units, shift: int, site: Site) -> None:
        """Report lanes that read shared bytes which nobody wrote."""
        state = self.state.of[shift].take(units)
        good = state == ALL_INITIALISED[shift]
        if good.all():
            return
        each = state_bytes(state, shift)
        in_flight = np.flatnonzero((each == IN_FLIGHT).any(1))
        if in_flight.size:
            self._report_in_flight(lanes, units, shift, site, in_flight)
            good |= (each == IN_FLIGHT).any(1)
        bad = np.flatnonzero(~good)
        if not bad.size:
            return
        position = int(bad[0])
        address = self._offset(units, shift, lanes, position)
        fill(self.data.of[0], each[bad] == 0, units[bad], site, self.chunk.run.fill)
        self.chunk.run.collector.add(
            "shared_uninitialised_read",
            f"read of {1 << shift} bytes at shared offset {address} that were never written",
            site,
            lanes,
            position,
            lanes.count if units.size == 1 else bad.size,
            address,
        )

    def _offset(self, units: Units, shift: int, lanes: LaneSet, position: int) -> int:
        """The offset of a lane's unit in its block."""
        base = lanes.shared_base
        return (int(units[position]) << shift) - int(base[position] if base.size > 1 else base[0])

    def _report_in_flight(self, lanes: LaneSet, units: Units, shift: int, site: Site, bad: Units) -> None:
        position = int(bad[0])
        copy = self.chunk.copies.line_of(int(units[position]) << shift, 1 << shift)
        self.chunk.run.collector.add(
            "unfinished_copy",
            f"read of {1 << shift} bytes at shared offset {self._offset(units, shift, lanes, position)} while a copy "
            f"to them is still in flight ({copy}): its group was not waited for",
            site,
            lanes,
            position,
            lanes.count if units.size == 1 else bad.size,
            self._offset(units, shift, lanes, position),
        )

    def load(self, units: Units, shift: int, lanes: LaneSet, site: Site, notes_read: bool = True) -> Array:
        """Read checked units; ``notes_read``: by these lanes, to the race check."""
        self.check_initialised(lanes, units, shift, site)
        raw: Array = self.data.of[shift].take(units)
        if notes_read:
            self.races.add(READ, units, shift, lanes, site)
        synchronise(site, lanes, units << shift, False, True)
        return raw

    def store(self, units: Units, shift: int, data: Array, lanes: LaneSet, site: Site) -> None:
        """Store units."""
        if units.shape[0] == 1 and data.shape[0] > 1:
            units = np.repeat(units, data.shape[0])
        view = self.data.of[shift]
        if self.chunk.run.watches_changes and is_change(view, units, data):
            self.chunk.run.changed()
        held = view.take(units) if self.chunk.has_clocks else None
        view[units] = data
        self.state.of[shift][units] = ALL_INITIALISED[shift]
        if self.chunk.has_clocks and data.shape[0] > 1 and units.shape[0] > 1:
            bad = np.flatnonzero(differs(view.take(units), data))
            if bad.size:
                self._report_lost(units, shift, lanes, site, int(bad[0]), bad.size)
        self.races.add(WRITE, units, shift, lanes, site, data, held)
        synchronise(site, lanes, units << shift, True, True)

    def _report_lost(self, units: Units, shift: int, lanes: LaneSet, site: Site, position: int, count: int) -> None:
        rivals = np.flatnonzero(units == units[position])
        rival = int(rivals[rivals != position][-1])
        if lanes.index[rival] // 32 != lanes.index[position] // 32:
            return  # writes of two warps are reported at the barrier
        words = (
            f"lanes {int(lanes.laneid[position])} and {int(lanes.laneid[rival])} of a warp write different values with "
            "one instruction (write-after-write)"
        )
        self.races.report(words, units, shift, lanes, site, position, count)


def placed(lanes: LaneSet, base: Array, span: Span, offset: int, site: Site) -> tuple[LaneSet, Array, Span, int]:
    """(lanes, base, span, offset) of an access with addresses of shared::cluster, as the blocks that they name see it.

    Where none carries a rank they are those of the lanes' own blocks.
    """
    if lanes.chunk.cluster_blocks == 1 or span[1] + offset < 1 << RANK_SHIFT:
        return lanes, base, span, offset
    there, offsets = lanes.chunk.clusters.reach(lanes, base, offset, site)
    return there, offsets, span_of(offsets), 0


def load_shared(
    site: Site, offset: int, element: Element, register_bytes: tuple[int, ...], is_of_cluster: bool = False
) -> Loader:
    """A function that loads from shared memory for one instruction; ``is_of_cluster``: of any block of the cluster."""
    shift = element.shift

    def load(lanes: LaneSet, base: Array, span: Span) -> Any:
        shared: SharedMemory = lanes.chunk.shared
        by = offset
        if is_of_cluster:
            lanes, base, span, by = placed(lanes, base, span, offset, site)
        units = shared.units(lanes, base, span, by, shift, site)
        return element.unpack(shared.load(units, shift, lanes, site), register_bytes)

    return load


def store_shared(site: Site, offset: int, element: Element, is_of_cluster: bool = False) -> Storer:
    """A function that stores to shared memory for one instruction; ``is_of_cluster``: of any block of the cluster."""
    shift = element.shift

    def store(lanes: LaneSet, base: Array, span: Span, *values: Array) -> None:
        shared: SharedMemory = lanes.chunk.shared
        by = offset
        if is_of_cluster:
            lanes, base, span, by = placed(lanes, base, span, offset, site)
        units = shared.units(lanes, base, span, by, shift, site)
        shared.store(units, shift, element.pack(values, shared.data.of[shift].dtype), lanes, site)

    return store
