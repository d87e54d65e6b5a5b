"""mma.sync as inline PTX may write it: sinks among its results and literals among its addends."""

from __future__ import annotations

import numpy as np
import pytest
from launch_helper import launch_on, pointer, upload
from nvrtc_helper import compile_module

from g4kv_cli.device.emulated import Machine

SOURCE = r"""
extern "C" __global__ void row_sums(const unsigned* a, float* out) {
  unsigned v[4], one = 0x3f803f80u;
  for (int i = 0; i < 4; ++i) v[i] = a[threadIdx.x * 4 + i];
  float d[2] = {1.0f, 2.0f}, other[2] = {1.0f, 2.0f};
  for (int turn = 0; turn < 3; ++turn) {
    asm volatile("{\nmma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, _, %1, _}, {%2, %3, %4, %5}, {%6, %7}, "
                 "{%8, 0., %9, 0.};\n}\n" : "=f"(d[0]), "=f"(d[1])
                 : "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]), "r"(one), "r"(one), "f"(d[0]), "f"(d[1]));
    asm volatile("{\nmma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {_, %0, _, %1}, {%2, %3, %4, %5}, {%6, %7}, "
                 "{0f3F800000, %8, 0f40000000, %9};\n}\n" : "=f"(other[0]), "=f"(other[1])
                 : "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]), "r"(one), "r"(one), "f"(other[0]), "f"(other[1]));
  }
  out[threadIdx.x * 4] = d[0];
  out[threadIdx.x * 4 + 1] = d[1];
  out[threadIdx.x * 4 + 2] = other[0];
  out[threadIdx.x * 4 + 3] = other[1];
}
"""


@pytest.mark.parametrize("mode", ["native", "interpreter"])
def test_sinks_and_literals(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("G4KV_EMULATOR", mode)
    module = compile_module(SOURCE)
    machine = Machine()
    values = np.random.default_rng(1).integers(1, 17, (16, 16))
    # Lane: rows lane / 4 and 8 more, columns lane % 4 * 2 and the next, and 8 more (PTX ISA, m16n8k16).
    lanes = np.arange(32)
    rows, columns = lanes // 4, lanes % 4 * 2
    fragments = np.empty((32, 4, 2), np.float32)
    for number, (down, right) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
        for half in (0, 1):
            fragments[:, number, half] = values[rows + down, columns + right + half]
    bf16 = (fragments.view(np.uint32) >> 16).astype(np.uint16)
    source = upload(machine, np.ascontiguousarray(bf16).view(np.uint32), "a")
    out = upload(machine, np.zeros((32, 4), np.float32), "out")
    launch_on(machine, module.kernel("row_sums"), pointer(source), pointer(out))
    got = machine.read(out, 32 * 16).view(np.float32).reshape(32, 4)
    sums = values.sum(axis=1)
    want = np.stack([1 + 3 * sums[rows], 2 + 3 * sums[rows + 8]], axis=1)
    np.testing.assert_array_equal(got, np.concatenate([want, want], axis=1))
