"""Shared memory of a chunk of thread blocks: bounds, alignment and initialisation of every lane's bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..checks.clock_races import ClockRaces
from ..checks.shared_races import READ, WRITE, RaceLog
from ..ptx.sites import Site
from ..state.lanes import ChunkState, LaneSet
from ..state.memory import Views
from .access import ALL_INITIALISED, Element, Loader, Span, Storer, check_alignment

Array = npt.NDArray[Any]
Units = npt.NDArray[np.int64]


class SharedMemory:
    """Shared memory of all blocks of a chunk, block after block at a stride; ``races`` checks between warps."""

    def __init__(self, chunk: ChunkState, nbytes: int, stride: int, granule_shift: int) -> None:
        self.chunk = chunk
        self.nbytes = nbytes
        total = chunk.block_count * stride
        self.data = Views(np.zeros(total, np.uint8))
        self.state = Views(np.zeros(total, np.uint8))
        maker = ClockRaces if chunk.run.kernel.is_asynchronous else RaceLog
        self.races: RaceLog | ClockRaces = maker(chunk, total, granule_shift)

    def units(self, lanes: LaneSet, base: Array, span: Span, offset: int, shift: int, site: Site) -> Units:
        """Checked chunk offsets in units of 1 << shift bytes."""
        size = 1 << shift
        if span[0] + offset < 0 or span[1] + offset + size > self.nbytes:
            addresses = self._check_lanes(lanes, base, offset, size, site)
        else:
            addresses = base.astype(np.int64) + offset
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
        bad = np.flatnonzero((addresses < 0) | (addresses + size > self.nbytes))
        if bad.size:
            position = int(bad[0])
            address = int(addresses[position])
            self.chunk.run.collector.add(
                "shared_out_of_bounds",
                f"access of {size} bytes at shared offset {address}, outside the block's {self.nbytes} bytes",
                site,
                lanes,
                position,
                lanes.count if addresses.size == 1 else bad.size,
                address,
            )
        return addresses

    def check_initialised(self, lanes: LaneSet, units: Units, shift: int, site: Site) -> None:
        """Report lanes that read shared bytes which nobody wrote."""
        good = self.state.of[shift].take(units) == ALL_INITIALISED[shift]
        if good.all():
            return
        bad = np.flatnonzero(~good)
        position = int(bad[0])
        base = lanes.shared_base
        address = (int(units[position]) << shift) - int(base[position] if base.size > 1 else base[0])
        self.chunk.run.collector.add(
            "shared_uninitialised_read",
            f"read of {1 << shift} bytes at shared offset {address} that were never written",
            site,
            lanes,
            position,
            lanes.count if units.size == 1 else bad.size,
            address,
        )

    def load(self, units: Units, shift: int, lanes: LaneSet, site: Site) -> Array:
        """Read checked units."""
        raw: Array = self.data.of[shift].take(units)
        self.check_initialised(lanes, units, shift, site)
        self.races.add(READ, units, shift, lanes, site)
        return raw

    def store(self, units: Units, shift: int, data: Array, lanes: LaneSet, site: Site) -> None:
        """Store units, and check that no lane's value was lost to another lane of the instruction."""
        if units.shape[0] == 1 and data.shape[0] > 1:
            units = np.repeat(units, data.shape[0])
        view = self.data.of[shift]
        view[units] = data
        self.state.of[shift][units] = ALL_INITIALISED[shift]
        if data.shape[0] > 1 and units.shape[0] > 1:
            kept = view.take(units)
            # Complex numbers compare as floats; their bits are meant.
            lost = kept != data if shift < 4 else (kept.view(np.uint64) != data.view(np.uint64)).reshape(-1, 2).any(1)
            if lost.any():
                bad = np.flatnonzero(lost)
                self._report_lost(units, shift, lanes, site, int(bad[0]), bad.size)
        self.races.add(WRITE, units, shift, lanes, site)

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


def load_shared(site: Site, offset: int, element: Element, register_bytes: tuple[int, ...]) -> Loader:
    """A function that loads from shared memory for one instruction."""
    shift = element.shift

    def load(lanes: LaneSet, base: Array, span: Span) -> Any:
        shared: SharedMemory = lanes.chunk.shared
        units = shared.units(lanes, base, span, offset, shift, site)
        return element.unpack(shared.load(units, shift, lanes, site), register_bytes)

    return load


def store_shared(site: Site, offset: int, element: Element) -> Storer:
    """A function that stores to shared memory for one instruction."""
    shift = element.shift

    def store(lanes: LaneSet, base: Array, span: Span, *values: Array) -> None:
        shared: SharedMemory = lanes.chunk.shared
        units = shared.units(lanes, base, span, offset, shift, site)
        shared.store(units, shift, element.pack(values, shared.data.of[shift].dtype), lanes, site)

    return store
