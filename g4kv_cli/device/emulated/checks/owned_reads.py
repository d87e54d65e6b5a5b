"""Reads of memory that is there, but is somebody else's.

A launch may say how a range divides into cells (pages) and which owner (request) has which. All of it is legal memory
to a kernel, so nothing else here sees a read of a released cell or of another owner's: a fault is a read of a cell that
no owner of the launch has, and, where a block serves one owner, of cells that no one owner has all of. Which owner a
block serves is not asked: the kernel decides, and what it has read so far shows which it can still be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..ptx.sites import Site
from ..state.lanes import ChunkState, LaneSet
from ..state.memory import GLOBAL_BASE, Allocation

Units = npt.NDArray[np.int64]
KIND = "foreign_read"
_MAX_OWNED_FLAGS = 1 << 26
"""Owners times owned cells up to which a block's owner is looked for."""
_MAX_NAMED_OWNERS = 3


@dataclass(frozen=True, eq=False)
class OwnedReads:
    """``nbytes`` from ``address`` on in cells of ``cell_bytes``; owner r has ``cells[indptr[r] : indptr[r + 1]]``.

    Several owners may have one cell. ``one_owner_a_block``: no block works for two. In words: ``where`` a byte (its
    offset in the range) lies, whose a cell is that no owner has (``outsider``), what a cell and an owner are called.
    """

    address: int
    nbytes: int
    cell_bytes: int
    cells: Units
    indptr: Units
    one_owner_a_block: bool
    where: Callable[[int], str]
    outsider: Callable[[int], str]
    cell_word: str
    owner_word: str
    numbers: npt.NDArray[np.int32] = field(init=False)
    """For each cell of the range its number among those that have an owner, -1 for the others."""
    owners: npt.NDArray[np.bool_] = field(init=False)
    """[owned cell, owner]; empty where it is not needed, or too large."""

    def __post_init__(self) -> None:
        owned, number = np.unique(self.cells, return_inverse=True)
        numbers = np.full(-(-self.nbytes // self.cell_bytes), -1, np.int32)
        numbers[owned] = np.arange(owned.size)
        count = self.indptr.size - 1
        is_needed = self.one_owner_a_block and count > 1 and owned.size * count <= _MAX_OWNED_FLAGS
        owners = np.zeros((owned.size, count if is_needed else 0), np.bool_)
        if is_needed:
            owners[number.reshape(-1), np.repeat(np.arange(count), np.diff(self.indptr))] = True
        object.__setattr__(self, "numbers", numbers)
        object.__setattr__(self, "owners", owners)


class BlockReads:
    """What the blocks of a chunk have read of one range."""

    def __init__(self, chunk: ChunkState, rule: OwnedReads) -> None:
        self.chunk, self.rule = chunk, rule
        self.begin = rule.address - GLOBAL_BASE
        self.owned_cells, self.owner_count = rule.owners.shape
        self.seen = np.zeros(chunk.block_count * self.owned_cells if self.owner_count else 0, np.bool_)
        self.may_be = np.ones((chunk.block_count, self.owner_count), np.bool_)

    def check(self, lanes: LaneSet, units: Units, shift: int, allocation: Allocation | None, site: Site) -> None:
        """Look at a load of units of 1 << shift bytes, (1,) or (lanes,), by these lanes."""
        rule = self.rule
        if allocation is not None and not allocation.begin <= rule.address < allocation.end:
            return
        offsets = (units << shift) - self.begin
        position: Units | None = None
        if offsets.min() < 0 or offsets.max() >= rule.nbytes:
            position = np.flatnonzero((offsets >= 0) & (offsets < rule.nbytes))
            if not position.size:
                return
            if units.size > 1:
                lanes = lanes.subset(position)
            offsets = offsets.take(position)
        numbers = rule.numbers.take(offsets // rule.cell_bytes)
        stray = np.flatnonzero(numbers < 0)
        if stray.size:
            at = int(offsets[stray[0]])
            words = f"which no {rule.owner_word} of the launch has: {rule.outsider(at // rule.cell_bytes)}"
            self._report(lanes, offsets, stray, shift, words, site)
        elif self.owner_count:
            self._check_owner(lanes, offsets, numbers, shift, site)

    def _check_owner(
        self, lanes: LaneSet, offsets: Units, numbers: npt.NDArray[np.int32], shift: int, site: Site
    ) -> None:
        keys = lanes.block_slot * self.owned_cells + numbers
        if self.seen.take(keys).all():
            return
        fresh, first = np.unique(keys, return_index=True)
        blocks, cells = np.divmod(fresh, self.owned_cells)
        np.logical_and.at(self.may_be, blocks, self.rule.owners[cells])
        torn = np.flatnonzero(~self.may_be.any(axis=1))
        if torn.size:
            here = int(np.flatnonzero(blocks == torn[0])[-1])
            words = self._torn_words(int(torn[0]), blocks, cells, here)
            self._report(lanes, offsets, np.array([first[here]]), shift, words, site)
            self.may_be[torn] = True
        self.seen[fresh] = True

    def _torn_words(self, block: int, blocks: Units, cells: Units, here: int) -> str:
        """Why no owner is left: whose the cell is, and one that the block read of another."""
        rule = self.rule
        mine = rule.owners[cells[here]]
        known = np.flatnonzero(self.seen[block * self.owned_cells : (block + 1) * self.owned_cells])
        known = np.concatenate([known, cells[blocks == block]])
        other = next((int(cell) for cell in known if not (rule.owners[cell] & mine).any()), int(known[0]))
        number = int(np.flatnonzero(rule.numbers == other)[0])
        return (
            f"which {self._names(mine)} has, by a block that reads {rule.cell_word} {number} of "
            f"{self._names(rule.owners[other])} too"
        )

    def _names(self, flags: npt.NDArray[np.bool_]) -> str:
        numbers = [str(owner) for owner in np.flatnonzero(flags)]
        more = len(numbers) - _MAX_NAMED_OWNERS
        listed = ", ".join(numbers[:_MAX_NAMED_OWNERS]) + (f" and {more} more" if more > 0 else "")
        return f"{self.rule.owner_word} {listed} of the launch"

    def _report(self, lanes: LaneSet, offsets: Units, bad: Units, shift: int, words: str, site: Site) -> None:
        position = int(bad[0])
        at = int(offsets[position if offsets.size > 1 else 0])
        run = self.chunk.run
        label, inside, _ = run.memory.describe(self.rule.address + at)
        run.collector.add(
            KIND,
            f"read of {1 << shift} bytes of {self.rule.where(at)}, {words}",
            site,
            lanes,
            position,
            lanes.count if offsets.size == 1 else bad.size,
            self.rule.address + at,
            label,
            inside,
        )
