"""Exact results as float64 with round-to-odd, and directed rounding of them to float32 (``.rz``, ``.rm``,
``.rp``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np

from .bits import F32, F32_SIGN, F64, I64, U32, Predicate, as_f32, f32, f32_bits, f64, i64


def two_sum(a: F64, b: F64) -> tuple[F64, F64]:
    """Knuth's TwoSum: the rounded f64 sum and its exact error."""
    total = a + b
    b_part = total - a
    error = (a - (total - b_part)) + (b - b_part)
    return total, error


def round_to_odd(total: F64, error: F64) -> F64:
    """The f64 sum with its last bit made odd where it was inexact.

    Rounding such a value to any format at least two bits narrower equals rounding the exact sum (Boldo and
    Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd", 2008).
    """
    bits = cast(I64, total.view(i64))
    inexact = (error != 0) & np.isfinite(error) & ((bits & 1) == 0)
    step = np.where((error > 0) == (total > 0), 1, -1)
    return cast(F64, (bits + np.where(inexact, step, 0)).view(f64))


def exact_add(a: U32, b: U32) -> F64:
    """a + b as a round-to-odd f64."""
    return round_to_odd(*two_sum(as_f32(a).astype(f64), as_f32(b).astype(f64)))


def exact_mul(a: U32, b: U32) -> F64:
    """a * b, which f64 holds exactly."""
    return as_f32(a).astype(f64) * as_f32(b)


def exact_fma(a: U32, b: U32, c: U32) -> F64:
    """a * b + c as a round-to-odd f64: right input for one rounding to f32 and for comparison with f32
    values."""
    return round_to_odd(*two_sum(exact_mul(a, b), as_f32(c).astype(f64)))


def to_zero(exact: F64) -> U32:
    """``.rz``: cut toward zero; a finite overflow gives the largest finite number."""
    nearest: F32 = exact.astype(f32)
    over = (np.abs(nearest) > np.abs(exact)) & np.isfinite(exact)
    return f32_bits(np.where(over, np.nextafter(nearest, f32(0)), nearest))


def down(exact: F64) -> U32:
    """``.rm``: toward minus infinity. The sign of an exactly zero sum is the caller's affair."""
    nearest: F32 = exact.astype(f32)
    over = (nearest > exact) & np.isfinite(exact)
    return f32_bits(np.where(over, np.nextafter(nearest, f32(-np.inf)), nearest))


def up(exact: F64) -> U32:
    """``.rp``: toward plus infinity."""
    nearest: F32 = exact.astype(f32)
    under = (nearest < exact) & np.isfinite(exact)
    return f32_bits(np.where(under, np.nextafter(nearest, f32(np.inf)), nearest))


_SCALE = f64(2.0**64)


def is_tiny(exact: F64, mode: str) -> Predicate:
    """Whether a result is below every normal number even when rounded with unbounded exponent, as ``.ftz`` asks."""
    scaled = exact * _SCALE
    rounded = f32_bits(scaled.astype(f32)) if mode == "rn" else DIRECTIONS[mode](scaled)
    return np.abs(as_f32(rounded)) < f32(2.0 ** (64 - 126))


DIRECTIONS: dict[str, Callable[[F64], U32]] = {"rz": to_zero, "rm": down, "rp": up}
"""The directed roundings to f32, by PTX modifier."""


def add(a: U32, b: U32, mode: str) -> U32:
    """``add.rz.f32`` and its kin."""
    exact = exact_add(a, b)
    both_plus_zero = (a == 0) & (b == 0)
    return _zero_sum(DIRECTIONS[mode](exact), exact, both_plus_zero, mode)


def sub(a: U32, b: U32, mode: str) -> U32:
    """``sub.rz.f32`` and its kin."""
    return add(a, b ^ F32_SIGN, mode)


def mul(a: U32, b: U32, mode: str) -> U32:
    """``mul.rz.f32`` and its kin."""
    return DIRECTIONS[mode](exact_mul(a, b))


def fma(a: U32, b: U32, c: U32, mode: str) -> U32:
    """``fma.rz.f32`` and its kin."""
    exact, product = exact_fma(a, b, c), exact_mul(a, b)
    both_plus_zero = (product == 0) & ~np.signbit(product) & (c == 0)
    return _zero_sum(DIRECTIONS[mode](exact), exact, both_plus_zero, mode)


def _zero_sum(rounded: U32, exact: F64, both_plus_zero: Predicate, mode: str) -> U32:
    """Toward minus infinity an exactly zero sum is -0 unless both addends are +0."""
    if mode != "rm":
        return rounded
    return np.where((exact == 0) & ~both_plus_zero, F32_SIGN, rounded)
