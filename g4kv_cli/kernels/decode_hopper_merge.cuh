// Decode for sm_90: partial results of a pair of heads as one, and where they are stored.
#pragma once

#include "decode_hopper_shape.cuh"

namespace g4kv {

// Maxima and sums of a pair's two heads.
struct PairState {
  float max[2];
  float sum[2];
};

// Merges up to kSources_ partial results of one pair of heads. A partial result is a state (max, sum, max,
// sum) and items of two dims and two heads, [dim][head]. Every lane weighs all of them, and takes items of its own.
template <int kSources_>
struct PairMerge {
  static constexpr int kSources = kSources_ > 8 ? 16 : kSources_ > 4 ? 8 : kSources_ > 2 ? 4 : kSources_;
  float factor[kSources][2];  // exp2((max - overall max) * scale_log2)
  PairState total;

  __device__ __forceinline__ void weigh_states(const unsigned char* states, int stride, int count, float scale_log2) {
    float max[kSources][2], sum[kSources][2];
#pragma unroll
    for (int source = 0; source < kSources; ++source) {
      const float4 state = source < count ? *reinterpret_cast<const float4*>(states + source * stride)
                                          : make_float4(minus_infinity(), 0.0f, minus_infinity(), 0.0f);
      max[source][0] = state.x;
      max[source][1] = state.z;
      sum[source][0] = state.y;
      sum[source][1] = state.w;
    }
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      total.max[head] = max[0][head];
#pragma unroll
      for (int source = 1; source < kSources; ++source) total.max[head] = fmaxf(total.max[head], max[source][head]);
#pragma unroll
      for (int source = 0; source < kSources; ++source) {
        factor[source][head] = exp2_approx((max[source][head] - finite_max(total.max[head])) * scale_log2);
        sum[source][head] *= factor[source][head];
      }
#pragma unroll
      for (int distance = kSources / 2; distance > 0; distance /= 2) {
#pragma unroll
        for (int source = 0; source < distance; ++source) sum[source][head] += sum[source + distance][head];
      }
      total.sum[head] = sum[0][head];
    }
  }

  // This lane's item.
  __device__ __forceinline__ float4 item(const unsigned char* items, int stride, int count) const {
    float4 merged = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int source = 0; source < kSources; ++source) {
      if (source < count) {
        const float4 part = *reinterpret_cast<const float4*>(items + source * stride);
        merged.x = fmaf(part.x, factor[source][0], merged.x);
        merged.y = fmaf(part.y, factor[source][1], merged.y);
        merged.z = fmaf(part.z, factor[source][0], merged.z);
        merged.w = fmaf(part.w, factor[source][1], merged.w);
      }
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

// Where a pair's merged items go, two dims of two heads each: the output, or with splits a partial result.
template <int kHeadDim>
struct PairOutput {
  float* partial;  // null: not split
  int next_partial;
  bf16_bits* out;
  float scale[2];
  bool both;

  __device__ __forceinline__ PairOutput(const AttentionParams& p, const ClusterWork& work, int pair,
                                        const PairState& total)
      : partial(nullptr), next_partial(p.num_splits * kHeadDim), both(pair * 2 + 1 < work.group) {
    const long long row = row_of_pair(p, work, pair);
    // partial_out[token][head][split][head_dim]
    if (p.num_splits > 1) partial = p.partial_out + (row * p.num_splits + work.split) * kHeadDim;
    // out[token][head][head_dim]
    out = p.out + row * kHeadDim;
#pragma unroll
    for (int head = 0; head < 2; ++head) scale[head] = total.sum[head] > 0.0f ? reciprocal_approx(total.sum[head]) : 0.0f;
  }

  __device__ __forceinline__ void store(int dim_pair, const float4& item) const {
    if (partial != nullptr) {
      *reinterpret_cast<float2*>(partial + dim_pair * 2) = make_float2(item.x, item.z);
      if (both) *reinterpret_cast<float2*>(partial + next_partial + dim_pair * 2) = make_float2(item.y, item.w);
      return;
    }
    *reinterpret_cast<unsigned*>(out + dim_pair * 2) = pack2(item.x * scale[0], item.z * scale[0]);
    if (both) *reinterpret_cast<unsigned*>(out + kHeadDim + dim_pair * 2) = pack2(item.y * scale[1], item.w * scale[1]);
  }
};

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
