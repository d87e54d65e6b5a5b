"""Table entries of ``cvt``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any


from g4kv_cli.device.emulated import conversions
from g4kv_cli.device.emulated.operation import Op, call, inline

_INTEGERS = tuple((sign, width) for sign in "us" for width in (8, 16, 32, 64))
_MODES = ("rni", "rzi", "rmi", "rpi")


def conversion_operations() -> dict[str, Op]:
    return _integer_to_integer() | _integer_to_float() | _float_to_integer() | _float_to_float() | _packing()


def _kind(width: int) -> str:
    return f"b{max(width, 16)}"


def _extending(op: Op, sign: str) -> Op:
    return replace(op, sign_extends=sign == "s")


def _integer_to_integer() -> dict[str, Op]:
    table: dict[str, Op] = {}
    for to_sign, to_width in _INTEGERS:
        for from_sign, from_width in _INTEGERS:
            pair = f"{to_sign}{to_width}.{from_sign}{from_width}"
            arguments = {
                "to_width": to_width,
                "to_signed": to_sign == "s",
                "from_width": from_width,
                "from_signed": from_sign == "s",
            }
            result, operands = _kind(to_width), (_kind(from_width),)
            plain = call(result, operands, partial(conversions.integer_from_integer, **arguments))
            clamped = call(result, operands, partial(conversions.integer_from_integer_saturated, **arguments))
            table[f"cvt.{pair}"] = _extending(plain, to_sign)
            table[f"cvt.sat.{pair}"] = _extending(clamped, to_sign)
    for sign in "us":
        table[f"cvt.{sign}64.u32"] = inline("b64", ("b32",), "{0}.astype(u64)")
        table[f"cvt.{sign}64.s32"] = inline("b64", ("b32",), "{0}.view(i32).astype(u64)")
        for other in "us":
            table[f"cvt.{sign}32.{other}64"] = _extending(inline("b32", ("b64",), "{0}.astype(u32)"), sign)
    return table


def _integer_to_float() -> dict[str, Op]:
    table: dict[str, Op] = {}
    for sign, width in _INTEGERS:
        name, operands = f"{sign}{width}", (_kind(width),)
        typed = {"width": width, "is_signed": sign == "s"}
        table[f"cvt.rn.f32.{name}"] = call("b32", operands, partial(conversions.f32_from_integer, **typed))
        table[f"cvt.rn.f16.{name}"] = call("b16", operands, partial(conversions.f16_from_integer, **typed))
        if width <= 32:
            to_zero = partial(conversions.f32_from_integer_to_zero, **typed)
            table[f"cvt.rz.f32.{name}"] = call("b32", operands, to_zero)
    return table


def _float_to_integer() -> dict[str, Op]:
    table: dict[str, Op] = {}
    for mode in _MODES:
        for sign, width in _INTEGERS:
            typed = {"mode": mode, "width": width, "is_signed": sign == "s"}
            for flushed, ftz in (("", False), ("ftz.", True)):
                convert = partial(conversions.integer_from_f32, **typed, ftz=ftz)
                op = call(_kind(width), ("b32",), convert)
                table[f"cvt.{mode}.{flushed}{sign}{width}.f32"] = _extending(op, sign)
            op = call(_kind(width), ("b16",), partial(conversions.integer_from_f16, **typed))
            table[f"cvt.{mode}.{sign}{width}.f16"] = _extending(op, sign)
        table[f"cvt.{mode}.f32.f32"] = call("b32", ("b32",), partial(conversions.integral_f32, mode=mode))
    return table


def _float_to_float() -> dict[str, Op]:
    single = ("b32",)
    narrow: dict[str, Callable[..., Any]] = {
        "cvt.rn.bf16.f32": conversions.bf16_from_f32,
        "cvt.rz.bf16.f32": conversions.bf16_from_f32_to_zero,
        "cvt.rn.f16.f32": conversions.f16_from_f32,
        "cvt.rz.f16.f32": conversions.f16_from_f32_to_zero,
    }
    table = {name: call("b16", single, function) for name, function in narrow.items()}
    for form in ("bf16", "f16"):
        convert = narrow[f"cvt.rn.{form}.f32"]
        table[f"cvt.rn.relu.{form}.f32"] = call("b16", single, partial(_then_relu, convert))
    return table | {
        "cvt.f32.bf16": inline("b32", ("b16",), "{0}.astype(u32) << u32(16)"),
        "cvt.f32.f16": call("b32", ("b16",), conversions.f32_from_f16),
        "cvt.f64.f32": call("b64", single, conversions.f64_from_f32),
        "cvt.rna.tf32.f32": call("b32", single, conversions.tf32_from_f32),
        "cvt.sat.f32.f32": call("b32", single, conversions.saturate_f32),
        "cvt.ftz.f32.f32": call("b32", single, conversions.flush_f32),
    }


def _then_relu(convert: Callable[..., Any], a: Any) -> Any:
    return conversions.relu16(convert(a))


def _both(convert: Callable[..., Any], high: Any, low: Any) -> Any:
    return conversions.packed(convert(high), convert(low))


def _packing() -> dict[str, Op]:
    """Two f32 into one register of two 16-bit or 8-bit floats, and 8-bit pairs back to f16 pairs."""
    two = ("b32", "b32")
    table: dict[str, Op] = {}
    scalars = _float_to_float()
    for form in ("bf16", "f16"):
        for mode in ("rn", "rz", "rn.relu"):
            convert = scalars[f"cvt.{mode}.{form}.f32"].function
            table[f"cvt.{mode}.{form}x2.f32"] = call("b32", two, partial(_both, convert))
    for name in ("e4m3", "e5m2"):
        for relu, word in ((False, ""), (True, "relu.")):
            convert = partial(conversions.f8x2_from_f32, name=name, relu=relu)
            table[f"cvt.rn.satfinite.{word}{name}x2.f32"] = call("b16", two, convert)
        table[f"cvt.rn.f16x2.{name}x2"] = call("b32", ("b16",), partial(conversions.f16x2_from_f8x2, name=name))
    return table


