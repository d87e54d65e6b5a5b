"""Small CUDA programs that an emulated device must judge rightly: right ones that look wrong, and wrong ones.

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
    """``kinds``: what may be found, of which at least one is; empty for a right program. ``notes``: what is counted."""

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

    @property
    def source(self) -> str:
        """The CUDA source."""
        head = 'extern "C" __global__ void kernel(int* out, const int* in, int* aux, int n) {'
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


def _sum_of(grid: int, block: int) -> npt.NDArray[np.int64]:
    return np.array([np.arange(grid * block).sum()])


def _scan_of(grid: int, block: int) -> npt.NDArray[np.int64]:
    return np.cumsum(np.arange(grid * block) % 7)


SPINNING = (
    Program(
        "spin lock between lanes",
        "lock(aux); V(out) = V(out) + 1; unlock(aux);",
        1,
        32,
        VOLATILE + LOCK,
        filled(lambda grid, block: block - 1),
    ),
    Program(
        "spin lock between lanes, released inside the loop",
        """
  bool done = false;
  while (!done) {
    if (atomicCAS(aux, 0, 1) == 0) { __threadfence(); V(out) = V(out) + 1; __threadfence(); atomicExch(aux, 0);
                                     done = true; }
  }""",
        1,
        32,
        VOLATILE,
        filled(lambda grid, block: block - 1),
    ),
    Program(
        "spin lock between warps",
        "if (t % 32 == 0) { lock(aux); out[0] = out[0] + 1; unlock(aux); }",
        1,
        256,
        LOCK,
        filled(lambda grid, block: block // 32 - 1),
    ),
    Program(
        "spin lock of all threads of all blocks",
        "lock(aux); out[0] = out[0] + 1; unlock(aux);",
        3,
        40,
        LOCK,
        filled(lambda grid, block: grid * block - 1),
    ),
    Program(
        "spin lock between blocks",
        "if (t == 0) { lock(aux); out[0] = out[0] + 1; unlock(aux); }",
        40,
        64,
        LOCK,
        filled(lambda grid, block: grid - 1),
    ),
    Program(
        "shared spin lock of a block",
        """
  __shared__ int l, count;
  if (t == 0) { l = 0; count = 0; }
  __syncthreads();
  if (t % 32 == 5) {
    while (atomicCAS(&l, 0, 1) != 0) { }
    __threadfence_block();
    count += 1;
    __threadfence_block();
    atomicExch(&l, 0);
  }
  __syncthreads();
  if (t == 0) out[0] = count;""",
        2,
        128,
        "",
        filled(lambda grid, block: block // 32),
        notes=("equal_stores",),
    ),
    Program(
        "scan with look-back, tiles by ticket",
        LOOK_BACK.replace("TILE", "tile = atomicAdd(aux, 1)"),
        12,
        64,
        VOLATILE,
        _scan_of,
    ),
    Program("scan with look-back, tiles by block", LOOK_BACK.replace("TILE", "tile = b"), 12, 64, VOLATILE, _scan_of),
    Program(
        "scan with look-back, tiles from behind",
        LOOK_BACK.replace("TILE", "tile = gridDim.x - 1 - b"),
        12,
        64,
        VOLATILE,
        _scan_of,
    ),
    Program(
        "flag between blocks, producer first",
        """
  if (b == 0 && t == 0) { out[1] = 77; __threadfence(); V(aux) = 1; }
  if (b == 1 && t == 0) { while (V(aux) == 0) { } __threadfence(); out[0] = out[1]; }""",
        2,
        32,
        VOLATILE,
        filled(lambda grid, block: 77),
    ),
    Program(
        "flag between blocks, producer last",
        """
  if (b == gridDim.x - 1 && t == 0) { out[1] = 77; __threadfence(); V(aux) = 1; }
  if (b == 0 && t == 0) { while (V(aux) == 0) { } __threadfence(); out[0] = out[1]; }""",
        3,
        32,
        VOLATILE,
        filled(lambda grid, block: 77),
    ),
    Program(
        "flag from the last of more blocks than fit",
        """
  if (b == gridDim.x - 1 && t == 0) { out[1] = 77; __threadfence(); V(aux) = 1; }
  if (b == 0 && t == 0) { while (V(aux) == 0) { } __threadfence(); out[0] = out[1]; }""",
        6000,
        32,
        VOLATILE,
        filled(lambda grid, block: 77),
    ),
    Program(
        "flag by acquire and release, with backoff",
        """
  if (b == 1) { out[64 + t] = t; __syncthreads(); if (t == 0) store_release(aux, 1); }
  if (b == 0) {
    if (t == 0) { unsigned ns = 8; while (load_acquire(aux) == 0) { __nanosleep(ns); if (ns < 256) ns *= 2; } }
    __syncthreads();
    out[t] = out[64 + t] * 2;
  }""",
        2,
        64,
        ORDERED,
        lambda grid, block: np.arange(block) * 2,
    ),
    Program(
        "a spin that counts its turns",
        """
  if (b == 1 && t == 0) { out[1] = 5; __threadfence(); atomicExch(aux, 1); }
  if (b == 0 && t == 0) {
    int turns = 0;
    while (atomicAdd(aux, 0) == 0) { if (++turns > 1000000) __trap(); }
    __threadfence();
    out[0] = out[1];
  }""",
        2,
        32,
        "",
        filled(lambda grid, block: 5),
    ),
    Program(
        "a warp that waits for a volatile shared flag",
        """
  __shared__ volatile int ready;
  __shared__ int value[32];
  if (t == 0) ready = 0;
  __syncthreads();
  if (t < 32) {
    while (ready == 0) { }
    __threadfence_block();
    out[t] = value[t];
  } else {
    value[t - 32] = t * 3;
    __threadfence_block();
    __syncwarp();
    if (t == 32) ready = 1;
  }""",
        2,
        64,
        "",
        lambda grid, block: (np.arange(32) + 32) * 3,
        notes=("equal_stores",),
    ),
    Program(
        "a later warp that waits for a volatile shared flag",
        """
  __shared__ volatile int ready;
  __shared__ int value;
  if (t == 0) ready = 0;
  __syncthreads();
  if (t == 0) { value = 9; __threadfence_block(); ready = 1; }
  if (t >= 32) { while (ready == 0) { } __threadfence_block(); out[t - 32] = value; }""",
        1,
        64,
        "",
        lambda grid, block: np.full(32, 9),
    ),
    Program(
        "grid barrier, polled by a volatile load",
        GRID_BARRIER.replace("WAIT", "V(aux)"),
        20,
        64,
        VOLATILE,
        each(lambda i: i),
    ),
    Program(
        "grid barrier, polled by an atomic",
        GRID_BARRIER.replace("WAIT", "atomicAdd(aux, 0)"),
        20,
        64,
        "",
        each(lambda i: i),
    ),
    Program(
        "grid barrier of large blocks", GRID_BARRIER.replace("WAIT", "V(aux)"), 4, 512, VOLATILE, each(lambda i: i)
    ),
)

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

RIGHT = (
    Program(
        "the last warp of a block by a shared ticket",
        TICKET.replace("FENCE", "__threadfence_block();"),
        1,
        256,
        VOLATILE,
        _sum_of,
    ),
    Program(
        "the last block resets the counter",
        RESET.replace("COUNT", "int before = atomicAdd(aux, 1);").replace("IS_LAST", "before == gridDim.x - 1"),
        8,
        64,
        VOLATILE,
        filled(lambda grid, block: sum(range(grid))),
    ),
    Program(
        "return before a barrier, within a warp",
        """
  __shared__ int row[128];
  int i = b * 128 + t;
  if (i >= n) return;
  row[t] = in[i];
  __syncthreads();
  out[i] = row[0] + row[t];""",
        2,
        128,
        "",
        lambda grid, block: np.arange(200) + np.arange(200) // 128 * 128,
    ),
    Program(
        "return of whole warps before a barrier",
        """
  __shared__ int row[128];
  if (t >= 64) return;
  row[t] = in[t];
  __syncthreads();
  out[t] = row[63 - t];
  __syncthreads();
  row[t] = 5;
  __syncthreads();
  out[t] += row[t];""",
        1,
        128,
        "",
        lambda grid, block: np.arange(63, -1, -1) + 5,
    ),
    Program(
        "return before a barrier in a loop",
        """
  __shared__ int row[2][96];
  for (int step = 0; step < 3; ++step) {
    if (t >= 96 - step * 20) return;
    row[step & 1][t] = t * step;
    __syncthreads();
    out[step * 96 + t] = row[step & 1][(t + 1) % (96 - step * 20)];
    __syncthreads();
  }""",
        1,
        96,
        "",
        lambda grid, block: np.zeros(96),
    ),
    Program(
        "return before a counting barrier",
        """
  if (t >= 100) return;
  int odd = __syncthreads_count(t & 1), some = __syncthreads_or(t == 3), every = __syncthreads_and(t < 100);
  out[t] = odd * 10 + (some != 0) + (every != 0);""",
        1,
        128,
        "",
        lambda grid, block: np.full(100, 502),
    ),
    Program(
        "return before a named barrier",
        """
  __shared__ int row[128];
  if (t % 32 >= 20) return;
  row[t] = t;
  asm volatile("bar.sync %0, 64;" :: "r"(1 + t / 64) : "memory");
  out[t] = row[t ^ 32];""",
        1,
        128,
        "",
        lambda grid, block: np.arange(20) + 32,
    ),
    Program(
        "return before __syncwarp",
        """
  __shared__ int row[32];
  if (t >= 20) return;
  row[t] = t;
  __syncwarp();
  out[t] = row[19 - t];""",
        1,
        32,
        "",
        lambda grid, block: np.arange(19, -1, -1),
    ),
    Program(
        "every block stores one flag",
        "if (in[b * 32 + t] % 3 == 0) out[0] = 1;",
        4,
        32,
        "",
        filled(lambda grid, block: 1),
        notes=("equal_stores",),
    ),
    Program(
        "warps store one shared flag",
        """
  __shared__ int found;
  if (t == 0) found = 0;
  __syncthreads();
  if (in[t] % 5 == 2) found = 1;
  __syncthreads();
  out[t] = found;""",
        1,
        128,
        "",
        lambda grid, block: np.ones(128),
        notes=("equal_stores",),
    ),
    Program(
        "lanes store one shared flag in turn",
        """
  __shared__ int found;
  if (t == 0) found = 0;
  __syncwarp();
  if (t < 7) V(&found) = 1; else if (t > 20) { V(&found) = 1; out[100 + t] = 3; }
  __syncwarp();
  out[t] = found;""",
        1,
        32,
        VOLATILE,
        lambda grid, block: np.ones(32),
        notes=("equal_stores",),
    ),
    Program(
        "blocks that overlap store equal values",
        """
  int i = b * 48 + t;
  out[i] = in[i] * 2;""",
        4,
        64,
        "",
        lambda grid, block: np.arange(208) * 2,
        notes=("equal_stores",),
    ),
    Program(
        "warps of a block store equal values",
        "out[t % 40] = in[t % 40] + 3;",
        1,
        128,
        "",
        lambda grid, block: np.arange(40) + 3,
        notes=("equal_stores",),
    ),
    Program(
        "a last block by fence and ticket", LAST_BLOCK.replace("FENCE", "__threadfence();"), 6, 64, VOLATILE, _sum_of
    ),
    Program(
        "a last block whose threads fenced before the barrier",
        """
  __shared__ int is_last;
  out[64 + b * 64 + t] = in[b * 64 + t];
  __threadfence();
  __syncthreads();
  if (t == 0) is_last = atomicAdd(aux, 1) == gridDim.x - 1;
  __syncthreads();
  if (is_last) {
    int total = 0;
    for (int i = 0; i < gridDim.x; ++i) total += V(out + 64 + i * 64 + t);
    out[64 + t] = total;
  }
  if (is_last && t == 0) out[0] = 4;""",
        6,
        64,
        VOLATILE,
        filled(lambda grid, block: 4),
    ),
    Program(
        "a counter under a lock",
        "if (t == 0) { lock(aux); out[0] = out[0] + b; unlock(aux); }",
        5,
        32,
        LOCK,
        filled(lambda grid, block: grid * (grid - 1) // 2 - 1),
    ),
    Program(
        "an atomic that claims a slot",
        """
  int slot = atomicAdd(aux, 1);
  out[slot] = 1;""",
        3,
        64,
        "",
        lambda grid, block: np.ones(grid * block),
    ),
    Program(
        "a halo cell that is selected away",
        """
  __shared__ int row[66];
  row[t + 1] = in[b * 64 + t];
  if (t == 0 && b > 0) row[0] = in[b * 64 - 1];
  __syncthreads();
  int left = V(&row[t]);
  out[b * 64 + t] = (b == 0 && t == 0) ? 0 : left;""",
        3,
        64,
        VOLATILE,
        each(lambda i: np.maximum(i - 1, 0)),
        notes=("unused_undefined",),
    ),
    Program(
        "a global cell that is selected away",
        """
  int left = V(out + 63 + t);
  out[t] = t == 0 ? in[0] : in[t];
  if (left == 12345 && t != 0) out[t] = 1;""",
        1,
        1,
        VOLATILE,
        filled(lambda grid, block: 0),
        out_is_new=True,
        notes=("unused_undefined",),
    ),
    Program(
        "padding in 16-byte copies",
        """
  Item* items = (Item*)(out + 1024);
  items[t].a = t; items[t].b = 2 * t; items[t].c = 3 * t;
  __syncthreads();
  uint4* raw = (uint4*)items;
  uint4* copy = (uint4*)(out + 2048);
  copy[t] = raw[63 - t];
  out[t] = ((Item*)copy)[t].c;""",
        1,
        64,
        "struct __align__(16) Item { int a, b, c; };",
        lambda grid, block: np.arange(63, -1, -1) * 3,
        out_is_new=True,
        notes=("unused_undefined",),
    ),
    Program(
        "padding through shared memory",
        """
  __shared__ Item items[64];
  items[t].key = t; items[t].small = (char)(t + 1);
  __syncthreads();
  ((uint4*)(out + 1024))[t] = ((uint4*)items)[63 - t];
  out[t] = items[63 - t].small;""",
        1,
        64,
        "struct __align__(16) Item { long long key; char small; };",
        lambda grid, block: np.arange(64, 0, -1),
        notes=("unused_undefined",),
    ),
    Program(
        "a struct copied through shared memory",
        """
  __shared__ Item items[64];
  Item mine; mine.key = t * 1.5; mine.small = t;
  items[t] = mine;
  __syncthreads();
  Item other = items[t ^ 5];
  ((Item*)(out + 1024))[t] = other;
  out[t] = other.small;""",
        1,
        64,
        "struct Item { double key; int small; };",
        lambda grid, block: np.arange(64) ^ 5,
        notes=("unused_undefined",),
    ),
)

TREE = """
  __shared__ int s[64];
  s[t] = in[t];
  s[t + 32] = 0;
  __syncwarp();
  for (int d = 16; d > 0; d /= 2) { if (t < d) s[t] += s[t + d]; SYNC }
  if (t == 0) out[0] = s[0];"""

WRONG = (
    Program(
        "a shared ticket without a fence before it",
        TICKET.replace("FENCE", ""),
        1,
        256,
        VOLATILE,
        kinds=("shared_race",),
    ),
    Program(
        "one block resets the counter, whoever has counted",
        RESET.replace("COUNT", "atomicAdd(aux, 1);").replace("IS_LAST", "b == gridDim.x - 1"),
        8,
        64,
        VOLATILE,
        kinds=("block_write_conflict",),
    ),
    Program("tree reduction in a warp without __syncwarp", TREE.replace("SYNC", FENCE), kinds=("shared_race",)),
    Program(
        "tree reduction by volatile without __syncwarp",
        """
  __shared__ volatile int s[64];
  s[t] = in[t];
  s[t + 32] = 0;
  __syncwarp();
  s[t] = s[t] + s[t + 16]; s[t] = s[t] + s[t + 8]; s[t] = s[t] + s[t + 4];
  s[t] = s[t] + s[t + 2]; s[t] = s[t] + s[t + 1];
  if (t == 0) out[0] = s[0];""",
        kinds=("shared_race",),
    ),
    Program(
        "last warp of a block reduction without __syncwarp",
        """
  __shared__ int s[128];
  s[t] = in[t];
  __syncthreads();
  if (t < 64) s[t] += s[t + 64];
  __syncthreads();
  if (t < 32) {
    volatile int* v = s;
    v[t] = v[t] + v[t + 32]; v[t] = v[t] + v[t + 16];
    out[t] = v[t];
  }""",
        2,
        128,
        kinds=("shared_race",),
    ),
    Program(
        "exchange within a warp without __syncwarp",
        f"""
  __shared__ int s[32];
  s[t] = in[t] * 2;
  {FENCE}
  out[t] = s[31 - t];""",
        kinds=("shared_race",),
    ),
    Program(
        "exchange within the warps of a block",
        f"""
  __shared__ int s[128];
  s[t] = in[t] * 2;
  {FENCE}
  out[t] = s[t ^ 1];""",
        2,
        128,
        kinds=("shared_race",),
    ),
    Program(
        "write after the other lane's read",
        f"""
  __shared__ int s[32];
  s[t] = in[t];
  __syncwarp();
  int other = s[t ^ 1];
  {FENCE}
  s[t] = other + 1;
  __syncwarp();
  out[t] = s[t];""",
        kinds=("shared_race",),
    ),
    Program(
        "__syncwarp of half the lanes that exchange",
        """
  __shared__ int s[32];
  s[t] = in[t];
  if (t < 16) __syncwarp(0xffffu); else __syncwarp(0xffff0000u);
  out[t] = s[31 - t];""",
        kinds=("shared_race",),
    ),
    Program(
        "ldmatrix before the barrier",
        f"""
  __shared__ __align__(16) unsigned char tile[512];
  ((uint4*)tile)[t] = make_uint4(t, 1, 2, 3);
  {FENCE}
  unsigned r;
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {{%0}}, [%1];" : "=r"(r)
               : "r"((unsigned)__cvta_generic_to_shared(tile + (t % 8) * 16)) : "memory");
  out[t] = r;""",
        kinds=("shared_race",),
    ),
    Program(
        "another lane's cp.async without a barrier",
        """
  __shared__ __align__(16) int s[128];
  copy16(s + 4 * t, in + 4 * t);
  commit();
  wait<0>();
  out[t] = s[127 - t];""",
        before=COPIES,
        kinds=("shared_race",),
    ),
    Program(
        "another warp's cp.async without a barrier",
        """
  __shared__ __align__(16) int s[256];
  copy16(s + 4 * t, in + 4 * t);
  commit();
  wait<0>();
  __syncwarp();
  out[t] = s[255 - t];""",
        1,
        64,
        before=COPIES,
        kinds=("shared_race",),
    ),
    Program(
        "cp.async that nobody awaits",
        """
  __shared__ __align__(16) int s[128];
  copy16(s + 4 * t, in + 4 * t);
  commit();
  out[t] = s[4 * t];
  wait<0>();""",
        before=COPIES,
        kinds=("unfinished_copy",),
        words="still in flight",
    ),
    Program(
        "cp.async of the second stage that nobody awaits",
        """
  __shared__ __align__(16) int s[2][128];
  int sum = 0;
  copy16(s[0] + 4 * t, in + 4 * t); commit();
  for (int step = 0; step < 3; ++step) {
    if (step < 2) copy16(s[(step + 1) % 2] + 4 * t, in + 128 * (step + 1) + 4 * t);
    commit();
    if (step < 1) wait<1>();
    sum += s[step % 2][4 * t];
  }
  wait<0>();
  out[t] = sum;""",
        before=COPIES,
        kinds=("unfinished_copy",),
        words="still in flight",
    ),
    Program(
        "cp.async awaited by one group too few",
        """
  __shared__ __align__(16) int s[64 * 4];
  copy16(s + 4 * t, in + 4 * t); commit();
  wait<1>();
  __syncthreads();
  out[t] = s[4 * (63 - t)];
  wait<0>();""",
        1,
        64,
        before=COPIES,
        kinds=("unfinished_copy",),
        words="still in flight",
    ),
    Program(
        "a block reads what another stores",
        """
  out[b * 32 + t] = in[b * 32 + t];
  int j = (b * 32 + t + 1) % (gridDim.x * 32);
  aux[b * 32 + t] = out[j];""",
        4,
        32,
        kinds=("global_race",),
    ),
    Program(
        "a stencil in place over blocks",
        """
  int i = b * 32 + t;
  int left = i ? aux[i - 1] : 0, right = aux[i + 1];
  __syncthreads();
  aux[i] = left + right + 1;""",
        4,
        32,
        kinds=("global_race",),
    ),
    Program(
        "a warp reads what another stored, without a barrier",
        f"""
  aux[t] = in[t];
  {FENCE}
  out[t] = aux[t ^ 32];""",
        1,
        64,
        kinds=("global_race",),
    ),
    Program(
        "a lane reads what another stored, without a barrier",
        f"""
  aux[t] = in[t];
  {FENCE}
  out[t] = V(aux + (t ^ 1));""",
        1,
        32,
        VOLATILE,
        kinds=("global_race",),
    ),
    Program(
        "a warp overwrites what another reads",
        f"""
  int v = aux[t ^ 32];
  {FENCE}
  aux[t] = v + t + 1;""",
        1,
        64,
        kinds=("global_race",),
    ),
    Program("two warps store to one address", "out[t % 32] = t;", 1, 64, kinds=("global_race",)),
    Program(
        "two lanes store to one address",
        f"""
  if (t < 16) out[t] = 1;
  {FENCE}
  if (t >= 16) out[t - 16] = t;""",
        1,
        32,
        kinds=("global_race",),
    ),
    Program("two blocks store to one address", "out[t] = b;", 2, 32, kinds=("block_write_conflict",)),
    Program(
        "a flag without a fence",
        """
  if (b == 0 && t == 0) { out[1] = 77; V(aux) = 1; }
  if (b == 1 && t == 0) { while (V(aux) == 0) { } __threadfence(); out[0] = out[1]; }""",
        2,
        32,
        VOLATILE,
        kinds=("global_race",),
    ),
    Program(
        "a volatile value and flag without a fence",
        """
  if (b == 1 && t == 0) { V(out + 1) = 77; V(aux) = 1; }
  if (b == 0 && t == 0) { while (V(aux) == 0) { } out[0] = V(out + 1); }""",
        2,
        32,
        VOLATILE,
        kinds=("global_race",),
    ),
    Program(
        "a relaxed flag without a fence",
        """
  if (b == 1 && t == 0) { out[1] = 77; atomicExch(aux, 1); }
  if (b == 0 && t == 0) { while (load_relaxed(aux) == 0) { } out[0] = out[1]; }""",
        2,
        32,
        ORDERED,
        kinds=("global_race",),
    ),
    Program(
        "a flag that only one thread's stores are before",
        """
  if (b == 0) { out[64 + t] = t; if (t == 0) { __threadfence(); V(aux) = 1; } }
  if (b == 1) {
    if (t == 0) { while (V(aux) == 0) { } __threadfence(); }
    __syncthreads();
    out[t] = out[64 + t];
  }""",
        2,
        64,
        VOLATILE,
        kinds=("global_race",),
    ),
    Program(
        "a flag that is not awaited",
        """
  if (b == 0 && t == 0) { out[1] = 77; __threadfence(); V(aux) = 1; }
  if (b == 1 && t == 0) { __threadfence(); out[0] = out[1]; }""",
        2,
        32,
        VOLATILE,
        kinds=("global_race",),
    ),
    Program(
        "a flag that is looked at once",
        """
  if (b == 1 && t == 0) { out[1] = 77; __threadfence(); V(aux) = 1; }
  if (b == 0 && t == 0) { int seen = V(aux); out[0] = out[1] + seen; }""",
        2,
        32,
        VOLATILE,
        kinds=("global_race",),
    ),
    Program("a last block without a fence", LAST_BLOCK.replace("FENCE", ""), 6, 64, VOLATILE, kinds=("global_race",)),
    Program(
        "a counter without its lock",
        "if (t == 0) out[0] = out[0] + b + 1;",
        5,
        32,
        kinds=("global_race", "block_write_conflict"),
    ),
    Program(
        "a lock without fences",
        """
  if (t == 0) { while (atomicCAS(aux, 0, 1) != 0) { } out[0] = out[0] + 1; atomicExch(aux, 0); }""",
        4,
        32,
        kinds=("global_race", "block_write_conflict"),
    ),
    Program(
        "a grid barrier that one block skips",
        """
  out[b * 32 + t] = t;
  __syncthreads();
  if (t == 0 && b != 2) { __threadfence(); atomicAdd(aux, 1); while (V(aux) < gridDim.x - 1) { } __threadfence(); }
  __syncthreads();
  out[2048 + b * 32 + t] = out[((b + 1) % gridDim.x) * 32 + t];""",
        4,
        32,
        VOLATILE,
        kinds=("global_race",),
    ),
    Program(
        "more threads at a barrier than it counts",
        """
  asm volatile("bar.sync 1, 64;" ::: "memory");
  out[t] = 1;""",
        1,
        96,
        kinds=("barrier_count", "deadlock"),
    ),
    Program(
        "a barrier that part of a warp reaches",
        "if (t < 16) __syncthreads(); out[t] = 1;",
        1,
        32,
        kinds=("divergent_barrier",),
    ),
    Program(
        "a shared cell that nobody wrote, stored",
        """
  __shared__ int s[64];
  if (t != 7) s[t] = t;
  __syncthreads();
  out[t] = s[63 - t];""",
        1,
        64,
        kinds=("shared_uninitialised_read",),
    ),
    Program(
        "a shared cell that nobody wrote, summed",
        """
  __shared__ float s[64];
  if (t < 60) s[t] = t;
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < 64; ++i) sum += s[i];
  ((float*)out)[t] = sum;""",
        1,
        64,
        kinds=("shared_uninitialised_read",),
    ),
    Program(
        "a shared cell that nobody wrote, as an index",
        """
  __shared__ int s[64];
  if (t < 60) s[t] = t;
  __syncthreads();
  out[t] = in[s[t] & 1023] == -5 ? 1 : 0;""",
        1,
        64,
        kinds=("shared_uninitialised_read",),
    ),
    Program(
        "a shared cell that nobody wrote, as a branch",
        """
  __shared__ int s[64];
  if (t < 60) s[t] = t;
  __syncthreads();
  if (s[t] < 0) out[100] = 9;""",
        1,
        64,
        kinds=("shared_uninitialised_read",),
    ),
    Program(
        "a global word that nobody wrote", "aux[t] = out[t] + 1;", 1, 32, kinds=("uninitialised_read",), out_is_new=True
    ),
    Program(
        "a global word that nobody wrote, under an atomic",
        "atomicAdd(out + t, 1);",
        2,
        32,
        kinds=("uninitialised_read",),
        out_is_new=True,
    ),
    Program(
        "a flag that nobody sets",
        "if (t == 0) { while (V(aux) == 0) { } out[0] = 1; }",
        2,
        32,
        VOLATILE,
        kinds=("endless_wait",),
    ),
    Program(
        "a lock that is taken twice",
        "if (t == 0) { lock(aux); lock(aux); out[0] = 1; }",
        2,
        32,
        LOCK,
        kinds=("endless_wait",),
    ),
    Program(
        "a shared flag that nobody sets",
        """
  __shared__ volatile int ready;
  if (t == 0) ready = 0;
  __syncthreads();
  if (t < 32) { while (ready == 0) { } }
  __syncthreads();
  out[t] = 1;""",
        1,
        64,
        kinds=("endless_wait",),
    ),
    Program(
        "a flag from a block that does not fit",
        """
  if (b == gridDim.x - 1 && t == 0) { __threadfence(); V(aux) = 1; }
  if (t == 0) { while (V(aux) == 0) { } }""",
        300,
        1024,
        VOLATILE,
        kinds=("endless_wait",),
    ),
)
PROGRAMS = {program.name: program for program in (*SPINNING, *RIGHT, *WRONG)}
