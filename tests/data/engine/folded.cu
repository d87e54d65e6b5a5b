// Prep and decode over folded rows of K (docs/layout.md): a row of K has the columns that turn, and the weight of the others
// goes into the query.
#include "kernels.cu"

constexpr int kDim = 512, kHalf = kDim / 2;

// One block a (token, head row): rows of Q, then K; a thread a column. Columns turn where dim % kHalf < k_dim / 2.
extern "C" __global__ void folded_prep(const __nv_bfloat16* q, const __nv_bfloat16* k, const __nv_bfloat16* q_weight,
                                       const __nv_bfloat16* k_weight, const __nv_bfloat16* cos, const __nv_bfloat16* sin,
                                       __nv_bfloat16* q_out, __nv_bfloat16* k_pool, __nv_bfloat16* v_pool,
                                       const int32_t* positions, const int64_t* slots, int num_qo_heads, int num_kv_heads,
                                       int k_dim, float eps, int64_t stride_page, int64_t k_stride_slot,
                                       int64_t k_stride_head, int64_t v_stride_slot, int64_t v_stride_head, int page_size) {
  __shared__ float scratch[kDim / 32], row[kDim];
  const int64_t token = blockIdx.x, slot = slots[token];
  const int band = blockIdx.y, dim = threadIdx.x, inside = dim % kHalf, pairs = k_dim / 2;
  const bool is_q = band < num_qo_heads, turns = inside < pairs;
  const int head = is_q ? band : band - num_qo_heads, heads = is_q ? num_qo_heads : num_kv_heads;
  const float x = __bfloat162float((is_q ? q : k)[(token * heads + head) * kDim + dim]);
  const float normed = x / sqrtf(sum_of_block(x * x, scratch) / kDim + eps);
  row[dim] = normed * __bfloat162float((is_q ? q_weight : k_weight)[dim]);
  __syncthreads();
  float value = row[dim];
  if (turns) {
    const int64_t at = int64_t(positions[token]) * kDim + dim;
    const float other = dim < kHalf ? -row[dim + kHalf] : row[dim - kHalf];
    value = row[dim] * __bfloat162float(cos[at]) + other * __bfloat162float(sin[at]);
  } else if (is_q) {
    value *= __bfloat162float(k_weight[dim]);
  }
  if (is_q) {
    q_out[(token * num_qo_heads + head) * kDim + dim] = __float2bfloat16(value);
    return;
  }
  // pool[page][..]: K [slot][head][k_dim], V [slot][head][kDim]
  const int64_t page = slot / page_size * stride_page, at = slot % page_size;
  v_pool[page + at * v_stride_slot + head * v_stride_head + dim] = __float2bfloat16(normed);
  if (turns) k_pool[page + at * k_stride_slot + head * k_stride_head + dim / kHalf * pairs + inside] = __float2bfloat16(value);
}

// One block a (request, query head), a thread a column: one new token a request.
extern "C" __global__ void folded_attention(const __nv_bfloat16* q, const __nv_bfloat16* k_pool,
                                            const __nv_bfloat16* v_pool, __nv_bfloat16* out, float* lse,
                                            const int32_t* table, int width, const int32_t* kv_lens, const int32_t* origins,
                                            int num_qo_heads, int group, int k_dim, float scale, int window_left,
                                            int64_t stride_page, int64_t k_stride_slot, int64_t k_stride_head,
                                            int64_t v_stride_slot, int64_t v_stride_head, int page_size) {
  __shared__ float scratch[kDim / 32];
  const int request = blockIdx.x, head = blockIdx.y, dim = threadIdx.x, last = kv_lens[request] - 1;
  const int inside = dim % kHalf, pairs = k_dim / 2;
  const int64_t row = (int64_t(request) * num_qo_heads + head) * kDim + dim;
  const float query = __bfloat162float(q[row]);
  float most = -kInfinity, total = 0.0f, value = 0.0f;
  for (int key = window_left < 0 ? 0 : max(0, last - window_left); key <= last; ++key) {
    const int64_t page = table[int64_t(request) * width + key / page_size - origins[request]] * stride_page;
    const int64_t k_row = page + key % page_size * k_stride_slot + head / group * k_stride_head;
    const int64_t v_row = page + key % page_size * v_stride_slot + head / group * v_stride_head;
    const float v = __bfloat162float(v_pool[v_row + dim]);
    const float k = inside < pairs ? __bfloat162float(k_pool[k_row + dim / kHalf * pairs + inside]) : v;
    const float score = scale * sum_of_block(query * k, scratch);
    __syncthreads();
    const float larger = fmaxf(most, score), fade = expf(most - larger), weight = expf(score - larger);
    total = total * fade + weight;
    value = value * fade + weight * v;
    most = larger;
  }
  out[row] = __float2bfloat16(value / total);
  if (lse != nullptr && dim == 0) lse[row / kDim] = most + logf(total);
}
