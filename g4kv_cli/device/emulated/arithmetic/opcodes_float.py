"""Table entries of floating-point arithmetic: f32, bf16, f16 and their packed pairs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from . import float64, mufu, mufu_double, mufu_trig, numerics, packed16, rounding, rounding64
from .bits import F32_SIGN, as_f32, f32, f32_bits, f64, u64
from .operation import Op, call

_ONE, _TWO, _THREE = ("b32",), ("b32", "b32"), ("b32", "b32", "b32")


def float_operations() -> dict[str, Op]:
    table = _single() | _double() | _directed() | _approximate()
    for form in ("bf16", "f16"):
        table |= _halves(form)
    return table


def _single() -> dict[str, Op]:
    binary = {
        "add.f32": numerics.add,
        "sub.f32": numerics.sub,
        "mul.f32": numerics.mul,
        "add.rn.f32": numerics.add,
        "sub.rn.f32": numerics.sub,
        "mul.rn.f32": numerics.mul,
        "add.ftz.f32": numerics.add_ftz,
        "sub.ftz.f32": numerics.sub_ftz,
        "mul.ftz.f32": numerics.mul_ftz,
        "add.rn.ftz.f32": numerics.add_ftz,
        "sub.rn.ftz.f32": numerics.sub_ftz,
        "mul.rn.ftz.f32": numerics.mul_ftz,
        "add.sat.f32": numerics.add_sat,
        "sub.sat.f32": numerics.sub_sat,
        "mul.sat.f32": numerics.mul_sat,
        "add.rn.sat.f32": numerics.add_sat,
        "sub.rn.sat.f32": numerics.sub_sat,
        "mul.rn.sat.f32": numerics.mul_sat,
        "div.rn.f32": numerics.div,
        "div.rn.ftz.f32": numerics.div_ftz,
        "min.f32": numerics.minimum,
        "max.f32": numerics.maximum,
        "min.ftz.f32": numerics.minimum_ftz,
        "max.ftz.f32": numerics.maximum_ftz,
        "min.NaN.f32": numerics.minimum_nan,
        "max.NaN.f32": numerics.maximum_nan,
        "copysign.f32": numerics.copysign,
    }
    unary = {
        "neg.f32": numerics.neg,
        "abs.f32": numerics.absolute,
        "neg.ftz.f32": numerics.neg_ftz,
        "abs.ftz.f32": numerics.absolute_ftz,
        "rcp.rn.f32": numerics.rcp,
        "rcp.rn.ftz.f32": numerics.rcp_ftz,
        "sqrt.rn.f32": numerics.sqrt,
        "sqrt.rn.ftz.f32": numerics.sqrt_ftz,
    }
    ternary = {
        "fma.rn.f32": numerics.fma,
        "fma.rn.ftz.f32": numerics.fma_ftz,
        "fma.rn.sat.f32": numerics.fma_sat,
    }
    for name, flushed in (("add", numerics.add_ftz), ("sub", numerics.sub_ftz), ("mul", numerics.mul_ftz)):
        for word in ("", "rn."):
            binary[f"{name}.{word}ftz.sat.f32"] = partial(_then_saturated, flushed)
    ternary["fma.rn.ftz.sat.f32"] = partial(_then_saturated, numerics.fma_ftz)
    table = {name: call("b32", _TWO, function) for name, function in binary.items()}
    table |= {name: call("b32", _ONE, function) for name, function in unary.items()}
    return table | {name: call("b32", _THREE, function) for name, function in ternary.items()}


def _then_saturated(function: Callable[..., Any], *operands: Any) -> Any:
    return numerics.saturate(function(*operands))


def _directed() -> dict[str, Op]:
    """``.rz``, ``.rm``, ``.rp``: one exact f64 result, one directed rounding."""
    table: dict[str, Op] = {}
    for mode in rounding.DIRECTIONS:
        for name, operands, function in (
            ("add", _TWO, rounding.add),
            ("sub", _TWO, rounding.sub),
            ("mul", _TWO, rounding.mul),
            ("fma", _THREE, rounding.fma),
        ):
            table[f"{name}.{mode}.f32"] = call("b32", operands, partial(function, mode=mode))
            flushed = partial(_flushed, directed=function, exact=_EXACT[name], mode=mode)
            table[f"{name}.{mode}.ftz.f32"] = call("b32", operands, flushed)
        for name in ("div", "rcp", "sqrt"):
            count, function = rounding64.DIRECTED[name]
            directed = partial(_through_f64, function=function, mode=mode)
            table[f"{name}.{mode}.f32"] = call("b32", ("b32",) * count, directed)
            exact = partial(_in_f64, function=function, mode=mode)
            flushed = partial(_flushed, directed=partial(_through_f64, function=function), exact=exact, mode=mode)
            table[f"{name}.{mode}.ftz.f32"] = call("b32", ("b32",) * count, flushed)
    return table


_EXACT: dict[str, Callable[..., Any]] = {
    "add": rounding.exact_add,
    "sub": lambda a, b: rounding.exact_add(a, b ^ F32_SIGN),
    "mul": rounding.exact_mul,
    "fma": rounding.exact_fma,
}


def _flushed(*operands: Any, directed: Callable[..., Any], exact: Callable[..., Any], mode: str) -> Any:
    """``.ftz`` of a directed rounding: operands and result, where it is tiny after rounding."""
    kept = [numerics.flush(operand) for operand in operands]
    result = directed(*kept, mode=mode)
    return np.where(rounding.is_tiny(exact(*kept), mode), result & F32_SIGN, result)


def _in_f64(*operands: Any, function: Callable[..., Any], mode: str) -> Any:
    wide = [as_f32(operand).astype(f64).view(u64) for operand in operands]
    return float64.as_f64(function(*wide, mode=mode))


def _through_f64(*operands: Any, function: Callable[..., Any], mode: str) -> Any:
    """Rounding twice in one direction is rounding once."""
    return f32_bits(rounding.DIRECTIONS[mode](_in_f64(*operands, function=function, mode=mode)).view(f32))


def _double() -> dict[str, Op]:
    table: dict[str, Op] = {}
    for name, count, function in (
        ("min.f64", 2, float64.minimum),
        ("max.f64", 2, float64.maximum),
        ("copysign.f64", 2, float64.copysign),
        ("rcp.approx.ftz.f64", 1, mufu_double.rcp),
        ("rsqrt.approx.ftz.f64", 1, mufu_double.rsqrt),
        ("rsqrt.approx.f64", 1, mufu_double.rsqrt_refined),
        ("neg.f64", 1, float64.neg),
        ("abs.f64", 1, float64.absolute),
    ):
        table[name] = call("b64", ("b64",) * count, function)
    for name, (count, nearest) in rounding64.NEAREST.items():
        table[f"{name}.rn.f64"] = call("b64", ("b64",) * count, nearest)
    for name in ("add", "sub", "mul"):
        table[f"{name}.f64"] = table[f"{name}.rn.f64"]
    for name, (count, directed) in rounding64.DIRECTED.items():
        for mode in rounding.DIRECTIONS:
            table[f"{name}.{mode}.f64"] = call("b64", ("b64",) * count, partial(directed, mode=mode))
    return table


def _approximate() -> dict[str, Op]:
    unary = {
        "ex2.approx": (mufu.ex2, mufu.ex2_ftz),
        "lg2.approx": (mufu.lg2, mufu.lg2_ftz),
        "rsqrt.approx": (mufu.rsqrt, mufu.rsqrt_ftz),
        "rcp.approx": (mufu.rcp, mufu.rcp_ftz),
        "sqrt.approx": (mufu.sqrt, mufu.sqrt_ftz),
        "sin.approx": (mufu_trig.sin, mufu_trig.sin),
        "cos.approx": (mufu_trig.cos, mufu_trig.cos),
    }
    binary = {
        "div.full": (mufu.div_full, mufu.div_full_ftz),
        "div.approx": (mufu.div_approx, mufu.div_approx_ftz),
    }
    table: dict[str, Op] = {}
    for operands, entries in ((_ONE, unary), (_TWO, binary)):
        for name, (kept, flushed) in entries.items():
            table[f"{name}.f32"] = call("b32", operands, kept)
            table[f"{name}.ftz.f32"] = call("b32", operands, flushed)
    table["tanh.approx.f32"] = call("b32", _ONE, mufu_trig.tanh)
    forms: tuple[tuple[str, str, packed16.Format], ...] = (
        ("tanh.approx.f16", "tanh", "f16"),
        ("tanh.approx.bf16", "tanh", "bf16"),
        ("ex2.approx.f16", "ex2", "f16"),
        ("ex2.approx.ftz.bf16", "ex2", "bf16"),
    )
    for opcode, function_name, form in forms:
        half = partial(mufu_trig.half, name=function_name, form=form)
        table[opcode] = call("b16", ("b16",), half)
        table[f"{opcode}x2"] = call("b32", _ONE, packed16.packed(half))
    return table


def _halves(form: packed16.Format) -> dict[str, Op]:
    functions: dict[str, tuple[int, Callable[..., Any]]] = {
        "fma.rn": (3, packed16.fma),
        "fma.rn.relu": (3, packed16.fma_relu),
        "add": (2, packed16.add),
        "add.rn": (2, packed16.add),
        "sub": (2, packed16.sub),
        "sub.rn": (2, packed16.sub),
        "mul": (2, packed16.mul),
        "mul.rn": (2, packed16.mul),
        "min": (2, packed16.minimum),
        "max": (2, packed16.maximum),
        "min.NaN": (2, partial(packed16.minimum, keep_nan=True)),
        "max.NaN": (2, partial(packed16.maximum, keep_nan=True)),
        "neg": (1, packed16.neg),
        "abs": (1, packed16.absolute),
    }
    if form == "f16":
        for name in ("add", "sub", "mul", "add.rn", "sub.rn", "mul.rn", "fma.rn"):
            count, function = functions[name]
            functions[f"{name}.sat"] = (count, partial(_saturated, function))
    table: dict[str, Op] = {}
    for name, (count, function) in functions.items():
        scalar = partial(function, form=form)
        table[f"{name}.{form}"] = call("b16", ("b16",) * count, scalar)
        table[f"{name}.{form}x2"] = call("b32", ("b32",) * count, packed16.packed(scalar))
    return table


def _saturated(function: Callable[..., Any], *operands: Any, form: packed16.Format) -> Any:
    return packed16.saturate(function(*operands, form=form), form)
