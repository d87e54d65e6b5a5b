"""mma.sync of bf16, f16 and tf32 into f32, and of bytes, on the native engine: the bits of the interpreter, of every
class of number."""

from __future__ import annotations

import numpy as np
import pytest
from engine_helper import engine
from launch_helper import launch_on, pointer, upload
from nvrtc_helper import compile_kernel

from g4kv_cli.device.emulated import Kernel, Machine

TILES = 24
LARGEST = {"bf16": (7, 255), "f16": (10, 31), "tf32": (23, 255)}
"""Digits of a mantissa, and the exponent of infinities."""
CLASSES = ("random bits", "near one", "subnormal beside normal", "subnormal alone", "infinities and NaN", "zeros")


def elements(rng: np.random.Generator, what: str, kind: str, count: int) -> np.ndarray:
    digits, most = LARGEST[kind]
    bits = 32 if kind == "tf32" else 16
    sign, mantissa = rng.integers(0, 2, count) << bits - 1, rng.integers(0, 1 << digits, count)
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
    return (sign | exponent << digits | mantissa).astype(f"u{bits // 8}")


def kernel_of(form: str, of_a: int, of_b: int, sums: str) -> Kernel:
    """A kernel of ``mma.sync.aligned.FORM``: kernel(sums, registers of A and B), a tile a block."""
    engine()
    places = [f"%{4 + number}" for number in range(of_a + of_b)]
    names = f"{{%0,%1,%2,%3}}, {{{','.join(places[:of_a])}}}, {{{','.join(places[of_a:])}}}, {{%0,%1,%2,%3}}"
    inputs = ", ".join(f'"r"(in[{32 * number} + l])' for number in range(of_a + of_b))
    letter = "f" if sums == "float" else "r"
    outputs = ", ".join(f'"+{letter}"(c[{32 * number}])' for number in range(4))
    kernel = compile_kernel(f"""extern "C" __global__ void kernel({sums}* sums, const unsigned* all) {{
      const int l = threadIdx.x;
      const unsigned* in = all + blockIdx.x * {32 * (of_a + of_b)};
      {sums}* c = sums + blockIdx.x * 128 + l;
      asm volatile("mma.sync.aligned.{form} {names};" : {outputs} : {inputs});
    }}""")
    assert kernel.not_native_for == ()
    return kernel


def compare(kernel: Kernel, addends: np.ndarray, given: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("G4KV_EMULATOR", "both")
    machine = Machine()
    c, values = upload(machine, addends, "c"), upload(machine, given, "values")
    launch_on(machine, kernel, pointer(c), pointer(values), grid=TILES)
    assert machine.counts.compared == 1


@pytest.mark.parametrize(
    ("kind", "depth"), [("bf16", 8), ("bf16", 16), ("f16", 8), ("f16", 16), ("tf32", 4), ("tf32", 8)]
)
def test_products_are_the_interpreters(kind: str, depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    words = depth // 2 if kind == "tf32" else depth // 4
    kernel = kernel_of(f"m16n8k{depth}.row.col.f32.{kind}.{kind}.f32", words, words // 2, "float")
    rng = np.random.default_rng(16 * depth + len(kind))
    for what in CLASSES:
        count = TILES * (words + words // 2) * (32 if kind == "tf32" else 64)
        addends = (rng.standard_normal(TILES * 128) * 2.0 ** rng.integers(-30, 12, TILES * 128)).astype(np.float32)
        addends[rng.random(addends.size) < 0.3] = 0
        compare(kernel, addends, elements(rng, what, kind, count), monkeypatch)


@pytest.mark.parametrize("types", ["s8.s8", "s8.u8", "u8.s8", "u8.u8"])
def test_products_of_bytes_are_the_interpreters(types: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(8)
    for depth, more in ((16, ""), (32, ".satfinite")):
        kernel = kernel_of(f"m16n8k{depth}.row.col{more}.s32.{types}.s32", depth // 8, depth // 16, "int")
        given = rng.integers(0, 256, TILES * 128 * (depth // 8 + depth // 16)).astype(np.uint8)
        given[: given.size // 2] = rng.choice(np.array([0, 127, 128, 255], np.uint8), given.size // 2)
        addends = rng.integers(-(1 << 31), 1 << 31, TILES * 128)
        near = np.where(addends > 0, (1 << 31) - 1, -(1 << 31)) - addends % 1000 * np.sign(addends)
        compare(kernel, np.where(rng.random(addends.size) < 0.5, near, addends).astype(np.int32), given, monkeypatch)
