"""Loops that wait for other threads: who has gone round once without finding memory changed gives way to the others.

A turn of such a loop in which nothing has changed memory can only be repeated. Its lanes sleep until something has, or
until nobody else can run: then all go round again, for they may count their turns. If a turn leaves every register as
it was, for all waiting lanes of a warp, nothing will ever change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..ptx.sites import Site
from ..state.groups import Group
from ..state.lanes import WARP, ChunkState


@dataclass
class _Waiting:
    """A group before the first block of the loop; ``repeats``: of which lanes the last two turns ended alike."""

    block: int
    group: Group
    changes: int
    repeats: npt.NDArray[np.bool_]


@dataclass(eq=False)
class _Loop:
    """What lanes of a chunk were seen with when they last fell asleep before a loop: the state of memory, and the
    values of the registers that live there."""

    changes: npt.NDArray[np.int64]
    values: list[npt.NDArray[Any]]


class Spins:
    """The lanes of a chunk that wait in loops."""

    def __init__(self, chunk: ChunkState) -> None:
        self.chunk = chunk
        self.waiting: list[_Waiting] = []
        self._turn = np.full((2, chunk.lane_count), -1, np.int64)
        """For each lane the loop that it goes round, and the state of memory at the begin of its turn."""
        self._loops: dict[int, _Loop] = {}

    def takes(self, block: int, group: Group) -> bool:
        """A group is about to begin another turn: True if its lanes sleep, or wait in the queue, instead."""
        run, index = self.chunk.run, group.lanes.index
        begins = (self._turn[0, index] != block) | (self._turn[1, index] != run.changes)
        if begins.all():
            self._turn[0, index], self._turn[1, index] = block, run.changes
            return False
        if begins.any():
            group, rest = group.split((np.flatnonzero(~begins), np.flatnonzero(begins)))
            self._turn[0, rest.lanes.index], self._turn[1, rest.lanes.index] = block, run.changes
            self.chunk.wait_at(block, rest)
        self._sleep(block, group)
        return True

    def _sleep(self, block: int, group: Group) -> None:
        run, index = self.chunk.run, group.lanes.index
        self._turn[0, index] = -1
        values = [group.pull(register) for register in run.kernel.blocks[block].live_in]
        loop = self._loops.get(block)
        if loop is None:
            count = self.chunk.lane_count
            loop = _Loop(np.full(count, -1, np.int64), [np.zeros(count, value.dtype) for value in values])
            self._loops[block] = loop
        repeats = loop.changes[index] == run.changes
        for new, old in zip(values, loop.values, strict=True):
            repeats &= old[index] == new
        loop.changes[index] = run.changes
        for new, old in zip(values, loop.values, strict=True):
            old[index] = new
        self.waiting.append(_Waiting(block, group, run.changes, repeats))

    def wake(self) -> bool:
        """Let go on who has not seen the latest change of memory; False if there is none."""
        goes = [np.full(each.group.lanes.count, each.changes < self.chunk.run.changes) for each in self.waiting]
        return self._wake(goes)

    def again(self) -> bool:
        """Let those warps go on of which any lane's turns do not repeat; False if there is none."""
        moves = np.zeros(self.chunk.lane_count // WARP, np.bool_)
        for each in self.waiting:
            moves[each.group.lanes.index[~each.repeats] // WARP] = True
        return self._wake([moves[each.group.lanes.index // WARP] for each in self.waiting])

    def _wake(self, goes: list[npt.NDArray[np.bool_]]) -> bool:
        waiting, self.waiting = self.waiting, []
        for each, going in zip(waiting, goes, strict=True):
            if going.all():
                self.chunk.wait_at(each.block, each.group)
                continue
            if not going.any():
                self.waiting.append(each)
                continue
            group, rest = each.group.split((np.flatnonzero(going), np.flatnonzero(~going)))
            self.chunk.wait_at(each.block, group)
            self.waiting.append(_Waiting(each.block, rest, each.changes, each.repeats[~going]))
        return any(going.any() for going in goes)

    def places(self) -> list[tuple[Site, Any]]:
        """(site, lanes) of all that waits in loops."""
        blocks = self.chunk.run.kernel.blocks
        return [(blocks[each.block].waits, each.group.lanes) for each in self.waiting]
