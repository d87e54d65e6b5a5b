"""Tokens of mbarriers, test_wait, copies that arrive, pipelines and bulk copies of bytes: values and faults."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from launch_helper import faults_of, int32, launch_on, pointer, read_as, upload
from nvrtc_helper import compile_kernel
from ordinary_helper import ARCHS, run

from g4kv_cli.device.emulated import Machine, UnsupportedOpcode

VALUES = np.random.default_rng(1).integers(-1000, 1000, 512).astype(np.int32)


def ints(count: int) -> Any:
    return np.zeros(count, np.int32)


@pytest.mark.parametrize("arch", ARCHS)
def test_tokens_and_test_wait(arch: str) -> None:
    row = VALUES[:128]
    out, _ = run("asynchronous", "tokens", arch, ints(128), row, block=128)
    np.testing.assert_array_equal(out, 3 * row + np.roll(row, -1) + 3 * np.roll(row, -5))
    out, _ = run("asynchronous", "test_wait", arch, ints(64), VALUES[:64], block=64)
    np.testing.assert_array_equal(out, VALUES[:64][::-1])


@pytest.mark.parametrize("arch", ARCHS)
def test_copies_that_arrive_and_a_pipeline(arch: str) -> None:
    out, _ = run("asynchronous", "async_arrive", arch, ints(32), VALUES[:128])
    np.testing.assert_array_equal(out, VALUES[127 - np.arange(32)])
    out, _ = run("asynchronous", "pipeline", arch, ints(64), VALUES[:256], block=64)
    np.testing.assert_array_equal(out, (VALUES[:256].reshape(4, 64) * np.array([[1], [2], [3], [4]])).sum(0))


@pytest.mark.parametrize("arch", ARCHS)
def test_bulk_copies_of_bytes(arch: str) -> None:
    out, _ = run("asynchronous", "bulk_copy", arch, ints(256), VALUES[:256], block=256)
    np.testing.assert_array_equal(out, 2 * VALUES[:256] + 1)


@pytest.mark.parametrize("arch", ARCHS)
def test_groups_of_a_grid_a_cluster_and_several_warps(arch: str) -> None:
    out, _ = run("asynchronous", "grid_meets", arch, ints(192), VALUES[:192], grid=3, block=64)
    np.testing.assert_array_equal(out, 2 * np.roll(VALUES[:192], -64))
    out, _ = run("asynchronous", "cluster_exchange", arch, ints(256), VALUES[:256], grid=4, block=64)
    exchanged = VALUES[:256].reshape(2, 2, 64)[:, ::-1]
    np.testing.assert_array_equal(out, (exchanged + np.array([0, 1000])[:, None]).reshape(-1))
    out, _ = run("asynchronous", "block_tiles", arch, ints(256), VALUES[:256], block=256)
    halves = VALUES[:256].reshape(2, 128)
    want = (halves == VALUES[0]).any(1, keepdims=True) + 10 * halves[:, 77:78]
    np.testing.assert_array_equal(out, np.repeat(want, 128))


REDUCE = """
extern "C" __global__ void kernel(TYPE* out, const TYPE* in) {
  __shared__ alignas(16) TYPE row[32];
  row[threadIdx.x] = in[blockIdx.x * 32 + threadIdx.x];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.OPERATION [%0], [%1], %2;" ::"l"(out),
                 "r"((unsigned)__cvta_generic_to_shared(row)), "r"((unsigned)sizeof row) : "memory");
    asm volatile("cp.async.bulk.commit_group;");
    WAIT
  }
}
"""
WAITS = 'asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");'


def reduction(operation: str, c_type: str, wait: str = WAITS) -> Any:
    return compile_kernel(REDUCE.replace("TYPE", c_type).replace("OPERATION", operation).replace("WAIT", wait))


@pytest.mark.parametrize(
    ("operation", "c_type", "dtype", "update"),
    [
        ("add.u32", "unsigned", np.uint32, np.add),
        ("min.s32", "int", np.int32, np.minimum),
        ("add.f32", "float", np.float32, np.add),
        ("add.noftz.f16", "unsigned short", np.float16, np.add),
        ("xor.b64", "unsigned long long", np.uint64, np.bitwise_xor),
        ("add.f64", "double", np.float64, np.add),
    ],
)
def test_a_bulk_copy_that_reduces(operation: str, c_type: str, dtype: Any, update: Any) -> None:
    machine = Machine()
    start, rows = np.arange(32).astype(dtype), (np.arange(96) % 7).astype(dtype)
    out, source = upload(machine, start, "out"), upload(machine, rows, "in")
    launch_on(machine, reduction(operation, c_type), pointer(out), pointer(source), grid=3)
    for row in rows.reshape(3, 32):
        start = update(start, row)
    np.testing.assert_array_equal(read_as(machine, out, 32, dtype), start)


def test_what_is_wrong_with_a_reduction_is_said() -> None:
    machine = Machine()
    source = upload(machine, np.zeros(96, np.int32), "in")
    out = upload(machine, np.zeros(32, np.int32), "out")
    faults = faults_of(machine, reduction("add.u32", "unsigned", ""), pointer(out), pointer(source), grid=3)
    assert [fault.kind for fault in faults] == ["unfinished_copy"]
    faults = faults_of(Machine(), reduction("add.u32", "unsigned"), pointer(0), pointer(0))
    assert faults[0].kind == "global_out_of_bounds"
    unwritten = machine.allocate(128, "unwritten")
    faults = faults_of(machine, reduction("add.u32", "unsigned"), pointer(unwritten), pointer(source), grid=3)
    assert [fault.kind for fault in faults] == ["uninitialised_read"]
    with pytest.raises(UnsupportedOpcode, match="there is no such reduction"):
        reduction("add.f16", "unsigned short")


BULK = """
extern "C" __global__ void kernel(int* out, const int* in, unsigned bytes, int shift) {
  __shared__ alignas(16) int row[64];
  __shared__ alignas(8) unsigned long long barrier;
  unsigned at = (unsigned)__cvta_generic_to_shared(&barrier), to = (unsigned)__cvta_generic_to_shared(row);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(at) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 ::"r"(to), "l"(in + shift), "r"(bytes), "r"(at) : "memory");
  }
  __syncthreads();
#ifndef NO_WAIT
  unsigned done = 0;
  while (!done)
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}"
                 : "=r"(done) : "r"(at) : "memory");
#endif
  out[threadIdx.x] = row[threadIdx.x];
}
"""


def bulk_faults(nbytes: int, shift: int, source: str = BULK) -> list[str]:
    machine = Machine()
    data, out = upload(machine, VALUES[:64], "in"), upload(machine, ints(64), "out")
    kernel = compile_kernel(source)
    faults = faults_of(machine, kernel, pointer(out), pointer(data), int32(nbytes), int32(shift), block=64)
    if not faults:
        np.testing.assert_array_equal(read_as(machine, out, 64, np.int32), VALUES[:64])
    return [fault.kind for fault in faults]


def test_what_is_wrong_with_a_bulk_copy_is_said() -> None:
    assert bulk_faults(256, 0) == []
    assert bulk_faults(264, 0) == ["illegal_instruction"]  # no multiple of 16 bytes
    assert bulk_faults(256, 1) == ["misaligned"]
    assert bulk_faults(272, 0) == ["shared_out_of_bounds"]
    assert bulk_faults(128, 48) == ["global_out_of_bounds"]
    assert "shared_race" in bulk_faults(256, 0, "#define NO_WAIT\n" + BULK)


EARLY = """
extern "C" __global__ void kernel(int* out, const int* in) {
  __shared__ alignas(8) unsigned long long barrier;
  __shared__ alignas(16) int row[128];
  unsigned at = (unsigned)__cvta_generic_to_shared(&barrier);
  unsigned to = (unsigned)__cvta_generic_to_shared(row + 4 * threadIdx.x);
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(blockDim.x) : "memory");
  __syncthreads();
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(in + 4 * threadIdx.x) : "memory");
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(at) : "memory");
  out[threadIdx.x] = row[(4 * threadIdx.x + 64) % 256];
}
"""


def test_a_copy_read_before_its_mbarrier_is_a_race() -> None:
    machine = Machine()
    data, out = upload(machine, VALUES[:256], "in"), upload(machine, ints(64), "out")
    kernel = compile_kernel(EARLY.replace("row[128]", "row[256]"))
    faults = faults_of(machine, kernel, pointer(out), pointer(data), block=64)
    assert "shared_race" in [fault.kind for fault in faults]


DROPPED = """
extern "C" __global__ void kernel(int* out) {
  __shared__ alignas(8) unsigned long long barrier;
  unsigned at = (unsigned)__cvta_generic_to_shared(&barrier), done = 0;
  unsigned long long token;
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(blockDim.x) : "memory");
  __syncthreads();
  if (threadIdx.x >= 40) {
    asm volatile("mbarrier.arrive_drop.shared.b64 _, [%0];" ::"r"(at) : "memory");
    return;
  }
  for (int round = 0; round < 3; round++) {
    asm volatile("mbarrier.arrive.shared.b64 %0, [%1];" : "=l"(token) : "r"(at) : "memory");
    do asm volatile("{.reg .pred p; mbarrier.try_wait.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                    : "=r"(done) : "r"(at), "l"(token) : "memory");
    while (!done);
    out[threadIdx.x] += round + 1;
  }
}
"""


def test_threads_that_drop_out_are_not_waited_for() -> None:
    machine = Machine()
    out = upload(machine, ints(64), "out")
    launch_on(machine, compile_kernel(DROPPED), pointer(out), block=64)
    assert read_as(machine, out, 64, np.int32).tolist() == [6] * 40 + [0] * 24


LEAVING = """
extern "C" __global__ void kernel(int* out) {
  __shared__ alignas(8) unsigned long long barrier;
  __shared__ unsigned left;
  __shared__ int row[96];
  unsigned at = (unsigned)__cvta_generic_to_shared(&barrier), count = (unsigned)__cvta_generic_to_shared(&left);
  if (threadIdx.x == 0) { left = 0; asm volatile("mbarrier.init.shared.b64 [%0], 96;" ::"r"(at) : "memory"); }
  __syncthreads();
  row[threadIdx.x] = threadIdx.x;
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at) : "memory");
  unsigned done = 0, before = 0;
  while (!done)
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done) : "r"(at) : "memory");
  out[threadIdx.x] = row[95 - threadIdx.x];
  __syncwarp();
  if (threadIdx.x % 32) return;
  asm volatile("fence.sc.cta; atom.add.ORDER.cta.shared.u32 %0, [%1], 1;" : "=r"(before) : "r"(count) : "memory");
  if (before != 2) return;
  asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(at) : "memory");
  for (int i = 0; i < 96; ++i) row[i] = 7;
}
"""


@pytest.mark.parametrize(("order", "is_right"), [("acquire", True), ("acq_rel", True), ("relaxed", False)])
def test_who_leaves_last_takes_the_barrier_down(order: str, is_right: bool) -> None:
    """As the destructor of cuda::pipeline does, whose atomic says acquire, behind a fence."""
    machine = Machine()
    out = machine.allocate(4 * 96, "out")
    faults = faults_of(machine, compile_kernel(LEAVING.replace("ORDER", order)), pointer(out), block=96)
    np.testing.assert_array_equal(read_as(machine, out, 96, np.int32), np.arange(95, -1, -1))
    assert {fault.kind for fault in faults} == (set() if is_right else {"shared_race"})
