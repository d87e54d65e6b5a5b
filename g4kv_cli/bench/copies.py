"""A plain copy of as many bytes as a prep shape moves: a configuration of its own, timed in turn with prep's.

A large copy reaches a rate that a small one does not, whatever copies: between launches the memory waits, and what a
shape moves is seldom whole waves of blocks. What prep loses against this copy is prep's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.bench.ceilings import ACCESSES, VECTOR_BYTES, queue_copy
from g4kv_cli.bench.graph_runnable import GraphRunnable
from g4kv_cli.bench.noise_data import BF16, MAX_ROW_ELEMS, NoiseArena
from g4kv_cli.entries.library import KernelLibrary
from g4kv_cli.oracle.compare import POISON_BYTE
from g4kv_cli.records.bench import COPY, Shape, quantile

if TYPE_CHECKING:
    from g4kv_cli.device.cuda import CudaDevice

Array = npt.NDArray[Any]

SAMPLES_TO_CHOOSE = 5
CHECKED_ROWS = 16


def copied_elems(shape: Shape) -> int:
    """bf16 elements of a copy that reads and writes, together, what the shape does: half of its bytes, in whole
    vectors."""
    return -(-(shape.read_bytes + shape.write_bytes) // (2 * VECTOR_BYTES)) * VECTOR_BYTES // int(BF16.itemsize)


class CopyCall:
    """Set n: the n-th ``copied_elems`` of the arena, to memory of its own."""

    renewed_in_place = True  # nothing is renewed

    def __init__(self, shape: Shape, library: KernelLibrary, arena: NoiseArena, sets: int) -> None:
        """Allocates where the sets go. Raises DeviceUnavailable if the memory is not there."""
        self.accesses = ACCESSES[0]
        self._library, self._arena = library, arena
        self._elems = copied_elems(shape)
        self._destinations = [arena.device.allocate((self._elems,), BF16, f"copy {number}") for number in range(sets)]
        self._last = 0
        rows = np.linspace(0, max(0, self._elems - MAX_ROW_ELEMS), CHECKED_ROWS).astype(np.int64)
        self._rows = np.unique(rows)

    def queue(self, pool: int) -> None:
        """Copy this set."""
        source = self._arena.data.view((self._elems,), offset_elems=pool * self._elems)
        queue_copy(self._library, source, self._destinations[pool], self.accesses)
        self._last = pool

    def poison(self) -> None:
        """Every destination."""
        for array in self._destinations:
            self._arena.device.fill(array, POISON_BYTE)

    def output(self) -> Array:
        """Rows of the last copy, those at its two ends among them: bf16 [rows, elements of a row]."""
        copied, width = self._destinations[self._last], min(MAX_ROW_ELEMS, self._elems)
        device = self._arena.device
        return np.stack([device.read(copied.view((width,), offset_elems=int(first))) for first in self._rows])

    def wrong(self, out: Array, pool: int) -> str:
        """What is wrong with ``output`` of this set; empty if nothing is."""
        want = self._arena.rows(self._rows + pool * self._elems, out.shape[1])
        differs = (out.astype(np.float32) != want).any(axis=1)
        return f"{int(differs.sum())} of {len(differs)} rows of the copy are wrong" if differs.any() else ""


class CopyRunnable(GraphRunnable):
    """The copy as a configuration: of the compiled variants the one that is fastest here."""

    def __init__(self, shape: Shape, device: CudaDevice, library: KernelLibrary, arena: NoiseArena, sets: int) -> None:
        """As CopyCall."""
        self.copy = CopyCall(shape, library, arena, sets)
        super().__init__(COPY, device, self.copy, self.copy.wrong, sets)

    def capture(self) -> None:
        """The graphs of the fastest variant."""
        self.copy.accesses = min(ACCESSES, key=self._seconds_of)
        super().capture()

    def _seconds_of(self, accesses: int) -> float:
        self.copy.accesses = accesses
        super().capture()
        seconds: Sequence[float] = sorted(self.sample(SAMPLES_TO_CHOOSE).seconds)
        self.close()
        return quantile(seconds, 0.5)
