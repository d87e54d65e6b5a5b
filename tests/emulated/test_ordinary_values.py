"""Ordinary programs on halves, approximations, doubles, atomics and assorted instructions: values against NumPy's.

What the bits of single instructions are is tested elsewhere, against recordings; here whole functions of CUDA's headers
have to come out as accurate as the CUDA programming guide says they are.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from ordinary_helper import ARCHS, run

N = 200
Array = npt.NDArray[Any]


def ulps(got: Array, want: Array, mantissa_bits: int, least: float) -> float:
    """Largest distance in units of the last place of ``want`` (float64), which are no smaller than ``least``."""
    size = np.exp2(np.floor(np.log2(np.maximum(np.abs(want), 1e-300))) - mantissa_bits)
    return float(np.max(np.abs(got.astype(np.float64) - want) / np.maximum(size, least)))


@pytest.mark.parametrize("arch", ARCHS)
def test_half_functions(arch: str) -> None:
    x = np.random.default_rng(1).uniform(0.05, 8, N).astype(np.float16)
    out, _ = run("halves", "half_functions", arch, np.zeros((8, N), np.float16), x, N, block=224)
    wide = x.astype(np.float64)
    want = (np.exp(wide), 1 / wide, np.sqrt(wide), np.exp2(wide), np.log(wide), wide**-0.5, np.floor(wide), wide / 3)
    for row, (got, right) in enumerate(zip(out, want, strict=True)):
        assert ulps(got, right, 10, 2.0**-24) <= (0 if row == 6 else 1), row
    pairs = np.random.default_rng(2).uniform(0.05, 4, (N, 2)).astype(np.float16)
    out, _ = run("halves", "half2_functions", arch, np.zeros((8, N, 2), np.float16), pairs, N, block=224)
    x, y = pairs.astype(np.float64), np.roll(pairs, -1, axis=0).astype(np.float64)
    want = (np.exp(x), 1 / x, np.sqrt(x), x * y + x, np.maximum(x, y), np.log2(y), np.where(x > y, 1.0, 0.0))
    for row, right in enumerate((*want, np.minimum(x + y, 1.0))):
        assert ulps(out[row], right, 10, 2.0**-24) <= (0 if row in (4, 6) else 1), row


@pytest.mark.parametrize("arch", ARCHS)
def test_bfloat_functions(arch: str) -> None:
    x = np.random.default_rng(3).uniform(0.05, 8, N).astype(ml_dtypes.bfloat16)
    out, _ = run("halves", "bfloat_functions", arch, np.zeros((7, N), np.uint16), x.view(np.uint16), N, block=224)
    wide, following = x.astype(np.float64), np.roll(x, -1).astype(np.float64)
    want = (np.exp(wide), 1 / wide, np.sqrt(wide), wide * following, np.exp2(wide), np.log2(wide), wide * wide + wide)
    for row, right in enumerate(want):
        assert ulps(out[row].view(ml_dtypes.bfloat16), right, 7, 2.0**-133) <= 1, row


@pytest.mark.parametrize("arch", ARCHS)
def test_sines_and_tangents_by_approximation(arch: str) -> None:
    x = np.random.default_rng(4).uniform(-math.pi, math.pi, N).astype(np.float32)
    out, _ = run("approximations", "fast_sine", arch, np.zeros((3, N), np.float32), x, N, block=224)
    wide = x.astype(np.float64)
    assert np.abs(out[0] - np.sin(wide)).max() <= 2.0**-21.41
    assert np.abs(out[1] - np.cos(wide)).max() <= 2.0**-21.19
    assert np.abs(out[2] - np.tan(wide))[np.abs(np.cos(wide)) > 0.1].max() < 1e-4
    out, _ = run("approximations", "fast_tanh", arch, np.zeros(N, np.float32), x, N, block=224)
    assert np.abs(out / np.tanh(wide) - 1).max() < 2.0**-10.9
    out, _ = run("approximations", "gelu", arch, np.zeros(N, np.float32), x, N, block=224)
    want = 0.5 * wide * (1 + np.tanh(0.79788456 * (wide + 0.044715 * wide**3)))
    np.testing.assert_allclose(out, want, atol=2e-6)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_sine_of_large_arguments_and_an_index_that_is_negative(arch: str) -> None:
    x = (np.random.default_rng(5).uniform(-1, 1, N) * np.logspace(0, 20, N)).astype(np.float32)
    out, _ = run("approximations", "large_sine", arch, np.zeros(N, np.float32), x, N, block=224)
    want = np.array([float(math.sin(value)) for value in x.astype(np.float64)])
    assert ulps(out, want, 23, 2.0**-149) <= 2
    (out,) = run("approximations", "negative_index", arch, np.zeros(32, np.int32), 5)
    want_of = [sum((k + 8) * i * ((k + 5) & 3) + ((k * 5 + 5) & 15) * i for k in range(-8, 8)) for i in range(32)]
    assert out.tolist() == want_of


@pytest.mark.parametrize("arch", ARCHS)
def test_double_functions(arch: str) -> None:
    x = np.random.default_rng(6).uniform(-20, 20, N)
    out, _ = run("approximations", "double_elementary", arch, np.zeros((8, N)), x, N, block=224)
    size = np.abs(x)
    want = (
        np.exp(x),
        np.log(size + 1e-3),
        np.sqrt(size),
        1 / np.sqrt(size + 0.25),
        1 / x,
        x / 7,
        np.cbrt(x),
        np.tanh(x),
    )
    limits = (2, 2, 0, 2, 0, 0, 2, 2)
    for row, (right, limit) in enumerate(zip(want, limits, strict=True)):
        assert ulps(out[row], right, 52, 0) <= limit, row
    x = np.concatenate([x, np.array([1e5, -1e8, 1e15, 3e22, 1e200])])
    out, _ = run("calls", "double_functions", arch, np.zeros((5, x.size)), x, x.size, block=224)
    want = (np.abs(x) ** 1.25, np.sin(x), np.cos(x), np.tan(x), np.arctan2(x, 0.75))
    for row, right in enumerate(want):
        assert ulps(out[row], right, 52, 0) <= 2, row


@pytest.mark.parametrize("arch", ARCHS)
def test_functions_of_powers(arch: str) -> None:
    x = np.random.default_rng(7).uniform(-3, 3, N).astype(np.float32)
    out, _ = run("approximations", "powers", arch, np.zeros((3, N), np.float32), x, N, block=224)
    size = np.abs(x).astype(np.float64)
    error = np.array([math.erf(value) for value in x.astype(np.float64)])
    for row, right in enumerate((size ** float(np.float32(2.3)), error, np.log1p(size))):
        assert ulps(out[row], right, 23, 2.0**-149) <= 8, row


@pytest.mark.parametrize("arch", ARCHS)
def test_atomics_of_other_types(arch: str) -> None:
    values = np.arange(32) * 0.5
    total, part, _ = run("atomics", "add_double", arch, np.zeros(1), np.zeros(1), values)
    assert total[0] == part[0] == values.sum()
    out = run("atomics", "add_half", arch, *(np.zeros(2, kind) for kind in (np.float16, np.float16, "u2", "u2")))
    assert out[0].tolist() == [16, 0]
    assert out[1].tolist() == [32, 64]
    assert out[2].view(ml_dtypes.bfloat16).astype(float).tolist() == [8, 0]
    assert out[3].view(ml_dtypes.bfloat16).astype(float).tolist() == [16, 32]
    lanes = np.arange(32, dtype=np.uint16)
    value, found = run("atomics", "cas_short", arch, lanes, np.zeros(32, np.uint16))
    assert found.tolist() == lanes.tolist()
    assert value.tolist() == [lane if lane & 1 else 77 for lane in range(32)]


@pytest.mark.parametrize("arch", ARCHS)
def test_modifiers_in_any_order(arch: str) -> None:
    counter, highest, flag = run("atomics", "libcuxx", arch, *(np.zeros(1, np.int32) for _ in range(3)))
    assert (counter[0], highest[0], flag[0]) == (32 * 3, 30, 31 | 64)
    out, found = run("atomics", "modifier_orders", arch, np.zeros(3, np.uint32), np.zeros(32, np.uint32))
    assert out.tolist() == [32, 64, 31]
    assert sorted(found.tolist()) == list(range(32))
    source = np.arange(128, dtype=np.uint32) * 0x10001 + 0x8000
    (out, _) = run("atomics", "ldmatrix_order", arch, np.zeros((32, 4), np.uint32), source)
    halves = source.view(np.uint16).reshape(4, 8, 8).transpose(0, 2, 1)
    want = np.ascontiguousarray(halves).view(np.uint32).reshape(4, 32).T
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("arch", ARCHS)
def test_vector_atomics(arch: str) -> None:
    (out,) = run("atomics", "vector_add", arch, np.zeros(8, np.float32))
    assert out.tolist() == [32, 64, 96, 128, 16, 8, 0, 0]


@pytest.mark.parametrize("arch", ARCHS)
def test_clocks_go_on(arch: str) -> None:
    (out,) = run("assorted", "clocks", arch, np.zeros(32, np.int64))
    assert out.tolist() == [15] * 32


def parts(values: Array, bits: int, signed: bool) -> Array:
    """[n, parts] of 32-bit words."""
    kind = {(8, False): "u1", (8, True): "i1", (16, False): "u2", (16, True): "i2"}[bits, signed]
    return values.view(kind).reshape(len(values), -1).astype(np.int64)


def words(values: Array, bits: int) -> Array:
    return np.ascontiguousarray((values & ((1 << bits) - 1)).astype(f"u{bits // 8}")).view(np.uint32).reshape(-1)


@pytest.mark.parametrize("arch", ARCHS)
def test_video_and_packed_instructions(arch: str) -> None:
    a, b = np.random.default_rng(8).integers(0, 1 << 32, (2, 32), dtype=np.uint64).astype(np.uint32)
    out, _, _ = run("assorted", "video", arch, np.zeros((10, 32), np.uint32), a, b)
    u8a, u8b, s8a, s8b = parts(a, 8, False), parts(b, 8, False), parts(a, 8, True), parts(b, 8, True)
    s16a, s16b = parts(a, 16, True), parts(b, 16, True)
    signed = a.view(np.int32).astype(np.int64), b.view(np.int32).astype(np.int64)
    wrapped = ((signed[0] + signed[1] + (1 << 31)) % (1 << 32)) - (1 << 31)
    want = [
        np.abs(u8a - u8b).sum(1).astype(np.uint32) + 5,
        words(np.abs(u8a - u8b), 8),
        words(np.maximum(s16a, s16b), 16),
        words(np.minimum(parts(a, 16, False), parts(b, 16, False)), 16),
        words(u8a + u8b, 8),
        words(np.where(u8a > u8b, 255, 0), 8),
        words((u8a + u8b + 1) >> 1, 8),
        np.maximum(wrapped, 7).astype(np.uint32),
        words(np.maximum(np.maximum(s16a, s16b), 3), 16),
        np.abs(s8a - s8b).sum(1).astype(np.uint32),
    ]
    for row, right in enumerate(want):
        np.testing.assert_array_equal(out[row], right, f"row {row}")
    out, _, _ = run("assorted", "logic", arch, np.zeros((3, 32), np.uint32), a, np.where(np.arange(32) % 3, b, a))
    np.testing.assert_array_equal(out[0], a ^ np.where(np.arange(32) % 3, b, a))
    assert out[1].tolist() == [1] * 32
    for value, found in zip(a.tolist(), out[2].tolist(), strict=True):
        places = [place for place in range(3, 32) if value >> place & 1]
        assert found == places[1]


@pytest.mark.parametrize("arch", ARCHS)
def test_indexed_branches(arch: str) -> None:
    value = np.arange(32, dtype=np.int32) - 7
    out, _ = run("assorted", "indexed_branch", arch, np.zeros(32, np.int32), value)
    want = [(10, v + 20, 3 * v, -4)[v & 3] for v in value.tolist()]
    assert out.tolist() == want
