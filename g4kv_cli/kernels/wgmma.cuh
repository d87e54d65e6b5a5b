// Warpgroups: 128 threads that multiply together out of shared memory (wgmma, compute capability 9.0 alone).
//
// Operands in shared memory have the 128-byte swizzle: the 16-byte chunk of an address is exclusive-ored with the
// number of its 128-byte row, modulo 8.
#pragma once

namespace g4kv {

constexpr int kWarpgroupSize = 128;
constexpr int kSwizzleRowBytes = 128;
constexpr int kSwizzleAtomBytes = 8 * kSwizzleRowBytes;  // eight rows; the alignment of whatever is swizzled

template <int kRegisters>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Barrier `number` (1 to 15) of a warpgroup's own threads.
__device__ __forceinline__ void synchronize_warpgroup(int number) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(kWarpgroupSize) : "memory");
}

__device__ __forceinline__ void fence_wgmma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_wgmma() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending of the newest groups are still on their way.
template <int kPending>
__device__ __forceinline__ void wait_wgmma() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps what is computed from these values, and what they are computed from, on its own side of this place: a wait names
// no registers, and the compiler moves arithmetic past it.
template <int kTiles>
__device__ __forceinline__ void hold_order(float (&values)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(values[n][i])::"memory");
  }
}

// Keeps operands of a multiplication that is still on its way in their registers: to the assembler they are free once it
// has begun, and it waits for its end before it puts anything else there. `never`: false, which nobody can tell before.
__device__ __forceinline__ void hold_registers(const unsigned (&a)[4][4], unsigned address, bool never) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %17, 0;\n"
      "@p st.shared.v4.b32 [%16], {%0, %1, %2, %3};\n"
      "@p st.shared.v4.b32 [%16], {%4, %5, %6, %7};\n"
      "@p st.shared.v4.b32 [%16], {%8, %9, %10, %11};\n"
      "@p st.shared.v4.b32 [%16], {%12, %13, %14, %15};\n"
      "}" ::"r"(a[0][0]), "r"(a[0][1]), "r"(a[0][2]), "r"(a[0][3]), "r"(a[1][0]), "r"(a[1][1]), "r"(a[1][2]),
      "r"(a[1][3]), "r"(a[2][0]), "r"(a[2][1]), "r"(a[2][2]), "r"(a[2][3]), "r"(a[3][0]), "r"(a[3][1]), "r"(a[3][2]),
      "r"(a[3][3]), "r"(address), "r"((int)never)
      : "memory");
}

// Has a value worked out before a wait that follows: the assembler would do it behind the wait, and nothing would run
// beside the multiplication. The value is never negative, so nothing is stored.
__device__ __forceinline__ void hold_before_wait(float not_negative, unsigned address) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.lt.f32 p, %0, 0f00000000;\n"
      "@p st.shared.f32 [%1], %0;\n"
      "}" ::"f"(not_negative),
      "r"(address)
      : "memory");
}

// Lower half of the matrix descriptor of a swizzled operand; the upper half is the same for all. K-major: [rows][64
// columns], eight rows a kSwizzleAtomBytes. MN-major: [column block][k][64 columns], `leading_bytes` from one column
// block to the next (K-major: not used). An operand kBytes further on has kBytes / 16 more.
__device__ __forceinline__ unsigned matrix_descriptor(unsigned address, int leading_bytes) {
  return (address & 0x3ffffu) >> 4 | (unsigned)(leading_bytes >> 4) << 16;
}

// What all lanes of a warp have alike, as the compiler knows it: a multiplication takes its descriptors from registers
// that a warp has once, and with copies into these before each one it starts more slowly than it runs. Where a loop's
// end and what it starts from are known to be alike, so are the stages of rings and all else that it counts.
__device__ __forceinline__ unsigned same_in_warp(unsigned value) { return __shfl_sync(kAllLanes, value, 0); }

constexpr unsigned kDescriptorHigh = 1u << 30 | kSwizzleAtomBytes >> 4;  // 128-byte swizzle, and from atom to atom

// 8-column tiles of accumulators as asm operands.
#define G4KV_TILE(d, n) "+f"(d[n][0]), "+f"(d[n][1]), "+f"(d[n][2]), "+f"(d[n][3])
#define G4KV_TILES_4(d, n) G4KV_TILE(d, n), G4KV_TILE(d, n + 1), G4KV_TILE(d, n + 2), G4KV_TILE(d, n + 3)
#define G4KV_TILES_8(d, n) G4KV_TILES_4(d, n), G4KV_TILES_4(d, n + 4)
#define G4KV_TILES_16(d, n) G4KV_TILES_8(d, n), G4KV_TILES_8(d, n + 8)
#define G4KV_TILES_32(d, n) G4KV_TILES_16(d, n), G4KV_TILES_16(d, n + 16)
#define G4KV_SUMS_0_31                                                              \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define G4KV_SUMS_32_63                                                             \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define G4KV_SUMS_64_95                                                             \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define G4KV_SUMS_96_127                                                                      \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

// sum[64 rows][N columns] (+)= A[64][16] B[N][16]^T, both K-major in shared memory, kOffsetA and kOffsetB bytes behind
// what the descriptors name. Asynchronous. Offsets are added in here: the compiler would keep all addresses in registers.
#define G4KV_MULTIPLY_ROWS(columns, tiles, operands, sums, a_at, b_at, offset_a_at, offset_b_at, high_at, accumulate_at) \
  template <int kOffsetA, int kOffsetB, bool kAccumulate>                                                             \
  __device__ __forceinline__ void multiply_rows_##columns(float(&sum)[tiles][4], unsigned a, unsigned b) {            \
    asm volatile(                                                                                                     \
        "{\n"                                                                                                         \
        ".reg .b32 low_a, low_b;\n"                                                                                   \
        ".reg .b64 a, b;\n"                                                                                           \
        ".reg .pred accumulate;\n"                                                                                    \
        "add.u32 low_a, " a_at ", " offset_a_at ";\n"                                                                 \
        "add.u32 low_b, " b_at ", " offset_b_at ";\n"                                                                 \
        "mov.b64 a, {low_a, " high_at "};\n"                                                                          \
        "mov.b64 b, {low_b, " high_at "};\n"                                                                          \
        "setp.ne.b32 accumulate, " accumulate_at ", 0;\n"                                                             \
        "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 {" sums "}, a, b, accumulate, 1, 1, 0, 0;\n"  \
        "}"                                                                                                           \
        : operands(sum, 0)                                                                                            \
        : "r"(a), "r"(b), "n"(kOffsetA >> 4), "n"(kOffsetB >> 4), "n"(kDescriptorHigh), "n"(kAccumulate ? 1 : 0)      \
        : "memory");                                                                                                  \
  }

G4KV_MULTIPLY_ROWS(64, 8, G4KV_TILES_8, G4KV_SUMS_0_31, "%32", "%33", "%34", "%35", "%36", "%37")
G4KV_MULTIPLY_ROWS(128, 16, G4KV_TILES_16, G4KV_SUMS_0_31 ", " G4KV_SUMS_32_63, "%64", "%65", "%66", "%67", "%68", "%69")

// sum[64 rows][N columns] += A[64][16] B[16][N], A in registers, B MN-major in shared memory, kOffsetBytes behind what
// the descriptor names. Asynchronous.
#define G4KV_MULTIPLY_COLUMNS(columns, tiles, operands, sums, a_at, b_at, offset_at, high_at)                         \
  template <int kOffsetBytes>                                                                                         \
  __device__ __forceinline__ void multiply_columns_##columns(float(&sum)[tiles][4], const unsigned(&a)[4],            \
                                                             unsigned b) {                                            \
    asm volatile(                                                                                                     \
        "{\n"                                                                                                         \
        ".reg .b32 low_b;\n"                                                                                          \
        ".reg .b64 b;\n"                                                                                              \
        "add.u32 low_b, " b_at ", " offset_at ";\n"                                                                   \
        "mov.b64 b, {low_b, " high_at "};\n"                                                                          \
        "wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 {" sums "}, {" a_at "}, b, 1, 1, 1, 1;\n"     \
        "}"                                                                                                           \
        : operands(sum, 0)                                                                                            \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(kOffsetBytes >> 4), "n"(kDescriptorHigh)            \
        : "memory");                                                                                                  \
  }

G4KV_MULTIPLY_COLUMNS(64, 8, G4KV_TILES_8, G4KV_SUMS_0_31, "%32, %33, %34, %35", "%36", "%37", "%38")
G4KV_MULTIPLY_COLUMNS(128, 16, G4KV_TILES_16, G4KV_SUMS_0_31 ", " G4KV_SUMS_32_63, "%64, %65, %66, %67", "%68", "%69",
                      "%70")
G4KV_MULTIPLY_COLUMNS(256, 32, G4KV_TILES_32,
                      G4KV_SUMS_0_31 ", " G4KV_SUMS_32_63 ", " G4KV_SUMS_64_95 ", " G4KV_SUMS_96_127,
                      "%128, %129, %130, %131", "%132", "%133", "%134")

// sum[64 rows][64 columns] (+)= A[64][16] B[64][16]^T, A in registers, B K-major in shared memory, kOffsetBytes behind what
// the descriptor names. Asynchronous.
template <int kOffsetBytes, bool kAccumulate>
__device__ __forceinline__ void multiply_held_rows_64(float (&sum)[8][4], const unsigned (&a)[4], unsigned b) {
  asm volatile(
      "{\n"
      ".reg .b32 low_b;\n"
      ".reg .b64 b;\n"
      ".reg .pred accumulate;\n"
      "add.u32 low_b, %36, %37;\n"
      "mov.b64 b, {low_b, %38};\n"
      "setp.ne.b32 accumulate, %39, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" G4KV_SUMS_0_31
      "}, {%32, %33, %34, %35}, b, accumulate, 1, 1, 0;\n"
      "}"
      : G4KV_TILES_8(sum, 0)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(kOffsetBytes >> 4), "n"(kDescriptorHigh),
        "n"(kAccumulate ? 1 : 0)
      : "memory");
}

#undef G4KV_MULTIPLY_COLUMNS
#undef G4KV_MULTIPLY_ROWS
#undef G4KV_SUMS_96_127
#undef G4KV_SUMS_64_95
#undef G4KV_SUMS_32_63
#undef G4KV_SUMS_0_31
#undef G4KV_TILES_32
#undef G4KV_TILES_16
#undef G4KV_TILES_8
#undef G4KV_TILES_4
#undef G4KV_TILE

}  // namespace g4kv
