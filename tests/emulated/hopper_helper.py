"""CUDA snippets and launches shared by the tests of Hopper's asynchronous instructions."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from launch_helper import faults_of, pointer, upload
from nvrtc_helper import compile_kernel, line_of

from g4kv_cli.device.emulated import Fault, Kernel, Machine, TensorMap

ARCH = "90a"

PRELUDE = """
typedef unsigned u32; typedef unsigned short u16; typedef unsigned long long u64;
struct __align__(64) TensorMap { char bytes[128]; };
__device__ __forceinline__ u32 at(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void init(u64* b, int n) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(at(b)), "r"(n) : "memory"); }
__device__ __forceinline__ void invalidate(u64* b) {
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" :: "r"(at(b)) : "memory"); }
__device__ __forceinline__ void init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void arrive(u64* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(at(b)) : "memory"); }
__device__ __forceinline__ void expect(u64* b, int n) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(at(b)), "r"(n) : "memory"); }
__device__ __forceinline__ void wait(u64* b, int parity) {
  asm volatile("{.reg .pred p; W: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra W;}"
      :: "r"(at(b)), "r"(parity) : "memory"); }
__device__ __forceinline__ int peek(u64* b, int parity) {
  int done; asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
      : "=r"(done) : "r"(at(b)), "r"(parity) : "memory"); return done; }
__device__ __forceinline__ void load2(void* dst, const TensorMap* map, int x, int y, u64* b) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
      :: "r"(at(dst)), "l"(map), "r"(x), "r"(y), "r"(at(b)) : "memory"); }
__device__ __forceinline__ void store2(const TensorMap* map, int x, int y, const void* src) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
      :: "l"(map), "r"(x), "r"(y), "r"(at(src)) : "memory"); }
__device__ __forceinline__ void commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ __forceinline__ void wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void wait_store() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
__device__ __forceinline__ u64 descriptor(u32 address, u32 leading, u32 stride) {
  return (u64)((address & 0x3FFFF) >> 4) | ((u64)(leading >> 4) << 16) | ((u64)(stride >> 4) << 32) | (1ull << 62); }
__device__ __forceinline__ void put(void* base, u32 offset, u16 value) {  // the 128-byte swizzle of absolute addresses
  u32 address = at(base) + offset;
  address ^= ((address >> 7) & 7) << 4;
  asm volatile("st.shared.u16 [%0], %1;" :: "r"(address), "h"(value) : "memory"); }
"""
"""Thin wrappers, one instruction each."""


def wgmma_call(columns: int, a: str = "descriptor", form: str = "bf16", flags: str = "1, 1, 1, 0, 0") -> str:
    """An asm statement: accumulators ``d``, A ``da`` (a descriptor, or four registers ``ra``), B ``db``."""
    count = columns // 2
    registers = ", ".join(f"%{number}" for number in range(count))
    outputs = ", ".join(f'"+f"(d[{number}])' for number in range(count))
    if a == "registers":
        source = "{" + ", ".join(f"%{count + number}" for number in range(4)) + f"}}, %{count + 4}"
        inputs = ", ".join(f'"r"(ra[{number}])' for number in range(4)) + ', "l"(db)'
    else:
        source, inputs = f"%{count}, %{count + 1}", '"l"(da), "l"(db)'
    opcode = f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{form}.{form}"
    return f'asm volatile("{opcode} {{{registers}}}, {source}, {flags};" : {outputs} : {inputs} : "memory");'


def hopper_kernel(body: str) -> Kernel:
    """The function ``kernel`` of a source behind the prelude, for compute_90a."""
    return compile_kernel(PRELUDE + body, ARCH)


def floats(bits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """bf16 bits as float64."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def bf16_bits(values: npt.NDArray[Any]) -> npt.NDArray[np.uint16]:
    """The upper halves of float32 values (cut, not rounded: any bf16 will do for a test input)."""
    return (values.astype(np.float32).view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def seeded(source: str, mark: str, text: str) -> str:
    """The source with the statement behind a comment mark replaced; its line numbers stay."""
    begin = source.index(f"/*{mark}*/")
    end = source.index("\n", begin)
    comment = source.find("// MARK", begin, end)
    tail = source[comment:end] if comment >= 0 else ""
    return source[:begin] + text + tail + source[end:]


def line(source: str, mark: str) -> int:
    return line_of(PRELUDE + source, f"MARK: {mark}")


def where(fault: Fault) -> tuple[Any, ...]:
    """The kernel's own line, whether or not the wrapper was inlined."""
    return fault.call_line or fault.source_line, fault.block, fault.thread


SMALL = """
extern "C" __global__ void kernel(const __grid_constant__ TensorMap map, u32* out) {
  __shared__ __align__(1024) u32 tile[1024];
  __shared__ u64 bar, other;
  if (threadIdx.x == 0) { /*INIT*/ init(&bar, 2); init(&other, 1); }
  __syncthreads();
  BODY
}
"""


def run_small(body: str, init: str | None = None, tensor_map: TensorMap | None = None, block: int = 64) -> list[Fault]:
    source = SMALL.replace("BODY", body)
    if init is not None:
        source = source.replace("/*INIT*/ init(&bar, 2);", init)
    machine = Machine()
    out = upload(machine, np.arange(2048).astype(np.uint32), "out")
    small = tensor_map or machine.tensor_map(out, (32, 32), (32, 8), 4, None, 0)
    return faults_of(machine, hopper_kernel(source), small.pack(), pointer(out), block=block)
