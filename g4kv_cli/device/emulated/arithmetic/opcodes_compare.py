"""Table entries of comparisons: ``setp``, alone and combined with a predicate, and ``set``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from . import packed16
from .bits import U16, U32, Bits, Predicate, f32, u16, u32
from .numerics import flush
from .operation import EXPRESSION_NAMES, Op, call, inline

_ORDERED = {"eq": "==", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_SIGNED = {"ne": "!=", **_ORDERED}
_UNSIGNED = {"lo": "<", "ls": "<=", "hi": ">", "hs": ">=", **_SIGNED}
_EQUALITY = {"eq": "==", "ne": "!="}
_INVERSE = {"ltu": ">=", "leu": ">", "gtu": "<=", "geu": "<"}
_COMBINE = {"and": "&", "or": "|", "xor": "^"}

FLOAT_COMPARISONS = {
    **{name: f"{{0}} {sign} {{1}}" for name, sign in _ORDERED.items()},
    **{name: f"~({{0}} {sign} {{1}})" for name, sign in _INVERSE.items()},
    "ne": "({0} < {1}) | ({0} > {1})",
    "equ": "~(({0} < {1}) | ({0} > {1}))",
    "neu": "{0} != {1}",
    "num": "({0} == {0}) & ({1} == {1})",
    "nan": "({0} != {0}) | ({1} != {1})",
}
"""Python source that compares float arrays {0} and {1}; a NaN makes the u-forms true and the others false."""


def comparison_operations() -> dict[str, Op]:
    table: dict[str, Op] = {}
    for type_name, comparisons in _comparisons().items():
        for name, compare in comparisons.items():
            table |= _setp(f"setp.{name}", type_name, compare)
            for result, (kind, true_bits) in _set_results(type_name).items():
                choose = partial(_chosen, compare.function, true_bits)
                table[f"set.{name}.{result}.{type_name}"] = call(kind, compare.operands, choose)
    return table | _packed_sets(_comparisons()) | _packed_setp(_comparisons()) | _classes()


def _comparisons() -> dict[str, dict[str, Op]]:
    """The plain comparison of every type, by type and comparison name."""
    table: dict[str, dict[str, Op]] = {}
    for width, view in ((16, "np.int16"), (32, "i32"), (64, "i64")):
        pair = (f"b{width}", f"b{width}")
        signed = f"{{0}}.view({view})", f"{{1}}.view({view})"
        table[f"b{width}"] = {name: inline("pred", pair, f"{{0}} {sign} {{1}}") for name, sign in _EQUALITY.items()}
        table[f"u{width}"] = {name: inline("pred", pair, f"{{0}} {sign} {{1}}") for name, sign in _UNSIGNED.items()}
        table[f"s{width}"] = {
            name: inline("pred", pair, f"{signed[0]} {sign} {signed[1]}") for name, sign in _SIGNED.items()
        }
    for type_name, view in (("f32", "f32"), ("f64", "np.float64"), ("f16", "np.float16")):
        pair = (f"b{type_name[1:]}", f"b{type_name[1:]}")
        floats = f"{{0}}.view({view})", f"{{1}}.view({view})"
        table[type_name] = {
            name: inline("pred", pair, source.format(*floats)) for name, source in FLOAT_COMPARISONS.items()
        }
    compare = {name: _compiled(source) for name, source in FLOAT_COMPARISONS.items()}
    table["ftz.f32"] = {name: call("pred", ("b32", "b32"), partial(_flushed, c)) for name, c in compare.items()}
    table["bf16"] = {name: call("pred", ("b16", "b16"), partial(_widened, c)) for name, c in compare.items()}
    return table


def _compiled(source: str) -> Callable[..., Predicate]:
    function: Callable[..., Predicate] = eval(f"lambda a, b: {source.format('a', 'b')}", dict(EXPRESSION_NAMES))
    return function


def _flushed(compare: Callable[..., Predicate], a: U32, b: U32) -> Predicate:
    return compare(flush(a).view(f32), flush(b).view(f32))


def _widened(compare: Callable[..., Predicate], a: U16, b: U16) -> Predicate:
    return compare(packed16.as_float32(a, "bf16"), packed16.as_float32(b, "bf16"))


def _setp(stem: str, type_name: str, compare: Op) -> dict[str, Op]:
    table = {f"{stem}.{type_name}": compare}
    for word, sign in _COMBINE.items():
        operands = (*compare.operands, "pred")
        if compare.expression is None:
            combined = call("pred", operands, partial(_combined, compare.function, word))
        else:
            combined = inline("pred", operands, f"{compare.expression} {sign} {{2}}")
        table[f"{stem}.{word}.{type_name}"] = combined
    return table


def _combined(compare: Callable[..., Predicate], word: str, a: Bits, b: Bits, other: Predicate) -> Predicate:
    result = compare(a, b)
    if word == "and":
        return result & other
    return result | other if word == "or" else result ^ other


def _set_results(type_name: str) -> dict[str, tuple[str, np.generic[Any]]]:
    """Result types of ``set`` for an operand type: register kind and the bits of true."""
    results: dict[str, tuple[str, np.generic[Any]]] = {
        "u32": ("b32", u32(0xFFFFFFFF)),
        "s32": ("b32", u32(0xFFFFFFFF)),
    }
    if type_name in _HALF_ONE:
        all_ones = ("b16", u16(0xFFFF))
        return results | {"u16": all_ones, "s16": all_ones, type_name: ("b16", _HALF_ONE[type_name])}
    return results | {"f32": ("b32", u32(0x3F800000))}


_HALF_ONE = {"f16": u16(0x3C00), "bf16": u16(0x3F80)}


def _chosen(compare: Callable[..., Predicate], true_bits: np.generic[Any], a: Bits, b: Bits) -> Bits:
    return np.where(compare(a, b), true_bits, np.zeros(1, true_bits.dtype))


def _packed_sets(comparisons: dict[str, dict[str, Op]]) -> dict[str, Op]:
    """``set`` on two halves: 1.0 or all ones in each half."""
    table: dict[str, Op] = {}
    for form, one in _HALF_ONE.items():
        for name, compare in comparisons[form].items():
            for result, true_bits in ((f"{form}x2", one), ("u32", u16(0xFFFF)), ("s32", u16(0xFFFF))):
                choose = packed16.packed(partial(_chosen, compare.function, true_bits))
                table[f"set.{name}.{result}.{form}x2"] = call("b32", ("b32", "b32"), choose)
    return table


def _packed_setp(comparisons: dict[str, dict[str, Op]]) -> dict[str, Op]:
    """``setp`` on two halves: a predicate of the low ones and one of the high ones."""
    table: dict[str, Op] = {}
    for form in _HALF_ONE:
        for name, compare in comparisons[form].items():
            halves = partial(_of_halves, compare.function)
            table[f"setp.{name}.{form}x2"] = Op(("pred", "pred"), ("b32", "b32"), halves)
            for word in _COMBINE:
                combined = partial(_of_halves, partial(_combined, compare.function, word))
                table[f"setp.{name}.{word}.{form}x2"] = Op(("pred", "pred"), ("b32", "b32", "pred"), combined)
    return table


def _of_halves(compare: Callable[..., Predicate], a: U32, b: U32, *others: Predicate) -> tuple[Predicate, Predicate]:
    first, second = (
        compare((a >> shift).astype(u16), (b >> shift).astype(u16), *others) for shift in (u32(0), u32(16))
    )
    return first, second


def _classes() -> dict[str, Op]:
    """``testp``: of which kind a float is."""
    table: dict[str, Op] = {}
    for form, unsigned, fraction_bits in (("f32", "u32", 23), ("f64", "u64", 52)):
        size = int(form[1:])
        infinity = ((1 << (size - 1 - fraction_bits)) - 1) << fraction_bits
        magnitude = f"({{0}} & {unsigned}({(1 << (size - 1)) - 1}))"
        least_normal, beyond = f"{unsigned}({1 << fraction_bits})", f"{unsigned}({infinity})"
        for name, source in {
            "finite": f"{magnitude} < {beyond}",
            "infinite": f"{magnitude} == {beyond}",
            "number": f"{magnitude} <= {beyond}",
            "notanumber": f"{magnitude} > {beyond}",
            "normal": f"({magnitude} >= {least_normal}) & ({magnitude} < {beyond})",
            "subnormal": f"({magnitude} > {unsigned}(0)) & ({magnitude} < {least_normal})",
        }.items():
            table[f"testp.{name}.{form}"] = inline("pred", (f"b{size}",), source)
    return table
