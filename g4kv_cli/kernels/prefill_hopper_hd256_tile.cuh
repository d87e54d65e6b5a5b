// Prefill at head_dim 256 for sm_90: a tile's walk over blocks of keys, by a consumer warpgroup: scores, softmax, sums.
#pragma once

#include "hopper.cuh"
#include "prefill_hopper_hd256_shape.cuh"

namespace g4kv {

// What a consumer warpgroup knows of the rings.
struct PairRings {
  RingPlace<PairPrefill::kKeyStages> keys;
  RingPlace<PairPrefill::kValueStages> values;
};

// Blocks that the consumer does not use are waited for, so that their release counts in the right phase.
__device__ __forceinline__ void skip_keys(unsigned shared, PairRings& rings, int lane) {
  using Shape = PairPrefill;
  barrier_wait(shared + Shape::kKeysThere + rings.keys.stage * 8, rings.keys.parity);
  if (lane == 0) barrier_arrive(shared + Shape::kKeysUsed + rings.keys.stage * 8);
  rings.keys.advance();
}

__device__ __forceinline__ void skip_values(unsigned shared, PairRings& rings, int lane) {
  using Shape = PairPrefill;
  barrier_wait(shared + Shape::kValuesThere + rings.values.stage * 8, rings.values.parity);
  if (lane == 0) barrier_arrive(shared + Shape::kValuesUsed + rings.values.stage * 8);
  rings.values.advance();
}

__device__ __forceinline__ void skip_blocks(int blocks, unsigned shared, PairRings& rings, int lane) {
  for (; blocks > 0; --blocks) {
    skip_keys(shared, rings, lane);
    skip_values(shared, rings, lane);
  }
}

// 64 columns of the queries and of a block of keys.
template <int kColumnBlock>
__device__ __forceinline__ void multiply_column_block(float (&scores)[8][4], unsigned a, unsigned b) {
  constexpr int kA = kColumnBlock * PairPrefill::kQueryBlockBytes, kB = kColumnBlock * PairPrefill::kKeyBlockBytes;
  // row[4][16 columns]: 32 bytes on each time, inside the swizzled 128
  multiply_rows_64<kA, kB, kColumnBlock != 0>(scores, a, b);
  multiply_rows_64<kA + 32, kB + 32, true>(scores, a, b);
  multiply_rows_64<kA + 64, kB + 64, true>(scores, a, b);
  multiply_rows_64<kA + 96, kB + 96, true>(scores, a, b);
}

// Starts the scores of the next block of keys.
__device__ __forceinline__ void start_scores(float (&scores)[8][4], unsigned shared, unsigned queries,
                                             const PairRings& rings) {
  using Shape = PairPrefill;
  const unsigned a = same_in_warp(queries);
  const unsigned b =
      same_in_warp(matrix_descriptor(shared + Shape::kKeyRing + rings.keys.stage * Shape::kKeyStageBytes, 0));
  barrier_wait(shared + Shape::kKeysThere + rings.keys.stage * 8, rings.keys.parity);
  fence_wgmma();
  multiply_column_block<0>(scores, a, b);
  multiply_column_block<1>(scores, a, b);
  multiply_column_block<2>(scores, a, b);
  multiply_column_block<3>(scores, a, b);
  commit_wgmma();
}

// `queries_used`: the barrier of the tile's queries if these were the last scores, else 0.
__device__ __forceinline__ void release_keys(unsigned shared, PairRings& rings, unsigned queries_used, int lane) {
  const unsigned keys_used = shared + PairPrefill::kKeysUsed + rings.keys.stage * 8;
  if (lane == 0 || (lane == 1 && queries_used != 0)) barrier_arrive(lane == 0 ? keys_used : queries_used);
  rings.keys.advance();
}

// Starts the sums of a block's weighted values.
__device__ __forceinline__ void start_sums(float (&out)[32][4], const unsigned (&weights)[4][4], unsigned shared,
                                           const PairRings& rings) {
  using Shape = PairPrefill;
  // stage[box of 16 keys][column block][16 keys][64 columns]
  const unsigned b = same_in_warp(matrix_descriptor(
      shared + Shape::kValueRing + rings.values.stage * Shape::kValueStageBytes, Shape::kValueBlockBytes));
  barrier_wait(shared + Shape::kValuesThere + rings.values.stage * 8, rings.values.parity);
  fence_wgmma();
  multiply_columns_256<0>(out, weights[0], b);
  multiply_columns_256<Shape::kValueBoxBytes>(out, weights[1], b);
  multiply_columns_256<2 * Shape::kValueBoxBytes>(out, weights[2], b);
  multiply_columns_256<3 * Shape::kValueBoxBytes>(out, weights[3], b);
  commit_wgmma();
}

__device__ __forceinline__ void release_values(unsigned shared, PairRings& rings, int lane) {
  if (lane == 0) barrier_arrive(shared + PairPrefill::kValuesUsed + rings.values.stage * 8);
  rings.values.advance();
}

// Two rows of a lane: what they see, and their online softmax. Weights are relative to `reference`, a maximum of the
// row that a new one has to exceed by kSlack, as weights go (log2), to take its place: raised at every new maximum it
// is 9 % slower on an H200. No weight is above 2 to the kSlack. A key that outweighs all before it by more weighs one,
// exactly; one that does not is rounded like any other.
struct PairRows {
  static constexpr float kSlack = 4.0f;
  int newest[2];
  float reference[2];
  float sum[2];
};

// Scores become weights. True for the whole warp if the reference of one of its rows was raised; `factor` then rescales
// what was summed before.
template <bool kMasked>
__device__ __forceinline__ bool weigh_block(float (&scores)[8][4], PairRows& rows, float (&factor)[2],
                                            const AttentionParams& p, float slack, int first_key, int lane) {
  float lane_max[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if constexpr (kMasked) {
      const int oldest = p.window_left < 0 ? 0 : max(0, rows.newest[i] - p.window_left);
      hide_keys(scores, i, oldest, rows.newest[i], first_key, lane);
    }
    float part[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      part[n] = fmaxf(fmaxf(scores[2 * n][i * 2], scores[2 * n][i * 2 + 1]),
                      fmaxf(scores[2 * n + 1][i * 2], scores[2 * n + 1][i * 2 + 1]));
    }
    lane_max[i] = fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3]));
  }
  const bool raised = __any_sync(
      kAllLanes, lane_max[0] > rows.reference[0] + slack || lane_max[1] > rows.reference[1] + slack);
  if (raised) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float block_max = row_max(lane_max[i]);
      factor[i] = 1.0f;
      if (block_max > rows.reference[i] + slack) {
        factor[i] = exp2_approx((rows.reference[i] - block_max) * p.scale_log2);
        rows.reference[i] = block_max;
        rows.sum[i] *= factor[i];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float subtrahend = finite_max(rows.reference[i]) * p.scale_log2;
    float odd = 0.0f;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& score = scores[n][i * 2 + j];
        score = exp2_approx(fmaf(score, p.scale_log2, -subtrahend));
      }
      rows.sum[i] += scores[n][i * 2];
      odd += scores[n][i * 2 + 1];
    }
    rows.sum[i] += odd;
  }
  return raised;
}

__device__ __forceinline__ void pack_weights(unsigned (&weights)[4][4], const float (&scores)[8][4]) {
#pragma unroll
  for (int key16 = 0; key16 < 4; ++key16) {
    weights_as_a(weights[key16], scores[2 * key16], scores[2 * key16 + 1]);
  }
}

// Scores of the next block beside the sums of this one.
template <bool kMasked>
__device__ __forceinline__ void step_block(float (&out)[32][4], unsigned (&weights)[4][4], PairRows& rows,
                                           const AttentionParams& p, float slack, unsigned shared, unsigned queries,
                                           PairRings& rings, int first_key, unsigned queries_used, int lane) {
  float scores[8][4];
  start_scores(scores, shared, queries, rings);
  start_sums(out, weights, shared, rings);
  wait_wgmma<1>();
  hold_order(scores);
  release_keys(shared, rings, queries_used, lane);
  float factor[2];
  const bool raised = weigh_block<kMasked>(scores, rows, factor, p, slack, first_key, lane);
  hold_order(scores);
  hold_before_wait(rows.sum[1], shared);
  wait_wgmma<0>();
  hold_order(out);
  hold_registers(weights, shared, p.num_tiles < 0);
  release_values(shared, rings, lane);
  if (raised) scale_rows(out, factor[0], factor[1]);
  pack_weights(weights, scores);
}

}  // namespace g4kv
