"""Bulk tensor copies (TMA) between global and shared memory; in two and three dimensions as recorded from an H200.

A box is a list of rows of contiguous bytes. A row that leaves the tensor is read as zeros there and not written there.
In shared memory rows follow each other at the row pitch, and with a swizzle of 128, 64 or 32 bytes the 16-byte chunk
number is XORed with as many of the bits above bit 6 of the *absolute* shared address as the span has chunks.

A load reads its source at issue and changes shared memory as late as possible: when no thread can run. A store reads
shared memory and writes global memory when its group is waited for. So a forgotten wait shows as old data; the race
check sees both from their issue on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..checks.clock_races import ClockRaces
from ..checks.conflicts import ATOMIC, READ, WRITE
from ..checks.read_rules import check_read
from ..faults import EmulatorError, UnsupportedOpcode
from ..ptx.sites import Site
from ..state.lanes import ChunkState, LaneSet
from ..state.memory import PARAMETER_WINDOW
from .access import ALL_INITIALISED, check_alignment, check_initialised, global_units, span_of
from .atomic_chains import Update
from .atomics import apply_in_turns, update_function
from .generic_memory import GLOBAL_SPACE, space_of
from .shared_memory import SharedMemory
from .tensor_map import CHUNK_BYTES, SWIZZLE_ROWS, TENSOR_MAP_ALIGNMENT, TENSOR_MAP_BYTES, TensorMap

Array = npt.NDArray[Any]
Units = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

_DESTINATION_ALIGNMENT = 128
_CHUNK_SHIFT = 4
_MASK_BITS = 16


@dataclass(frozen=True, eq=False)
class _Box:
    """The units (of 1 << shift bytes) of one copy by each lane, [lanes, rows, units of a row]."""

    shift: int
    offsets: Units
    """Byte offset of each unit from the tensor's first element; meaningless outside."""
    is_inside: Flags
    shared: Units
    """Shared address of each unit, in the block."""


@dataclass(frozen=True, eq=False)
class _Load:
    """A load in flight: units in the chunk's shared memory and their data, in lane order."""

    number: int
    lanes: LaneSet
    units: Units
    shift: int
    data: Array
    nbytes: int
    site: Site


@dataclass(frozen=True)
class Reduction:
    """An update of elements of 1 << shift bytes: (old, value, value) -> new."""

    shift: int
    update: Update


@dataclass(frozen=True, eq=False)
class _Store:
    """A store in flight: source units in shared memory, destination units in global memory, the lane of each."""

    lanes: LaneSet
    group: npt.NDArray[np.int32]
    owner: Units
    source: Units
    destination: Units
    shift: int
    site: Site
    update: Reduction | None = None
    """What is done with the destination, where the bytes do not replace it."""


def swizzled(addresses: Units, swizzle_bytes: int) -> Units:
    """Where a byte at an absolute shared address comes to lie."""
    return addresses ^ (((addresses >> 7) & (SWIZZLE_ROWS[swizzle_bytes] - 1)) << 4)


def _place(box: TensorMap, coordinates: list[Units], destination: Units) -> _Box:
    """The units of a box at lane-wise coordinates (elements, innermost first) and shared addresses."""
    inner_bytes = box.extents[0] * box.element_bytes
    shift = min(_CHUNK_SHIFT, (inner_bytes & -inner_bytes).bit_length() - 1)
    columns = np.arange(0, box.row_bytes, 1 << shift)
    position = (coordinates[0] * box.element_bytes)[:, None] + columns
    column_inside = (position >= 0) & (position < inner_bytes)
    lanes = destination.size
    rows = np.arange(box.rows)
    row_inside = np.ones((lanes, box.rows), np.bool_)
    row_offset = np.zeros((lanes, box.rows), np.int64)
    step = 1
    for dimension in range(1, box.rank):
        index = coordinates[dimension][:, None] + rows // step % box.box[dimension]
        step *= box.box[dimension]
        row_inside &= (index >= 0) & (index < box.extents[dimension])
        row_offset += index * box.strides_bytes[dimension - 1]
    linear = destination[:, None, None] + (rows * box.row_pitch_bytes)[:, None] + columns
    return _Box(
        shift,
        row_offset[:, :, None] + position[:, None, :],
        row_inside[:, :, None] & column_inside[:, None, :],
        swizzled(linear, box.swizzle_bytes) if box.swizzle_bytes else linear,
    )


class BulkCopies:
    """Bulk copies of a chunk that were issued and are not finished."""

    def __init__(self, chunk: ChunkState) -> None:
        self.chunk = chunk
        self.loads: list[_Load] = []
        self.stores: list[_Store] = []
        self.issued: list[Units] = []
        self.delivered: list[Units] = []
        self.committed = np.zeros(chunk.lane_count, np.int32)
        self.maps: dict[bytes, TensorMap] = {}

    def tensor_map(self, lanes: LaneSet, address: int, site: Site) -> TensorMap:
        """The tensor map at a generic address, of a kernel parameter or in global memory."""
        run = self.chunk.run
        if address % TENSOR_MAP_ALIGNMENT:
            self._illegal(f"the tensor map at {address:#x} is not {TENSOR_MAP_ALIGNMENT}-byte aligned", lanes, site)
        if PARAMETER_WINDOW <= address <= PARAMETER_WINDOW + run.parameter_bytes - TENSOR_MAP_BYTES:
            begin = address - PARAMETER_WINDOW
            data = run.parameter_views.of[0][begin : begin + TENSOR_MAP_BYTES].tobytes()
        elif space_of(address) == GLOBAL_SPACE:
            base = np.arange(address, address + TENSOR_MAP_BYTES, CHUNK_BYTES, dtype=np.uint64)
            owners = LaneSet(self.chunk, np.repeat(lanes.index[:1], base.size))
            units, allocation = global_units(owners, base, span_of(base), 0, 4, site)
            if allocation is None or not allocation.fully_initialised:
                check_initialised(owners, units, 4, allocation, site)
            data = run.memory.data.of[4].take(units).tobytes()
        else:
            self._illegal(
                f"the tensor map at {address:#x} is no kernel parameter and not in global memory", lanes, site
            )
        found = self.maps.get(data)
        if found is None:
            try:
                found = self.maps[data] = TensorMap.unpack(data)
            except EmulatorError as error:
                self._illegal(f"operand at {address:#x}: {error}", lanes, site)
                raise
        return found

    def _illegal(self, words: str, lanes: LaneSet, site: Site, position: int = 0) -> None:
        self.chunk.run.collector.add("illegal_instruction", words, site, lanes, position, lanes.count)

    def _box(self, box: TensorMap, lanes: LaneSet, coordinates: list[Array], shared: Array, site: Site) -> _Box:
        """Checked units of the box of each lane."""
        if len(coordinates) != box.rank:
            self._illegal(f"{len(coordinates)} coordinates for a tensor map of {box.rank} dimensions", lanes, site)
        signed = [np.broadcast_to(part.view(np.int32), (lanes.count,)).astype(np.int64) for part in coordinates]
        uneven = np.flatnonzero(signed[0] * box.element_bytes % CHUNK_BYTES)
        if uneven.size:
            position = int(uneven[0])
            words = f"inner coordinate {int(signed[0][position])} is no multiple of {CHUNK_BYTES} bytes"
            self._illegal(f"{words} ({box.element_bytes}-byte elements)", lanes, site, position)
        check_alignment(lanes, shared, 0, _DESTINATION_ALIGNMENT, site, "shared memory")
        addresses = np.broadcast_to(shared, (lanes.count,)).astype(np.int64)
        return _place(box, signed, addresses)

    def _shared_units(self, lanes: LaneSet, placed: _Box, site: Site) -> tuple[LaneSet, Units]:
        """(the lane of every unit, units in the chunk's shared memory), flat in lane order."""
        owners = lanes.repeated(placed.shared[0].size)
        flat = placed.shared.reshape(-1)
        units = self.chunk.shared.units(owners, flat, span_of(flat), 0, placed.shift, site)
        return owners, units

    def _global_units(
        self, lanes: LaneSet, box: TensorMap, placed: _Box, site: Site, is_read: bool
    ) -> tuple[Units, Units, LaneSet]:
        """(flat positions inside the tensor, arena units of those, their lanes); reads check initialisation."""
        inside = np.flatnonzero(placed.is_inside)
        owners = LaneSet(self.chunk, lanes.index.take(inside // placed.is_inside[0].size))
        base = (placed.offsets.reshape(-1).take(inside) + box.address).view(np.uint64)
        if inside.size == 0:
            return inside, inside, owners
        units, allocation = global_units(owners, base, span_of(base), 0, placed.shift, site)
        if is_read and self.chunk.read_rules:
            check_read(owners, units, placed.shift, allocation, site)
        if is_read and (allocation is None or not allocation.fully_initialised):
            check_initialised(owners, units, placed.shift, allocation, site)
        return inside, units, owners

    def load(
        self, lanes: LaneSet, box: TensorMap, coordinates: list[Array], shared: Array, number: int, site: Site
    ) -> None:
        """Issue a load of a box by each lane; its bytes count on the lane's mbarrier of this number."""
        chunk = self.chunk
        chunk.mbarriers.use(number, lanes, site)
        placed = self._box(box, lanes, coordinates, shared, site)
        owners, units = self._shared_units(lanes, placed, site)
        inside, source, _ = self._global_units(lanes, box, placed, site, True)
        view = chunk.run.memory.data.of[placed.shift]
        data = np.zeros(units.size, view.dtype)
        data[inside] = view.take(source)
        self.issue_load(lanes, owners, units, data, placed.shift, box.box_bytes, number, site)

    def issue_load(
        self,
        lanes: LaneSet,
        owners: LaneSet,
        units: Units,
        data: Array,
        shift: int,
        nbytes: int,
        number: int,
        site: Site,
        source: tuple[LaneSet, Units] | None = None,
    ) -> None:
        """Put a load in flight: ``data`` for the shared ``units`` of 1 << shift bytes, as many and ``nbytes`` for each
        lane, ``owners`` the lane of each unit; ``source``: the lanes and units of 16 bytes of shared memory that are
        read for it."""
        chunk = self.chunk
        serial = self._serials(number, lanes)
        chunks, owners = _chunks(owners, units, shift, None)
        each = chunks.size // lanes.count
        agent = np.repeat(chunk.races.copy_agent(number, lanes.block_slot), each)
        segment = np.repeat(serial, each)
        if source is not None:
            givers, given = source
            chunk.races.add_asynchronous(READ, given, _CHUNK_SHIFT, givers, site, agent, segment)
        chunk.races.add_asynchronous(WRITE, chunks, _CHUNK_SHIFT, owners, site, agent, segment)
        self.loads.append(_Load(number, lanes, units, shift, data, nbytes, site))

    def _serials(self, number: int, lanes: LaneSet) -> Units:
        """The number of each lane's copy among those that signal its block's mbarrier."""
        while len(self.issued) <= number:
            self.issued.append(np.zeros(self.chunk.block_count, np.int64))
            self.delivered.append(np.zeros(self.chunk.block_count, np.int64))
        serial = np.empty(lanes.count, np.int64)
        for position, slot in enumerate(lanes.block_slot):
            self.issued[number][slot] += 1
            serial[position] = self.issued[number][slot]
        return serial

    def push(self, number: int, lanes: LaneSet, units: Units, shift: int, data: Array, site: Site) -> None:
        """Issue a store of one unit by each lane into its block (ascending), which the block's mbarrier counts."""
        chunk = self.chunk
        chunk.mbarriers.use(number, lanes, site)
        agent = chunk.races.copy_agent(number, lanes.block_slot)
        chunk.races.add_asynchronous(WRITE, units, shift, lanes, site, agent, self._serials(number, lanes))
        self.loads.append(_Load(number, lanes, units, shift, data, 1 << shift, site))

    def deliver(self) -> bool:
        """Let all loads arrive, in the order of their issue; False if there were none."""
        loads, self.loads = self.loads, []
        if not loads:
            return False
        alive = np.asarray(self.chunk.alive_flags().reshape(self.chunk.block_count, -1).any(1), np.bool_)
        shared: SharedMemory = self.chunk.shared
        for load in loads:
            shared.data.of[load.shift][load.units] = load.data
            shared.state.of[load.shift][load.units] = ALL_INITIALISED[load.shift]
            slots = load.lanes.block_slot
            ended = np.flatnonzero(~alive[slots])
            if ended.size:
                self._report_unfinished(load, int(ended[0]), ended.size)
            delivered = self.delivered[load.number]
            for blocks, count in _turns(slots):
                delivered[blocks] += count
                self.chunk.races.copies_arrived(load.number, blocks, delivered[blocks], load.site)
                self.chunk.mbarriers.transfer(load.number, blocks, load.nbytes * count)
        return True

    def store(
        self,
        lanes: LaneSet,
        box: TensorMap,
        coordinates: list[Array],
        shared: Array,
        site: Site,
        update: Reduction | None = None,
    ) -> None:
        """Issue a store of a box by each lane into its open group, or an update of what lies there."""
        placed = self._box(box, lanes, coordinates, shared, site)
        givers, units = self._shared_units(lanes, placed, site)
        inside, destination, owners = self._global_units(lanes, box, placed, site, False)
        source = units.take(inside)
        shared_memory: SharedMemory = self.chunk.shared
        shared_memory.check_initialised(owners, source, placed.shift, site)
        chunks, givers = _chunks(givers, units, placed.shift, placed.is_inside)
        self._read_later(chunks, givers, site)
        group = self.committed.take(lanes.index)
        owner = inside // placed.is_inside[0].size
        self.stores.append(_Store(lanes, group, owner, source, destination, placed.shift, site, update))

    def issue_store(
        self,
        lanes: LaneSet,
        givers: LaneSet,
        source: Units,
        destination: Units,
        site: Site,
        update: Reduction | None = None,
    ) -> None:
        """Put a store in flight: shared units of 16 bytes and their destinations, as many for each lane."""
        self._read_later(source, givers, site)
        group = self.committed.take(lanes.index)
        owner = np.repeat(np.arange(lanes.count), source.size // lanes.count)
        self.stores.append(_Store(lanes, group, owner, source, destination, _CHUNK_SHIFT, site, update))

    def _read_later(self, chunks: Units, givers: LaneSet, site: Site) -> None:
        """The open group reads these chunks of 16 bytes until it is waited for."""
        segment = self.committed.take(givers.index).astype(np.int64) + 1
        races: ClockRaces = self.chunk.races
        agent = races.store_agent(givers.index // 32 % races.warps)
        races.add_asynchronous(READ, chunks, _CHUNK_SHIFT, givers, site, agent, segment)

    def commit(self, lanes: LaneSet) -> None:
        """cp.async.bulk.commit_group."""
        self.committed[lanes.index] += 1

    def wait(self, lanes: LaneSet, open_groups: int) -> None:
        """cp.async.bulk.wait_group: finish all but the latest committed groups of these lanes."""
        limit = np.full(self.chunk.lane_count, -1, np.int32)
        limit[lanes.index] = self.committed[lanes.index] - open_groups
        stores, self.stores = self.stores, []
        for store in stores:
            done = store.group < limit.take(store.lanes.index)
            if done.any():
                self._write(store, done)
            if not done.all():
                self.stores.append(_keep(store, ~done))
        warps = lanes.index // 32
        races: ClockRaces = self.chunk.races
        races.group_done(warps, races.store_agent(warps % races.warps), limit[lanes.index])

    def _write(self, store: _Store, done: Flags) -> None:
        chosen = np.flatnonzero(done[store.owner])
        chunk = self.chunk
        memory = chunk.run.memory
        units = store.destination.take(chosen)
        owners = LaneSet(chunk, store.lanes.index.take(store.owner.take(chosen)))
        chunk.run.undo.keep(units, store.shift)
        if store.update is not None:
            self._reduce(store.update, store, units, store.source.take(chosen), owners)
            return
        memory.data.of[store.shift][units] = chunk.shared.data.of[store.shift].take(store.source.take(chosen))
        memory.state.of[store.shift][units] = ALL_INITIALISED[store.shift]
        chunk.run.stores.add(units, store.shift)
        chunk.run.accesses.add(WRITE, units, store.shift, owners, store.site)

    def _reduce(self, what: Reduction, store: _Store, units: Units, source: Units, owners: LaneSet) -> None:
        """Update the destination element by element, as atomics do."""
        run = self.chunk.run
        check_initialised(owners, units, store.shift, None, store.site)
        split = 1 << (store.shift - what.shift)
        places, given = (((each * split)[:, None] + np.arange(split)).reshape(-1) for each in (units, source))
        values = self.chunk.shared.data.of[what.shift].take(given)
        apply_in_turns(run.memory.data.of[what.shift], places, what.update, values, values)
        run.stores.add(units, store.shift)
        run.accesses.add(ATOMIC, places, what.shift, owners.repeated(split), store.site)

    def report_unfinished(self) -> None:
        """The blocks have ended: report copies that nobody waited for."""
        for load in self.loads:
            self._report_unfinished(load, 0, load.lanes.count)
        for store in self.stores:
            words = "the block ended before a bulk store had read its shared memory; wait for its group"
            lanes = store.lanes
            self.chunk.run.collector.add("unfinished_copy", words, store.site, lanes, 0, lanes.count)

    def _report_unfinished(self, load: _Load, position: int, count: int) -> None:
        words = "the block ended before a bulk copy into its shared memory was waited for"
        self.chunk.run.collector.add("unfinished_copy", words, load.site, load.lanes, position, count)


def _keep(store: _Store, which: Flags) -> _Store:
    chosen = np.flatnonzero(which[store.owner])
    renumbered = np.cumsum(which) - 1
    position = np.flatnonzero(which)
    return _Store(
        store.lanes.subset(position),
        store.group.take(position),
        renumbered[store.owner.take(chosen)],
        store.source.take(chosen),
        store.destination.take(chosen),
        store.shift,
        store.site,
        store.update,
    )


def _chunks(owners: LaneSet, units: Units, shift: int, is_inside: Flags | None) -> tuple[Units, LaneSet]:
    """(shared units of 16 bytes, their lanes) of flat units of rows; with flags only those with a part inside."""
    parts = 1 << (_CHUNK_SHIFT - shift)
    chunks, index = units[::parts] >> (_CHUNK_SHIFT - shift), owners.index[::parts]
    if is_inside is not None:
        touched = np.flatnonzero(is_inside.reshape(-1, parts).any(1))
        chunks, index = chunks.take(touched), index.take(touched)
    return chunks, LaneSet(owners.chunk, index)


def _turns(slots: Units) -> list[tuple[Units, Units]]:
    """(ascending block numbers, how many copies of each) in turns: each block's first copy, then the others together.

    The first may be the last that a phase waits for.
    """
    blocks, counts = np.unique(slots, return_counts=True)
    more = counts > 1
    turns = [(blocks, np.ones(blocks.size, np.int64))]
    return [*turns, (blocks[more], counts[more] - 1)] if more.any() else turns


def _by_map(lanes: LaneSet, addresses: Array) -> list[tuple[int, Units | None]]:
    if addresses.shape[0] == 1 or (addresses == addresses[0]).all():
        return [(int(addresses[0]), None)]
    return [(int(address), np.flatnonzero(addresses == address)) for address in np.unique(addresses)]


def _cut(values: Array, position: Units | None) -> Array:
    return values if position is None or values.shape[0] == 1 else values.take(position)


def displaced(base: Array, offset: int) -> Array:
    """An address with a constant offset, in its own width."""
    moved: Array = base + base.dtype.type(offset & ((1 << 8 * base.dtype.itemsize) - 1))
    return moved


def load_tensor(
    site: Site, shared_offset: int, map_offset: int, mbarrier_offset: int, is_multicast: bool = False
) -> Callable[..., None]:
    """cp.async.bulk.tensor into shared memory: (lanes, addresses: shared, map, mbarrier, then the coordinates).

    With ``is_multicast`` a mask stands before the coordinates: bit r brings the box to the block of rank r of the
    cluster, at the same place, and that block's mbarrier counts it.
    """

    def load(lanes: LaneSet, shared: Array, tensor_map: Array, mbarrier: Array, coordinates: tuple[Array, ...]) -> None:
        chunk = lanes.chunk
        copies: BulkCopies = chunk.bulk_copies
        destination = displaced(shared, shared_offset)
        for address, position in _by_map(lanes, tensor_map):
            part = lanes if position is None else lanes.subset(position)
            box = copies.tensor_map(part, address + map_offset, site)
            barriers = chunk.mbarriers.locate(part, _cut(mbarrier, position), mbarrier_offset, site)
            for number, inner, inside in chunk.mbarriers.parts(part, barriers):
                where = [_cut(_cut(values, position), inside) for values in coordinates]
                copies.load(inner, box, where, _cut(_cut(destination, position), inside), number, site)

    def run(lanes: LaneSet, shared: Array, tensor_map: Array, mbarrier: Array, *rest: Array) -> None:
        if not is_multicast:
            load(lanes, shared, tensor_map, mbarrier, rest)
            return
        masks = np.broadcast_to(rest[0], (lanes.count,)).astype(np.int64)
        for rank in range(_MASK_BITS):
            position = np.flatnonzero(masks >> rank & 1)
            if position.size:
                there = lanes.chunk.clusters.of_rank(lanes.subset(position), rank, site)
                parts = [_cut(values, position) for values in (shared, tensor_map, mbarrier, *rest[1:])]
                load(there, parts[0], parts[1], parts[2], tuple(parts[3:]))

    return run


def _reduction_of(box: TensorMap, operation: str, site: Site) -> Reduction:
    """What cp.reduce does to elements of a tensor, which is what red does to them. Raises UnsupportedOpcode."""
    kind = box.kind
    if operation in ("and", "or", "xor") and kind[:1] in ("u", "s"):
        kind = f"b{8 * box.element_bytes}"
    update = update_function(operation, kind, False, True)
    if update is None:
        of = (
            f"elements of type {box.kind}"
            if box.kind
            else "a tensor map that does not say of which type its elements are"
        )
        raise UnsupportedOpcode(site.opcode, site.ptx_line, f"{operation} of {of}")
    return Reduction(box.element_bytes.bit_length() - 1, update)


def store_tensor(site: Site, shared_offset: int, map_offset: int, operation: str | None = None) -> Callable[..., None]:
    """cp.async.bulk.tensor into global memory, or cp.reduce with an operation: (lanes, addresses: shared, map, then the
    coordinates)."""

    def run(lanes: LaneSet, shared: Array, tensor_map: Array, *coordinates: Array) -> None:
        copies: BulkCopies = lanes.chunk.bulk_copies
        source = displaced(shared, shared_offset)
        for address, position in _by_map(lanes, tensor_map):
            part = lanes if position is None else lanes.subset(position)
            box = copies.tensor_map(part, address + map_offset, site)
            update = None if operation is None else _reduction_of(box, operation, site)
            where = [_cut(values, position) for values in coordinates]
            copies.store(part, box, where, _cut(source, position), site, update)

    return run


def commit_bulk() -> Callable[[LaneSet], None]:
    """cp.async.bulk.commit_group: (lanes)."""

    def run(lanes: LaneSet) -> None:
        lanes.chunk.bulk_copies.commit(lanes)

    return run


def wait_bulk(open_groups: int) -> Callable[[LaneSet], None]:
    """cp.async.bulk.wait_group, with or without .read: (lanes)."""

    def run(lanes: LaneSet) -> None:
        lanes.chunk.bulk_copies.wait(lanes, open_groups)

    return run
