"""Exact models of the special-function unit (MUFU): ex2, lg2, rsqrt, rcp, sqrt .approx, and div.full,
div.approx.

Recorded from an NVIDIA H200, driver 580.159.04, 29 Nov 2026: the coefficient tables (``mufu_tables.npz``)
were recovered from exhaustive runs over the mantissa, and the instruction sequences around the unit were read
from the SASS that ptxas 13.0 emits for sm_90. Other chips need their own recording.

The unit evaluates one quadratic a segment in fixed point and cuts the result down:

    result = floor(C0[s] + C1[s] * x + C2[s] * sq(x))

s is the top 6 mantissa bits (7 for rcp; rsqrt and sqrt have one table for each exponent parity), x the 17
(16) bits below, and sq(x) is x * x with the partial products below its upper 15 columns left out. All terms
are small enough to be exact in float64.

All functions take and return raw f32 bits (``uint32``, shapes ``(1,)`` or ``(n,)``).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from .bits import (
    F32,
    F32_INFINITY,
    F32_NAN,
    F32_SIGN,
    F32_SMALLEST_NORMAL,
    F64,
    I64,
    U32,
    Bits,
    as_f32,
    f32,
    f32_bits,
    f64,
    i32,
    i64,
    u32,
)
from .numerics import flush, mul_ftz

_SQUARE_COLUMNS = 15
_TWO_TO_24 = f32(2.0**24)
_HUGE = f32(2.0**126)


class _Quadratic:
    """One coefficient table: scaled so that ``evaluate`` gives the result in units of its last place."""

    def __init__(self, coefficients: I64, x_bits: int, result_scale: float = 1.0) -> None:
        self.x_bits = x_bits
        self.x_mask = 2**x_bits - 1
        self.constant = coefficients[0] * (result_scale * 2.0**-17)
        self.linear = coefficients[1] * (result_scale * 2.0**-x_bits)
        self.square = coefficients[2] * (result_scale * 2.0 ** (-1 - 2 * x_bits))

    def evaluate(self, segment: Bits, x: Bits) -> F64:
        """The exact polynomial value; the caller cuts it (floor) to an integer."""
        value: F64 = self.linear.take(segment)
        value *= x
        value += self.constant.take(segment)
        bend = self.square.take(segment)
        bend *= cut_squares(self.x_bits).take(x)
        value += bend
        return value

    def at_mantissa(self, mantissa: Bits) -> F64:
        """Value for a 23-bit mantissa."""
        return self.evaluate(mantissa >> self.x_bits, mantissa & self.x_mask)


@cache
def cut_squares(x_bits: int) -> F64:
    """sq(x) of every x_bits-bit x: the terms x_i * x_j * 2^(i+j) of x * x in the upper 15 columns only."""
    x = np.arange(1 << x_bits, dtype=i64)
    lowest = 2 * x_bits - _SQUARE_COLUMNS
    total = np.zeros_like(x)
    for i in range(x_bits):
        # x_i times every higher x_j counts twice: column i + j + 1.
        first = max(lowest - i - 1, i + 1)
        if first < x_bits:
            total += ((x >> i) & 1) * ((x & -(1 << first)) << (i + 1))
        if 2 * i >= lowest:
            total += ((x >> i) & 1) << (2 * i)
    return total.astype(f64)


@cache
def _tables() -> dict[str, _Quadratic]:
    with np.load(Path(__file__).with_name("mufu_tables.npz")) as stored:
        raw = {name: stored[name] for name in stored.files}
    return {
        "ex2": _Quadratic(raw["ex2"], 17),
        "lg2": _Quadratic(raw["lg2"], 17, 2.0**12),  # 36 fraction bits
        "rcp": _Quadratic(raw["rcp"], 16),
        # Indexed by the lowest exponent bit and the top 6 mantissa bits; an odd biased exponent is an even
        # power.
        "rsqrt": _Quadratic(np.concatenate([raw["rsq2"], raw["rsq1"]], axis=1), 17),
        "sqrt": _Quadratic(np.concatenate([raw["sqrt2"], raw["sqrt1"]], axis=1), 17),
    }


def coefficient_tables() -> dict[str, npt.NDArray[Any]]:
    """The tables of the approximate functions as arrays, for evaluations elsewhere: name -> float64 [3, segments] of
    constant, linear and quadratic coefficients in units of the result's last place. ``square``: uint16 [2^17], sq(x)
    of 17-bit x in units of 2^19, to which those quadratic coefficients are scaled."""
    tables: dict[str, npt.NDArray[Any]] = {}
    for name, table in _tables().items():
        unit = 2.0 ** (2 * table.x_bits - _SQUARE_COLUMNS)
        tables[name] = np.ascontiguousarray(np.stack([table.constant, table.linear, table.square * unit]))
    tables["square"] = (cut_squares(17) / 2.0**19).astype(np.uint16)
    return tables


def _fields(bits: U32) -> tuple[I64, I64]:
    """Biased exponent and mantissa as int64."""
    wide = bits.astype(i64)
    return (wide >> 23) & 255, wide & 0x7FFFFF


def _all_normal_positive(bits: U32) -> bool:
    return bool(((bits - u32(0x00800000)) < u32(0x7F000000)).all())


# ---- the unit itself: subnormal inputs count as zero (the .ftz forms) --------------------------------------


def ex2_ftz(bits: U32) -> U32:
    """2^x. The fraction of |x| is cut to 23 bits; a negative x takes its one's complement instead of 1 -
    fraction."""
    x = as_f32(bits)
    # Beyond +-200 the result is 0 or infinity anyway; the product fits int32 and the cast cuts toward zero.
    fixed = (np.clip(x, f32(-200), f32(200)) * f32(2.0**23)).astype(i32)
    fixed -= (fixed < 0) & ((fixed & 0x7FFFFF) != 0)
    result = _tables()["ex2"].at_mantissa(fixed & 0x7FFFFF).astype(i32)
    power = fixed >> 23
    out = ((power + 126) << 23) + result
    if power.size and (power.min() < -126 or power.max() > 127):
        out = np.where(power < -126, i32(0), np.where(power > 127, i32(0x7F800000), out))
    unsigned = cast(U32, out.view(u32))
    nan = np.isnan(x)
    return np.where(nan, F32_NAN, unsigned) if nan.any() else unsigned


def rsqrt_ftz(bits: U32) -> U32:
    """1 / sqrt(x); a power of four is exact. -0 and negative subnormals give -infinity, other negatives
    NaN."""
    exponent, mantissa = _fields(bits)
    table = _tables()["rsqrt"]
    value = table.evaluate((bits >> u32(17)) & u32(127), mantissa & table.x_mask).astype(i64)
    half = (exponent - 127) >> 1  # floor, so that the argument left over lies in [1, 4)
    power_of_four = (mantissa == 0) & ((exponent & 1) == 1)
    out: I64 = np.where(power_of_four, 127 << 23, (125 << 23) + value) - (half << 23)
    result = out.astype(u32)
    if _all_normal_positive(bits):
        return result
    sign = bits & F32_SIGN
    result = np.where(exponent == 0, F32_INFINITY | sign, result)
    result = np.where((exponent == 255) & (mantissa == 0), u32(0), result)
    invalid = ((exponent == 255) & (mantissa != 0)) | ((sign != 0) & (exponent != 0))
    return np.where(invalid, F32_NAN, result)


def sqrt_ftz(bits: U32) -> U32:
    """sqrt(x); zeros keep their sign, negatives give NaN."""
    exponent, mantissa = _fields(bits)
    table = _tables()["sqrt"]
    value = table.evaluate((bits >> u32(17)) & u32(127), mantissa & table.x_mask).astype(i64)
    half = (exponent - 127) >> 1
    result = ((126 << 23) + value + (half << 23)).astype(u32)
    if _all_normal_positive(bits):
        return result
    sign = bits & F32_SIGN
    result = np.where(exponent == 0, sign, result)
    result = np.where((exponent == 255) & (mantissa == 0), F32_INFINITY, result)
    invalid = ((exponent == 255) & (mantissa != 0)) | ((sign != 0) & (exponent != 0))
    return np.where(invalid, F32_NAN, result)


def rcp_ftz(bits: U32) -> U32:
    """1 / x; results below the normal range are zero, 1 / 0 is infinity, signs kept."""
    sign = bits & F32_SIGN
    exponent, mantissa = _fields(bits)
    value = _tables()["rcp"].at_mantissa(mantissa).astype(i64)  # 2^23 < value <= 2^24, units of 2^-24
    out = (253 - exponent << 23) + (value - (1 << 23))
    result = np.where(out >> 23 <= 0, 0, out).astype(u32) | sign
    result = np.where(exponent == 0, F32_INFINITY | sign, result)
    return np.where(exponent == 255, np.where(mantissa != 0, F32_NAN, sign), result)


def lg2_ftz(bits: U32) -> U32:
    """log2(x): exponent plus table in fixed point with 36 fraction bits; a negative value is the one's
    complement of its magnitude; then cut to 24 bits. lg2(1) = 0."""
    exponent, mantissa = _fields(bits)
    fixed = ((exponent - 127) << 36) + np.floor(_tables()["lg2"].at_mantissa(mantissa)).astype(i64)
    magnitude = np.where(fixed < 0, ~fixed, fixed)  # below 2^44: exact in f64
    leading = np.frexp(magnitude.astype(f64))[1] - 1
    cut = np.where(leading >= 23, magnitude >> np.maximum(leading - 23, 0), magnitude << np.maximum(23 - leading, 0))
    out = ((leading - 36 + 126).astype(i64) << 23) + cut
    result = out.astype(u32) | np.where(fixed < 0, F32_SIGN, u32(0))
    result = np.where(bits == u32(0x3F800000), u32(0), result)
    if _all_normal_positive(bits):
        return result
    result = np.where((bits & F32_SIGN) != 0, F32_NAN, result)
    result = np.where(exponent == 0, F32_SIGN | F32_INFINITY, result)
    special = np.where((mantissa != 0) | ((bits & F32_SIGN) != 0), F32_NAN, F32_INFINITY)
    return np.where(exponent == 255, special, result)


# ---- the sequences around the unit that keep subnormals ----------------------------------------------------


def _tiny(bits: U32) -> Bits:
    return np.abs(as_f32(bits)) < F32_SMALLEST_NORMAL


def _times(bits: U32, factor: F32 | np.float32) -> U32:
    return cast(U32, (as_f32(bits) * factor).view(u32))


def ex2(bits: U32) -> U32:
    """``ex2.approx.f32``: below -126 the argument is halved and the result squared."""
    low = as_f32(bits) < f32(-126)
    if not low.any():
        return ex2_ftz(bits)
    half = ex2_ftz(np.where(low, _times(bits, f32(0.5)), bits))
    return f32_bits(np.where(low, as_f32(half) * as_f32(half), as_f32(half)))


def rsqrt(bits: U32) -> U32:
    """``rsqrt.approx.f32``: subnormals are scaled by 2^24, the result by 2^12."""
    tiny = _tiny(bits)
    if not tiny.any():
        return rsqrt_ftz(bits)
    root = rsqrt_ftz(np.where(tiny, _times(bits, _TWO_TO_24), bits))
    return f32_bits(as_f32(np.where(tiny, _times(root, f32(2.0**12)), root)))


def sqrt(bits: U32) -> U32:
    """``sqrt.approx.f32``: subnormals are scaled by 2^24, the result by 2^-12."""
    tiny = _tiny(bits)
    root = sqrt_ftz(np.where(tiny, _times(bits, _TWO_TO_24), bits))
    return f32_bits(as_f32(np.where(tiny, _times(root, f32(2.0**-12)), root)))


def lg2(bits: U32) -> U32:
    """``lg2.approx.f32``: subnormals are scaled by 2^24, 24 is subtracted from the result."""
    tiny = _tiny(bits)
    log = lg2_ftz(np.where(tiny, _times(bits, _TWO_TO_24), bits))
    return f32_bits(np.where(tiny, as_f32(log) - f32(24), as_f32(log)))


def _divisor_scale(divisor: U32) -> F32:
    """2^24 for a subnormal divisor, 1/4 above 2^126, else 1."""
    size = np.abs(as_f32(divisor))
    return np.where(size > _HUGE, f32(0.25), np.where(size < F32_SMALLEST_NORMAL, _TWO_TO_24, f32(1)))


def rcp(bits: U32) -> U32:
    """``rcp.approx.f32``: the operand and the result carry the same scale."""
    scale = _divisor_scale(bits)
    return f32_bits(as_f32(rcp_ftz(_times(bits, scale))) * scale)


def div_full(a: U32, b: U32) -> U32:
    """``div.full.f32``: reciprocal of the scaled divisor times the equally scaled dividend."""
    scale = _divisor_scale(b)
    return f32_bits(as_f32(rcp_ftz(_times(b, scale))) * as_f32(_times(a, scale)))


def div_approx(a: U32, b: U32) -> U32:
    """``div.approx.f32``: as div.full without the scale for large divisors."""
    scale = np.where(_tiny(b), _TWO_TO_24, f32(1))
    return f32_bits(as_f32(rcp_ftz(_times(b, scale))) * as_f32(_times(a, scale)))


def div_full_ftz(a: U32, b: U32) -> U32:
    """``div.full.ftz.f32``: every multiplication flushes."""
    a, b = flush(a), flush(b)
    scale = np.where(np.abs(as_f32(b)) > _HUGE, f32(0.25), f32(1)).view(u32)
    return mul_ftz(rcp_ftz(mul_ftz(b, scale)), mul_ftz(a, scale))


def div_approx_ftz(a: U32, b: U32) -> U32:
    """``div.approx.ftz.f32``."""
    return mul_ftz(a, rcp_ftz(b))
