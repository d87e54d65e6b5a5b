"""Programs with an mbarrier, whose lanes of one warp exchange values."""

from __future__ import annotations

import numpy as np
from judged_programs import COPIES, Program, each

MBARRIER = (
    COPIES
    + """
__device__ void init(unsigned long long* b, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(b)), "r"(count) : "memory");
}
__device__ void arrive(unsigned long long* b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(b)) : "memory");
}
__device__ void await(unsigned long long* b, int parity) {
  asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again; }"
               :: "r"(shared_address(b)), "r"(parity) : "memory");
}
"""
)
BEGIN = """
  __shared__ alignas(8) unsigned long long ready;
  __shared__ alignas(16) int s[256];
  if (t == 0) init(&ready, blockDim.x);
  __syncthreads();
"""
TURNED = each(lambda number: number ^ 1)


def exchange(between: str) -> str:
    """Each lane takes what its neighbour stored; ``between`` stands between the two."""
    return f"{BEGIN}  s[t] = in[t]; {between} out[t] = s[t ^ 1];"


MOST = "int most = t; for (int by = 16; by; by /= 2) most = max(most, __shfl_xor_sync(~0u, most, by));"
LOAD_MATRIX = """
  unsigned matrix;
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
               : "=r"(matrix) : "r"(shared_address(s + t % 8 * 4)) : "memory");
"""


def turned(between: str, store: str) -> str:
    """Each lane takes its neighbour's word, and stores to its own behind ``between``."""
    return f"{BEGIN}  s[t] = in[t]; __syncwarp(); int got = s[t ^ 5]; {between} {store} out[t] = got;"


def one_reads(then: str) -> str:
    """One lane of each two reads a word and gives it to all; then both do something with that word."""
    return f"""{BEGIN}
  s[t] = n;
  __syncwarp();
  int got = t % 2 ? 0 : s[t / 2];
  got = __shfl_sync(~0u, got, 0);
  {then}
  out[t] = got;"""


RIGHT_MBARRIERS = (
    Program("lanes exchange behind __syncwarp", exchange("__syncwarp();"), 1, 64, MBARRIER, want=TURNED),
    Program(
        "lanes exchange behind an mbarrier", exchange("arrive(&ready); await(&ready, 0);"), 1, 64, MBARRIER, want=TURNED
    ),
    Program(
        "every lane its own word, again and again",
        BEGIN + "for (int i = 0; i < 3; i++) { s[t] = i ? s[t] + 1 : in[t]; } out[t] = s[t];",
        1,
        64,
        MBARRIER,
        want=each(lambda number: number + 2),
    ),
    Program(
        "all lanes store one value, and read it",
        BEGIN + "s[0] = n; __syncwarp(); out[t] = s[0];",
        1,
        32,
        MBARRIER,
        want=each(lambda number: number * 0 + 200),
    ),
    Program(
        "a copy is read by its own lane, and by others behind __syncwarp",
        BEGIN
        + """
  copy16(s + 4 * t, in + 4 * t); commit(); wait<0>();
  int own = s[4 * t];
  __syncwarp();
  out[t] = own - s[4 * (t ^ 1)];""",
        1,
        32,
        MBARRIER,
        want=each(lambda number: 4 * (number - (number ^ 1))),
    ),
    Program(
        "lanes store where others have read, after a shuffle of all, beside an mbarrier",
        BEGIN
        + """
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
        MBARRIER,
        lambda grid, block: 3 * (np.arange(64) // 32 * 32 + 31 + (np.arange(64) ^ 5)) + 3,
    ),
    Program(
        "a word is read by others before a vote and by its own lane behind it, which stores to it",
        turned("__any_sync(~0u, got > 3);", "got += s[t]; s[t] = got;"),
        1,
        64,
        MBARRIER,
        each(lambda number: number + (number ^ 5)),
    ),
    Program(
        "two lanes count where one has read before a shuffle, beside an mbarrier",
        one_reads("atomicAdd(s + t / 2, 1);"),
        1,
        32,
        MBARRIER,
        each(lambda number: number * 0 + 200),
    ),
    Program(
        "two lanes store one value where one has read before a shuffle, beside an mbarrier",
        one_reads("s[t / 2] = 3; __syncwarp(); got += s[t / 2];"),
        1,
        32,
        MBARRIER,
        each(lambda number: number * 0 + 203),
    ),
    Program(
        "lanes store where a matrix was loaded from, beside an mbarrier",
        BEGIN + "s[t] = in[t]; __syncwarp();" + LOAD_MATRIX + "s[t] = -1; out[t] = matrix;",
        1,
        32,
        MBARRIER,
        each(lambda number: number),
    ),
    Program(
        "lanes store where others have read, after a load of a matrix, beside an mbarrier",
        turned(LOAD_MATRIX, "s[t] = got + matrix;"),
        1,
        32,
        MBARRIER,
        each(lambda number: number ^ 5),
    ),
)
WRONG_MBARRIERS = (
    Program(
        "lanes read what others have stored, after a shuffle, beside an mbarrier",
        exchange(MOST) + "out[t] += most;",
        1,
        64,
        MBARRIER,
        kinds=("shared_race",),
        words="read-after-write",
    ),
    Program(
        "lanes store where others have read, and have shuffled before that, beside an mbarrier",
        BEGIN + "s[t] = in[t]; __syncwarp();" + MOST + "int got = s[t ^ 5]; s[t] = got + most; out[t] = got;",
        1,
        64,
        MBARRIER,
        kinds=("shared_race",),
        words="write-after-read",
    ),
    Program(
        "lanes store where others have read, after a shuffle of some, beside an mbarrier",
        turned("got += __shfl_xor_sync(t % 32 < 16 ? 0xffffu : 0xffff0000u, t, 1);", "s[t ^ 16] = got;"),
        1,
        64,
        MBARRIER,
        kinds=("shared_race",),
        words="write-after-read",
    ),
    Program(
        "lanes store where others have stored, after a shuffle of all, beside an mbarrier",
        BEGIN + "s[t] = in[t];" + MOST + "s[t ^ 5] = most; __syncwarp(); out[t] = s[t];",
        1,
        64,
        MBARRIER,
        kinds=("shared_race",),
        words="write-after-write",
    ),
    Program(
        "lanes exchange with nothing between",
        exchange('asm volatile("" ::: "memory");'),
        1,
        64,
        MBARRIER,
        kinds=("shared_race",),
        words="lane 0 and lane 1 of warp 0",
    ),
    Program(
        "a lane stores where others have read since the last barrier",
        BEGIN + "s[t] = in[t]; __syncwarp(); int other = s[t ^ 1]; s[t] = other + 1; out[t] = s[t];",
        1,
        32,
        MBARRIER,
        kinds=("shared_race",),
        words="write-after-read",
    ),
    Program(
        "another lane's copy is read behind the own wait",
        BEGIN + "copy16(s + 4 * t, in + 4 * t); commit(); wait<0>(); out[t] = s[4 * (t ^ 1)];",
        1,
        32,
        MBARRIER,
        kinds=("shared_race",),
        words="without a __syncwarp between them",
    ),
    Program(
        "a matrix is loaded before the warp has met",
        BEGIN + "s[t] = in[t];" + LOAD_MATRIX + "out[t] = matrix;",
        1,
        32,
        MBARRIER,
        kinds=("shared_race",),
    ),
)
