"""bf16 and f16 arithmetic of the hardware, scalar and two to a register (``.bf16x2``, ``.f16x2``).

Rules recorded from an NVIDIA H200, driver 580.159.04, 29 Nov 2026 (packed forms): every operation is exact
and rounded once to nearest even, subnormals are kept, a NaN result is 0x7fff; min and max drop a NaN operand
and order -0 below +0.

Scalar functions take and return ``uint16`` bits of any shape; ``packed`` lifts them to ``uint32`` registers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias, cast

import numpy as np

from .bits import F32, F64, U16, U32, Predicate, f32, f64, i16, u16, u32
from .conversions import bf16_from_f32, relu16
from .numerics import INTEGRAL_ROUNDING
from .rounding import round_to_odd, to_zero, two_sum

Format: TypeAlias = Literal["bf16", "f16"]

NAN = u16(0x7FFF)
_SIGN = u16(0x8000)
_INFINITY = {"bf16": u16(0x7F80), "f16": u16(0x7C00)}


def packed(function: Callable[..., U16]) -> Callable[..., U32]:
    """The function applied to both halves of 32-bit registers."""

    def on_registers(*registers: U32) -> U32:
        halves = [np.ascontiguousarray(register).view(u16).reshape(-1, 2) for register in registers]
        return cast(U32, np.ascontiguousarray(function(*halves)).view(u32).reshape(-1))

    return on_registers


def as_float32(a: U16, form: Format) -> F32:
    """Exact float32 image."""
    if form == "f16":
        return a.view(np.float16).astype(f32)
    return cast(F32, (a.astype(u32) << u32(16)).view(f32))


def is_nan(a: U16, form: Format) -> Predicate:
    return (a & ~_SIGN) > _INFINITY[form]


def narrow(exact: F64, form: Format) -> U16:
    """One rounding to nearest even of a round-to-odd or exact f64."""
    if form == "f16":
        halves = exact.astype(np.float16).view(u16)
        return np.where(np.isnan(exact), NAN, halves)
    cut = to_zero(exact)
    inexact = (cut.view(f32) != exact) & np.isfinite(exact)
    # The last f32 bit is made odd where bits were cut, so that rounding twice is safe.
    return bf16_from_f32(cut | inexact)


def add(a: U16, b: U16, form: Format) -> U16:
    return narrow(round_to_odd(*two_sum(_as_f64(a, form), _as_f64(b, form))), form)


def sub(a: U16, b: U16, form: Format) -> U16:
    return narrow(round_to_odd(*two_sum(_as_f64(a, form), -_as_f64(b, form))), form)


def mul(a: U16, b: U16, form: Format) -> U16:
    return narrow(_as_f64(a, form) * _as_f64(b, form), form)


def fma(a: U16, b: U16, c: U16, form: Format) -> U16:
    product = _as_f64(a, form) * _as_f64(b, form)
    return narrow(round_to_odd(*two_sum(product, _as_f64(c, form))), form)


def fma_relu(a: U16, b: U16, c: U16, form: Format) -> U16:
    return relu16(fma(a, b, c, form))


def _as_f64(a: U16, form: Format) -> F64:
    return as_float32(a, form).astype(f64)


def _order(a: U16) -> np.ndarray[tuple[int, ...], np.dtype[np.int16]]:
    """Integers in the order of the values, -0 below +0."""
    return (a ^ np.where(a >> u16(15), u16(0x7FFF), u16(0))).view(i16)


def _select(a: U16, b: U16, take_a: Predicate, form: Format, keep_nan: bool) -> U16:
    a_nan, b_nan = is_nan(a, form), is_nan(b, form)
    picked = np.where(b_nan | (take_a & ~a_nan), a, b)
    return np.where((a_nan | b_nan) if keep_nan else (a_nan & b_nan), NAN, picked)


def minimum(a: U16, b: U16, form: Format, keep_nan: bool = False) -> U16:
    """keep_nan: ``.NaN``, a NaN operand gives NaN."""
    return _select(a, b, _order(a) <= _order(b), form, keep_nan)


def maximum(a: U16, b: U16, form: Format, keep_nan: bool = False) -> U16:
    return _select(a, b, _order(a) >= _order(b), form, keep_nan)


def neg(a: U16, form: Format) -> U16:
    return np.where(is_nan(a, form), NAN, a ^ _SIGN)


def absolute(a: U16, form: Format) -> U16:
    return np.where(is_nan(a, form), NAN, a & ~_SIGN)


def saturate(a: U16, form: Format) -> U16:
    """``.sat``: clamped to [0, 1]; NaN and -0 give +0."""
    values = as_float32(a, form)
    one = u16(0x3C00) if form == "f16" else u16(0x3F80)
    return np.where(values >= 1, one, np.where(values > 0, a, u16(0)))


def integral(a: U16, mode: str, form: Format) -> U16:
    """``cvt.rni.f16.f16`` and its kin: an integral value, the sign of zero kept."""
    return narrow(INTEGRAL_ROUNDING[mode](_as_f64(a, form)), form)
