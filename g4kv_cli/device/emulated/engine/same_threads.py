"""Allocations that a launch reads and stores to, judged by who does: where each thread reads nothing that another
stores, as in a kernel that works in place, no order is asked for."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Units = npt.NDArray[np.int64]
SEVERAL = -1
"""``first`` of bytes that several lanes of a warp read."""
MOST_BYTES = 1 << 26
"""Logged bytes, and bytes of memory stored to, of which the owners are worked out."""
_THREADS = 1 << 10
"""Threads of the largest block."""


def reads_of_others(reads: npt.NDArray[Any], stores: npt.NDArray[Any]) -> bool:
    """Whether a thread reads what another stores, of two logs (STORE); also if it would take too long to see."""
    if not reads.size or not stores.size:
        return False
    low, high = int(stores["begin"].min()), int((stores["begin"] + stores["bytes"]).max())
    reads = reads[(reads["begin"] < high) & (reads["begin"] + reads["bytes"] > low)]
    if not reads.size:
        return False
    total = int(reads["bytes"].sum(dtype=np.int64) + stores["bytes"].sum(dtype=np.int64))
    if max(total, high - low) > MOST_BYTES or not stores["each"].all():
        return True
    unit = int(min(reads["each"].min(), stores["each"].min()))  # accesses are aligned to their size, a power of two
    owners = np.full((high - low) // unit, -1, np.int64)
    place, thread = _units(stores, unit)
    place -= low // unit
    owners[place] = thread
    if (owners[place] != thread).any():
        return True
    place, thread = _units(reads, unit)
    inside = (place >= low // unit) & (place < high // unit)
    owner = owners[place[inside] - low // unit]
    return bool(((owner >= 0) & (owner != thread[inside])).any())


def _units(runs: npt.NDArray[Any], unit: int) -> tuple[Units, Units]:
    """(places, threads of the grid) of all units of ``unit`` bytes of a log; the thread is -2 where it is several."""
    counts = (runs["bytes"] // unit).astype(np.int64)
    row = np.repeat(np.arange(runs.size), counts)
    within = np.arange(row.size) - np.repeat(np.cumsum(counts) - counts, counts)
    first = runs["block"].astype(np.int64) * _THREADS + runs["first"]
    thread = first[row] + within * unit // runs["each"][row]
    return runs["begin"][row] // unit + within, np.where(runs["first"][row] == SEVERAL, -2, thread)
