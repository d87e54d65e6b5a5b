"""Programs with an mbarrier, whose lanes of one warp exchange values."""

from __future__ import annotations

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
)
WRONG_MBARRIERS = (
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
        BEGIN
        + """
  s[t] = in[t];
  unsigned matrix;
  asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];"
               : "=r"(matrix) : "r"(shared_address(s + t % 8 * 4)) : "memory");
  out[t] = matrix;""",
        1,
        32,
        MBARRIER,
        kinds=("shared_race",),
    ),
)
