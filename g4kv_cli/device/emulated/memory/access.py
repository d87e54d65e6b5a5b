"""Loads and stores of global memory: bounds, alignment, lifetime and initialisation of every lane's bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..checks.conflicts import READ, WRITE
from ..checks.order import synchronise
from ..checks.read_rules import check_read
from ..checks.undefined import fill, state_bytes
from ..ptx.sites import Site
from ..state.lanes import LaneSet
from ..state.memory import GLOBAL_BASE, NO_ALLOCATION, Allocation

Array = npt.NDArray[Any]
Span = tuple[int, int, int]
"""(lowest, highest, bitwise or) of a base address over the lanes."""

Loader = Callable[["LaneSet", Array, Span], Any]
Storer = Callable[..., None]

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
KIND_BYTES = {"b16": 2, "b32": 4, "b64": 8}
ALL_INITIALISED = (
    np.uint8(1),
    np.uint16(0x0101),
    np.uint32(0x01010101),
    np.uint64(0x0101010101010101),
    np.array([0x0101010101010101] * 2, np.uint64).view(np.complex128)[0],
)
"""State units of 1 << k initialised bytes."""

_GLOBAL_BASE_U64 = np.uint64(GLOBAL_BASE)


def span_of(base: Array) -> Span:
    """Lowest, highest and bitwise or of unsigned base addresses."""
    if base.shape[0] == 1:
        only = int(base[0])
        return only, only, only
    return int(base.min()), int(base.max()), int(np.bitwise_or.reduce(base))


def report_outside(
    lanes: LaneSet,
    site: Site,
    kind: str,
    words: Callable[[int], str],
    addresses: npt.NDArray[np.int64],
    inside: tuple[int, int],
) -> None:
    """Report the lanes, of which there may be one for all, whose address is not from the first to the last of
    ``inside``; words of the first such address."""
    found = np.flatnonzero((addresses < inside[0]) | (addresses > inside[1]))
    if found.size:
        address = int(addresses[found[0]])
        count = lanes.count if addresses.size == 1 else found.size
        lanes.chunk.run.collector.add(kind, words(address), site, lanes, int(found[0]), count, address)


def global_units(
    lanes: LaneSet, base: Array, span: Span, offset: int, shift: int, site: Site
) -> tuple[npt.NDArray[np.int64], Allocation | None]:
    """Checked arena offsets in units of 1 << shift bytes, and the allocation if one holds all lanes."""
    size = 1 << shift
    low = span[0] + offset
    high = span[1] + offset + size
    run = lanes.chunk.run
    allocation: Allocation | None = run.hints[site.number]
    if allocation is None or not (allocation.begin <= low and high <= allocation.end):
        allocation = run.memory.find(low)
        if allocation is None or high > allocation.end or allocation.is_freed:
            _check_lanes(lanes, base, offset, size, site)
            allocation = None
        else:
            run.hints[site.number] = allocation
    if (span[2] | offset) & (size - 1):
        check_alignment(lanes, base, offset, size, site)
    units = (base + np.uint64((offset - GLOBAL_BASE) & 0xFFFFFFFFFFFFFFFF)).view(np.int64)
    if shift:
        units >>= shift
    return units, allocation


def _addresses(base: Array, offset: int) -> npt.NDArray[np.uint64]:
    return base.astype(np.uint64) + np.uint64(offset & 0xFFFFFFFFFFFFFFFF)


def _check_lanes(lanes: LaneSet, base: Array, offset: int, size: int, site: Site) -> None:
    run = lanes.chunk.run
    addresses = _addresses(base, offset)
    places = run.memory.classify(addresses, size)
    for code, kind, words in ((0, "global_out_of_bounds", "outside every allocation"), (1, "use_after_free", "")):
        bad = np.flatnonzero(places == code)
        if bad.size:
            position = int(bad[0])
            address = int(addresses[position])
            label, inside, description = run.memory.describe(address)
            words = words or f"in '{label}', which was freed"
            count = lanes.count if addresses.size == 1 else bad.size
            run.collector.add(
                kind,
                f"access of {size} bytes {words}: {description}",
                site,
                lanes,
                position,
                count,
                address,
                label,
                inside,
            )


def check_alignment(lanes: LaneSet, base: Array, offset: int, size: int, site: Site, where: str = "") -> None:
    """Raise the fault of lanes whose address is no multiple of the access size."""
    addresses = _addresses(base, offset)
    bad = np.flatnonzero(addresses & np.uint64(size - 1))
    if bad.size == 0:
        return
    position = int(bad[0])
    address = int(addresses[position])
    run = lanes.chunk.run
    label, inside, description = (None, None, where) if where else run.memory.describe(address)
    count = lanes.count if addresses.size == 1 else bad.size
    run.collector.add(
        "misaligned",
        f"access of {size} bytes at {address:#x} is not {size}-byte aligned: {description}",
        site,
        lanes,
        position,
        count,
        address,
        label,
        inside,
    )


def check_initialised(
    lanes: LaneSet, units: npt.NDArray[np.int64], shift: int, allocation: Allocation | None, site: Site
) -> None:
    """Report lanes that read global bytes which nobody wrote."""
    memory = lanes.chunk.run.memory
    good = memory.state.of[shift].take(units) == ALL_INITIALISED[shift]
    if good.all():
        return
    addresses = (units << shift).astype(np.uint64) + _GLOBAL_BASE_U64
    if allocation is None:
        good |= memory.classify(addresses, 1 << shift) == 3
    bad = np.flatnonzero(~good)
    if bad.size == 0:
        return
    _fill_undefined(lanes, units[bad], shift, site)
    position = int(bad[0])
    address = int(addresses[position])
    label, inside, description = memory.describe(address)
    lanes.chunk.run.collector.add(
        "uninitialised_read",
        f"read of {1 << shift} bytes that were never written: {description}",
        site,
        lanes,
        position,
        lanes.count if units.size == 1 else bad.size,
        address,
        label,
        inside,
    )


def _fill_undefined(lanes: LaneSet, units: npt.NDArray[np.int64], shift: int, site: Site) -> None:
    """Let lanes find what the run says where nobody wrote."""
    run = lanes.chunk.run
    memory = run.memory
    unwritten = state_bytes(memory.state.of[shift].take(units), shift) == 0
    run.undo.keep(units, shift)
    fill(memory.data.of[0], unwritten, units, site, run.fill)


class Element:
    """How one element of an access is widened to its register (loads) or cut from it (stores)."""

    def __init__(self, element_bytes: int, count: int, is_signed: bool) -> None:
        self.element_bytes = element_bytes
        self.count = count
        self.is_signed = is_signed
        self.total_bytes = element_bytes * count
        self.shift = min(self.total_bytes, 16).bit_length() - 1
        self.pieces = max(self.total_bytes // 16, 1)
        self.dtype: Any = UNSIGNED[element_bytes]

    def widen(self, raw: Array, register_bytes: int) -> Array:
        """Memory element -> register bits, zero- or sign-extended."""
        if register_bytes == self.element_bytes:
            return raw
        if register_bytes < self.element_bytes:
            return raw.astype(UNSIGNED[register_bytes])
        if self.is_signed:
            wide = raw.view(SIGNED[self.element_bytes]).astype(SIGNED[register_bytes])
            return wide.view(UNSIGNED[register_bytes])
        return raw.astype(UNSIGNED[register_bytes])

    def unpack(self, raw: Array, register_bytes: tuple[int, ...]) -> Any:
        """Units of memory -> one array (count 1) or a tuple of arrays."""
        if self.count == 1:
            return self.widen(raw, register_bytes[0])
        table = raw.view(self.dtype).reshape(-1, self.count)
        return tuple(self.widen(table[:, column], wanted) for column, wanted in enumerate(register_bytes))

    def pack(self, values: tuple[Array, ...], unit_dtype: Any) -> Array:
        """Registers -> units of memory."""
        if self.count == 1:
            return values[0].astype(self.dtype, copy=False)
        size = max(value.shape[0] for value in values)
        table = np.empty((size, self.count), self.dtype)
        for column, value in enumerate(values):
            table[:, column] = value
        return table.reshape(-1).view(unit_dtype)


def split_pieces(units: npt.NDArray[np.int64], pieces: int) -> npt.NDArray[np.int64]:
    """Units of a 32-byte access -> its 16-byte units, lane by lane."""
    return ((units * pieces)[:, None] + np.arange(pieces)).reshape(-1)


def load_global(site: Site, offset: int, element: Element, register_bytes: tuple[int, ...]) -> Loader:
    """A function that loads from global memory for one instruction."""
    shift = element.shift
    full_shift = element.total_bytes.bit_length() - 1

    def load(lanes: LaneSet, base: Array, span: Span) -> Any:
        units, allocation = global_units(lanes, base, span, offset, full_shift, site)
        if lanes.chunk.read_rules:
            check_read(lanes, units, full_shift, allocation, site)
        run = lanes.chunk.run
        run.accesses.add(READ, units, full_shift, lanes, site)
        synchronise(site, lanes, units << full_shift, False, False)
        if full_shift != shift:
            units = split_pieces(units, element.pieces)
        if allocation is None or not allocation.fully_initialised:
            if full_shift == shift:
                check_initialised(lanes, units, shift, allocation, site)
            else:
                for piece in range(element.pieces):
                    check_initialised(lanes, units[piece :: element.pieces], shift, allocation, site)
        if site.number in run.stale_sites:
            return element.unpack(run.undo.before(units, shift), register_bytes)
        return element.unpack(run.memory.data.of[shift].take(units), register_bytes)

    return load


def store_global(site: Site, offset: int, element: Element) -> Storer:
    """A function that stores to global memory for one instruction."""
    shift = element.shift
    full_shift = element.total_bytes.bit_length() - 1

    def store(lanes: LaneSet, base: Array, span: Span, *values: Array) -> None:
        units, allocation = global_units(lanes, base, span, offset, full_shift, site)
        run = lanes.chunk.run
        memory = run.memory
        data = element.pack(values, memory.data.of[shift].dtype)
        if units.shape[0] == 1 and data.shape[0] > element.pieces:
            units = np.repeat(units, lanes.count)
        elif element.pieces > 1 and data.shape[0] == element.pieces and units.shape[0] > 1:
            data = np.tile(data, units.shape[0])
        run.stores.add(units, full_shift)
        run.accesses.add(WRITE, units, full_shift, lanes, site, data)
        whole = units
        if full_shift != shift:
            units = split_pieces(units, element.pieces)
        run.undo.keep(units, shift)
        if run.watches_changes and is_change(memory.data.of[shift], units, data):
            run.changed()
        memory.data.of[shift][units] = data
        if allocation is None or not allocation.fully_initialised:
            memory.state.of[shift][units] = ALL_INITIALISED[shift]
        synchronise(site, lanes, whole << full_shift, True, False)

    return store


def differs(units: Array, others: Array) -> npt.NDArray[np.bool_]:
    """Which units are not the same bytes; those of 16 bytes are complex numbers, which compare as floats."""
    if units.dtype.itemsize < 16:
        return np.asarray(units != others, np.bool_)
    both = np.broadcast_arrays(units, others)
    first, second = (np.ascontiguousarray(each).view(np.uint64).reshape(-1, 2) for each in both)
    return np.asarray((first != second).any(1), np.bool_)


def is_change(view: Array, units: npt.NDArray[np.int64], data: Array) -> bool:
    """Whether a store changes any byte."""
    return bool(differs(view.take(units), data).any())


def fresh_hints(count: int) -> list[Allocation]:
    """First guesses of the allocation that each site of a kernel accesses."""
    return [NO_ALLOCATION] * count
