"""Wrong programs, each with the kinds of which one has to be found."""

from __future__ import annotations

from judged_programs import COPIES, FENCE, LAST_BLOCK, LOCK, ORDERED, RESET, TICKET, TREE, VOLATILE, Program

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
        besides=("shared_race",),
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
    Program(
        "a last block without a fence",
        LAST_BLOCK.replace("FENCE", ""),
        6,
        64,
        VOLATILE,
        kinds=("global_race",),
        besides=("block_write_conflict",),
    ),
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
        "a flag that plain loads wait for",
        """
  if (t == 0) { while (*aux != b) __threadfence(); }
  __syncthreads();
  out[t] += b;
  __threadfence();
  __syncthreads();
  if (t == 0) atomicAdd(aux, 1);""",
        4,
        64,
        kinds=("global_race",),
    ),
    Program(
        "lanes read what others of their warp stored, after a shuffle",
        """
  __shared__ int s[64];
  s[t] = t;
  int most = __shfl_xor_sync(~0u, t, 16);
  out[t] = s[t ^ 5] + most;""",
        1,
        64,
        kinds=("shared_race",),
    ),
    Program(
        "lanes store where others of their warp have read, after a shuffle of some",
        """
  __shared__ int s[64];
  s[t] = t;
  __syncwarp();
  int got = s[t ^ 5];
  got += __shfl_xor_sync(t % 32 < 16 ? 0xffffu : 0xffff0000u, t, 1);
  s[t ^ 16] = got;
  out[t] = got;""",
        1,
        64,
        kinds=("shared_race",),
    ),
    Program(
        "a counter that a block resets that did not wait for all who count",
        """
  if (t == 0 && b < 3) { __threadfence(); atomicAdd(aux, 1); }
  if (t == 0 && b == 3) { while (*(volatile int*)(aux + 1) == 0) { } *aux = 0; }
  if (t == 0 && b == 2) { __threadfence(); atomicExch(aux + 1, 1); }""",
        4,
        32,
        kinds=("block_write_conflict",),
    ),
    Program(
        "a flag in shared memory that is not cleared first",
        """
  __shared__ int found;
  if (in[t] > 5000) found = in[t];
  __syncthreads();
  if (found) out[t] = 1;""",
        1,
        64,
        kinds=("shared_uninitialised_read",),
    ),
    Program(
        "the least of zero and what nobody wrote",
        "((float*)aux)[t] = fminf(((float*)out)[t], 0.0f);",
        1,
        32,
        kinds=("uninitialised_read",),
        out_is_new=True,
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
    Program(
        "a shared flag that is not volatile, so that it is read once",
        """
  __shared__ int ready;
  if (t == 0) ready = 0;
  __syncthreads();
  if (t == 40) { __threadfence_block(); ready = 1; }
  if (t < 32) { while (ready == 0) { } }
  __syncthreads();
  out[t] = 1;""",
        1,
        64,
        kinds=("endless_wait",),
        words="a loop without an exit; was what it waits for to be volatile?",
    ),
)
