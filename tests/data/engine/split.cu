// Decode with the keys of a request over several blocks, and the merge of what they found: partial results of their own
// form, log-sum-exp and normed values. split.toml launches both.
#include <cuda_bf16.h>
#include <cuda/std/cstdint>

using int32_t = cuda::std::int32_t;
using int64_t = cuda::std::int64_t;

constexpr float kNothing = -__builtin_bit_cast(float, 0x7f800000);

// One warp a (token, query head, split); a lane has kDim / 32 neighbouring columns.
template <int kDim>
__global__ void split(const __nv_bfloat16* q, const __nv_bfloat16* k_pool, const __nv_bfloat16* v_pool, float* part_out,
                      float* part_lse, const int32_t* table, int table_width, const int32_t* positions,
                      const int32_t* origins, int num_qo_heads, int group, float scale, int window_left,
                      int64_t stride_page, int64_t stride_slot, int64_t stride_head, int page_size) {
  constexpr int kColumns = kDim / 32;
  const int64_t token = blockIdx.x;
  const int head = blockIdx.y, lane = threadIdx.x, splits = gridDim.z;
  const int position = positions[token];
  const int first = window_left < 0 ? 0 : max(0, position - window_left);
  const int chunk = (position + 1 - first + splits - 1) / splits;
  const int begin = first + blockIdx.z * chunk, end = min(position + 1, begin + chunk);
  float query[kColumns], sum_of_values[kColumns], most = kNothing, total = 0.0f;
  for (int c = 0; c < kColumns; ++c) {
    // q[token][head][dim]
    query[c] = __bfloat162float(q[(token * num_qo_heads + head) * kDim + lane * kColumns + c]);
    sum_of_values[c] = 0.0f;
  }
  for (int key = begin; key < end; ++key) {
    // table[token][page - origin]
    const int64_t page = table[token * table_width + key / page_size - origins[token]];
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
  // part[token][head][split][dim]: of a split without a key only the log-sum-exp is written
  const int64_t row = (token * num_qo_heads + head) * splits + blockIdx.z;
  if (lane == 0) part_lse[row] = begin < end ? most + logf(total) : kNothing;
  if (begin >= end) return;
  for (int c = 0; c < kColumns; ++c) part_out[row * kDim + lane * kColumns + c] = sum_of_values[c] / total;
}

// One block a (token, query head), a thread a column.
template <int kDim>
__global__ void merge(const float* part_out, const float* part_lse, __nv_bfloat16* out, float* lse, int splits) {
  const int64_t row = int64_t(blockIdx.x) * gridDim.y + blockIdx.y;
  const int dim = blockIdx.z * blockDim.x + threadIdx.x;
  float most = kNothing, total = 0.0f, value = 0.0f;
  for (int s = 0; s < splits; ++s) most = fmaxf(most, part_lse[row * splits + s]);
  for (int s = 0; s < splits; ++s) {
    const float weight = expf(part_lse[row * splits + s] - most);
    total += weight;
    // part[row][split][dim]
    if (weight > 0.0f) value += weight * part_out[(row * splits + s) * kDim + dim];
  }
  out[row * kDim + dim] = __float2bfloat16(value / total);
  if (lse != nullptr && dim == 0) lse[row] = most + logf(total);
}

#define BOTH(DIM)                                                                                                      \
  template __global__ void split<DIM>(const __nv_bfloat16*, const __nv_bfloat16*, const __nv_bfloat16*, float*, float*, \
                                      const int32_t*, int, const int32_t*, const int32_t*, int, int, float, int,       \
                                      int64_t, int64_t, int64_t, int);                                                 \
  template __global__ void merge<DIM>(const float*, const float*, __nv_bfloat16*, float*, int)
BOTH(256);
BOTH(512);
