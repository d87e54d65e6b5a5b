"""Whole kernels of the kind that is written for Hopper, on inputs whose results are exact in any order of sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hopper_helper import bf16_bits, floats, hopper_kernel, wgmma_call
from launch_helper import launch_on, pointer, read_as, upload

from g4kv_cli.device.emulated import LaunchFault, Machine

# Producer and two consumer warpgroups over a ring of three stages; a block's depth depends on its number. Each consumer
# keeps one group of wgmma in flight across the wait for the next stage. Results leave through a bulk store.
RAGGED = """
extern "C" __global__ void __launch_bounds__(384) kernel(const __grid_constant__ TensorMap map_a,
    const __grid_constant__ TensorMap map_b, const __grid_constant__ TensorMap map_c) {
  extern __shared__ __align__(1024) unsigned char memory[];   // stage: A 128 x 64, B 64 x 64; then C 2 x 64 x 64 floats
  __shared__ u64 full[3], empty[3];
  const int group = threadIdx.x / 128, steps = 1 + blockIdx.x % 4;
  if (threadIdx.x == 0) for (int s = 0; s < 3; ++s) { init(&full[s], 1); init(&empty[s], 2); }
  init_fence();
  __syncthreads();
  if (group == 0) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (threadIdx.x == 0) for (int i = 0; i < steps; ++i) {
      int s = i % 3;
      wait(&empty[s], i / 3 % 2 ^ 1);
      expect(&full[s], 24576);
      load2(memory + s * 24576, &map_a, i * 64, blockIdx.x * 128, &full[s]);
      load2(memory + s * 24576 + 16384, &map_b, i * 64, 0, &full[s]);
    }
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  const int half = group - 1;
  float d[32];
  for (int i = 0; i < 32; ++i) d[i] = 0;
  for (int i = 0; i < steps; ++i) {
    int s = i % 3;
    wait(&full[s], i / 3 % 2);
    u32 stage = at(memory + s * 24576);
    wgmma_fence();
    for (int k = 0; k < 4; ++k) {
      u64 da = descriptor(stage + half * 8192 + k * 32, 16, 1024), db = descriptor(stage + 16384 + k * 32, 16, 1024);
      CALL
    }
    wgmma_commit();
    asm volatile("wgmma.wait_group.sync.aligned OPEN;" ::: "memory");
    if (threadIdx.x % 128 == 0 && RELEASE >= 0) arrive(&empty[(RELEASE) % 3]);
  }
  wgmma_wait();
  float* c = (float*)(memory + 3 * 24576 + half * 16384);   // two boxes of 64 rows x 32 floats, 128-byte swizzle
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  for (int i = 0; i < 32; ++i) {
    int y = row + i / 2 % 2 * 8, x = i / 4 * 8 + lane % 4 * 2 + i % 2, place = y * 128 + x % 32 * 4;
    c[x / 32 * 2048 + (place ^ ((place >> 7 & 7) << 4)) / 4] = d[i];
  }
  proxy_fence();
  asm volatile("bar.sync %0, 128;" :: "r"(group) : "memory");
  if (threadIdx.x % 128 == 0) {
    for (int x = 0; x < 2; ++x) store2(&map_c, x * 32, blockIdx.x * 128 + half * 64, c + x * 2048);
    commit();
    wait_store();
  }
}
""".replace("CALL", wgmma_call(64))
PIPELINED = RAGGED.replace("OPEN", "1").replace("RELEASE", "i - 1")
BLOCKS = 6


def run_ragged(source: str, **options: Any) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float64]]:
    """(what the kernel stored, what it should have)."""
    rng = np.random.default_rng(2)
    a, b = (bf16_bits(rng.integers(-8, 9, (rows, 256)).astype(np.float32)) for rows in (BLOCKS * 128, 64))
    machine = Machine()
    map_a = machine.tensor_map(upload(machine, a, "A"), (256, len(a)), (64, 128))
    map_b = machine.tensor_map(upload(machine, b, "B"), (256, 64), (64, 64))
    c = machine.allocate(BLOCKS * 128 * 64 * 4, "C")
    map_c = machine.tensor_map(c, (64, BLOCKS * 128), (32, 64), 4)
    launch_on(
        machine,
        hopper_kernel(source),
        *(each.pack() for each in (map_a, map_b, map_c)),
        grid=BLOCKS,
        block=384,
        dynamic_shared_bytes=3 * 24576 + 32768,
        must_write=[(c, BLOCKS * 128 * 64 * 4)],
        **options,
    )
    depth = np.repeat(64 * (1 + np.arange(BLOCKS) % 4), 128)
    kept = np.where(np.arange(256) < depth[:, None], floats(a), 0)
    return read_as(machine, c, BLOCKS * 128 * 64, np.float32).reshape(-1, 64), kept @ floats(b).T


@pytest.mark.parametrize(
    "options", [{}, {"chunk_threads": 1}, {"reverse_blocks": True}, {"chunk_threads": 768}], ids=str
)
def test_ragged_pipeline(options: dict[str, Any]) -> None:
    got, want = run_ragged(PIPELINED, **options)
    np.testing.assert_array_equal(got, want)


def test_ragged_pipeline_that_releases_the_stage_in_flight() -> None:
    with pytest.raises(LaunchFault) as caught:
        run_ragged(RAGGED.replace("OPEN", "1").replace("RELEASE", "i"))
    assert set(caught.value.kinds) == {"shared_race"}
    assert "write-after-read race: a bulk copy and wgmma of warpgroup" in str(caught.value)


def test_ragged_pipeline_that_waits_for_everything() -> None:
    got, want = run_ragged(RAGGED.replace("OPEN", "0").replace("RELEASE", "i"))
    np.testing.assert_array_equal(got, want)


def test_ragged_pipeline_that_stores_before_all_have_written() -> None:
    barrier = 'asm volatile("bar.sync %0, 128;" :: "r"(group) : "memory");'
    with pytest.raises(LaunchFault) as caught:
        run_ragged(PIPELINED.replace(barrier, ""))
    assert set(caught.value.kinds) == {"shared_race"}
    assert "a bulk store of warp" in str(caught.value)


# Attention's two products: S = Q K^T, P = bf16(S) as the A registers of O = P V with V along its rows.
TWO_PRODUCTS = """
extern "C" __global__ void __launch_bounds__(128) kernel(const __grid_constant__ TensorMap map_q,
    const __grid_constant__ TensorMap map_k, const __grid_constant__ TensorMap map_v, float* out) {
  extern __shared__ __align__(1024) unsigned char memory[];
  unsigned char *tq = memory, *tk = memory + 8192, *tv = memory + 16384;   // V 64 x 128 in two panels
  __shared__ u64 full;
  if (threadIdx.x == 0) {
    init(&full, 1);
    init_fence();
    expect(&full, 4 * 8192);
    load2(tq, &map_q, 0, 0, &full); load2(tk, &map_k, 0, 0, &full);
    load2(tv, &map_v, 0, 0, &full); load2(tv + 8192, &map_v, 64, 0, &full);
  }
  __syncthreads();
  wait(&full, 0);
  float d[32];
  for (int i = 0; i < 32; ++i) d[i] = 0;
  wgmma_fence();
  for (int k = 0; k < 4; ++k) {
    u64 da = descriptor(at(tq) + k * 32, 16, 1024), db = descriptor(at(tk) + k * 32, 16, 1024);
    SCORES
  }
  wgmma_commit();
  wgmma_wait();
  u32 p[16];
  for (int i = 0; i < 16; ++i)
    asm volatile("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(p[i]) : "f"(d[2 * i + 1]), "f"(d[2 * i]));
  float o[64];
  for (int i = 0; i < 64; ++i) o[i] = 0;
  wgmma_fence();
  for (int k = 0; k < 4; ++k) {
    // Columns 16 k to 16 k + 15 of S are accumulators 8 k to 8 k + 7: pairs of low rows, of high rows, twice.
    u32 ra[4] = {p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3]};
    u64 db = descriptor(at(tv) + k * 2048, 8192, 1024);
    VALUES
  }
  wgmma_commit();
  wgmma_wait();
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 * 16 + lane / 4;
  for (int i = 0; i < 64; ++i) out[(row + i / 2 % 2 * 8) * 128 + i / 4 * 8 + lane % 4 * 2 + i % 2] = o[i];
}
"""


def test_two_products_of_attention() -> None:
    values = wgmma_call(128, "registers", flags="1, 1, 1, 1").replace("d[", "o[")
    kernel = hopper_kernel(TWO_PRODUCTS.replace("SCORES", wgmma_call(64)).replace("VALUES", values))
    rng = np.random.default_rng(7)
    # |S| <= 64, exact in bf16; |O| <= 64 * 64 * 8, exact in f32.
    q, k = (bf16_bits(rng.integers(-1, 2, (64, 64)).astype(np.float32)) for _ in range(2))
    v = bf16_bits(rng.integers(-8, 9, (64, 128)).astype(np.float32))
    machine = Machine()
    maps = [machine.tensor_map(upload(machine, x, "qkv"), (x.shape[1], 64), (64, 64)).pack() for x in (q, k, v)]
    out = machine.allocate(64 * 128 * 4, "out")
    launch_on(machine, kernel, *maps, pointer(out), block=128, dynamic_shared_bytes=32768, must_write=[(out, 32768)])
    got = read_as(machine, out, 64 * 128, np.float32).reshape(64, 128)
    np.testing.assert_array_equal(got, floats(q) @ floats(k).T @ floats(v))
