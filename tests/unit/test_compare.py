"""The comparison sees what it must, says where, and in the right order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from g4kv_cli.oracle import compare
from g4kv_cli.oracle.bfloat16 import BF16
from g4kv_cli.oracle.compare import (
    NEVER_WRITTEN,
    ROWS,
    Axes,
    compare_bits,
    compare_untouched,
    compare_values,
)
from g4kv_cli.oracle.compare_attention import compare_float32_bits
from g4kv_cli.oracle.reference import Expected

AXES = Axes(ROWS, {"layer": 1}, {"page": [7, 5], "slot": [15, 0]})
SHAPE = (2, 3, 4)


def _expected(limit: float = 0.0, **more) -> Expected:
    return Expected(np.ones(SHAPE), np.full(SHAPE, limit), "a limit", **more)


def _ones() -> np.ndarray:
    return np.ones(SHAPE, dtype=BF16)


def test_equal_arrays_pass() -> None:
    assert compare_values("q_out", _ones(), _expected(), AXES) is None
    assert compare_bits("q_out", _ones(), _ones(), AXES) is None


def test_first_and_worst_in_logical_terms() -> None:
    got = _ones()
    got[0, 2, 1], got[1, 0, 3] = 1.5, -3.0
    found = compare_values("K in the pool", got, _expected(0.25), AXES)
    assert found is not None
    assert (found.count, found.total) == (2, 24)
    assert found.first == {"layer": 1, "page": 7, "slot": 15, "token": 0, "head": 2, "dim": 1}
    assert found.worst == {"layer": 1, "page": 5, "slot": 0, "token": 1, "head": 0, "dim": 3}
    assert (found.first_got, found.worst_got, found.worst_want) == ("1.5 (0x3fc0)", "-3 (0xc040)", "1")
    assert "a limit" in found.limit


def test_an_element_at_its_limit_passes_and_one_past_it_fails() -> None:
    got = _ones()
    got[0, 0, 0] = 1.25
    assert compare_values("q_out", got, _expected(0.25), AXES) is None
    assert compare_values("q_out", got, _expected(0.2499), AXES) is not None


@pytest.mark.parametrize("wrong", [1.5, np.nan, np.inf])
def test_each_element_is_compared_however_many_rows_are_looked_at_at_a_time(
    wrong: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "PIECE_ELEMS", 24)
    shape = (5, 3, 4)  # pieces of two tokens, and one
    expected, axes = Expected(np.ones(shape), np.full(shape, 0.25), "a limit"), Axes(ROWS)
    assert compare_values("q_out", np.ones(shape, BF16), expected, axes) is None
    for place in np.ndindex(shape):
        got = np.ones(shape, BF16)
        got[place] = wrong
        found = compare_values("q_out", got, expected, axes)
        assert found is not None
        assert (found.count, tuple(found.first.values())) == (1, place)


def test_fewer_rows_than_are_expected_are_not_taken_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "PIECE_ELEMS", 12)
    shape = (5, 3, 4)
    with pytest.raises(ValueError, match="broadcast"):
        compare_values("q_out", np.ones((3, 3, 4), BF16), Expected(np.ones(shape), np.zeros(shape), ""), AXES)


def test_the_worst_is_judged_by_its_own_limit() -> None:
    expected = _expected(0.1)
    expected.limit[0, 0, 0] = 8.0
    got = _ones()
    got[0, 0, 0], got[1, 1, 1] = 10.0, 4.0  # errors 9 and 3, limits 8 and 0.1
    found = compare_values("q_out", got, expected, AXES)
    assert found is not None
    assert found.worst["head"] == 1


@pytest.mark.parametrize(("value", "note"), [(np.nan, "computed as NaN or infinity"), (np.inf, "computed as NaN")])
def test_non_finite_comes_before_any_number(value, note) -> None:
    got = _ones()
    got[0, 0, 0], got[1, 2, 3] = 100.0, value
    found = compare_values("q_out", got, _expected(1e9), AXES)
    assert found is not None
    assert found.operation == "q_out: non-finite results"
    assert (found.count, found.first["token"], found.first["dim"]) == (1, 1, 3)
    assert note in found.note


def test_poison_is_named() -> None:
    got = np.full(SHAPE, 0xFFFF, dtype=np.uint16).view(BF16)
    found = compare_values("q_out", got, _expected(1.0), AXES)
    assert found is not None
    assert found.note == NEVER_WRITTEN


def test_bits_tell_zeros_and_nans_apart() -> None:
    zeros = np.zeros(SHAPE, dtype=BF16)
    assert compare_bits("q_out", -zeros, zeros, AXES) is not None
    poison, other = (np.full(SHAPE, pattern, dtype=np.uint16).view(BF16) for pattern in (0xFFFF, 0x7FFF))
    assert compare_bits("q_out", poison, poison, AXES) is None
    assert compare_bits("q_out", poison, other, AXES) is not None


def test_bits_worst_is_the_largest_difference() -> None:
    got = _ones()
    got[0, 0, 1], got[1, 1, 1] = 2.0, 9.0
    found = compare_bits("q_out", got, _ones(), AXES)
    assert found is not None
    assert (found.count, found.first["dim"], found.worst_got) == (2, 1, "9 (0x4110)")


def test_untouched_region() -> None:
    axes = Axes(("page", "layer", "slot", "head", "dim"))
    pool = np.full((3, 2, 4, 1, 8), 0xFFFF, dtype=np.uint16)
    touched = (np.array([2, 0]), 1, np.array([3, 1]))
    pool[touched] = 0
    assert compare_untouched("K", pool.view(BF16), touched, axes) is None
    for layer, page, slot in ((0, 2, 3), (1, 2, 1), (1, 1, 3)):  # another layer, another slot, another page
        stray = pool.copy()
        stray[page, layer, slot, 0, 5] = 0x7FFF  # another NaN is not the poison
        found = compare_untouched("K", stray.view(BF16), touched, axes)
        assert found is not None
        assert (found.count, found.total) == (1, 192)
        assert found.first == {"layer": layer, "page": page, "slot": slot, "head": 0, "dim": 5}


@pytest.mark.parametrize("columns", [8, 6])
@pytest.mark.parametrize(
    "touched",
    [
        (np.array([1]), 0, slice(1, 3)),
        slice(1, 2),
        (slice(None), slice(None), slice(None), slice(0, 3)),  # parts of rows
        (..., 2),
        np.arange(3) == 1,
        (np.zeros((3, 2, 4), bool),),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_each_element_that_may_not_be_touched_is_looked_at(columns: int, touched: Any, turned: bool) -> None:
    for place in np.ndindex(3, 2, 4, columns):
        pool = np.full((3, 2, 4, columns), 0xFFFF, np.uint16)
        pool[touched] = 1
        may_be = pool[place] == 1
        pool[place] = 2
        if turned:  # the same elements, the columns apart in memory
            pool = np.asfortranarray(pool)
        found = compare_untouched("K", pool.view(BF16), touched, Axes(("page", "layer", "slot", "dim")))
        assert (found is None) == may_be, place
        assert found is None or (found.count, tuple(found.first[name] for name in ("page", "slot", "dim"))) == (
            1, (place[0], place[2], place[3])
        )  # fmt: skip


def test_float32_bits_tell_zeros_and_nans_apart() -> None:
    one = np.array([[0.0, np.nan, 1.0]], np.float32)
    axes = Axes(ROWS[:2])
    assert compare_float32_bits("lse", one, one.copy(), axes) is None
    found = compare_float32_bits("lse", np.array([[-0.0, np.nan, 1.0]], np.float32), one, axes)
    assert found is not None
    assert (found.count, found.first) == (1, {"token": 0, "head": 0})


def test_many_small_errors_fail_by_their_root_mean_square() -> None:
    got = np.full(SHAPE, 1.0078125, dtype=BF16)  # 1 + 2^-7, each inside its limit of 0.016
    magnitude = np.ones(SHAPE)
    assert compare_values("q", got, _expected(0.016, rms_limit=0.008, magnitude=magnitude), AXES) is None
    found = compare_values("q", got, _expected(0.016, rms_limit=0.005, magnitude=magnitude), AXES)
    assert found is not None
    assert "root mean square is 0.00781" in found.note
