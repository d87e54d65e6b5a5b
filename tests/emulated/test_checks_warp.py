"""Each check of warp-wide operations and asynchronous copies, on a kernel that breaks it and a twin that does not."""

from __future__ import annotations

import numpy as np
import pytest
from launch_helper import faults_of, launch_on, pointer, read_as, upload
from nvrtc_helper import DIALECTS, compile_kernel, compile_ptx, line_of

from g4kv_cli.device.emulated import Fault, Machine, Module
from g4kv_cli.device.emulated.ptx import flow


def run(source: str, arch: str = "90", block: int = 64) -> tuple[list[Fault], np.ndarray]:
    machine = Machine()
    out = machine.allocate(4096, "out")
    faults = faults_of(machine, compile_kernel(source, arch), pointer(out), block=block)
    return faults, read_as(machine, out, 1024, np.int32)


EXITED = """
extern "C" __global__ void kernel(int* out) {
  int lane = threadIdx.x % 32;
  if (threadIdx.x >= LIMIT) return;
  out[threadIdx.x] = __shfl_xor_sync(MASK, lane * 3, 1);   // MARK: shuffle
}
"""


@pytest.mark.parametrize("arch", DIALECTS)
def test_a_shuffle_whose_partner_has_exited(arch: str) -> None:
    faults, values = run(EXITED.replace("LIMIT", "64").replace("MASK,", "~0u,"), arch)
    assert not faults
    np.testing.assert_array_equal(values[:64], (np.arange(64) % 32 ^ 1) * 3)
    source = EXITED.replace("LIMIT", "59").replace("MASK,", "~0u,")
    (fault,), values = run(source, arch)
    assert (fault.kind, fault.is_fatal) == ("exited_lane_shuffle", False)
    assert fault.source_line == line_of(source, "MARK: shuffle")
    # Lanes 27 to 31 of warp 1 are gone: all may name them, but lane 26 reads one.
    assert (fault.block, fault.thread, fault.lanes) == ((0, 0, 0), (58, 0, 0), 1)
    assert values[58] == 26 * 3  # its partner is gone: the lane keeps its own value
    # With a mask of the 26 lanes 0 to 25 that stay, the shuffle is right again.
    source = EXITED.replace("LIMIT", "58").replace("MASK,", "threadIdx.x < 32 ? ~0u : 0x03ffffffu,")
    assert not run(source, arch)[0]


OUTSIDE = """
extern "C" __global__ void kernel(int* out) {
  out[threadIdx.x] = __shfl_sync(MASK, threadIdx.x, 0);    // MARK: shuffle
}
"""


def test_a_mask_without_the_executing_lane() -> None:
    assert not run(OUTSIDE.replace("MASK,", "0xffffffffu,"), block=32)[0]
    source = OUTSIDE.replace("MASK,", "0x00ffffffu,")
    (fault,), _ = run(source, block=32)
    assert (fault.kind, fault.thread, fault.lanes) == ("exited_lane_shuffle", (24, 0, 0), 8)
    assert fault.source_line == line_of(source, "MARK: shuffle")
    assert "not in its member mask 0x00ffffff" in fault.message


DIVERGENT = """
extern "C" __global__ void kernel(int* out) {
  int lane = threadIdx.x % 32, value = 0;
  if (lane < 8) value = __ballot_sync(MASK, lane & 1);     // MARK: vote
  out[threadIdx.x] = value;
}
"""


@pytest.mark.parametrize("arch", DIALECTS)
def test_a_vote_that_waits_for_lanes_elsewhere(arch: str) -> None:
    faults, values = run(DIVERGENT.replace("MASK,", "0xffu,"), arch, block=32)
    assert not faults
    assert values[:9].tolist() == [0xAA] * 8 + [0]
    source = DIVERGENT.replace("MASK,", "0xffffffffu,")
    (fault,), _ = run(source, arch, block=32)
    assert (fault.kind, fault.thread, fault.lanes) == ("exited_lane_shuffle", (0, 0, 0), 8)
    assert fault.source_line == line_of(source, "MARK: vote")
    assert "lane 8 is in the member mask" in fault.message


HALF_WARP_BLOCK = """
extern "C" __global__ void kernel(int* out) {
  out[threadIdx.x] = __reduce_add_sync(MASK, threadIdx.x); // MARK: redux
}
"""


def test_a_block_that_is_no_multiple_of_a_warp() -> None:
    faults, values = run(HALF_WARP_BLOCK.replace("MASK,", "threadIdx.x < 32 ? ~0u : 0xffffu,"), block=48)
    assert not faults
    # Sums of 0..31 and of 32..47.
    assert values[:48].tolist() == [496] * 32 + [632] * 16
    faults, values = run(HALF_WARP_BLOCK.replace("MASK,", "~0u,"), block=48)
    assert not faults  # who is not there is not waited for
    assert values[:48].tolist() == [496] * 32 + [632] * 16


PIPELINE = """
extern "C" __global__ void kernel(const int* in, int* out) {
  __shared__ __align__(16) int stage[2][256];
  int t = threadIdx.x;
  for (int i = t; i < 512; i += 64) stage[0][i] = -1;
  __syncthreads();
#define ISSUE(s) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\\n cp.async.commit_group;" :: \\
    "r"((unsigned)__cvta_generic_to_shared(&stage[s][t * 4])), "l"(in + s * 256 + t * 4) : "memory");  // MARK: copy
  ISSUE(0)
  ISSUE(1)
  WAIT_ONE                                              // the first group is complete
  BARRIER
  out[t] = stage[0][(t * 4 + 128) % 256];               // MARK: first
  WAIT_ALL
  __syncthreads();
  out[64 + t] = stage[1][(t * 4 + 128) % 256];          // MARK: second
}
"""


def run_pipeline(arch: str, one: str, barrier: str, everything: str) -> tuple[list[Fault], np.ndarray, str]:
    source = PIPELINE.replace("WAIT_ONE", one).replace("BARRIER", barrier).replace("WAIT_ALL", everything)
    machine = Machine()
    values = upload(machine, np.arange(512, dtype=np.int32), "in")
    out = machine.allocate(512, "out")
    faults = faults_of(machine, compile_kernel(source, arch), pointer(values), pointer(out), block=64)
    return faults, read_as(machine, out, 128, np.int32), source


ONE, ALL = 'asm volatile("cp.async.wait_group 1;" ::: "memory");', 'asm volatile("cp.async.wait_all;" ::: "memory");'


@pytest.mark.parametrize("arch", DIALECTS)
def test_a_pipeline_of_asynchronous_copies(arch: str) -> None:
    faults, values, _ = run_pipeline(arch, ONE, "__syncthreads();", ALL)
    assert not faults
    wanted = (np.arange(64) * 4 + 128) % 256
    np.testing.assert_array_equal(values, np.concatenate((wanted, 256 + wanted)))


@pytest.mark.parametrize("arch", DIALECTS)
def test_a_forgotten_wait_shows_old_data(arch: str) -> None:
    faults, values, _ = run_pipeline(arch, "", "__syncthreads();", ALL)
    assert (values[:64] == -1).all()  # the copy has not arrived
    np.testing.assert_array_equal(values[64:], 256 + (np.arange(64) * 4 + 128) % 256)
    # The late copy of the first stage is also a write after the reads, with no barrier between.
    assert [fault.kind for fault in faults] == ["unfinished_copy", "shared_race"]
    assert "while a copy to them is still in flight" in faults[0].message
    faults, values, _ = run_pipeline(arch, ONE, "__syncthreads();", "")
    assert [fault.kind for fault in faults] == ["unfinished_copy"]
    assert (values[64:] == -1).all()


@pytest.mark.parametrize("arch", DIALECTS)
def test_a_forgotten_barrier_after_the_wait_is_a_race(arch: str) -> None:
    faults, _, source = run_pipeline(arch, ONE, "", ALL)
    assert {fault.kind for fault in faults} == {"shared_race"}
    assert {fault.source_line for fault in faults} == {line_of(source, "MARK: first")}
    assert "cp.async" in faults[0].message


ATOMICS = """
extern "C" __global__ void kernel(unsigned* out) {
  unsigned t = threadIdx.x + blockIdx.x * blockDim.x;
  atomicAdd(out, t);
  atomicMax(out + 1, t * 7 % 64);
  atomicMin((int*)out + 2, (int)t - 5);
  atomicOr(out + 3, 1u << (t % 32));
  atomicXor(out + 4, t);
  atomicAnd(out + 5, ~(1u << (t % 3)));
  unsigned ticket = atomicInc(out + 6, 40);
  out[64 + t] = ticket;
  if (t < 5) atomicExch(out + 7, t + 100);
  atomicCAS(out + 8, t, t + 1);
  atomicAdd((float*)out + 9, 0.5f);
  atomicAdd((unsigned long long*)(out + 10), 1ull << 33);
}
"""


@pytest.mark.parametrize("arch", DIALECTS)
def test_atomics_take_turns(arch: str) -> None:
    machine = Machine()
    out = machine.allocate(2048, "out")
    machine.fill(out, 2048, 0)
    machine.write(out + 20, np.array([0xFF], np.uint32))
    assert not faults_of(machine, compile_kernel(ATOMICS, arch), pointer(out), grid=4, block=32)
    got = read_as(machine, out, 512, np.uint32)
    numbers = np.arange(128)
    assert got[0] == numbers.sum()
    assert got[1] == 63
    assert got[2] == 0xFFFFFFFB  # -5
    assert got[3] == 0xFFFFFFFF
    assert got[4] == np.bitwise_xor.reduce(numbers)
    assert got[5] == 0xF8
    assert got[6] == 128 % 41
    np.testing.assert_array_equal(np.sort(got[64:192]), np.sort(numbers % 41))
    assert 100 <= got[7] <= 104
    assert got[8] == 128  # each thread t finds t and makes it t + 1, in turn
    assert got[9:10].view(np.float32)[0] == 64.0
    assert got[10:12].view(np.uint64)[0] == 128 << 33


def test_a_plain_store_and_an_atomic_of_two_blocks_conflict() -> None:
    source = """
extern "C" __global__ void kernel(int* out) {
  if (blockIdx.x == 0) atomicAdd(out, 1);
  else STORE;                                          // MARK: store
}
"""
    for statement, expected in (("atomicAdd(out, 2)", 0), ("out[1] = 2", 0), ("out[0] = 2", 1)):
        text = source.replace("STORE", statement)
        machine = Machine()
        out = upload(machine, np.zeros(4, np.int32), "out")
        faults = faults_of(machine, compile_kernel(text), pointer(out), grid=2, block=1, chunk_threads=1)
        assert [fault.kind for fault in faults] == ["block_write_conflict"] * expected
        if faults:
            assert (faults[0].source_line, faults[0].block) == (line_of(text, "MARK: store"), (1, 0, 0))


MULTIPLY = """
__device__ __forceinline__ void multiply(float* d, unsigned a, unsigned b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %4, %4, %4}, {%5, %5}, "
               "{%0, %1, %2, %3};" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a), "r"(b));
}
extern "C" __global__ void kernel(float* out) {
  float d[4] = {}, e[4] = {};
  if (threadIdx.x < LANES) {
    multiply(d, threadIdx.x, 0x3f803f80u);
    float between = ((volatile float*)out)[AT];        // MARK: load
    multiply(e, threadIdx.x, 0x3f803f80u);
    for (int i = 0; i < 4; ++i) out[64 + threadIdx.x * 4 + i] = d[i] + e[i] + between;
  }
}
"""


def test_each_mma_of_half_a_warp_is_told_where_it_stands() -> None:
    """They are computed together behind the load; their faults stay in the order of the program."""
    whole = MULTIPLY.replace("LANES", "32")
    (fault,), _ = run(whole.replace("AT", "threadIdx.x"), block=32)
    assert fault.kind == "uninitialised_read"
    source = MULTIPLY.replace("LANES", "16").replace("AT", "threadIdx.x")
    faults, _ = run(source, block=32)
    assert [fault.kind for fault in faults] == ["exited_lane_shuffle", "uninitialised_read", "exited_lane_shuffle"]
    assert faults[1].source_line == line_of(source, "MARK: load")
    assert faults[0].ptx_line < faults[1].ptx_line < faults[2].ptx_line
    # A load that ends the launch: what stands behind it is never reached.
    faults, _ = run(MULTIPLY.replace("LANES", "16").replace("AT", "1 << 20"), block=32)
    assert sorted(fault.kind for fault in faults) == ["exited_lane_shuffle", "global_out_of_bounds"]


def test_joined_multiplies_count_as_so_many_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    many = (
        MULTIPLY[: MULTIPLY.index("extern")]
        + """
extern "C" __global__ void kernel(float* out) {
  float d[8][4] = {};
  for (int j = 0; j < 8; ++j) multiply(d[j], threadIdx.x, 0x3f803f80u + j);
  float sum = 0;
  for (int j = 0; j < 8; ++j) for (int i = 0; i < 4; ++i) sum += d[j][i];
  out[threadIdx.x] = sum;
}
"""
    )
    counts, values = [], []
    for batch in (flow.batch_multiplies, list):
        monkeypatch.setattr(flow, "batch_multiplies", batch)
        kernel = Module(compile_ptx(many, "90")).kernel("kernel")
        machine = Machine()
        out = machine.allocate(4096, "out")
        counts.append(launch_on(machine, kernel, pointer(out), block=32).thread_instructions)
        values.append(read_as(machine, out, 32, np.uint32))
    assert counts[0] == counts[1]
    np.testing.assert_array_equal(*values)


TWO_WAYS_BACK = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry kernel(.param .u64 kernel_0)
{
  .reg .pred %p<3>;
  .reg .b32 %r<6>;
  .reg .b64 %rd<3>;
  mov.u32 %r1, %tid.x;
  mov.u32 %r2, %r1;
  mov.u32 %r3, 0;
  mov.u32 %r4, 0;
$turn:
  shfl.sync.idx.b32 %r5, %r2, %r3, 31, -1;
  add.u32 %r4, %r4, %r5;
  add.u32 %r3, %r3, 1;
  setp.ge.u32 %p1, %r3, 4;
  @%p1 bra $done;
  setp.ne.u32 %p2, %r1, %r3;
  @%p2 bra $turn;
  add.u32 %r2, %r2, 100;
  bra $turn;
$done:
  ld.param.u64 %rd1, [kernel_0];
  mad.wide.u32 %rd2, %r1, 4, %rd1;
  st.global.u32 [%rd2], %r4;
  ret;
}
"""


def test_lanes_that_go_round_a_loop_by_two_ways_are_together_again() -> None:
    machine = Machine()
    out = machine.allocate(128, "out")
    assert not faults_of(machine, Module(TWO_WAYS_BACK).kernel("kernel"), pointer(out), block=32)
    # Lane 1, 2 and 3 add 100 before the others read theirs: only they take the way back by that.
    assert read_as(machine, out, 32, np.int32).tolist() == [0 + 101 + 102 + 103] * 32
