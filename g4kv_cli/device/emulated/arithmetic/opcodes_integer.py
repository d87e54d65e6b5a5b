"""Table entries of integer, bit and predicate opcodes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from . import bitfield, integer
from .bits import Bits, Predicate
from .operation import Op, call, inline
from .video import video_operations

_WIDTHS = (16, 32, 64)
_SIGNED_TYPE = {16: "np.int16", 32: "i32", 64: "i64"}
_UNSIGNED_TYPE = {16: "np.uint16", 32: "u32", 64: "u64"}


def integer_operations() -> dict[str, Op]:
    table: dict[str, Op] = {}
    for width in _WIDTHS:
        table |= _arithmetic(width) | _logic(width) | _shifts(width)
        if width > 16:
            table |= _fields_and_counts(width)
    return table | _wide_products() | _predicates() | _words() | _carries() | video_operations()


def _arithmetic(width: int) -> dict[str, Op]:
    kind, i, u = f"b{width}", _SIGNED_TYPE[width], _UNSIGNED_TYPE[width]
    two, three = (kind, kind), (kind, kind, kind)
    table: dict[str, Op] = {}
    for sign in "us":
        name = f"{sign}{width}"
        table[f"add.{name}"] = inline(kind, two, "{0} + {1}")
        table[f"sub.{name}"] = inline(kind, two, "{0} - {1}")
        table[f"mul.lo.{name}"] = inline(kind, two, "{0} * {1}")
        table[f"mad.lo.{name}"] = inline(kind, three, "{0} * {1} + {2}")
        high = getattr(integer, f"mul_hi_{name}")
        table[f"mul.hi.{name}"] = call(kind, two, high)
        table[f"mad.hi.{name}"] = call(kind, three, lambda a, b, c, high=high: high(a, b) + c)
    table[f"min.u{width}"] = inline(kind, two, "np.minimum({0}, {1})")
    table[f"max.u{width}"] = inline(kind, two, "np.maximum({0}, {1})")
    table[f"min.s{width}"] = inline(kind, two, f"np.minimum({{0}}.view({i}), {{1}}.view({i})).view({u})")
    table[f"max.s{width}"] = inline(kind, two, f"np.maximum({{0}}.view({i}), {{1}}.view({i})).view({u})")
    table[f"neg.s{width}"] = inline(kind, (kind,), "-{0}")
    table[f"abs.s{width}"] = call(kind, (kind,), integer.abs_signed)
    table[f"div.u{width}"] = call(kind, two, integer.div_unsigned)
    table[f"div.s{width}"] = call(kind, two, integer.div_signed)
    table[f"rem.u{width}"] = call(kind, two, integer.rem_unsigned)
    table[f"rem.s{width}"] = call(kind, two, integer.rem_signed)
    table[f"sad.u{width}"] = call(kind, three, integer.sad_unsigned)
    table[f"sad.s{width}"] = call(kind, three, integer.sad_signed)
    return table


def _logic(width: int) -> dict[str, Op]:
    kind = f"b{width}"
    table = {
        f"and.{kind}": inline(kind, (kind, kind), "{0} & {1}"),
        f"or.{kind}": inline(kind, (kind, kind), "{0} | {1}"),
        f"xor.{kind}": inline(kind, (kind, kind), "{0} ^ {1}"),
        f"not.{kind}": inline(kind, (kind,), "~{0}"),
        f"cnot.{kind}": call(kind, (kind,), bitfield.is_zero),
    }
    for sign in "busf":
        if sign == "f" and width == 16:
            continue
        name = f"{sign}{width}"
        table[f"selp.{name}"] = inline(kind, (kind, kind, "pred"), "np.where({2}, {0}, {1})")
        keep = "np.where({2}.view(i32) >= 0, {0}, {1})"
        table[f"slct.{name}.s32"] = inline(kind, (kind, kind, "b32"), keep)
        # A NaN selects the second operand, -0 the first.
        keep = "np.where({2}.view(f32) >= 0, {0}, {1})"
        table[f"slct.{name}.f32"] = inline(kind, (kind, kind, "b32"), keep)
    return table


def _shifts(width: int) -> dict[str, Op]:
    kind, i, u = f"b{width}", _SIGNED_TYPE[width], _UNSIGNED_TYPE[width]
    operands = (kind, "b32")
    if width == 16:  # a 16-bit value with a 32-bit count would be widened by NumPy
        right = call(kind, operands, bitfield.shift_right)
        return {
            "shl.b16": call(kind, operands, bitfield.shift_left),
            "shr.b16": right,
            "shr.u16": right,
            "shr.s16": call(kind, operands, bitfield.shift_right_signed),
        }
    # NumPy defines array shifts by the width or more as the hardware does: zero, or all sign bits.
    count = "{1}.view(i32)" if width == 32 else "{1}"
    right = inline(kind, operands, "{0} >> {1}")
    return {
        f"shl.b{width}": inline(kind, operands, "{0} << {1}"),
        f"shr.b{width}": right,
        f"shr.u{width}": right,
        f"shr.s{width}": inline(kind, operands, f"({{0}}.view({i}) >> {count}).view({u})"),
    }


def _fields_and_counts(width: int) -> dict[str, Op]:
    kind = f"b{width}"
    field = (kind, "b32", "b32")
    highest, highest_signed = bitfield.find_highest, bitfield.find_highest_signed
    return {
        f"popc.{kind}": call("b32", (kind,), bitfield.population),
        f"clz.{kind}": call("b32", (kind,), bitfield.leading_zeros),
        f"brev.{kind}": call(kind, (kind,), bitfield.reverse),
        f"bfind.u{width}": call("b32", (kind,), highest),
        f"bfind.s{width}": call("b32", (kind,), highest_signed),
        f"bfind.shiftamt.u{width}": call("b32", (kind,), lambda a: bitfield.find_shift(highest(a), width)),
        f"bfind.shiftamt.s{width}": call("b32", (kind,), lambda a: bitfield.find_shift(highest_signed(a), width)),
        f"bfe.u{width}": call(kind, field, bitfield.extract),
        f"bfe.s{width}": call(kind, field, bitfield.extract_signed),
        f"bfi.{kind}": call(kind, (kind, *field), bitfield.insert),
    }


def _wide_products() -> dict[str, Op]:
    table: dict[str, Op] = {}
    for narrow, wide in ((16, 32), (32, 64)):
        operand, result = f"b{narrow}", f"b{wide}"
        i, wide_i, wide_u = _SIGNED_TYPE[narrow], _SIGNED_TYPE[wide], _UNSIGNED_TYPE[wide]
        products = {
            "u": f"{{0}}.astype({wide_u}) * {{1}}",
            "s": f"({{0}}.view({i}).astype({wide_i}) * {{1}}.view({i})).view({wide_u})",
        }
        for sign, product in products.items():
            table[f"mul.wide.{sign}{narrow}"] = inline(result, (operand, operand), product)
            table[f"mad.wide.{sign}{narrow}"] = inline(result, (operand, operand, result), f"{product} + {{2}}")
    return table


def _predicates() -> dict[str, Op]:
    two = ("pred", "pred")
    return {
        "and.pred": inline("pred", two, "{0} & {1}"),
        "or.pred": inline("pred", two, "{0} | {1}"),
        "xor.pred": inline("pred", two, "{0} ^ {1}"),
        "not.pred": inline("pred", ("pred",), "~{0}"),
    }


def _words() -> dict[str, Op]:
    """Opcodes that exist for 32 bits only."""
    two, three = ("b32", "b32"), ("b32", "b32", "b32")
    table = {
        "add.sat.s32": call("b32", two, integer.add_sat_s32),
        "sub.sat.s32": call("b32", two, integer.sub_sat_s32),
        "prmt.b32": call("b32", three, bitfield.permute),
        "lop3.b32": call("b32", (*three, "b32"), bitfield.three_input_logic),
        "fns.b32": call("b32", three, bitfield.find_nth_set),
        "bmsk.wrap.b32": call("b32", two, bitfield.bit_mask_wrap),
        "bmsk.clamp.b32": call("b32", two, bitfield.bit_mask_clamp),
    }
    for name, combine in (("or", np.logical_or), ("and", np.logical_and)):
        test = partial(bitfield.logic_and_test, combine=combine)
        table[f"lop3.{name}.b32"] = Op(("b32", "pred"), (*three, "b32", "pred"), test)
    for mode in bitfield.PERMUTE_MODES:
        table[f"prmt.b32.{mode}"] = call("b32", three, partial(bitfield.permute_mode, mode=mode))
    for clamp, limit in (("wrap", bitfield.wrapped), ("clamp", bitfield.clamped)):
        for side, shift in (("l", bitfield.funnel_left), ("r", bitfield.funnel_right)):
            table[f"shf.{side}.{clamp}.b32"] = call(
                "b32",
                three,
                lambda low, high, count, shift=shift, limit=limit: shift(low, high, limit(count)),
            )
        for sign in "us":
            extend = partial(bitfield.extend, clamp=clamp == "clamp", is_signed=sign == "s")
            table[f"szext.{clamp}.{sign}32"] = call("b32", two, extend)
    for sign in "us":
        for part in ("lo", "hi"):
            product = getattr(integer, f"mul24_{part}_{sign}32")
            table[f"mul24.{part}.{sign}32"] = call("b32", two, product)
            table[f"mad24.{part}.{sign}32"] = call("b32", three, lambda a, b, c, product=product: product(a, b) + c)
        for other in "us":
            a_signed, b_signed = sign == "s", other == "s"
            dot = partial(integer.dot4, a_signed=a_signed, b_signed=b_signed)
            table[f"dp4a.{sign}32.{other}32"] = call("b32", three, dot)
            for part in ("lo", "hi"):
                dot = partial(integer.dot2, a_signed=a_signed, b_signed=b_signed, upper=part == "hi")
                table[f"dp2a.{part}.{sign}32.{other}32"] = call("b32", three, dot)
    return table


def _carries() -> dict[str, Op]:
    table: dict[str, Op] = {}
    for name, kind in (("u32", "b32"), ("s32", "b32"), ("u64", "b64"), ("s64", "b64")):
        both, two, three = (kind, "carry"), (kind, kind), (kind, kind, kind)
        for part in ("lo", "hi"):
            product = getattr(integer, f"mul_{part}_{name}")
            with_carry = partial(_multiply_add_carry, product=product)
            table[f"mad.{part}.cc.{name}"] = Op(both, three, partial(_multiply_add, product=product))
            table[f"madc.{part}.cc.{name}"] = Op(both, (*three, "carry"), with_carry)
            table[f"madc.{part}.{name}"] = call(
                kind, (*three, "carry"), lambda a, b, c, carry, with_carry=with_carry: with_carry(a, b, c, carry)[0]
            )
        for verb, start, follow in (
            ("add", integer.add_carry, integer.add_with_carry),
            ("sub", integer.sub_borrow, integer.sub_with_borrow),
        ):
            table[f"{verb}.cc.{name}"] = Op(both, two, start)
            table[f"{verb}c.cc.{name}"] = Op(both, (*two, "carry"), follow)
            table[f"{verb}c.{name}"] = call(
                kind, (*two, "carry"), lambda a, b, carry, follow=follow: follow(a, b, carry)[0]
            )
    return table


def _multiply_add(a: Bits, b: Bits, c: Bits, product: Callable[..., Bits]) -> tuple[Bits, Predicate]:
    return integer.add_carry(product(a, b), c)


def _multiply_add_carry(
    a: Bits, b: Bits, c: Bits, carry: Predicate, product: Callable[..., Bits]
) -> tuple[Bits, Predicate]:
    return integer.add_with_carry(product(a, b), c, carry)
