// What plain kernels reach on this card: the rates and the launch time that measurements are held against.
// 16 bytes an access, four in flight a thread.
namespace g4kv {

constexpr int kVectorsPerThread = 4;

// The Python twin is bench/ceilings.py:CeilingParameters.
struct CeilingParams {
  const uint4* source;   // [vectors]
  uint4* destination;    // [vectors]; reading stores to element 0 at most
  long long vectors;
};

static_assert(sizeof(CeilingParams) == 24, "bench/ceilings.py states this size");

// vector n of a thread: source[block][n][thread]
__device__ __forceinline__ long long vector_index(int n) {
  return ((long long)blockIdx.x * kVectorsPerThread + n) * blockDim.x + threadIdx.x;
}

}  // namespace g4kv

extern "C" __global__ void __launch_bounds__(256) ceiling_copy(const g4kv::CeilingParams params) {
  uint4 held[g4kv::kVectorsPerThread];
#pragma unroll
  for (int n = 0; n < g4kv::kVectorsPerThread; ++n) {
    const long long index = g4kv::vector_index(n);
    if (index < params.vectors) held[n] = params.source[index];
  }
#pragma unroll
  for (int n = 0; n < g4kv::kVectorsPerThread; ++n) {
    const long long index = g4kv::vector_index(n);
    if (index < params.vectors) params.destination[index] = held[n];
  }
}

// Reads everything and stores next to nothing: the store depends on all loads, so none can be dropped.
extern "C" __global__ void __launch_bounds__(256) ceiling_read(const g4kv::CeilingParams params) {
  uint4 sum = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int n = 0; n < g4kv::kVectorsPerThread; ++n) {
    const long long index = g4kv::vector_index(n);
    if (index < params.vectors) {
      const uint4 value = params.source[index];
      sum.x ^= value.x;
      sum.y ^= value.y;
      sum.z ^= value.z;
      sum.w ^= value.w;
    }
  }
  // One value of 2^64: no real data holds it by chance.
  if ((sum.x ^ sum.y) == 0x9e3779b9u && (sum.z ^ sum.w) == 0x7f4a7c15u) params.destination[0] = sum;
}

extern "C" __global__ void ceiling_empty(const g4kv::CeilingParams) {}
