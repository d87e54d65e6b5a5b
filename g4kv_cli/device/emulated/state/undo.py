"""What a launch changed in device memory, and the way back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .memory import DeviceMemory

PAGE_SHIFT = 10
PAGE_BYTES = 1 << PAGE_SHIFT
"""Bytes of the arena that are kept together before they first change."""


@dataclass(frozen=True, eq=False)
class Changes:
    """Pages of the arena that a launch changed, by number: bytes and state bytes [n, 2, PAGE_BYTES]."""

    pages: npt.NDArray[np.int64]
    contents: npt.NDArray[np.uint8]

    def exchange(self, memory: DeviceMemory) -> None:
        """Put the contents into memory and keep what was there: takes a launch back, and again repeats it."""
        for number, kept in zip(self.pages.tolist(), self.contents, strict=True):
            part = slice(number * PAGE_BYTES, (number + 1) * PAGE_BYTES)
            for array, row in ((memory.data.of[0], kept[0]), (memory.state.of[0], kept[1])):
                held = array[part].copy()
                array[part] = row
                row[:] = held


class UndoLog:
    """Keeps pages before they first change."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory
        self._is_kept = np.zeros(self._page_count, np.bool_)
        self._pages: list[int] = []
        self._contents: list[npt.NDArray[np.uint8]] = []
        self._place: dict[int, int] = {}
        """Page number -> position in both."""

    @property
    def _page_count(self) -> int:
        return (self._memory.used_bytes >> PAGE_SHIFT) + 2

    def keep(self, units: npt.NDArray[np.int64], shift: int) -> None:
        """The pages of units of 1 << shift bytes, at most 32, are about to change."""
        pages = units >> (PAGE_SHIFT - shift)
        if self._page_count > self._is_kept.size:  # the kernel has allocated
            self._is_kept = np.pad(self._is_kept, (0, 2 * self._page_count - self._is_kept.size))
        fresh = pages[~self._is_kept[pages]]
        if not fresh.size:
            return
        memory = self._memory
        for number in np.unique(fresh).tolist():
            part = slice(number * PAGE_BYTES, (number + 1) * PAGE_BYTES)
            self._place[number] = len(self._pages)
            self._pages.append(number)
            self._contents.append(np.stack([memory.data.of[0][part], memory.state.of[0][part]]))
            self._is_kept[number] = True

    def before(self, units: npt.NDArray[np.int64], shift: int) -> npt.NDArray[Any]:
        """Units of 1 << shift bytes as they were before the launch."""
        found: npt.NDArray[Any] = self._memory.data.of[shift].take(units)
        pages = units >> (PAGE_SHIFT - shift)
        for number in np.unique(pages[self._is_kept[pages]]).tolist():
            kept = np.ascontiguousarray(self._contents[self._place[number]][0]).view(found.dtype)
            here = pages == number
            found[here] = kept[units[here] & ((1 << (PAGE_SHIFT - shift)) - 1)]
        return found

    def changes(self) -> Changes:
        """All that was kept."""
        contents = np.stack(self._contents) if self._contents else np.zeros((0, 2, PAGE_BYTES), np.uint8)
        return Changes(np.array(self._pages, np.int64), contents)
