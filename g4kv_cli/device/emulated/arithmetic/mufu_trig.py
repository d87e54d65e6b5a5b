"""``sin.approx``, ``cos.approx`` and ``tanh.approx``: exact models of the hardware's tables.

Recorded from an NVIDIA H200, driver 580.159.04, 30 Nov 2026 (12 million results, 0 differ). As the other functions of
the unit (see ``mufu``) they are floor(C0 + C1 x + C2 sq(x)) of the 17 bits x below the segment:

* sin and cos: the argument times 0.15915494, cut to f32, gives revolutions, of which 25 fraction bits count: two for
  the quadrant, 6 for the segment and 17. Quadrants that run backwards take the one's complement. The value has 37
  fraction bits and is cut to 24.
* tanh: below 2^-8 the argument itself, from 8 on 1; between, each binade has 1 to 16 segments.

The 16-bit forms cut the f32 result.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .bits import F32_NAN, F32_SIGN, I64, U16, U32, Bits, as_f32, f32, f64, i64, u32, u64
from .conversions import f16_from_f32, f16_from_f32_directed, f32_from_f16
from .mufu import cut_squares, ex2_ftz
from .packed16 import Format

_PER_REVOLUTION = f64(f32(0.15915494))
_REVOLUTION_BITS = 25
_QUADRANT_BITS = 23
_X_BITS = 17
_X_MASK = (1 << _X_BITS) - 1
_SINE_FRACTION_BITS = 37
_TANH_FRACTION_BITS = 41
"""Of a value between 1/2 and 1; smaller ones are scaled up by their argument's exponent."""
_TANH_SEGMENT_BITS = np.array([0, 0, 0, 1, 1, 2, 2, 2, 3, 4, 3])
"""By the exponent of the argument, from 2^-8 on."""
_TANH_FIRST, _TANH_LAST = -8, 2


@cache
def _tables() -> dict[str, npt.NDArray[Any]]:
    with np.load(Path(__file__).with_name("mufu_tables.npz")) as stored:
        return {name: stored[name] for name in ("sin", "tanh")}


def sine_table() -> npt.NDArray[np.float64]:
    """The table of sin and cos as ``mufu.coefficient_tables`` has the others, of values with 37 fraction bits."""
    return np.ascontiguousarray(_tables()["sin"], np.float64)


def tanh_table() -> npt.NDArray[np.float64]:
    """That of tanh, [coefficient, binade of the argument, segment]; the quadratic one is of squares in units of 2^17,
    here in those of the others."""
    table = np.array(_tables()["tanh"], np.float64)
    table[2] *= 4
    return np.ascontiguousarray(table)


@cache
def _squares() -> I64:
    """sq(x) of every 17-bit x, without the columns that are always zero."""
    return (cut_squares(_X_BITS) / 2.0**19).astype(i64)


def _cut(value: I64, fraction_bits: Bits | int) -> U32:
    """A positive fixed-point value cut to f32; zero for zero."""
    leading = np.frexp(value.astype(f64))[1] - 1
    kept = np.where(leading >= 23, value >> np.maximum(leading - 23, 0), value << np.maximum(23 - leading, 0))
    return np.where(value == 0, 0, ((leading - fraction_bits + 126).astype(i64) << 23) + kept).astype(u32)


def _wave(bits: U32, quarters: int) -> tuple[U32, Bits]:
    """|sin| of the argument plus so many quarter turns, and whether the turned angle lies in the lower half."""
    turns = np.abs(as_f32(bits).astype(f64) * _PER_REVOLUTION)
    turns = (turns.view(u64) & ~u64((1 << 29) - 1)).view(f64)  # cut to f32
    turns = np.where(np.isfinite(turns), turns, 0)
    fixed = np.mod(np.floor(turns * 2.0**_REVOLUTION_BITS), 2.0**_REVOLUTION_BITS).astype(i64)
    quadrant = (fixed >> _QUADRANT_BITS) + quarters
    angle = fixed & ((1 << _QUADRANT_BITS) - 1)
    angle = np.where(quadrant & 1, (1 << _QUADRANT_BITS) - 1 - angle, angle)
    constant, linear, square = _tables()["sin"].take(angle >> _X_BITS, axis=1)
    x = angle & _X_MASK
    size = _cut(constant + linear * x + square * _squares().take(x), _SINE_FRACTION_BITS)
    return size, (quadrant & 2) != 0


def _unless_infinite(bits: U32, result: U32) -> U32:
    return np.where((bits & u32(0x7F800000)) == u32(0x7F800000), F32_NAN, result)


def sin(bits: U32) -> U32:
    """``sin.approx.f32``, with and without ``.ftz``."""
    size, is_lower = _wave(bits, 0)
    return _unless_infinite(bits, size | ((bits & F32_SIGN) ^ np.where(is_lower, F32_SIGN, u32(0))))


def cos(bits: U32) -> U32:
    """``cos.approx.f32``, with and without ``.ftz``."""
    size, is_lower = _wave(bits, 1)
    return _unless_infinite(bits, size | np.where(is_lower, F32_SIGN, u32(0)))


def tanh(bits: U32) -> U32:
    """``tanh.approx.f32``."""
    size = bits & ~F32_SIGN
    exponent = (size >> u32(23)).astype(i64) - 127
    mantissa = (size & u32(0x7FFFFF)).astype(i64)
    row = np.clip(exponent, _TANH_FIRST, _TANH_LAST) - _TANH_FIRST
    segment_bits = _TANH_SEGMENT_BITS.take(row)
    segment = mantissa >> (23 - segment_bits)
    x = (mantissa >> (23 - _X_BITS - segment_bits)) & _X_MASK
    constant, linear, square = _tables()["tanh"][:, row, segment]
    value = constant + linear * x + 4 * square * _squares().take(x)
    result = _cut(value, _TANH_FRACTION_BITS - np.minimum(exponent, -1) - 1)
    result = np.where(exponent < _TANH_FIRST, size, np.where(exponent > _TANH_LAST, u32(0x3F800000), result))
    return np.where(size > u32(0x7F800000), F32_NAN, result | (bits & F32_SIGN))


_UNIT = {"tanh": tanh, "ex2": ex2_ftz}


def half(a: U16, name: str, form: Format) -> U16:
    """``tanh.approx`` and ``ex2.approx`` of f16 and bf16: the f32 result cut to 16 bits."""
    function = _UNIT[name]
    if form == "bf16":
        return (function(a.astype(u32) << u32(16)) >> u32(16)).astype(np.uint16)
    result = function(f32_from_f16(a))
    # Cut, but what is too large for f16 becomes infinite.
    return np.where((result & ~F32_SIGN) >= u32(0x47800000), f16_from_f32(result), f16_from_f32_directed(result, "rz"))
