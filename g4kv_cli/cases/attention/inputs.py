"""Logical tensors of an attention case: queries of all tokens, keys and values of each request."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from g4kv_cli.cases.attention.case import AttentionCase, KeyKind, KvRequest
from g4kv_cli.entries.contract import STRICT, Contract
from g4kv_cli.entries.table import entry_named
from g4kv_cli.inputs import normal_numbers, turning_columns
from g4kv_cli.model.kv_format import FOLDED, SPLIT
from g4kv_cli.oracle.attention import ExpectedAttention, ScoreParts, attend, concatenate
from g4kv_cli.oracle.bfloat16 import BF16
from g4kv_cli.oracle.tolerance import HALF_ULP_RELATIVE

Array = npt.NDArray[Any]
Float32 = npt.NDArray[np.float32]

SPREAD_SCORE_DEVIATION = 2.0
LARGE_SCORE_DEVIATION = 18.0
LARGE_SCORE = 80.0
LOW_SCORE = -200.0
"""Below what float32 has weights for, if the largest score were 0."""
SEEN_NEEDLE_SCORE = 9.0
"""exp(9) is eight times a window of 1024 keys of weight 1."""
UNSEEN_NEEDLE_SCORE = 14.0
"""A key that must not be seen would outweigh all others a hundredfold."""

RISE_OF_A_KEY = 1.5e-4
"""Of scores that rise: 0.0024 over a tile of 16 keys, 0.0096 over 64, so that old sums keep 0.99 of themselves or more.
Who leaves them as they are weighs the first of 1024 keys a sixth too much."""
_RISING_COLUMNS = 2

MAX_ATTEND_ELEMS = 1 << 24
"""Scores of a chunk that the oracle holds at once; each takes some eight float64 numbers."""

_KINDS: tuple[KeyKind, ...] = ("spread", "needles", "large", "equal", "rising", "low", "zero")
_HEAD_NOISE = 0.25
_REQUEST_STEP = 61


@dataclass(frozen=True, slots=True, eq=False)
class AttentionTensors:
    """bf16. ``q`` [tokens, num_qo_heads, head_dim]; ``k[r]``, ``v[r]`` [keys, num_kv_heads, head_dim] of request r,
    row 0 at position ``first_keys[r]``. Older keys are in no page that counts. Of folded rows K is what the scores take
    for it: in columns that a row of K has not it is V, and the query has their weights."""

    q: Array
    k: tuple[Array, ...]
    v: tuple[Array, ...]
    first_keys: tuple[int, ...]


def make_attention_inputs(case: AttentionCase) -> AttentionTensors:
    """The same case always gives the same bits; requests and KV heads differ in content."""
    geometry, head_dim = case.geometry, case.geometry.head_dim
    first_keys = tuple(_first_key(case, request) for request in case.requests)
    lengths = [request.kv_len - first for request, first in zip(case.requests, first_keys, strict=True)]
    # One set of rows serves all requests, each from another row on: fast, and at no position do two of them agree
    # (the step is prime, so up to ``rows`` requests all begin elsewhere unless it divides their number).
    rows = max(lengths) + _REQUEST_STEP
    rows += rows % _REQUEST_STEP == 0
    shape = (case.num_tokens, geometry.num_kv_heads, geometry.gqa_group, head_dim)
    of_keys = (rows, geometry.num_kv_heads, head_dim)
    shapes = [shape, *([(*shape[:2], 1, head_dim)] if case.kind == "needles" else []), of_keys, of_keys]
    q, *directions, k_rows, v_rows = _normal_arrays(case, shapes)
    if case.kind == "needles":
        # One direction for the heads of a group: a planted key then stands out for each of them.
        q = directions[0] + _HEAD_NOISE * q
    elif case.kind in ("rising", "low"):
        # Each head of a group by a little less: bf16 holds these factors, so the keys decide how exact a score is.
        q[..., :_RISING_COLUMNS] = (1 - np.arange(geometry.gqa_group) / 32)[None, None, :, None]
    elif case.kind == "zero":
        q[:] = 0
    deviation = LARGE_SCORE_DEVIATION if case.kind == "large" else SPREAD_SCORE_DEVIATION
    if case.kind == "needles":
        deviation = 1.0
    k_rows *= deviation / (np.sqrt(head_dim) * case.sm_scale)
    v_rows = v_rows.astype(BF16)
    keys, values, token = [], [], 0
    for index, (request, first, length) in enumerate(zip(case.requests, first_keys, lengths, strict=True)):
        taken = (np.arange(length) + index * _REQUEST_STEP) % rows
        k = k_rows[np.zeros_like(taken) + index % rows if case.kind == "equal" else taken]
        queries = q[token : token + request.q_len]
        if case.kind == "needles":
            _plant_needles(k, queries.mean(axis=2), request, first, case.window_left, case.sm_scale)
        elif case.kind == "large" and request.q_len:
            _plant_large(k, queries[:, :, 0], case.sm_scale)
        elif case.kind == "rising":
            k = _rising(k, case.sm_scale)
        elif case.kind == "low":
            k[:, :, :_RISING_COLUMNS] = LOW_SCORE / _RISING_COLUMNS / case.sm_scale
            if index % 2:
                k[len(k) // 2, :, :_RISING_COLUMNS] = 0
        keys.append(k.astype(BF16))
        values.append(v_rows[taken])
        if case.kv_format == FOLDED:
            # V takes K's values there, so that planted scores stay what they are.
            still = np.setdiff1d(np.arange(head_dim), turning_columns(geometry))
            values[-1][..., still] = keys[-1][..., still]
        token += request.q_len
    flat = q.reshape(case.num_tokens, geometry.num_qo_heads, head_dim).astype(BF16)
    return AttentionTensors(flat, tuple(keys), tuple(values), first_keys)


def _normal_arrays(case: AttentionCase, shapes: Sequence[tuple[int, ...]]) -> list[Float32]:
    """Random float32 arrays, as one generator draws them one after another."""
    seed = (case.seed, len(case.requests), case.geometry.head_dim, _KINDS.index(case.kind))
    ends = list(itertools.accumulate((math.prod(shape) for shape in shapes), initial=0))
    numbers = normal_numbers(seed, ends[-1]).first(ends[-1])
    parts = zip(itertools.pairwise(ends), shapes, strict=True)
    return [numbers[begin:end].reshape(shape).copy() for (begin, end), shape in parts]


def stored_rows(case: AttentionCase, k: Array, v: Array) -> tuple[Array, Array]:
    """Rows of K and of V as the pool holds them, of rows of whole heads."""
    return (k if case.kv_format == SPLIT else k[..., turning_columns(case.geometry)]), v


def expected_attention(
    case: AttentionCase, tensors: AttentionTensors, *, contract: Contract = STRICT, rounds_scores: bool = False,
    differing: ScoreParts | None = None,
) -> ExpectedAttention:  # fmt: skip
    """The oracle's answer for all tokens, in the order of the requests, of kernels that promise ``contract``.

    Partial results in bf16 are one more rounding between the weights and the result; ``rounds_scores``, ``differing``:
    see attend.
    """
    roundings = contract.roundings(is_split=entry_named(case.entry).takes_splits)
    parts, token = [], 0
    for request, k, v, first in zip(case.requests, tensors.k, tensors.v, tensors.first_keys, strict=True):
        if request.q_len:
            for begin, end in _slices(request.q_len, len(k) * case.geometry.num_qo_heads):
                last = len(k) - request.q_len + end  # the slice's last query stands at the key before
                parts.append(
                    attend(tensors.q[token + begin : token + end], k[:last], v[:last], first_key=first,
                           window_left=case.window_left, sm_scale=case.sm_scale, roundings=roundings,
                           rounds_scores=rounds_scores, differing=differing)
                )  # fmt: skip
        token += request.q_len
    expected = concatenate(parts)
    if contract.lse_weights == "bf16":
        # Each weight of the sum is off by at most that much of itself, and so is their sum; a logarithm of 1 - h is
        # below -h.
        more = -math.log1p(-HALF_ULP_RELATIVE)
        expected = dataclasses.replace(expected, lse_limit=expected.lse_limit + more)
    return expected


def _slices(tokens: int, scores_each: int) -> list[tuple[int, int]]:
    """A chunk's queries in pieces whose scores are no more than the oracle may hold; most chunks are one piece."""
    step = max(1, MAX_ATTEND_ELEMS // scores_each)
    return [(begin, min(begin + step, tokens)) for begin in range(0, tokens, step)]


def _first_key(case: AttentionCase, request: KvRequest) -> int:
    """The oldest key that exists: the oldest one seen, and with needles the one before it, if its page is there."""
    first = request.first_seen(case.window_left)
    return max(first - 1, request.origin * case.page_size, 0) if case.kind == "needles" else first


def _plant_needles(
    k: Float32, directions: Float32, request: KvRequest, first_key: int, window_left: int, sm_scale: float
) -> None:
    """Add to the keys at the edges of what each query sees. ``k`` [keys, kv heads, dim], ``directions`` [q_len, ..]."""
    edges = [(0, SEEN_NEEDLE_SCORE), (1, UNSEEN_NEEDLE_SCORE)]
    if window_left >= 0:
        edges += [(-window_left, SEEN_NEEDLE_SCORE), (-window_left - 1, UNSEEN_NEEDLE_SCORE)]
    else:
        edges.append((-request.start_pos, SEEN_NEEDLE_SCORE))
    unit = directions / (np.square(directions).sum(axis=-1, keepdims=True) * sm_scale)
    for offset, score in edges:
        at = request.start_pos + np.arange(request.q_len) + offset - first_key
        inside = (at >= 0) & (at < len(k))
        np.add.at(k, at[inside], np.float32(score) * unit[inside])


def _rising(k: Float32, sm_scale: float) -> Float32:
    """Keys whose scores are a rising line: a first column that is nearly the score, and a second that is the rest."""
    line = np.float32(RISE_OF_A_KEY / sm_scale) * np.arange(len(k), dtype=np.float32)
    rising = np.zeros_like(k)
    rising[:, :, 0] = line.astype(BF16).astype(np.float32)[:, None]
    rising[:, :, 1] = line[:, None] - rising[:, :, 0]
    return rising


def _plant_large(k: Float32, queries: Float32, sm_scale: float) -> None:
    """The last query meets a key of score 80 and one of -80, far apart in the row of keys."""
    last = queries[-1]
    unit = last / (np.square(last).sum(axis=-1, keepdims=True) * np.float32(sm_scale))
    k[len(k) // 2] = -LARGE_SCORE * unit
    k[len(k) // 3] = LARGE_SCORE * unit
