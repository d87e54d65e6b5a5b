"""Integer arithmetic of the hardware that NumPy does not give by itself: high products, division, dot
products.

Rules recorded from an NVIDIA H200, driver 580.159.04, 29 Nov 2026: division and remainder truncate toward
zero; division by zero gives all ones (quotient and remainder, 32 and 64 bits); INT_MIN / -1 is INT_MIN with
remainder 0.

All functions take and return raw bits (``uint16``, ``uint32``, ``uint64``; shapes ``(1,)`` or ``(n,)``).
"""

from __future__ import annotations

from typing import cast

import numpy as np

from .bits import U32, U64, Bits, Predicate, i8, i16, i32, i64, u8, u16, u32, u64

SIGNED = {np.dtype(u16): i16, np.dtype(u32): i32, np.dtype(u64): i64}
"""The signed dtype of each register dtype."""


def signed(bits: Bits) -> Bits:
    """The same bits as two's complement integers of the same width."""
    return cast(Bits, bits.view(SIGNED[bits.dtype]))


def unsigned(values: Bits) -> Bits:
    """Signed integers back as raw bits of the same width."""
    return cast(Bits, values.view(np.dtype(f"u{values.dtype.itemsize}")))


def min_signed(a: Bits, b: Bits) -> Bits:
    return unsigned(np.minimum(signed(a), signed(b)))


def max_signed(a: Bits, b: Bits) -> Bits:
    return unsigned(np.maximum(signed(a), signed(b)))


def abs_signed(a: Bits) -> Bits:
    """Absolute value; the most negative number stays as it is."""
    return unsigned(np.abs(signed(a)))


def add_sat_s32(a: U32, b: U32) -> U32:
    total = signed(a).astype(i64) + signed(b)
    return cast(U32, np.clip(total, -(2**31), 2**31 - 1).astype(u32))


def sub_sat_s32(a: U32, b: U32) -> U32:
    total = signed(a).astype(i64) - signed(b)
    return cast(U32, np.clip(total, -(2**31), 2**31 - 1).astype(u32))


def mul_lo(a: Bits, b: Bits) -> Bits:
    """The lower half of a product."""
    return a * b


mul_lo_u32 = mul_lo_s32 = mul_lo_u64 = mul_lo_s64 = mul_lo


def mul_hi_u16(a: Bits, b: Bits) -> Bits:
    return ((a.astype(u32) * b) >> u32(16)).astype(u16)


def mul_hi_s16(a: Bits, b: Bits) -> Bits:
    return ((signed(a).astype(i32) * signed(b)) >> i32(16)).astype(u16)


def mul_hi_u32(a: U32, b: U32) -> U32:
    return cast(U32, ((a.astype(u64) * b) >> u64(32)).astype(u32))


def mul_hi_s32(a: U32, b: U32) -> U32:
    return cast(U32, ((signed(a).astype(i64) * signed(b)) >> i64(32)).astype(u32))


def mul_hi_u64(a: U64, b: U64) -> U64:
    """The upper 64 bits of the 128-bit product, from four 32-bit partial products."""
    low_mask, half = u64(0xFFFFFFFF), u64(32)
    a_low, a_high, b_low, b_high = a & low_mask, a >> half, b & low_mask, b >> half
    low_low, high_low, low_high = a_low * b_low, a_high * b_low, a_low * b_high
    middle = (low_low >> half) + (high_low & low_mask) + (low_high & low_mask)
    high: U64 = a_high * b_high + (high_low >> half) + (low_high >> half) + (middle >> half)
    return high


def mul_hi_s64(a: U64, b: U64) -> U64:
    """Signed form: each negative operand subtracts the other from the upper half."""
    high = mul_hi_u64(a, b)
    zero = u64(0)
    return high - np.where(signed(a) < 0, b, zero) - np.where(signed(b) < 0, a, zero)


def _s24(a: U32) -> Bits:
    return signed(a << u32(8)).astype(i64) >> i64(8)


def mul24_lo_s32(a: U32, b: U32) -> U32:
    return cast(U32, (_s24(a) * _s24(b)).astype(u32))


def mul24_hi_s32(a: U32, b: U32) -> U32:
    """Bits 47..16 of the 48-bit product."""
    return cast(U32, ((_s24(a) * _s24(b)) >> i64(16)).astype(u32))


def mul24_lo_u32(a: U32, b: U32) -> U32:
    mask = u32(0xFFFFFF)
    return (a & mask) * (b & mask)


def mul24_hi_u32(a: U32, b: U32) -> U32:
    mask = u32(0xFFFFFF)
    return cast(U32, (((a & mask).astype(u64) * (b & mask)) >> u64(16)).astype(u32))


def _magnitude(a: Bits) -> tuple[Bits, Predicate]:
    negative = signed(a) < 0
    return np.where(negative, -a, a), negative


def div_unsigned(a: Bits, b: Bits) -> Bits:
    zero = b == 0
    if not zero.any():
        return a // b
    return np.where(zero, ~np.zeros(1, a.dtype), a // np.where(zero, np.ones(1, b.dtype), b))


def rem_unsigned(a: Bits, b: Bits) -> Bits:
    zero = b == 0
    if not zero.any():
        return a % b
    return np.where(zero, ~np.zeros(1, a.dtype), a % np.where(zero, np.ones(1, b.dtype), b))


def div_signed(a: Bits, b: Bits) -> Bits:
    """Truncating quotient, worked on magnitudes: INT_MIN / -1 wraps to INT_MIN without a special case."""
    (a_size, a_negative), (b_size, b_negative) = _magnitude(a), _magnitude(b)
    quotient = div_unsigned(a_size, b_size)
    return np.where((a_negative ^ b_negative) & (b != 0), -quotient, quotient)


def rem_signed(a: Bits, b: Bits) -> Bits:
    """Remainder with the sign of the dividend."""
    (a_size, a_negative), (b_size, _) = _magnitude(a), _magnitude(b)
    remainder = rem_unsigned(a_size, b_size)
    return np.where(a_negative & (b != 0), -remainder, remainder)


def sad_unsigned(a: Bits, b: Bits, c: Bits) -> Bits:
    total: Bits = c + (np.maximum(a, b) - np.minimum(a, b))
    return total


def sad_signed(a: Bits, b: Bits, c: Bits) -> Bits:
    total: Bits = c + (max_signed(a, b) - min_signed(a, b))
    return total


def dot4(a: U32, b: U32, c: U32, a_signed: bool, b_signed: bool) -> U32:
    """``dp4a``: c plus the four products of bytes, modulo 2^32."""
    total = c.astype(i64)
    for byte in range(4):
        total = total + _byte(a, byte, a_signed) * _byte(b, byte, b_signed)
    return cast(U32, total.astype(u32))


def dot2(a: U32, b: U32, c: U32, a_signed: bool, b_signed: bool, upper: bool) -> U32:
    """``dp2a``: c plus the two products of 16-bit halves of a and two bytes of b (the lower or upper
    pair)."""
    total = c.astype(i64)
    for half in range(2):
        word = (a >> u32(16 * half)).astype(i16 if a_signed else u16).astype(i64)
        total = total + word * _byte(b, half + 2 * upper, b_signed)
    return cast(U32, total.astype(u32))


def _byte(a: U32, index: int, is_signed: bool) -> Bits:
    return (a >> u32(8 * index)).astype(i8 if is_signed else u8).astype(i64)


def add_carry(a: Bits, b: Bits) -> tuple[Bits, Predicate]:
    """``add.cc``: sum and carry out."""
    total = a + b
    return total, total < a


def add_with_carry(a: Bits, b: Bits, carry: Predicate) -> tuple[Bits, Predicate]:
    """``addc.cc``: sum of both and the carry in, and carry out."""
    total, first = add_carry(a, b)
    total, second = add_carry(total, carry.astype(a.dtype))
    return total, first | second


def sub_borrow(a: Bits, b: Bits) -> tuple[Bits, Predicate]:
    """``sub.cc``: difference and carry out, which of a difference is that of a + ~b + 1: set where nothing is borrowed.

    PTX calls it the borrow; but NVIDIA's own division of 128 bits takes it by ``addc`` after ``subc.cc``, and so.
    """
    return a - b, a >= b


def sub_with_borrow(a: Bits, b: Bits, carry: Predicate) -> tuple[Bits, Predicate]:
    """``subc.cc``: a + ~b + the carry in, and carry out."""
    return add_with_carry(a, ~b, carry)
