"""Sets of lanes that execute together, their registers, and how they split and merge.

A *lane* is a thread slot of a chunk of whole thread blocks; every block is padded to whole warps. A *group* is a set of
lanes at the same instruction with its registers, one array per register over the lanes of the group; an array of one
element is a uniform value. After a split a register is cut only when it is read, and siblings that meet again take over
what neither of them changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from ..interpreter.chunk import Chunk

WARP = 32
Array = npt.NDArray[Any]
Index = npt.NDArray[np.int64]


class WarpFrame:
    """The lanes of a set laid out as [warps, 32], for operations across the lanes of a warp."""

    def __init__(self, lanes: LaneSet) -> None:
        index = lanes.index
        count = lanes.count
        self.is_whole = bool(
            count % WARP == 0
            and count
            and not (index[::WARP] % WARP).any()
            and (index[WARP - 1 :: WARP] - index[::WARP] == WARP - 1).all()
        )
        self.present: npt.NDArray[np.bool_] | None = None
        self.position: Index | None = None
        if self.is_whole:
            self.rows = count // WARP
            return
        warps, row = np.unique(index // WARP, return_inverse=True)
        self.rows = warps.size
        self.position = (row.reshape(-1) * WARP + index % WARP).astype(np.int64)
        self.present = np.zeros((self.rows, WARP), np.bool_)
        self.present.reshape(-1)[self.position] = True

    def spread(self, values: Array) -> Array:
        """(lanes,) or (1,) -> (warps, 32); absent lanes hold zero."""
        if values.shape[0] == 1:
            return np.broadcast_to(values, (self.rows, WARP))
        if self.position is None:
            return values.reshape(self.rows, WARP)
        out = np.zeros(self.rows * WARP, values.dtype)
        out[self.position] = values
        return out.reshape(self.rows, WARP)

    def collect(self, table: Array) -> Array:
        """(warps, 32) -> (lanes,)."""
        flat = table.reshape(-1)
        return flat if self.position is None else flat.take(self.position)

    @cached_property
    def present_bits(self) -> npt.NDArray[np.uint32]:
        """Present lanes of each warp as a bit mask, shape (warps,)."""
        if self.present is None:
            return np.full(self.rows, 0xFFFFFFFF, np.uint32)
        return pack_lanes(self.present)


_LANE_BITS = (np.uint64(1) << np.arange(WARP, dtype=np.uint64)).astype(np.uint32)


def pack_lanes(flags: Array) -> npt.NDArray[np.uint32]:
    """(warps, 32) bool -> (warps,) bit masks."""
    return np.packbits(np.ascontiguousarray(flags), axis=1, bitorder="little").view("<u4").reshape(-1)


def unpack_lanes(masks: Array) -> npt.NDArray[np.bool_]:
    """(warps, ...) bit masks -> (warps, ..., 32) bool."""
    return np.asarray((masks[..., None] & _LANE_BITS) != 0, np.bool_)


class LaneSet:
    """Lanes of one chunk, ascending; what instructions ask about threads is computed on first use."""

    def __init__(self, chunk: Chunk, index: Index) -> None:
        self.chunk = chunk
        self.index = index
        self.count = index.size

    def subset(self, position: Index) -> LaneSet:
        """The lanes at these positions of the set."""
        return LaneSet(self.chunk, self.index.take(position))

    @cached_property
    def frame(self) -> WarpFrame:
        """Warp layout."""
        return WarpFrame(self)

    @cached_property
    def block_slot(self) -> Index:
        """Block number inside the chunk."""
        return self.index // self.chunk.lanes_per_block

    @cached_property
    def thread(self) -> Index:
        """Linear thread number inside the block."""
        return self.index % self.chunk.lanes_per_block

    @cached_property
    def linear_block(self) -> Index:
        """Linear block number in the grid; (1,) if the chunk is one block."""
        ids = self.chunk.block_ids
        return ids if ids.size == 1 else ids.take(self.block_slot)

    @cached_property
    def shared_base(self) -> Index:
        """Where the lane's block begins in the chunk's shared memory; (1,) if the chunk is one block."""
        if self.chunk.block_count == 1:
            return np.zeros(1, np.int64)
        return self.block_slot * self.chunk.shared_stride

    @cached_property
    def warps(self) -> Index:
        """Numbers in the chunk of the warps that have lanes here, ascending."""
        numbers = self.index // WARP
        return numbers[np.flatnonzero(np.diff(numbers, prepend=-1))]

    @cached_property
    def warp_tag(self) -> npt.NDArray[np.uint8]:
        """Warp number in the block plus one."""
        return (self.thread // WARP + 1).astype(np.uint8)

    @cached_property
    def tid(self) -> tuple[Array, Array, Array]:
        """%tid.x, .y, .z as uint32."""
        x, y, _ = self.chunk.block_dim
        thread = self.thread
        if y == 1 and self.chunk.block_dim[2] == 1:
            zero = np.zeros(1, np.uint32)
            return thread.astype(np.uint32), zero, zero
        return (
            (thread % x).astype(np.uint32),
            (thread // x % y).astype(np.uint32),
            (thread // (x * y)).astype(np.uint32),
        )

    @cached_property
    def ctaid(self) -> tuple[Array, Array, Array]:
        """%ctaid.x, .y, .z as uint32."""
        x, y, z = self.chunk.grid_dim
        block = self.linear_block
        zero = np.zeros(1, np.uint32)
        return (
            (block % x).astype(np.uint32) if x > 1 else zero,
            (block // x % y).astype(np.uint32) if y > 1 else zero,
            (block // (x * y)).astype(np.uint32) if z > 1 else zero,
        )

    @cached_property
    def laneid(self) -> Array:
        """%laneid as uint32."""
        return (self.index % WARP).astype(np.uint32)

    @cached_property
    def warpid(self) -> Array:
        """%warpid as uint32."""
        return (self.thread // WARP).astype(np.uint32)

    def sub(self, guard: Array, negated: bool) -> Masked | None:
        """The lanes where a guard holds; None if there are none."""
        if guard.shape[0] == 1:
            return Masked(self, None) if bool(guard[0]) != negated else None
        position = np.flatnonzero(~guard if negated else guard)
        if position.size == 0:
            return None
        if position.size == self.count:
            return Masked(self, None)
        return Masked(self.subset(position), position)


class Masked:
    """The lanes of a predicated instruction: cuts its operands and merges its results."""

    __slots__ = ("lanes", "position")

    def __init__(self, lanes: LaneSet, position: Index | None) -> None:
        self.lanes = lanes
        self.position = position

    def cut(self, values: Array) -> Array:
        """Operand values of the active lanes."""
        if self.position is None or values.shape[0] == 1:
            return values
        return values.take(self.position)

    def merge(self, new: Array, old: Array, count: int) -> Array:
        """``old`` with the active lanes' results put in."""
        if self.position is None:
            return new
        out = np.empty(count, old.dtype)
        out[:] = old
        out[self.position] = new
        return out


class Split:
    """A group that was divided: what it held, for the parts to draw from."""

    __slots__ = ("dirty", "lanes", "parent", "position", "registers")

    def __init__(self, group: Group) -> None:
        self.lanes = group.lanes
        self.registers = group.registers
        self.parent = group.parent
        self.position = group.position
        self.dirty = group.dirty

    def value(self, register: int) -> Array:
        """A register of the undivided group."""
        found: Array | None = self.registers[register]
        if found is None:
            if self.parent is None or self.position is None:
                raise AssertionError("a register was never set")  # every register starts as a uniform zero
            found = self.parent.value(register)
            if found.shape[0] != 1:
                found = found.take(self.position)
            self.registers[register] = found
        return found


class Group:
    """Lanes at one point of the program with their registers (None: still to be drawn from the parent)."""

    __slots__ = ("dirty", "lanes", "parent", "position", "registers")

    def __init__(
        self, lanes: LaneSet, registers: list[Array | None], parent: Split | None = None, position: Index | None = None
    ) -> None:
        self.lanes = lanes
        self.registers = registers
        self.parent = parent
        self.position = position
        self.dirty = 0

    def pull(self, register: int) -> Array:
        """A register that was not read since the split."""
        found: Array | None = self.registers[register]
        if found is None:
            if self.parent is None or self.position is None:
                raise AssertionError("a register was never set")  # every register starts as a uniform zero
            found = self.parent.value(register)
            if found.shape[0] != 1:
                found = found.take(self.position)
            self.registers[register] = found
        return found

    def split(self, positions: Sequence[Index]) -> list[Group]:
        """Divide into groups by positions inside this one (ascending, disjoint, together everything)."""
        node = Split(self)
        total = len(self.registers)
        return [Group(self.lanes.subset(position), [None] * total, node, position) for position in positions]


def merge_groups(groups: list[Group], live: Sequence[int], full: LaneSet) -> Group:
    """One group of all lanes, keeping the ``live`` registers. ``full`` is the set of all lanes of the chunk."""
    while len(groups) > 1:
        families: dict[int, list[Group]] = {}
        for group in groups:
            if group.parent is not None:
                families.setdefault(id(group.parent), []).append(group)
        for family in families.values():
            node = family[0].parent
            if node is not None and len(family) > 1 and sum(part.lanes.count for part in family) == node.lanes.count:
                groups = [group for group in groups if group.parent is not node]
                groups.append(_reunite(family, node, live))
                break
        else:
            return _gather(groups, live, full)
    return groups[0]


def _reunite(family: list[Group], node: Split, live: Sequence[int]) -> Group:
    whole = Group(node.lanes, list(node.registers), node.parent, node.position)
    dirty = 0
    for part in family:
        dirty |= part.dirty
    whole.dirty = node.dirty | dirty
    count = node.lanes.count
    for register in live:
        if not dirty >> register & 1:
            continue
        values = [part.pull(register) for part in family]
        whole.registers[register] = _join(values, [part.position for part in family], count)
    return whole


def _same_uniform(values: list[Array]) -> bool:
    first = values[0]
    if first.shape[0] != 1:
        return False
    return all(value is first or (value.shape[0] == 1 and value[0] == first[0]) for value in values[1:])


def _join(values: list[Array], positions: list[Index | None], count: int) -> Array:
    if _same_uniform(values):
        return values[0]
    out = np.empty(count, values[0].dtype)
    for value, position in zip(values, positions, strict=True):
        out[position] = value
    return out


def _gather(groups: list[Group], live: Sequence[int], full: LaneSet) -> Group:
    index = np.concatenate([group.lanes.index for group in groups])
    order = np.argsort(index, kind="stable")
    index = index.take(order)
    lanes = full if index.size == full.count else LaneSet(full.chunk, index)
    place = np.empty(order.size, np.int64)
    place[order] = np.arange(order.size)
    positions: list[Index | None] = []
    start = 0
    for group in groups:
        positions.append(place[start : start + group.lanes.count])
        start += group.lanes.count
    registers: list[Array | None] = [None] * len(groups[0].registers)
    for register in live:
        values = [group.pull(register) for group in groups]
        registers[register] = _join(values, positions, index.size)
    return Group(lanes, registers)
