"""Table entries of floating-point arithmetic: f32, bf16, f16 and their packed pairs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from g4kv_cli.device.emulated import mufu, numerics, packed16, rounding
from g4kv_cli.device.emulated.bits import F32_SIGN, U32
from g4kv_cli.device.emulated.operation import Op, call

_ONE, _TWO, _THREE = ("b32",), ("b32", "b32"), ("b32", "b32", "b32")


def float_operations() -> dict[str, Op]:
    table = _single() | _directed() | _approximate()
    for form in ("bf16", "f16"):
        table |= _halves(form)
    return table


def _negated(function: Callable[..., U32]) -> Callable[..., U32]:
    """Subtraction from addition: the second operand's sign flipped."""
    return lambda a, b: function(a, b ^ F32_SIGN)


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
    table = {name: call("b32", _TWO, function) for name, function in binary.items()}
    table |= {name: call("b32", _ONE, function) for name, function in unary.items()}
    return table | {name: call("b32", _THREE, function) for name, function in ternary.items()}


def _directed() -> dict[str, Op]:
    """``.rz``, ``.rm``, ``.rp``: one exact f64 result, one directed rounding."""
    table: dict[str, Op] = {}
    directions: dict[str, Callable[[Any], U32]] = {"rz": rounding.to_zero, "rp": rounding.up}
    for mode, narrow in directions.items():
        add = partial(lambda narrow, a, b: narrow(rounding.exact_add(a, b)), narrow)
        mul = partial(lambda narrow, a, b: narrow(rounding.exact_mul(a, b)), narrow)
        fma = partial(lambda narrow, a, b, c: narrow(rounding.exact_fma(a, b, c)), narrow)
        table |= _directed_entries(mode, add, mul, fma)
    down_mul = partial(lambda a, b: rounding.down(rounding.exact_mul(a, b)))
    return table | _directed_entries("rm", rounding.add_down, down_mul, rounding.fma_down)


def _directed_entries(
    mode: str, add: Callable[..., U32], mul: Callable[..., U32], fma: Callable[..., U32]
) -> dict[str, Op]:
    return {
        f"add.{mode}.f32": call("b32", _TWO, add),
        f"sub.{mode}.f32": call("b32", _TWO, _negated(add)),
        f"mul.{mode}.f32": call("b32", _TWO, mul),
        f"fma.{mode}.f32": call("b32", _THREE, fma),
    }


def _approximate() -> dict[str, Op]:
    unary = {
        "ex2.approx": (mufu.ex2, mufu.ex2_ftz),
        "lg2.approx": (mufu.lg2, mufu.lg2_ftz),
        "rsqrt.approx": (mufu.rsqrt, mufu.rsqrt_ftz),
        "rcp.approx": (mufu.rcp, mufu.rcp_ftz),
        "sqrt.approx": (mufu.sqrt, mufu.sqrt_ftz),
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
    table: dict[str, Op] = {}
    for name, (count, function) in functions.items():
        scalar = partial(function, form=form)
        table[f"{name}.{form}"] = call("b16", ("b16",) * count, scalar)
        table[f"{name}.{form}x2"] = call("b32", ("b32",) * count, packed16.packed(scalar))
    return table
