"""Warps that store one value at one place do no harm, in kernels with mbarriers too, whose races are told by clocks."""

from __future__ import annotations

import numpy as np
import pytest

from g4kv_cli import emulator

SOURCE = """
extern "C" __global__ void store(unsigned* out, int by_warp, int later_warp) {
  __shared__ __align__(8) unsigned long long arrived;
  __shared__ __align__(128) unsigned s[128];
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32, shared = (unsigned)__cvta_generic_to_shared(s);
  if (threadIdx.x == 0)
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"((unsigned)__cvta_generic_to_shared(&arrived)) : "memory");
  const unsigned mine = by_warp ? warp : 0;
  s[64 + lane] = lane + mine;
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};"
               ::"r"(shared + lane % 16 * 16), "r"(lane + mine), "r"(7 * lane + mine) : "memory");
  if (warp == 0) s[96 + lane] = lane;
  if (warp == 1) s[96 + lane] = lane + later_warp;
  __syncthreads();
  for (int at = threadIdx.x; at < 128; at += blockDim.x) out[at] = s[at];
}
"""


@pytest.fixture(scope="module")
def module() -> emulator.Module:
    return emulator.load(SOURCE)


def test_equal_values_of_several_warps_are_no_race(module: emulator.Module) -> None:
    out = np.zeros(128, np.uint32)
    module.launch("store", grid=2, block=128, args=[out, 0, 0])
    lanes = np.arange(32)
    assert out[64:].tolist() == [*lanes, *lanes]
    assert out[:32].reshape(8, 4).tolist() == lanes.reshape(8, 4).tolist()
    assert out[32:64].reshape(8, 4).tolist() == (7 * lanes).reshape(8, 4).tolist()


@pytest.mark.parametrize(("by_warp", "later_warp", "line"), [(1, 0, 9), (0, 1, 13)])
def test_different_values_are_one(module: emulator.Module, by_warp: int, later_warp: int, line: int) -> None:
    with pytest.raises(emulator.LaunchFailed) as caught:
        module.launch("store", grid=2, block=128, args=[np.zeros(128, np.uint32), by_warp, later_warp])
    found = [fault for fault in caught.value.faults if fault.kind == "shared_race"]
    assert line in [fault.source_line for fault in found]
    assert all("write-after-write race" in fault.message for fault in found)
