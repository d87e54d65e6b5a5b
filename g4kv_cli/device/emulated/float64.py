"""f64 arithmetic of the hardware. NumPy's float64 operations are IEEE; this module adds NaN results and fma.

All functions take and return raw bits (``uint64``, shapes ``(1,)`` or ``(n,)``) unless they say otherwise.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import cast

import numpy as np

from g4kv_cli.device.emulated.bits import F32_NAN, F64, U32, U64, Predicate, f32, f64, u32, u64
from g4kv_cli.device.emulated.numerics import INTEGRAL_ROUNDING, flush
from g4kv_cli.device.emulated.rounding import DIRECTIONS, round_to_odd, two_sum

NAN = u64(0x7FFFFFFFFFFFFFFF)
_SIGN = u64(0x8000000000000000)
_SPLITTER = f64(2.0**27 + 1)


def as_f64(bits: U64) -> F64:
    """The same bits read as float64."""
    return cast(F64, bits.view(f64))


def f64_bits(values: F64) -> U64:
    """The raw bits of float64 values; every NaN becomes the hardware's one NaN."""
    return np.where(np.isnan(values), NAN, values.view(u64))


def add(a: U64, b: U64) -> U64:
    return f64_bits(as_f64(a) + as_f64(b))


def sub(a: U64, b: U64) -> U64:
    return f64_bits(as_f64(a) - as_f64(b))


def mul(a: U64, b: U64) -> U64:
    return f64_bits(as_f64(a) * as_f64(b))


def div(a: U64, b: U64) -> U64:
    """``div.rn.f64``."""
    return f64_bits(as_f64(a) / as_f64(b))


def rcp(a: U64) -> U64:
    """``rcp.rn.f64``."""
    return f64_bits(f64(1) / as_f64(a))


def sqrt(a: U64) -> U64:
    """``sqrt.rn.f64``."""
    return f64_bits(np.sqrt(as_f64(a)))


def minimum(a: U64, b: U64) -> U64:
    """``min.f64``: a NaN operand is dropped; -0 is below +0."""
    both_zero = (as_f64(a) == 0) & (as_f64(b) == 0)
    return f64_bits(np.where(both_zero, a | b, np.fmin(as_f64(a), as_f64(b)).view(u64)).view(f64))


def maximum(a: U64, b: U64) -> U64:
    """``max.f64``: a NaN operand is dropped; -0 is below +0."""
    both_zero = (as_f64(a) == 0) & (as_f64(b) == 0)
    return f64_bits(np.where(both_zero, a & b, np.fmax(as_f64(a), as_f64(b)).view(u64)).view(f64))


def neg(a: U64) -> U64:
    return a ^ _SIGN


def absolute(a: U64) -> U64:
    return a & ~_SIGN


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
    plain = ~np.isfinite(x) | ~np.isfinite(y) | ~np.isfinite(z) | (x == 0) | (y == 0)
    result = np.where(plain, x * y + z, result)
    for index in np.flatnonzero(~safe & ~plain):
        result[index] = _exact_fma(float(x[index]), float(y[index]), float(z[index]))
    return f64_bits(result)


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
    values = as_f64(a)
    return np.where(np.isnan(values), F32_NAN, values.astype(f32).view(u32))


def f32_from_f64_directed(a: U64, mode: str) -> U32:
    """``cvt.rz.f32.f64`` and its kin."""
    return DIRECTIONS[mode](as_f64(a))


def f32_from_f64_ftz(a: U64) -> U32:
    """``cvt.rn.ftz.f32.f64``: a subnormal f32 result becomes zero."""
    return flush(f32_from_f64(a))


def integral(a: U64, mode: str) -> U64:
    """``cvt.rni.f64.f64`` and its kin: an integral f64, the sign of zero kept."""
    return f64_bits(INTEGRAL_ROUNDING[mode](as_f64(a)))
