"""Inputs: what makes the closed form tell rows apart, and that all of it is repeatable."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from g4kv_cli import inputs
from g4kv_cli.cases.prep.closed_form import closed_form_expected
from g4kv_cli.inputs import INPUT_KINDS, closed_form_signs, make_inputs, normal_numbers, rope_rows, table_of
from g4kv_cli.model.geometry import GEOMETRIES
from g4kv_cli.oracle.bfloat16 import BF16, bits, round_to_bf16
from g4kv_cli.oracle.reference import expected_rotated, expected_value_rows

GOLDEN = Path(__file__).resolve().parent.parent / "golden"


def _make(kind, name="12b-local", positions=(1, 2, 3, 4), seed=1, rotary_dim=None):
    geometry = GEOMETRIES[name]
    return make_inputs(
        geometry,
        kind,
        seed=seed,
        positions=positions,
        rotary_dim=geometry.rotary_dim if rotary_dim is None else rotary_dim,
        table_positions=max(positions) + 1,
        with_v=not geometry.k_eq_v,
    )


@pytest.mark.parametrize("kind", INPUT_KINDS)
def test_the_same_request_gives_the_same_bits(kind) -> None:
    first, second = _make(kind), _make(kind)
    for name in ("q", "k", "v", "q_weight", "k_weight", "cos", "sin"):
        np.testing.assert_array_equal(bits(getattr(first, name)), bits(getattr(second, name)))


def test_another_seed_gives_other_data() -> None:
    assert (bits(_make("random").q) != bits(_make("random", seed=2).q)).mean() > 0.9


def test_numbers_that_are_kept_are_those_that_a_generator_draws() -> None:
    seed = (7, 3)
    random = np.random.Generator(np.random.PCG64(seed))
    want = random.standard_normal(100, dtype=np.float32)
    numbers = inputs.NormalNumbers(seed)
    for count in (11, 40, 3, 100, 100):
        np.testing.assert_array_equal(numbers.first(count), want[:count])
    assert len(numbers) == 100
    np.testing.assert_array_equal(numbers.behind(100).random(5), random.random(5))
    for count in (40, 27, 27):  # a place where it stopped, one where it did not, and the same again
        random = np.random.Generator(np.random.PCG64(seed))
        random.standard_normal(count, dtype=np.float32)
        np.testing.assert_array_equal(numbers.behind(count).standard_normal(5), random.standard_normal(5))
    with pytest.raises(ValueError, match="read-only"):
        numbers.first(3)[0] = 1


def test_what_is_kept_is_bounded_and_the_last_one_used_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_kept", OrderedDict())
    monkeypatch.setattr(inputs, "KEPT_NUMBERS", 100)
    one = normal_numbers((1,), 60)
    assert normal_numbers((1,), 70) is one
    two = normal_numbers((2,), 30)
    assert normal_numbers((1,), 5) is one
    normal_numbers((3,), 20)
    assert normal_numbers((1,), 5) is one
    assert normal_numbers((2,), 30) is not two
    assert normal_numbers((4,), 101) is not normal_numbers((4,), 101)
    assert list(inputs._kept) == [(1,), (2,)]


def test_inputs_are_the_same_whatever_was_made_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "_kept", OrderedDict())
    alone = _make("random", "12b-local")
    monkeypatch.setattr(inputs, "_kept", OrderedDict())
    _make("random", "31b-local")  # more heads, of the same numbers
    after = _make("random", "12b-local")
    for name in ("q", "k", "v", "q_weight", "k_weight"):
        np.testing.assert_array_equal(bits(getattr(after, name)), bits(getattr(alone, name)))


def test_shapes_and_types() -> None:
    inputs = _make("random", "12b-global", positions=(0, 7))
    assert inputs.q.shape == (2, 16, 512)
    assert inputs.k.shape == (2, 1, 512)
    assert inputs.v is None
    assert inputs.value_source is inputs.k
    assert {a.dtype for a in (inputs.q, inputs.k, inputs.q_weight, inputs.cos, inputs.sin)} == {BF16}


def test_scales_reach_eps_and_large_magnitudes() -> None:
    tiny, large = _make("tiny").q.astype(np.float64), _make("large").q.astype(np.float64)
    mean_squares = (tiny**2).mean(axis=(1, 2))
    assert mean_squares.min() < 1e-8
    assert ((mean_squares > 0.3e-6) & (mean_squares < 3e-6)).any()
    assert np.abs(large).max() > 1e4
    assert (large.astype(np.float32) ** 2).sum(axis=-1).max() < np.finfo(np.float32).max


def test_closed_form_rows_all_differ() -> None:
    positions = np.arange(1, 8)
    signs = [closed_form_signs(positions, heads, 256, of_query=query) for heads, query in ((16, True), (8, False))]
    rows = np.concatenate([one.reshape(-1, 256) for one in signs] + [-signs[1].reshape(-1, 256)])
    for one, other in itertools.combinations(range(len(rows)), 2):
        agree = (rows[one] == rows[other]).mean()
        assert agree == 0 or 0.25 < agree < 0.75, (one, other)  # 0: V against its own K, flipped on purpose


def test_closed_form_rows_have_no_period() -> None:
    row = closed_form_signs(np.array([3]), 1, 512, of_query=True)[0, 0]
    for shift in range(1, 257):
        assert 0.3 < (row == np.roll(row, shift)).mean() < 0.7, shift


def test_closed_form_mean_square_is_exact() -> None:
    x = _make("closed-form").q.astype(np.float64)
    assert (x**2 == (x**2)[..., :1]).all()


@pytest.mark.parametrize("name", ["12b-local", "12b-global", "e2b-global"])
@pytest.mark.parametrize("rotary_dim", [None, 64, 6])
def test_closed_form_agrees_with_the_oracle(name, rotary_dim) -> None:
    inputs = _make("closed-form", name, positions=(1, 2, 3, 9, 5), rotary_dim=rotary_dim)
    expected = closed_form_expected(GEOMETRIES[name], inputs.positions, inputs.rotary_dim, inputs.v is not None)
    oracle = (
        expected_rotated(inputs.q, inputs.q_weight, inputs.cos, inputs.sin),
        expected_rotated(inputs.k, inputs.k_weight, inputs.cos, inputs.sin),
        expected_value_rows(inputs.value_source),
    )
    for written_down, computed in zip(expected, oracle, strict=True):
        np.testing.assert_array_equal(round_to_bf16(computed.value), written_down.value)
        assert not written_down.limit.any()


def test_closed_form_expects_by_hand() -> None:
    geometry = GEOMETRIES["12b-local"]
    positions = np.array([3, 1, 2])  # identity, swap-negate, negate
    q, k, v = closed_form_expected(geometry, positions, 256, True)
    q_signs = closed_form_signs(positions, 16, 256, of_query=True)
    k_signs = closed_form_signs(positions, 8, 256, of_query=False)
    # Column 5 and its partner 133 both have weight 1 + 5/128.
    assert q.value[0, 9, 5] == q_signs[0, 9, 5] * (1 + 5 / 128)
    assert q.value[1, 9, 5] == -q_signs[1, 9, 133] * (1 + 5 / 128)
    assert q.value[1, 9, 133] == q_signs[1, 9, 5] * (1 + 5 / 128)
    assert q.value[2, 9, 5] == -q_signs[2, 9, 5] * (1 + 5 / 128)
    assert k.value[0, 7, 5] == -k_signs[0, 7, 5] * (1 + 5 / 128)
    assert v.value[1, 7, 5] == -k_signs[1, 7, 5]


@pytest.mark.parametrize(
    "path", sorted(GOLDEN.glob("*_short.npz")) + sorted(GOLDEN.glob("*_far.npz")), ids=lambda p: p.stem
)
def test_rope_rows_are_those_of_the_recordings(path) -> None:
    geometry = GEOMETRIES[path.stem.rpartition("_")[0]]
    with np.load(path) as recorded:
        cos, sin = rope_rows(geometry, recorded["positions"].astype(np.int64), geometry.head_dim)
        for got, name in ((cos, "cos_bf16"), (sin, "sin_bf16")):
            want = np.concatenate([recorded[name]] * 2, axis=-1)
            # The other side takes float32 powers and cosines: one frequency and some cosines differ in the last bit.
            difference = np.abs(got.astype(np.float64) - want.view(BF16).astype(np.float64))
            assert (difference <= 2.0**-8).all()
            assert (bits(got) == want).mean() > 0.998


def test_global_columns_past_64_pairs_do_not_turn() -> None:
    cos, sin = rope_rows(GEOMETRIES["31b-global"], np.array([262143]), 512)
    still = np.r_[64:256, 320:512]
    assert (cos[0, still] == 1).all()
    assert (sin[0, still] == 0).all()
    assert (sin[0, :64] != 0).any()


def test_table_is_poison_where_no_position_is() -> None:
    table = table_of(np.ones((2, 4), dtype=BF16), np.array([1, 3]), 5)
    assert np.isnan(table[[0, 2, 4]].astype(np.float32)).all()
    assert (table[[1, 3]] == 1).all()


def test_norm_weights_have_both_signs_and_no_zero() -> None:
    made = make_inputs(GEOMETRIES["12b-local"], "random", seed=3, positions=range(2), rotary_dim=256, table_positions=2,
                       with_v=True)  # fmt: skip
    for weight in (made.q_weight.astype(np.float32), made.k_weight.astype(np.float32)):
        assert 8 <= (weight < 0).sum() <= 64  # of 256, one in eight
        assert np.abs(weight).min() > 0
