"""Groups of lanes at one instruction with their registers, and how they split and merge.

A register is one array over the lanes of the group; an array of one element is a uniform value. After a split a
register is cut only when it is read, and siblings that meet again take over what neither of them changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .lanes import LaneSet

Array = npt.NDArray[Any]
Index = npt.NDArray[np.int64]


class _Registers:
    """Lanes with their registers (None: still to be drawn from the parent)."""

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
            found = self.parent.pull(register)
            if found.shape[0] != 1:
                found = found.take(self.position)
            self.registers[register] = found
        return found


class Split(_Registers):
    """A group that was divided: what it held, for the parts to draw from."""

    __slots__ = ()


class Group(_Registers):
    """Lanes at one point of the program."""

    __slots__ = ()

    def split(self, positions: Sequence[Index]) -> list[Group]:
        """Divide into groups by positions inside this one (ascending, disjoint, together everything)."""
        node = Split(self.lanes, self.registers, self.parent, self.position)
        node.dirty = self.dirty
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
