"""Directed rounding (``.rz``, ``.rm``, ``.rp``) of f64 arithmetic: the nearest result, moved by one step if it lies on
the wrong side of the exact one. Which side that is, exact rational arithmetic says."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from . import float64
from .bits import U64, f64


def _side(operation: str, values: tuple[float, ...], result: float) -> int:
    """Sign of (result - exact result), of finite operands with a finite result."""
    exact = [Fraction(value) for value in values]
    at = Fraction(result)
    if operation == "add":
        difference = at - (exact[0] + exact[1])
    elif operation == "sub":
        difference = at - (exact[0] - exact[1])
    elif operation == "mul":
        difference = at - exact[0] * exact[1]
    elif operation == "fma":
        difference = at - (exact[0] * exact[1] + exact[2])
    elif operation == "sqrt":
        difference = at * at - exact[0]
    else:
        difference = at - (exact[0] / exact[1] if operation == "div" else 1 / exact[0])
    return (difference > 0) - (difference < 0)


def _overflowed(values: tuple[float, ...], result: float) -> bool:
    return math.isinf(result) and all(map(math.isfinite, values))


def _directed(*operands: U64, operation: str, nearest: Callable[..., U64], mode: str) -> U64:
    bits = np.array(np.broadcast_arrays(nearest(*operands), *operands)[0])
    columns = [np.broadcast_to(float64.as_f64(operand), bits.shape) for operand in operands]
    results = bits.view(f64)
    for index in range(bits.size):
        values = tuple(float(column[index]) for column in columns)
        result = float(results[index])
        if math.isnan(result) or not all(map(math.isfinite, values)):
            continue
        if operation in ("div", "rcp") and values[-1] == 0:
            continue
        toward = 0.0 if mode == "rz" else (-math.inf if mode == "rm" else math.inf)
        if _overflowed(values, result):
            is_beyond = mode == "rz" or (result > 0) == (mode == "rm")
        elif result == 0 and _is_exact_zero(operation, values):
            if mode == "rm" and operation in ("add", "sub", "fma"):
                results[index] = _zero_toward_minus(operation, values, result)
            continue
        else:
            side = _side(operation, values, result)
            size = side if result >= 0 and not (result == 0 and side > 0) else -side
            is_beyond = size > 0 if mode == "rz" else side == (1 if mode == "rm" else -1)
            if mode == "rz" and result == 0:
                continue
        if is_beyond:
            moved = math.nextafter(result, toward)
            results[index] = math.copysign(moved, result) if moved == 0 else moved
    return bits


def _is_exact_zero(operation: str, values: tuple[float, ...]) -> bool:
    return _side(operation, values, 0.0) == 0


def _zero_toward_minus(operation: str, values: tuple[float, ...], nearest: float) -> float:
    """An exact zero sum: +0 only if both addends are +0."""
    if operation == "fma":
        product = values[0] * values[1]
        addends = (product, values[2])
    else:
        addends = (values[0], values[1] if operation == "add" else -values[1])
    both_plus = all(value == 0 and math.copysign(1, value) > 0 for value in addends)
    return 0.0 if both_plus else -0.0


NEAREST: dict[str, tuple[int, Callable[..., U64]]] = {
    "add": (2, float64.add),
    "sub": (2, float64.sub),
    "mul": (2, float64.mul),
    "div": (2, float64.div),
    "fma": (3, float64.fma),
    "rcp": (1, float64.rcp),
    "sqrt": (1, float64.sqrt),
}
"""What rounds, by PTX word: operands, and a function of them."""
DIRECTED: dict[str, tuple[int, Any]] = {
    name: (count, partial(_directed, operation=name, nearest=nearest)) for name, (count, nearest) in NEAREST.items()
}
"""The same with a function that takes ``mode`` too: rz, rm or rp."""
