// Atomics of the less common types, and the orders of modifiers that libcu++ and inline assembly use.
#include <cuda/atomic>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

extern "C" __global__ void add_double(double* sum, double* part, const double* in) {
  __shared__ double total;
  if (threadIdx.x == 0) total = 0;
  __syncthreads();
  atomicAdd(&total, in[threadIdx.x]);
  atomicAdd(sum, in[threadIdx.x]);
  __syncthreads();
  if (threadIdx.x == 0) *part = total;
}
extern "C" __global__ void add_half(__half* h, __half2* h2, __nv_bfloat16* b, __nv_bfloat162* b2) {
  atomicAdd(h, __float2half(0.5f));
  atomicAdd(h2, __floats2half2_rn(1.0f, 2.0f));
  atomicAdd(b, __float2bfloat16(0.25f));
  atomicAdd(b2, __floats2bfloat162_rn(0.5f, 1.0f));
}
extern "C" __global__ void cas_short(unsigned short* value, unsigned short* found) {
  unsigned short old = atomicCAS(value + threadIdx.x, (unsigned short)(threadIdx.x & ~1u), (unsigned short)77);
  found[threadIdx.x] = old;
}
extern "C" __global__ void libcuxx(int* counter, int* highest, int* flag) {
  cuda::atomic_ref<int, cuda::thread_scope_device> c(*counter), h(*highest);
  cuda::atomic_ref<int, cuda::thread_scope_block> f(*flag);
  c.fetch_add(2, cuda::memory_order_relaxed);
  c.fetch_add(1);
  h.fetch_max((int)threadIdx.x * 7 % 31, cuda::memory_order_acquire);
  f.fetch_or(1 << (threadIdx.x % 5), cuda::memory_order_acq_rel);
  int expected = 10;
  h.compare_exchange_strong(expected, 10);
  if (threadIdx.x == 0) f.store(f.load(cuda::memory_order_acquire) | 64, cuda::memory_order_release);
}
extern "C" __global__ void vector_add(float* out) {
#if __CUDA_ARCH__ >= 900
  float4 old;
  asm volatile("atom.global.add.v4.f32 {%0, %1, %2, %3}, [%4], {%5, %6, %7, %8};"
               : "=f"(old.x), "=f"(old.y), "=f"(old.z), "=f"(old.w)
               : "l"(out), "f"(1.0f), "f"(2.0f), "f"(3.0f), "f"(4.0f) : "memory");
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(out + 4), "f"(0.5f), "f"(0.25f) : "memory");
#endif
}
extern "C" __global__ void modifier_orders(unsigned* out, unsigned* found) {
  unsigned old;
  asm volatile("atom.add.relaxed.gpu.global.u32 %0, [%1], 1;" : "=r"(old) : "l"(out) : "memory");
  found[threadIdx.x] = old;
  asm volatile("red.add.release.gpu.global.s32 [%0], 2;" ::"l"(out + 1) : "memory");
  asm volatile("atom.max.acquire.cta.u32 %0, [%1], %2;" : "=r"(old) : "l"(out + 2), "r"(threadIdx.x) : "memory");
}
extern "C" __global__ void ldmatrix_order(unsigned* out, const unsigned* in) {
  __shared__ alignas(16) unsigned tile[128];
  for (int k = 0; k < 4; k++) tile[threadIdx.x + 32 * k] = in[threadIdx.x + 32 * k];
  __syncwarp();
  unsigned at = (unsigned)__cvta_generic_to_shared(tile) + 16 * threadIdx.x, r[4];
  asm volatile("ldmatrix.sync.aligned.trans.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
  for (int k = 0; k < 4; k++) out[4 * threadIdx.x + k] = r[k];
}
