"""Loops that wait for other threads: who has gone round once without finding memory changed gives way to the others.

A turn of such a loop in which nothing has changed memory can only be repeated. Its lanes sleep until something has, or
until nobody else can run: then all go round again, for they may count their turns. If a turn leaves every register as
it was, too, nothing will ever change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..ptx.sites import Site
from ..state.groups import Group
from ..state.lanes import ChunkState


@dataclass
class _Waiting:
    """A group before the first block of the loop; ``repeats``: its last two turns ended alike."""

    block: int
    group: Group
    changes: int
    repeats: bool


class Spins:
    """The lanes of a chunk that wait in loops."""

    def __init__(self, chunk: ChunkState) -> None:
        self.chunk = chunk
        self.waiting: list[_Waiting] = []
        self._last: dict[tuple[int, bytes], tuple[int, list[Any]]] = {}

    def takes(self, block: int, group: Group) -> bool:
        """A group is about to begin another turn: True if it sleeps instead."""
        run = self.chunk.run
        if group.turn != (block, run.changes):
            group.turn = (block, run.changes)
            return False
        group.turn = None
        values = [group.pull(register) for register in run.kernel.blocks[block].live_in]
        key = block, group.lanes.index.tobytes()
        changes, before = self._last.get(key, (-1, []))
        repeats = changes == run.changes and all(
            bool((new == old).all()) for new, old in zip(values, before, strict=True)
        )
        self._last[key] = run.changes, values
        self.waiting.append(_Waiting(block, group, run.changes, repeats))
        return True

    def wake(self) -> bool:
        """Let go on who has not seen the latest change of memory; False if there is none."""
        return self._wake([each.changes < self.chunk.run.changes for each in self.waiting])

    def again(self) -> bool:
        """Let go on whose turns do not repeat; False if there is none."""
        return self._wake([not each.repeats for each in self.waiting])

    def _wake(self, goes: list[bool]) -> bool:
        waiting, self.waiting = self.waiting, []
        for each, is_going in zip(waiting, goes, strict=True):
            if is_going:
                self.chunk.wait_at(each.block, each.group)
            else:
                self.waiting.append(each)
        return any(goes)

    def places(self) -> list[tuple[Site, Any]]:
        """(site, lanes) of all that waits in loops."""
        blocks = self.chunk.run.kernel.blocks
        return [(blocks[each.block].waits, each.group.lanes) for each in self.waiting]
