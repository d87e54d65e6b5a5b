"""Bit operations of the hardware: shifts, funnel shifts, fields, counts, byte permutes, three-input logic.

Rules recorded from an NVIDIA H200, driver 580.159.04, 29 Nov 2026: a shift by the width or more gives zero
(sign bits for a signed right shift) and the whole 32-bit count matters; ``bfe`` and ``bfi`` on 32 bits take
position and length modulo 256. Their 64-bit forms do not follow any simple rule beyond 255, so those raise.

All functions take and return raw bits (``uint16``, ``uint32``, ``uint64``; shapes ``(1,)`` or ``(n,)``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from .bits import ALL_ONES_32, U32, U64, Bits, Predicate, i64, u8, u32, u64
from .integer import signed, unsigned

_POPULATION_OF_16 = np.array([0], u8)
for _bit in range(16):
    _POPULATION_OF_16 = np.concatenate([_POPULATION_OF_16, _POPULATION_OF_16 + u8(1)])

_REVERSE_STEPS = ((1, 0x5555555555555555), (2, 0x3333333333333333), (4, 0x0F0F0F0F0F0F0F0F))


def _width(a: Bits) -> int:
    return 8 * a.dtype.itemsize


def _count(shift: U32, limit: int, like: Bits) -> Bits:
    return np.minimum(shift, u32(limit)).astype(like.dtype)


def shift_left(a: Bits, shift: U32) -> Bits:
    """NumPy itself defines a shift of an array by the width or more as zero."""
    return a << _count(shift, _width(a), a)


def shift_right(a: Bits, shift: U32) -> Bits:
    return a >> _count(shift, _width(a), a)


def shift_right_signed(a: Bits, shift: U32) -> Bits:
    count = signed(_count(shift, _width(a) - 1, a))
    return unsigned(signed(a) >> count)


def _joined(low: U32, high: U32) -> U64:
    return (high.astype(u64) << u64(32)) | low


def funnel_left(low: U32, high: U32, count: U32) -> U32:
    """``shf.l``: upper half of high:low shifted left by a count already wrapped or clamped to 0..32."""
    return cast(U32, ((_joined(low, high) << count.astype(u64)) >> u64(32)).astype(u32))


def funnel_right(low: U32, high: U32, count: U32) -> U32:
    """``shf.r``: lower half of high:low shifted right."""
    return cast(U32, (_joined(low, high) >> count.astype(u64)).astype(u32))


def wrapped(count: U32) -> U32:
    """``.wrap``: the count modulo 32."""
    return count & u32(31)


def clamped(count: U32) -> U32:
    """``.clamp``: the count, at most 32."""
    return np.minimum(count, u32(32))


def population(a: Bits) -> U32:
    """``popc``: number of one bits."""
    total = np.zeros(a.shape, u32)
    for shift in range(0, _width(a), 16):
        total += _POPULATION_OF_16[(a >> a.dtype.type(shift)) & a.dtype.type(0xFFFF)]
    return total


def leading_zeros(a: Bits) -> U32:
    """``clz``: zeros above the highest one bit; the width for zero."""
    spread = a
    for shift in (1, 2, 4, 8, 16, 32):
        if shift < _width(a):
            spread = spread | (spread >> a.dtype.type(shift))
    return population(~spread)


def reverse(a: Bits) -> Bits:
    """``brev``: bits in reverse order."""
    kind = a.dtype.type
    for shift, mask in _REVERSE_STEPS:
        part = kind(mask & (2 ** _width(a) - 1))
        a = ((a >> kind(shift)) & part) | ((a & part) << kind(shift))
    return a.byteswap()


def find_highest(a: Bits) -> U32:
    """``bfind``: position of the highest one bit; all ones for zero."""
    return u32(_width(a) - 1) - leading_zeros(a)


def find_highest_signed(a: Bits) -> U32:
    """``bfind.s``: position of the highest bit that differs from the sign; all ones for 0 and -1."""
    return find_highest(np.where(signed(a) < 0, ~a, a))


def find_shift(position: U32, width: int) -> U32:
    """``bfind.shiftamt``: the left shift that brings the found bit to the top; all ones if none was found."""
    return np.where(position == ALL_ONES_32, ALL_ONES_32, u32(width - 1) - position)


def is_zero(a: Bits) -> Bits:
    """``cnot``: 1 for zero, else 0."""
    zero: Predicate = a == 0
    return zero.astype(a.dtype)


def _field(a: Bits, position: U32, length: U32) -> tuple[U64, U64]:
    """Position and length as uint64, checked or taken modulo 256."""
    if _width(a) == 64 and (np.max(position) > 255 or np.max(length) > 255):
        raise ValueError(
            "a 64-bit bit-field instruction has a position or length above 255, whose result on hardware is not known;"
            " keep both below 256"
        )
    return (position & u32(255)).astype(u64), (length & u32(255)).astype(u64)


def extract(a: Bits, position: U32, length: U32) -> Bits:
    """``bfe.u``: length bits from position up; bits beyond the width read as zero."""
    start, count = _field(a, position, length)
    mask = (u64(1) << count) - u64(1)  # a shift by 64 or more gives 0, and so all ones
    return ((a.astype(u64) >> start) & mask).astype(a.dtype)


def extract_signed(a: Bits, position: U32, length: U32) -> Bits:
    """``bfe.s``: as ``bfe.u``, filled above with the field's top bit, or the word's top bit if the field
    passes it."""
    start, count = _field(a, position, length)
    width = _width(a)
    wide = signed(a).astype(i64)
    last = np.minimum(start + count - u64(1), u64(width - 1))  # count 0 is masked out below
    shift_up = u64(63) - last
    raised = cast(Bits, (wide.view(u64) << shift_up).view(i64))
    # The field's top bit now is bit 63; come down by what was raised plus the start.
    down = np.minimum(shift_up + start, u64(63)).astype(i64)
    value = (raised >> down).astype(u64)
    return np.where(count == 0, u64(0), value).astype(a.dtype)


def insert(field: Bits, base: Bits, position: U32, length: U32) -> Bits:
    """``bfi``: the low length bits of field put into base at position."""
    start, count = _field(field, position, length)
    mask = ((u64(1) << count) - u64(1)) << start
    merged: U64 = (base & ~mask) | ((field.astype(u64) << start) & mask)
    return merged.astype(base.dtype)


def bit_mask_wrap(position: U32, length: U32) -> U32:
    """``bmsk.wrap``: length (mod 32) ones from position (mod 32) up."""
    return ((u32(1) << wrapped(length)) - u32(1)) << wrapped(position)


def bit_mask_clamp(position: U32, length: U32) -> U32:
    """``bmsk.clamp``: length ones from position up, cut at bit 31."""
    start, count = clamped(position).astype(u64), clamped(length).astype(u64)
    return cast(U32, (((u64(1) << count) - u64(1)) << start).astype(u32))


def extend(a: U32, length: U32, clamp: bool, is_signed: bool) -> U32:
    """``szext``: the low length bits sign- or zero-extended; wrap takes length modulo 32."""
    count = clamped(length) if clamp else wrapped(length)
    zero = np.zeros(1, u32)
    return cast(U32, extract_signed(a, zero, count) if is_signed else extract(a, zero, count))


def permute(a: U32, b: U32, selector: U32) -> U32:
    """``prmt.b32``: four bytes picked from b:a by selector nibbles; nibble bit 3 replicates the byte's sign
    bit."""
    pool = _joined(a, b)
    out = np.zeros(1, u64)
    for nibble in range(4):
        choice = (selector >> u32(4 * nibble)).astype(u64)
        byte = (pool >> ((choice & u64(7)) << u64(3))) & u64(255)
        sign = u64(255) * (byte >> u64(7))
        out = out | (np.where((choice & u64(8)) != 0, sign, byte) << u64(8 * nibble))
    return cast(U32, out.astype(u32))


_PERMUTE_MODES = {
    "f4e": (0x3210, 0x4321, 0x5432, 0x6543),
    "b4e": (0x5670, 0x6701, 0x7012, 0x0123),
    "rc8": (0x0000, 0x1111, 0x2222, 0x3333),
    "ecl": (0x3210, 0x3211, 0x3222, 0x3333),
    "ecr": (0x0000, 0x1110, 0x2210, 0x3210),
    "rc16": (0x1010, 0x3232, 0x1010, 0x3232),
}
PERMUTE_MODES = tuple(_PERMUTE_MODES)


def permute_mode(a: U32, b: U32, selector: U32, mode: str) -> U32:
    """``prmt.b32.mode``: the low two selector bits choose one of four fixed permutations of the mode."""
    table = np.array(_PERMUTE_MODES[mode], u32)
    return permute(a, b, table[selector & u32(3)])


def three_input_logic(a: U32, b: U32, c: U32, table: U32) -> U32:
    """``lop3.b32``: output bit = bit (4a + 2b + c) of the immediate table."""
    immediate = int(table.flat[0]) & 255
    out = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), u32)
    for index in range(8):
        if immediate >> index & 1:
            out |= (a if index & 4 else ~a) & (b if index & 2 else ~b) & (c if index & 1 else ~c)
    return out


def logic_and_test(
    a: U32, b: U32, c: U32, table: U32, q: Predicate, combine: Callable[[Predicate, Predicate], Any]
) -> tuple[U32, Predicate]:
    """``lop3.or.b32`` and ``lop3.and.b32``: the result, and whether it is not zero, combined with q."""
    out = three_input_logic(a, b, c, table)
    return out, np.asarray(combine(out != 0, q), np.bool_)


def find_nth_set(mask: U32, base: U32, offset: U32) -> U32:
    """``fns.b32``: the place of the |offset|-th set bit from ``base`` on, upward or downward; 0: of ``base`` itself."""
    mask, base, offset = np.broadcast_arrays(mask, base, offset)
    steps = offset.view(np.int32).astype(i64)
    place = base.astype(i64)
    direction = np.where(steps < 0, -1, 1)
    left = np.maximum(np.abs(steps) - 1, 0)
    found = np.full(mask.shape, 0xFFFFFFFF, i64)
    going = np.ones(mask.shape, np.bool_)
    for _ in range(32):
        going &= (place >= 0) & (place < 32)
        is_set = going & (((mask.astype(i64) >> np.clip(place, 0, 31)) & 1) != 0)
        found = np.where(is_set & (left == 0), place, found)
        going &= ~(is_set & (left == 0)) & (steps != 0)
        left = left - is_set
        place = place + direction
    return found.astype(u32)
