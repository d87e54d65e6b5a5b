"""Attention outputs against the oracle, judged per element and per (token, head) row."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.oracle.attention import ALL_RMS_LIMIT, ROW_MAX_LIMIT, ROW_RMS_LIMIT
from g4kv_cli.oracle.compare import Axes, compare_values
from g4kv_cli.oracle.reference import Expected
from g4kv_cli.records.run import Mismatch

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]

DERIVED_TEXT = "bf16 weights and output, float32 sums"


def compare_attention(operation: str, got: Array, value: Float64, limit: Float64, axes: Axes) -> Mismatch | None:
    """``got`` bf16, ``value`` and ``limit`` float64 [tokens, heads, head_dim]: every element within its limit, every
    row within the limits relative to itself; None if so. Non-finite results are looked at first."""
    found = compare_values(operation, got, Expected(value, limit, DERIVED_TEXT), axes)
    return found or compare_rows(operation, got, value, axes)


def compare_rows(
    operation: str,
    got: Array,
    value: Float64,
    axes: Axes,
    max_limit: float = ROW_MAX_LIMIT,
    rms_limits: tuple[float, float] = (ROW_RMS_LIMIT, ALL_RMS_LIMIT),
) -> Mismatch | None:
    """Each (token, head) row: largest error over the largest magnitude, and root mean squares likewise; then the root
    mean square over all rows."""
    row_max = np.broadcast_to(max_limit * np.abs(value).max(axis=-1, keepdims=True), value.shape)
    found = compare_values(operation, got, Expected(value, row_max, f"{max_limit} of the row's largest"), axes)
    if found is not None or not value.size:
        return found
    error = got.astype(np.float64) - value
    scale = np.maximum(np.sqrt(np.mean(np.square(value), axis=-1)), np.finfo(np.float64).tiny)
    relative = np.sqrt(np.mean(np.square(error), axis=-1)) / scale
    all_rows = float(np.sqrt(np.mean(np.square(relative))))
    wrong = relative > rms_limits[0]
    if all_rows <= rms_limits[1] and not wrong.any():
        return None
    worst_row = np.unravel_index(int(np.argmax(relative)), relative.shape)
    first_row = np.unravel_index(int(np.argmax(wrong)), wrong.shape)

    def element(row: tuple[Any, ...]) -> tuple[int, ...]:
        return (*(int(at) for at in row), int(np.argmax(np.abs(error[row]))))

    first, worst = element(first_row), element(worst_row)
    return Mismatch(
        operation=f"{operation}: rows",
        count=int(np.count_nonzero(wrong)),
        total=wrong.size,
        first=axes.coordinate(first),
        first_got=f"{float(got[first]):.6g}",
        first_want=f"{float(value[first]):.7g}",
        worst=axes.coordinate(worst),
        worst_got=f"{float(got[worst]):.6g}",
        worst_want=f"{float(value[worst]):.7g}",
        limit=f"root mean square of an error <= {rms_limits[0]} of a row's, {rms_limits[1]} over all rows",
        note=f"the worst row's is {float(relative[worst_row]):.3g}, all rows' {all_rows:.3g}",
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
