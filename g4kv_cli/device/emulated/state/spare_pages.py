"""Pages of freed device memory under new memory that is written as a whole at once.

Addresses are never used again, so without this each allocation gets pages that the system has cleared and counts anew:
a sixth of what a run of many small cases takes. Linux moves pages from one address to another (mremap); elsewhere, and
where it refuses, nothing is moved.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import sys
from collections.abc import Callable
from functools import cache

SMALLEST_BYTES = 1 << 17
"""A move costs about as much as a few new pages."""
MOST_BYTES = 64 << 20
"""Kept in all; what is freed beyond goes back to the system."""
MOST_MOVES = 8192
"""Each may split mappings in two more, of which a process may have 65,530."""
_MAYMOVE, _FIXED, _DONTUNMAP = 1, 2, 4
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_FAILED = ctypes.c_void_p(-1).value

Piece = tuple[int, int]
"""Offset in the region and bytes, in whole pages of one mapping."""


class SparePages:
    """Those of one private anonymous region that begins at ``base``, by offsets into it."""

    def __init__(self, base: int) -> None:
        self._base = base
        self._spare: list[Piece] = []
        self._spare_bytes = 0
        self._pieces: dict[int, list[Piece]] = {}
        """What the pages of a range are made of, by where its pages begin; others are in one piece."""
        self._moves_left = MOST_MOVES if sys.platform == "linux" else 0

    def stop(self) -> None:
        """Move nothing any more: ranges may lie over several mappings from now on."""
        self._moves_left = 0

    def keep(self, offset: int, nbytes: int) -> bool:
        """Take the pages of a freed range, all of which was written; False if they should go back to the system."""
        begin, length = _pages(offset, nbytes)
        pieces = self._pieces.pop(begin, [(begin, length)])
        if not self._moves_left or length < SMALLEST_BYTES or self._spare_bytes + length > MOST_BYTES:
            return False
        self._spare += pieces
        self._spare_bytes += length
        return True

    def bring(self, offset: int, nbytes: int) -> None:
        """Put pages under a range, every byte of which is written next."""
        begin, left = _pages(offset, nbytes)
        if not self._spare or left < SMALLEST_BYTES or begin in self._pieces:
            return
        pieces: list[Piece] = []
        at = begin
        while left and self._spare and self._moves_left:
            source, length = self._spare.pop()
            taken = min(length, left)
            if taken < length:
                self._spare.append((source + taken, length - taken))
            self._spare_bytes -= taken
            if not self._move(source, at, taken):
                self.stop()
                return
            self._moves_left -= 1
            pieces.append((at, taken))
            at, left = at + taken, left - taken
        if left:
            pieces.append((at, left))
        self._pieces[begin] = pieces

    def _move(self, source: int, target: int, nbytes: int) -> bool:
        """Whether pages could be moved. Their old place stays mapped, without pages."""
        mremap, mmap_at = _library()
        base = self._base
        for _ in range(2):
            moved = mremap(base + source, nbytes, nbytes, _MAYMOVE | _FIXED | _DONTUNMAP, base + target)
            if moved != _FAILED:
                return True
            if ctypes.get_errno() != errno.ENOMEM:
                break
            gc.collect()  # memories that nobody has any more may hold all mappings that a process may have
        # The system may have taken away what was mapped there.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
        if mmap_at(base + target, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == _FAILED:
            raise MemoryError("the system has no memory for the emulated device")
        return False


def _pages(offset: int, nbytes: int) -> Piece:
    """The whole pages of a range."""
    begin = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
    return begin, max(0, (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - begin)


@cache
def _library() -> tuple[Callable[..., int | None], Callable[..., int | None]]:
    """mremap(2) and mmap(2)."""
    c = ctypes.CDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    c.mremap.argtypes, c.mremap.restype = [address, size, size, number, address], address
    c.mmap.argtypes, c.mmap.restype = [address, size, number, number, number, ctypes.c_long], address
    return c.mremap, c.mmap
