"""``cvt`` between floating-point formats: f32, f64, bf16, f16, tf32 and the 8-bit formats.

Rules recorded from an NVIDIA H200, driver 580.159.04, 29 Nov 2026: NaN becomes 0x7fff in 16-bit formats, 0x7f
in 8-bit ones and 0x7fffffff in f32, except that bf16 to f32 is a pure shift and f32 to f64 keeps the payload
(quiet bit set).

All functions take and return raw bits.
"""

from __future__ import annotations

from typing import Literal, cast

import numpy as np

from .bits import (
    F32_INFINITY,
    F32_NAN,
    F32_SIGN,
    F64,
    U16,
    U32,
    U64,
    Predicate,
    as_f32,
    f32,
    f32_bits,
    f64,
    u16,
    u32,
    u64,
)
from .numerics import flush
from .rounding import to_zero

_HALF_NAN = u16(0x7FFF)


# ---- float to float ----------------------------------------------------------------------------------------


def bf16_from_f32(a: U32) -> U16:
    """Round to nearest even, subnormals kept, NaN 0x7fff."""
    rounded = (a + u32(0x7FFF) + ((a >> u32(16)) & u32(1))) >> u32(16)
    return np.where((a & ~F32_SIGN) > F32_INFINITY, _HALF_NAN, rounded.astype(u16))


def f16_from_f32(a: U32) -> U16:
    halves = as_f32(a).astype(np.float16).view(u16)
    return np.where((a & ~F32_SIGN) > F32_INFINITY, _HALF_NAN, halves)


def bf16_from_f32_directed(a: U32, mode: str) -> U16:
    """``cvt.rz.bf16.f32``: bf16 is f32 cut short; stepping away from zero may carry up to infinity."""
    rest = (a & u32(0xFFFF)) != 0
    away = rest & _steps_away(a, mode) & ((a & ~F32_SIGN) < F32_INFINITY)
    cut = (a >> u32(16)).astype(u16) + away.astype(u16)
    return np.where((a & ~F32_SIGN) > F32_INFINITY, _HALF_NAN, cut)


def f16_from_f32_directed(a: U32, mode: str) -> U16:
    """``cvt.rz.f16.f32``."""
    values = as_f32(a)
    nearest = values.astype(np.float16)
    size, nearest_size = np.abs(values), np.abs(nearest.astype(f32))
    finite, away = np.isfinite(values), _steps_away(a, mode)
    nearest_bits = nearest.view(u16)
    nearest_bits = nearest_bits - (finite & ~away & (nearest_size > size)).astype(u16)
    nearest_bits = nearest_bits + (finite & away & (nearest_size < size)).astype(u16)
    return np.where(np.isnan(values), _HALF_NAN, nearest_bits)


def _steps_away(a: U32, mode: str) -> Predicate:
    """Whether a directed rounding goes away from zero."""
    negative = (a >> u32(31)).astype(np.bool_)
    if mode == "rz":
        return negative & False
    return negative if mode == "rm" else ~negative


def relu16(halves: U16) -> U16:
    """``.relu`` on bf16 or f16 results: negative values and -0 become +0; NaN has no sign here and stays."""
    return np.where(halves >> u16(15), u16(0), halves)


def packed(high: U16, low: U16) -> U32:
    """Two 16-bit results in one register; the instruction's first source goes to the high half."""
    return (high.astype(u32) << u32(16)) | low


def f32_from_f16(a: U16) -> U32:
    return f32_bits(a.view(np.float16).astype(f32))


def f64_from_f32(a: U32) -> U64:
    """Exact; a NaN keeps sign and payload and is made quiet."""
    sign = (a & F32_SIGN).astype(u64) << u64(32)
    payload = (a & u32(0x7FFFFF)).astype(u64) << u64(29)
    values = as_f32(a).astype(f64).view(u64)
    return np.where((a & ~F32_SIGN) > F32_INFINITY, sign | u64(0x7FF8000000000000) | payload, values)


def tf32_from_f32(a: U32) -> U32:
    """``cvt.rna.tf32``: half away from zero at 10 fraction bits; NaN loses its low bits and nothing else."""
    keep = ~u32(0x1FFF)
    rounded = (a & F32_SIGN) | (((a & ~F32_SIGN) + u32(0x1000)) & keep)
    exponent = a & F32_INFINITY
    return np.where(exponent == F32_INFINITY, np.where(a & u32(0x7FFFFF), a & keep, a), rounded)


def saturate_f32(a: U32) -> U32:
    """``cvt.sat.f32.f32``: clamped to [0, 1]; NaN and -0 give +0."""
    values = as_f32(a)
    return cast(U32, np.where(values > 0, np.minimum(values, f32(1)), f32(0)).astype(f32).view(u32))


def f64_from_f32_ftz(a: U32) -> U64:
    """``cvt.ftz.f64.f32``: here a NaN becomes the one NaN of f32 first."""
    return f64_from_f32(flush_f32(a))


def saturate_f32_ftz(a: U32) -> U32:
    """``cvt.ftz.sat.f32.f32``."""
    return saturate_f32(flush(a))


def flush_f32(a: U32) -> U32:
    """``cvt.ftz.f32.f32``."""
    return f32_bits(cast("np.typing.NDArray[np.float32]", flush(a).view(f32)))


# ---- 8-bit floats ------------------------------------------------------------------------------------------


def _f8_values(mantissa_bits: int, bias: int, finite_codes: int) -> F64:
    """The non-negative finite values of an 8-bit format in code order."""
    codes = np.arange(finite_codes)
    exponent, mantissa = codes >> mantissa_bits, codes & (2**mantissa_bits - 1)
    scale = np.maximum(exponent, 1) - bias - mantissa_bits
    return cast(F64, (mantissa + np.where(exponent > 0, 2**mantissa_bits, 0)) * np.exp2(scale.astype(f64)))


_F8 = {"e4m3": _f8_values(3, 7, 0x7F), "e5m2": _f8_values(2, 15, 0x7C)}
_F8_MIDPOINTS = {name: (values[1:] + values[:-1]) / 2 for name, values in _F8.items()}


def f8_from_f32(a: U32, name: str) -> U16:
    """``satfinite``: nearest even by bisection of midpoints; overflow and infinity to the largest finite, NaN
    0x7f."""
    size = np.abs(as_f32(a)).astype(f64)
    middle = _F8_MIDPOINTS[name]
    below, above = np.searchsorted(middle, size, "left"), np.searchsorted(middle, size, "right")
    code = np.where(below & 1, above, below)  # between code and code + 1 on a midpoint: the even one
    sign = (a >> u32(24)) & u32(0x80)
    return np.where(np.isnan(as_f32(a)), u16(0x7F), (code.astype(u32) | sign).astype(u16))


def f8x2_from_f32(high: U32, low: U32, name: str, relu: bool) -> U16:
    """Two 8-bit floats; the first source goes to the high byte."""
    first, second = f8_from_f32(high, name), f8_from_f32(low, name)
    if relu:
        first, second = (np.where(v & u16(0x80), u16(0), v) for v in (first, second))
    return (first << u16(8)) | second


def f8x2_from_f16x2(a: U32, name: str, relu: bool) -> U16:
    """``cvt.rn.satfinite.e4m3x2.f16x2``: the high half goes to the high byte."""
    high, low = (a >> u32(16)).astype(u16), a.astype(u16)
    return f8x2_from_f32(f32_from_f16(high), f32_from_f16(low), name, relu)


def f16x2_from_f8x2(a: U16, name: str) -> U32:
    """Exact: both formats fit in f16."""
    return packed(_f16_from_f8(a >> u16(8), name), _f16_from_f8(a & u16(0xFF), name))


def _f16_from_f8(code: U16, name: str) -> U16:
    special = 0x7F if name == "e4m3" else 0x7C
    table = np.full(128, _HALF_NAN, u16)
    table[:special] = _F8[name].astype(np.float16).view(u16)
    if name == "e5m2":
        table[special] = 0x7C00
    magnitude = table[code & u16(0x7F)]
    sign = (code & u16(0x80)) << u16(8)
    return np.where(magnitude == _HALF_NAN, _HALF_NAN, magnitude | sign)


def f64_from_f16(a: U16) -> U64:
    """``cvt.f64.f16``: exact; a NaN keeps sign and payload and is made quiet."""
    wide = a.astype(u64)
    nan = (wide & u64(0x8000)) << u64(48) | u64(0x7FF8000000000000) | (wide & u64(0x3FF)) << u64(42)
    return np.where((a & u16(0x7FFF)) > u16(0x7C00), nan, a.view(np.float16).astype(f64).view(u64))


def f64_from_bf16(a: U16) -> U64:
    """``cvt.f64.bf16``."""
    return f64_from_f32(a.astype(u32) << u32(16))


def half_from_f64(a: U64, form: Literal["bf16", "f16"]) -> U16:
    """``cvt.rn.f16.f64`` and ``cvt.rn.bf16.f64``: one rounding; a NaN keeps sign and upper payload bits."""
    values = cast(F64, a.view(f64))
    mantissa_bits, infinity = (10, 0x7C00) if form == "f16" else (7, 0x7F80)
    payload = (a >> u64(52 - mantissa_bits)).astype(u16) & u16((1 << mantissa_bits) - 1)
    nan = (a >> u64(48)).astype(u16) & u16(0x8000) | u16(infinity | 1 << (mantissa_bits - 1)) | payload
    if form == "f16":
        return np.where(np.isnan(values), nan, values.astype(np.float16).view(u16))
    cut = to_zero(values)
    # The last f32 bit is made odd where bits were cut, so that rounding twice is safe.
    odd = cut | ((cut.view(f32) != values) & np.isfinite(values))
    return np.where(np.isnan(values), nan, bf16_from_f32(odd))


def tf32_from_f32_even(a: U32) -> U32:
    """``cvt.rn.tf32.f32``: half to even on the lower 13 bits."""
    rounded = (a + u32(0xFFF) + ((a >> u32(13)) & u32(1))) & ~u32(0x1FFF)
    return np.where((a & u32(0x7FFFFFFF)) > u32(0x7F800000), F32_NAN & ~u32(0x1FFF), rounded)
