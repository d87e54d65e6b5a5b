// Decode in the conventions of Hopper kernels: pages come by bulk tensor copies, K's through a tensor map that is an
// argument, V's through one in a struct of parameters, and the launch may begin before the one in front has ended.
#include "kernels.cu"

struct alignas(64) TensorMap {
  char bytes[128];  // CUtensorMap
};

struct Parameters {
  int32_t width, page_size, num_qo_heads, group, window_left;
  float scale;
  TensorMap values;
};

__device__ unsigned shared_address(const void* at) { return static_cast<unsigned>(__cvta_generic_to_shared(at)); }

// The page's rows of one head: the box is [1 page][page_size slots][1 head][256], the innermost first in coordinates.
__device__ void copy(const TensorMap& map, void* to, int head, int page, unsigned barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];"
      ::"r"(shared_address(to)), "l"(&map), "r"(0), "r"(head), "r"(0), "r"(page), "r"(barrier)
      : "memory");
}

// One block a (request, query head), a thread a column of 256.
extern "C" __global__ void map_attention(const __grid_constant__ TensorMap keys, const __grid_constant__ Parameters p,
                                         const __nv_bfloat16* q, __nv_bfloat16* out, const int32_t* table,
                                         const int32_t* kv_lens, const int32_t* origins) {
  extern __shared__ __align__(128) __nv_bfloat16 pages[];
  __shared__ float scratch[8];
  __shared__ __align__(8) unsigned long long arrived;
  const int request = blockIdx.x, head = blockIdx.y, dim = threadIdx.x, last = kv_lens[request] - 1;
  const unsigned barrier = shared_address(&arrived);
  __nv_bfloat16 *k = pages, *v = pages + p.page_size * 256;
  if (dim == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barrier) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
  __syncthreads();
  const int64_t row = (int64_t(request) * p.num_qo_heads + head) * 256 + dim;
  const float query = __bfloat162float(q[row]);
  float most = -kInfinity, total = 0.0f, value = 0.0f;
  const int first = p.window_left < 0 ? 0 : max(0, last - p.window_left);
  unsigned phase = 0;
  for (int key = first; key <= last;) {
    __syncthreads();  // everybody is done with the page before
    const int page = table[request * p.width + key / p.page_size - origins[request]];
    if (dim == 0) {
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(p.page_size * 1024) : "memory");
      copy(keys, k, head / p.group, page, barrier);
      copy(p.values, v, head / p.group, page, barrier);
    }
    asm volatile(
        "{ .reg .pred done;\n"
        "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@!done bra again; }" ::"r"(barrier), "r"(phase)
        : "memory");
    phase ^= 1;
    for (const int end = min(last + 1, (key / p.page_size + 1) * p.page_size); key < end; ++key) {
      const int slot = key % p.page_size;
      const float score = p.scale * sum_of_block(query * __bfloat162float(k[slot * 256 + dim]), scratch);
      __syncthreads();
      const float larger = fmaxf(most, score), fade = expf(most - larger), weight = expf(score - larger);
      total = total * fade + weight;
      value = value * fade + weight * __bfloat162float(v[slot * 256 + dim]);
      most = larger;
    }
  }
  out[row] = __float2bfloat16(value / total);
}
