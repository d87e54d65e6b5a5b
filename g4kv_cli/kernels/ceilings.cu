// What plain kernels reach on this card: the rates and the launch time that measurements are held against.
// 16 bytes an access; variants with 2, 4 and 8 accesses in flight a thread, of which the fastest counts.
namespace g4kv {

// The Python twin is bench/ceilings.py:CeilingParameters.
struct CeilingParams {
  const uint4* source;   // [vectors]
  uint4* destination;    // [vectors]; reading stores to element 0 at most
  long long vectors;
};

static_assert(sizeof(CeilingParams) == 24, "bench/ceilings.py states this size");

// access n of a thread: source[block][n][thread]
template <int kAccesses>
__device__ __forceinline__ long long vector_index(int n) {
  return ((long long)blockIdx.x * kAccesses + n) * blockDim.x + threadIdx.x;
}

template <int kAccesses>
__device__ __forceinline__ void copy(const CeilingParams& params) {
  uint4 held[kAccesses];
#pragma unroll
  for (int n = 0; n < kAccesses; ++n) {
    const long long index = vector_index<kAccesses>(n);
    if (index < params.vectors) held[n] = params.source[index];
  }
#pragma unroll
  for (int n = 0; n < kAccesses; ++n) {
    const long long index = vector_index<kAccesses>(n);
    if (index < params.vectors) params.destination[index] = held[n];
  }
}

// Reads everything and stores next to nothing: the store depends on all loads, so none can be dropped.
template <int kAccesses>
__device__ __forceinline__ void read(const CeilingParams& params) {
  uint4 held[kAccesses];
#pragma unroll
  for (int n = 0; n < kAccesses; ++n) {
    const long long index = vector_index<kAccesses>(n);
    held[n] = index < params.vectors ? params.source[index] : make_uint4(0, 0, 0, 0);
  }
  uint4 sum = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int n = 0; n < kAccesses; ++n) {
    sum.x ^= held[n].x;
    sum.y ^= held[n].y;
    sum.z ^= held[n].z;
    sum.w ^= held[n].w;
  }
  // One value of 2^64: no real data holds it by chance.
  if ((sum.x ^ sum.y) == 0x9e3779b9u && (sum.z ^ sum.w) == 0x7f4a7c15u) params.destination[0] = sum;
}

// The Python twin is bench/clock.py:ClockParameters.
struct ClockParams {
  unsigned long long* reading;  // [3]: cycles of the multiprocessor that the block ran on, nanoseconds, which it is
};

static_assert(sizeof(ClockParams) == 8, "bench/clock.py states this size");

}  // namespace g4kv

// One thread. Two readings of one multiprocessor are its mean clock between them, whatever ran there.
extern "C" __global__ void ceiling_clock(const g4kv::ClockParams params) {
  unsigned long long cycles, nanoseconds;
  unsigned multiprocessor;
  asm volatile("mov.u64 %0, %%clock64;" : "=l"(cycles));
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(nanoseconds));
  asm volatile("mov.u32 %0, %%smid;" : "=r"(multiprocessor));
  params.reading[0] = cycles;
  params.reading[1] = nanoseconds;
  params.reading[2] = multiprocessor;
}

#define G4KV_CEILINGS(accesses)                                                                               \
  extern "C" __global__ void __launch_bounds__(256) ceiling_copy_##accesses(const g4kv::CeilingParams params) { \
    g4kv::copy<accesses>(params);                                                                             \
  }                                                                                                           \
  extern "C" __global__ void __launch_bounds__(256) ceiling_read_##accesses(const g4kv::CeilingParams params) { \
    g4kv::read<accesses>(params);                                                                             \
  }

G4KV_CEILINGS(2)
G4KV_CEILINGS(4)
G4KV_CEILINGS(8)

extern "C" __global__ void ceiling_empty(const g4kv::CeilingParams) {}
