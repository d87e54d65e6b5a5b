"""Attention in float64, written as the formula reads, and how far a right kernel may be from it.

Logical tensors only: no pages, no plan. A query at position i sees the keys j <= i, with a window also only
j >= i - window_left; query head h reads KV head h // (num_qo_heads / num_kv_heads); then

    p = softmax(sm_scale q k^T),   out = p v,   lse = log(sum(exp(sm_scale q k^T)))

attention_limits.py says how far a right kernel may be from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.oracle.attention_limits import LOG2_E, KeySums, Rounding, rounding_of, summing_error, weight_errors
from g4kv_cli.oracle.tolerance import HALF_ULP_RELATIVE, U_FLOAT32

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ExpectedAttention:
    """``value`` float64 [tokens, num_qo_heads, head_dim] and the ``rounding`` of a right kernel's; ``lse``,
    ``lse_limit`` [tokens, num_qo_heads]."""

    value: Float64
    rounding: Rounding
    lse: Float64
    lse_limit: Float64

    def of_tokens(self, tokens: npt.NDArray[np.intp]) -> ExpectedAttention:
        """What is expected of some of the tokens."""
        return ExpectedAttention(self.value[tokens], self.rounding.at(tokens), self.lse[tokens], self.lse_limit[tokens])


@dataclass(frozen=True, slots=True, eq=False)
class Products:
    """Of query rows and keys, both float64 [num_kv_heads, rows, keys]: ``dots`` q k^T, and ``magnitudes``, the sums of
    the products' absolute values."""

    dots: Float64
    magnitudes: Float64
    head_dim: int

    def of_keys(self, which: npt.NDArray[np.bool_]) -> Products:
        """Those of some of the keys."""
        return Products(self.dots[..., which], self.magnitudes[..., which], self.head_dim)


@dataclass(frozen=True, slots=True, eq=False)
class ScoreParts:
    """Scores that are made otherwise in part: over these ``columns`` they may differ by ``share`` of the magnitudes
    that they are sums of."""

    columns: npt.NDArray[np.intp]
    share: float


def visible_keys(query_positions: Array, key_positions: Array, window_left: int) -> npt.NDArray[np.bool_]:
    """[queries, keys]: True where the key is not after the query and at most ``window_left`` before it (-1: any)."""
    distance = np.asarray(query_positions)[:, None] - np.asarray(key_positions)[None, :]
    seen: npt.NDArray[np.bool_] = distance >= 0
    return seen if window_left < 0 else seen & (distance <= window_left)


def attend(
    q: Array, k: Array, v: Array, *, first_key: int, window_left: int, sm_scale: float, roundings: int = 1,
    rounds_scores: bool = False, differing: ScoreParts | None = None,
) -> ExpectedAttention:  # fmt: skip
    """Attention of one request's chunk.

    ``q`` [q_len, num_qo_heads, head_dim]; ``k``, ``v`` [keys, num_kv_heads, head_dim], row 0 at position
    ``first_key``. The last query stands at the last key. ``roundings`` to bf16 come between
    the weights and the result's own; with ``rounds_scores`` one more is on each score. ``differing``: what else scores
    may be off by. ValueError if a query sees no key.
    """
    q_len, num_qo_heads, head_dim = q.shape
    keys, num_kv_heads, _ = k.shape
    group = num_qo_heads // num_kv_heads
    key_positions = first_key + np.arange(keys)
    query_positions = key_positions[-1] - q_len + 1 + np.arange(q_len)
    seen = visible_keys(query_positions, key_positions, window_left)
    if not seen.any(axis=1).all():
        raise ValueError("a query sees no key")
    # [kv_head][token, head of the group][...]: the heads of a group share their keys.
    grouped = np.asarray(q, np.float64).reshape(q_len, num_kv_heads, group, head_dim).transpose(1, 0, 2, 3)
    rows, keys_of_heads = grouped.reshape(num_kv_heads, q_len * group, head_dim), k.transpose(1, 0, 2)
    products = multiply(rows, keys_of_heads)
    row_sees = np.repeat(seen, group, axis=0)[None]
    off = None
    if differing is not None:
        some = differing.columns
        off = differing.share * multiply(rows[..., some], keys_of_heads[..., some]).magnitudes
    weighed = weigh(products, row_sees, v.transpose(1, 0, 2), sm_scale, roundings, rounds_scores, off)
    value, rounding, lse, lse_limit = weighed

    def back(values: Float64) -> Float64:
        """[kv_head][token, head of the group][...] -> [token][head][...]."""
        split = values.reshape(num_kv_heads, q_len, group, *values.shape[2:])
        return split.swapaxes(0, 1).reshape(q_len, num_qo_heads, *values.shape[2:])

    return ExpectedAttention(
        back(value),
        Rounding(back(rounding.limit), back(rounding.scale_variance), back(rounding.scale_bias)),
        back(lse),
        back(lse_limit),
    )


def multiply(rows: Array, k: Array) -> Products:
    """``rows`` [num_kv_heads, rows, head_dim] times ``k`` [num_kv_heads, keys, head_dim]."""
    rows64, k64 = np.asarray(rows, np.float64), np.asarray(k, np.float64).swapaxes(1, 2)
    return Products(rows64 @ k64, np.abs(rows64) @ np.abs(k64), rows.shape[-1])


def weigh(
    products: Products, row_sees: npt.NDArray[np.bool_], v: Array, sm_scale: float, roundings: int = 1,
    rounds_scores: bool = False, off: Float64 | None = None,
) -> tuple[Float64, Rounding, Float64, Float64]:  # fmt: skip
    """Value, rounding, lse and its limit of rows from their products with the keys.

    ``row_sees`` [1 or num_kv_heads, rows, keys]; ``v`` [num_kv_heads, keys, columns], any of its columns. ``off``
    [num_kv_heads, rows, keys]: what else each product may be off by.
    """
    keys = products.dots.shape[-1]
    v64 = np.asarray(v, np.float64)
    scores = np.where(row_sees, sm_scale * products.dots, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    weights /= total
    value = weights @ v64
    lse = top[..., 0] + np.log(total[..., 0])

    bits = np.where(row_sees, np.abs(scores), 0).max(axis=-1, keepdims=True) * LOG2_E
    errors = weight_errors(abs(sm_scale) * products.magnitudes, bits, products.head_dim, keys)
    if rounds_scores:
        errors += np.expm1(np.where(row_sees, HALF_ULP_RELATIVE * np.abs(scores), 0))
    if off is not None:
        errors += np.expm1(np.where(row_sees, abs(sm_scale) * off, 0))
    mean_error = (weights * errors).sum(axis=-1, keepdims=True)
    size, square = np.abs(v64), np.square(v64)
    sums = KeySums(
        value=value,
        size=weights @ size,
        error=(weights * (errors + mean_error)) @ size,
        square=np.square(weights) @ square,
        error_square=np.square(weights * errors) @ square,
    )
    rounding = rounding_of(sums, weights, scores, errors, value @ v64.swapaxes(1, 2), roundings)
    lse_limit = (
        (np.where(row_sees, errors, 0)).max(axis=-1)
        + mean_error[..., 0]
        + summing_error(keys)
        + 4 * U_FLOAT32 * (np.abs(lse) + bits[..., 0] + 1)
    )
    return value, rounding, lse, lse_limit


def concatenate(parts: Sequence[ExpectedAttention]) -> ExpectedAttention:
    """The requests of a batch, one after another along the tokens."""
    return ExpectedAttention(
        np.concatenate([part.value for part in parts]),
        Rounding.join([part.rounding for part in parts]),
        np.concatenate([part.lse for part in parts]),
        np.concatenate([part.lse_limit for part in parts]),
    )


def merge_states(outs: Array, lses: Array) -> tuple[Float64, Float64]:
    """(out, lse) of attention over the union of disjoint key sets, from that over each of them.

    ``outs`` [..., sets, head_dim]; ``lses`` [..., sets], -inf for a set without a key: its ``out`` may hold
    anything, NaN too. All sets empty: out 0, lse -inf.
    """
    log_sums = np.asarray(lses, np.float64)
    top = log_sums.max(axis=-1, keepdims=True)
    reference = np.where(np.isneginf(top), 0.0, top)
    weights = np.exp(log_sums - reference)
    total = weights.sum(axis=-1, keepdims=True)
    shares = np.divide(weights, total, out=np.zeros_like(weights), where=total > 0)
    present = np.where(np.isneginf(log_sums)[..., None], 0.0, np.asarray(outs, np.float64))
    out: Float64 = np.einsum("...s,...sd->...d", shares, present)
    with np.errstate(divide="ignore"):
        lse: Float64 = reference[..., 0] + np.log(total[..., 0])
    return out, lse
