"""The attention oracle against closed forms, a naive loop and its own parts; its limits against float32 rounding."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from g4kv_cli.cases.attention.golden import attention_golden_cases, recorded_tensors
from g4kv_cli.cases.attention.inputs import expected_attention
from g4kv_cli.model.kv_format import SPLIT
from g4kv_cli.oracle import attention_limits
from g4kv_cli.oracle.attention import attend, concatenate, merge_states, visible_keys
from g4kv_cli.oracle.attention_limits import summing_error, weight_errors
from g4kv_cli.oracle.bfloat16 import BF16, round_to_bf16
from g4kv_cli.oracle.compare import ROWS, Axes
from g4kv_cli.oracle.compare_attention import compare_attention, compare_float32_bits, compare_lse

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
AXES = Axes(ROWS)


def _tensors(q_len: int, keys: int, heads: int, kv_heads: int, dim: int = 32, seed: int = 0) -> tuple[Any, Any, Any]:
    random = np.random.default_rng(seed)
    q = random.standard_normal((q_len, heads, dim)).astype(BF16)
    k = (random.standard_normal((keys, kv_heads, dim)) / 4).astype(BF16)
    v = random.standard_normal((keys, kv_heads, dim)).astype(BF16)
    return q, k, v


def test_a_window_counts_the_query_itself() -> None:
    # window_left 2: the key at the query and the two before it.
    seen = visible_keys(np.array([3, 4]), np.arange(6), 2)
    assert seen.tolist() == [[False, True, True, True, False, False], [False, False, True, True, True, False]]
    assert visible_keys(np.array([3]), np.arange(6), -1).tolist() == [[True] * 4 + [False] * 2]
    assert visible_keys(np.array([3]), np.arange(6), 0).tolist() == [[False] * 3 + [True] + [False] * 2]


@pytest.mark.parametrize(("window_left", "first_key", "scale"), [(-1, 0, 1.0), (4, 0, 1.0), (4, 7, 0.3), (0, 3, 2.0)])
def test_attention_is_the_formula_read_one_key_at_a_time(window_left: int, first_key: int, scale: float) -> None:
    q, k, v = _tensors(3, 9, 4, 2)
    got = attend(q, k, v, first_key=first_key, window_left=window_left, sm_scale=scale)
    for token in range(3):
        position = first_key + 9 - 3 + token
        for head in range(4):
            weights, total, out = [], 0.0, [0.0] * 32
            for row in range(9):
                key = first_key + row
                if key > position or (window_left >= 0 and position - key > window_left):
                    continue
                score = sum(float(a) * float(b) for a, b in zip(q[token, head], k[row, head // 2], strict=True))
                weights.append((math.exp(scale * score), row))
                total += weights[-1][0]
            for weight, row in weights:
                for dim in range(32):
                    out[dim] += weight / total * float(v[row, head // 2, dim])
            np.testing.assert_allclose(got.value[token, head], out, rtol=1e-12)
            assert got.lse[token, head] == pytest.approx(math.log(total), rel=1e-12)


def test_equal_keys_give_the_mean_of_the_values() -> None:
    q, k, v = _tensors(1, 5, 2, 1)
    k[:] = k[0]
    got = attend(q, k, v, first_key=0, window_left=2, sm_scale=1.0)
    np.testing.assert_allclose(got.value[0, 1], v[2:, 0].astype(np.float64).mean(axis=0), rtol=1e-13)
    score = float(q[0, 1].astype(np.float64) @ k[0, 0].astype(np.float64))
    assert got.lse[0, 1] == pytest.approx(score + math.log(3), rel=1e-13)


def test_scores_far_beyond_the_range_of_exp_stay_finite() -> None:
    q, k, v = _tensors(1, 4, 1, 1)
    q[:], k[:] = 0, 0
    q[0, 0, 0], k[2, 0, 0] = 100, 100  # score 10,000 on one key
    got = attend(q, k, v, first_key=0, window_left=-1, sm_scale=1.0)
    assert np.array_equal(got.value[0, 0], v[2, 0].astype(np.float64))
    assert got.lse[0, 0] == 10_000


def test_a_query_that_sees_no_key_is_refused() -> None:
    q, k, v = _tensors(1, 3, 1, 1)
    with pytest.raises(ValueError, match="sees no key"):
        attend(np.concatenate([q] * 5), k, v, first_key=0, window_left=-1, sm_scale=1.0)


def test_the_recorded_float64_attention() -> None:
    for case in attention_golden_cases(GOLDEN):
        if case.kv_format != SPLIT:  # of folded rows the scores are others, within a limit that the cases hold
            continue
        with np.load(case.golden) as archive:
            recorded = archive["attn_ref_f32"].astype(np.float64)
        got = expected_attention(case, recorded_tensors(case)).value
        # Another implementation's float64, stored as float32.
        np.testing.assert_allclose(got, recorded, rtol=0, atol=1e-7 * np.abs(recorded).max())


# --- merging partial states ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [(3,), (1, 2, 8), (0, 5), (5, 5, 9), (0, 0, 9)])
def test_merging_parts_is_attention_over_the_whole(cuts: tuple[int, ...]) -> None:
    q, k, v = _tensors(1, 9, 2, 1)
    whole = attend(q, k, v, first_key=0, window_left=-1, sm_scale=1.0)
    outs, lses = [], []
    for begin, end in zip((0, *cuts), (*cuts, 9), strict=True):
        if begin == end:  # an empty set: its output may hold anything
            outs.append(np.full((1, 2, 32), np.nan))
            lses.append(np.full((1, 2), -np.inf))
            continue
        part = attend(q, k[begin:end], v[begin:end], first_key=begin, window_left=-1, sm_scale=1.0)
        outs.append(part.value)
        lses.append(part.lse)
    out, lse = merge_states(np.stack(outs, axis=-2), np.stack(lses, axis=-1))
    np.testing.assert_allclose(out, whole.value, rtol=1e-12)
    np.testing.assert_allclose(lse, whole.lse, rtol=1e-12)


def test_merging_nothing_but_empty_sets() -> None:
    out, lse = merge_states(np.full((2, 3, 4), np.nan), np.full((2, 3), -np.inf))
    assert np.array_equal(out, np.zeros((2, 4)))
    assert np.isneginf(lse).all()


# --- limits -------------------------------------------------------------------------------------------------------


def _cut(values: Any) -> Any:
    """float32 values cut toward zero to bf16, where a kernel has to round."""
    return (values.astype(np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


def _rounded(values: Any) -> Any:
    return values.astype(BF16).astype(np.float32)


def _as_a_kernel(q: Any, k: Any, v: Any, weigh: Any = _rounded, finish: Any = _rounded) -> Any:
    """One query, one KV head, in float32 with bf16 weights: what the limits are for."""
    scores = q[0].astype(np.float32) @ k[:, 0].astype(np.float32).T
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    total = weights.sum(axis=-1, keepdims=True)
    return finish((weigh(weights) @ v[:, 0].astype(np.float32)) / total)[None].astype(BF16)


@pytest.mark.parametrize("keys", [1, 17, 300])
def test_rounding_where_the_kernels_do_stays_within_the_limits(keys: int) -> None:
    q, k, v = _tensors(1, keys, 8, 1, dim=256)
    expected = attend(q, k, v, first_key=0, window_left=-1, sm_scale=1.0)
    got = _as_a_kernel(q, k, v)
    assert compare_attention("out", got, expected, AXES) is None


def test_one_unseen_key_too_many_or_too_few_is_outside_the_limits() -> None:
    q, k, v = _tensors(1, 40, 8, 1, dim=256)
    expected = attend(q, k, v, first_key=0, window_left=-1, sm_scale=1.0)
    for wrong in (slice(1, None), slice(0, -1)):
        got = _as_a_kernel(q, k[wrong], v[wrong])
        assert compare_attention("out", got, expected, AXES) is not None


def test_two_right_results_may_differ_by_more_than_the_limit_of_one() -> None:
    """Why no case holds one kernel's result against another's: both are within the limit, at opposite ends."""
    q, k, v = _tensors(1, 40, 8, 1, dim=256)
    expected = attend(q, k, v, first_key=0, window_left=-1, sm_scale=1.0)
    step = 0.8 * expected.rounding.limit * np.where(np.arange(256) % 2, 1, -1)
    one, other = (expected.value + step).astype(np.float32), (expected.value - step).astype(np.float32)
    for got in (one, other):
        assert compare_attention("out", got, expected, AXES) is None
    assert (np.abs(one.astype(np.float64) - other) > expected.rounding.limit).all()


@pytest.mark.parametrize("wrong", ["weigh", "finish"])
@pytest.mark.parametrize("keys", [300, 1024])
def test_a_cut_in_place_of_a_rounding_shows_in_the_size_of_all_rows(wrong: str, keys: int) -> None:
    """No element need be outside its limit for it; a rounding to bf16 on the same rows is within all limits."""
    q, k, v = _tensors(1, keys, 64, 1, dim=256)
    k = (k.astype(np.float32) / 4).astype(BF16)  # scores spread by 1: many keys count
    expected = attend(q, k, v, first_key=0, window_left=-1, sm_scale=1.0)
    assert compare_attention("out", _as_a_kernel(q, k, v), expected, AXES) is None
    found = compare_attention("out", _as_a_kernel(q, k, v, **{wrong: _cut}), expected, AXES)
    assert found is not None
    assert "all rows" in found.operation
    assert "smaller by 0.00" in found.note


@pytest.mark.parametrize("keys", [20, 300])
def test_weights_of_half_the_precision_are_outside_the_limits(keys: int) -> None:
    import ml_dtypes

    q, k, v = _tensors(1, keys, 8, 1, dim=256)
    expected = attend(q, k, v, first_key=0, window_left=-1, sm_scale=1.0)
    eight_bits = lambda values: values.astype(ml_dtypes.float8_e4m3fn).astype(np.float32)  # noqa: E731
    assert compare_attention("out", _as_a_kernel(q, k, v, weigh=eight_bits), expected, AXES) is not None


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("spread", [0.5, 2.0, 18.0])
def test_the_likely_limit_is_a_fraction_of_the_worst_one_and_holds(spread: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    q = random.standard_normal((1, 32, 256)).astype(BF16)
    k = (spread * random.standard_normal((700, 1, 256)) / 16).astype(BF16)
    v = random.standard_normal((700, 1, 256)).astype(BF16)
    expected = attend(q, k, v, first_key=0, window_left=-1, sm_scale=1.0)
    error = np.abs(_as_a_kernel(q, k, v).astype(np.float64) - expected.value)
    assert (error <= expected.rounding.limit).all()
    # V with one sign leaves nothing to average out: the same values, made positive, have the worst-case limit.
    one_sign = attend(q, k, np.abs(v), first_key=0, window_left=-1, sm_scale=1.0)
    assert np.median(expected.rounding.limit) < np.median(one_sign.rounding.limit)


def test_what_limits_are_made_of_is_what_was_derived() -> None:
    # Less often than once in 2**40 is a sub-Gaussian number further away than that many of its deviations.
    assert 2 * np.exp(-(attention_limits.DEVIATIONS**2) / 2) == pytest.approx(2.0**-40, rel=1e-9, abs=0)
    assert attention_limits.MMA_STEP_RELATIVE == 10.5 * 2.0**-24
    assert summing_error(1024) == pytest.approx(64 * 12.5 * 2.0**-24 + 2.0**-20, rel=1e-12)
    # head_dim 256, a score of magnitude 3, 5 bits, 32 keys: the products, the exponent, exp2, two new maxima.
    exponent = 15 * 2.0**-24 * np.log(2)
    want = 16 * 10.5 * 2.0**-24 * 3 + exponent + 2.0**-22 + 2 * (2.0**-22 + 2.0**-24 + exponent)
    assert weight_errors(np.array([[3.0]]), np.array([[5.0]]), 256, 32) == pytest.approx(want, rel=1e-12)
    assert pytest.approx(0.01577855, rel=1e-6) == attention_limits.FOLD_SHARE


def test_more_roundings_have_wider_limits() -> None:
    q, k, v = _tensors(1, 300, 4, 1, dim=256)
    arguments: dict[str, Any] = {"first_key": 0, "window_left": -1, "sm_scale": 1.0}
    one, two = (attend(q, k, v, roundings=count, **arguments).rounding for count in (1, 2))
    scores = attend(q, k, v, rounds_scores=True, **arguments).rounding
    assert (one.limit < two.limit).all()
    assert (one.limit < scores.limit).all()
    assert (one.scale_variance < two.scale_variance).all()


def test_non_finite_results_come_first_and_the_worst_row_is_named() -> None:
    q, k, v = _tensors(1, 20, 2, 1)
    expected = attend(q, k, v, first_key=0, window_left=-1, sm_scale=1.0)
    got = round_to_bf16(expected.value)
    assert compare_attention("out", got, expected, AXES) is None
    wrong = got.copy()
    wrong[0, 1, 7] += 1
    found = compare_attention("out", wrong, expected, AXES)
    assert found is not None
    assert (found.count, found.worst) == (1, {"token": 0, "head": 1, "dim": 7})
    wrong[0, 0, 3] = np.nan
    found = compare_attention("out", wrong, expected, AXES)
    assert found is not None
    assert "non-finite" in found.operation
    assert found.first == {"token": 0, "head": 0, "dim": 3}


def test_lse_within_float32_and_never_nan() -> None:
    q, k, v = _tensors(2, 20, 2, 1)
    expected = attend(q, k, v, first_key=0, window_left=-1, sm_scale=1.0)
    axes = Axes(ROWS[:2])
    got = expected.lse.astype(np.float32)
    assert compare_lse("lse", got, expected.lse, expected.lse_limit, axes) is None
    assert (expected.lse_limit < 1e-3).all()
    for wrong in (np.nan, np.inf, -np.inf, float(got[1, 0]) + 0.01):
        bad = got.copy()
        bad[1, 0] = wrong
        found = compare_lse("lse", bad, expected.lse, expected.lse_limit, axes)
        assert found is not None
        assert (found.count, found.worst) == (1, {"token": 1, "head": 0})
        assert compare_float32_bits("lse", bad, got, axes) is not None
    assert compare_float32_bits("lse", bad, bad, axes) is None


def test_requests_of_a_batch_follow_each_other() -> None:
    parts = [
        attend(*_tensors(q_len, 5, 2, 1, seed=q_len), first_key=0, window_left=-1, sm_scale=1.0) for q_len in (1, 3)
    ]
    whole = concatenate(parts)
    assert whole.value.shape == (4, 2, 32)
    assert np.array_equal(whole.lse[1:], parts[1].lse)
