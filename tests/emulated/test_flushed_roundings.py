"""f32 arithmetic with directed rounding and .ftz, as --use_fast_math makes it, against exact fractions and roots."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from g4kv_cli.device.emulated.arithmetic.opcodes import ELEMENTWISE

SMALLEST_NORMAL = Fraction(1, 2**126)
LARGEST = Fraction(2**128 - 2**104)
EDGES = [0x00800000, 0x00800001, 0x00FFFFFF, 0x01000000, 0x3F7FFFFF, 0x3F800000, 0x3F800001, 0x00000001, 0x007FFFFF,
         0x80800000, 0x80800001, 0xBF7FFFFF, 0x80000000, 0x00000000, 0x7F7FFFFF, 0x1F800000, 0x9FFFFFFF]  # fmt: skip
SPECIAL = [0x7E800000, 0x7E800001, 0xFE800001, 0x807FFFFF, 0x40400000, 0x7F800000, 0xFF800000, 0x7FC00000]
SCALE = 100
"""Binary places of a root: more than an f32 has, as that of the smallest normal number is 2^-63."""
EXACT = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: a * b + c,
}


def flushed(bits: int) -> float:
    """The number, with subnormals as zeros of their sign."""
    number = float(np.uint32(bits).view(np.float32))
    return math.copysign(0.0, number) if abs(number) < SMALLEST_NORMAL else number


def rounded(exact: Fraction, mode: str) -> Fraction:
    """To 24 bits with an exponent that has no end; then what is tiny is zero."""
    if exact == 0:
        return exact
    exponent = math.floor(math.log2(abs(exact)))
    while Fraction(2) ** exponent > abs(exact):
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= abs(exact):
        exponent += 1
    unit = Fraction(2) ** (exponent - 23)
    whole = exact / unit
    cut = {"rz": math.trunc, "rm": math.floor, "rp": math.ceil, "rn": round}[mode](whole) * unit
    return cut if abs(cut) >= SMALLEST_NORMAL else Fraction(0)


def beyond(sign: Fraction | float, mode: str) -> float:
    """The magnitude of what is larger than every float."""
    return math.inf if mode == ("rp" if sign > 0 else "rm") else float(LARGEST)


def root(number: Fraction) -> Fraction:
    """The square root of an f32, or a number that lies between the same floats: by the root of an integer."""
    scaled = int(number * 4**SCALE)
    whole = math.isqrt(scaled)
    return Fraction(2 * whole + (whole * whole != scaled), 2 ** (SCALE + 1))


def operands(count: int) -> Any:
    random = np.random.default_rng(count)
    scaled = (random.standard_normal((count, 400)) * 2.0 ** random.integers(-70, -55, (count, 400))).astype(np.float32)
    tiny = (random.standard_normal((count, 400)) * 2.0 ** random.integers(-128, -124, (count, 400))).astype(np.float32)
    edges = random.choice(np.array(EDGES, np.uint32), (count, 400))
    return np.concatenate([scaled.view(np.uint32), tiny.view(np.uint32), edges], axis=1)


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
@pytest.mark.parametrize("name", list(EXACT))
def test_a_flushed_result_is_the_exact_one_rounded_once(name: str, mode: str) -> None:
    given = operands(3 if name == "fma" else 2)
    with np.errstate(all="ignore"):
        got = ELEMENTWISE[f"{name}.{mode}.ftz.f32"].function(*given).view(np.float32)
    for column, result in zip(given.T.tolist(), got.tolist(), strict=True):
        want = rounded(EXACT[name](*(Fraction(flushed(bits)) for bits in column)), mode)
        if abs(want) > LARGEST:
            assert result == math.copysign(beyond(want, mode), want)
        else:
            assert Fraction(result) == want, [hex(bits) for bits in column]


def quotient(a: float, b: float, mode: str) -> float:
    """a / b of flushed operands, with infinities and NaN."""
    if math.isnan(a) or math.isnan(b) or (a == b == 0) or (math.isinf(a) and math.isinf(b)):
        return math.nan
    sign = math.copysign(1, a) * math.copysign(1, b)
    if math.isinf(a) or b == 0:
        return sign * math.inf
    want = Fraction(0) if math.isinf(b) else rounded(Fraction(a) / Fraction(b), mode)
    return sign * beyond(sign, mode) if abs(want) > LARGEST else math.copysign(want, sign)


def square_root(a: float, mode: str) -> float:
    """The root of a flushed operand, with infinities and NaN."""
    if math.isnan(a) or a < 0:
        return math.nan
    return a if a == 0 or math.isinf(a) else float(rounded(root(Fraction(a)), mode))


QUOTIENTS = {
    "div": quotient,
    "rcp": lambda a, mode: quotient(1.0, a, mode),
    "sqrt": square_root,
}


@pytest.mark.parametrize("mode", ["rz", "rm", "rp"])
@pytest.mark.parametrize("name", list(QUOTIENTS))
def test_a_flushed_quotient_or_root_is_the_exact_one_rounded_once(name: str, mode: str) -> None:
    edges = np.array(EDGES + SPECIAL, np.uint32)
    pairs = np.stack([np.repeat(edges, edges.size), np.tile(edges, edges.size)])
    given = np.concatenate([operands(2), pairs], axis=1)[: 2 if name == "div" else 1]
    with np.errstate(all="ignore"):
        got = ELEMENTWISE[f"{name}.{mode}.ftz.f32"].function(*given).view(np.float32)
    for column, result in zip(given.T.tolist(), got.tolist(), strict=True):
        want = QUOTIENTS[name](*(flushed(bits) for bits in column), mode)
        assert repr(result) == repr(want), [hex(bits) for bits in column]  # which tells zeros apart, and not NaN


@pytest.mark.parametrize("mode", ["rn", "rz", "rm", "rp"])
def test_doubles_are_flushed_where_they_become_floats(mode: str) -> None:
    random = np.random.default_rng(1)
    near = 2.0**-126 * (1 + random.integers(-4, 5, 300) * 2.0 ** -random.integers(23, 30, 300))
    given = np.concatenate([near, -near, random.standard_normal(100), 2.0**-140 * random.standard_normal(50), [0.0]])
    with np.errstate(all="ignore"):
        got = ELEMENTWISE[f"cvt.{mode}.ftz.f32.f64"].function(given.view(np.uint64)).view(np.float32)
    assert [Fraction(value) for value in got.tolist()] == [rounded(Fraction(value), mode) for value in given.tolist()]


@pytest.mark.parametrize("opcode", ["add.ftz.sat.f32", "mul.rn.ftz.sat.f32", "fma.rn.ftz.sat.f32"])
def test_a_flushed_result_may_be_saturated_too(opcode: str) -> None:
    first = np.array([0x3F000000, 0x3F800000, 0xBF800000, 0x00000001], np.uint32)
    second = np.array([0x3F000000, 0x40000000, 0x3F800000, 0x3F800000], np.uint32)
    c = [np.zeros(4, np.uint32)] * opcode.startswith("fma")
    want = {"add": [1, 1, 0, 1], "mul": [0.25, 1, 0, 0], "fma": [0.25, 1, 0, 0]}[opcode[:3]]
    assert ELEMENTWISE[opcode].function(first, second, *c).view(np.float32).tolist() == want
