"""Table entries of conversions to and from floats of 4, 6 and 8 bits that came with compute capability 10.0, two to a
register: e2m1, e2m3, e3m2, the powers of two ue8m0, and bf16 pairs of e4m3 and e5m2.

Their results are what the PTX manual says: nearest even, the largest finite number for what is larger and for NaN
(``satfinite``); ue8m0 has no sign, and 0xff for NaN. No GPU of that kind was asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from . import conversions
from .bits import F64, U16, U32, as_f32, f32, f32_bits, f64, u16, u32
from .operation import Op, call


@dataclass(frozen=True)
class SmallFloat:
    """A format without infinities and NaN; ``each``: bits from one of a pair to the other."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    each: int

    @property
    def sign(self) -> int:
        """The bit of the sign."""
        return 1 << (self.exponent_bits + self.mantissa_bits)

    @cached_property
    def values(self) -> F64:
        """All values that are not negative, by their codes."""
        exponent, mantissa = np.divmod(np.arange(self.sign), 1 << self.mantissa_bits)
        whole = mantissa + np.where(exponent > 0, 1 << self.mantissa_bits, 0)
        return whole * np.exp2((np.maximum(exponent, 1) - self.bias - self.mantissa_bits).astype(f64))

    def narrow(self, bits: U32) -> U16:
        """The codes of f32 numbers."""
        number = as_f32(bits).astype(f64)
        size, middle = np.abs(number), (self.values[1:] + self.values[:-1]) / 2
        below, above = np.searchsorted(middle, size, "left"), np.searchsorted(middle, size, "right")
        code = np.where(below & 1, above, below)  # on a midpoint the even one
        is_negative = np.signbit(number) & ~np.isnan(number)
        return np.where(np.isnan(number), self.sign - 1, code | np.where(is_negative, self.sign, 0)).astype(u16)

    def widen(self, codes: U16) -> U32:
        """The f32 numbers of codes."""
        numbers = self.values[codes & u16(self.sign - 1)].astype(f32)
        return f32_bits(np.where(codes & u16(self.sign), -numbers, numbers).astype(f32))


FORMATS = {"e2m1": SmallFloat(2, 1, 1, 4), "e2m3": SmallFloat(2, 3, 1, 8), "e3m2": SmallFloat(3, 2, 3, 8)}


def small_float_operations() -> dict[str, Op]:
    table: dict[str, Op] = {}
    for name, form in FORMATS.items():
        for relu, word in ((False, ""), (True, "relu.")):
            narrow = partial(_two_narrow, form=form, relu=relu)
            table[f"cvt.rn.satfinite.{word}{name}x2.f32"] = call("b16", ("b32", "b32"), narrow)
            for pair, parts in _PAIRS.items():
                both = partial(_pair_narrow, parts=parts, narrow=narrow)
                table[f"cvt.rn.satfinite.{word}{name}x2.{pair}"] = call("b16", ("b32",), both)
                widen = partial(_pair_widened, pair=pair, form=form, relu=relu)
                table[f"cvt.rn.{word}{pair}.{name}x2"] = call("b32", ("b16",), widen)
    return table | dict(_powers()) | dict(_bytes())


def _two_narrow(high: U32, low: U32, form: SmallFloat, relu: bool) -> U16:
    first, second = form.narrow(high), form.narrow(low)
    if relu:
        first, second = (np.where(code & u16(form.sign), u16(0), code) for code in (first, second))
    return first << u16(form.each) | second


def _halves_as_f32(pair: U32) -> tuple[U32, U32]:
    return conversions.f32_from_f16((pair >> u32(16)).astype(u16)), conversions.f32_from_f16(pair.astype(u16))


def _bf16_as_f32(pair: U32) -> tuple[U32, U32]:
    return pair & u32(0xFFFF0000), pair << u32(16)


_PAIRS: dict[str, Callable[[U32], tuple[U32, U32]]] = {"f16x2": _halves_as_f32, "bf16x2": _bf16_as_f32}


def _pair_narrow(pair: U32, parts: Callable[[U32], tuple[U32, U32]], narrow: Callable[..., U16]) -> U16:
    return narrow(*parts(pair))


def _pair_widened(codes: U16, pair: str, form: SmallFloat, relu: bool) -> U32:
    mask = u16((1 << form.each) - 1)
    singles = [form.widen(code & mask) for code in (codes >> u16(form.each), codes)]
    convert = conversions.f16_from_f32 if pair == "f16x2" else conversions.bf16_from_f32
    halves = [convert(single) for single in singles]  # exact
    return conversions.packed(*(conversions.relu16(half) if relu else half for half in halves))


def _powers() -> Iterator[tuple[str, Op]]:
    """ue8m0: the exponent of an f32 and nothing else."""
    for mode in ("rz", "rp"):
        for word in ("", ".satfinite"):
            convert = partial(_two_powers, rounds_up=mode == "rp", is_finite=bool(word))
            yield f"cvt.{mode}{word}.ue8m0x2.f32", call("b16", ("b32", "b32"), convert)
            both = partial(_pair_narrow, parts=_bf16_as_f32, narrow=convert)
            yield f"cvt.{mode}{word}.ue8m0x2.bf16x2", call("b16", ("b32",), both)
    yield "cvt.rn.bf16x2.ue8m0x2", call("b32", ("b16",), _powers_widened)


def _power(bits: U32, rounds_up: bool, is_finite: bool) -> U16:
    size = bits & u32(0x7FFFFFFF)
    code = size >> u32(23)
    if rounds_up:  # 2^-127, the least, is a subnormal f32
        code = code + ((size & u32(0x7FFFFF)) != 0) * ((size > u32(0x00400000)) & (size < u32(0x7F800000)))
    is_too_large = (code == u32(0xFF)) & (size <= u32(0x7F800000))
    return np.where(is_too_large & is_finite, u32(0xFE), code).astype(u16)


def _two_powers(high: U32, low: U32, rounds_up: bool, is_finite: bool) -> U16:
    return _power(high, rounds_up, is_finite) << u16(8) | _power(low, rounds_up, is_finite)


def _powers_widened(codes: U16) -> U32:
    def widened(code: U16) -> U16:
        power = np.where(code == 0, u16(0x0040), code << u16(7))
        return np.where(code == 0xFF, u16(0x7FFF), power)

    return conversions.packed(widened(codes >> u16(8)), widened(codes & u16(0xFF)))


def _bytes() -> Iterator[tuple[str, Op]]:
    """e4m3 and e5m2 beside bf16, and with .relu."""
    for name in ("e4m3", "e5m2"):
        for relu, word in ((False, ""), (True, "relu.")):
            narrow = partial(conversions.f8x2_from_f32, name=name, relu=relu)
            both = partial(_pair_narrow, parts=_bf16_as_f32, narrow=narrow)
            yield f"cvt.rn.satfinite.{word}{name}x2.bf16x2", call("b16", ("b32",), both)
            yield f"cvt.rn.{word}bf16x2.{name}x2", call("b32", ("b16",), partial(_byte_pair, name=name, relu=relu))
        yield f"cvt.rn.relu.f16x2.{name}x2", call("b32", ("b16",), partial(_relu_halves, name=name))


def _relu_halves(codes: U16, name: str) -> U32:
    halves = conversions.f16x2_from_f8x2(codes, name)
    parts = ((halves >> shift).astype(u16) for shift in (u32(16), u32(0)))
    return conversions.packed(*(conversions.relu16(part) for part in parts))


def _byte_pair(codes: U16, name: str, relu: bool) -> U32:
    singles = _halves_as_f32(conversions.f16x2_from_f8x2(codes, name))
    halves: list[Any] = [conversions.bf16_from_f32(single) for single in singles]
    return conversions.packed(*(conversions.relu16(half) if relu else half for half in halves))
