"""``mma.sync``, ``wmma.mma`` and ``wgmma`` of every type, exact: matrices of raw bits in and out.

Recorded from an NVIDIA H200, driver 580.159.04, 30 Nov 2026 (28,000 outputs a form, of wgmma 74,000; 0 differ):

* f16, bf16 and tf32 into f32, and f16 into f16: the sum of ``mma_reference``, tf32 without its lower 13 bits. wmma
  makes two steps of tf32 with k = 4 each.
* e4m3 and e5m2 of mma.sync: the chip widens them to f16 and multiplies twice, k = 0, 1, 4, 5, ... first, then 2, 3, 6,
  7, ..., the second onto the first; C is added at the end, rounded by itself.
* e4m3 and e5m2 of wgmma: the sum of ``mma_reference`` over all 32 products and C, with addends cut to multiples of
  2^(E - 13) in place of 2^(E - 25). An f32 result keeps 13 bits of mantissa (its last 10 are zero), an f16 one is the
  exact sum rounded to nearest even. No sum recorded was subnormal in f32.
* f64: a chain of fma, k ascending, that starts from C.
* integers: exact, cut to 32 bits or saturated (``.satfinite``); single bits: the count of ones of ``and`` or ``xor``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, cast

import numpy as np

from . import float64, numerics, packed16
from .bits import I64, U16, Bits, i64, u16, u32
from .conversions import f16x2_from_f8x2
from .mma import mma
from .mma_reference import Element, Precision, mma_reference
from .packed16 import Format

ELEMENT_BITS = {
    **dict.fromkeys(("f16", "bf16"), 16),
    **dict.fromkeys(("e4m3", "e5m2", "s8", "u8"), 8),
    **dict.fromkeys(("s4", "u4"), 4),
    **dict.fromkeys(("tf32", "f32", "s32"), 32),
    "b1": 1,
    "f64": 64,
}
_SMALL_FLOATS = ("e4m3", "e5m2")
_HARDWARE_K = 16
_OF_SMALL_FLOATS = Precision(fraction_bits=13, result_bits=13)


@dataclass(frozen=True)
class Form:
    """D = A B + C. ``a`` and ``b`` are element types, ``c`` that of C and D; ``combine`` is and or xor of single bits,
    ``step`` the k of each of several instructions, 0: one does it all. ``is_warpgroup`` is of wgmma."""

    a: str
    b: str
    c: str
    saturates: bool = False
    combine: str = ""
    step: int = 0
    is_warpgroup: bool = False


def multiply(form: Form, a: Bits, b: Bits, c: Bits) -> Bits:
    """a ``[n, M, K]``, b ``[n, K, N]``, c ``[n, M, N]``: unsigned arrays of the elements' raw bits, 4-bit and 1-bit
    ones in uint8. Returns d like c."""
    if form.step:
        whole = replace(form, step=0)
        for first in range(0, a.shape[2], form.step):
            part = slice(first, first + form.step)
            c = multiply(whole, a[:, :, part], b[:, part], c)
        return c
    if form.a == "f64":
        return _doubles(a, b, c)
    if form.c == "s32":
        return _integers(form, a, b, c)
    if form.a in _SMALL_FLOATS and form.is_warpgroup:
        types = cast(tuple[Element, Element], (form.a, form.b))
        return mma_reference(a, b, c, types, cast(Literal["f32", "f16"], form.c), _OF_SMALL_FLOATS)
    if form.a in _SMALL_FLOATS:
        return _small_floats(form, a, b, c)
    if form.a == "tf32":
        return mma_reference(a & ~u32(0x1FFF), b & ~u32(0x1FFF), c, "tf32")
    if form.c == "f16":
        return mma_reference(a, b, c, cast(Format, form.a), "f16")
    return mma(_padded(a, 2), _padded(b, 1), c, cast(Format, form.a))


def _padded(values: U16, axis: int) -> U16:
    """Zeros up to the k of the hardware's instruction."""
    missing = _HARDWARE_K - values.shape[axis]
    if not missing:
        return values
    widths = [(0, 0)] * 3
    widths[axis] = (0, missing)
    return np.pad(values, widths)


def _small_floats(form: Form, a: Bits, b: Bits, c: Bits) -> Bits:
    halves = [_widened(values, name) for values, name in ((a, form.a), (b, form.b))]
    k = np.arange(a.shape[2]) % 4
    total: Bits = np.zeros(c.shape, c.dtype)
    for chosen in (k < 2, k >= 2):
        part = Form("f16", "f16", form.c)
        total = multiply(part, _padded(halves[0][:, :, chosen], 2), _padded(halves[1][:, chosen], 1), total)
    if form.c == "f16":
        return packed16.add(total, c, "f16")
    return numerics.add(c.reshape(-1), total.reshape(-1)).reshape(c.shape)


def _widened(values: Bits, name: str) -> U16:
    return (f16x2_from_f8x2(values.reshape(-1).astype(u16), name) & u32(0xFFFF)).astype(u16).reshape(values.shape)


def _doubles(a: Bits, b: Bits, c: Bits) -> Bits:
    total = c
    for k in range(a.shape[2]):
        left, right = np.broadcast_to(a[:, :, k, None], c.shape), np.broadcast_to(b[:, k, None], c.shape)
        total = float64.fma(left.reshape(-1), right.reshape(-1), total.reshape(-1)).reshape(c.shape)
    return total


def _integers(form: Form, a: Bits, b: Bits, c: Bits) -> Bits:
    start = c.view(np.int32).astype(i64)
    if form.a == "b1":
        operation = np.bitwise_and if form.combine == "and" else np.bitwise_xor
        counts: I64 = operation(a[:, :, :, None], b[:, None]).sum(2, dtype=i64)
        ones: Bits = (start + counts).astype(u32)
        return ones
    total = start + np.matmul(_signed(a, form.a), _signed(b, form.b))
    if form.saturates:
        total = np.clip(total, -(1 << 31), (1 << 31) - 1)
    result: Bits = total.astype(u32)
    return result


def _signed(values: Bits, name: str) -> I64:
    wide = values.astype(i64)
    bits = ELEMENT_BITS[name]
    return wide - ((wide >> (bits - 1)) << bits) if name[0] == "s" else wide
