"""Bulk copies of contiguous bytes (``cp.async.bulk`` without a tensor map) between global and shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ..checks.read_rules import check_read
from ..ptx.sites import Site
from ..state.lanes import LaneSet
from .access import check_alignment, check_initialised, global_units, span_of
from .bulk_copy import BulkCopies, Reduction, displaced
from .shared_memory import SharedMemory

Array = npt.NDArray[Any]
Units = npt.NDArray[np.int64]

_UNIT_BYTES = 16
_UNIT_SHIFT = 4


def _by_size(lanes: LaneSet, nbytes: Array, site: Site) -> list[tuple[int, LaneSet, Units]]:
    """(bytes, lanes, their positions) of every size, checked."""
    sizes = np.broadcast_to(nbytes, (lanes.count,)).astype(np.int64)
    uneven = np.flatnonzero(sizes % _UNIT_BYTES)
    if uneven.size:
        first = int(uneven[0])
        words = f"a bulk copy of {int(sizes[first])} bytes; the size must be a multiple of {_UNIT_BYTES}"
        lanes.chunk.run.collector.add("illegal_instruction", words, site, lanes, first, uneven.size)
    found = []
    for size in np.unique(sizes[sizes > 0]):
        position = np.flatnonzero(sizes == size)
        found.append((int(size), lanes.subset(position), position))
    return found


def _cut(values: Array, position: Units, count: int) -> Array:
    return np.broadcast_to(values, (count,)).take(position)


def _addresses(first: Array, size: int) -> Array:
    """The address of every unit, flat in lane order."""
    steps = np.arange(0, size, _UNIT_BYTES).astype(first.dtype)
    flat: Array = (first[:, None] + steps).reshape(-1)
    return flat


class _Bytes:
    """Where the bytes of some lanes lie: units of 16 bytes in shared and global memory, and the lane of each."""

    def __init__(self, lanes: LaneSet, shared: Array, outside: Array, size: int, site: Site, is_read: bool) -> None:
        chunk = lanes.chunk
        for addresses, where in ((shared, "shared memory"), (outside, "")):
            check_alignment(lanes, addresses, 0, _UNIT_BYTES, site, where)
        self.owners = LaneSet(chunk, np.repeat(lanes.index, size // _UNIT_BYTES))
        flat = _addresses(shared, size)
        memory: SharedMemory = chunk.shared
        self.shared = memory.units(self.owners, flat, span_of(flat), 0, _UNIT_SHIFT, site)
        base = _addresses(outside.astype(np.uint64), size)
        self.outside, allocation = global_units(self.owners, base, span_of(base), 0, _UNIT_SHIFT, site)
        if is_read and chunk.read_rules:
            check_read(self.owners, self.outside, _UNIT_SHIFT, allocation, site)
        if is_read and (allocation is None or not allocation.fully_initialised):
            check_initialised(self.owners, self.outside, _UNIT_SHIFT, allocation, site)


def load_bytes(site: Site, shared_offset: int, source_offset: int, mbarrier_offset: int) -> Callable[..., None]:
    """cp.async.bulk into shared memory: (lanes, addresses: shared, global; bytes; address of the mbarrier)."""

    def run(lanes: LaneSet, shared: Array, source: Array, nbytes: Array, mbarrier: Array) -> None:
        chunk = lanes.chunk
        copies: BulkCopies = chunk.bulk_copies
        shared, source = displaced(shared, shared_offset), displaced(source, source_offset)
        for size, part, position in _by_size(lanes, nbytes, site):
            here = [_cut(values, position, lanes.count) for values in (shared, source, mbarrier)]
            barriers = chunk.mbarriers.locate(part, here[2], mbarrier_offset, site)
            for number, inner, inside in chunk.mbarriers.parts(part, barriers):
                chosen = [values if inside is None else values.take(inside) for values in here]
                chunk.mbarriers.use(number, inner, site)
                moved = _Bytes(inner, chosen[0], chosen[1], size, site, True)
                data = chunk.run.memory.data.of[_UNIT_SHIFT].take(moved.outside)
                copies.issue_load(inner, moved.owners, moved.shared, data, _UNIT_SHIFT, size, number, site)

    return run


def store_bytes(
    site: Site, shared_offset: int, target_offset: int, update: Reduction | None = None
) -> Callable[..., None]:
    """cp.async.bulk into global memory, or cp.reduce: (lanes, addresses: shared, global; bytes)."""

    def run(lanes: LaneSet, shared: Array, target: Array, nbytes: Array) -> None:
        copies: BulkCopies = lanes.chunk.bulk_copies
        shared, target = displaced(shared, shared_offset), displaced(target, target_offset)
        for size, part, position in _by_size(lanes, nbytes, site):
            here = [_cut(values, position, lanes.count) for values in (shared, target)]
            moved = _Bytes(part, here[0], here[1], size, site, False)
            memory: SharedMemory = lanes.chunk.shared
            memory.check_initialised(moved.owners, moved.shared, _UNIT_SHIFT, site)
            copies.issue_store(part, moved.owners, moved.shared, moved.outside, site, update)

    return run


def copy_between(site: Site, target_offset: int, source_offset: int, mbarrier_offset: int) -> Callable[..., None]:
    """cp.async.bulk from the block's own shared memory to that of a block of its cluster, whose mbarrier it signals:
    (lanes, addresses: target, source; bytes; address of the mbarrier)."""

    def run(lanes: LaneSet, target: Array, source: Array, nbytes: Array, mbarrier: Array) -> None:
        chunk = lanes.chunk
        memory: SharedMemory = chunk.shared
        pairs = (target, target_offset), (source, source_offset), (mbarrier, mbarrier_offset)
        places = [displaced(base, offset).astype(np.int64) & 0xFFFFFFFF for base, offset in pairs]
        for size, part, position in _by_size(lanes, nbytes, site):
            to, given, barrier = (_cut(values, position, lanes.count) for values in places)
            there, to = chunk.clusters.remote(part, to, site)
            counting, barrier = chunk.clusters.remote(part, barrier, site)
            apart = np.flatnonzero(there.block_slot != counting.block_slot)
            if apart.size:
                words = "the mbarrier of a bulk copy is in another block than the bytes"
                chunk.run.collector.add("illegal_instruction", words, site, lanes, int(apart[0]), apart.size)
            for addresses in (to, given):
                check_alignment(part, addresses, 0, _UNIT_BYTES, site, "shared memory")
            order = np.argsort(there.block_slot, kind="stable")
            there, part = there.subset(order), part.subset(order)
            to, given, barrier = to[order], given[order], barrier[order]
            for number, inner, inside in chunk.mbarriers.parts(there, chunk.mbarriers.locate(there, barrier, 0, site)):
                chosen = np.arange(there.count) if inside is None else inside
                chunk.mbarriers.use(number, inner, site)
                givers, owners = (each.repeated(size // _UNIT_BYTES) for each in (part.subset(chosen), inner))
                here, flat = _addresses(given[chosen], size), _addresses(to[chosen], size)
                read = memory.units(givers, here, span_of(here), 0, _UNIT_SHIFT, site)
                memory.check_initialised(givers, read, _UNIT_SHIFT, site)
                written = memory.units(owners, flat, span_of(flat), 0, _UNIT_SHIFT, site)
                data = memory.data.of[_UNIT_SHIFT].take(read)
                what = inner, owners, written, data, _UNIT_SHIFT, size, number, site
                chunk.bulk_copies.issue_load(*what, source=(givers, read))

    return run
