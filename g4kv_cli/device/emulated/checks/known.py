"""What a thread knows of others: up to which moment of the launch their accesses come before what it does next.

Moments are counted by the launch (order.py). A key is a thread, a warp or a block of the grid with all its threads.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ..state.lanes import WARP

Times = npt.NDArray[np.int64]
THREAD, WARP_OF, BLOCK_OF = 0, 1, 2
_LEVEL_BITS = 2
_LEVEL_MASK = (1 << _LEVEL_BITS) - 1
_FEW = 64
"""Keys that are not worth a look for what could be said in fewer."""
_OBJECT_BYTES = 256
"""Of a map without its keys and moments: two arrays and the object."""


def key_of(level: int, number: int) -> int:
    """The key of a thread, warp or block by its number in the grid."""
    return number << _LEVEL_BITS | level


class Known:
    """An immutable map of keys to moments."""

    __slots__ = ("keys", "times")

    def __init__(self, keys: Times, times: Times) -> None:
        self.keys = keys
        self.times = times

    @property
    def nbytes(self) -> int:
        """The host memory that it takes."""
        return self.keys.nbytes + self.times.nbytes + _OBJECT_BYTES

    @classmethod
    def of(cls, pairs: Iterable[tuple[int, int]]) -> Known:
        """From (key, moment) pairs; the latest of equal keys. Moments count from 1; up to 0 nothing can be known."""
        latest: dict[int, int] = {}
        for key, time in pairs:
            if time > latest.get(key, 0):
                latest[key] = time
        if not latest:
            return NOTHING
        keys = sorted(latest)
        return cls(np.array(keys, np.int64), np.array([latest[key] for key in keys], np.int64))

    @classmethod
    def joined(cls, parts: Iterable[Known]) -> Known:
        """What any of them knows."""
        found = [part for part in parts if part.keys.size]
        if not found:
            return NOTHING
        if len(found) == 1:
            return found[0]
        return cls._latest(np.concatenate([part.keys for part in found]), np.concatenate([p.times for p in found]))

    @classmethod
    def _latest(cls, keys: Times, times: Times) -> Known:
        if not keys.size:
            return NOTHING
        order = np.argsort(keys, kind="stable")
        keys, times = keys[order], times[order]
        first = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
        return cls(keys[first], np.maximum.reduceat(times, first))

    def compact(self, threads: int) -> Known:
        """The same in fewer keys, for blocks of so many threads: what is known of each thread of a warp is known of the
        warp, and what of each warp of a block is known of the block."""
        if self.keys.size <= _FEW:
            return self
        warps = -(-threads // WARP)
        in_last_warp = threads - (warps - 1) * WARP
        found = self
        for level, each in ((THREAD, WARP), (WARP_OF, warps)):
            of_level = (found.keys & _LEVEL_MASK) == level
            if not of_level.any():
                continue
            above = (found.keys[of_level] >> _LEVEL_BITS) // each
            above, first, count = np.unique(above, return_index=True, return_counts=True)
            is_last = (above % warps == warps - 1) & (level == THREAD)
            is_whole = count == np.where(is_last, in_last_warp, each)
            times = np.minimum.reduceat(found.times[of_level], first)
            keys = above << _LEVEL_BITS | (level + 1)
            found = Known.joined((found, Known._latest(keys[is_whole], times[is_whole])))._without(
                level, level + 1, each
            )
        return found._without(THREAD, BLOCK_OF, warps * WARP)

    def _without(self, level: int, above: int, each: int) -> Known:
        """Without the keys of a level that say no more than one of the level ``above``, which has ``each`` of them."""
        over = (self.keys >> _LEVEL_BITS) // each << _LEVEL_BITS | above
        place = np.minimum(np.searchsorted(self.keys, over), self.keys.size - 1)
        is_told = ((self.keys & _LEVEL_MASK) == level) & (self.keys[place] == over) & (self.times <= self.times[place])
        return Known(self.keys[~is_told], self.times[~is_told])

    def of_threads(self, threads: Times, warps: Times, blocks: Times) -> Times:
        """For each thread (with the warp and block it is of) the latest moment known of it, -1 if none is."""
        found = np.full(threads.shape, -1, np.int64)
        if not self.keys.size:
            return found
        for level, numbers in ((THREAD, threads), (WARP_OF, warps), (BLOCK_OF, blocks)):
            wanted = numbers << _LEVEL_BITS | level
            place = np.minimum(np.searchsorted(self.keys, wanted), self.keys.size - 1)
            found = np.where(self.keys[place] == wanted, np.maximum(found, self.times[place]), found)
        return found


NOTHING = Known(np.zeros(0, np.int64), np.zeros(0, np.int64))
