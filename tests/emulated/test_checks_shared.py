"""Each check of shared memory and barriers on a kernel that breaks exactly that rule, and on a twin that does not."""

from __future__ import annotations

import numpy as np
import pytest
from launch_helper import faults_of, int32, pointer, read_as, upload
from nvrtc_helper import DIALECTS, compile_kernel, line_of

from g4kv_cli.device.emulated import Fault, Machine

REVERSE = """
extern "C" __global__ void kernel(int* out) {
  __shared__ int row[128];
  row[threadIdx.x] = threadIdx.x;                      // MARK: store
  BARRIER
  out[blockIdx.x * 128 + threadIdx.x] = row[127 - threadIdx.x];   // MARK: load
}
"""


def run(
    source: str, arch: str = "90", *, grid: int = 1, block: int = 128, nbytes: int = 4096, dynamic: int = 0
) -> tuple[list[Fault], np.ndarray]:
    """Faults and the int32 output of a kernel with one pointer argument."""
    machine = Machine()
    out = machine.allocate(nbytes, "out")
    kernel = compile_kernel(source, arch)
    faults = faults_of(machine, kernel, pointer(out), grid=grid, block=block, dynamic_shared_bytes=dynamic)
    return faults, read_as(machine, out, nbytes // 4, np.int32)


@pytest.mark.parametrize("arch", DIALECTS)
def test_read_after_write_race(arch: str) -> None:
    clean, values = run(REVERSE.replace("BARRIER", "__syncthreads();"), arch, grid=3)
    assert not clean
    np.testing.assert_array_equal(values[:384], np.tile(np.arange(127, -1, -1), 3))
    source = REVERSE.replace("BARRIER", "__threadfence_block();")
    (fault,), racing = run(source, arch, grid=3)
    assert (fault.kind, fault.is_fatal) == ("shared_race", False)
    assert "read-after-write" in fault.message
    assert fault.source_line == line_of(source, "MARK: load")
    # Thread 0 is in warp 0 and reads row[127], which warp 3 wrote.
    assert (fault.block, fault.thread, fault.lanes, fault.address) == ((0, 0, 0), (0, 0, 0), 384, 508)
    assert f"line {line_of(source, 'MARK: store')}" in fault.message
    np.testing.assert_array_equal(racing[:384], values[:384])  # lockstep hides the race from the numbers


WRITE_AFTER_READ = """
extern "C" __global__ void kernel(int* out) {
  __shared__ int row[64];
  row[threadIdx.x] = threadIdx.x;
  __syncthreads();
  int other = row[63 - threadIdx.x];                   // MARK: load
  BARRIER
  row[threadIdx.x] = other * 2;                        // MARK: store
  __syncthreads();
  out[threadIdx.x] = row[threadIdx.x];
}
"""


@pytest.mark.parametrize("arch", DIALECTS)
def test_write_after_read_race(arch: str) -> None:
    assert not run(WRITE_AFTER_READ.replace("BARRIER", "__syncthreads();"), arch, block=64)[0]
    source = WRITE_AFTER_READ.replace("BARRIER", "")
    (fault,), _ = run(source, arch, block=64)
    assert fault.kind == "shared_race"
    assert "write-after-read" in fault.message
    lines = {line_of(source, "MARK: store"), line_of(source, "MARK: load")}
    assert fault.source_line in lines
    assert (fault.block, fault.thread, fault.lanes) == ((0, 0, 0), (0, 0, 0), 64)


WRITE_AFTER_WRITE = """
extern "C" __global__ void kernel(int* out) {
  __shared__ int total;
  if (threadIdx.x % 32 == 0 CONDITION) total = threadIdx.x;   // MARK: store
  __syncthreads();
  out[threadIdx.x] = total;
}
"""


def test_write_after_write_race_between_warps() -> None:
    assert not run(WRITE_AFTER_WRITE.replace("CONDITION", "&& threadIdx.x == 0"), block=64)[0]
    source = WRITE_AFTER_WRITE.replace("CONDITION", "")
    (fault,), _ = run(source, block=64)
    assert fault.kind == "shared_race"
    assert "write-after-write" in fault.message
    assert fault.source_line == line_of(source, "MARK: store")
    assert (fault.block, fault.thread) == ((0, 0, 0), (32, 0, 0))


ONE_INSTRUCTION = """
extern "C" __global__ void kernel(int* out) {
  __shared__ int slot[32];
  slot[threadIdx.x / SHARE] = VALUE;                   // MARK: store
  __syncwarp();
  out[threadIdx.x] = slot[threadIdx.x / SHARE];
}
"""


def test_lanes_of_one_instruction_write_one_place() -> None:
    for share, value, expected in ((1, "threadIdx.x", 0), (2, "7", 0), (2, "threadIdx.x", 1)):
        source = ONE_INSTRUCTION.replace("SHARE", str(share)).replace("VALUE", value)
        faults, _ = run(source, block=32)
        assert len(faults) == expected
        if faults:
            assert (faults[0].kind, faults[0].source_line) == ("shared_race", line_of(source, "MARK: store"))
            assert (faults[0].thread, faults[0].lanes) == ((1, 0, 0), 16)  # of each pair the second
            assert "write-after-write" in faults[0].message


BYTES = """
extern "C" __global__ void kernel(int* out) {
  __shared__ unsigned char row[64];
  row[threadIdx.x * 2 % 64 + threadIdx.x / 32] = threadIdx.x;  // neighbours in one word, two warps
  __syncthreads();
  out[threadIdx.x] = row[threadIdx.x];
}
"""


def test_neighbouring_bytes_of_two_warps_are_no_race() -> None:
    faults, values = run(BYTES, block=64)
    assert not faults
    # Byte 2 t + w holds thread t + 32 w.
    np.testing.assert_array_equal(values[:64], np.arange(64).reshape(2, 32).T.reshape(-1))


OVERRUN = """
extern "C" __global__ void kernel(int* out) {
  __shared__ int row[64];
  row[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = row[threadIdx.x + SHIFT];         // MARK: load
}
"""


@pytest.mark.parametrize("arch", DIALECTS)
def test_shared_out_of_bounds(arch: str) -> None:
    assert not run(OVERRUN.replace("SHIFT", "0"), arch, block=64)[0]
    source = OVERRUN.replace("SHIFT", "24")
    (fault,), _ = run(source, arch, block=64)
    assert (fault.kind, fault.is_fatal) == ("shared_out_of_bounds", True)
    assert fault.source_line == line_of(source, "MARK: load")
    assert (fault.thread, fault.lanes, fault.address) == ((40, 0, 0), 24, 256)


DYNAMIC = """
extern "C" __global__ void kernel(int* out) {
  extern __shared__ int row[];
  row[threadIdx.x] = threadIdx.x;
  __syncthreads();
  out[threadIdx.x] = row[threadIdx.x ^ 1];
}
"""


def test_dynamic_shared_memory_ends_where_the_launch_says() -> None:
    faults, values = run(DYNAMIC, block=64, dynamic=256)
    assert not faults
    np.testing.assert_array_equal(values[:64], np.arange(64) ^ 1)
    (fault,), _ = run(DYNAMIC, block=64, dynamic=252)
    assert (fault.kind, fault.thread, fault.lanes) == ("shared_out_of_bounds", (63, 0, 0), 1)


UNINITIALISED = """
extern "C" __global__ void kernel(int* out) {
  __shared__ int row[64];
  if (threadIdx.x < LIMIT) row[threadIdx.x] = 1;
  __syncthreads();
  out[blockIdx.x * 128 + threadIdx.x] = row[threadIdx.x];                 // MARK: load
}
"""


@pytest.mark.parametrize("arch", DIALECTS)
def test_shared_uninitialised_read(arch: str) -> None:
    assert not run(UNINITIALISED.replace("LIMIT", "64"), arch, block=64)[0]
    source = UNINITIALISED.replace("LIMIT", "60")
    (fault,), _ = run(source, arch, block=64)
    assert (fault.kind, fault.is_fatal) == ("shared_uninitialised_read", False)
    assert fault.source_line == line_of(source, "MARK: load")
    assert (fault.thread, fault.lanes, fault.address) == ((60, 0, 0), 4, 240)


def test_shared_memory_of_one_block_does_not_initialise_the_next() -> None:
    source = UNINITIALISED.replace("threadIdx.x < LIMIT", "blockIdx.x != 1")
    (fault,), _ = run(source, grid=3, block=64)
    assert (fault.kind, fault.block, fault.lanes) == ("shared_uninitialised_read", (1, 0, 0), 64)


MISALIGNED = """
extern "C" __global__ void kernel(int* out) {
  __shared__ __align__(16) int row[260];
  for (int i = threadIdx.x; i < 260; i += 64) row[i] = i;
  __syncthreads();
  int4 v = *reinterpret_cast<int4*>(row + threadIdx.x * 4 + SHIFT);   // MARK: load
  out[threadIdx.x] = v.x + v.y + v.z + v.w;
}
"""


def test_misaligned_shared_access() -> None:
    assert not run(MISALIGNED.replace("SHIFT", "4"), block=64)[0]
    source = MISALIGNED.replace("SHIFT", "(threadIdx.x == 33 ? 2 : 0)")
    (fault,), _ = run(source, block=64)
    assert (fault.kind, fault.thread, fault.lanes) == ("misaligned", (33, 0, 0), 1)
    assert fault.source_line == line_of(source, "MARK: load")


EARLY_EXIT = """
extern "C" __global__ void kernel(int* out) {
  __shared__ int row[128];
  row[threadIdx.x] = threadIdx.x + 7;
  if (threadIdx.x >= LIMIT) return;
  __syncthreads();
  out[blockIdx.x * 128 + threadIdx.x] = row[0];
}
"""


@pytest.mark.parametrize("limit", [128, 96, 100, 3])
@pytest.mark.parametrize("arch", DIALECTS)
def test_threads_that_have_exited_do_not_count_at_a_barrier(arch: str, limit: int) -> None:
    faults, values = run(EARLY_EXIT.replace("LIMIT", str(limit)), arch, grid=2)
    assert not faults
    assert (values.reshape(-1, 128)[:2, :limit] == 7).all()


DIFFERENT_BARRIERS = """
extern "C" __global__ void kernel(int* out) {
  if (threadIdx.x < LIMIT) {
    out[threadIdx.x] = 1;
    __syncthreads();                                   // MARK: first
  } else {
    out[threadIdx.x] = 2;
    __syncthreads();                                   // MARK: second
  }
}
"""


def test_threads_that_meet_at_different_barriers() -> None:
    assert not run(DIFFERENT_BARRIERS.replace("LIMIT", "128"))[0]
    source = DIFFERENT_BARRIERS.replace("LIMIT", "64")
    (fault,), _ = run(source)
    lines = line_of(source, "MARK: first"), line_of(source, "MARK: second")
    assert (fault.kind, fault.block) == ("divergent_barrier", (0, 0, 0))
    assert "different barrier instructions" in fault.message
    assert fault.source_line in lines
    other = lines[1 - lines.index(fault.source_line)]
    assert f"line {other}" in fault.message


DIVERGENT_WARP = """
extern "C" __global__ void kernel(int* out) {
  if (threadIdx.x % 32 < LIMIT) {
    out[threadIdx.x] = 1;
    __syncthreads();                                   // MARK: barrier
  }
  out[64 + threadIdx.x] = 3;
}
"""


@pytest.mark.parametrize("arch", DIALECTS)
def test_a_barrier_in_a_divergent_warp(arch: str) -> None:
    assert not run(DIVERGENT_WARP.replace("LIMIT", "32"), arch, block=64)[0]
    source = DIVERGENT_WARP.replace("LIMIT", "16")
    faults, _ = run(source, arch, block=64)
    assert {fault.kind for fault in faults} == {"divergent_barrier"}
    assert faults[0].source_line == line_of(source, "MARK: barrier")
    assert (faults[0].block, faults[0].thread) == ((0, 0, 0), (0, 0, 0))
    assert "16 of the 32 live threads" in faults[0].message


NAMED = """
__device__ void barrier(int id, int threads) { asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory"); }
extern "C" __global__ void kernel(int* out) {
  __shared__ int row[128];
  int half = threadIdx.x / 64;
  row[threadIdx.x] = threadIdx.x;                      // MARK: store
  barrier(1 + half, THREADS);                          // MARK: barrier
  out[blockIdx.x * 128 + threadIdx.x] = row[INDEX];                       // MARK: load
}
"""


@pytest.mark.parametrize("arch", DIALECTS)
def test_named_barriers_order_only_their_warps(arch: str) -> None:
    named = NAMED.replace("THREADS", "64")
    clean, values = run(named.replace("INDEX", "threadIdx.x ^ 32"), arch, grid=2)
    assert not clean
    np.testing.assert_array_equal(values[:128], np.arange(128) ^ 32)
    source = named.replace("INDEX", "threadIdx.x ^ 64")
    (fault,), _ = run(source, arch, grid=2)
    assert fault.kind == "shared_race"
    assert "read-after-write" in fault.message
    assert fault.source_line == line_of(source, "MARK: load")
    assert (fault.block, fault.thread, fault.lanes) == ((0, 0, 0), (0, 0, 0), 256)


def test_a_deadlock() -> None:
    source = NAMED.replace("THREADS", "96").replace("INDEX", "threadIdx.x")
    (fault,), _ = run(source)
    assert (fault.kind, fault.is_fatal) == ("deadlock", True)
    assert "64 of 96 threads" in fault.message
    assert fault.call_line == line_of(source, "MARK: barrier") or fault.source_line == line_of(source, "MARK: barrier")
    assert fault.block == (0, 0, 0)


ATOMIC = """
extern "C" __global__ void kernel(int* out) {
  __shared__ int total;
  if (threadIdx.x == 0) total = 0;
  BARRIER
  atomicAdd(&total, (int)threadIdx.x);                 // MARK: add
  __syncthreads();
  out[threadIdx.x] = total;
}
"""


def test_atomics_of_several_warps_are_no_race_but_a_plain_store_is() -> None:
    faults, values = run(ATOMIC.replace("BARRIER", "__syncthreads();"))
    assert not faults
    assert (values[:128] == 127 * 128 // 2).all()
    source = ATOMIC.replace("BARRIER", "")
    (first, *rest), _ = run(source)
    assert {fault.kind for fault in (first, *rest)} == {"shared_race"}
    assert line_of(source, "MARK: add") in {fault.source_line for fault in (first, *rest)}


LOOP = """
extern "C" __global__ void kernel(const int* steps, int* out) {
  __shared__ int row[64];
  int sum = 0;
  for (int step = 0; step < steps[blockIdx.x]; ++step) {
    row[threadIdx.x] = threadIdx.x + step;
    __syncthreads();
    sum += row[threadIdx.x ^ 32];
    AFTER
  }
  out[blockIdx.x * 64 + threadIdx.x] = sum;
}
"""


@pytest.mark.parametrize("arch", DIALECTS)
def test_barriers_in_loops_of_different_length(arch: str) -> None:
    """Blocks of one chunk pass their barriers a different number of times; only the missing second barrier races."""
    steps = np.array([3, 0, 5, 1], np.int32)
    for after in ("__syncthreads();", ""):
        machine = Machine()
        source, out = upload(machine, steps, "steps"), machine.allocate(1024, "out")
        kernel = compile_kernel(LOOP.replace("AFTER", after), arch)
        faults = faults_of(machine, kernel, pointer(source), pointer(out), grid=4, block=64)
        got = read_as(machine, out, 256, np.int32).reshape(4, 64)
        lanes = np.arange(64) ^ 32
        want = [steps[block] * lanes + steps[block] * (steps[block] - 1) // 2 for block in range(4)]
        np.testing.assert_array_equal(got, np.array(want))
        if after:
            assert not faults
        else:
            assert {fault.kind for fault in faults} == {"shared_race"}
            assert all("write-after-read" in fault.message for fault in faults)
            assert all(fault.block == (0, 0, 0) for fault in faults)


REORDERED = """
extern "C" __global__ void kernel(int* out, int cold) {
  __shared__ int row[64];
  for (int step = 0; step < 4; ++step) {
    int value = threadIdx.x;
    if (__builtin_expect((threadIdx.x + step) % 5 == cold, 0)) {
      value = out[threadIdx.x + 64] * 3 + step;        // rarely taken: the compiler may place it behind the barrier
      out[threadIdx.x + 128] = value;
    }
    row[threadIdx.x] = value;
    __syncthreads();
    out[threadIdx.x] = row[63 - threadIdx.x];
    __syncthreads();
  }
}
"""


@pytest.mark.parametrize("arch", DIALECTS)
def test_warps_meet_again_before_a_barrier_whatever_the_block_order(arch: str) -> None:
    machine = Machine()
    out = upload(machine, np.zeros(256, np.int32), "out")
    assert not faults_of(machine, compile_kernel(REORDERED, arch), pointer(out), int32(2), block=64)


LONG_LOOP = """
extern "C" __global__ void kernel(int* out) {
  __shared__ int row[128];
  row[threadIdx.x] = threadIdx.x;
  __syncthreads();
  int sum = 0;
#pragma unroll 1
  for (int step = 0; step < 200; ++step) sum += row[(threadIdx.x + step) % 128];   // MARK: load
  LATE
  out[blockIdx.x * 128 + threadIdx.x] = sum;
}
"""


def test_a_long_phase_without_barriers_is_still_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log of accesses is compacted on the way; the race with its first reads is found all the same."""
    monkeypatch.setattr("g4kv_cli.device.emulated.checks.shared_races._COMPACT_AT_LANES", 1000)
    clean, values = run(LONG_LOOP.replace("LATE", ""), grid=2)
    assert not clean
    want = [sum((thread + step) % 128 for step in range(200)) for thread in range(128)]
    assert values[:256].tolist() == want * 2
    late = "if (blockIdx.x == 1 && threadIdx.x == 70) row[3] = 0;"
    source = LONG_LOOP.replace("LATE", late + "  // MARK: store")
    (fault,), _ = run(source, grid=2)
    assert fault.kind == "shared_race"
    assert "write-after-read" in fault.message
    assert fault.block == (1, 0, 0)
    assert fault.address == 12
    assert {line_of(source, "MARK: store"), line_of(source, "MARK: load")} >= {fault.source_line}


WIDTHS = """
extern "C" __global__ void kernel(int* out) {
  __shared__ __align__(16) int row[512];
  for (int i = threadIdx.x; i < 512; i += 64) row[i] = i;  // fine accesses in a phase of their own
  __syncthreads();
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int4 all = make_int4(lane, 1, 2, 3);
  FIRST
  BETWEEN
  SECOND
  __syncthreads();
  out[threadIdx.x] = row[threadIdx.x] + all.x + all.y + all.z + all.w;
}
"""
STORE16 = "if (warp == 0) *(int4*)(row + lane * 4) = all;"
LOAD16 = "if (warp == 1) all = *(int4*)(row + lane * 4 + SHIFT);"
LOAD4 = "if (warp == 1) all.x = ((volatile int*)row)[lane * 4 + SHIFT];"


@pytest.mark.parametrize("second", [LOAD16, LOAD4], ids=["16 bytes", "4 bytes"])
@pytest.mark.parametrize("between", ["", 'asm volatile("bar.sync 1, 32;" ::: "memory");'], ids=["plain", "clocks"])
def test_a_race_is_seen_at_any_width(second: str, between: str) -> None:
    """16 bytes against 16 in a phase without finer accesses, and against 4; next to each other they do not meet."""
    source = WIDTHS.replace("BETWEEN", between and f"if (warp == 1) {between}").replace("FIRST", STORE16)
    faults, _ = run(source.replace("SECOND", second.replace("SHIFT", "0")), block=64)
    assert [fault.kind for fault in faults] == ["shared_race"]
    assert not run(source.replace("SECOND", second.replace("SHIFT", "128")), block=64)[0]


def test_halves_of_16_bytes_are_no_race() -> None:
    """Two warps in one 16-byte location, 8 bytes each."""
    halves = "*(int2*)(row + lane * 4 + warp * 2) = make_int2(lane, warp);"
    source = WIDTHS.replace("BETWEEN", "").replace("FIRST", halves)
    assert not run(source.replace("SECOND", ""), block=64)[0]
    (fault,), _ = run(source.replace("SECOND", STORE16), block=64)
    assert fault.kind == "shared_race"
