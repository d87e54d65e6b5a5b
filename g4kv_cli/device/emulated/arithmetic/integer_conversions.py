"""``cvt`` between integers and floats, and between integers of different widths.

Rules recorded from an NVIDIA H200, driver 580.159.04, 29 Nov 2026: float to integer saturates; NaN gives 0
for results of 32 bits and fewer and 0x8000000000000000 for 64 bits.

All functions take and return raw bits. An 8-bit integer lives in the low half of a ``uint16`` register, and
results of 8 and 16 bits are extended by their own type, so that a wider destination register can be filled
from them.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import numpy as np

from .bits import F64, U16, U32, U64, Bits, as_f32, f32, f64, i64, u16, u32, u64
from .conversions import bf16_from_f32_directed, f16_from_f32_directed
from .numerics import INTEGRAL_ROUNDING, flush
from .packed16 import Format, as_float32, narrow
from .rounding import DIRECTIONS, round_to_odd, two_sum


class IntegerType(NamedTuple):
    """A PTX integer type, such as s16."""

    is_signed: bool
    width: int

    @property
    def name(self) -> str:
        return f"{'s' if self.is_signed else 'u'}{self.width}"

    @property
    def least(self) -> int:
        return -(1 << (self.width - 1)) if self.is_signed else 0

    @property
    def greatest(self) -> int:
        return (1 << (self.width - self.is_signed)) - 1

    def read(self, register: Bits) -> Bits:
        """The register's low width bits as an integer array."""
        return register.astype(f"{'i' if self.is_signed else 'u'}{self.width // 8}")

    def write(self, values: Bits) -> Bits:
        """Integers as raw bits of the narrowest register that holds this type (16, 32 or 64 bits)."""
        return values.astype(f"u{max(self.width, 16) // 8}")


INTEGER_TYPES = tuple(IntegerType(sign, width) for sign in (False, True) for width in (8, 16, 32, 64))


def _from_float(values: F64, mode: str, target: IntegerType, nan: int) -> Bits:
    """Rounded and saturated; values are f64 or exact f64 images of narrower floats, nan the integer of a
    NaN."""
    rounded = INTEGRAL_ROUNDING[mode](values)
    limit = float(target.greatest + 1)  # a power of two: exact
    below, above = rounded < target.least, rounded >= limit
    safe = np.where(below | above | np.isnan(rounded), 0.0, rounded)
    result = safe.astype(i64).view(u64) if target.is_signed else safe.astype(u64)
    result = np.where(above, u64(target.greatest), result)
    result = np.where(below, u64(target.least & (2**64 - 1)), result)
    return target.write(np.where(np.isnan(values), u64(nan & (2**64 - 1)), result))


def _nan_of_narrow(target: IntegerType) -> int:
    """What a NaN of 32 bits or fewer becomes: 0, but the top bit alone in 64 bits."""
    return -(1 << 63) if target.width == 64 else 0


def integer_from_f32(a: U32, mode: str, target: IntegerType, ftz: bool) -> Bits:
    """``cvt.rzi.s32.f32`` and its kin."""
    return _from_float(as_f32(flush(a) if ftz else a).astype(f64), mode, target, _nan_of_narrow(target))


def integer_from_f16(a: U16, mode: str, target: IntegerType) -> Bits:
    """``cvt.rzi.s32.f16`` and its kin."""
    return _from_float(a.view(np.float16).astype(f64), mode, target, _nan_of_narrow(target))


def integer_from_bf16(a: U16, mode: str, target: IntegerType) -> Bits:
    """``cvt.rzi.s32.bf16`` and its kin."""
    return _from_float(as_float32(a, "bf16").astype(f64), mode, target, _nan_of_narrow(target))


def integer_from_f64(a: U64, mode: str, target: IntegerType) -> Bits:
    """``cvt.rzi.s32.f64`` and its kin: a NaN gives the top bit alone, in every width."""
    top_bit = 1 << (target.width - 1)
    return _from_float(a.view(f64), mode, target, -top_bit if target.is_signed else top_bit)


def f32_from_integer(a: Bits, source: IntegerType) -> U32:
    """``cvt.rn.f32.s32`` and its kin: rounded once, to nearest even (also from 64 bits)."""
    return cast(U32, source.read(a).astype(f32).view(u32))


def _nearest_and_error(a: Bits, source: IntegerType) -> tuple[F64, F64]:
    """The nearest f64 and what lacks to the integer: the upper and lower halves are exact in f64 each."""
    integers = source.read(a)
    if source.width <= 32:
        return integers.astype(f64), np.zeros(integers.shape)
    low = integers & integers.dtype.type(0xFFFFFFFF)
    return two_sum((integers - low).astype(f64), low.astype(f64))


def f32_from_integer_directed(a: Bits, source: IntegerType, mode: str) -> U32:
    """``cvt.rz.f32.s32`` and its kin."""
    return DIRECTIONS[mode](round_to_odd(*_nearest_and_error(a, source)))


def f64_from_integer(a: Bits, source: IntegerType) -> U64:
    """``cvt.rn.f64.s32`` and its kin."""
    return cast(U64, source.read(a).astype(f64).view(u64))


def f64_from_integer_directed(a: Bits, source: IntegerType, mode: str) -> U64:
    """``cvt.rz.f64.s64`` and its kin."""
    nearest, error = _nearest_and_error(a, source)
    toward = {"rz": 0.0, "rm": -np.inf, "rp": np.inf}[mode]
    lies_there = (error != 0) & ((error > 0) == (nearest < toward))
    return cast(U64, np.where(lies_there, np.nextafter(nearest, toward), nearest).view(u64))


def f16_from_integer(a: Bits, source: IntegerType) -> U16:
    """``cvt.rn.f16.s32`` and its kin. From 2^24 up everything overflows f16, so going through f64 rounds
    once."""
    return cast(U16, source.read(a).astype(f64).astype(np.float16).view(u16))


def bf16_from_integer(a: Bits, source: IntegerType) -> U16:
    """``cvt.rn.bf16.s32`` and its kin."""
    return narrow(round_to_odd(*_nearest_and_error(a, source)), "bf16")


def half_from_integer_directed(a: Bits, source: IntegerType, mode: str, form: Format) -> U16:
    """``cvt.rz.f16.s32`` and its kin: rounding twice in one direction is rounding once."""
    singles = f32_from_integer_directed(a, source, mode)
    return f16_from_f32_directed(singles, mode) if form == "f16" else bf16_from_f32_directed(singles, mode)


def integer_from_integer(a: Bits, target: IntegerType, source: IntegerType) -> Bits:
    """Truncation or extension."""
    return target.write(target.read(source.read(a)))


def integer_from_integer_saturated(a: Bits, target: IntegerType, source: IntegerType) -> Bits:
    """``cvt.sat``: clamped to the range of the target."""
    kind = source.read(a[:0]).dtype.type
    low, high = max(target.least, source.least), min(target.greatest, source.greatest)
    return target.write(np.clip(source.read(a), kind(low), kind(high)))


def packed_from_integers(first: U32, second: U32, rest: U32 | None = None, *, target: IntegerType) -> U32:
    """``cvt.pack.sat``: two s32, clamped, in the low bits, the second lowest; above them what ``rest`` has lowest."""
    low, high = (np.clip(value.view(np.int32), target.least, target.greatest) for value in (second, first))
    mask, width = u32((1 << target.width) - 1), u32(target.width)
    pair = (low.view(u32) & mask) | (high.view(u32) & mask) << width
    return pair if rest is None else pair | rest << (width + width)
