"""f64 arithmetic of the hardware. NumPy's float64 operations are IEEE; this module adds NaN results and fma.

Unlike f32, f64 keeps NaN payloads. Recorded from an NVIDIA H200, driver 580.159.04, 29 Nov 2026: a NaN
operand comes out with its quiet bit set; of several, the second before the third before the first (div: the
first before the second); an invalid operation gives 0xfff8000000000000; neg and abs leave a NaN's sign alone.

All functions take and return raw bits (``uint64``, shapes ``(1,)`` or ``(n,)``) unless they say otherwise.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import cast

import numpy as np

from .bits import F64, U32, U64, Predicate, f32, f64, u32, u64
from .numerics import INTEGRAL_ROUNDING
from .rounding import DIRECTIONS, is_tiny, round_to_odd, two_sum

INVALID_NAN = u64(0xFFF8000000000000)
_QUIET = u64(0x0008000000000000)
_SIGN = u64(0x8000000000000000)
_SPLITTER = f64(2.0**27 + 1)


def as_f64(bits: U64) -> F64:
    """The same bits read as float64."""
    return cast(F64, bits.view(f64))


def _result(values: F64, *operands: U64) -> U64:
    """Raw bits; where the result is NaN, that of the last NaN operand (so the order given is that of
    priority), quiet, or the NaN of invalid operations."""
    bits = cast(U64, values.view(u64))
    nan = np.isnan(values)
    if not nan.any():
        return bits
    chosen: U64 = np.full(1, INVALID_NAN)
    for operand in operands:
        chosen = np.where(np.isnan(as_f64(operand)), operand | _QUIET, chosen)
    return np.where(nan, chosen, bits)


def add(a: U64, b: U64) -> U64:
    return _result(as_f64(a) + as_f64(b), a, b)


def sub(a: U64, b: U64) -> U64:
    return _result(as_f64(a) - as_f64(b), a, b)


def mul(a: U64, b: U64) -> U64:
    return _result(as_f64(a) * as_f64(b), a, b)


def div(a: U64, b: U64) -> U64:
    """``div.rn.f64``."""
    return _result(as_f64(a) / as_f64(b), b, a)


def rcp(a: U64) -> U64:
    """``rcp.rn.f64``."""
    return _result(f64(1) / as_f64(a), a)


def sqrt(a: U64) -> U64:
    """``sqrt.rn.f64``."""
    return _result(np.sqrt(as_f64(a)), a)


def minimum(a: U64, b: U64) -> U64:
    """``min.f64``: a NaN operand is dropped; -0 is below +0."""
    both_zero = (as_f64(a) == 0) & (as_f64(b) == 0)
    return _result(np.where(both_zero, a | b, np.fmin(as_f64(a), as_f64(b)).view(u64)).view(f64), a, b)


def maximum(a: U64, b: U64) -> U64:
    """``max.f64``: a NaN operand is dropped; -0 is below +0."""
    both_zero = (as_f64(a) == 0) & (as_f64(b) == 0)
    return _result(np.where(both_zero, a & b, np.fmax(as_f64(a), as_f64(b)).view(u64)).view(f64), a, b)


def neg(a: U64) -> U64:
    return np.where(np.isnan(as_f64(a)), a | _QUIET, a ^ _SIGN)


def absolute(a: U64) -> U64:
    return np.where(np.isnan(as_f64(a)), a | _QUIET, a & ~_SIGN)


def copysign(a: U64, b: U64) -> U64:
    """``copysign.f64``: the magnitude of b with the sign of a."""
    return (a & _SIGN) | (b & ~_SIGN)


def _two_product(a: F64, b: F64) -> tuple[F64, F64]:
    """Dekker's product with Veltkamp's split: rounded product and exact error, away from overflow and
    underflow."""
    a_high = a * _SPLITTER - (a * _SPLITTER - a)
    b_high = b * _SPLITTER - (b * _SPLITTER - b)
    a_low, b_low = a - a_high, b - b_high
    product = a * b
    return product, a_low * b_low - (((product - a_high * b_high) - a_low * b_high) - a_high * b_low)


def _within(values: F64, least: float, greatest: float) -> Predicate:
    size = np.abs(values)
    return (size > least) & (size < greatest)


def fma(a: U64, b: U64, c: U64) -> U64:
    """``fma.rn.f64``: a * b + c rounded once.

    Boldo and Melquiond's sum of three (2008): the two smaller parts are added with rounding to odd. Operands
    near the ends of the exponent range go one by one through exact rational arithmetic.
    """
    x, y, z = np.broadcast_arrays(as_f64(a), as_f64(b), as_f64(c))
    high, low = _two_product(x, y)
    first, first_error = two_sum(z, low)
    total, total_error = two_sum(high, first)
    result = total + round_to_odd(*two_sum(total_error, first_error))
    safe = _within(x, 2.0**-400, 2.0**400) & _within(y, 2.0**-400, 2.0**400)
    safe &= _within(z, 2.0**-900, 2.0**1000) | (z == 0)
    plain_product = ~np.isfinite(x) | ~np.isfinite(y) | (x == 0) | (y == 0)
    result = np.where(plain_product, x * y + z, np.where(np.isfinite(z), result, z))
    for index in np.flatnonzero(~safe & ~plain_product & np.isfinite(z)):
        result[index] = _exact_fma(float(x[index]), float(y[index]), float(z[index]))
    return _result(result, a, c, b)


def _exact_fma(a: float, b: float, c: float) -> float:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        # A sum of equal zeros keeps their sign; exact cancellation gives +0.
        product_sign = math.copysign(1, a) * math.copysign(1, b)
        return math.copysign(0.0, c) if c == 0 and product_sign == math.copysign(1, c) else 0.0
    try:
        return exact.numerator / exact.denominator  # correctly rounded by Python, subnormals too
    except OverflowError:
        return math.inf if exact > 0 else -math.inf


def f32_from_f64(a: U64) -> U32:
    """``cvt.rn.f32.f64``."""
    return _keep_payload(a, as_f64(a).astype(f32).view(u32))


def f32_from_f64_directed(a: U64, mode: str) -> U32:
    """``cvt.rz.f32.f64`` and its kin."""
    return _keep_payload(a, DIRECTIONS[mode](as_f64(a)))


def f32_from_f64_ftz(a: U64, mode: str) -> U32:
    """``cvt.rn.ftz.f32.f64`` and its kin: the flush point is that of ``add.ftz``."""
    bits = f32_from_f64(a) if mode == "rn" else f32_from_f64_directed(a, mode)
    return np.where(is_tiny(as_f64(a), mode), bits & u32(0x80000000), bits)


def _keep_payload(a: U64, bits: U32) -> U32:
    """A NaN keeps its sign and the upper bits of its payload, and is made quiet."""
    sign = (a >> u64(32)).astype(u32) & u32(0x80000000)
    payload = (a >> u64(29)).astype(u32) & u32(0x3FFFFF)
    return np.where(np.isnan(as_f64(a)), sign | u32(0x7FC00000) | payload, bits)


def integral(a: U64, mode: str) -> U64:
    """``cvt.rni.f64.f64`` and its kin: an integral f64, the sign of zero kept."""
    return _result(INTEGRAL_ROUNDING[mode](as_f64(a)), a)
