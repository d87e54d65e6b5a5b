"""mma.sync of bf16 and f16 into f32 on the native engine: the interpreter's bits, of every class of number."""

from __future__ import annotations

import numpy as np
import pytest
from engine_helper import engine
from launch_helper import launch_on, pointer, upload
from nvrtc_helper import compile_kernel

from g4kv_cli.device.emulated import Machine

TILES = 24
LARGEST = {"bf16": (7, 255), "f16": (10, 31)}
"""Digits of a mantissa, and the exponent of infinities."""
CLASSES = ("random bits", "near one", "subnormal beside normal", "subnormal alone", "infinities and NaN", "zeros")


def elements(rng: np.random.Generator, what: str, kind: str, count: int) -> np.ndarray:
    digits, most = LARGEST[kind]
    sign, mantissa = rng.integers(0, 2, count) << 15, rng.integers(0, 1 << digits, count)
    middle = (most >> 1) + rng.integers(-4, 4, count)
    rare = rng.random(count) < 0.25
    exponent = {
        "random bits": rng.integers(0, most + 1, count),
        "near one": middle,
        "subnormal beside normal": np.where(rare, 0, middle),
        "subnormal alone": np.where(rare, rng.integers(0, 3, count), 0),
        "infinities and NaN": np.where(rng.random(count) < 0.02, most, middle),
        "zeros": np.where(rare, middle, 0),
    }[what]
    if what == "zeros":
        mantissa = np.where(exponent == 0, 0, mantissa)
    if what == "infinities and NaN":
        mantissa = np.where((exponent == most) & (rng.random(count) < 0.7), 0, mantissa)
    return (sign | exponent << digits | mantissa).astype(np.uint16)


@pytest.mark.parametrize("depth", [8, 16])
@pytest.mark.parametrize("kind", LARGEST)
def test_products_are_the_interpreters(kind: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine()
    of_a, of_b = depth // 4, depth // 8
    places = [f"%{4 + number}" for number in range(of_a + of_b)]
    names = f"{{%0,%1,%2,%3}}, {{{','.join(places[:of_a])}}}, {{{','.join(places[of_a:])}}}, {{%0,%1,%2,%3}}"
    inputs = ", ".join(f'"r"(in[{32 * number} + l])' for number in range(of_a + of_b))
    source = f"""extern "C" __global__ void kernel(float* sums, const unsigned* all) {{
      const int l = threadIdx.x;
      const unsigned* in = all + blockIdx.x * {32 * (of_a + of_b)};
      float* c = sums + blockIdx.x * 128 + l;
      asm volatile("mma.sync.aligned.m16n8k{depth}.row.col.f32.{kind}.{kind}.f32 {names};"
                   : "+f"(c[0]), "+f"(c[32]), "+f"(c[64]), "+f"(c[96]) : {inputs});
    }}"""
    kernel = compile_kernel(source)
    assert kernel.not_native_for == ()
    rng = np.random.default_rng(16 * depth + len(kind))
    for what in CLASSES:
        monkeypatch.setenv("G4KV_EMULATOR", "both")
        machine = Machine()
        given = elements(rng, what, kind, TILES * (of_a + of_b) * 64)
        addends = (rng.standard_normal(TILES * 128) * 2.0 ** rng.integers(-30, 12, TILES * 128)).astype(np.float32)
        addends[rng.random(addends.size) < 0.3] = 0
        c, values = upload(machine, addends, "c"), upload(machine, given, "values")
        launch_on(machine, kernel, pointer(c), pointer(values), grid=TILES)
        assert machine.counts.compared == 1, what
