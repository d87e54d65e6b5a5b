"""Array types and constants of the exact arithmetic.

Every register is an array of raw bits over threads: ``uint16``, ``uint32``, ``uint64`` or ``bool``, of shape
``(n,)``, or ``(1,)`` when all threads agree. Functions broadcast the two shapes against each other.

The functions of this package do not switch NumPy's floating-point warnings off themselves (that costs more
than many of the operations): call them under ``np.errstate(all="ignore")``.
"""

from __future__ import annotations

from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

U16: TypeAlias = npt.NDArray[np.uint16]
U32: TypeAlias = npt.NDArray[np.uint32]
U64: TypeAlias = npt.NDArray[np.uint64]
I64: TypeAlias = npt.NDArray[np.int64]
F32: TypeAlias = npt.NDArray[np.float32]
F64: TypeAlias = npt.NDArray[np.float64]
Predicate: TypeAlias = npt.NDArray[np.bool_]
Bits: TypeAlias = npt.NDArray[Any]

u16, u32, u64 = np.uint16, np.uint32, np.uint64
u8, i8 = np.uint8, np.int8
i16, i32, i64 = np.int16, np.int32, np.int64
f32, f64 = np.float32, np.float64

F32_NAN = u32(0x7FFFFFFF)
"""The NaN every f32 operation of the hardware returns, whatever the payload and sign of its operands."""
F32_SIGN = u32(0x80000000)
F32_INFINITY = u32(0x7F800000)
F32_SMALLEST_NORMAL = f32(2.0**-126)

ALL_ONES_32 = u32(0xFFFFFFFF)


def as_f32(bits: U32) -> F32:
    """The same bits read as float32."""
    return bits.view(f32)


def f32_bits(values: F32) -> U32:
    """The raw bits of float32 values; every NaN becomes the hardware's one NaN, 0x7fffffff."""
    bits = cast(U32, values.view(u32))
    if bits.size:
        least = np.minimum.reduce(values, axis=None)  # NaN if anything is
        if least != least:
            return np.where(np.isnan(values), F32_NAN, bits)
    return bits
