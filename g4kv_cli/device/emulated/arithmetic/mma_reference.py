"""The readable form of the ``mma.sync`` / ``wgmma`` model (see ``mma``), in integers, for every input.

It also covers 8-bit floats as wgmma adds them (see ``mma_forms``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from .bits import F32_NAN, I64, U16, U32, Bits, Predicate, f64, i64, u16, u32
from .packed16 import Format

Element = Format | Literal["tf32", "e4m3", "e5m2"]

_NO_EXPONENT = -(10**6)
_LAYOUT = {"bf16": (7, 8), "f16": (10, 5), "f32": (23, 8), "tf32": (23, 8), "e4m3": (3, 4), "e5m2": (2, 5)}
"""Mantissa and exponent bits."""
_PRODUCTS_PER_PART = 1 << 20
"""So that the arrays of many large tiles stay of some MiB."""


@dataclass(frozen=True)
class Precision:
    """What a sum keeps: addends are cut to multiples of 2^(E - ``fraction_bits``), an f32 result to ``result_bits`` of
    mantissa; E is the largest exponent."""

    fraction_bits: int = 25
    result_bits: int = 23


FULL = Precision()


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
        infinite=special & (mantissa == 0) & (layout != "e4m3"),
        nan=special & (mantissa == 7 if layout == "e4m3" else mantissa != 0),
    )


def _scaled(significand: I64, shift: I64) -> I64:
    """significand * 2^shift, cut toward zero."""
    left, right = np.clip(shift, 0, 40), np.clip(-shift, 0, 62)
    return np.where(shift >= 0, significand << left, significand >> right)


def mma_reference(
    a: Bits,
    b: Bits,
    c: Bits,
    form: Element | tuple[Element, Element],
    accumulator: Literal["f32", "f16"] = "f32",
    precision: Precision = FULL,
) -> Bits:
    """D = A B + C for n tiles.

    a: ``[n, M, K]`` and b: ``[n, K, N]`` bits of ``form`` (a pair: that of A and that of B) in unsigned integers of
    its size, c: ``[n, M, N]`` uint32 bits of f32, or uint16 of f16, into which the exact sum is rounded to nearest
    even; returns d like c.
    """
    forms = form if isinstance(form, tuple) else (form, form)
    step = max(1, _PRODUCTS_PER_PART // (a.shape[1] * b.shape[1] * b.shape[2]))
    d: Bits = np.empty_like(c)
    for start in range(0, len(c), step):
        tiles = slice(start, start + step)
        d[tiles] = _sum(a[tiles], b[tiles], c[tiles], forms, accumulator, precision)
    return d


def _sum(
    a: Bits, b: Bits, c: Bits, forms: tuple[Element, Element], accumulator: Literal["f32", "f16"], precision: Precision
) -> Bits:
    left, right = _decode(a, forms[0]).expand(3), _decode(b, forms[1]).expand(1)  # both broadcast to [n, M, K, N]
    base = _decode(c, accumulator)
    c_bits = _LAYOUT[accumulator][0]
    mantissa_bits = _LAYOUT[forms[0]][0] + _LAYOUT[forms[1]][0]
    negative = left.negative ^ right.negative
    product = left.significand * right.significand
    exponent = left.exponent + right.exponent

    largest = np.where(product != 0, exponent, _NO_EXPONENT).max(2)
    largest = np.maximum(largest, np.where(base.significand != 0, base.exponent, _NO_EXPONENT))
    unit = largest - precision.fraction_bits  # exponent of the last bit kept of every addend
    addends = _scaled(product, exponent - mantissa_bits - unit[:, :, None])
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
    finite = _pack(total, unit) & ~u32((1 << (23 - precision.result_bits)) - 1)
    result = np.where(plus_infinity, u32(0x7F800000), np.where(minus_infinity, u32(0xFF800000), finite))
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
