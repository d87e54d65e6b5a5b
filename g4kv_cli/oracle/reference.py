"""The oracle's answer for one set of logical tensors: exact values and element-wise limits of q, k and v."""

from __future__ import annotations

from collections.abc import Callable
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


PIECE_ELEMS = 1 << 15
"""Of the rows that formulas work on at a time: what they make on the way, some ten arrays of 256 KiB, stays in a
core's cache. All rows of a long chunk at once take twice as long."""

ONCE_ROUNDED_TEXT = "half a bf16 ulp + float32 error bound"
TWICE_ROUNDED_TEXT = "bf16 roundings behind the norm and at the store + float32 error bound"


def _by_pieces(x: Array, make: Callable[[slice], Expected]) -> Expected:
    """What ``make`` says of all tokens of ``x`` [tokens, heads, columns], asked for some of them at a time; it has no
    ``magnitude``."""
    tokens = len(x)
    step = max(1, PIECE_ELEMS * tokens // max(x.size, 1))
    if tokens <= step:
        return make(slice(None))
    value, limit = np.empty(x.shape), np.empty(x.shape)
    for begin in range(0, tokens, step):
        some = slice(begin, begin + step)
        piece = make(some)
        value[some], limit[some] = piece.value, piece.limit
    return Expected(value, limit, piece.limit_text)


def expected_rotated(
    x: Array, weight: Array, cos: Array, sin: Array, eps: float = EPS, *, rounds_norm: bool = False
) -> Expected:
    """q or k: norm with weight, then RoPE; ``rounds_norm``: the kernel rounds to bf16 between the two.

    ``x`` [tokens, heads, head_dim]; ``cos``, ``sin`` [tokens, rotary_dim], the table rows of the tokens' positions as
    the kernel gets them (bf16).
    """
    return _by_pieces(x, lambda some: _rotated(x[some], weight, cos[some], sin[some], eps, rounds_norm))


def _rotated(x: Array, weight: Array, cos: Array, sin: Array, eps: float, rounds_norm: bool) -> Expected:
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
    factor, turns = np.asarray(k_weight, np.float64), np.isin(np.arange(x.shape[-1]), turning)

    def make(some: slice) -> Expected:
        turned = _rotated(x[some], weight, cos[some], sin[some], eps, rounds_norm=False)
        still = rms_norm(x[some], weight, eps) * factor
        value = np.where(turns, turned.value, still)
        return Expected(value, np.where(turns, turned.limit, tolerance.folded_limit(still)), ONCE_ROUNDED_TEXT)

    return _by_pieces(x, make)


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

    def make(some: slice) -> Expected:
        value = rms_norm(x[some], None, eps)
        return Expected(value, tolerance.normed_limit(value), ONCE_ROUNDED_TEXT)

    return _by_pieces(x, make)
