"""fma.rn.f32 (and .ftz, .rz, .rm, .rp) against exact rational arithmetic, apart from the recorded vectors."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from g4kv_cli.device.emulated.arithmetic.opcodes import ELEMENTWISE

SMALLEST_EXPONENT = -126
NAN = 0x7FFFFFFF


def value(bits: int) -> Fraction:
    """The exact value of finite f32 bits."""
    exponent, mantissa = (bits >> 23) & 255, bits & 0x7FFFFF
    significand = mantissa if exponent == 0 else mantissa | 0x800000
    return (-1 if bits >> 31 else 1) * significand * Fraction(2) ** (max(exponent, 1) - 150)


def encode(exact: Fraction, mode: str, zero_sign: int, ftz: bool = False) -> int:
    """f32 bits of an exact value, rounded once; rn, rz, rm or rp."""
    if exact == 0:
        return zero_sign << 31
    sign, size = int(exact < 0), abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > size
    if ftz and size < Fraction(2) ** SMALLEST_EXPONENT * (1 - Fraction(1, 2**25)):
        return sign << 31
    unit = Fraction(2) ** (max(exponent, SMALLEST_EXPONENT) - 23)
    count, rest = divmod(size, unit)
    away = {"rn": 2 * rest > unit or (2 * rest == unit and count % 2), "rz": False}
    away |= {"rm": sign and rest, "rp": not sign and rest}
    count += bool(away[mode])
    if count * unit >= Fraction(2) ** 128:
        infinite = mode == "rn" or (mode == "rm" and sign) or (mode == "rp" and not sign)
        return (sign << 31) | (0x7F800000 if infinite else 0x7F7FFFFF)
    position = max(exponent, SMALLEST_EXPONENT) + 126  # counting from the smallest normal binade
    return (sign << 31) | (int(count) + (position << 23))


def expected_fma(a: int, b: int, c: int, mode: str, ftz: bool) -> int:
    if ftz:
        a, b, c = (bits if (bits >> 23) & 255 else bits & 0x80000000 for bits in (a, b, c))
    product_sign, c_sign = (a ^ b) >> 31, c >> 31
    product = value(a) * value(b)
    exact = product + value(c)
    cancelled = product != 0 and exact == 0
    zero_sign = product_sign if product_sign == c_sign and not cancelled else int(mode == "rm")
    return encode(exact, mode, zero_sign, ftz)


def random_bits(random: np.random.Generator, count: int, low: int, high: int) -> np.ndarray:
    """Finite f32 bits with biased exponents in [low, high)."""
    exponent = random.integers(low, high, count)
    bits = (exponent << 23) | random.integers(0, 2**23, count) | (random.integers(0, 2, count) << 31)
    return bits.astype(np.uint32)


def forced_midpoints(random: np.random.Generator, count: int) -> tuple[np.ndarray, ...]:
    """a * b + c a hair beside the midpoint of two f32, closer than f64 can tell.

    c is in [1, 2), whose midpoints lie 2^-24 beside it; a * b = +-2^-24 (1 + x 2^-23) (1 - x 2^-23), and the
    difference x^2 2^-70 to the midpoint is below half a unit of f64, 2^-53. x = 0 gives true ties.
    """
    x = random.integers(0, 2**8, count) * 2.0**-23
    a, b = (1 + x).astype(np.float32), (2.0**-24 * (1 - x)).astype(np.float32)
    c = (1 + random.integers(0, 2**23, count) * 2.0**-23).astype(np.float32)
    sign = random.integers(0, 2, count).astype(np.uint32) << np.uint32(31)
    return a.view(np.uint32), b.view(np.uint32) ^ sign, c.view(np.uint32)


def near_cancelling(random: np.random.Generator, count: int) -> tuple[np.ndarray, ...]:
    """c close to -a * b: the rounding error of the product is what is left."""
    a, b = random_bits(random, count, 100, 150), random_bits(random, count, 100, 150)
    product = a.view(np.float32).astype(np.float64) * b.view(np.float32)
    c = (-product).astype(np.float32).view(np.uint32) ^ random.integers(0, 2, count).astype(np.uint32)
    return a, b, c


def subnormal_results(random: np.random.Generator, count: int) -> tuple[np.ndarray, ...]:
    """Products around and below the smallest normal number, c subnormal, zero or just normal."""
    a, b = random_bits(random, count, 50, 77), random_bits(random, count, 50, 77)
    return (
        a,
        b,
        random_bits(random, count, 0, 3)
        & np.where(random.random(count) < 0.2, 0x80000000, 0xFFFFFFFF).astype(np.uint32),
    )


def subnormal_midpoints(random: np.random.Generator, count: int) -> tuple[np.ndarray, ...]:
    """As forced_midpoints among subnormals: c in [2^-127, 2^-126), whose midpoints lie 2^-150 beside it."""
    a, b, _ = forced_midpoints(random, count)
    down = np.float32(2.0**-75), np.float32(2.0**-51)
    c = random.integers(2**22, 2**23, count).astype(np.uint32)
    return (a.view(np.float32) * down[0]).view(np.uint32), (b.view(np.float32) * down[1]).view(np.uint32), c


CASES = {
    "random": lambda random, count: tuple(random_bits(random, count, 0, 255) for _ in range(3)),
    "comparable": lambda random, count: tuple(random_bits(random, count, 110, 140) for _ in range(3)),
    "midpoints": forced_midpoints,
    "cancelling": near_cancelling,
    "subnormal": subnormal_results,
    "subnormal midpoints": subnormal_midpoints,
}


@pytest.mark.parametrize("opcode", ["fma.rn.f32", "fma.rn.ftz.f32", "fma.rz.f32", "fma.rm.f32", "fma.rp.f32"])
@pytest.mark.parametrize("kind", CASES)
def test_fma_equals_exact_arithmetic(kind: str, opcode: str) -> None:
    random = np.random.default_rng(sum(kind.encode()))
    count = 800 if opcode == "fma.rn.f32" else 200
    a, b, c = CASES[kind](random, count)
    mode, ftz = opcode.split(".")[1], "ftz" in opcode
    expected = [expected_fma(*triple, mode, ftz) for triple in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]
    with np.errstate(all="ignore"):
        got = ELEMENTWISE[opcode].function(a, b, c)
    assert got.tolist() == expected


def test_the_cases_need_the_repair() -> None:
    """Rounding the f64 sum once more, without the repair, is wrong in many of the forced cases."""
    random = np.random.default_rng(3)
    wrong = {}
    for kind in ("midpoints", "subnormal midpoints"):
        a, b, c = CASES[kind](random, 2000)
        with np.errstate(all="ignore"):
            total = a.view(np.float32).astype(np.float64) * b.view(np.float32) + c.view(np.float32)
            naive = total.astype(np.float32).view(np.uint32)
            wrong[kind] = int((naive != ELEMENTWISE["fma.rn.f32"].function(a, b, c)).sum())
    assert wrong["midpoints"] > 100
    assert wrong["subnormal midpoints"] > 100


def test_long_arrays_are_worked_in_blocks() -> None:
    """The result does not depend on where an element stands, nor on which operands are uniform."""
    random = np.random.default_rng(5)
    a, b, c = forced_midpoints(random, 500)
    fma = ELEMENTWISE["fma.rn.f32"].function
    with np.errstate(all="ignore"):
        short = fma(a, b, c)
        repeats = 100  # 50,000 elements: more than three blocks
        long = fma(np.tile(a, repeats), np.tile(b, repeats), np.tile(c, repeats))
        assert (long.reshape(repeats, -1) == short).all()
        assert (fma(np.tile(a, repeats), b[:1], c[:1])[:500] == fma(a, b[:1], c[:1])).all()


def test_special_values() -> None:
    inf, one, zero, minus_zero = 0x7F800000, 0x3F800000, 0, 0x80000000
    rows = [
        (inf, one, one, inf),
        (inf, zero, one, NAN),
        (inf, one, inf | 0x80000000, NAN),
        (0xFFC00001, one, one, NAN),
        (one, one, 0x7F800001, NAN),
        (minus_zero, one, minus_zero, minus_zero),
        (minus_zero, one, zero, zero),
        (one, one, 0xBF800000, zero),
        (0x7F7FFFFF, 0x40000000, zero, inf),
    ]
    columns = [np.array(column, np.uint32) for column in zip(*rows, strict=True)]
    with np.errstate(all="ignore"):
        assert ELEMENTWISE["fma.rn.f32"].function(*columns[:3]).tolist() == columns[3].tolist()
