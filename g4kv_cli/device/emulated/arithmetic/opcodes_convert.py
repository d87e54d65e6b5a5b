"""Table entries of ``cvt``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from . import conversions, float64, integer_conversions, numerics, packed16, rounding
from .integer_conversions import INTEGER_TYPES, IntegerType
from .operation import Op, call, inline


def conversion_operations() -> dict[str, Op]:
    return _integer_to_integer() | _integer_to_float() | _float_to_integer() | _float_to_float() | _packing()


def _kind(integer: IntegerType) -> str:
    return f"b{max(integer.width, 16)}"


def _to_integer(target: IntegerType, operand: str, function: Callable[..., Any]) -> Op:
    return Op((_kind(target),), (operand,), function, sign_extends=target.is_signed)


def _integer_to_integer() -> dict[str, Op]:
    table: dict[str, Op] = {}
    for target in INTEGER_TYPES:
        for source in INTEGER_TYPES:
            plain = partial(integer_conversions.integer_from_integer, target=target, source=source)
            clamped = partial(integer_conversions.integer_from_integer_saturated, target=target, source=source)
            table[f"cvt.{target.name}.{source.name}"] = _to_integer(target, _kind(source), plain)
            if source.least >= target.least and source.greatest <= target.greatest:
                continue  # nothing to saturate: not PTX
            table[f"cvt.sat.{target.name}.{source.name}"] = _to_integer(target, _kind(source), clamped)
    for sign in "us":
        table[f"cvt.{sign}64.u32"] = inline("b64", ("b32",), "{0}.astype(u64)")
        table[f"cvt.{sign}64.s32"] = inline("b64", ("b32",), "{0}.view(i32).astype(u64)")
        cut = inline("b32", ("b64",), "{0}.astype(u32)")
        for other in "us":
            table[f"cvt.{sign}32.{other}64"] = replace(cut, sign_extends=sign == "s")
    return table


def _integer_to_float() -> dict[str, Op]:
    table: dict[str, Op] = {}
    for source in INTEGER_TYPES:
        results: dict[str, tuple[str, Callable[..., Any]]] = {
            "cvt.rn.f32": ("b32", integer_conversions.f32_from_integer),
            "cvt.rn.f64": ("b64", integer_conversions.f64_from_integer),
            "cvt.rn.f16": ("b16", integer_conversions.f16_from_integer),
            "cvt.rn.bf16": ("b16", integer_conversions.bf16_from_integer),
        }
        for mode in rounding.DIRECTIONS:
            for form in ("bf16", "f16"):
                half = partial(integer_conversions.half_from_integer_directed, mode=mode, form=form)
                results[f"cvt.{mode}.{form}"] = ("b16", half)
            single = partial(integer_conversions.f32_from_integer_directed, mode=mode)
            results[f"cvt.{mode}.f32"] = ("b32", single)
            double = partial(integer_conversions.f64_from_integer_directed, mode=mode)
            results[f"cvt.{mode}.f64"] = ("b64", double)
        for name, (kind, function) in results.items():
            table[f"{name}.{source.name}"] = call(kind, (_kind(source),), partial(function, source=source))
    return table


def _float_to_integer() -> dict[str, Op]:
    table: dict[str, Op] = {}
    for mode in numerics.INTEGRAL_ROUNDING:
        for target in INTEGER_TYPES:
            for word, ftz in (("", False), ("ftz.", True)):
                convert = partial(integer_conversions.integer_from_f32, mode=mode, target=target, ftz=ftz)
                table[f"cvt.{mode}.{word}{target.name}.f32"] = _to_integer(target, "b32", convert)
            for form, operand, function in (
                ("f16", "b16", integer_conversions.integer_from_f16),
                ("bf16", "b16", integer_conversions.integer_from_bf16),
                ("f64", "b64", integer_conversions.integer_from_f64),
            ):
                convert = partial(function, mode=mode, target=target)
                table[f"cvt.{mode}.{target.name}.{form}"] = _to_integer(target, operand, convert)
        table |= _to_integral(mode)
    return table


def _to_integral(mode: str) -> dict[str, Op]:
    """Float results without fraction."""
    half, single, double = ("b16",), ("b32",), ("b64",)
    return {
        f"cvt.{mode}.f32.f32": call("b32", single, partial(numerics.integral, mode=mode)),
        f"cvt.{mode}.ftz.f32.f32": call("b32", single, partial(numerics.integral_ftz, mode=mode)),
        f"cvt.{mode}.f64.f64": call("b64", double, partial(float64.integral, mode=mode)),
        f"cvt.{mode}.f16.f16": call("b16", half, partial(packed16.integral, mode=mode, form="f16")),
        f"cvt.{mode}.bf16.bf16": call("b16", half, partial(packed16.integral, mode=mode, form="bf16")),
    }


def _float_to_float() -> dict[str, Op]:
    single = ("b32",)
    narrow: dict[str, Callable[..., Any]] = {
        "cvt.rn.bf16.f32": conversions.bf16_from_f32,
        "cvt.rn.f16.f32": conversions.f16_from_f32,
    }
    for mode in rounding.DIRECTIONS:
        narrow[f"cvt.{mode}.bf16.f32"] = partial(conversions.bf16_from_f32_directed, mode=mode)
        narrow[f"cvt.{mode}.f16.f32"] = partial(conversions.f16_from_f32_directed, mode=mode)
    table = {name: call("b16", single, function) for name, function in narrow.items()}
    for form in ("bf16", "f16"):
        for mode in ("rn", "rz"):
            convert = narrow[f"cvt.{mode}.{form}.f32"]
            table[f"cvt.{mode}.relu.{form}.f32"] = call("b16", single, partial(_then_relu, convert))
    for mode in ("rn", *rounding.DIRECTIONS):
        table[f"cvt.{mode}.ftz.f32.f64"] = call("b32", ("b64",), partial(float64.f32_from_f64_ftz, mode=mode))
    return table | {
        "cvt.f32.bf16": inline("b32", ("b16",), "{0}.astype(u32) << u32(16)"),
        "cvt.f32.f16": call("b32", ("b16",), conversions.f32_from_f16),
        "cvt.f64.f32": call("b64", single, conversions.f64_from_f32),
        "cvt.ftz.f64.f32": call("b64", single, conversions.f64_from_f32_ftz),
        "cvt.f64.f16": call("b64", ("b16",), conversions.f64_from_f16),
        "cvt.f64.bf16": call("b64", ("b16",), conversions.f64_from_bf16),
        "cvt.rn.f16.f64": call("b16", ("b64",), partial(conversions.half_from_f64, form="f16")),
        "cvt.rn.bf16.f64": call("b16", ("b64",), partial(conversions.half_from_f64, form="bf16")),
        "cvt.rn.tf32.f32": call("b32", single, conversions.tf32_from_f32_even),
        "cvt.rn.f32.f64": call("b32", ("b64",), float64.f32_from_f64),
        "cvt.rz.f32.f64": call("b32", ("b64",), partial(float64.f32_from_f64_directed, mode="rz")),
        "cvt.rm.f32.f64": call("b32", ("b64",), partial(float64.f32_from_f64_directed, mode="rm")),
        "cvt.rp.f32.f64": call("b32", ("b64",), partial(float64.f32_from_f64_directed, mode="rp")),
        "cvt.rna.tf32.f32": call("b32", single, conversions.tf32_from_f32),
        "cvt.sat.f32.f32": call("b32", single, conversions.saturate_f32),
        "cvt.ftz.sat.f32.f32": call("b32", single, conversions.saturate_f32_ftz),
        "cvt.ftz.f32.f32": call("b32", single, conversions.flush_f32),
    }


def _then_relu(convert: Callable[..., Any], a: Any) -> Any:
    return conversions.relu16(convert(a))


def _both(convert: Callable[..., Any], high: Any, low: Any) -> Any:
    return conversions.packed(convert(high), convert(low))


def _packing() -> dict[str, Op]:
    """Two f32 into one register of two 16-bit or 8-bit floats, 8-bit pairs back to f16 pairs; two s32 likewise."""
    two = ("b32", "b32")
    table: dict[str, Op] = {}
    scalars = _float_to_float()
    for form in ("bf16", "f16"):
        for mode in ("rn", "rz", "rn.relu", "rz.relu"):
            convert = scalars[f"cvt.{mode}.{form}.f32"].function
            table[f"cvt.{mode}.{form}x2.f32"] = call("b32", two, partial(_both, convert))
    for name in ("e4m3", "e5m2"):
        for relu, word in ((False, ""), (True, "relu.")):
            convert = partial(conversions.f8x2_from_f32, name=name, relu=relu)
            table[f"cvt.rn.satfinite.{word}{name}x2.f32"] = call("b16", two, convert)
            from_halves = partial(conversions.f8x2_from_f16x2, name=name, relu=relu)
            table[f"cvt.rn.satfinite.{word}{name}x2.f16x2"] = call("b16", ("b32",), from_halves)
        table[f"cvt.rn.f16x2.{name}x2"] = call("b32", ("b16",), partial(conversions.f16x2_from_f8x2, name=name))
    for target in INTEGER_TYPES:
        pack = partial(integer_conversions.packed_from_integers, target=target)
        if target.width == 16:
            table[f"cvt.pack.sat.{target.name}.s32"] = call("b32", two, pack)
        elif target.width == 8:
            table[f"cvt.pack.sat.{target.name}.s32.b32"] = call("b32", (*two, "b32"), pack)
    return table
