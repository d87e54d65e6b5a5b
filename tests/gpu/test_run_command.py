"""``g4kv run --device cuda``: the same launch, and the same bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from g4kv_cli.main import run

pytestmark = pytest.mark.gpu

SOURCE = """
template <class T> __global__ void scale(T* x, T by, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] = x[i] * by + T(1);
}
"""


def test_a_gpu_and_the_emulated_device_store_the_same(
    cuda_device: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("scale.cu").write_text(SOURCE)
    words = ["run", "scale.cu", "--kernel", "scale<float>", "--grid", "4", "--block", "256"]
    words += ["--arg", "x=f32[1000]:random", "--arg", "f32:2.5", "--arg", "i32:1000"]
    assert run([*words, "--device", "cuda", "--save", "x=gpu.npy"]) == 0
    assert "a GPU checks nothing but wild addresses" in capsys.readouterr().out
    assert run([*words, "--save", "x=emulated.npy"]) == 0
    np.testing.assert_array_equal(np.load("gpu.npy").view(np.uint32), np.load("emulated.npy").view(np.uint32))
