"""Right programs that look wrong."""

from __future__ import annotations

import numpy as np
from judged_programs import LAST_BLOCK, LOCK, RESET, TICKET, VOLATILE, Program, each, filled, sum_of

RIGHT = (
    Program(
        "the last warp of a block by a shared ticket",
        TICKET.replace("FENCE", "__threadfence_block();"),
        1,
        256,
        VOLATILE,
        sum_of,
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
        "a last block by fence and ticket", LAST_BLOCK.replace("FENCE", "__threadfence();"), 6, 64, VOLATILE, sum_of
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
        "lanes store where others of their warp have read, after a shuffle of all",
        """
  __shared__ int s[64];
  int sum = 0;
  for (int turn = 0; turn < 3; ++turn) {
    int most = t + turn;
    for (int by = 16; by; by /= 2) most = max(most, __shfl_xor_sync(~0u, most, by));
    s[t] = most + t;
    __syncwarp();
    sum += s[t ^ 5];
  }
  out[t] = sum;""",
        1,
        64,
        "",
        lambda grid, block: 3 * (np.arange(64) // 32 * 32 + 31 + (np.arange(64) ^ 5)) + 3,
    ),
    Program(
        "lanes store where others of their warp have read, after a load of a matrix from elsewhere",
        """
  __shared__ __align__(16) int s[64];
  s[t] = t; s[t + 32] = 2 * t;
  __syncwarp();
  int a, got = s[(t ^ 5) + 32];
  unsigned at = (unsigned)__cvta_generic_to_shared(s + t % 8 * 4);
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 %0, [%1];" : "=r"(a) : "r"(at) : "memory");
  s[t + 32] = -1;
  out[t] = got + a;""",
        1,
        32,
        "",
        lambda grid, block: 2 * (np.arange(32) ^ 5) + np.arange(32),
    ),
    Program(
        "lanes store where a matrix was loaded from",
        """
  __shared__ __align__(16) int s[64];
  s[t] = t; s[t + 32] = t;
  __syncwarp();
  int a;
  unsigned at = (unsigned)__cvta_generic_to_shared(s + t % 8 * 4);
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 %0, [%1];" : "=r"(a) : "r"(at));
  s[t] = -1;
  out[t] = a;""",
        1,
        32,
        "",
        lambda grid, block: np.arange(32),
    ),
    Program(
        "a turn that an atomic gives on, and the last takes back with a plain store",
        """
  if (t == 0) { while (V(aux) != gridDim.x - 1 - b) { } __threadfence(); }
  __syncthreads();
  out[t] += b;
  __syncthreads();
  if (t == 0 && b > 0) { __threadfence(); atomicAdd(aux, 1); }
  if (t == 31 && b == 0) *aux = 0;""",
        4,
        64,
        VOLATILE,
        filled(lambda grid, block: 5),
    ),
    Program(
        "a flag that loads past the first cache wait for",
        """
  if (t == 0) { while (__ldcg(aux) != gridDim.x - 1 - b) { } __threadfence(); }
  __syncthreads();
  out[t] += b;
  __threadfence();
  __syncthreads();
  if (t == 0) atomicAdd(aux, 1);""",
        4,
        64,
        "",
        filled(lambda grid, block: 5),
    ),
    Program(
        "a flag in shared memory that loads with hints wait for",
        """
  __shared__ int flag;
  if (t == 0) flag = 0;
  __syncthreads();
  const unsigned at = (unsigned)__cvta_generic_to_shared(&flag);
  int found;
  if (t == 32) {
    do asm volatile("fence.acq_rel.gpu; ld.weak.shared::cta.u32 %0, [%1];" : "=r"(found) : "r"(at) : "memory");
    while (!found);
    do asm volatile("fence.acq_rel.gpu; ld.global.cg.L2::cache_hint.u32 %0, [%1], %2;"
                    : "=r"(found) : "l"(aux), "l"(0ull) : "memory");
    while (!found);
    out[0] = 5;
  }
  if (t == 0) {
    *(volatile int*)&flag = 1;
    atomicAdd(aux, 1);
  }""",
        1,
        64,
        "",
        filled(lambda grid, block: 5),
    ),
    Program(
        "a turn that volatile stores give on",
        """
  if (t == 0) { while (V(aux) != b) { } __threadfence(); }
  __syncthreads();
  out[t] += b;
  __threadfence();
  __syncthreads();
  if (t == 0) V(aux) = b + 1;""",
        4,
        64,
        VOLATILE,
        filled(lambda grid, block: 5),
    ),
    Program(
        "rows behind the last that are computed and not stored",
        """
  __shared__ float row[64];
  if (t < 40) row[t] = in[t];
  __syncthreads();
  float value = *(volatile float*)&row[t];
  int turns = 0;
  while (value > 1) { value *= 0.5f; ++turns; }
  if (t < 40) out[t] = turns;""",
        1,
        64,
        "",
        lambda grid, block: np.ceil(np.log2(np.maximum(np.arange(40), 1))),
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
