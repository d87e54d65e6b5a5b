"""The readable form of the ``mma.sync`` / ``wgmma`` model (see ``mma``), in integers, for every input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from .bits import F32_NAN, I64, U16, U32, Bits, Predicate, f64, i64, u16, u32
from .packed16 import Format

_FRACTION_BITS = 25
_NO_EXPONENT = -(10**6)
_LAYOUT = {"bf16": (7, 8), "f16": (10, 5), "f32": (23, 8), "tf32": (23, 8)}
"""Mantissa and exponent bits."""


@dataclass(frozen=True)
class _Decoded:
    """(-1)^negative * significand * 2^(exponent - mantissa_bits); exponent is that of the leading bit of a
    normal."""

    negative: Predicate
    significand: I64
    exponent: I64
    infinite: Predicate
    nan: Predicate

    def expand(self, axis: int) -> _Decoded:
        return _Decoded(
            np.expand_dims(self.negative, axis),
            np.expand_dims(self.significand, axis),
            np.expand_dims(self.exponent, axis),
            np.expand_dims(self.infinite, axis),
            np.expand_dims(self.nan, axis),
        )


def _decode(bits: Bits, layout: str) -> _Decoded:
    mantissa_bits, exponent_bits = _LAYOUT[layout]
    top, bias = 2**exponent_bits - 1, 2 ** (exponent_bits - 1) - 1
    wide = bits.astype(i64)
    biased, mantissa = (wide >> mantissa_bits) & top, wide & (2**mantissa_bits - 1)
    subnormal, special = biased == 0, biased == top
    return _Decoded(
        negative=(wide >> (mantissa_bits + exponent_bits)) != 0,
        significand=np.where(subnormal, mantissa, mantissa | 2**mantissa_bits),
        exponent=np.where(subnormal, 1, biased) - bias,
        infinite=special & (mantissa == 0),
        nan=special & (mantissa != 0),
    )


def _scaled(significand: I64, shift: I64) -> I64:
    """significand * 2^shift, cut toward zero."""
    left, right = np.clip(shift, 0, 40), np.clip(-shift, 0, 62)
    return np.where(shift >= 0, significand << left, significand >> right)


def mma_reference(
    a: Bits, b: Bits, c: Bits, form: Format | Literal["tf32"], accumulator: Literal["f32", "f16"] = "f32"
) -> Bits:
    """D = A B + C for n tiles.

    a: ``[n, M, K]`` and b: ``[n, K, N]`` uint16 bits (uint32 of tf32), c: ``[n, M, N]`` uint32 bits of f32, or uint16
    of f16, into which the exact sum is rounded to nearest even; returns d like c.
    """
    left, right = _decode(a, form).expand(3), _decode(b, form).expand(1)  # both broadcast to [n, M, 16, N]
    base = _decode(c, accumulator)
    c_bits = _LAYOUT[accumulator][0]
    mantissa_bits = _LAYOUT[form][0]
    negative = left.negative ^ right.negative
    product = left.significand * right.significand
    exponent = left.exponent + right.exponent

    largest = np.where(product != 0, exponent, _NO_EXPONENT).max(2)
    largest = np.maximum(largest, np.where(base.significand != 0, base.exponent, _NO_EXPONENT))
    unit = largest - _FRACTION_BITS  # exponent of the last bit kept of every addend
    addends = _scaled(product, exponent - 2 * mantissa_bits - unit[:, :, None])
    total = np.where(negative, -addends, addends).sum(2)
    c_addend = _scaled(base.significand, base.exponent - c_bits - unit)
    total = total + np.where(base.negative, -c_addend, c_addend)

    plus = (left.infinite | right.infinite) & ~negative
    minus = (left.infinite | right.infinite) & negative
    plus_infinity = plus.any(2) | (base.infinite & ~base.negative)
    minus_infinity = minus.any(2) | (base.infinite & base.negative)
    zero_times_infinity = (left.infinite & (right.significand == 0)) | (right.infinite & (left.significand == 0))
    nan = (left.nan | right.nan | zero_times_infinity).any(2) | base.nan | (plus_infinity & minus_infinity)
    if accumulator == "f16":
        result = np.where(plus_infinity, u16(0x7C00), np.where(minus_infinity, u16(0xFC00), _pack_half(total, unit)))
        return np.where(nan, u16(0x7FFF), result)
    result = np.where(plus_infinity, u32(0x7F800000), np.where(minus_infinity, u32(0xFF800000), _pack(total, unit)))
    return np.where(nan, F32_NAN, result)


def _pack_half(total: I64, unit: I64) -> U16:
    """total * 2^unit rounded to nearest even to f16; zero is +0."""
    halves = np.ldexp(total.astype(f64), np.maximum(unit, -1000).astype(np.int32)).astype(np.float16)
    return np.where(halves == 0, u16(0), halves.view(u16))


def _pack(total: I64, unit: I64) -> U32:
    """total * 2^unit cut toward zero to f32; zero is +0, overflow infinity."""
    magnitude = np.abs(total)  # below 2^32: exact in f64
    leading = np.frexp(magnitude.astype(f64))[1].astype(i64) - 1 + unit
    exponent = np.maximum(leading, -126)
    significand = _scaled(magnitude, unit - (exponent - 23))
    normal = ((exponent + 127) << 23) + (significand - 2**23)
    packed = np.minimum(np.where(significand >= 2**23, normal, significand), 0x7F800000)
    packed = np.where(magnitude != 0, packed, 0)
    return np.where(total < 0, packed | 0x80000000, packed).astype(u32)
