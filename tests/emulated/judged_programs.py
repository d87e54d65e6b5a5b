"""Small CUDA programs that an emulated device must judge rightly; they are in judged_waiting, _right, _wrong,
_groups, _atomics, _copies and _mbarriers.

Each is the body of ``kernel(int* out, const int* in, int* aux, int n)``, behind declarations of its own. ``in`` counts
from 0, ``aux`` is zero, ``out`` is -1 in all words unless ``out_is_new``; ``want`` gives the first words of out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

WORDS = 4096
"""32-bit words of each of the three arrays."""
Want = Callable[[int, int], npt.NDArray[np.int64]]


@dataclass(frozen=True)
class Program:
    """``kinds``: what may be found, of which at least one is; empty for a right program. ``besides``: what is too.
    ``notes``: what is counted."""

    name: str
    body: str
    grid: int = 1
    block: int = 32
    before: str = ""
    want: Want | None = None
    kinds: tuple[str, ...] = ()
    words: str = ""
    notes: tuple[str, ...] = ()
    out_is_new: bool = False
    archs: tuple[str, ...] = ("90",)
    attributes: str = ""
    besides: tuple[str, ...] = ()

    @property
    def source(self) -> str:
        """The CUDA source."""
        head = f'extern "C" __global__ void {self.attributes} kernel(int* out, const int* in, int* aux, int n) {{'
        return f"{self.before}\n{head}\n  const int t = threadIdx.x, b = blockIdx.x;\n{self.body}\n}}\n"


def filled(value: Callable[[int, int], int]) -> Want:
    """One word."""
    return lambda grid, block: np.array([value(grid, block)])


def each(function: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]) -> Want:
    """A word a thread, of its number in the grid."""
    return lambda grid, block: function(np.arange(grid * block))


VOLATILE = "#define V(p) (*(volatile int*)(p))\n"
LOCK = """
__device__ void lock(int* l) { while (atomicCAS(l, 0, 1) != 0) { } __threadfence(); }
__device__ void unlock(int* l) { __threadfence(); atomicExch(l, 0); }
"""
ORDERED = """
__device__ int load_acquire(const int* p) {
  int v; asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v;
}
__device__ void store_release(int* p, int v) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" :: "l"(p), "r"(v) : "memory");
}
__device__ int load_relaxed(const int* p) {
  int v; asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v;
}
"""
COPIES = """
__device__ unsigned shared_address(const void* p) { return (unsigned)__cvta_generic_to_shared(p); }
__device__ void copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(shared_address(to)), "l"(from) : "memory");
}
__device__ void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N> __device__ void wait() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }
"""
FENCE = 'asm volatile("" ::: "memory");'

COUNTED = filled(lambda grid, block: grid * block)

LOOK_BACK = """
  __shared__ int tile, before;
  if (t == 0) { TILE; }
  __syncthreads();
  int mine = in[tile * 64 + t] % 7, sum = mine;
  for (int d = 1; d < 32; d *= 2) { int o = __shfl_up_sync(~0u, sum, d); if (t % 32 >= d) sum += o; }
  __shared__ int warp_sum[2];
  if (t % 32 == 31) warp_sum[t / 32] = sum;
  __syncthreads();
  if (t >= 32) sum += warp_sum[0];
  // aux: [state, aggregate, inclusive] of each tile
  if (t == 63) {
    int* at = aux + 16 + tile * 3;
    V(at + 1) = sum;
    __threadfence();
    V(at) = 1;
    int running = 0;
    for (int back = tile - 1; back >= 0;) {
      int* other = aux + 16 + back * 3;
      int state;
      while ((state = V(other)) == 0) { }
      __threadfence();
      if (state == 2) { running += V(other + 2); break; }
      running += V(other + 1);
      --back;
    }
    V(at + 2) = running + sum;
    __threadfence();
    V(at) = 2;
    before = running;
  }
  __syncthreads();
  out[tile * 64 + t] = before + sum;
"""

GRID_BARRIER = """
  out[b * blockDim.x + t] = in[b * blockDim.x + t];
  __syncthreads();
  if (t == 0) {
    __threadfence();
    atomicAdd(aux, 1);
    while (WAIT < gridDim.x) { }
    __threadfence();
  }
  __syncthreads();
  int other = out[((b + 1) % gridDim.x) * blockDim.x + t];
  out[2048 + b * blockDim.x + t] = other;
"""

LAST_BLOCK = """
  __shared__ int is_last;
  int sum = in[b * 64 + t];
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  __shared__ int part[2];
  if (t % 32 == 0) part[t / 32] = sum;
  __syncthreads();
  if (t == 0) {
    out[b] = part[0] + part[1];
    FENCE
    is_last = atomicAdd(aux, 1) == gridDim.x - 1;
  }
  __syncthreads();
  if (is_last && t == 0) {
    int total = 0;
    for (int i = 0; i < gridDim.x; ++i) total += V(out + i);
    out[0] = total;
  }
"""


RESET = """
  if (t == 0) {
    out[64 + b] = in[b];
    __threadfence();
    COUNT
    if (IS_LAST) {
      __threadfence();
      int total = 0;
      for (int i = 0; i < gridDim.x; ++i) total += V(out + 64 + i);
      out[0] = total;
      aux[0] = 0;
    }
  }
"""


def sum_of(grid: int, block: int) -> npt.NDArray[np.int64]:
    return np.array([np.arange(grid * block).sum()])


def scan_of(grid: int, block: int) -> npt.NDArray[np.int64]:
    return np.cumsum(np.arange(grid * block) % 7)


TICKET = """
  __shared__ int part[8], count;
  if (t == 0) count = 0;
  __syncthreads();
  int sum = in[t];
  for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
  if (t % 32 == 0) {
    part[t / 32] = sum;
    FENCE
    if (atomicAdd(&count, 1) == 7) {
      __threadfence_block();
      int total = 0;
      for (int i = 0; i < 8; ++i) total += V(part + i);
      out[0] = total;
    }
  }
"""

TREE = """
  __shared__ int s[64];
  s[t] = in[t];
  s[t + 32] = 0;
  __syncwarp();
  for (int d = 16; d > 0; d /= 2) { if (t < d) s[t] += s[t + d]; SYNC }
  if (t == 0) out[0] = s[0];"""
