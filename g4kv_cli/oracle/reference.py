"""The oracle's answer for one set of logical tensors: exact values and element-wise limits of q, k and v."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.oracle import tolerance
from g4kv_cli.oracle.bfloat16 import ulp_of_bf16
from g4kv_cli.oracle.prep import EPS, pair_magnitude, rms_norm, rotate_half_rope

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Expected:
    """What must come out: ``value`` float64 [tokens, heads, head_dim] and how far off each element may be.

    ``limit`` has the same shape; zeros mean that the bf16 value must be met exactly. ``limit_text`` says it in words.
    ``rms_limit``, if any, also bounds the root mean square of ``|got - value| / magnitude``.
    """

    value: Float64
    limit: Float64
    limit_text: str
    rms_limit: float | None = None
    magnitude: Float64 | None = None

    def columns(self, kept: Array) -> Expected:
        """Those columns alone, in that order."""
        magnitude = None if self.magnitude is None else self.magnitude[..., kept]
        return Expected(self.value[..., kept], self.limit[..., kept], self.limit_text, self.rms_limit, magnitude)


ONCE_ROUNDED_TEXT = "half a bf16 ulp + float32 error bound"
TWICE_ROUNDED_TEXT = "bf16 roundings behind the norm and at the store + float32 error bound"


def expected_rotated(
    x: Array, weight: Array, cos: Array, sin: Array, eps: float = EPS, *, rounds_norm: bool = False
) -> Expected:
    """q or k: norm with weight, then RoPE; ``rounds_norm``: the kernel rounds to bf16 between the two.

    ``x`` [tokens, heads, head_dim]; ``cos``, ``sin`` [tokens, rotary_dim], the table rows of the tokens' positions as
    the kernel gets them (bf16).
    """
    rotary_dim = cos.shape[-1]
    normed = rms_norm(x, weight, eps)
    value = rotate_half_rope(normed, cos, sin)
    table_length = np.ones((x.shape[0], 1, x.shape[-1]))
    table_length[:, 0, :rotary_dim] = np.hypot(np.asarray(cos, np.float64), np.asarray(sin, np.float64))
    if rounds_norm:
        cosine, sine = (np.asarray(table, np.float64)[:, None, :] for table in (cos, sin))
        limit = tolerance.twice_rounded_limit(value, normed, cosine, sine, table_length)
        return Expected(value, limit, TWICE_ROUNDED_TEXT)
    limit = tolerance.rotated_limit(value, pair_magnitude(normed, rotary_dim), table_length)
    return Expected(value, limit, ONCE_ROUNDED_TEXT)


def expected_folded_query(
    x: Array, weight: Array, k_weight: Array, cos: Array, sin: Array, turning: Array, eps: float = EPS
) -> Expected:
    """q for folded rows of K: columns ``turning`` (their numbers) as ever, the others times K's weight, not turned.

    ``x`` [tokens, heads, head_dim]; ``cos``, ``sin`` [tokens, head_dim].
    """
    turned = expected_rotated(x, weight, cos, sin, eps)
    still = rms_norm(x, weight, eps) * np.asarray(k_weight, np.float64)
    turns = np.isin(np.arange(x.shape[-1]), turning)
    value = np.where(turns, turned.value, still)
    return Expected(value, np.where(turns, turned.limit, tolerance.folded_limit(still)), ONCE_ROUNDED_TEXT)


def expected_recorded_rotated(recorded: Array, x: Array, weight: Array, rotary_dim: int) -> Expected:
    """Recorded q or k of an implementation that rounds at every step; ``x`` and ``weight`` as it got them."""
    pair = pair_magnitude(rms_norm(x, weight), rotary_dim)
    return Expected(
        np.asarray(recorded, np.float64),
        tolerance.GOLDEN_PAIR_LIMIT * pair,
        f"{tolerance.GOLDEN_PAIR_LIMIT} of the rotated pair's magnitude",
        tolerance.GOLDEN_PAIR_RMS_LIMIT,
        pair,
    )


def expected_recorded_fold(recorded: Expected, k_weight: Array, turning: Array) -> Expected:
    """A recorded q (expected_recorded_rotated) with K's weight in the columns that are not ``turning`` (their numbers).

    The recorded side is off there by the same share as before of a value that is so many times larger; the kernel's one
    rounding, which that share holds, is of the product.
    """
    factor = np.asarray(k_weight, np.float64).copy()
    factor[turning] = 1.0
    magnitude = None if recorded.magnitude is None else recorded.magnitude * np.abs(factor)
    return Expected(
        recorded.value * factor, recorded.limit * np.abs(factor), f"{recorded.limit_text}, times K's weight",
        recorded.rms_limit, magnitude,
    )  # fmt: skip


def expected_recorded_value_rows(recorded: Array) -> Expected:
    """Recorded v: it is the correctly rounded one, so a kernel is held to 1 bf16 ulp of it."""
    value = np.asarray(recorded, np.float64)
    return Expected(value, ulp_of_bf16(value), "1 bf16 ulp of the recorded value")


def expected_value_rows(x: Array, eps: float = EPS) -> Expected:
    """v: the weightless norm of the raw rows [tokens, heads, head_dim], never rotated."""
    value = rms_norm(x, None, eps)
    return Expected(value, tolerance.normed_limit(value), ONCE_ROUNDED_TEXT)
