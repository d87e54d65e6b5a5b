"""``cvt`` of the hardware: float to float, float to integer, integer to float, integer to integer.

Rules recorded from an NVIDIA H200, driver 580.159.04, 29 Nov 2026: float to integer saturates; NaN gives 0 for results
of 32 bits and fewer and 0x8000000000000000 for 64 bits; NaN becomes 0x7fff in 16-bit formats, 0x7f in 8-bit ones and
0x7fffffff in f32, except that bf16 to f32 is a pure shift and f32 to f64 keeps the payload (quiet bit set).

All functions take and return raw bits. An 8-bit integer lives in the low half of a ``uint16`` register.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from g4kv_cli.device.emulated.bits import (
    F32_INFINITY,
    F32_SIGN,
    F64,
    U16,
    U32,
    U64,
    Bits,
    as_f32,
    f32,
    f32_bits,
    f64,
    i64,
    u16,
    u32,
    u64,
)
from g4kv_cli.device.emulated.numerics import flush

_HALF_NAN = u16(0x7FFF)
_ROUND = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


# ---- float to float ----------------------------------------------------------------------------------------------


def bf16_from_f32(a: U32) -> U16:
    """Round to nearest even, subnormals kept, NaN 0x7fff."""
    rounded = (a + u32(0x7FFF) + ((a >> u32(16)) & u32(1))) >> u32(16)
    return np.where((a & ~F32_SIGN) > F32_INFINITY, _HALF_NAN, rounded.astype(u16))


def bf16_from_f32_to_zero(a: U32) -> U16:
    return np.where((a & ~F32_SIGN) > F32_INFINITY, _HALF_NAN, (a >> u32(16)).astype(u16))


def f16_from_f32(a: U32) -> U16:
    halves = as_f32(a).astype(np.float16).view(u16)
    return np.where((a & ~F32_SIGN) > F32_INFINITY, _HALF_NAN, halves)


def f16_from_f32_to_zero(a: U32) -> U16:
    values = as_f32(a)
    halves = values.astype(np.float16)
    over = (np.abs(halves.astype(f32)) > np.abs(values)) & np.isfinite(values)
    cut = np.where(over, np.nextafter(halves, np.float16(0)), halves).view(u16)
    return np.where(np.isnan(values), _HALF_NAN, cut)


def relu16(halves: U16) -> U16:
    """``.relu`` on bf16 or f16 results: negative values and -0 become +0; NaN has no sign here and stays."""
    return np.where(halves >> u16(15), u16(0), halves)


def packed(high: U16, low: U16) -> U32:
    """Two 16-bit results in one register; the instruction's first source goes to the high half."""
    return (high.astype(u32) << u32(16)) | low


def f32_from_bf16(a: U16) -> U32:
    return a.astype(u32) << u32(16)


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


def flush_f32(a: U32) -> U32:
    """``cvt.ftz.f32.f32``."""
    return f32_bits(cast("np.typing.NDArray[np.float32]", flush(a).view(f32)))


def integral_f32(a: U32, mode: str) -> U32:
    """``cvt.rni.f32.f32`` and its kin: an integral f32, the sign of zero kept."""
    return f32_bits(_ROUND[mode](as_f32(a)))


# ---- 8-bit floats --------------------------------------------------------------------------------------------------


def _f8_values(mantissa_bits: int, bias: int, finite_codes: int) -> F64:
    """The non-negative finite values of an 8-bit format in code order."""
    codes = np.arange(finite_codes)
    exponent, mantissa = codes >> mantissa_bits, codes & (2**mantissa_bits - 1)
    scale = np.maximum(exponent, 1) - bias - mantissa_bits
    return cast(F64, (mantissa + np.where(exponent > 0, 2**mantissa_bits, 0)) * np.exp2(scale.astype(f64)))


_F8 = {"e4m3": _f8_values(3, 7, 0x7F), "e5m2": _f8_values(2, 15, 0x7C)}
_F8_MIDPOINTS = {name: (values[1:] + values[:-1]) / 2 for name, values in _F8.items()}


def f8_from_f32(a: U32, name: str) -> U16:
    """``satfinite``: nearest even by bisection of midpoints; overflow and infinity to the largest finite, NaN 0x7f."""
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


# ---- float to integer ----------------------------------------------------------------------------------------------


def integer_from_float(values: F64, mode: str, width: int, is_signed: bool) -> U64:
    """Rounded and saturated to width bits, sign-extended into 64; NaN is handled by the callers' rule here.

    values: f64, exact images of f32 or f16 inputs.
    """
    rounded = _ROUND[mode](values)
    low, limit = (-(2.0 ** (width - 1)), 2.0 ** (width - 1)) if is_signed else (0.0, 2.0**width)
    inside = (rounded >= low) & (rounded < limit)
    safe = np.where(inside, rounded, 0.0)
    # A direct f64 to uint64 cast is right for [0, 2^64); signed values go through int64.
    result = safe.astype(i64).view(u64) if is_signed else safe.astype(u64)
    low_bits, high_bits = (-(2 ** (width - 1)), 2 ** (width - 1) - 1) if is_signed else (0, 2**width - 1)
    result = np.where(rounded >= limit, u64(high_bits), result)
    result = np.where(rounded < low, u64(low_bits & (2**64 - 1)), result)
    return np.where(np.isnan(values), u64(2**63 if width == 64 else 0), result)


def integer_from_f32(a: U32, mode: str, width: int, is_signed: bool, ftz: bool) -> Bits:
    """``cvt.rzi.s32.f32`` and its kin; 8- and 16-bit results are extended within their register."""
    values = as_f32(flush(a) if ftz else a).astype(f64)
    return integer_from_float(values, mode, width, is_signed).astype(register_dtype(width))


def integer_from_f16(a: U16, mode: str, width: int, is_signed: bool) -> Bits:
    values = a.view(np.float16).astype(f64)
    return integer_from_float(values, mode, width, is_signed).astype(register_dtype(width))


def register_dtype(width: int) -> np.dtype[np.generic]:
    """The register dtype that holds an integer of 8, 16, 32 or 64 bits."""
    return np.dtype(f"u{max(width, 16) // 8}")


# ---- integer to float ----------------------------------------------------------------------------------------------


def _typed(a: Bits, width: int, is_signed: bool) -> Bits:
    """The register's low width bits as an integer array."""
    return a.astype(f"{'i' if is_signed else 'u'}{width // 8}")


def f32_from_integer(a: Bits, width: int, is_signed: bool) -> U32:
    """``cvt.rn.f32.s32`` and its kin: rounded once, to nearest even (also from 64 bits)."""
    return cast(U32, _typed(a, width, is_signed).astype(f32).view(u32))


def f32_from_integer_to_zero(a: Bits, width: int, is_signed: bool) -> U32:
    """``cvt.rz.f32.s32`` (up to 32 bits): f64 holds the integer exactly."""
    exact = _typed(a, width, is_signed).astype(f64)
    nearest = exact.astype(f32)
    return cast(U32, np.where(np.abs(nearest) > np.abs(exact), np.nextafter(nearest, f32(0)), nearest).view(u32))


def f64_from_integer(a: Bits, width: int, is_signed: bool) -> U64:
    return cast(U64, _typed(a, width, is_signed).astype(f64).view(u64))


def f16_from_integer(a: Bits, width: int, is_signed: bool) -> U16:
    """``cvt.rn.f16.s32``: integers from 2^24 up overflow f16 in any case, so rounding through f64 rounds once."""
    return cast(U16, _typed(a, width, is_signed).astype(f64).astype(np.float16).view(u16))


# ---- integer to integer --------------------------------------------------------------------------------------------


def integer_from_integer(a: Bits, to_width: int, to_signed: bool, from_width: int, from_signed: bool) -> Bits:
    """Truncation or extension; the result is sign- or zero-extended within its register by its own type."""
    narrow = _typed(_typed(a, from_width, from_signed), to_width, to_signed)
    return narrow.astype(register_dtype(to_width))


def integer_from_integer_saturated(a: Bits, to_width: int, to_signed: bool, from_width: int, from_signed: bool) -> Bits:
    """``cvt.sat``: clamped to the range of the destination type."""
    values = _typed(a, from_width, from_signed)
    info = np.iinfo(values.dtype)
    low, high = (-(2 ** (to_width - 1)), 2 ** (to_width - 1) - 1) if to_signed else (0, 2**to_width - 1)
    clamped = np.clip(values, values.dtype.type(max(low, info.min)), values.dtype.type(min(high, info.max)))
    return clamped.astype(register_dtype(to_width))


