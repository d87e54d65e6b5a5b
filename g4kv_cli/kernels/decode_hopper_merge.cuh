// Decode for sm_90: partial results of a pair of heads as one, and where they are stored.
#pragma once

#include "decode_hopper_shape.cuh"

namespace g4kv {

// Maxima and sums of a pair's two heads.
struct PairState {
  float max[2];
  float sum[2];
};

// Merges up to 16 partial results of one pair of heads, a warp together: lane 16 * head + source holds the weight
// exp2((max - overall max) * scale_log2) of a source. A partial result is a state (max, sum, max, sum) and items of two
// dims and two heads, [dim][head].
struct PairMerge {
  float factor;
  PairState total;

  __device__ __forceinline__ void weigh_states(const unsigned char* states, int stride, int count, float scale_log2,
                                               int lane) {
    const int source = lane % 16, head = lane / 16;
    const float2 state = source < count ? *reinterpret_cast<const float2*>(states + source * stride + head * 8)
                                        : make_float2(minus_infinity(), 0.0f);
    float max = state.x;
#pragma unroll
    for (int distance = 8; distance > 0; distance /= 2) {
      max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, distance));
    }
    factor = exp2_approx((state.x - finite_max(max)) * scale_log2);
    float sum = state.y * factor;
#pragma unroll
    for (int distance = 8; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      total.max[i] = __shfl_sync(kAllLanes, max, i * 16);
      total.sum[i] = __shfl_sync(kAllLanes, sum, i * 16);
    }
  }

  // This lane's item; all lanes of the warp come here.
  __device__ __forceinline__ float4 item(const unsigned char* items, int stride, int count) const {
    float4 merged = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
    for (int source = 0; source < count; ++source) {
      const float4 part = *reinterpret_cast<const float4*>(items + source * stride);
      const float factor0 = __shfl_sync(kAllLanes, factor, source);
      const float factor1 = __shfl_sync(kAllLanes, factor, 16 + source);
      merged.x = fmaf(part.x, factor0, merged.x);
      merged.y = fmaf(part.y, factor1, merged.y);
      merged.z = fmaf(part.z, factor0, merged.z);
      merged.w = fmaf(part.w, factor1, merged.w);
    }
    return merged;
  }
};

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The first of a pair's two query rows in [token][head].
__device__ __forceinline__ long long row_of_pair(const AttentionParams& p, const ClusterWork& work, int pair) {
  return (long long)work.request * p.num_qo_heads + work.kv_head * work.group + pair * 2;
}

// A merged item, two dims of two heads: the output, or with splits a partial result.
template <int kHeadDim>
__device__ __forceinline__ void store_item(const AttentionParams& p, const ClusterWork& work, int dim_pair, int pair,
                                           const float4& item, const PairState& total) {
  const long long row = row_of_pair(p, work, pair);
  const bool both = pair * 2 + 1 < work.group;
  if (p.num_splits > 1) {
    // partial_out[token][head][split][head_dim]
    float* out = p.partial_out + (row * p.num_splits + work.split) * kHeadDim + dim_pair * 2;
    *reinterpret_cast<float2*>(out) = make_float2(item.x, item.z);
    if (both) *reinterpret_cast<float2*>(out + p.num_splits * kHeadDim) = make_float2(item.y, item.w);
    return;
  }
  const float scale0 = total.sum[0] > 0.0f ? reciprocal_approx(total.sum[0]) : 0.0f;
  const float scale1 = total.sum[1] > 0.0f ? reciprocal_approx(total.sum[1]) : 0.0f;
  // out[token][head][head_dim]
  bf16_bits* out = p.out + row * kHeadDim + dim_pair * 2;
  *reinterpret_cast<unsigned*>(out) = pack2(item.x * scale0, item.z * scale0);
  if (both) *reinterpret_cast<unsigned*>(out + kHeadDim) = pack2(item.y * scale1, item.w * scale1);
}

// What belongs to a row and not to a dim: the lse, or with splits the partial maximum and sum.
__device__ __forceinline__ void store_state(const AttentionParams& p, const ClusterWork& work, int pair,
                                            const PairState& total) {
  const long long row = row_of_pair(p, work, pair);
#pragma unroll
  for (int head = 0; head < 2; ++head) {
    if (pair * 2 + head >= work.group) return;
    if (p.num_splits > 1) {
      // partial[token][head][split]
      const long long partial = (row + head) * p.num_splits + work.split;
      p.partial_max[partial] = total.max[head];
      p.partial_sum[partial] = total.sum[head];
    } else if (p.lse != nullptr) {
      // lse[token][head]
      p.lse[row + head] = log_sum_exp(total.max[head], total.sum[head], p.scale_log2);
    }
  }
}

}  // namespace g4kv
