"""Keeping freed array memory in the process."""

from __future__ import annotations

import numpy as np

_LARGEST_DYNAMIC_THRESHOLD_BYTES = 32 * 2**20


def keep_freed_memory() -> None:
    """Make the C library keep the memory of freed arrays for the next ones; call once, before a long
    interpretation.

    By default glibc returns blocks of 128 KiB and more to the system, and every new array of that size is
    paid for
    with page faults: an fma over 16,384 threads then costs 10 ns an element instead of 1.3. Freeing one large
    block raises glibc's dynamic thresholds (mallopt(3), M_MMAP_THRESHOLD) up to 32 MiB. The block is never
    touched, so it costs no memory. Elsewhere this has no effect.
    """
    block = np.empty(_LARGEST_DYNAMIC_THRESHOLD_BYTES - 2**16, np.uint8)
    del block
