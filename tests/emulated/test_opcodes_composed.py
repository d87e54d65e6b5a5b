"""Conversions, saturations and comparisons that CUDA's headers and inline PTX spell out, against exact fractions."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from launch_helper import launch_on, pointer, read_as, upload
from nvrtc_helper import compile_kernel

from g4kv_cli.device.emulated import Machine
from g4kv_cli.device.emulated.arithmetic.opcodes import ELEMENTWISE

ROUNDINGS = {"rn": round, "rz": math.trunc, "rm": math.floor, "rp": math.ceil}
FORMATS = {"f64": (53, 1023), "f32": (24, 127), "f16": (11, 15), "bf16": (8, 127)}
"""Bits of precision and the largest exponent."""
SINGLES = np.array(
    [0, -0.0, 0.5, 1, 1.5, 2.5, -0.25, -7.5, 254.5, 255.5, 300, -129, 65536.5, 3e9, -3e9, 1e30, np.inf, -np.inf, np.nan,
     1e-45, -1e-45, 0.99999994, 1.0000001, 127.5, 32767.5],
    np.float32,
)  # fmt: skip


def rounded(exact: Fraction, mode: str, form: str) -> float:
    """An exact number in a float format; the formats' least numbers are far from what the tests need."""
    precision, top = FORMATS[form]
    if exact == 0:
        return 0.0
    exponent = max(abs(exact).numerator.bit_length() - abs(exact).denominator.bit_length(), -200)
    exponent += Fraction(2) ** (exponent + 1) <= abs(exact)
    exponent -= Fraction(2) ** exponent > abs(exact)
    unit = Fraction(2) ** (exponent - precision + 1)
    cut = ROUNDINGS[mode](exact / unit) * unit
    largest = (2 - Fraction(2) ** (1 - precision)) * 2**top
    if abs(cut) <= largest:
        return float(cut)
    is_cut = mode == "rz" or mode == ("rm" if exact > 0 else "rp")
    return math.copysign(float(largest) if is_cut else math.inf, exact)


def values(bits: Any, form: str) -> Any:
    """Raw bits as float64."""
    if form == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return bits.view({"f16": np.float16, "f32": np.float32, "f64": np.float64}[form]).astype(np.float64)


def integers(name: str) -> list[int]:
    """The ends of the type, powers of two and their neighbours, ties of every format."""
    bits, least = int(name[1:]), -(1 << (int(name[1:]) - 1)) if name[0] == "s" else 0
    near = [sign * ((1 << power) + step) for power in range(bits) for step in (-1, 0, 1, 3) for sign in (1, -1)]
    ties = [(2 * odd + 1) << shift for odd in (127, 128, 1023, 1024, 1 << 23, 1 << 52) for shift in (0, 1, 8)]
    greatest = least + (1 << bits) - 1
    return sorted({number for number in (*near, *ties, greatest, greatest - 1) if least <= number <= greatest})


@pytest.mark.parametrize("source", ["u8", "s16", "u16", "s32", "u32", "s64", "u64"])
def test_integers_become_floats_in_every_rounding(source: str) -> None:
    numbers = integers(source)
    dtype = f"u{max(int(source[1:]), 16) // 8}"
    bits = np.array([number & ((1 << (8 * int(dtype[1:]))) - 1) for number in numbers], dtype)
    for form in FORMATS:
        for mode in ROUNDINGS:
            with np.errstate(all="ignore"):
                got = values(ELEMENTWISE[f"cvt.{mode}.{form}.{source}"].function(bits), form)
            want = [rounded(Fraction(number), mode, form) for number in numbers]
            np.testing.assert_array_equal(got, want, f"{mode} {form}")


@pytest.mark.parametrize("mode", ROUNDINGS)
def test_one_16_bit_float_becomes_the_other(mode: str) -> None:
    every = np.arange(0, 0x7C00, 37, dtype=np.uint16)
    for bits in (every, every | np.uint16(0x8000)):
        with np.errstate(all="ignore"):
            got = values(ELEMENTWISE[f"cvt.{mode}.bf16.f16"].function(bits), "bf16")
        want = [rounded(Fraction(float(number)), mode, "bf16") for number in bits.view(np.float16)]
        np.testing.assert_array_equal(got, want)
    large = np.array([0x4780, 0x477F, 0x477E, 0x3F81, 0xC77F, 0xC780, 0x7F7F], np.uint16)  # bf16 around 65504
    with np.errstate(all="ignore"):
        got = values(ELEMENTWISE[f"cvt.{mode}.f16.bf16"].function(large), "f16")
    want = [rounded(Fraction(float(number)), mode, "f16") for number in values(large, "bf16")]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("mode", ROUNDINGS)
@pytest.mark.parametrize("target", ["u8", "s8", "u16", "s16", "u32", "s32", "s64"])
def test_floats_become_saturated_integers(target: str, mode: str) -> None:
    """With .sat, as OpenCV writes it, and without; s8 and u8 of bf16 as well."""
    bits, least = int(target[1:]), -(1 << (int(target[1:]) - 1)) if target[0] == "s" else 0
    greatest = least + (1 << bits) - 1
    for form, operands in (("f32", SINGLES.view(np.uint32)), ("bf16", (SINGLES.view(np.uint32) >> 16).astype("u2"))):
        with np.errstate(all="ignore"):
            got = ELEMENTWISE[f"cvt.{mode}i.sat.{target}.{form}"].function(operands)
        for number, result in zip(values(operands, form), got, strict=True):
            if math.isnan(number):
                want = 0 if bits < 64 else least
            elif math.isinf(number):
                want = greatest if number > 0 else least
            else:
                want = min(max(ROUNDINGS[mode](Fraction(float(number))), least), greatest)
            assert int(result) == want & ((1 << max(bits, 16)) - 1), (form, number)


def test_saturated_floats_are_from_zero_to_one() -> None:
    doubles, singles = SINGLES.astype(np.float64), SINGLES.view(np.uint32)
    clamped = np.where(np.isnan(doubles), 0, np.clip(doubles, 0, 1))
    with np.errstate(all="ignore"):
        for opcode, operand, form in (
            ("cvt.rn.sat.f32.f64", doubles.view(np.uint64), "f32"),
            ("cvt.rn.sat.f16.f32", singles, "f16"),
            ("cvt.sat.f32.f16", SINGLES.astype(np.float16).view(np.uint16), "f32"),
        ):
            got = values(ELEMENTWISE[opcode].function(operand), form)
            np.testing.assert_allclose(got, clamped, rtol=2.0**-11, atol=2.0**-25, err_msg=opcode)
            assert not np.signbit(got).any()
        got = values(ELEMENTWISE["cvt.rni.sat.f32.f32"].function(singles), "f32")
        np.testing.assert_array_equal(got, np.round(clamped))
        got = values(ELEMENTWISE["add.rz.sat.f32"].function(singles, singles[::-1].copy()), "f32")
        sums = doubles + doubles[::-1]
    assert ((got >= 0) & (got <= 1)).all()
    assert (got[sums >= 1] == 1).all()
    assert (got[sums <= 0] == 0).all()


def test_two_integers_are_packed() -> None:
    rng = np.random.default_rng(5)
    numbers = np.concatenate([rng.integers(-400, 400, 60), rng.integers(-(2**31), 2**31, 60)]).astype(np.int32)
    a, b, c = (np.roll(numbers, shift) for shift in (0, 7, 29))
    for name, width, least, greatest in (("s8", 8, -128, 127), ("u8", 8, 0, 255), ("s16", 16, -32768, 32767)):
        operands = [a.view(np.uint32), b.view(np.uint32), *([c.view(np.uint32)] if width == 8 else [])]
        got = ELEMENTWISE[f"cvt.pack.sat.{name}.s32{'.b32' if width == 8 else ''}"].function(*operands)
        for first, second, rest, result in zip(a.tolist(), b.tolist(), c.tolist(), got.tolist(), strict=True):
            mask = (1 << width) - 1
            low, high = (min(max(number, least), greatest) & mask for number in (second, first))
            above = (rest << (2 * width)) & 0xFFFFFFFF if width == 8 else 0
            assert result == low | high << width | above


@pytest.mark.parametrize(("form", "smallest"), [("f32", 2.0**-126), ("f64", 2.0**-1022)])
def test_kinds_of_floats(form: str, smallest: float) -> None:
    dtype, raw = (np.float32, np.uint32) if form == "f32" else (np.float64, np.uint64)
    with np.errstate(all="ignore"):
        numbers = np.array([0, -0.0, smallest, smallest / 2, -smallest / 4, 1, -3, np.inf, -np.inf, np.nan], dtype)
    tiny = (abs(numbers) < smallest) & (numbers != 0)
    for name, want in {
        "finite": np.isfinite(numbers),
        "infinite": np.isinf(numbers),
        "number": ~np.isnan(numbers),
        "notanumber": np.isnan(numbers),
        "normal": np.isfinite(numbers) & (abs(numbers) >= smallest),
        "subnormal": tiny,
    }.items():
        got = ELEMENTWISE[f"testp.{name}.{form}"].function(numbers.view(raw))
        np.testing.assert_array_equal(got, want, name)


def test_pairs_of_singles() -> None:
    rng = np.random.default_rng(6)
    a, b, c = ((rng.standard_normal((50, 2)) * 8).astype(np.float32) for _ in range(3))
    registers = [np.ascontiguousarray(array).view(np.uint64).ravel() for array in (a, b, c)]
    add = ELEMENTWISE["add.rn.f32x2"].function(*registers[:2]).view(np.float32).reshape(50, 2)
    np.testing.assert_array_equal(add, a + b)
    fma = ELEMENTWISE["fma.rz.f32x2"].function(*registers).view(np.float32).reshape(50, 2)
    for row in range(50):
        for half in (0, 1):
            exact = Fraction(float(a[row, half])) * Fraction(float(b[row, half])) + Fraction(float(c[row, half]))
            assert fma[row, half] == rounded(exact, "rz", "f32")


SOURCE = r"""
extern "C" __global__ void kernel(const unsigned* x, unsigned* out) {
  int t = threadIdx.x;
  unsigned a = x[t], b = x[63 - t], r[5];
  asm("{ .reg .pred p, q; setp.gt.u32 p, %1, 50; setp.lt.and.u32 p|q, %1, %2, p; selp.u32 %0, 1, 0, p;"
      " @q add.u32 %0, %0, 2; }" : "=r"(r[0]) : "r"(a), "r"(b));
  asm("{ .reg .pred p, q; setp.gt.u32 p, %1, 50; setp.eq.xor.s32 q|p, %1, %2, !p; selp.u32 %0, 1, 0, q;"
      " @p add.u32 %0, %0, 2; }" : "=r"(r[1]) : "r"(a), "r"(b));
  asm("{ .reg .pred p, q; .reg .f16 h; .reg .b32 u, w; cvt.rn.f16.u32 h, %1; mov.b32 u, {h, h}; cvt.rn.f16.u32 h, %2;"
      " mov.b32 w, {h, h}; mov.b32 {_, h}, u; mov.b32 w, {h, h}; setp.lt.f16x2 p|q, w, %3; selp.u32 %0, 1, 0, p;"
      " @q add.u32 %0, %0, 2; }" : "=r"(r[2]) : "r"(a), "r"(b), "r"(0x54004C00u));
  asm("{ .reg .pred p; testp.normal.f32 p, %1; selp.u32 %0, 1, 0, p; }" : "=r"(r[3]) : "f"(t % 2 ? 1.0f : 1e-40f));
  asm("{ .reg .u16 h, l; cvt.u16.u32 h, %1; cvt.u16.u32 l, %2; slct.u16.s32 h, h, l, %3; cvt.u32.u16 %0, h; }"
      : "=r"(r[4]) : "r"(a), "r"(b), "r"(t - 30));
  for (int i = 0; i < 5; i++) out[t * 5 + i] = r[i];
}
"""


@pytest.mark.parametrize("emulator", ["native", "interpreter"])
def test_two_predicates_of_one_comparison(emulator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is the complement, combined; or the other half. One of them may be the predicate they combine with."""
    monkeypatch.setenv("G4KV_EMULATOR", emulator)
    machine, x = Machine(), np.random.default_rng(7).integers(0, 100, 64).astype(np.uint32)
    source, out = upload(machine, x, "x"), upload(machine, np.zeros(320, np.uint32), "out")
    launch_on(machine, compile_kernel(SOURCE), pointer(source), pointer(out), grid=1, block=64)
    got = read_as(machine, out, 320, np.uint32).reshape(64, 5)
    for t, row in enumerate(got):
        a, b = int(x[t]), int(x[63 - t])
        p = a > 50
        assert row[0] == (a < b and p) + 2 * (not a < b and p)
        assert row[1] == ((a == b) != (not p)) + 2 * ((a != b) != (not p))
        assert row[2] == (a < 16) + 2 * (a < 64)
        assert row[3] == t % 2
        assert row[4] == (a if t >= 30 else b)


def test_bytes_of_a_register_of_16_bits() -> None:
    """As NVRTC writes __bfloat162char_rz; the other way round as well."""
    body = "mov.b16 w, 0x1234; mov.b16 {l, h}, w; mov.b16 w, {h, l}; cvt.u32.u16 %0, w;"
    assembly = f'asm("{{ .reg .b8 l, h; .reg .b16 w; {body} }}" : "=r"(v))'
    source = f'extern "C" __global__ void kernel(unsigned* out) {{ unsigned v; {assembly}; *out = v; }}'
    machine = Machine()
    out = upload(machine, np.zeros(1, np.uint32), "out")
    launch_on(machine, compile_kernel(source), pointer(out), grid=1, block=1)
    assert read_as(machine, out, 1, np.uint32)[0] == 0x3412
