"""Random bf16 data that the host knows without keeping a copy: one block, repeated over the whole arena.

Element i of the arena is ``block[i % block_elems]``. The block's length is 8 times a prime, so that no two pages, pools
or heads of usual sizes hold the same values: a kernel that reads a wrong page gives a wrong result.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from g4kv_cli.bench.ceilings import queue_copy
from g4kv_cli.entries.library import KernelLibrary

Array = npt.NDArray[Any]

BLOCK_ELEMS = 8 * 2_097_143
"""About 32 MiB of bf16; 2097143 is prime."""
SMALL_BLOCK_ELEMS = 8 * 65_521
"""For small arenas (tests on the emulated device); 65521 is prime."""
MAX_ROW_ELEMS = 512

BF16 = np.dtype(ml_dtypes.bfloat16)


class NoiseArena:
    """Device memory filled with the block, and the host's view of it."""

    def __init__(self, library: KernelLibrary, elems: int, *, seed: int) -> None:
        """``elems`` is rounded up to a multiple of 8 (16-byte accesses). DeviceUnavailable if the memory lacks."""
        self.device = library.device
        self.elems = -(-elems // 8) * 8
        self.block_elems = BLOCK_ELEMS if self.elems > BLOCK_ELEMS else SMALL_BLOCK_ELEMS
        random = np.random.Generator(np.random.PCG64([seed, self.block_elems]))
        block = random.standard_normal(self.block_elems, dtype=np.float32).astype(BF16)
        self._block = np.concatenate([block, block[:MAX_ROW_ELEMS]])
        self._rows: dict[int, Array] = {}
        self.data = self.device.allocate((self.elems,), BF16, "bench arena")
        try:
            self._fill(library, block)
        except BaseException:
            self.device.free(self.data)
            raise

    def _fill(self, library: KernelLibrary, block: Array) -> None:
        first = min(self.block_elems, self.elems)
        self.device.write(self.data.view((first,)), block[:first])
        source = self.data.view((first,))
        for begin in range(first, self.elems, self.block_elems):
            count = min(self.block_elems, self.elems - begin)
            queue_copy(library, source.view((count,)), self.data.view((count,), offset_elems=begin))
        self.device.synchronize()

    def rows(self, first_elems: npt.NDArray[np.int64], row_elems: int) -> npt.NDArray[np.float32]:
        """What the arena holds: float32 [len(first_elems), row_elems], row n from element first_elems[n] on."""
        if row_elems not in self._rows:
            self._rows[row_elems] = np.lib.stride_tricks.sliding_window_view(self._block, row_elems)
        held: npt.NDArray[np.float32] = self._rows[row_elems][first_elems % self.block_elems].astype(np.float32)
        return held

    def close(self) -> None:
        """Return the memory."""
        self.device.free(self.data)
