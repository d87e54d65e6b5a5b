"""Table entries that follow from others: two opcodes in a row, one on both halves of a register, another name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import numpy as np

from . import numerics, packed16
from .bits import U64, u32, u64
from .integer_conversions import INTEGER_TYPES
from .operation import Op, call
from .rounding import DIRECTIONS

_ROUNDINGS = ("rn", *DIRECTIONS)
_SATURATE = "cvt.sat.f32.f32"
_FLOATS = ("f32", "f64", "f16", "bf16")


def composed_operations(table: Mapping[str, Op]) -> dict[str, Op]:
    """What follows from ``table``."""
    in_a_row = {
        name: _composed(table[first], table[second].results[0], table[second].function)
        for name, first, second in _rows()
    }
    halves = {name: _composed(table[first], "b16", partial(packed16.saturate, form="f16")) for name, first in _halves()}
    known = {**table, **in_a_row, **halves}
    return in_a_row | halves | {name: known[other] for name, other in _names()} | _pairs(table)


def _composed(first: Op, result: str, second: Callable[..., Any]) -> Op:
    return call(result, first.operands, partial(_applied, first.function, second))


def _applied(first: Callable[..., Any], second: Callable[..., Any], *operands: Any) -> Any:
    return second(first(*operands))


def _rows() -> Iterator[tuple[str, str, str]]:
    """An opcode and the two that it is: a saturation behind what it saturates; f32 between two 16-bit floats."""
    for mode in DIRECTIONS:
        for ftz in ("", ".ftz"):
            for word in ("add", "sub", "mul", "fma"):
                yield f"{word}.{mode}{ftz}.sat.f32", f"{word}.{mode}{ftz}.f32", _SATURATE
    for mode in numerics.INTEGRAL_ROUNDING:
        for ftz in ("", ".ftz"):
            yield f"cvt.{mode}{ftz}.sat.f32.f32", f"cvt.{mode}{ftz}.f32.f32", _SATURATE
    for mode in _ROUNDINGS:
        for ftz in ("", ".ftz"):
            yield f"cvt.{mode}{ftz}.sat.f32.f64", f"cvt.{mode}{ftz}.f32.f64", _SATURATE
        for source in INTEGER_TYPES:
            yield f"cvt.{mode}.sat.f32.{source.name}", f"cvt.{mode}.f32.{source.name}", _SATURATE
        yield f"cvt.{mode}.bf16.f16", "cvt.f32.f16", f"cvt.{mode}.bf16.f32"
        yield f"cvt.{mode}.f16.bf16", "cvt.f32.bf16", f"cvt.{mode}.f16.f32"
    yield "cvt.sat.f32.f16", "cvt.f32.f16", _SATURATE


def _halves() -> Iterator[tuple[str, str]]:
    """A saturated f16, and what is saturated."""
    for mode in _ROUNDINGS:
        yield f"cvt.{mode}.sat.f16.f32", f"cvt.{mode}.f16.f32"
    for mode in numerics.INTEGRAL_ROUNDING:
        yield f"cvt.{mode}.sat.f16.f16", f"cvt.{mode}.f16.f16"


def _names() -> Iterator[tuple[str, str]]:
    """An opcode, and one that does the same: mad is fma, and a float becomes an integer saturated in any case."""
    for mode in _ROUNDINGS:
        for ftz in ("", ".ftz"):
            for sat in ("", ".sat"):
                yield f"mad.{mode}{ftz}{sat}.f32", f"fma.{mode}{ftz}{sat}.f32"
        yield f"mad.{mode}.f64", f"fma.{mode}.f64"
    for mode in numerics.INTEGRAL_ROUNDING:
        for target in INTEGER_TYPES:
            for source in _FLOATS:
                yield f"cvt.{mode}.sat.{target.name}.{source}", f"cvt.{mode}.{target.name}.{source}"
            yield f"cvt.{mode}.ftz.sat.{target.name}.f32", f"cvt.{mode}.ftz.{target.name}.f32"
    yield "cvt.ftz.f32.f16", "cvt.f32.f16"  # the least f16 is a normal f32


def _pairs(table: Mapping[str, Op]) -> dict[str, Op]:
    """``.f32x2``: two f32 in a register of 64 bits."""
    found: dict[str, Op] = {}
    for word in ("add", "sub", "mul", "fma"):
        for mode in _ROUNDINGS:
            for ftz in ("", ".ftz"):
                single = table[f"{word}.{mode}{ftz}.f32"]
                both = partial(_on_both, single.function)
                found[f"{word}.{mode}{ftz}.f32x2"] = call("b64", ("b64",) * len(single.operands), both)
    return found


def _on_both(function: Callable[..., Any], *registers: U64) -> U64:
    low, high = (function(*((register >> shift).astype(u32) for register in registers)) for shift in (u64(0), u64(32)))
    return cast(U64, np.bitwise_or(low.astype(u64), high.astype(u64) << u64(32)))
