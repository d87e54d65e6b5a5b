"""``mma.sync`` and ``wgmma`` with bf16 or f16 inputs and f32 accumulation, k = 16: the exact model.

Recorded from an NVIDIA H200, driver 580.159.04, 29 Nov 2026 (5.9 million outputs, 0 differ). One instruction
is one sum of 17 addends, the 16 exact products and C:

1. E is the largest of ea + eb over the non-zero products (exponents added, the product not normalised; a
   subnormal has the lowest exponent) and the exponent of C, if not zero.
2. Every addend is cut toward zero to a multiple of 2^(E - 25); the sum of these is exact.
3. The sum is cut toward zero to f32; subnormal results are kept, overflow gives infinity, a zero is always
   +0.
4. NaN anywhere, inf * 0 or inf - inf give 0x7fffffff.

``mma`` does this in float32 and int32, which is exact while -100 <= E <= 100, and hands the few tiles
outside, or with infinities or NaN, to ``mma_reference``. m16n8k8 is m16n8k16 with zeros in the upper half of
k.
"""

from __future__ import annotations

from functools import cache
from typing import cast

import numpy as np
import numpy.typing as npt

from .bits import F32, U16, U32, Predicate, f32, f64, i16, i32, u16, u32, u64
from .mma_reference import mma_reference
from .packed16 import Format, as_float32

I16 = npt.NDArray[np.int16]

_FRACTION_BITS = 25
_EXPONENT_LIMIT = 100
_ZERO_EXPONENT = -4096
"""Exponent of a zero input: a sum of two exponents with it is below every other."""
_SPECIAL_EXPONENT = 1024
_OUTPUTS_PER_CHUNK = 16384
_PRODUCTS_PER_STEP = 65536
"""So that a step's arrays stay in the cache."""
_HALF_K = 8


def mma(a: U16, b: U16, c: U32, form: Format) -> U32:
    """D = A B + C for n tiles, as the hardware computes it.

    a: ``[n, M, 16]`` uint16 bits, b: ``[n, 16, N]`` uint16 bits, c: ``[n, M, N]`` uint32 bits of f32; returns
    d like c.
    """
    rows = _distinct_rows(a, c)
    if rows.sum() <= len(rows) * 3 // 4:
        # Padding: rows equal to the one above in A and C are so in D.
        return mma(a[:, rows], b, c[:, rows], form)[:, np.cumsum(rows) - 1]
    d = np.empty(c.shape, u32)
    chunk = max(1, _OUTPUTS_PER_CHUNK // (c.shape[1] * c.shape[2]))
    for start in range(0, len(c), chunk):
        tiles = slice(start, start + chunk)
        a_last = np.ascontiguousarray(a[tiles].transpose(2, 1, 0))
        b_last = np.ascontiguousarray(b[tiles].transpose(1, 2, 0))
        c_last = np.ascontiguousarray(c[tiles].transpose(1, 2, 0))
        d_last, outside = _mma_tiles_last(a_last, b_last, c_last, form)
        d[tiles] = d_last.transpose(2, 0, 1)
        if outside.any():
            at = start + np.flatnonzero(outside)
            d[at] = mma_reference(a[at], b[at], c[at], form)
    return d


def _distinct_rows(a: U16, c: U32) -> Predicate:
    """Which of the M rows differ from the row above them in some tile."""
    differs = np.zeros(a.shape[1], np.bool_)
    differs[:1] = True
    for values in (a, c):
        words = np.ascontiguousarray(values).view(u64).reshape(len(values), -1)
        each = words.shape[1] // a.shape[1]
        changed = np.bitwise_or.reduce(words[:, each:] ^ words[:, :-each], axis=0)
        differs[1:] |= changed.reshape(-1, each).any(1)
    return differs


def _mma_tiles_last(a: U16, b: U16, c: U32, form: Format) -> tuple[U32, Predicate]:
    """The sum with the tile index innermost: a ``[16, M, n]``, b ``[16, N, n]``, c and d ``[M, N, n]``.

    Also returns which tiles this arithmetic cannot do.
    """
    a_exponent, a_special = _exponents(a, form)
    b_exponent, b_special = _exponents(b, form)
    c_exponent, c_special = _c_exponents(c)
    depth = len(a)
    step = max(1, min(_HALF_K, _PRODUCTS_PER_STEP // max(c.size, 1)))
    largest = c_exponent
    for k in range(0, depth, step):
        part = slice(k, k + step)
        np.maximum(largest, _products_max(a_exponent[part], b_exponent[part]), out=largest)
    known = np.abs(largest) <= _EXPONENT_LIMIT
    known |= largest < 2 * _EXPONENT_LIMIT - 1000  # nothing but zeros
    outside = a_special | b_special | c_special | ~known.all((0, 1))

    exponent = np.clip(largest, -_EXPONENT_LIMIT, _EXPONENT_LIMIT).astype(i32)
    to_units = cast(F32, ((exponent * -1 + (_FRACTION_BITS + 127)) << 23).view(f32))
    total = (c.view(f32) * to_units).astype(i32).astype(f64)
    a_value, b_value = as_float32(a, form), as_float32(b, form)
    for half in range(0, depth, _HALF_K):
        # Half of k at a time: eight addends below 2^27 fit int32, sixteen might not.
        addends = np.zeros(c.shape, i32)
        for k in range(half, half + _HALF_K, step):
            part = slice(k, min(k + step, half + _HALF_K))
            products = a_value[part, :, None] * b_value[part, None]
            products *= to_units
            addends += products.astype(i32).sum(0, dtype=i32)  # the cast cuts toward zero
        total += addends
    # Cut toward zero to 24 bits: float64 has 29 more.
    total.view(u64)[...] &= ~u64(0x1FFFFFFF)
    total *= np.reciprocal(to_units)
    return cast(U32, total.astype(f32).view(u32)), outside


def _products_max(a_exponent: I16, b_exponent: I16) -> I16:
    return cast(I16, (a_exponent[:, :, None] + b_exponent[:, None]).max(0))


@cache
def _exponent_table(form: Format) -> I16:
    """Unbiased exponent of every 16-bit pattern; _SPECIAL_EXPONENT of an infinity or NaN."""
    mantissa_bits, top, bias = (7, 0xFF, 127) if form == "bf16" else (10, 0x1F, 15)
    values = np.arange(1 << 16, dtype=u16)
    biased = (values >> u16(mantissa_bits)) & u16(top)
    exponent = np.maximum(biased, u16(1)).view(i16) - i16(bias)
    exponent[(values & u16(0x7FFF)) == 0] = _ZERO_EXPONENT
    exponent[biased == top] = _SPECIAL_EXPONENT
    return cast(I16, exponent)


def _exponents(values: U16, form: Format) -> tuple[I16, Predicate]:
    """Unbiased exponents ``[16, X, n]`` of 16-bit inputs, and which tiles hold an infinity or NaN."""
    exponent = _exponent_table(form).take(values)
    return exponent, exponent.max((0, 1)) == _SPECIAL_EXPONENT


def _c_exponents(c: U32) -> tuple[I16, Predicate]:
    biased = ((c >> u32(23)) & u32(0xFF)).astype(i16)
    exponent = np.maximum(biased, i16(1)) - i16(127)
    exponent[(c & u32(0x7FFFFFFF)) == 0] = _ZERO_EXPONENT
    return exponent, (biased == 0xFF).any((0, 1))
