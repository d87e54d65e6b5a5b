"""Programs with accesses of the scope of a block, which order nothing between blocks; and with plain reads beside
atomics of their own block or warp and of others."""

from __future__ import annotations

from judged_programs import ORDERED, Program, each, filled

RELEASE_CTA = """
__device__ void release_in_block(int* p, int v) {
  asm volatile("st.release.cta.global.s32 [%0], %1;" :: "l"(p), "r"(v) : "memory");
}
__device__ int acquire_in_block(const int* p) {
  int v; asm volatile("ld.acquire.cta.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory"); return v;
}
"""
RELEASE_CLUSTER = RELEASE_CTA.replace("in_block", "in_cluster").replace(".cta", ".cluster")
FENCED_CLUSTER = """
__device__ void release_in_cluster(volatile int* p, int v) {
  asm volatile("fence.acq_rel.cluster;" ::: "memory"); *p = v;
}
"""
HAND_OVER = """
  if (b == 0) {
    out[t] = in[t];
    __syncthreads();
    if (t == 0) RELEASE(aux, 1);
  } else {
    if (t == 0) { while (ACQUIRE(aux) == 0) { } }
    __syncthreads();
    out[64 + t] = out[t];
  }"""


def handed_over(release: str, acquire: str) -> str:
    """A block hands 32 words to another by a flag."""
    return HAND_OVER.replace("RELEASE", release).replace("ACQUIRE", acquire)


RIGHT_ATOMICS = (
    Program(
        "a counter of each block, and a flag within it",
        """
  if (t == 0) out[b] = 0;
  __syncthreads();
  if (t == 40) { aux[8 + b] = b; release_in_block(aux + b, 1); }
  if (t == 3) { while (acquire_in_block(aux + b) == 0) { } atomicAdd_block(out + b, aux[8 + b]); }
  atomicAdd_block(out + b, 1);""",
        4,
        64,
        RELEASE_CTA,
        want=lambda grid, block: each(lambda number: number + 64)(grid, 1),
    ),
    Program(
        "a flag of the scope of a cluster within a block",
        """
  if (t == 40) { aux[8 + b] = b; release_in_cluster(aux + b, 1); }
  if (t == 3) { while (acquire_in_cluster(aux + b) == 0) { } out[b] = aux[8 + b]; }""",
        4,
        64,
        RELEASE_CLUSTER,
        want=lambda grid, block: each(lambda number: number)(grid, 1),
    ),
    Program(
        "a flag of the scope of a cluster between its blocks",
        handed_over("release_in_cluster", "acquire_in_cluster"),
        2,
        32,
        RELEASE_CLUSTER,
        want=lambda grid, block: each(lambda number: number)(1, 32),
        attributes="__cluster_dims__(2, 1, 1)",
    ),
    Program(
        "a flag of the scope of the GPU between blocks",
        handed_over("store_release", "load_acquire"),
        2,
        32,
        ORDERED,
        want=lambda grid, block: each(lambda number: number)(1, 32),
    ),
    Program(
        "a sum read by the last block that counts",
        """
  __shared__ bool is_last;
  atomicAdd(aux, in[t]);
  __threadfence();
  __syncthreads();
  if (t == 0) is_last = atomicAdd(aux + 1, 1) == gridDim.x - 1;
  __syncthreads();
  if (is_last && t == 0) out[0] = aux[0];""",
        5,
        32,
        want=filled(lambda grid, block: grid * 496),
    ),
)
WRONG_ATOMICS = (
    Program(
        "released to the own block, awaited by another",
        handed_over("release_in_block", "load_acquire"),
        2,
        32,
        ORDERED + RELEASE_CTA,
        kinds=("global_race",),
        words=".cta orders threads of one block",
    ),
    Program(
        "awaited in the scope of a block, released to all",
        handed_over("store_release", "acquire_in_block"),
        2,
        32,
        ORDERED + RELEASE_CTA,
        kinds=("global_race",),
    ),
    Program(
        "released to a cluster of one block, awaited by another block",
        handed_over("release_in_cluster", "load_acquire"),
        2,
        32,
        ORDERED + RELEASE_CLUSTER,
        kinds=("global_race",),
        words=".cluster orders threads of one cluster",
    ),
    Program(
        "fenced for a cluster of one block, awaited by another block",
        handed_over("release_in_cluster", "load_acquire"),
        2,
        32,
        ORDERED + FENCED_CLUSTER,
        kinds=("global_race",),
    ),
    Program(
        "blocks count in one place with atomics of a block",
        "atomicAdd_block(aux + (in[t] & 7), 1);",
        4,
        32,
        kinds=("block_write_conflict",),
        words=".cta orders threads of one block",
    ),
    Program(
        "a sum read behind the block's own atomics",
        """
  atomicAdd(aux, in[t]);
  __syncthreads();
  if (b == 1 && t == 0) out[0] = aux[0];""",
        2,
        32,
        kinds=("global_race",),
        words="read-after-atomic",
    ),
    Program(
        "a shared sum read behind the warp's own atomics",
        """
  __shared__ int sum;
  if (t == 0) sum = 0;
  __syncthreads();
  atomicAdd(&sum, in[t]);
  __syncwarp();
  if (t == 40) out[0] = sum;""",
        1,
        64,
        kinds=("shared_race",),
        words="read-after-atomic",
    ),
)
