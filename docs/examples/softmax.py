"""A softmax in CUDA C++, one warp a row, held against NumPy in float64. Run it: python docs/examples/softmax.py"""

from __future__ import annotations

import numpy as np

from g4kv_cli import emulator

SOURCE = """
#include <cuda_bf16.h>
#include <math.h>

template <int Columns>  // a multiple of 32
__global__ void softmax_rows(const __nv_bfloat16* x, float* out, int rows) {
  const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= rows) return;
  float values[Columns / 32], largest = -INFINITY, sum = 0.0f;
  for (int k = 0; k < Columns / 32; ++k) {
    values[k] = __bfloat162float(x[row * Columns + k * 32 + lane]);
    largest = fmaxf(largest, values[k]);
  }
  for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, step));
  for (int k = 0; k < Columns / 32; ++k) sum += values[k] = expf(values[k] - largest);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  for (int k = 0; k < Columns / 32; ++k) out[row * Columns + k * 32 + lane] = values[k] / sum;
}
"""


def main() -> None:
    """Launch over a ragged number of rows and compare every element."""
    from ml_dtypes import bfloat16

    rows, columns, warps = 37, 256, 4
    x = (4 * np.random.default_rng(seed=1).standard_normal((rows, columns))).astype(bfloat16)
    out = np.zeros((rows, columns), np.float32)
    module = emulator.load(SOURCE, names=[f"softmax_rows<{columns}>"])
    report = module.launch(
        "softmax_rows", -(-rows // warps), 32 * warps, {"x": x, "out": emulator.out(out), "rows": rows}
    )
    print(report)

    exact = x.astype(np.float64)
    exact -= exact.max(axis=1, keepdims=True)
    below = np.abs(exact)
    want = np.exp(exact)
    want /= want.sum(axis=1, keepdims=True)
    # In units of 2^-24 (half an ulp): expf is off by 2 ulp, and by what one rounding of x - max moves it; so is every
    # term of the sum, which has columns / 32 terms a lane and then five steps between lanes; the division adds one.
    units = (4 + below) + (4 + below.max(axis=1, keepdims=True)) + (columns // 32 - 1 + 5) + 1
    error = np.abs(out - want) / (want * units * 2.0**-24)
    print(f"largest error: {error.max():.3f} of its limit")


if __name__ == "__main__":
    main()
