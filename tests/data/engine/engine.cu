// C launchers of the kernels in kernels.cu, as an engine has them.
#include <cuda_runtime.h>

#include "kernels.cu"

namespace {

thread_local const char* last_error = "";

int refuse(const char* why) {
  last_error = why;
  return 1;
}

int launched() {
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess) last_error = cudaGetErrorString(error);
  return error;
}

}  // namespace

extern "C" int engine_attention(const void* q, const void* k_pool, const void* v_pool, void* out, float* lse,
                                const int32_t* table, int table_width, const int32_t* positions,
                                const int32_t* requests, const int32_t* origins, int tokens, int num_qo_heads,
                                int num_kv_heads, int head_dim, float scale, int window_left, int64_t stride_page,
                                int64_t stride_slot, int64_t stride_head, int page_size, cudaStream_t stream) {
  using T = __nv_bfloat16;
  const dim3 grid(tokens, num_qo_heads);
  auto* kernel = head_dim == 256 ? attention<256> : attention<512>;
  if (head_dim != 256 && head_dim != 512) return refuse("head_dim must be 256 or 512");
  kernel<<<grid, 256, 0, stream>>>((const T*)q, (const T*)k_pool, (const T*)v_pool, (T*)out, lse, table, table_width,
                                   positions, requests, origins, num_qo_heads, num_qo_heads / num_kv_heads, scale,
                                   window_left, stride_page, stride_slot, stride_head, page_size);
  return launched();
}

extern "C" const char* engine_last_error() { return last_error; }

extern "C" int engine_prep(const void* q, const void* k, const void* v, const void* q_weight, const void* k_weight,
                           const void* cos, const void* sin, void* q_out, void* k_pool, void* v_pool,
                           const int32_t* positions, const int64_t* slots, int tokens, int num_qo_heads,
                           int num_kv_heads, int head_dim, int rotary_dim, float eps, int64_t stride_page,
                           int64_t stride_slot, int64_t stride_head, int page_size, cudaStream_t stream) {
  if (num_kv_heads < 1 || num_qo_heads % num_kv_heads != 0) return refuse("num_qo_heads is no multiple of num_kv_heads");
  using T = __nv_bfloat16;
  const bool key_is_value = v == nullptr;
  const dim3 grid(tokens, num_qo_heads + (key_is_value ? 1 : 2) * num_kv_heads);
#define LAUNCH(DIM, KEY_IS_VALUE)                                                                                   \
  prep<DIM, KEY_IS_VALUE><<<grid, DIM, 0, stream>>>(                                                                \
      (const T*)q, (const T*)k, (const T*)v, (const T*)q_weight, (const T*)k_weight, (const T*)cos, (const T*)sin,  \
      (T*)q_out, (T*)k_pool, (T*)v_pool, positions, slots, num_qo_heads, num_kv_heads, rotary_dim, eps, stride_page, \
      stride_slot, stride_head, page_size)
  if (head_dim == 256)
    LAUNCH(256, false);
  else if (head_dim == 512 && key_is_value)
    LAUNCH(512, true);
  else if (head_dim == 512)
    LAUNCH(512, false);
  else
    return refuse("head_dim must be 256 or 512");
#undef LAUNCH
  return launched();
}
