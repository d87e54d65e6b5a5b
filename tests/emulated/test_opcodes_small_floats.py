"""Conversions of floats of 4, 6 and 8 bits against ml_dtypes, which has formats of its own."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from launch_helper import launch_on, pointer, read_as, upload
from nvrtc_helper import compile_kernel

from g4kv_cli.device.emulated import Machine
from g4kv_cli.device.emulated.arithmetic.opcodes import ELEMENTWISE

TYPES: dict[str, tuple[Any, int, float]] = {
    "e2m1": (ml_dtypes.float4_e2m1fn, 4, 6.0),
    "e2m3": (ml_dtypes.float6_e2m3fn, 8, 7.5),
    "e3m2": (ml_dtypes.float6_e3m2fn, 8, 28.0),
}
"""The type, bits from one of a pair to the other, the largest number."""


def numbers(largest: float) -> Any:
    rng = np.random.default_rng(8)
    ties = np.arange(-64, 65) / 32
    return np.concatenate([ties * largest / 2, ties, rng.standard_normal(200) * 4, [1e9, -1e9, 0.0, -0.0]]).astype("f4")


@pytest.mark.parametrize("name", TYPES)
def test_small_floats(name: str) -> None:
    kind, each, largest = TYPES[name]
    singles = numbers(largest)
    others = np.roll(singles, 11)
    codes = np.clip(singles, -largest, largest).astype(kind).view(np.uint8).astype(np.uint16)
    want = np.roll(codes, 11) | codes << np.uint16(each)
    got = ELEMENTWISE[f"cvt.rn.satfinite.{name}x2.f32"].function(singles.view(np.uint32), others.view(np.uint32))
    np.testing.assert_array_equal(got, want)
    is_negative = codes & (1 << (each - 1 if each == 4 else 5)) != 0
    relu = np.where(is_negative, 0, codes).astype(np.uint16)
    got = ELEMENTWISE[f"cvt.rn.satfinite.relu.{name}x2.f32"].function(singles.view(np.uint32), others.view(np.uint32))
    np.testing.assert_array_equal(got, np.roll(relu, 11) | relu << np.uint16(each))
    nan = np.array([np.nan], np.float32).view(np.uint32)
    top = int(np.array([largest]).astype(kind).view(np.uint8)[0])
    assert ELEMENTWISE[f"cvt.rn.satfinite.{name}x2.f32"].function(nan, nan)[0] == top << each | top
    for pair, half in (("f16x2", np.float16), ("bf16x2", ml_dtypes.bfloat16)):
        halves = np.clip(np.stack([others, singles], 1), -1000, 1000).astype(half)
        registers = np.ascontiguousarray(halves).view(np.uint32).ravel()
        got = ELEMENTWISE[f"cvt.rn.satfinite.{name}x2.{pair}"].function(registers)
        clipped = np.clip(halves.astype(np.float32), -largest, largest).astype(kind).view(np.uint8).astype(np.uint16)
        np.testing.assert_array_equal(got, clipped[:, 0] | clipped[:, 1] << np.uint16(each))
        back = ELEMENTWISE[f"cvt.rn.{pair}.{name}x2"].function(got)
        wide = np.clip(halves.astype(np.float32), -largest, largest).astype(kind).astype(np.float32).astype(half)
        np.testing.assert_array_equal(back, np.ascontiguousarray(wide).view(np.uint32).ravel())


def test_powers_of_two() -> None:
    rng = np.random.default_rng(9)
    singles = np.concatenate(
        [2.0 ** rng.integers(-120, 120, 60), rng.standard_normal(60) * 2.0 ** rng.integers(-99, 99, 60)]
    )
    singles = np.abs(singles).astype(np.float32)
    exponents = np.floor(np.log2(singles.astype(np.float64)))
    for mode, power in (("rz", exponents), ("rp", np.ceil(np.log2(singles.astype(np.float64))))):
        got = ELEMENTWISE[f"cvt.{mode}.satfinite.ue8m0x2.f32"].function(
            singles.view(np.uint32), singles.view(np.uint32)
        )
        np.testing.assert_array_equal(got & 0xFF, power + 127)
        np.testing.assert_array_equal(got >> 8, power + 127)
        back = ELEMENTWISE["cvt.rn.bf16x2.ue8m0x2"].function(got)
        np.testing.assert_array_equal((back << np.uint32(16)).view(np.float32), (2.0**power).astype(np.float32))
    ends = np.array([np.inf, np.nan, 0, 2.0**-127, 1.5 * 2.0**-127, 3e38], np.float32).view(np.uint32)
    one = {
        word: ELEMENTWISE[f"cvt.{word}.ue8m0x2.f32"].function(ends, ends) & 0xFF
        for word in ("rz", "rp", "rp.satfinite")
    }
    assert one["rz"].tolist() == [0xFF, 0xFF, 0, 0, 0, 0xFE]
    assert one["rp"].tolist() == [0xFF, 0xFF, 0, 0, 1, 0xFF]
    assert one["rp.satfinite"].tolist() == [0xFE, 0xFF, 0, 0, 1, 0xFE]


@pytest.mark.parametrize(("name", "kind"), [("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)])
def test_bytes_beside_bf16(name: str, kind: Any) -> None:
    singles = numbers(16.0)
    pairs = np.clip(np.stack([singles, np.roll(singles, 5)], 1), -400, 400).astype(ml_dtypes.bfloat16)
    registers = np.ascontiguousarray(pairs).view(np.uint32).ravel()
    want = np.ascontiguousarray(pairs.astype(np.float32).astype(kind)).view(np.uint16).ravel()
    got = ELEMENTWISE[f"cvt.rn.satfinite.{name}x2.bf16x2"].function(registers)
    np.testing.assert_array_equal(got, want)
    back = ELEMENTWISE[f"cvt.rn.bf16x2.{name}x2"].function(want)
    wide = pairs.astype(np.float32).astype(kind).astype(np.float32)
    np.testing.assert_array_equal(back, np.ascontiguousarray(wide.astype(ml_dtypes.bfloat16)).view(np.uint32).ravel())
    for pair, half in (("f16x2", np.float16), ("bf16x2", ml_dtypes.bfloat16)):
        back = ELEMENTWISE[f"cvt.rn.relu.{pair}.{name}x2"].function(want)
        above = (np.maximum(wide, 0) + 0.0).astype(half)
        np.testing.assert_array_equal(back, np.ascontiguousarray(above).view(np.uint32).ravel())


SOURCE = """
#include <cuda_fp4.h>
#include <cuda_fp6.h>
extern "C" __global__ void kernel(const float* x, float* out) {
  float v = x[threadIdx.x];
  out[threadIdx.x] = float(__nv_fp4_e2m1(v)) + 100 * float(__nv_fp6_e3m2(v)) + 10000 * float(__nv_fp6_e2m3(v));
}
"""


def test_cuda_headers_for_compute_capability_10() -> None:
    """They write a 4-bit pair through registers of 8 bits."""
    machine, x = Machine(), np.linspace(-6, 6, 64, dtype=np.float32)
    source, out = upload(machine, x, "x"), upload(machine, np.zeros(64, np.float32), "out")
    launch_on(machine, compile_kernel(SOURCE, "100a"), pointer(source), pointer(out), grid=1, block=64)
    want = sum(
        scale * x.astype(TYPES[name][0]).astype(np.float32)
        for name, scale in (("e2m1", 1), ("e3m2", 100), ("e2m3", 10000))
    )
    np.testing.assert_array_equal(read_as(machine, out, 64, np.float32), want)
