"""Warp-wide operations through PTX against recordings of an NVIDIA H200 (driver 580.159.04)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from launch_helper import launch_on, pointer, read_as, upload
from nvrtc_helper import DATA, DIALECTS, compile_kernel

from g4kv_cli.device.emulated import Machine

RECORD: dict[str, npt.NDArray[Any]] = dict(np.load(DATA / "layout.npz"))

SHUFFLE = """
extern "C" __global__ void kernel(const unsigned* v, const unsigned* b, const unsigned* c,
                                  unsigned* out, unsigned* ok) {
  int i = blockIdx.x * 128 + threadIdx.x, n = gridDim.x * 128;
  unsigned value, p;
#define RUN(k, mode) \\
  asm volatile("{.reg .pred p; shfl.sync." mode ".b32 %0|p, %2, %3, %4, 0xffffffff; selp.u32 %1, 1, 0, p;}" \\
      : "=r"(value), "=r"(p) : "r"(v[i]), "r"(b[i]), "r"(c[i])); out[k * n + i] = value; ok[k * n + i] = p;
  RUN(0, "up") RUN(1, "down") RUN(2, "bfly") RUN(3, "idx")
}
"""


@pytest.mark.parametrize("arch", DIALECTS)
def test_shuffles_equal_h200(arch: str) -> None:
    machine = Machine()
    inputs = [upload(machine, RECORD[f"shfl.{name}"], name) for name in "vbc"]
    want = RECORD["shfl.out"]
    out, ok = machine.allocate(want.nbytes, "out"), machine.allocate(want.nbytes, "ok")
    arguments = [pointer(address) for address in (*inputs, out, ok)]
    launch_on(machine, compile_kernel(SHUFFLE, arch), *arguments, grid=128, block=128)
    np.testing.assert_array_equal(read_as(machine, out, want.size, np.uint32).reshape(want.shape), want)
    flags = np.unpackbits(RECORD["shfl.pred"], axis=-1, bitorder="little")
    np.testing.assert_array_equal(read_as(machine, ok, want.size, np.uint32).reshape(want.shape), flags)


VOTE = """
extern "C" __global__ void kernel(const unsigned* v, const unsigned* mask, unsigned* out) {
  int warp = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32, n = gridDim.x * 128, i = warp * 32 + lane;
  unsigned x = v[i], m = mask[warp], r, q = x & 1;
  if (!((m >> lane) & 1)) return;
#define VOTE(k, mode) \\
  asm volatile("{.reg .pred p, q; setp.ne.u32 p, %1, 0; vote.sync." mode ".pred q, p, %2; selp.u32 %0, 1, 0, q;}" \\
      : "=r"(r) : "r"(q), "r"(m)); out[k * n + i] = r;
#define ONE(k, op, value) asm volatile(op " %0, %1, %2;" : "=r"(r) : "r"(value), "r"(m)); out[k * n + i] = r;
  VOTE(0, "all") VOTE(1, "any") VOTE(2, "uni")
  asm volatile("{.reg .pred p; setp.ne.u32 p, %1, 0; vote.sync.ballot.b32 %0, p, %2;}" : "=r"(r) : "r"(q), "r"(m));
  out[3 * n + i] = r;
  ONE(4, "match.any.sync.b32", x & 7)
  asm volatile("{.reg .pred p; match.all.sync.b32 %0|p, %2, %3; selp.u32 %1, 1, 0, p;}"
      : "=r"(r), "=r"(q) : "r"(x >> 31), "r"(m));
  out[5 * n + i] = r; out[6 * n + i] = q;
  ONE(7, "redux.sync.add.u32", x) ONE(8, "redux.sync.add.s32", x) ONE(9, "redux.sync.min.u32", x)
  ONE(10, "redux.sync.max.u32", x) ONE(11, "redux.sync.min.s32", x) ONE(12, "redux.sync.max.s32", x)
  ONE(13, "redux.sync.and.b32", x) ONE(14, "redux.sync.or.b32", x) ONE(15, "redux.sync.xor.b32", x)
#if __CUDA_ARCH__ >= 900
  asm volatile("{.reg .pred p; elect.sync %0|p, %2; selp.u32 %1, 1, 0, p;}" : "=r"(r), "=r"(q) : "r"(m));
  out[16 * n + i] = r; out[17 * n + i] = q;
#endif
  asm volatile("activemask.b32 %0;" : "=r"(r));
  out[18 * n + i] = r;
}
"""


@pytest.mark.parametrize("arch", DIALECTS)
def test_votes_matches_and_reductions_equal_h200(arch: str) -> None:
    machine = Machine()
    mask, want = RECORD["vote.mask"], RECORD["vote.out"][:19]
    values, masks = upload(machine, RECORD["vote.v"], "v"), upload(machine, mask, "mask")
    out = machine.allocate(want.nbytes, "out")
    arguments = [pointer(address) for address in (values, masks, out)]
    launch_on(machine, compile_kernel(VOTE, arch), *arguments, grid=len(mask) // 4, block=128)
    got = read_as(machine, out, want.size, np.uint32).reshape(want.shape)
    member = ((mask[:, None] >> np.arange(32, dtype=np.uint32)) & 1).astype(np.bool_)
    for number in range(19):
        if arch == "80" and number in (16, 17):
            continue  # elect.sync exists from compute_90 on
        np.testing.assert_array_equal(got[number][member], want[number][member], err_msg=f"operation {number}")


def matrix_source(direction: str) -> str:
    """A kernel of one warp for each recorded address set: x1, x2, x4, then the same transposed."""
    registers = {1: "{%0}", 2: "{%0, %1}", 4: "{%0, %1, %2, %3}"}
    lines = []
    for number, (trans, count) in enumerate((t, c) for t in ("", ".trans") for c in (1, 2, 4)):
        names = ", ".join(f"{'=r' if direction == 'ld' else 'r'}".join(('"', f'"(r[{k}])')) for k in range(count))
        opcode = f"{direction}matrix.sync.aligned.m8n8.x{count}{trans}.shared.b16"
        if direction == "ld":
            text = f'asm volatile("{opcode} {registers[count]}, [%{count}];" : {names} : "r"(address));'
            lines.append(f"case {number}: {text} break;")
        else:
            text = f'asm volatile("{opcode} [%{count}], {registers[count]};" :: {names}, "r"(address) : "memory");'
            lines.append(f"case {number}: {text} break;")
    body = "\n      ".join(lines)
    return f"""
extern "C" __global__ void kernel(const unsigned* addresses, const unsigned* values, unsigned* out) {{
  __shared__ __align__(128) unsigned short memory[2048];
  int set = blockIdx.x, form = blockIdx.y, lane = threadIdx.x;
  for (int i = lane; i < 2048; i += 32) memory[i] = {"i" if direction == "ld" else "0xffff"};
  __syncthreads();
  unsigned r[4] = {{0xdeadbeef, 0xdeadbeef, 0xdeadbeef, 0xdeadbeef}};
  {"for (int q = 0; q < 4; ++q) r[q] = values[(set * 4 + q) * 32 + lane];" if direction == "st" else ""}
  unsigned address = (unsigned)__cvta_generic_to_shared(memory) + addresses[set * 32 + lane];
  switch (form) {{
      {body}
  }}
  __syncthreads();
  {
        '''for (int q = 0; q < 4; ++q) out[((set * 6 + form) * 4 + q) * 32 + lane] = r[q];'''
        if direction == "ld"
        else '''for (int i = lane; i < 1024; i += 32)
    out[(set * 6 + form) * 1024 + i] = reinterpret_cast<unsigned*>(memory)[i];'''
    }
}}
"""


@pytest.mark.parametrize("arch", DIALECTS)
def test_ldmatrix_equals_h200(arch: str) -> None:
    machine = Machine()
    want = RECORD["ldm.out"]
    addresses = upload(machine, RECORD["ldm.addr"], "addresses")
    out = machine.allocate(want.nbytes, "out")
    kernel = compile_kernel(matrix_source("ld"), arch)
    machine.launch(kernel, (6, 6, 1), (32, 1, 1), [pointer(addresses), pointer(addresses), pointer(out)])
    np.testing.assert_array_equal(read_as(machine, out, want.size, np.uint32).reshape(want.shape), want)


@pytest.mark.parametrize("arch", ["90", "120"])
def test_stmatrix_equals_h200(arch: str) -> None:
    machine = Machine()
    want = RECORD["stm.smem"]
    addresses = upload(machine, RECORD["ldm.addr"], "addresses")
    values = upload(machine, RECORD["stm.regs"], "values")
    out = machine.allocate(want.nbytes, "out")
    kernel = compile_kernel(matrix_source("st"), arch)
    machine.launch(kernel, (6, 6, 1), (32, 1, 1), [pointer(addresses), pointer(values), pointer(out)])
    np.testing.assert_array_equal(read_as(machine, out, want.size, np.uint32).reshape(want.shape), want)


COPY = """
extern "C" __global__ void kernel(const unsigned char* source, unsigned* out) {
  __shared__ __align__(128) unsigned memory[128];
  int lane = threadIdx.x;
  for (int i = lane; i < 128; i += 32) memory[i] = 0xeeeeeeee;
  __syncthreads();
  unsigned address = (unsigned)__cvta_generic_to_shared(memory) + lane * 16;
  const unsigned char* from = source + lane * 16;
#define COPY(kind, n) asm volatile("cp.async." kind ".shared.global [%0], [%1], " #n ", %2;" \\
    :: "r"(address), "l"(from), "r"(lane % (n + 1)) : "memory");
  switch (blockIdx.x) {
    case 0: COPY("ca", 4) break;
    case 1: COPY("ca", 8) break;
    case 2: COPY("ca", 16) break;
    case 3: COPY("cg", 16) break;
  }
  asm volatile("cp.async.commit_group;\\n cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  for (int i = lane; i < 128; i += 32) out[blockIdx.x * 128 + i] = memory[i];
}
"""


@pytest.mark.parametrize("arch", DIALECTS)
def test_cp_async_equals_h200(arch: str) -> None:
    machine = Machine()
    want = RECORD["cpa.out"]
    source, out = upload(machine, RECORD["cpa.src"], "source"), machine.allocate(want.nbytes, "out")
    launch_on(machine, compile_kernel(COPY, arch), pointer(source), pointer(out), grid=4)
    np.testing.assert_array_equal(read_as(machine, out, want.size, np.uint32).reshape(want.shape), want)


TURN = """
extern "C" __global__ void kernel(unsigned* out) {
  int row = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2, first = threadIdx.x / 32 * 64;
  unsigned word = (first + row * 8 + column) | (first + row * 8 + column + 1) << 16, turned;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(word));
  out[threadIdx.x] = turned;
}
"""


@pytest.mark.parametrize("arch", DIALECTS)
def test_movmatrix_changes_rows_and_columns_round(arch: str) -> None:
    """PTX ISA, movmatrix: lane 4g + t holds row g, columns 2t and 2t + 1."""
    machine = Machine()
    out = machine.allocate(2 * 128, "out")
    launch_on(machine, compile_kernel(TURN, arch), pointer(out), block=64)
    got = read_as(machine, out, 128, np.uint16).reshape(2, 8, 8)
    matrices = np.arange(128).reshape(2, 8, 8)
    np.testing.assert_array_equal(got, matrices.transpose(0, 2, 1))


PAIRS = """
extern "C" __global__ void kernel(unsigned* out) {
  __shared__ unsigned words[4][32];
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, barrier = warp / 2 + 1;
  if (warp % 2 == 1) {
    words[warp][lane] = warp * 100 + lane;
    asm volatile("bar.arrive %0, 64;" :: "r"(barrier) : "memory");
  } else {
    asm volatile("bar.sync %0, 64;" :: "r"(barrier) : "memory");
    out[warp / 2 * 32 + lane] = words[warp + 1][lane];
  }
}
"""


@pytest.mark.parametrize("arch", DIALECTS)
def test_warps_arrive_at_barriers_of_different_numbers_in_one_instruction(arch: str) -> None:
    machine = Machine()
    out = machine.allocate(4 * 64, "out")
    launch_on(machine, compile_kernel(PAIRS, arch), pointer(out), block=128)
    got = read_as(machine, out, 64, np.uint32).reshape(2, 32)
    np.testing.assert_array_equal(got, np.array([[100], [300]]) + np.arange(32))
