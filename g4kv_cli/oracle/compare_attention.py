"""Attention outputs against the oracle: each element, and all (token, head) rows together."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.oracle.attention import ExpectedAttention
from g4kv_cli.oracle.attention_limits import Rounding, mean_scale_limit, scale_error
from g4kv_cli.oracle.compare import Axes, compare_values
from g4kv_cli.oracle.reference import Expected
from g4kv_cli.oracle.suspects import Suspects
from g4kv_cli.records.run import Mismatch

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]

LIMIT_TEXT = "bf16 weights and output, float32 sums"


def compare_attention(
    operation: str, got: Array, expected: ExpectedAttention, axes: Axes, suspects: Suspects | None = None
) -> Mismatch | None:
    """``got`` bf16 [tokens, heads, head_dim]: every element within its limit, and all rows together neither larger nor
    smaller than roundings make them (attention_limits.py); None if so. Non-finite results are looked at first.
    ``suspects``: see compare_values."""
    value, rounding = expected.value, expected.rounding
    found = compare_values(operation, got, Expected(value, rounding.limit, LIMIT_TEXT), axes, suspects)
    return found or _compare_scale(operation, got, value, rounding, axes)


def _compare_scale(operation: str, got: Array, value: Float64, rounding: Rounding, axes: Axes) -> Mismatch | None:
    """The mean scale error over all rows; the second line behind the limits of the elements."""
    if not value.size:
        return None
    errors = scale_error(got.astype(np.float64), value)
    mean, limit = float(errors.mean()), mean_scale_limit(rounding)
    if abs(mean) <= limit:
        return None
    row = np.unravel_index(int(np.argmax(errors * np.sign(mean))), errors.shape)
    worst = (*(int(at) for at in row), int(np.argmax(np.abs(value[row]))))
    return Mismatch(
        operation=f"{operation}: all rows",
        count=errors.size,
        total=errors.size,
        first=axes.coordinate(worst),
        first_got=f"{float(got[worst]):.6g}",
        first_want=f"{float(value[worst]):.7g}",
        worst=axes.coordinate(worst),
        worst_got=f"{float(got[worst]):.6g}",
        worst_want=f"{float(value[worst]):.7g}",
        limit=f"mean relative change of the rows within {limit:.3g}",
        note=f"the rows are {'larger' if mean > 0 else 'smaller'} by {abs(mean):.3g} on average, each element within"
        " its limit: is a result or a weight cut where it has to be rounded?",
    )


def compare_lse(operation: str, got: Array, value: Float64, limit: Float64, axes: Axes) -> Mismatch | None:
    """float32 [tokens, heads] log-sum-exp values, each within its limit; NaN and infinity are never within."""
    error = np.abs(got.astype(np.float64) - value)
    wrong = ~(error <= limit)
    if not wrong.any():
        return None
    excess = np.where(wrong, np.nan_to_num(error - limit, nan=np.inf), -1.0)
    first = tuple(int(at) for at in np.unravel_index(int(np.argmax(wrong)), wrong.shape))
    worst = tuple(int(at) for at in np.unravel_index(int(np.argmax(excess)), wrong.shape))
    return Mismatch(
        operation=operation,
        count=int(np.count_nonzero(wrong)),
        total=wrong.size,
        first=axes.coordinate(first),
        first_got=f"{float(got[first]):.9g}",
        first_want=f"{float(value[first]):.9g}",
        worst=axes.coordinate(worst),
        worst_got=f"{float(got[worst]):.9g}",
        worst_want=f"{float(value[worst]):.9g}",
        limit=f"float32 error bound: {float(limit[worst]):.3g} at the worst",
    )


def compare_float32_bits(operation: str, got: Array, want: Array, axes: Axes) -> Mismatch | None:
    """Two float32 arrays [tokens, heads], bit for bit."""
    wrong = got.view(np.uint32) != want.view(np.uint32)
    if not wrong.any():
        return None
    first = tuple(int(at) for at in np.unravel_index(int(np.argmax(wrong)), wrong.shape))
    where, got_text, want_text = axes.coordinate(first), f"{float(got[first]):.9g}", f"{float(want[first]):.9g}"
    return Mismatch(
        operation=operation,
        count=int(np.count_nonzero(wrong)),
        total=wrong.size,
        first=where,
        first_got=got_text,
        first_want=want_text,
        worst=where,
        worst_got=got_text,
        worst_want=want_text,
        limit="bit-equal",
    )
