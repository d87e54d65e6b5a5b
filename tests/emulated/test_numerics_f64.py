"""fma.rn.f64 against exact rational arithmetic."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from g4kv_cli.device.emulated.arithmetic.opcodes import ELEMENTWISE


def floats(random: np.random.Generator, count: int, low: int, high: int) -> np.ndarray:
    """Finite f64 with biased exponents in [low, high)."""
    exponent = random.integers(low, high, count).astype(np.uint64) << np.uint64(52)
    bits = exponent | random.integers(0, 2**52, count, dtype=np.uint64)
    return (bits | (random.integers(0, 2, count).astype(np.uint64) << np.uint64(63))).view(np.float64)


def midpoints(random: np.random.Generator, count: int) -> tuple[np.ndarray, ...]:
    """a * b = +-2^-53 (1 - x^2 2^-104), a hair beside the midpoint above or below c in [1, 2); x = 0 is a
    tie."""
    x = random.integers(0, 8, count) * 2.0**-52
    sign = random.choice([-1.0, 1.0], count)
    return 1 + x, sign * 2.0**-53 * (1 - x), 1 + random.integers(0, 2**52, count) * 2.0**-52


def cancelling(random: np.random.Generator, count: int) -> tuple[np.ndarray, ...]:
    a, b = floats(random, count, 1000, 1050), floats(random, count, 1000, 1050)
    return a, b, -(a * b)


CASES = {
    "comparable": lambda random, count: tuple(floats(random, count, 1010, 1036) for _ in range(3)),
    "anything": lambda random, count: tuple(floats(random, count, 0, 2047) for _ in range(3)),
    "tiny": lambda random, count: (
        floats(random, count, 480, 520),
        floats(random, count, 480, 520),
        floats(random, count, 0, 3),
    ),
    "midpoints": midpoints,
    "cancelling": cancelling,
}


@pytest.mark.parametrize("kind", CASES)
def test_fma_equals_exact_arithmetic(kind: str) -> None:
    a, b, c = CASES[kind](np.random.default_rng(len(kind)), 400)
    with np.errstate(all="ignore"):
        bits = ELEMENTWISE["fma.rn.f64"].function(*(array.view(np.uint64) for array in (a, b, c)))
    for x, y, z, got in zip(a.tolist(), b.tolist(), c.tolist(), bits.view(np.float64).tolist(), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        try:
            expected = float(exact)  # rounds once to nearest even
        except OverflowError:
            expected = float("inf") if exact > 0 else float("-inf")
        assert got == expected, (x, y, z)
