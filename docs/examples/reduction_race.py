"""A block reduction that lacks a barrier. On a GPU its sum is right most of the time; here the race is found, with both
source lines. Run it: python docs/examples/reduction_race.py
"""

from __future__ import annotations

import numpy as np

from g4kv_cli import emulator

SOURCE = """
extern "C" __global__ void block_sums(const float* x, float* sums, int n) {
  __shared__ float part[256];
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  part[threadIdx.x] = i < n ? x[i] : 0.0f;
  __syncthreads();
  for (int half = blockDim.x / 2; half > 0; half /= 2) {
    if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    LOOP_BARRIER;
  }
  if (threadIdx.x == 0) sums[blockIdx.x] = part[0];
}
"""


def main() -> None:
    """Find the race, then show that the kernel with its barrier has none and is right."""
    n, block = 10_000, 256
    grid = -(-n // block)
    x = np.random.default_rng(seed=1).integers(-8, 9, n).astype(np.float32)  # small integers: every sum is exact
    sums = np.zeros(grid, np.float32)
    arguments = {"x": x, "sums": emulator.out(sums), "n": n}

    racy = emulator.load(SOURCE, options=["-DLOOP_BARRIER=(void)0"])
    try:
        racy.launch("block_sums", grid, block, arguments)
    except emulator.LaunchFailed as found:
        for fault in found.faults:
            print(
                f"without the barrier: {fault.kind} at line {fault.source_line}, block {fault.block}: {fault.message}"
            )

    right = emulator.load(SOURCE, options=["-DLOOP_BARRIER=__syncthreads()"])
    report = right.launch("block_sums", grid, block, arguments)
    want = np.pad(x, (0, grid * block - n)).reshape(grid, block).sum(axis=1)
    print(f"with the barrier: {len(report.findings)} findings, sums right: {bool((sums == want).all())}")


if __name__ == "__main__":
    main()
