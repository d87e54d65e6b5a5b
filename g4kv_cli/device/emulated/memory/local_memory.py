"""Local memory (one depot for each lane) and reads of the parameter block through a register address."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ..checks.undefined import fill, state_bytes
from ..ptx.sites import Site
from ..state.lanes import ChunkState, LaneSet
from ..state.memory import Views
from .access import ALL_INITIALISED, Element, Loader, Span, Storer, check_alignment, report_outside

Array = npt.NDArray[Any]


class LocalMemory:
    """``nbytes`` of local memory for each lane of a chunk."""

    def __init__(self, chunk: ChunkState, nbytes: int) -> None:
        self.nbytes = nbytes
        self.stride = -(-nbytes // 16) * 16
        total = chunk.lane_count * self.stride
        self.data = Views(np.zeros(total, np.uint8))
        self.state = Views(np.zeros(total, np.uint8))

    def units(
        self, lanes: LaneSet, base: Array, span: Span, offset: int, shift: int, site: Site
    ) -> npt.NDArray[np.int64]:
        """Checked offsets of every lane in units of 1 << shift bytes."""
        size = 1 << shift
        addresses = base.astype(np.int64) + offset
        if span[0] + offset < 0 or span[1] + offset + size > self.nbytes:
            if base.dtype == np.uint32:
                addresses = (addresses + (1 << 31)) % (1 << 32) - (1 << 31)  # 32-bit addresses wrap
            # A base below the variable is good where the offset leads back into it.
            report_outside(
                lanes,
                site,
                "local_out_of_bounds",
                lambda at: f"access of {size} bytes at local offset {at}, past the thread's {self.nbytes} bytes",
                addresses,
                (0, self.nbytes - size),
            )
        if (span[2] | offset) & (size - 1):
            check_alignment(lanes, base, offset, size, site, "local memory")
        units: npt.NDArray[np.int64] = addresses + lanes.index * self.stride
        units >>= shift
        return units


def load_local(site: Site, offset: int, element: Element, register_bytes: tuple[int, ...]) -> Loader:
    """A function that loads from local memory for one instruction."""
    shift = element.shift

    def load(lanes: LaneSet, base: Array, span: Span) -> Any:
        local: LocalMemory = lanes.chunk.local
        units = local.units(lanes, base, span, offset, shift, site)
        state = local.state.of[shift].take(units)
        bad = np.flatnonzero(state != ALL_INITIALISED[shift])
        if bad.size:
            run = lanes.chunk.run
            fill(local.data.of[0], state_bytes(state[bad], shift) == 0, units[bad], site, run.fill)
            position = int(bad[0])
            address = (int(units[position]) << shift) - int(lanes.index[position]) * local.stride
            run.collector.add(
                "uninitialised_read",
                f"read of {1 << shift} bytes of local memory at offset {address} that were never written",
                site,
                lanes,
                position,
                bad.size,
                address,
            )
        return element.unpack(local.data.of[shift].take(units), register_bytes)

    return load


def store_local(site: Site, offset: int, element: Element) -> Storer:
    """A function that stores to local memory for one instruction."""
    shift = element.shift

    def store(lanes: LaneSet, base: Array, span: Span, *values: Array) -> None:
        local: LocalMemory = lanes.chunk.local
        units = local.units(lanes, base, span, offset, shift, site)
        local.data.of[shift][units] = element.pack(values, local.data.of[shift].dtype)
        local.state.of[shift][units] = ALL_INITIALISED[shift]

    return store


def load_parameter(site: Site, offset: int, element: Element, register_bytes: tuple[int, ...]) -> Loader:
    """A function that loads from the parameter block at an address held in a register."""
    shift = element.shift

    def load(lanes: LaneSet, base: Array, span: Span) -> Any:
        run = lanes.chunk.run
        addresses = base.astype(np.int64) + offset
        bad = np.flatnonzero((addresses < 0) | (addresses + element.total_bytes > run.parameter_bytes))
        if bad.size:
            address = int(addresses[int(bad[0])])
            run.collector.add(
                "global_out_of_bounds",
                f"read of {element.total_bytes} bytes at offset {address} of the {run.parameter_bytes}-byte parameters",
                site,
                lanes,
                int(bad[0]),
                lanes.count if addresses.size == 1 else bad.size,
                address,
            )
        if (span[2] | offset) & (element.total_bytes - 1):
            check_alignment(lanes, base, offset, element.total_bytes, site, "parameter block")
        raw = run.parameter_views.of[shift].take(addresses >> shift)
        return element.unpack(raw, register_bytes)

    return load
