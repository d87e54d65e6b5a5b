// Kernels in the conventions of other engines, each over the same arithmetic: rows of Q, K and V in one buffer that is
// normed and turned in place, a cache with packed keys, block tables from position 0, arrays of block pointers, lists of
// tokens, one cache for all requests behind a mask, parameters in device memory.
#include "kernels.cu"

#include <cuda_fp16.h>

using T = __nv_bfloat16;

// Norm and RoPE over qkv[token][Q, K, V heads][dim]; table[position][cos | sin].
template <int kDim>
__global__ void norm_rope_in_place(T* qkv, const T* q_weight, const T* k_weight, const T* table, const int64_t* positions,
                                   int num_qo_heads, int num_kv_heads, int rotary_dim, float eps) {
  __shared__ float scratch[kDim / 32], row[kDim];
  const int64_t token = blockIdx.x;
  const int band = blockIdx.y, dim = threadIdx.x, half = rotary_dim / 2;
  T* at = qkv + (token * (num_qo_heads + 2 * num_kv_heads) + band) * kDim + dim;
  const float x = __bfloat162float(*at);
  const float normed = x / sqrtf(sum_of_block(x * x, scratch) / kDim + eps);
  if (band >= num_qo_heads + num_kv_heads) {
    *at = __float2bfloat16(normed);
    return;
  }
  row[dim] = normed * __bfloat162float((band < num_qo_heads ? q_weight : k_weight)[dim]);
  __syncthreads();
  float turned = row[dim];
  if (dim < rotary_dim) {
    const T* angle = table + positions[token] * rotary_dim + dim % half;
    const float other = dim < half ? -row[dim + half] : row[dim - half];
    turned = row[dim] * __bfloat162float(angle[0]) + other * __bfloat162float(angle[half]);
  }
  *at = __float2bfloat16(turned);
}

// k_cache[page][head][dim / 8][slot][dim % 8], v_cache[page][head][dim][slot]; a slot below 0 is nobody's.
__global__ void reshape_and_cache(const T* qkv, T* k_cache, T* v_cache, const int64_t* slots, int num_qo_heads,
                                  int num_kv_heads, int head_dim, int page_size, int64_t k_stride_page,
                                  int64_t v_stride_page) {
  const int64_t token = blockIdx.x, slot = slots[token];
  if (slot < 0) return;
  const int64_t page = slot / page_size, inside = slot % page_size;
  const T* keys = qkv + (token * (num_qo_heads + 2 * num_kv_heads) + num_qo_heads) * head_dim;
  for (int at = threadIdx.x; at < num_kv_heads * head_dim; at += blockDim.x) {
    const int head = at / head_dim, dim = at % head_dim;
    k_cache[page * k_stride_page + (int64_t(head) * (head_dim / 8) + dim / 8) * page_size * 8 + inside * 8 + dim % 8] = keys[at];
    v_cache[page * v_stride_page + int64_t(at) * page_size + inside] = keys[num_kv_heads * head_dim + at];
  }
}

struct Packed {
  const T *k, *v;
  const int32_t* table;
  int64_t k_stride_page, v_stride_page;
  int32_t width, page_size;
  __device__ int64_t page(int request, int key) const { return table[int64_t(request) * width + key / page_size]; }
  __device__ float key(int request, int key, int head, int dim, int head_dim) const {
    const int64_t inside = (int64_t(head) * (head_dim / 8) + dim / 8) * page_size * 8 + key % page_size * 8 + dim % 8;
    return __bfloat162float(k[page(request, key) * k_stride_page + inside]);
  }
  __device__ float value(int request, int key, int head, int dim, int head_dim) const {
    return __bfloat162float(v[page(request, key) * v_stride_page + (int64_t(head) * head_dim + dim) * page_size + key % page_size]);
  }
};

// blocks[request][K, V][page] are addresses of [head][slot][dim]; null in front of the window.
struct Pointers {
  const T* const* blocks;
  int32_t width, page_size;
  __device__ float at(int request, int side, int key, int head, int dim, int head_dim) const {
    const T* block = blocks[(int64_t(request) * 2 + side) * width + key / page_size];
    return __bfloat162float(block[(int64_t(head) * page_size + key % page_size) * head_dim + dim]);
  }
  __device__ float key(int r, int k, int h, int d, int n) const { return at(r, 0, k, h, d, n); }
  __device__ float value(int r, int k, int h, int d, int n) const { return at(r, 1, k, h, d, n); }
};

// tokens[indptr[request] + key - begins[request]] is the row of a key in [row][head][dim].
struct Tokens {
  const T *k, *v;
  const int64_t *tokens, *indptr;
  const int32_t* begins;
  int32_t heads;
  __device__ int64_t at(int request, int key, int head, int dim, int head_dim) const {
    return (tokens[indptr[request] + key - begins[request]] * heads + head) * head_dim + dim;
  }
  __device__ float key(int r, int k, int h, int d, int n) const { return __bfloat162float(this->k[at(r, k, h, d, n)]); }
  __device__ float value(int r, int k, int h, int d, int n) const { return __bfloat162float(v[at(r, k, h, d, n)]); }
};

// One block a (request, query head), a thread a column: one new token a request.
template <class Where, int kDim>
__device__ void attend(const Where& where, const T* q, T* out, const int32_t* kv_lens, int num_qo_heads, int group,
                       float scale, int window_left) {
  __shared__ float scratch[kDim / 32];
  const int request = blockIdx.x, head = blockIdx.y, dim = threadIdx.x, last = kv_lens[request] - 1;
  const int64_t row = (int64_t(request) * num_qo_heads + head) * kDim + dim;
  const float query = __bfloat162float(q[row]);
  float most = -kInfinity, total = 0.0f, value = 0.0f;
  for (int key = window_left < 0 ? 0 : max(0, last - window_left); key <= last; ++key) {
    const float score = scale * sum_of_block(query * where.key(request, key, head / group, dim, kDim), scratch);
    __syncthreads();
    const float larger = fmaxf(most, score), fade = expf(most - larger), weight = expf(score - larger);
    total = total * fade + weight;
    value = value * fade + weight * where.value(request, key, head / group, dim, kDim);
    most = larger;
  }
  out[row] = __float2bfloat16(value / total);
}

// One cache for all requests: k[cell][head][dim], v[head][dim][cell], and mask[request][cell] says who sees what. A warp a
// (request, query head).
template <int kDim>
__device__ void attend_masked(const T* q, const T* k, const T* v, const __half* mask, T* out, int cells, int num_qo_heads,
                              int group, float scale, int64_t k_stride_cell, int64_t v_stride_dim) {
  const int request = blockIdx.x, head = blockIdx.y, lane = threadIdx.x, kv_head = head / group;
  const int64_t row = (int64_t(request) * num_qo_heads + head) * kDim;
  float most = -kInfinity, total = 0.0f, value[kDim / 32] = {};
  for (int cell = 0; cell < cells; ++cell) {
    const float bias = __half2float(mask[int64_t(request) * cells + cell]);
    if (bias < -1e30f) continue;
    float score = 0.0f;
    for (int dim = lane; dim < kDim; dim += 32)
      score += __bfloat162float(q[row + dim]) * __bfloat162float(k[cell * k_stride_cell + kv_head * kDim + dim]);
    for (int other = 16; other > 0; other /= 2) score += __shfl_xor_sync(~0u, score, other);
    score = score * scale + bias;
    const float larger = fmaxf(most, score), fade = expf(most - larger), weight = expf(score - larger);
    total = total * fade + weight;
    for (int i = 0; i < kDim / 32; ++i)
      value[i] = value[i] * fade + weight * __bfloat162float(v[(int64_t(kv_head) * kDim + lane + 32 * i) * v_stride_dim + cell]);
    most = larger;
  }
  for (int i = 0; i < kDim / 32; ++i) out[row + lane + 32 * i] = __float2bfloat16(value[i] / total);
}

struct Call {
  const T* q;
  T* out;
  const int32_t* kv_lens;
  int32_t num_qo_heads, group;
  float scale;
  int32_t window_left;
};

extern "C" __global__ void packed_attention(Packed where, const Call* call) {
  attend<Packed, 256>(where, call->q, call->out, call->kv_lens, call->num_qo_heads, call->group, call->scale, call->window_left);
}
extern "C" __global__ void pointer_attention(Pointers where, Call call) {
  attend<Pointers, 256>(where, call.q, call.out, call.kv_lens, call.num_qo_heads, call.group, call.scale, call.window_left);
}
extern "C" __global__ void masked_attention(const T* q, const T* k, const T* v, const __half* mask, T* out, int cells,
                                            int num_qo_heads, int group, float scale, int64_t k_stride_cell,
                                            int64_t v_stride_dim) {
  attend_masked<256>(q, k, v, mask, out, cells, num_qo_heads, group, scale, k_stride_cell, v_stride_dim);
}
extern "C" __global__ void token_attention(Tokens where, Call call) {
  attend<Tokens, 256>(where, call.q, call.out, call.kv_lens, call.num_qo_heads, call.group, call.scale, call.window_left);
}
template __global__ void norm_rope_in_place<256>(T*, const T*, const T*, const T*, const int64_t*, int, int, int, float);
