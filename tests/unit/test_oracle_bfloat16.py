"""bf16 rounding and ulps, against values worked out by hand and against exact integer arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from g4kv_cli.oracle.bfloat16 import BF16, bits, round_to_bf16, ulp_of_bf16


@pytest.mark.parametrize(
    ("value", "pattern"),
    [
        (1.0, 0x3F80),
        (-2.0, 0xC000),
        (1 + 2**-8, 0x3F80),  # halfway between 1 and 1 + 2^-7: ties to even
        (1 + 3 * 2**-8, 0x3F82),  # halfway between 1 + 2^-7 and 1 + 2^-6: up, to even
        (1 + 2**-8 + 2**-40, 0x3F81),  # above the tie by less than a float32 ulp: a double rounding gives 0x3f80
        (1 + 3 * 2**-8 - 2**-40, 0x3F81),  # below it: a double rounding gives 0x3f82
        (-(1 + 2**-8 + 2**-40), 0xBF81),
        (0.0, 0x0000),
        (-0.0, 0x8000),
        (2.0**-133, 0x0001),  # the smallest subnormal
        (1e39, 0x7F80),
    ],
)
def test_rounding_of_single_values(value: float, pattern: int) -> None:
    assert int(bits(round_to_bf16([value]))[0]) == pattern


@settings(max_examples=200, deadline=None)
@given(st.floats(min_value=2.0**-100, max_value=2.0**100))
def test_rounding_is_to_the_nearest(value: float) -> None:
    got = Fraction(float(round_to_bf16([value])[0]))
    below = np.uint16(int(bits(round_to_bf16([value]))[0]) - 1)
    above = np.uint16(int(below) + 2)
    distance = abs(got - Fraction(value))
    for neighbour in (below, above):
        other = Fraction(float(np.asarray([neighbour]).view(BF16)[0]))
        assert distance <= abs(other - Fraction(value))


@pytest.mark.parametrize(
    ("value", "ulp"),
    [(1.0, 2.0**-7), (1.99, 2.0**-7), (2.0, 2.0**-6), (-0.75, 2.0**-8), (0.0, 2.0**-133), (2.0**-130, 2.0**-133)],
)
def test_ulp(value: float, ulp: float) -> None:
    assert float(ulp_of_bf16(value)) == ulp
