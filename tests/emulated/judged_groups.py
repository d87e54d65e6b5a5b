"""Programs whose threads work together beyond their block, grids and clusters, or hand on what one of them learnt."""

from __future__ import annotations

import numpy as np
from judged_programs import VOLATILE, Program, each, filled, sum_of

GRID = """
__device__ void meet_grid() {  // as cooperative_groups::grid_group::sync does it
  unsigned high, low;
  asm("mov.u32 %0, %%envreg1;" : "=r"(high));
  asm("mov.u32 %0, %%envreg2;" : "=r"(low));
  unsigned* arrived = (unsigned*)(((unsigned long long)high << 32) | low) + 1;
  if (high == 0) __trap();
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    unsigned old = atomicAdd(arrived, blockIdx.x == 0 ? 0x80000000u - (gridDim.x - 1) : 1u);
    while (((old ^ *(volatile unsigned*)arrived) & 0x80000000u) == 0) { }
    __threadfence();
  }
  __syncthreads();
}
"""
CLUSTER = """
__device__ unsigned of_rank(const void* p, unsigned rank) {
  unsigned a;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a)
               : "r"(unsigned(__cvta_generic_to_shared(p))), "r"(rank));
  return a;
}
__device__ int* pointer_of_rank(int* p, unsigned rank) {
  int* a; asm volatile("mapa.u64 %0, %1, %2;" : "=l"(a) : "l"(p), "r"(rank)); return a;
}
__device__ unsigned rank_of(const int* p) {
  unsigned r; asm volatile("getctarank.u64 %0, %1;" : "=r"(r) : "l"(p)); return r;
}
__device__ int load(unsigned a) {
  int v; asm volatile("ld.shared::cluster.s32 %0, [%1];" : "=r"(v) : "r"(a) : "memory"); return v;
}
__device__ void store(unsigned a, int v) {
  asm volatile("st.shared::cluster.s32 [%0], %1;" :: "r"(a), "r"(v) : "memory");
}
__device__ void add(unsigned a, int v) {
  asm volatile("red.shared::cluster.add.s32 [%0], %1;" :: "r"(a), "r"(v) : "memory");
}
__device__ void meet() {
  asm volatile("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
"""
PAIRS = "__cluster_dims__(2, 1, 1)"
LEARNS = """
  int old = 0;
  if (t == 0) { V(out + 64 + b) = in[b]; FENCE old = atomicAdd(aux, 1); }
  old = __shfl_sync(~0u, old, 0);
  if (old == gridDim.x - 1) {
    __threadfence();
    int sum = t < gridDim.x ? V(out + 64 + t) : 0;
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
    if (t == 0) out[0] = sum;
  }"""
SWAPS = """
__device__ void keep_least(int* p, int value) {  // as atomicMin of floats is written
  int old = *p;
  while (value < old) { int seen = old; old = atomicCAS(p, seen, value); if (old == seen) break; }
}
"""

RIGHT_GROUPS = (
    Program(
        "the grid meets between two phases",
        """
  out[b * 64 + t] = in[b * 64 + t];
  meet_grid();
  int other = out[((b + 1) % gridDim.x) * 64 + t];
  meet_grid();
  out[b * 64 + t] = other;""",
        3,
        64,
        GRID,
        lambda grid, block: np.roll(np.arange(grid * block), -block),
    ),
    Program(
        "words of another block of the cluster, added to, read and stored",
        """
  __shared__ int row[32], sum;
  unsigned rank = b % 2;
  row[t] = in[b * 32 + t];
  if (t == 0) sum = 0;
  meet();
  add(of_rank(&sum, 0), row[t]);
  int found = load(of_rank(row + t, rank ^ 1));
  meet();
  store(of_rank(row + 31 - t, rank ^ 1), found + 1);
  meet();
  out[b * 32 + t] = rank ? row[t] : sum;""",
        4,
        32,
        CLUSTER,
        lambda grid, block: np.concatenate([(np.full(32, sum(range(k, k + 64))), np.arange(k + 63, k + 31, -1) + 1)
                                            for k in (0, 64)]).reshape(-1),
        attributes=PAIRS,
    ),
    Program(
        "generic pointers into either block of the cluster",
        """
  __shared__ int row[32];
  row[t] = in[b * 32 + t];
  meet();
  int* p = t % 3 ? pointer_of_rank(row, t % 2) : row;
  int found = p[t] + 1000 * rank_of(p);
  meet();
  atomicAdd(p + t, 1);
  meet();
  out[b * 32 + t] = found;""",
        2,
        32,
        CLUSTER,
        each(lambda i: 1032 * np.where(i % 32 % 3 > 0, i % 32 % 2, i // 32) + i % 32),
        attributes=PAIRS,
    ),
    Program(
        "global words of another block of the cluster",
        """
  out[b * 32 + t] = in[b * 32 + t];
  meet();
  int other = out[(b ^ 1) * 32 + t];
  meet();
  out[b * 32 + t] = other;""",
        4,
        32,
        CLUSTER,
        each(lambda i: i ^ 32),
        attributes=PAIRS,
    ),
    Program(
        "a compare-and-swap makes sure of a plain load",
        """
  __shared__ int least;
  if (t == 0) { least = 1000; aux[0] = 1000; }
  __syncthreads();
  keep_least(&least, in[(t * 7) % 96] + 5);
  keep_least(aux, in[(t * 7) % 96] + 6);
  __syncthreads();
  if (t == 0) { out[0] = least; out[1] = *aux; }""",
        1,
        96,
        SWAPS,
        lambda grid, block: np.array([5, 6]),
    ),
    Program(
        "a plain look before an atomic maximum",
        "if (in[b * 64 + t] > *aux) atomicMax(aux, in[b * 64 + t]); if (t == 0) out[b] = b;",
        3,
        64,
        "",
        lambda grid, block: np.arange(grid),
        notes=("harmless_race",),
    ),
    Program(
        "a frontier that atomics move on",
        """
  int i = b * 32 + t;
  if (aux[i] != 1) {  // there is no other level than 0 and 2
    if (i < 40 && atomicCAS(aux + 2 * i + 1, 0, 2) == 0) atomicAdd(out, 1);
  }""",
        3,
        32,
        "",
        filled(lambda grid, block: 39),
        notes=("harmless_race",),
    ),
    Program(
        "one lane learns who is last, and tells its warp",
        LEARNS.replace("FENCE", "__threadfence();"),
        6,
        32,
        VOLATILE,
        lambda grid, block: sum_of(1, grid),
    ),
    Program(
        "a variable that begins as an address inside another",
        "out[t] = places[t][1];",
        1,
        2,
        "__device__ int words[4] = {5, 6, 7, 8}; __device__ int* places[2] = {words, words + 2};",
        lambda grid, block: np.array([6, 8]),
    ),
    Program(
        "a wait whose value goes through the stack",
        """
  int kept;
  if (b == 1) { if (t == 0) { V(out) = 7; __threadfence(); V(aux) = 1; } }
  else { do { look(&kept, aux); } while (kept == 0); __threadfence(); out[1 + t] = V(out); }""",
        2,
        1,
        VOLATILE + "__device__ __noinline__ void look(int* to, volatile int* from) { *to = *from; }",
        lambda grid, block: np.array([7, 7]),
    ),
    Program(
        "an asynchronous copy to 32-bit addresses that wrap",
        """
  __shared__ __align__(16) int row[128];
  unsigned at = (unsigned)__cvta_generic_to_shared(row) + 16 * t - 64 + (n - 200);
  asm volatile("cp.async.cg.shared.global [%0 + 64], [%1], 16;" :: "r"(at), "l"(in + 4 * t) : "memory");
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  out[t] = row[127 - t];""",
        1,
        32,
        "",
        lambda grid, block: np.arange(127, 95, -1),
    ),
    Program(
        "what space an address is of",
        """
  __shared__ int row[4];
  int own[4] = {n, n + 1, n + 2, n + 3};
  row[0] = 1;
  const void* places[5] = {out, row, fixed, own, module_word};
  const void* p = places[t];
  out[t] = (__isGlobal(p) != 0) + 2 * (__isShared(p) != 0) + 4 * (__isConstant(p) != 0) + 8 * (__isLocal(p) != 0);
  unsigned of_cluster;
  asm("{.reg .pred q; isspacep.shared::cluster q, %1; selp.u32 %0, 16, 0, q;}" : "=r"(of_cluster) : "l"(p));
  int* at = row;
  asm("{.reg .u64 a; cvta.to.shared::cluster.u64 a, %0; cvta.shared::cluster.u64 %0, a;}" : "+l"(at));
  out[t] += of_cluster + (at != row);""",
        1,
        5,
        "__constant__ int fixed[4]; __device__ int module_word[2];",
        lambda grid, block: np.array([1, 18, 4, 8, 1]),
        notes=("equal_stores",),
    ),
    Program(
        "a breakpoint that nobody reaches", 'if (in[t] < 0) asm volatile("brkpt;"); out[0] = 3;', 1, 32, "",
        filled(lambda grid, block: 3), notes=("equal_stores",),
    ),
)  # fmt: skip

WRONG_GROUPS = (
    Program(
        "the grid does not meet before a block overwrites what others read",
        """
  out[b * 64 + t] = in[b * 64 + t];
  meet_grid();
  int other = out[((b + 1) % gridDim.x) * 64 + t];
  out[b * 64 + t] = other;""",
        3,
        64,
        GRID,
        kinds=("global_race",),
    ),
    Program("a block that does not come to the grid's barrier", "if (b < 2) meet_grid();", 3, 64, GRID,
            kinds=("endless_wait",)),
    Program(
        "another block's words before the cluster has met",
        "__shared__ int row[32]; row[t] = t; __syncthreads(); out[b * 32 + t] = load(of_rank(row + t, b ^ 1)); meet();",
        2,
        32,
        CLUSTER,
        kinds=("shared_race",),
        words="of rank 1",
        attributes=PAIRS,
    ),
    Program(
        "a block ends while the other may read its words",
        "__shared__ int row[32]; row[t] = t; meet(); out[b * 32 + t] = load(of_rank(row + t, b ^ 1));",
        2,
        32,
        CLUSTER,
        kinds=("ended_block_access",),
        words="may have ended by then",
        attributes=PAIRS,
    ),
    Program(
        "a block reads words of one that has ended",
        """
  __shared__ int row[32];
  row[t] = t;
  meet();
  if (b == 0) { __nanosleep(100); out[t] = load(of_rank(row + t, 1)); }""",
        2,
        32,
        CLUSTER,
        kinds=("ended_block_access",),
        attributes=PAIRS,
    ),
    Program(
        "words of the cluster past the end of what a block has",
        "__shared__ int row[32]; row[t] = t; meet(); out[t] = load(of_rank(row + t + 1, 1)); meet();",
        2,
        32,
        CLUSTER,
        kinds=("shared_out_of_bounds",),
        attributes=PAIRS,
    ),
    Program("one lane learns who is last, though nobody fenced", LEARNS.replace("FENCE", ""), 6, 32, VOLATILE,
            kinds=("global_race",)),
    Program("a plain load of what others swap, and nothing makes sure of it", """
  if (t < 3) atomicCAS(aux, 0, t + 1);
  out[t] = *aux;""", 1, 32, kinds=("global_race",)),
    Program("a plain flag that an atomic sets", """
  if (b == 0) { if (t == 0) atomicExch(aux, 1); }
  else if (*aux) out[t] = 1;""", 2, 32, kinds=("global_race",)),
    Program("a breakpoint", 'if (in[t] == 5) asm volatile("brkpt;");', 1, 32, kinds=("trap",),
            words="a breakpoint (brkpt), and there is no debugger"),
)  # fmt: skip
