"""The language of manifests: what it computes, and that it refuses everything else by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from g4kv_cli.providers.expression import Expression, ExpressionError
from g4kv_cli.providers.functions import fastdiv

SCOPE: dict[str, Any] = {
    "page_size": 16,
    "kv_lens": np.array([5, 40, 33]),
    "page_indices": np.array([9, 1, 2, 3, 7]),
    "page_indptr": np.array([0, 1, 4, 5]),
    "group": 2,
    "inf": float("inf"),
}


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("page_size * 2 + 1", 33),
        ("-(-kv_lens // page_size)", [1, 3, 3]),
        ("padded_rows(page_indices, page_indptr, fill=-1)", [[9, -1, -1], [1, 2, 3], [7, -1, -1]]),
        ("columns(padded_rows(page_indices, page_indptr, width=8))", 8),
        ("max(kv_lens)", 40),
        ("max(1, ceil_div(max(kv_lens), 3))", 14),
        ("ramps((2, 0, 3))", [0, 1, 0, 1, 2]),
        ("running_total(diff(page_indptr))", [0, 1, 4, 5]),
        ("scatter(6, page_indptr[:3], kv_lens, fill=-1)", [5, 40, -1, -1, 33, -1]),
        ("scatter(3, page_indptr[:2], 0, fill=-inf)", [0.0, 0.0, -float("inf")]),
        ("scatter(10, page_indices, repeat(arange(3), diff(page_indptr)))[1:4]", [1, 1, 1]),
        ("argsort((3, 1, 3, 0))", [3, 1, 0, 2]),
        ("tile_requests((3, 5), group, 4)", [0, 0, 1, 1, 1]),
        ("tile_indices((3, 5), group, 4)", [0, 1, 0, 1, 2]),
        ("page_indices[page_indptr[:-1]]", [9, 1, 7]),
        ("group in (1, 2, 4)", True),
        ("0 < group < 2", False),
        ("7 if group == 2 and page_size > 8 else 8", 7),
        ("next_power_of_2(17)", 32),
        ("where(kv_lens > 32, 1, 0)", [0, 1, 1]),
    ],
)
def test_values(text: str, want: Any) -> None:
    np.testing.assert_array_equal(Expression.parse(text).evaluate(SCOPE), want)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("kv_lens.max()", "Attribute at column|not part of the language"),
        ("().__class__", "not part of the language"),
        ("__import__('os')", "no function '__import__'"),
        ("[x for x in kv_lens]", "ListComp at column 1"),
        ("(lambda: 1)()", "not part of the language"),
        ("f'{group}'", "not part of the language"),
        ("(1 +", "is no expression"),
        ("padded_row(page_indices, page_indptr)", "nearest: padded_rows"),
    ],
)
def test_what_is_no_arithmetic_is_refused_when_it_is_read(text: str, says: str) -> None:
    with pytest.raises(ExpressionError, match=says):
        Expression.parse(text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("page_sise", "no name 'page_sise' here; nearest: page_size"),
        ("1 << 99", "at most 62"),
        ("2 ** 100", "at most 62"),
        ("page_size // 0", "ZeroDivisionError"),
        ("kv_lens[7]", "IndexError"),
        ("padded_rows(page_indices, page_indptr, width=2)", "do not fit a width of 2"),
        ("scatter(9, page_indices, 1)", "places from 1 to 9 are not all among 9 elements"),
        ("scatter(9, page_indices - 2, 1)", "places from -1 to 7 are not all among 9 elements"),
        ("scatter(9, page_indptr, kv_lens)", "ValueError: "),
    ],
)
def test_what_cannot_be_computed_says_why(text: str, says: str) -> None:
    with pytest.raises(ExpressionError, match=says):
        Expression.parse(text).evaluate(SCOPE)


def test_an_extent_is_an_integer_and_a_condition_no_array() -> None:
    with pytest.raises(ExpressionError, match="is no integer"):
        Expression.parse("page_size / 3").integer(SCOPE)
    with pytest.raises(ExpressionError, match="is no integer"):
        Expression.parse("kv_lens").integer(SCOPE)
    with pytest.raises(ExpressionError, match=r"any\(\.\.\)"):
        Expression.parse("kv_lens > 3").truth(SCOPE)
    assert Expression.parse("all(kv_lens > 3)").truth(SCOPE) is True


@pytest.mark.parametrize("divisor", [1, 2, 3, 5, 7, 16, 48, 641, 2**31 - 1, 2**32 - 1])
def test_a_fast_division_divides(divisor: int) -> None:
    multiplier, add, shift = (fastdiv(divisor, field) for field in ("multiplier", "add", "shift"))
    for value in (0, 1, divisor - 1, divisor, min(divisor + 1, 2**32 - 1), 12345678, 2**31 - 1, 2**32 - 2):
        quotient = value >> shift if multiplier == 0 else ((value + add) * multiplier >> 32) >> shift
        assert quotient == value // divisor, (value, divisor)
