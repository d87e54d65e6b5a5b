"""f32 arithmetic of the hardware, bit for bit: add, subtract, multiply, fma, divide, root, min, max, sign
operations.

NumPy's own float32 operations are IEEE (round to nearest even, subnormals kept); this module adds what
differs: one NaN (0x7fffffff), ``.ftz``, ``.sat``, the order of signed zeros in min and max, and fma, which
NumPy lacks. The rules were recorded from an NVIDIA H200, driver 580.159.04, 29 Nov 2026.

All functions take and return raw bits (``uint32``, shapes ``(1,)`` or ``(n,)``).
"""

from __future__ import annotations

from typing import cast

import numpy as np

from .bits import (
    F32,
    F32_INFINITY,
    F32_NAN,
    F32_SIGN,
    F32_SMALLEST_NORMAL,
    F64,
    U32,
    as_f32,
    f32,
    f32_bits,
    f64,
    i64,
    u32,
)
from .rounding import exact_fma, round_to_odd, two_sum

FLUSH_LIMIT = f64(2.0**-126 * (1 - 2.0**-25))
"""``.ftz`` flushes a result whose exact magnitude is below this: tiny after rounding to 24 bits with
unbounded exponent. (0x00800000 x 0x3f7fffff gives 0, although it rounds to the subnormal range's upper
neighbour.)"""

INTEGRAL_ROUNDING = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
"""The roundings to an integral value, by PTX modifier."""

_MIDPOINT = np.iinfo(np.int64).min
_FMA_BLOCK_ELEMS = 16384


def flush(bits: U32) -> U32:
    """Subnormals replaced by zero of the same sign."""
    return np.where((bits & F32_INFINITY) == 0, bits & F32_SIGN, bits)


def saturate(bits: U32) -> U32:
    """``.sat``: clamped to [0, 1]; NaN and -0 give +0."""
    values = as_f32(bits)
    one = f32(1)
    return cast(U32, np.where(values > 0, np.minimum(values, one), f32(0)).astype(f32).view(u32))


def add(a: U32, b: U32) -> U32:
    return f32_bits(as_f32(a) + as_f32(b))


def sub(a: U32, b: U32) -> U32:
    return f32_bits(as_f32(a) - as_f32(b))


def mul(a: U32, b: U32) -> U32:
    return f32_bits(as_f32(a) * as_f32(b))


def div(a: U32, b: U32) -> U32:
    """``div.rn.f32``: correctly rounded quotient."""
    return f32_bits(as_f32(a) / as_f32(b))


def rcp(a: U32) -> U32:
    """``rcp.rn.f32``."""
    return f32_bits(f32(1) / as_f32(a))


def sqrt(a: U32) -> U32:
    """``sqrt.rn.f32``."""
    return f32_bits(np.sqrt(as_f32(a)))


def add_ftz(a: U32, b: U32) -> U32:
    # A sum of two normal numbers that lands in the subnormal range is exact, so the rounded sum tells.
    return flush(add(flush(a), flush(b)))


def sub_ftz(a: U32, b: U32) -> U32:
    return flush(sub(flush(a), flush(b)))


def _flush_result(bits: U32, exact: F64) -> U32:
    """Flush where the magnitude of the exact result (or a round-to-odd stand-in) is below the limit."""
    return np.where(np.abs(exact) < FLUSH_LIMIT, bits & F32_SIGN, bits)


def mul_ftz(a: U32, b: U32) -> U32:
    a, b = flush(a), flush(b)
    return _flush_result(mul(a, b), as_f32(a).astype(f64) * as_f32(b))


def div_ftz(a: U32, b: U32) -> U32:
    # The f64 quotient decides the flush: no quotient of 24-bit numbers lies within 2^-49 (relative) of the
    # limit.
    a, b = flush(a), flush(b)
    return _flush_result(div(a, b), as_f32(a).astype(f64) / as_f32(b))


def rcp_ftz(a: U32) -> U32:
    return div_ftz(np.array([0x3F800000], u32), a)


def sqrt_ftz(a: U32) -> U32:
    return sqrt(flush(a))


def fma(a: U32, b: U32, c: U32) -> U32:
    """``fma.rn.f32``: a * b + c rounded once.

    The product of two f32 is exact in f64, so rounding the f64 sum to f32 is right except where that sum is
    itself rounded and (1) lies exactly midway between two f32, or (2) rounds into the subnormal range, whose
    midpoints lie at other bits. Both are detected by cheap reductions over the whole array and repaired by
    round-to-odd.
    """
    elems = max(a.size, b.size, c.size)
    if elems <= _FMA_BLOCK_ELEMS:
        return _fma_block(a, b, c)
    # Larger temporaries than these come from fresh pages and leave the cache.
    out = np.empty(elems, u32)
    for start in range(0, elems, _FMA_BLOCK_ELEMS):
        part = slice(start, start + _FMA_BLOCK_ELEMS)
        out[part] = _fma_block(*(v if v.size == 1 else v[part] for v in (a, b, c)))
    return out


def _fma_block(a: U32, b: U32, c: U32) -> U32:
    addend = as_f32(c)
    product: F64 = np.multiply(as_f32(a), as_f32(b), dtype=f64)
    total: F64 = product + addend
    result: F32 = total.astype(f32)
    # The low 29 bits are those f32 lacks: 1 followed by zeros is a midpoint, and shifted up the least int64.
    low_bits = np.left_shift(total.view(i64), 35)
    midpoint_seen = np.minimum.reduce(low_bits, axis=None) == _MIDPOINT
    # A minimum is NaN if anything is, so one comparison asks for NaN, zero and subnormal results together.
    all_normal = np.minimum.reduce(np.abs(result), axis=None) > F32_SMALLEST_NORMAL
    if all_normal and not midpoint_seen:
        return cast(U32, result.view(u32))
    doubtful = low_bits == _MIDPOINT
    if not all_normal:
        doubtful |= (np.abs(total) < F32_SMALLEST_NORMAL) & (total != 0)
    at = np.flatnonzero(doubtful)
    if at.size:
        parts = (np.broadcast_to(part, total.shape)[at] for part in (product, addend.astype(f64)))
        exact_total, error = two_sum(*parts)
        if error.any():  # where the f64 sum was exact, its one rounding to f32 was right
            result[at] = round_to_odd(exact_total, error).astype(f32)
    return f32_bits(result)


def fma_ftz(a: U32, b: U32, c: U32) -> U32:
    a, b, c = flush(a), flush(b), flush(c)
    result = fma(a, b, c)
    if not np.abs(as_f32(result)).min() > F32_SMALLEST_NORMAL:
        result = _flush_result(result, exact_fma(a, b, c))
    return result


def fma_sat(a: U32, b: U32, c: U32) -> U32:
    return saturate(fma(a, b, c))


def add_sat(a: U32, b: U32) -> U32:
    return saturate(add(a, b))


def sub_sat(a: U32, b: U32) -> U32:
    return saturate(sub(a, b))


def mul_sat(a: U32, b: U32) -> U32:
    return saturate(mul(a, b))


def _zeros_or_nan(values: F32) -> bool:
    """Whether an array of min or max results holds a NaN or a zero, where NumPy and the hardware may
    differ."""
    return bool(values.size) and not np.abs(values).min() > 0


def minimum(a: U32, b: U32) -> U32:
    """``min.f32``: a NaN operand is dropped; -0 is below +0 in both operand orders."""
    result = np.fmin(as_f32(a), as_f32(b))
    bits = cast(U32, result.view(u32))
    if _zeros_or_nan(result):
        both_zero = (as_f32(a) == 0) & (as_f32(b) == 0)
        return f32_bits(np.where(both_zero, a | b, bits).view(f32))
    return bits


def maximum(a: U32, b: U32) -> U32:
    """``max.f32``: a NaN operand is dropped; -0 is below +0 in both operand orders."""
    result = np.fmax(as_f32(a), as_f32(b))
    bits = cast(U32, result.view(u32))
    if _zeros_or_nan(result):
        both_zero = (as_f32(a) == 0) & (as_f32(b) == 0)
        return f32_bits(np.where(both_zero, a & b, bits).view(f32))
    return bits


def _nan_if_either(a: U32, b: U32, bits: U32) -> U32:
    return np.where(np.isnan(as_f32(a)) | np.isnan(as_f32(b)), F32_NAN, bits)


def minimum_nan(a: U32, b: U32) -> U32:
    """``min.NaN.f32``: a NaN operand gives the one NaN."""
    return _nan_if_either(a, b, minimum(a, b))


def maximum_nan(a: U32, b: U32) -> U32:
    """``max.NaN.f32``."""
    return _nan_if_either(a, b, maximum(a, b))


def minimum_ftz(a: U32, b: U32) -> U32:
    return minimum(flush(a), flush(b))


def maximum_ftz(a: U32, b: U32) -> U32:
    return maximum(flush(a), flush(b))


def neg(a: U32) -> U32:
    """``neg.f32``: the sign flipped; a NaN becomes the one NaN."""
    return f32_bits(cast(F32, (a ^ F32_SIGN).view(f32)))


def absolute(a: U32) -> U32:
    """``abs.f32``: the sign cleared; a NaN becomes the one NaN."""
    return f32_bits(cast(F32, (a & ~F32_SIGN).view(f32)))


def neg_ftz(a: U32) -> U32:
    return neg(flush(a))


def absolute_ftz(a: U32) -> U32:
    return absolute(flush(a))


def copysign(a: U32, b: U32) -> U32:
    """``copysign.f32 d, a, b``: the sign of a on the magnitude of b; no NaN is changed."""
    return (a & F32_SIGN) | (b & ~F32_SIGN)


def integral(a: U32, mode: str) -> U32:
    """``cvt.rni.f32.f32`` and its kin: an integral f32, the sign of zero kept."""
    return f32_bits(INTEGRAL_ROUNDING[mode](as_f32(a)))


def integral_ftz(a: U32, mode: str) -> U32:
    """``cvt.rni.ftz.f32.f32``."""
    return integral(flush(a), mode)
