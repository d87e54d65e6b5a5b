"""Emulated device memory: one large virtual arena, its allocations, and one state byte per byte.

Only touched pages cost memory, so an allocation may be far larger than the machine. Address lookup is a bisection over
the allocations; the state byte says whether a byte was ever initialised.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ..faults import EmulatorError, FreedMemory
from .spare_pages import SparePages

GLOBAL_BASE = 0x7F00_0000_0000
SHARED_WINDOW = 0x7E00_0000_0000
LOCAL_WINDOW = 0x7D00_0000_0000
PARAMETER_WINDOW = 0x7C00_0000_0000
RANK_SHIFT = 24
"""Where an address of shared memory carries one more than the rank of the block that it was made for, if it was."""
"""Generic addresses at or above a window (and below the next) belong to that state space."""

LOCAL_SHIFT = 20
"""Where a generic address of local memory carries the number of the thread whose it is; beyond this many threads it
begins again. Hardware has one address for all threads' local memory, of which each sees its own."""

ALIGNMENT_BYTES = 256
NULL_BYTES = 1 << 16
"""Addresses below come from a null pointer and an index."""
GUARD_BYTES = 256
_RESERVE_BYTES = 1 << 40
_SMALLEST_RESERVE_BYTES = 1 << 26
_MAP_NORESERVE = 0x4000
_INITIALISED = 1

Bytes = npt.NDArray[np.uint8]


class Allocation:
    """One block of device memory, [begin, end) in device addresses."""

    __slots__ = ("begin", "end", "fully_initialised", "is_freed", "label")

    def __init__(self, begin: int, nbytes: int, label: str) -> None:
        self.begin = begin
        self.end = begin + nbytes
        self.label = label
        self.is_freed = False
        self.fully_initialised = nbytes == 0

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.end - self.begin


RANGE = np.dtype([("begin", np.uint64), ("end", np.uint64), ("state", np.int64)])
"""[begin, end) of an allocation and what is known of all its bytes."""
RANGE_FREED, RANGE_PARTLY, RANGE_WHOLE = -1, 0, 1

NO_ALLOCATION = Allocation(1 << 63, 0, "")
"""Contains no address; the first guess of an access that has not run yet."""


def _reserve(nbytes: int) -> mmap.mmap:
    if hasattr(mmap, "MAP_PRIVATE"):
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", _MAP_NORESERVE)
        return mmap.mmap(-1, nbytes, flags=flags)
    return mmap.mmap(-1, nbytes)


class Views:
    """One byte buffer seen as units of 1 << k bytes; ``of[4]`` is complex128 only because it moves 16 bytes at once."""

    __slots__ = ("of",)

    def __init__(self, data: Bytes) -> None:
        self.of: tuple[npt.NDArray[Any], ...] = (
            data,
            data.view(np.uint16),
            data.view(np.uint32),
            data.view(np.uint64),
            data.view(np.complex128),
        )


class DeviceMemory:
    """The arena. All addresses are device addresses (Python int, or uint64 arrays)."""

    def __init__(self) -> None:
        size, has_collected = _RESERVE_BYTES, False
        while True:
            try:
                self._data_map = _reserve(size)
                self._state_map = _reserve(size)
                break
            except (OSError, ValueError, OverflowError):
                if not has_collected:  # memories that nobody has any more may hold all of the address space
                    has_collected = gc.collect() >= 0
                    continue
                size //= 2
                if size < _SMALLEST_RESERVE_BYTES:
                    raise EmulatorError("cannot reserve address space for device memory; free some memory") from None
        self.capacity_bytes = size
        self.data = Views(np.frombuffer(self._data_map, np.uint8))
        self.state = Views(np.frombuffer(self._state_map, np.uint8))
        self.allocations: list[Allocation] = []
        self._begins: list[int] = []
        self._next = ALIGNMENT_BYTES
        self._spare_pages = SparePages(self.data.of[0].ctypes.data)
        self._ranges = np.zeros(64, RANGE)

    @property
    def used_bytes(self) -> int:
        """Bytes of the arena from its start that allocations have taken."""
        return self._next

    def allocate(self, nbytes: int, label: str, sparse: bool = False) -> Allocation:
        """A new 256-byte aligned block with a guard gap behind it; contents uninitialised."""
        if nbytes < 0:
            raise EmulatorError(f"allocation '{label}' has a negative size of {nbytes} bytes")
        end = self._next + nbytes
        if end + GUARD_BYTES > self.capacity_bytes:
            raise EmulatorError(
                f"allocation '{label}' of {nbytes} bytes does not fit the {self.capacity_bytes}-byte device memory"
            )
        allocation = Allocation(GLOBAL_BASE + self._next, nbytes, label)
        if sparse:
            self._advise("MADV_NOHUGEPAGE", self._next, nbytes)
        self._next = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES + GUARD_BYTES
        self.allocations.append(allocation)
        self._begins.append(allocation.begin)
        number = len(self._begins)
        if number == self._ranges.size:
            self._ranges = np.concatenate((self._ranges, np.zeros(number, RANGE)))
        state = RANGE_WHOLE if allocation.fully_initialised else RANGE_PARTLY
        self._ranges[number] = allocation.begin, allocation.end, state
        return allocation

    def _set_state(self, allocation: Allocation, state: int) -> None:
        self._ranges["state"][bisect_right(self._begins, allocation.begin)] = state

    def _advise(self, name: str, offset: int, nbytes: int) -> None:
        advice = getattr(mmap, name, None)
        begin = -(-offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (offset + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - begin
        if advice is None or length <= 0:
            return
        for region in (self._data_map, self._state_map):
            with contextlib.suppress(OSError):  # only advice: a kernel without it works as well
                region.madvise(advice, begin, length)

    def find(self, address: int) -> Allocation | None:
        """The allocation (freed ones included) that begins last at or below the address."""
        index = bisect_right(self._begins, address) - 1
        return self.allocations[index] if index >= 0 else None

    def block(self, address: int) -> Allocation:
        """The live allocation that begins at the address."""
        allocation = self.find(address)
        if allocation is None or allocation.begin != address:
            raise EmulatorError(f"no allocation begins at address {address:#x}")
        if allocation.is_freed:
            raise EmulatorError(f"allocation '{allocation.label}' at {address:#x} was freed already")
        return allocation

    def span(self, address: int, nbytes: int) -> tuple[Allocation, int]:
        """(allocation, arena offset) of a host access; raises EmulatorError if it leaves the allocation."""
        allocation = self.find(address)
        if allocation is None or address + nbytes > allocation.end or nbytes < 0:
            raise EmulatorError(f"host access of {nbytes} bytes at {address:#x} leaves every allocation")
        if allocation.is_freed:
            raise FreedMemory(f"host access to '{allocation.label}', which was freed")
        return allocation, address - GLOBAL_BASE

    def free(self, address: int) -> None:
        """Give the pages back; the addresses are never used again, so that a late access is seen."""
        allocation = self.block(address)
        allocation.is_freed = True
        self._set_state(allocation, RANGE_FREED)
        offset = address - GLOBAL_BASE
        if not (allocation.fully_initialised and self._spare_pages.keep(offset, allocation.nbytes)):
            self._advise("MADV_DONTNEED", offset, allocation.nbytes)

    def end(self, address: int) -> None:
        """Free an allocation whose bytes may be asked for again (``revive``)."""
        allocation = self.block(address)
        allocation.is_freed = True
        self._set_state(allocation, RANGE_FREED)

    def revive(self, address: int) -> None:
        """Take ``end`` back."""
        allocation = self.allocations[bisect_right(self._begins, address) - 1]
        allocation.is_freed = False
        self._set_state(allocation, RANGE_WHOLE if allocation.fully_initialised else RANGE_PARTLY)

    def forget(self, address: int) -> None:
        """Take back all allocations from an address on; what was stored there has been undone."""
        number = bisect_right(self._begins, address - 1)
        if number < len(self._begins):
            self._next = self._begins[number] - GLOBAL_BASE
            self._spare_pages.stop()
            del self._begins[number:], self.allocations[number:]

    @contextlib.contextmanager
    def written_by_host(self, address: int, nbytes: int) -> Iterator[Bytes]:
        """Bytes that the host writes meanwhile, every one; they are marked initialised then."""
        allocation, offset = self.span(address, nbytes)
        self._bring_pages(allocation, offset, nbytes)
        yield self.data.of[0][offset : offset + nbytes]
        self._mark(allocation, offset, nbytes)

    def write(self, address: int, values: Bytes) -> None:
        """Copy host bytes in and mark them initialised."""
        allocation, offset = self.span(address, values.size)
        self._bring_pages(allocation, offset, values.size)
        self.data.of[0][offset : offset + values.size] = values
        self._mark(allocation, offset, values.size)

    def fill(self, address: int, nbytes: int, byte: int) -> None:
        """Set bytes to one value and mark them initialised."""
        allocation, offset = self.span(address, nbytes)
        self._bring_pages(allocation, offset, nbytes)
        self.data.of[0][offset : offset + nbytes] = byte
        self._mark(allocation, offset, nbytes)

    def _bring_pages(self, allocation: Allocation, offset: int, nbytes: int) -> None:
        """Pages that others were freed of, for an allocation that is written as a whole, the first time."""
        if nbytes == allocation.nbytes and not allocation.fully_initialised:
            self._spare_pages.bring(offset, nbytes)

    def _mark(self, allocation: Allocation, offset: int, nbytes: int) -> None:
        if nbytes == allocation.nbytes:
            self.mark_whole(allocation)
        elif not allocation.fully_initialised:
            self.state.of[0][offset : offset + nbytes] = _INITIALISED

    def mark_whole(self, allocation: Allocation) -> None:
        """Every byte of the allocation was written; reads of it need no look at its state bytes any more."""
        if not allocation.fully_initialised:
            allocation.fully_initialised = True
            self._set_state(allocation, RANGE_WHOLE)

    def read(self, address: int, nbytes: int) -> Bytes:
        """A copy of device bytes."""
        return np.array(self.inspect(address, nbytes))

    def inspect(self, address: int, nbytes: int) -> Bytes:
        """Device bytes themselves, read-only."""
        _, offset = self.span(address, nbytes)
        found = self.data.of[0][offset : offset + nbytes]
        found.flags.writeable = False
        return found

    def initialised(self, address: int, nbytes: int) -> npt.NDArray[np.bool_]:
        """Which bytes were ever written by host or kernel."""
        allocation, offset = self.span(address, nbytes)
        if allocation.fully_initialised:
            return np.ones(nbytes, np.bool_)
        return np.asarray(self.state.of[0][offset : offset + nbytes] != 0, np.bool_)

    @property
    def ranges(self) -> npt.NDArray[Any]:
        """All allocations in the order of their addresses, as RANGE, with an empty one in front."""
        return self._ranges[: len(self._begins) + 1]

    def classify(self, addresses: npt.NDArray[np.uint64], nbytes: int) -> npt.NDArray[np.int8]:
        """For each access of ``nbytes`` bytes: 0 outside every allocation, 1 in freed memory, 2 good, 3 good and in
        an allocation that is initialised as a whole."""
        index = np.searchsorted(self.ranges["begin"], addresses, "right") - 1
        found = self._ranges[index]
        last = addresses + np.uint64(nbytes)
        inside = (last <= found["end"]) & (last > addresses)
        kind = found["state"] + 2
        return np.where(inside, kind, 0).astype(np.int8)

    def describe(self, address: int) -> tuple[str | None, int | None, str]:
        """(label, offset in the allocation, words) for a message about an address, valid or not."""
        allocation = self.find(address)
        if allocation is None or address > allocation.end + (1 << 32):
            null = ": a null pointer" if address < NULL_BYTES else ""
            return None, None, f"address {address:#x}, near no allocation{null}"
        offset = address - allocation.begin
        if offset < allocation.nbytes:
            return allocation.label, offset, f"'{allocation.label}' + {offset}"
        past = address - allocation.end
        words = f"{past} bytes past the end of '{allocation.label}' ({allocation.nbytes} bytes)"
        return allocation.label, offset, words
