// The kernels of a small engine of the kind that g4kv gates: plain parameters, a page-first pool by strides. Written to be
// read, not to be fast. engine.cu has C launchers for them; kernels.toml launches them without.
#include <cuda_bf16.h>
#include <cuda/std/cstdint>

using int32_t = cuda::std::int32_t;
using int64_t = cuda::std::int64_t;

// <cuda/std/limits> has it too, and takes six times as long to compile as all kernels here.
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

__device__ float sum_of_block(float value, float* scratch) {
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  float total = 0.0f;
  for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) total += scratch[warp];
  return total;
}

// One block a (token, head row): rows of Q, then K, then V; a thread a column.
template <int kDim, bool kKeyIsValue>
__global__ void prep(const __nv_bfloat16* q, const __nv_bfloat16* k, const __nv_bfloat16* v, const __nv_bfloat16* q_weight,
                     const __nv_bfloat16* k_weight, const __nv_bfloat16* cos, const __nv_bfloat16* sin,
                     __nv_bfloat16* q_out, __nv_bfloat16* k_pool, __nv_bfloat16* v_pool, const int32_t* positions,
                     const int64_t* slots, int num_qo_heads, int num_kv_heads, int rotary_dim, float eps,
                     int64_t stride_page, int64_t stride_slot, int64_t stride_head, int page_size) {
  __shared__ float scratch[kDim / 32];
  __shared__ float row[kDim];
  const int64_t token = blockIdx.x;
  const int band = blockIdx.y, dim = threadIdx.x;
  const bool is_q = band < num_qo_heads;
  const bool is_k = !is_q && band < num_qo_heads + num_kv_heads;
  const int head = is_q ? band : (band - num_qo_heads) % num_kv_heads;
  // q[token][head][dim], k and v likewise
  const int heads = is_q ? num_qo_heads : num_kv_heads;
  const __nv_bfloat16* source = is_q ? q : is_k ? k : v;
  const float x = __bfloat162float(source[(token * heads + head) * kDim + dim]);
  const float scale = 1.0f / sqrtf(sum_of_block(x * x, scratch) / kDim + eps);
  // pool[page][..][slot][head][dim]
  const int64_t slot = slots[token];
  const int64_t place = slot / page_size * stride_page + slot % page_size * stride_slot + head * stride_head + dim;
  if (!is_q && !is_k) {
    v_pool[place] = __float2bfloat16(x * scale);
    return;
  }
  if (is_k && kKeyIsValue) v_pool[place] = __float2bfloat16(x * scale);
  row[dim] = x * scale * __bfloat162float((is_q ? q_weight : k_weight)[dim]);
  __syncthreads();
  float turned = row[dim];
  if (dim < rotary_dim) {
    const int half = rotary_dim / 2;
    const int64_t at = int64_t(positions[token]) * rotary_dim + dim;
    const float other = dim < half ? -row[dim + half] : row[dim - half];
    turned = row[dim] * __bfloat162float(cos[at]) + other * __bfloat162float(sin[at]);
  }
  if (is_q)
    q_out[(token * num_qo_heads + head) * kDim + dim] = __float2bfloat16(turned);
  else
    k_pool[place] = __float2bfloat16(turned);
}

// One block a (token, query head), eight warps that take the visible keys in turn, each with a softmax of its own; then
// the warps' results are merged. A lane has kDim / 32 neighbouring columns.
template <int kDim>
__global__ void attention(const __nv_bfloat16* q, const __nv_bfloat16* k_pool, const __nv_bfloat16* v_pool,
                          __nv_bfloat16* out, float* lse, const int32_t* table, int table_width,
                          const int32_t* positions, const int32_t* requests, const int32_t* origins, int num_qo_heads,
                          int group, float scale, int window_left, int64_t stride_page, int64_t stride_slot,
                          int64_t stride_head, int page_size) {
  constexpr int kColumns = kDim / 32, kWarps = 8;
  __shared__ float merged[kWarps][kDim], maxima[kWarps], sums[kWarps];
  const int64_t token = blockIdx.x;
  const int head = blockIdx.y, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int request = requests[token], position = positions[token];
  const int first = window_left < 0 ? 0 : max(0, position - window_left);
  float query[kColumns], sum_of_values[kColumns], most = -kInfinity, total = 0.0f;
  for (int c = 0; c < kColumns; ++c) {
    // q[token][head][dim]
    query[c] = __bfloat162float(q[(token * num_qo_heads + head) * kDim + lane * kColumns + c]);
    sum_of_values[c] = 0.0f;
  }
  for (int key = first + warp; key <= position; key += kWarps) {
    // table[request][page - origin]
    const int64_t page = table[int64_t(request) * table_width + key / page_size - origins[request]];
    // pool[page][..][slot][head][dim]
    const int64_t place = page * stride_page + key % page_size * stride_slot + head / group * stride_head + lane * kColumns;
    float score = 0.0f;
    for (int c = 0; c < kColumns; ++c) score += query[c] * __bfloat162float(k_pool[place + c]);
    for (int step = 16; step > 0; step /= 2) score += __shfl_xor_sync(0xffffffffu, score, step);
    score *= scale;
    const float larger = fmaxf(most, score), fade = expf(most - larger), weight = expf(score - larger);
    total = total * fade + weight;
    for (int c = 0; c < kColumns; ++c)
      sum_of_values[c] = sum_of_values[c] * fade + weight * __bfloat162float(v_pool[place + c]);
    most = larger;
  }
  for (int c = 0; c < kColumns; ++c) merged[warp][lane * kColumns + c] = sum_of_values[c];
  if (lane == 0) {
    maxima[warp] = most;
    sums[warp] = total;
  }
  __syncthreads();
  float largest = maxima[0], all = 0.0f;
  for (int w = 1; w < kWarps; ++w) largest = fmaxf(largest, maxima[w]);
  for (int w = 0; w < kWarps; ++w) all += sums[w] * expf(maxima[w] - largest);
  for (int dim = threadIdx.x; dim < kDim; dim += 32 * kWarps) {
    float value = 0.0f;
    for (int w = 0; w < kWarps; ++w) value += merged[w][dim] * expf(maxima[w] - largest);
    out[(token * num_qo_heads + head) * kDim + dim] = __float2bfloat16(value / all);
  }
  if (lse != nullptr && threadIdx.x == 0) lse[token * num_qo_heads + head] = largest + logf(all);
}

#define PREP(DIM, KEY_IS_VALUE)                                                                                        \
  template __global__ void prep<DIM, KEY_IS_VALUE>(                                                                    \
      const __nv_bfloat16*, const __nv_bfloat16*, const __nv_bfloat16*, const __nv_bfloat16*, const __nv_bfloat16*,    \
      const __nv_bfloat16*, const __nv_bfloat16*, __nv_bfloat16*, __nv_bfloat16*, __nv_bfloat16*, const int32_t*,      \
      const int64_t*, int, int, int, float, int64_t, int64_t, int64_t, int)
PREP(256, false);
PREP(512, false);
PREP(512, true);
#define ATTENTION(DIM)                                                                                                 \
  template __global__ void attention<DIM>(const __nv_bfloat16*, const __nv_bfloat16*, const __nv_bfloat16*,            \
                                          __nv_bfloat16*, float*, const int32_t*, int, const int32_t*, const int32_t*, \
                                          const int32_t*, int, int, float, int, int64_t, int64_t, int64_t, int)
ATTENTION(256);
ATTENTION(512);
