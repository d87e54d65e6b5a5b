"""Packed integers: the video instructions on 2 or 4 parts of a register, and ``.s16x2`` and ``.u16x2`` arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, cast

import numpy as np

from .bits import U32, Bits, i64, u32
from .operation import Op, call

_PART_BITS = {2: 16, 4: 8}


def _parts(a: U32, count: int, is_signed: bool) -> Bits:
    """int64 [parts, n], the lowest first."""
    bits = _PART_BITS[count]
    wide = a.astype(i64)
    found = np.stack([(wide >> (bits * part)) & ((1 << bits) - 1) for part in range(count)])
    return found - ((found >> (bits - 1)) << bits) if is_signed else found


def _joined(parts: Bits, count: int) -> U32:
    bits = _PART_BITS[count]
    total = sum((parts[part] & ((1 << bits) - 1)) << (bits * part) for part in range(count))
    return cast(Bits, total).astype(u32)


def _average(a: Bits, b: Bits) -> Bits:
    return cast(Bits, (a + b + ((a + b) >= 0)) >> 1)


_PART_OPERATIONS: dict[str, Callable[[Bits, Bits], Any]] = {
    "vadd": lambda a, b: a + b,
    "vsub": lambda a, b: a - b,
    "vavrg": _average,
    "vabsdiff": lambda a, b: np.abs(a - b),
    "vmin": np.minimum,
    "vmax": np.maximum,
}
_COMPARISONS: dict[str, Callable[[Bits, Bits], Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def _on_parts(
    a: U32, b: U32, c: U32, operation: Callable[[Bits, Bits], Any], count: int, signs: tuple[bool, bool, bool], end: str
) -> U32:
    """``signs``: of the result, a and b. ``end``: nothing, ``sat``, or ``add`` the parts of the result to c."""
    a, b, c = np.broadcast_arrays(a, b, c)
    parts = np.asarray(operation(_parts(a, count, signs[1]), _parts(b, count, signs[2]))).astype(i64)
    bits = _PART_BITS[count]
    if end == "sat":
        least, most = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signs[0] else (0, (1 << bits) - 1)
        parts = np.clip(parts, least, most)
    if end == "add":
        return np.asarray(parts.sum(0) + c.astype(i64), i64).astype(u32)
    return _joined(parts, count)


def _packed(a: U32, b: U32, operation: Callable[[Bits, Bits], Any], is_signed: bool, relu: bool) -> U32:
    a, b = np.broadcast_arrays(a, b)
    parts = np.asarray(operation(_parts(a, 2, is_signed), _parts(b, 2, is_signed)))
    return _joined(np.maximum(parts, 0) if relu else parts, 2)


def video_operations() -> dict[str, Op]:
    table: dict[str, Op] = {}
    three = ("b32", "b32", "b32")
    for (name, operation), count, signs in product(_PART_OPERATIONS.items(), (2, 4), product("us", repeat=3)):
        is_signed = tuple(sign == "s" for sign in signs)
        types = ".".join(f"{sign}32" for sign in signs)
        for end in ("", "sat", "add"):
            function = partial(_on_parts, operation=operation, count=count, signs=is_signed, end=end)
            table[f"{name}{count}.{types}{'.' if end else ''}{end}"] = call("b32", three, function)
    for (name, compare), count, signs in product(_COMPARISONS.items(), (2, 4), product("us", repeat=2)):
        is_signed = (False, signs[0] == "s", signs[1] == "s")
        for end in ("", "add"):
            function = partial(_on_parts, operation=compare, count=count, signs=is_signed, end=end)
            table[f"vset{count}.{signs[0]}32.{signs[1]}32.{name}{'.' if end else ''}{end}"] = call(
                "b32", three, function
            )
    return table | _pairs()


def _pairs() -> dict[str, Op]:
    table: dict[str, Op] = {}
    operations = {"add": np.add, "min": np.minimum, "max": np.maximum}
    for (name, operation), sign in product(operations.items(), "us"):
        plain = partial(_packed, operation=operation, is_signed=sign == "s", relu=False)
        table[f"{name}.{sign}16x2"] = call("b32", ("b32", "b32"), plain)
    for name in ("min", "max"):
        relu = call("b32", ("b32", "b32"), partial(_packed, operation=operations[name], is_signed=True, relu=True))
        table[f"{name}.s16x2.relu"] = table[f"{name}.relu.s16x2"] = relu
        table[f"{name}.relu.s32"] = call("b32", ("b32", "b32"), partial(_relu_word, operation=operations[name]))
    return table


def _relu_word(a: U32, b: U32, operation: Callable[[Bits, Bits], Any]) -> U32:
    chosen = np.asarray(operation(a.view(np.int32), b.view(np.int32)), np.int32)
    return np.maximum(chosen, np.int32(0)).view(u32)
