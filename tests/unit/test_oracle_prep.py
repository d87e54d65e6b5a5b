"""The oracle's formulas on numbers that can be worked out by hand, and on recordings of another implementation."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from g4kv_cli.oracle import reference
from g4kv_cli.oracle.bfloat16 import BF16, bits, round_to_bf16
from g4kv_cli.oracle.prep import pair_magnitude, rms_norm, rotate_half_rope
from g4kv_cli.oracle.reference import Expected, expected_folded_query, expected_rotated, expected_value_rows
from g4kv_cli.oracle.tolerance import (
    GOLDEN_PAIR_LIMIT,
    GOLDEN_PAIR_RMS_LIMIT,
    folded_limit,
    norm_relative_error,
    normed_limit,
    rotated_limit,
    twice_rounded_limit,
)

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


def test_norm_of_three_four() -> None:
    # mean(9, 16) = 12.5; eps stands inside the root; the weight is w, not 1 + w.
    got = rms_norm(np.array([[3.0, 4.0]]), np.array([2.0, -1.0]), eps=0.0)
    np.testing.assert_allclose(got, [[6 / 12.5**0.5, -4 / 12.5**0.5]], rtol=1e-15)


def test_eps_is_inside_the_root() -> None:
    # mean square 3e-6 + 1e-6 = 4e-6, root 2e-3
    x = np.full((1, 4), 3e-6**0.5)
    np.testing.assert_allclose(rms_norm(x, None, eps=1e-6), 3**0.5 / 2 * np.ones((1, 4)), rtol=1e-12)


def test_rotation_by_a_quarter_turn_and_the_tail() -> None:
    x = np.arange(1.0, 7.0).reshape(1, 1, 6)  # pairs (1, 3), (2, 4); 5 and 6 pass through
    cos, sin = np.zeros((1, 4)), np.ones((1, 4))
    np.testing.assert_array_equal(rotate_half_rope(x, cos, sin), [[[-3.0, -4.0, 1.0, 2.0, 5.0, 6.0]]])


def test_pair_magnitude() -> None:
    x = np.array([[[3.0, -5.0, 4.0, 12.0, -7.0]]])
    np.testing.assert_allclose(pair_magnitude(x, 4), [[[5.0, 13.0, 5.0, 13.0, 7.0]]])


@pytest.mark.parametrize("head_dim", [256, 512])
def test_float32_error_is_far_below_half_an_ulp(head_dim: int) -> None:
    # Half a bf16 ulp is at least 2^-9 of the value.
    assert norm_relative_error(head_dim) < 2**-9 / 50


def test_limits_are_the_derived_numbers() -> None:
    """Worked out by hand for numbers of which half a bf16 ulp is known: 2^-8 at 1, 2^-25 at 134 u (head_dim 256)."""
    u, rsqrt = 2.0**-24, 2.0**-22.9
    assert norm_relative_error(256) == pytest.approx(131 * u + rsqrt, rel=1e-12)
    assert norm_relative_error(512) == pytest.approx(259 * u + rsqrt, rel=1e-12)
    nothing, one = np.zeros((1, 1, 256)), np.ones((1, 1, 256))
    assert rotated_limit(nothing, one, one).max() == pytest.approx(134 * u + rsqrt + 2.0**-25, rel=1e-12)
    assert normed_limit(one).max() == pytest.approx(131 * u + rsqrt + 2.0**-8, rel=1e-12)
    assert folded_limit(np.ones((1, 1, 512))).max() == pytest.approx(260 * u + rsqrt + 2.0**-8, rel=1e-12)
    # A normed row of ones that is rounded, by a rotation that leaves it where it is: r + 2^-8, three roundings of a
    # pair of length sqrt(2), and the store.
    cos, sin = np.ones((1, 1, 256)), np.zeros((1, 1, 256))
    twice = twice_rounded_limit(one, one, cos, sin, one)
    assert twice.max() == pytest.approx(131 * u + rsqrt + 3 * u * 2**0.5 + 2 * 2.0**-8, rel=1e-12)
    assert pytest.approx(0.00452817, rel=1e-6) == GOLDEN_PAIR_RMS_LIMIT
    assert pytest.approx(0.01577819, rel=1e-6) == GOLDEN_PAIR_LIMIT


def test_limit_accepts_the_rounded_value_and_refuses_its_neighbours() -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((4, 3, 256)).astype(BF16)
    expected = expected_value_rows(x)
    rounded = round_to_bf16(expected.value)
    assert (np.abs(rounded.astype(np.float64) - expected.value) <= expected.limit).all()
    for step in (1, -1):
        neighbour = (bits(rounded) + np.uint16(step & 0xFFFF)).view(BF16).astype(np.float64)
        refused = np.abs(neighbour - expected.value) > expected.limit
        # A neighbour may pass only where the exact value lies within the float32 error of the tie between both.
        assert refused.mean() > 0.97


def test_rows_made_in_pieces_are_those_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    x, weight, k_weight, cos, sin = (
        rng.standard_normal(shape).astype(BF16) for shape in ((7, 3, 64), (64,), (64,), (7, 64), (7, 64))
    )

    def all_forms() -> list[Expected]:
        return [
            expected_rotated(x, weight, cos, sin),
            expected_rotated(x, weight, cos[:, :32], sin[:, :32], rounds_norm=True),
            expected_folded_query(x, weight, k_weight, cos, sin, np.arange(16)),
            expected_value_rows(x),
        ]

    at_once = all_forms()
    monkeypatch.setattr(reference, "PIECE_ELEMS", 2 * 3 * 64)  # two tokens at a time, and one
    for pieces, whole in zip(all_forms(), at_once, strict=True):
        np.testing.assert_array_equal(pieces.value, whole.value)
        np.testing.assert_array_equal(pieces.limit, whole.limit)
        assert pieces.limit_text == whole.limit_text


def _bf16(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(BF16)


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.npz")), ids=lambda path: path.stem)
def test_recorded_v_is_the_rounded_oracle(path: Path) -> None:
    with np.load(path) as recorded:
        raw = _bf16(recorded["v_raw"] if "v_raw" in recorded.files else recorded["k_raw"])
        np.testing.assert_array_equal(bits(round_to_bf16(expected_value_rows(raw).value)), recorded["v_expect"])


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.npz")), ids=lambda path: path.stem)
def test_recorded_q_and_k_agree_with_the_oracle(path: Path) -> None:
    with np.load(path) as recorded:
        cos, sin = (np.concatenate([_bf16(recorded[name])] * 2, axis=-1) for name in ("cos_bf16", "sin_bf16"))
        for name in ("q", "k"):
            x, weight = _bf16(recorded[f"{name}_raw"]), _bf16(recorded[f"{name}_norm_w"])
            error = np.abs(
                _bf16(recorded[f"{name}_expect"]).astype(np.float64) - expected_rotated(x, weight, cos, sin).value
            )
            pair = pair_magnitude(rms_norm(x, weight), x.shape[-1])
            # The recording rounds five times: measured at most 0.0152 of the pair.
            assert (error <= 0.016 * pair).all()


def test_golden_files_are_there() -> None:
    assert len(list(GOLDEN.glob("*.npz"))) == 18
