"""Bytes that nobody wrote, judged by their effect.

A launch that reads any is run four times, and finds other bytes there each time: all ones first, which floats read as
NaN; then what is positive; then zeros; then what is negative. If all runs end alike (what they stored, the addresses of
all accesses since, what was found), nothing depends on those bytes; other instructions may have run, as for a row that
is not stored. A byte may differ that was only copied: read as a part of an access of which other bytes were written, as
the padding of a struct is, and stored as it was. It counts as unwritten then, and may not be in an output that has to
be written as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..ptx.sites import Site
from ..state.memory import DeviceMemory
from ..state.store_log import Ranges, clip_ranges
from ..state.undo import PAGE_BYTES, Changes

Units = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Fill:
    """What an access finds where nobody wrote: in ``part`` of its bytes, or in the ``whole`` of it."""

    part: int
    whole: int


FILLS = (Fill(0xFF, 0xFF), Fill(0x5A, 0x40), Fill(0, 0), Fill(0xC3, 0xC0))
"""Of each run. A copied byte is all ones in the first, 0x5A in the second and so on, and no computed one is likely to
be."""


def fill(data: npt.NDArray[np.uint8], unwritten: npt.NDArray[np.bool_], units: Units, site: Site, found: Fill) -> None:
    """Put what is found into the ``unwritten`` [units, size] bytes of ``units`` of ``data``.

    A compiler copies padding byte by byte, or as vectors of bytes: where an instruction's elements are bytes, all are
    parts.
    """
    size = unwritten.shape[1]
    whole = np.asarray(unwritten.all(1), np.bool_)
    if site.opcode.endswith("8"):
        whole = np.zeros_like(whole)
    view = data.reshape(-1, size) if data.size % size == 0 else data[: data.size // size * size].reshape(-1, size)
    rows, columns = np.nonzero(unwritten)
    view[units[rows], columns] = np.where(whole[rows], found.whole, found.part).astype(np.uint8)


def differing(
    memory: DeviceMemory, first: Changes, second: Changes, ranges: Ranges, whole: list[tuple[int, int]], fill: int = 1
) -> tuple[bool, Units]:
    """(whether two runs stored different bytes, arena offsets of bytes that were only copied).

    Memory is as before both; the changes hold what each made of it. ``whole``: byte ranges that have to be written;
    ``fill``: the number of what the second of them found, where the first found ``FILLS[0]``.
    """
    made = [dict(zip(each.pages.tolist(), each.contents, strict=True)) for each in (first, second)]
    copied: list[Units] = []
    for number in sorted({*made[0], *made[1]}):
        begin = number * PAGE_BYTES
        before = memory.data.of[0][begin : begin + PAGE_BYTES]
        one, other = (each[number][0] if number in each else before for each in made)
        is_stored = np.zeros(PAGE_BYTES, np.bool_)
        for low, high in (clip_ranges(ranges, begin, begin + PAGE_BYTES) - begin).tolist():
            is_stored[low:high] = True
        wrong = (one != other) & is_stored
        is_copy = wrong & (one == FILLS[0].part) & (other == FILLS[fill].part)
        for low, high in whole:
            is_copy[max(low - begin, 0) : max(high - begin, 0)] = False
        if (wrong & ~is_copy).any():
            return True, np.zeros(0, np.int64)
        copied.append(np.flatnonzero(is_copy) + begin)
    return False, np.concatenate(copied) if copied else np.zeros(0, np.int64)


def state_bytes(state: npt.NDArray[Any], shift: int) -> npt.NDArray[np.uint8]:
    """State units as bytes [units, 1 << shift]."""
    return np.ascontiguousarray(state).view(np.uint8).reshape(-1, 1 << shift)
