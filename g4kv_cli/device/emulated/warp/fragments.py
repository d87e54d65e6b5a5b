"""How the lanes of a warp hold a matrix in registers, for every shape and type of ``mma.sync`` and ``wmma``.

Recorded from an NVIDIA H200: lane 4g + t holds, of each part of 8 rows of A, row g and the t-th group of columns that
fill a register; B likewise with rows and columns changed round; of C row g and columns 2t and 2t + 1. Registers of A go
over the halves of 16 rows first, then over k, then over blocks of 16 rows; those of B over k, then over blocks of 8
columns. ``wmma`` holds the same fragments; where it has more registers than these, they repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ..state.lanes import WARP

Array = npt.NDArray[Any]
Index = npt.NDArray[np.int64]

_GROUP = np.arange(WARP) // 4
_IN_GROUP = np.arange(WARP) % 4


@dataclass(frozen=True, eq=False)
class Fragment:
    """``row`` and ``column`` say where each element lies, [registers, lanes, elements of a register]."""

    shape: tuple[int, int]
    element_bits: int
    register_bits: int
    row: Index
    column: Index

    @property
    def registers(self) -> int:
        """How many different registers there are."""
        return int(self.row.shape[0])

    def turned(self) -> Fragment:
        """The same registers as those of the transposed matrix."""
        return Fragment(self.shape[::-1], self.element_bits, self.register_bits, self.column, self.row)

    def gather(self, registers: Sequence[Array]) -> Array:
        """Registers [warps, 32] -> matrices [warps, rows, columns] of raw bits."""
        kind = f"u{max(self.element_bits, 8) // 8}"
        matrix = np.zeros((registers[0].shape[0], *self.shape), kind)
        mask = (1 << self.element_bits) - 1
        for number in range(self.registers):
            for part in range(self.row.shape[2]):
                bits = registers[number] >> registers[number].dtype.type(part * self.element_bits)
                if self.element_bits < self.register_bits:
                    bits = bits & bits.dtype.type(mask)
                matrix[:, self.row[number, :, part], self.column[number, :, part]] = bits
        return matrix

    def scatter(self, matrix: Array) -> list[Array]:
        """Matrices -> registers [warps, 32]."""
        kind: Any = np.uint64 if self.register_bits == 64 else np.uint32
        found = []
        for number in range(self.registers):
            register = np.zeros((matrix.shape[0], WARP), kind)
            for part in range(self.row.shape[2]):
                bits = matrix[:, self.row[number, :, part], self.column[number, :, part]].astype(kind)
                register |= bits << kind(part * self.element_bits)
            found.append(register)
        return found


def _register_bits(element_bits: int) -> int:
    return max(32, element_bits)


@lru_cache(maxsize=256)
def fragment_a(rows: int, k: int, element_bits: int) -> Fragment:
    """A: ``rows`` 8, 16 or 32."""
    bits = _register_bits(element_bits)
    each = bits // element_bits
    halves, steps, blocks = min(rows // 8, 2), k // (4 * each), max(rows // 16, 1)
    number = np.arange(blocks * steps * halves)[:, None, None]
    part = np.arange(each)[None, None]
    block, step, half = number // (steps * halves), number // halves % steps, number % halves
    row = 16 * block + 8 * half + _GROUP[None, :, None] + 0 * part
    column = step * 4 * each + _IN_GROUP[None, :, None] * each + part
    return Fragment((rows, k), element_bits, bits, row, column)


@lru_cache(maxsize=256)
def fragment_b(k: int, columns: int, element_bits: int) -> Fragment:
    """B: ``columns`` 8 or 16."""
    bits = _register_bits(element_bits)
    each = bits // element_bits
    steps = k // (4 * each)
    number = np.arange(columns // 8 * steps)[:, None, None]
    part = np.arange(each)[None, None]
    row = number % steps * 4 * each + _IN_GROUP[None, :, None] * each + part
    column = 8 * (number // steps) + _GROUP[None, :, None] + 0 * part
    return Fragment((k, columns), element_bits, bits, row, column)


@lru_cache(maxsize=256)
def fragment_c(rows: int, columns: int, element_bits: int) -> Fragment:
    """C and D: one of ``rows`` and ``columns`` is 8, or both are 16, or both 8."""
    bits = _register_bits(element_bits)
    each = bits // element_bits
    halves, blocks = min(rows // 8, 2), max(rows // 16, 1)
    number = np.arange(columns // 8 * blocks * halves * 2 // each)[:, None, None]
    part = np.arange(each)[None, None]
    element = number * each + part
    tile, half, parity = element // (2 * halves), element // 2 % halves, element % 2
    row = 16 * (tile % blocks) + 8 * half + _GROUP[None, :, None]
    column = 8 * (tile // blocks) + 2 * _IN_GROUP[None, :, None] + parity
    return Fragment((rows, columns), element_bits, bits, row, column)


@dataclass(frozen=True, eq=False)
class Fragments:
    """Those of one multiply."""

    a: Fragment
    b: Fragment
    c: Fragment


@lru_cache(maxsize=256)
def fragments_of(shape: tuple[int, int, int], bits: int, c_bits: int) -> Fragments:
    """Of a shape (m, n, k) with elements of these many bits; 8 rows and 32 columns are the transposed 32 by 8."""
    rows, columns, k = shape
    if (rows, columns) == (8, 32):
        return Fragments(
            fragment_b(k, rows, bits).turned(),
            fragment_a(columns, k, bits).turned(),
            fragment_c(columns, rows, c_bits).turned(),
        )
    return Fragments(fragment_a(rows, k, bits), fragment_b(k, columns, bits), fragment_c(rows, columns, c_bits))
