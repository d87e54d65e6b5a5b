"""Attention in float64, written as the formula reads, and how far a right kernel may be from it.

Logical tensors only: no pages, no plan. A query at position i sees the keys j <= i, with a window also only
j >= i - window_left; query head h reads KV head h // (num_qo_heads / num_kv_heads); then

    p = softmax(sm_scale q k^T),   out = p v,   lse = log(sum(exp(sm_scale q k^T)))

Limits. Let A_j = sum_d |q_d k_jd|, B_d = sum_j p_j |v_jd|, S = keys / 16 tensor-core steps (and as many online-softmax
steps at most), M the largest |sm_scale q k_j| in bits (times log2 e), and u = 2**-24.

* One tensor-core step of k = 16 adds 17 terms, each cut toward zero to a multiple of 2**(E - 25), where 2**E is at
  most the largest term, and cuts the sum to float32 (2u): at most (17 / 4 + 1) 2u of the sum of magnitudes. A score
  takes head_dim / 16 of them: it is off by at most head_dim / 16 * 5.25 * 2u * A_j, and its weight exp(..), relatively,
  by sm_scale times that. The sum of weighted values takes S steps: S * 5.25 * 2u * B_d.
* The exponent is an fma of numbers up to M in size: 3u M ln 2 in the weight; exp2 itself 2**-22 (PTX ISA,
  ex2.approx). Each new maximum rescales what stands: a product and another exp2, S times at most.
* Weights enter the second product as bf16: 2**-8 relative each. They are summed before that, in float32.
* Quotient, merges of warps and splits: 2**-20 covers 16 float32 operations.

With e_j the relative error of weight j and e = sum_j p_j e_j that of their sum,

    |out - exact|_d <= sum_j p_j (e_j + e + 2**-8) |v_jd| + (S * 6.25 * 2u + 2**-20) B_d + ulp(|out|) / 2

This holds for each element whatever the values are. Where V is spread, roundings average out, and the errors stay far
below a second set of limits, relative to the output itself; recorded vectors are held to them as well. In each (token,
head) row the largest error is at most 0.006 of the row's largest magnitude (two bf16 roundings, of the weights and of
the result, come to 0.005 seen). Its root mean square is at most 0.004 of the row's, and over all rows 0.0025: rounding
to bf16 alone is an error of 2**-8 / sqrt(3) = 0.0023 where all values lie just above a power of two, 0.0016 on average.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.oracle.bfloat16 import ulp_of_bf16
from g4kv_cli.oracle.tolerance import U_FLOAT32

Array = npt.NDArray[Any]
Float64 = npt.NDArray[np.float64]

ROW_MAX_LIMIT = 0.006
"""Largest error of a (token, head) row over the row's largest magnitude."""
ROW_RMS_LIMIT = 0.004
"""Root mean square of a row's error over the root mean square of the row."""
ALL_RMS_LIMIT = 0.0025
"""Root mean square of that ratio over all rows."""

MMA_DEPTH = 16
MMA_STEP_RELATIVE = (17 / 4 + 1) * 2 * U_FLOAT32
BF16_WEIGHT_RELATIVE = 2.0**-8
EXP2_RELATIVE = 2.0**-22
EPILOGUE_RELATIVE = 2.0**-20

_LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True, eq=False)
class ExpectedAttention:
    """``value``, ``limit`` float64 [tokens, num_qo_heads, head_dim]; ``lse``, ``lse_limit`` [tokens, num_qo_heads]."""

    value: Float64
    limit: Float64
    lse: Float64
    lse_limit: Float64


def visible_keys(query_positions: Array, key_positions: Array, window_left: int) -> npt.NDArray[np.bool_]:
    """[queries, keys]: True where the key is not after the query and at most ``window_left`` before it (-1: any)."""
    distance = np.asarray(query_positions)[:, None] - np.asarray(key_positions)[None, :]
    seen: npt.NDArray[np.bool_] = distance >= 0
    return seen if window_left < 0 else seen & (distance <= window_left)


def attend(q: Array, k: Array, v: Array, *, first_key: int, window_left: int, sm_scale: float) -> ExpectedAttention:
    """Attention of one request's chunk.

    ``q`` [q_len, num_qo_heads, head_dim]; ``k``, ``v`` [keys, num_kv_heads, head_dim], row 0 at position
    ``first_key``. The last query stands at the last key. ValueError if a query sees no key.
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
    rows = grouped.reshape(num_kv_heads, q_len * group, head_dim)
    k64 = np.asarray(k, np.float64).transpose(1, 2, 0)
    v64 = np.asarray(v, np.float64).transpose(1, 0, 2)
    row_sees = np.repeat(seen, group, axis=0)[None]

    scores = np.where(row_sees, sm_scale * (rows @ k64), -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    weights /= total
    value = weights @ v64
    lse = top[..., 0] + np.log(total[..., 0])

    steps = keys / MMA_DEPTH
    magnitudes = abs(sm_scale) * (np.abs(rows) @ np.abs(k64))
    bits = np.where(row_sees, np.abs(scores), 0).max(axis=-1, keepdims=True) * _LOG2_E
    exponent = 3 * U_FLOAT32 * bits * np.log(2)
    rescaling = steps * (EXP2_RELATIVE + U_FLOAT32 + exponent)
    errors = head_dim / MMA_DEPTH * MMA_STEP_RELATIVE * magnitudes + exponent + EXP2_RELATIVE + rescaling
    mean_error = (weights * errors).sum(axis=-1, keepdims=True)
    sums = steps * (MMA_STEP_RELATIVE + 2 * U_FLOAT32) + EPILOGUE_RELATIVE
    off = (weights * (errors + mean_error + BF16_WEIGHT_RELATIVE + sums)) @ np.abs(v64)
    limit = off + 0.5 * ulp_of_bf16(np.abs(value) + off)
    lse_limit = (
        (np.where(row_sees, errors, 0)).max(axis=-1)
        + mean_error[..., 0]
        + sums
        + 4 * U_FLOAT32 * (np.abs(lse) + bits[..., 0] + 1)
    )

    def back(values: Float64) -> Float64:
        """[kv_head][token, head of the group][...] -> [token][head][...]."""
        split = values.reshape(num_kv_heads, q_len, group, *values.shape[2:])
        return split.swapaxes(0, 1).reshape(q_len, num_qo_heads, *values.shape[2:])

    return ExpectedAttention(back(value), back(limit), back(lse), back(lse_limit))


def concatenate(parts: Sequence[ExpectedAttention]) -> ExpectedAttention:
    """The requests of a batch, one after another along the tokens."""
    return ExpectedAttention(
        np.concatenate([part.value for part in parts]),
        np.concatenate([part.limit for part in parts]),
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
