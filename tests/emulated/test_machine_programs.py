"""Small programs that use one feature of PTX each, against results worked out by hand or by an independent formula."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from launch_helper import faults_of, float32, int32, launch_on, pointer, read_as, upload
from nvrtc_helper import DIALECTS, compile_kernel, compile_module, line_of

from g4kv_cli.device.emulated import Kernel, Machine, Module


def run(kernel: Kernel, count: int, *arguments: bytes, grid: int = 1, block: int = 32, dtype: Any = np.int32) -> Any:
    """The first ``count`` elements of the output, which is the kernel's first parameter and starts as zero."""
    machine = Machine()
    out = upload(machine, np.zeros(1024, np.int64), "out")
    launch_on(machine, kernel, pointer(out), *arguments, grid=grid, block=block)
    return read_as(machine, out, count, dtype)


GUARDED = """
extern "C" __global__ void kernel(int* out, const int* in) {
  __shared__ int row[32];
  int lane = threadIdx.x, value = -1, kept = 9;
  asm volatile("{.reg .pred p, q; setp.lt.s32 p, %2, 20; setp.lt.s32 q, %2, 0;\\n"
    "@p ld.global.u32 %0, [%3]; @!p add.s32 %1, %1, %2;\\n"
    "@q st.global.u32 [%4], %2;\\n"
    "@!q st.shared.u32 [%5], %0; @q trap; @q exit; @q bar.sync 0;}"
    : "+r"(value), "+r"(kept) : "r"(lane), "l"(in + lane), "l"(out + 1000000000),
      "r"((unsigned)__cvta_generic_to_shared(row + lane)) : "memory");
  out[lane] = value; out[32 + lane] = kept; out[64 + lane] = row[lane];
}
"""


@pytest.mark.parametrize("arch", DIALECTS)
def test_guarded_instructions_act_on_their_lanes_only(arch: str) -> None:
    machine = Machine()
    # Only the 20 elements that guarded lanes may read exist, and the guarded store's address does not.
    source = upload(machine, np.arange(100, 120, dtype=np.int32), "in")
    out = machine.allocate(384, "out")
    launch_on(machine, compile_kernel(GUARDED, arch), pointer(out), pointer(source), must_write=[(out, 384)])
    lanes = np.arange(32)
    loaded = np.where(lanes < 20, 100 + lanes, -1)
    want = np.concatenate((loaded, np.where(lanes < 20, 9, 9 + lanes), loaded))
    np.testing.assert_array_equal(read_as(machine, out, 96, np.int32), want)


def test_a_guarded_access_that_faults_names_its_lane() -> None:
    machine = Machine()
    source = upload(machine, np.arange(19, dtype=np.int32), "in")
    (fault,) = faults_of(machine, compile_kernel(GUARDED), pointer(machine.allocate(384, "out")), pointer(source))
    assert (fault.kind, fault.thread, fault.lanes) == ("global_out_of_bounds", (19, 0, 0), 1)


GUARDED_TRAP = """
extern "C" __global__ void kernel(int* out, int limit) {
  asm volatile("{.reg .pred p; setp.ge.s32 p, %0, %1; @p trap;}" :: "r"(threadIdx.x), "r"(limit));  // MARK: trap
  out[threadIdx.x] = 1;
}
"""


def test_a_guarded_trap() -> None:
    kernel = compile_kernel(GUARDED_TRAP)
    machine = Machine()
    out = machine.allocate(128, "out")
    assert not faults_of(machine, kernel, pointer(out), int32(32))
    machine = Machine()
    out = machine.allocate(128, "out")
    (fault,) = faults_of(machine, kernel, pointer(out), int32(30))
    assert (fault.kind, fault.thread, fault.lanes) == ("trap", (30, 0, 0), 2)
    assert fault.source_line == line_of(GUARDED_TRAP, "MARK: trap")
    assert not machine.initialised(out, 128).any()


SCOPES = """
extern "C" __global__ void kernel(int* out) {
  int a = threadIdx.x, r;
  asm volatile("{.reg .u32 t, u; mov.u32 t, %1; {.reg .u32 t; mov.u32 t, 100; add.u32 %0, t, %1;} add.u32 %0, %0, t;}"
               : "=&r"(r) : "r"(a));
  out[threadIdx.x] = r;
  asm volatile("{.reg .pred p; .reg .u32 t; mov.u32 t, %1; mov.u32 %0, 0;\\n"
               "again: add.u32 %0, %0, t; setp.gt.u32 p, t, 0; @!p bra done; sub.u32 t, t, 1; bra again;\\n done:}"
               : "=&r"(r) : "r"(a));
  out[32 + threadIdx.x] = r;
}
"""


@pytest.mark.parametrize("arch", DIALECTS)
def test_scopes_hide_registers_and_labels(arch: str) -> None:
    lanes = np.arange(32)
    got = run(compile_kernel(SCOPES, arch), 64)
    np.testing.assert_array_equal(got[:32], 100 + 2 * lanes)
    np.testing.assert_array_equal(got[32:], lanes * (lanes + 1) // 2)  # lanes leave the loop one by one


VARIABLES = """
__constant__ int filled[4] = {11, -22, 33, 44};
__constant__ float empty[2];
__device__ unsigned long long big[3] = {5, 0xfedcba9876543210ull, 7};
__device__ int counter;
struct Point { char tag; double x; short y[3]; };
struct Arguments { const int* at; float factor[5]; Point point; };
extern "C" __global__ void kernel(long long* out, const __grid_constant__ Arguments p, int last) {
  int t = threadIdx.x;
  out[t] = filled[t % 4] + (long long)empty[t % 2];
  out[32 + t] = big[t % 3];
  out[64 + t] = (long long)(p.factor[t % 5] * 4);
  out[96 + t] = p.tail();
  out[128 + t] = atomicAdd(&counter, 1);
}
""".replace("p.tail()", "p.point.tag + (long long)p.point.x + p.point.y[t % 3] + p.at[0] + last")


@pytest.mark.parametrize("arch", DIALECTS)
def test_variables_and_struct_parameters(arch: str) -> None:
    kernel = compile_kernel(VARIABLES, arch)
    # pointer 8, 5 floats to 28, Point at 32: tag, pad, double at 40, 3 shorts at 48; size 56.
    assert [(p.offset, p.nbytes) for p in kernel.parameters] == [(0, 8), (8, 56), (64, 4)]
    machine = Machine()
    at = upload(machine, np.array([1000], np.int32), "at")
    out = machine.allocate(160 * 8, "out")
    blob = struct.pack("<Q5f4xb7xd3h2x", at, 0.25, 0.5, 0.75, 1.0, -1.25, -3, 40.0, 100, -200, 300)
    for launches in range(2):
        launch_on(machine, kernel, pointer(out), blob, int32(-7), must_write=[(out, 1280)])
        got = read_as(machine, out, 160, np.int64).reshape(5, 32)
        lanes = np.arange(32)
        np.testing.assert_array_equal(got[0], np.array([11, -22, 33, 44])[lanes % 4])
        big = np.array([5, 0xFEDCBA9876543210, 7], np.uint64).view(np.int64)
        np.testing.assert_array_equal(got[1], big[lanes % 3])
        np.testing.assert_array_equal(got[2], np.array([1, 2, 3, 4, -5])[lanes % 5])
        np.testing.assert_array_equal(got[3], np.array([100, -200, 300])[lanes % 3] - 3 + 40 + 1000 - 7)
        np.testing.assert_array_equal(np.sort(got[4]), launches * 32 + lanes)


GENERIC = """
extern "C" __global__ void kernel(int* out, int* in, int which) {
  __shared__ int row[32];
  int own[4] = {1, 2, 3, 4};
  int lane = threadIdx.x;
  row[lane] = lane + 50;
  own[lane % 4] += in[32 + lane];
  __syncthreads();
  volatile int* p = lane % 3 == which ? row + lane : lane % 3 == 1 ? own + lane % 4 : in + lane;
  out[lane] = *p;
  *p = 7;
  __syncthreads();
  out[32 + lane] = row[lane] + in[lane] * 1000 + own[lane % 4] * 1000000;
}
"""


@pytest.mark.parametrize("arch", DIALECTS)
def test_generic_addresses_of_three_spaces_in_one_instruction(arch: str) -> None:
    machine = Machine()
    source = upload(machine, np.concatenate((np.arange(32) + 200, np.zeros(32))).astype(np.int32), "in")
    out = machine.allocate(256, "out")
    launch_on(machine, compile_kernel(GENERIC, arch), pointer(out), pointer(source), int32(0))
    got = read_as(machine, out, 64, np.int32)
    lane = np.arange(32)
    shared, local, outer = lane + 50, lane % 4 + 1, lane + 200
    np.testing.assert_array_equal(got[:32], np.choose(lane % 3, [shared, local, outer]))
    left = [np.where(lane % 3 == number, 7, value) for number, value in enumerate((shared, local, outer))]
    np.testing.assert_array_equal(got[32:], left[0] + left[2] * 1000 + left[1] * 1000000)


COUNTING_BARRIERS = """
extern "C" __global__ void kernel(int* out) {
  int t = threadIdx.x + blockIdx.x;
  for (int round = 0; round < 3; ++round) {
    out[(round * 2 + blockIdx.x) * 96 + threadIdx.x] =
      __syncthreads_count(t % (3 + round) == 0) * 100 + __syncthreads_and(t < 95 + round) * 10 +
      __syncthreads_or(t == 96);
  }
}
"""


@pytest.mark.parametrize("arch", DIALECTS)
def test_barriers_that_count_and_combine(arch: str) -> None:
    got = run(compile_kernel(COUNTING_BARRIERS, arch), 576, grid=2, block=96).reshape(3, 2, 96)
    for round_number in range(3):
        for block in range(2):
            threads = np.arange(96) + block
            count = int((threads % (3 + round_number) == 0).sum())
            every, some = bool((threads < 95 + round_number).all()), bool((threads == 96).any())
            assert (got[round_number, block] == count * 100 + every * 10 + some).all()


PRODUCER = """
#define BARRIER(op, id) asm volatile("bar." op " %0, 64;" :: "r"(id) : "memory");
extern "C" __global__ void kernel(int* out) {
  __shared__ int row[32];
  int lane = threadIdx.x % 32;
  for (int step = 0; step < 4; ++step) {
    if (threadIdx.x < 32) {                             // the producer
      if (step > 0) BARRIER("sync", 2)
      row[lane] = lane * 10 + step;                     // MARK: store
      BARRIER("arrive", 1)
      EARLY
    } else {                                            // the consumer
      BARRIER("sync", 1)
      out[step * 32 + lane] = row[31 - lane];           // MARK: load
      if (step < 3) BARRIER("arrive", 2)
    }
  }
}
"""


@pytest.mark.parametrize("arch", DIALECTS)
def test_a_producer_that_only_arrives(arch: str) -> None:
    machine = Machine()
    out = machine.allocate(512, "out")
    assert not faults_of(machine, compile_kernel(PRODUCER.replace("EARLY", ""), arch), pointer(out), block=64)
    want = (31 - np.arange(32)) * 10 + np.arange(4)[:, None]
    np.testing.assert_array_equal(read_as(machine, out, 128, np.int32).reshape(4, 32), want)
    source = PRODUCER.replace("EARLY", "row[lane] = -1;  // MARK: early")
    machine = Machine()
    faults = faults_of(machine, compile_kernel(source, arch), pointer(machine.allocate(512, "out")), block=64)
    assert {fault.kind for fault in faults} == {"shared_race"}
    lines = {line_of(source, "MARK: early"), line_of(source, "MARK: load")}
    assert {fault.source_line for fault in faults} <= lines


WIDE = """
extern "C" __global__ void kernel(unsigned long long* out, unsigned long long a, unsigned long long b) {
  unsigned __int128 product = (unsigned __int128)a * b + b;
  out[0] = (unsigned long long)(product >> 64); out[1] = (unsigned long long)product;
  unsigned low, high;
  asm("add.cc.u32 %0, %2, %3; addc.u32 %1, %4, %5;" : "=r"(low), "=r"(high)
      : "r"((unsigned)a), "r"((unsigned)b), "r"((unsigned)(a >> 32)), "r"((unsigned)(b >> 32)));
  out[2] = (unsigned long long)high << 32 | low;
  asm("sub.cc.u32 %0, %2, %3; subc.u32 %1, %4, %5;" : "=r"(low), "=r"(high)
      : "r"((unsigned)a), "r"((unsigned)b), "r"((unsigned)(a >> 32)), "r"((unsigned)(b >> 32)));
  out[3] = (unsigned long long)high << 32 | low;
  unsigned __int128 divisor = (unsigned __int128)a << 3 | 5;
  out[4] = (unsigned long long)(product / divisor); out[5] = (unsigned long long)(product % divisor);
  asm("{.reg .u32 x; sub.cc.u32 x, %2, %3; addc.u32 %0, 0, 0; sub.cc.u32 x, %3, %2; addc.u32 %1, 0, 0;}"
      : "=r"(low), "=r"(high) : "r"((unsigned)a), "r"((unsigned)b));
  out[6] = (unsigned long long)high << 32 | low;  // a carry is what is not borrowed
}
"""


@pytest.mark.parametrize("arch", DIALECTS)
def test_carries_and_128_bit_products(arch: str) -> None:
    a, b = 0xFFFFFFFF_00000001, 0x12345678_FFFFFFFF
    module = compile_module("#pragma nv_diag_suppress 1\n" + WIDE, arch, "test.cu", "--device-int128")
    got = run(module.kernel("kernel"), 7, pointer(a), pointer(b), block=1, dtype=np.uint64)
    product, mask = a * b + b, (1 << 64) - 1
    divisor = a << 3 | 5
    parts = [product // divisor & mask, product % divisor & mask, 1 << 32]
    assert got.tolist() == [product >> 64, product & mask, (a + b) & mask, (a - b) & mask, *parts]


SHAPES = """
extern "C" __global__ void kernel(int* out) {
  int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  unsigned lane, warp, warps;
  asm("mov.u32 %0, %%laneid;" : "=r"(lane)); asm volatile("mov.u32 %0, %%warpid;" : "=r"(warp));
  asm volatile("mov.u32 %0, %%nwarpid;" : "=r"(warps));
  out[block * 60 + thread] = threadIdx.x + threadIdx.y * 10 + threadIdx.z * 100 + blockIdx.x * 1000 + blockIdx.y * 10000
    + blockIdx.z * 100000 + lane * 1000000 + warp * 100000000 + (warps == 2) * 1000000000;
}
"""


@pytest.mark.parametrize("chunk_threads", [1, 200, 16384])
def test_grids_and_blocks_of_three_dimensions(chunk_threads: int) -> None:
    machine = Machine()
    out = machine.allocate(24 * 60 * 4, "out")
    options = {"must_write": [(out, 24 * 60 * 4)], "chunk_threads": chunk_threads}
    report = machine.launch(compile_kernel(SHAPES), (2, 3, 4), (5, 4, 3), [pointer(out)], **options)
    assert (report.blocks, report.threads_per_block) == (24, 60)
    block, thread = np.meshgrid(np.arange(24), np.arange(60), indexing="ij")
    want = thread % 5 + thread // 5 % 4 * 10 + thread // 20 * 100 + block % 2 * 1000 + block // 2 % 3 * 10000
    want = want + block // 6 * 100000 + thread % 32 * 1000000 + thread // 32 * 100000000 + 1000000000
    np.testing.assert_array_equal(read_as(machine, out, 1440, np.int32).reshape(24, 60), want)


DIVERGENCE = """
extern "C" __global__ void kernel(int* out, const int* n, float scale) {
  int i = blockIdx.x * blockDim.x + threadIdx.x, steps = n[i], sum = 0;
  float value = scale;
  for (int k = 0; k < steps; ++k) {
    if (k % 3 == i % 3) { sum += k; continue; }
    if (sum > 60) break;
    switch ((i + k) % 4) {
      case 0: sum += 1; break;
      case 1: sum ^= i; break;
      case 2: if (k & 1) value = value * 2.0f + 1.0f;  // and on to the next
      default: sum -= k / 2;
    }
  }
  out[i] = sum * 3 + (int)value;
}
"""


@pytest.mark.parametrize("arch", DIALECTS)
@pytest.mark.parametrize("chunk_threads", [32, 16384])
def test_divergent_loops_switches_and_breaks(arch: str, chunk_threads: int) -> None:
    steps = (np.arange(256) * 37 % 41).astype(np.int32)
    machine = Machine()
    source, out = upload(machine, steps, "n"), machine.allocate(1024, "out")
    arguments = [pointer(out), pointer(source), float32(1.5)]
    launch_on(machine, compile_kernel(DIVERGENCE, arch), *arguments, grid=4, block=64, chunk_threads=chunk_threads)
    want = []
    for i in range(256):
        total, value = 0, np.float32(1.5)
        for k in range(steps[i]):
            if k % 3 == i % 3:
                total += k
                continue
            if total > 60:
                break
            case = (i + k) % 4
            if case == 0:
                total += 1
            elif case == 1:
                total ^= i
            else:
                if case == 2 and k & 1:
                    value = value * np.float32(2) + np.float32(1)
                total -= k // 2
        want.append(total * 3 + int(value))
    np.testing.assert_array_equal(read_as(machine, out, 256, np.int32), want)


NARROW = """
extern "C" __global__ void kernel(int* out, const signed char* a, const unsigned char* b, const short* c) {
  int t = threadIdx.x;
  out[t] = a[t] * 100 + b[t]; out[32 + t] = c[t];
  signed char* bytes = reinterpret_cast<signed char*>(out + 64);
  bytes[t] = (signed char)(t * 9); reinterpret_cast<short*>(out + 96)[t] = (short)(t * -2000);
  char4 q = reinterpret_cast<const char4*>(a)[t % 8];
  out[128 + t] = q.x + q.y * 2 + q.z * 3 + q.w * 4;
}
"""


@pytest.mark.parametrize("arch", DIALECTS)
def test_narrow_loads_and_stores(arch: str) -> None:
    machine = Machine()
    bytes_in = (np.arange(32) * 11 - 128).astype(np.int8)
    unsigned_in = (np.arange(32) * 8).astype(np.uint8)
    shorts_in = (np.arange(32) * -1111).astype(np.int16)
    sources = [
        upload(machine, values, label) for label, values in zip("abc", (bytes_in, unsigned_in, shorts_in), strict=True)
    ]
    out = machine.allocate(160 * 4, "out")
    launch_on(machine, compile_kernel(NARROW, arch), pointer(out), *(pointer(address) for address in sources))
    got = read_as(machine, out, 160, np.int32)
    np.testing.assert_array_equal(got[:32], bytes_in.astype(int) * 100 + unsigned_in)
    np.testing.assert_array_equal(got[32:64], shorts_in)
    np.testing.assert_array_equal(got[64:72].view(np.int8), (np.arange(32) * 9).astype(np.int8))
    np.testing.assert_array_equal(got[96:112].view(np.int16), (np.arange(32) * -2000).astype(np.int16))
    quads = bytes_in.reshape(8, 4).astype(int) @ np.array([1, 2, 3, 4])
    np.testing.assert_array_equal(got[128:], quads[np.arange(32) % 8])


HAND_WRITTEN = """
.version 8.8
.target sm_100
.address_size 64
.visible .entry kernel(.param .u64 out, .param .u64 in)
{
  .reg .pred %p<4>; .reg .b16 %rs<9>; .reg .b32 %r<20>; .reg .b64 %rd<9>;
  ld.param.u64 %rd1, [out]; ld.param.u64 %rd2, [in];
  mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 32; add.s64 %rd4, %rd2, %rd3; add.s64 %rd5, %rd1, %rd3;
  ld.global.v8.b32 {%r2, %r3, %r4, %r5, %r6, %r7, _, %r9}, [%rd4];
  mov.b64 %rd6, {%r2, %r3}; mov.b64 {%rs1, %rs2, %rs3, %rs4}, %rd6; mov.b32 %r10, {%rs4, %rs1};
  mov.b64 {_, %r11}, %rd6;
  setp.lt.s32 %p1|%p2, %r4, 20; selp.b32 %r12, 1, 0, %p1; selp.b32 %r13, 1, 0, %p2;
  {
    .reg .b32 %r<3>;
    mov.u32 %r1, 5;
    add.s32 %r5, %r5, %r1;
  }
  st.global.L1::no_allocate.L2::cache_hint.v8.b32 [%rd5], {%r2, %r10, %r11, %r12, %r13, %r5, 77, %r9}, %rd1;
  ret;
}
"""


def test_forms_that_the_compiler_seldom_emits() -> None:
    machine = Machine()
    values = (np.arange(256) * 0x01020305 % 2**32).astype(np.uint32).reshape(32, 8)
    values[:, 2] = np.arange(32)
    source, out = upload(machine, values, "in"), machine.allocate(1024, "out")
    launch_on(machine, Module(HAND_WRITTEN).kernel("kernel"), pointer(out), pointer(source), must_write=[(out, 1024)])
    got = read_as(machine, out, 256, np.uint32).reshape(32, 8)
    low, high = values[:, 0].astype(np.int64), values[:, 1].astype(np.int64)
    want = np.stack(
        (
            values[:, 0],
            high >> 16 | (low & 0xFFFF) << 16,
            high,
            values[:, 2] < 20,
            values[:, 2] >= 20,
            values[:, 3] + np.uint32(5),
            np.full(32, 77),
            values[:, 7],
        ),
        1,
    )
    np.testing.assert_array_equal(got, want)
    (fault,) = faults_of(machine, Module(HAND_WRITTEN).kernel("kernel"), pointer(out), pointer(source + 16))
    assert (fault.kind, fault.lanes) == ("global_out_of_bounds", 1)
    assert fault.thread == (31, 0, 0)


COPIED = """
.version 8.8
.target sm_100
.address_size 64
.visible .entry kernel(.param .u64 out, .param .u64 in)
{
  .reg .pred %p<2>; .reg .b32 %r<4>; .reg .b64 %rd<20>;
  ld.param.u64 %rd1, [out]; ld.param.u64 %rd2, [in];
  mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 32; add.s64 %rd4, %rd2, %rd3; add.s64 %rd5, %rd1, %rd3;
  ld.global.v4.b64 {%rd6, %rd7, %rd8, %rd9}, [%rd4]; ld.global.v4.b64 {%rd10, %rd11, _, _}, [%rd2];
  and.b32 %r2, %r1, 1; setp.eq.u32 %p1, %r2, 0; add.s64 %rd6, %rd6, %rd11;
  @!%p1 st.global.v8.b32 [%rd5], {%r1, %r1, %r2, %r2, 5, 6, 7, 8};
  @%p1 st.global.v4.b64 [%rd5], {%rd9, %rd8, %rd7, %rd6};
  ret;
}
"""


def test_32_bytes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("G4KV_EMULATOR", "both")
    machine, values = Machine(), np.random.default_rng(2).integers(0, 1 << 62, (40, 4), np.uint64)
    source, out = upload(machine, values, "in"), machine.allocate(values.nbytes, "out")
    kernel = Module(COPIED).kernel("kernel")
    launch_on(machine, kernel, pointer(out), pointer(source), block=40, must_write=[(out, values.nbytes)])
    assert machine.counts.compared == 1
    turned = values[:, ::-1].copy()
    turned[:, 3] += values[0, 1]
    thread = np.arange(40, dtype=np.uint64)
    plain = np.stack([thread * ((1 << 32) + 1), thread % 2 * ((1 << 32) + 1), thread * 0 + (6 << 32 | 5)], 1)
    plain = np.concatenate([plain, np.full((40, 1), 8 << 32 | 7, np.uint64)], 1)
    want = np.where((thread % 2 == 0)[:, None], turned, plain)
    np.testing.assert_array_equal(read_as(machine, out, 160, np.uint64).reshape(40, 4), want)


def test_a_32_byte_access_must_be_aligned_to_32_bytes() -> None:
    machine = Machine()
    source, out = upload(machine, np.zeros(512, np.uint32), "in"), machine.allocate(1024, "out")
    (fault,) = faults_of(machine, Module(HAND_WRITTEN).kernel("kernel"), pointer(out), pointer(source + 16))
    assert (fault.kind, fault.lanes, fault.thread) == ("misaligned", 32, (0, 0, 0))


TICKETS = """
extern "C" __global__ void kernel(int* out) {
  if (threadIdx.x == 0) out[1 + blockIdx.x] = atomicAdd(out, 1);
}
"""


@pytest.mark.parametrize("chunk_threads", [32, 128, 16384])
def test_blocks_run_in_the_order_asked_for(chunk_threads: int) -> None:
    kernel = compile_kernel(TICKETS)
    for reverse in (False, True):
        machine = Machine()
        out = upload(machine, np.zeros(11, np.int32), "out")
        options: dict[str, Any] = {"reverse_blocks": reverse, "chunk_threads": chunk_threads}
        launch_on(machine, kernel, pointer(out), grid=10, **options)
        tickets = read_as(machine, out, 11, np.int32)[1:]
        np.testing.assert_array_equal(tickets, np.arange(10)[::-1] if reverse else np.arange(10))
