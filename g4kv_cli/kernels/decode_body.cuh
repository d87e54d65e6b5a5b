// Attention of one tile of up to 16 packed query rows, its keys spread over the warps of a block and, with splits,
// over blocks. Serves the prefill entry's smallest tile, non-partitioned decode and split-KV decode.
//
// Rows of K hold the whole head, or the kKeyDim columns that turn; then the others are read from V's tile.
//
// A warp group (one warp at head_dim 256, two at 512, each with half of the output columns) takes every kGroups-th
// tile of 16 keys through its own ring of kStages stages: no block-wide barrier inside the loop. The groups' partial
// results are merged in group order, so the same input gives the same bits.
#pragma once

#include "attention_tile.cuh"

namespace g4kv {

constexpr int kKeysPerTile = 16;
constexpr int kHalfColumns = 256;  // output columns of one warp: 128 accumulator registers a lane

template <int kHeadDim, int kGroups, int kStages, int kKeyDim = kHeadDim>
struct DecodeShape {
  static constexpr int kHalves = kHeadDim / kHalfColumns;
  static constexpr int kThreads = kGroups * kHalves * kWarpSize;
  static constexpr int kQueryBytes = kRowsPerTile * kHeadDim * 2;
  static constexpr int kKeyBytes = kKeysPerTile * kKeyDim * 2;     // of a tile of K
  static constexpr int kValueBytes = kKeysPerTile * kHeadDim * 2;  // and of V
  static constexpr int kStageBytes = kKeyBytes + kValueBytes;
  static constexpr int kStagesBytes = kGroups * kStages * kStageBytes;
  static constexpr int kMergeBytes = kGroups * kRowsPerTile * kHeadDim * 4;
  static constexpr int kRingBytes = kStagesBytes > kMergeBytes ? kStagesBytes : kMergeBytes;
  static constexpr int kStateBytes = 2 * kGroups * kRowsPerTile * 4;
  static constexpr int kSharedBytes = kQueryBytes + kRingBytes + kStateBytes;
};

// The warps of one group: they share a ring.
template <int kHalves>
__device__ __forceinline__ void sync_group(int group) {
  if constexpr (kHalves == 1) {
    __syncwarp();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(kHalves * kWarpSize) : "memory");
  }
}

// Scores of 16 rows and 16 keys over the whole head, in two chains of sums to shorten the wait for each.
template <int kHeadDim, int kKeyDim>
__device__ __forceinline__ void score_tile(float (&scores)[2][4], unsigned queries, unsigned keys, unsigned values,
                                           int lane) {
  float chain[2][2][4] = {};
#pragma unroll
  for (int column16 = 0; column16 < kHeadDim / 16; ++column16) {
    unsigned a[4], b[4];
    load_a<kHeadDim>(a, queries, 0, column16, lane);
    load_key_columns<kHeadDim, kKeyDim>(b, keys, values, 0, column16, lane);
    multiply_accumulate(chain[column16 % 2][0], a, b[0], b[1]);
    multiply_accumulate(chain[column16 % 2][1], a, b[2], b[3]);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[n][i] = chain[0][n][i] + chain[1][n][i];
  }
}

template <int kHeadDim, int kGroups, int kStages, bool kSplit, int kKeyDim = kHeadDim>
__device__ __forceinline__ void attend_keys(const AttentionParams& p) {
  using Shape = DecodeShape<kHeadDim, kGroups, kStages, kKeyDim>;
  constexpr int kHalves = Shape::kHalves;
  using Copy = KeyCopy<kHeadDim, kKeyDim, kHalves * kWarpSize, kKeysPerTile>;
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int group = warp / kHalves, half = warp % kHalves;
  const unsigned queries = shared_address(shared);
  const unsigned ring = queries + Shape::kQueryBytes + group * (kStages * Shape::kStageBytes);

  const TileGeometry tile = locate_tile(p, blockIdx.x / p.num_kv_heads, blockIdx.x % p.num_kv_heads, kRowsPerTile);
  // Key tiles stand on multiples of 16, so a key's tile does not depend on where the window begins.
  int first_tile = tile.begin / kKeysPerTile;
  int last_tile = tile.end > tile.begin ? (tile.end + kKeysPerTile - 1) / kKeysPerTile : first_tile;
  if constexpr (kSplit) {
    const int per_split = (last_tile - first_tile + p.num_splits - 1) / p.num_splits;
    first_tile += blockIdx.y * per_split;
    last_tile = min(last_tile, first_tile + per_split);
  }

  copy_queries<kHeadDim>(p, tile, queries, warp, kGroups * kHalves, kRowsPerTile, lane);
  commit_copies();
  const auto place_of = [&](int key_tile) {
    const int key = key_tile * kKeysPerTile + Copy::Keys::row_of_lane(half, lane);
    return Copy::place(p, tile, key, key_tile < last_tile);
  };
  const auto copy_keys_and_values = [&](unsigned keys, const decltype(place_of(0))& lane_place) {
    Copy::keys(p, lane_place, keys, half, lane);
    Copy::values(p, lane_place, keys + Shape::kKeyBytes, half, lane);
  };
  const auto stage_keys = [&](int stage) { return ring + stage * Shape::kStageBytes; };
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    const int key_tile = first_tile + group + stage * kGroups;
    if (key_tile < last_tile) {
      copy_keys_and_values(stage_keys(stage), place_of(key_tile));
    }
    commit_copies();
  }
  wait_copies<kStages>();
  __syncthreads();  // the queries are there for all warps

  const CommonKeys common = common_keys(tile, 0, kRowsPerTile);
  RowState rows = empty_rows();
  float out[1][kHalfColumns / 8][4] = {};
  int stage = 0;
#pragma unroll 1
  for (int key_tile = first_tile + group; key_tile < last_tile; key_tile += kGroups) {
    const int next_tile = key_tile + kStages * kGroups;
    const auto next_place = place_of(next_tile);  // early: its page id is on the way while this tile computes
    wait_copies<kStages - 1>();
    sync_group<kHalves>(group);
    const unsigned keys = stage_keys(stage), values = keys + Shape::kKeyBytes;
    float scores[2][4];
    score_tile<kHeadDim, kKeyDim>(scores, queries, keys, values, lane);
    mask(scores, tile, common, 0, key_tile * kKeysPerTile, lane);
    const float factor0 = weigh(scores, rows, 0, row_max(lane_max(scores, 0)), p.scale_log2);
    const float factor1 = weigh(scores, rows, 1, row_max(lane_max(scores, 1)), p.scale_log2);
    rescale(out[0], factor0, factor1);
    unsigned weights[1][4];
    weights_as_a(weights[0], scores[0], scores[1]);
    accumulate_values<kHeadDim, 1, kHalfColumns>(out, weights, values, 0, half * (kHalfColumns / 16), lane);
    sync_group<kHalves>(group);  // the stage may be filled again
    if (next_tile < last_tile) {
      copy_keys_and_values(keys, next_place);
    }
    commit_copies();
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  if constexpr (kHalves > 1) {
    // A group without a tile in the last round meets its barrier as often as the others: compute-sanitizer's racecheck
    // loses track of the block's barriers where warps come to them from unequal counts.
    const int rounds = (last_tile - first_tile + kGroups - 1) / kGroups;
    if (rounds > 0 && first_tile + (rounds - 1) * kGroups + group >= last_tile) {
      sync_group<kHalves>(group);
      sync_group<kHalves>(group);
    }
  }
  wait_copies<0>();
  __syncthreads();  // the ring is free: it holds the groups' outputs from here on

  float* group_out = reinterpret_cast<float*>(shared + Shape::kQueryBytes);
  float* group_max = reinterpret_cast<float*>(shared + Shape::kQueryBytes + Shape::kRingBytes);
  float* group_sum = group_max + kGroups * kRowsPerTile;
#pragma unroll
  for (int half_row = 0; half_row < 2; ++half_row) {
    const int row = lane / 4 + half_row * 8;
    const float sum = row_sum(rows.sum[half_row]);
    if (row < tile.num_rows) {
      if (half == 0 && lane % 4 == 0) {
        // group_max[group][row], group_sum[group][row]
        group_max[group * kRowsPerTile + row] = rows.max[half_row];
        group_sum[group * kRowsPerTile + row] = sum;
      }
      // group_out[group][row][head_dim]
      float* to = group_out + (group * kRowsPerTile + row) * kHeadDim + half * kHalfColumns + (lane % 4) * 2;
#pragma unroll
      for (int n = 0; n < kHalfColumns / 8; ++n) {
        *reinterpret_cast<float2*>(to + n * 8) = make_float2(out[0][n][half_row * 2], out[0][n][half_row * 2 + 1]);
      }
    }
  }
  __syncthreads();

  constexpr int kQuads = kHeadDim / 4;
  for (int i = threadIdx.x; i < tile.num_rows * kQuads; i += Shape::kThreads) {
    const int row = i / kQuads, quad = i % kQuads;
    float max = minus_infinity();
#pragma unroll
    for (int g = 0; g < kGroups; ++g) max = fmaxf(max, group_max[g * kRowsPerTile + row]);
    float sum = 0.0f;
    float4 merged = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const float factor = exp2_approx((group_max[g * kRowsPerTile + row] - finite_max(max)) * p.scale_log2);
      const float4 part =
          *reinterpret_cast<const float4*>(group_out + (g * kRowsPerTile + row) * kHeadDim + quad * 4);
      sum = fmaf(group_sum[g * kRowsPerTile + row], factor, sum);
      merged.x = fmaf(part.x, factor, merged.x);
      merged.y = fmaf(part.y, factor, merged.y);
      merged.z = fmaf(part.z, factor, merged.z);
      merged.w = fmaf(part.w, factor, merged.w);
    }
    // q[token][head][head_dim]: the row's number is its offset without the last axis
    const long long row_number = query_offset<kHeadDim>(p, tile, row) / kHeadDim;
    if constexpr (kSplit) {
      // partial[token][head][split]
      const long long partial = row_number * p.num_splits + blockIdx.y;
      *reinterpret_cast<float4*>(p.partial_out + partial * kHeadDim + quad * 4) = merged;
      if (quad == 0) {
        p.partial_max[partial] = max;
        p.partial_sum[partial] = sum;
      }
    } else {
      const float scale = sum > 0.0f ? 1.0f / sum : 0.0f;
      uint2 packed = make_uint2(pack2(merged.x * scale, merged.y * scale), pack2(merged.z * scale, merged.w * scale));
      *reinterpret_cast<uint2*>(p.out + row_number * kHeadDim + quad * 4) = packed;
      if (p.lse != nullptr && quad == 0) p.lse[row_number] = log_sum_exp(max, sum, p.scale_log2);
    }
  }
}

// The merge of the splits' partial results, in a fixed order. A block serves kMergeColumns columns of one query row,
// its kMergeLanes lane groups every kMergeLanes-th split. A split that saw no key has maximum -infinity, and whatever
// its partial output is does not count.
constexpr int kMergeColumns = 64;
constexpr int kMergeQuads = kMergeColumns / 4;
constexpr int kMergeLanes = 8;
constexpr int kMergeThreads = kMergeQuads * kMergeLanes;
constexpr int kMergeAhead = 8;  // splits of a lane group that are on their way together
constexpr int kMergeBatch = kMergeAhead * kMergeLanes;

template <int kHeadDim>
__device__ __forceinline__ void load_parts(float4 (&parts)[kMergeAhead], const AttentionParams& p, int num_splits,
                                           long long row, int first_split, int column) {
#pragma unroll
  for (int i = 0; i < kMergeAhead; ++i) {
    const int split = first_split + i * kMergeLanes;
    if (split < num_splits) {
      // partial_out[token][head][split][head_dim]
      parts[i] = *reinterpret_cast<const float4*>(p.partial_out + (row * p.num_splits + split) * kHeadDim + column);
    }
  }
}

// num_splits: the call's, or 0, which reads and leaves nothing.
template <int kHeadDim>
__device__ __forceinline__ void merge_splits(const AttentionParams& p, int num_splits) {
  __shared__ float4 lane_out[kMergeLanes][kMergeQuads];
  __shared__ float lane_sum[kMergeLanes];
  __shared__ float2 weights[kMergeBatch];  // factor, negative where a split does not count; sum
  const long long row = blockIdx.x;
  const int quad = threadIdx.x % kMergeQuads, merge_lane = threadIdx.x / kMergeQuads;
  const int column = blockIdx.y * kMergeColumns + quad * 4;
  // All that the first splits have is asked for before any of it is waited for.
  float4 parts[kMergeAhead];
  load_parts<kHeadDim>(parts, p, num_splits, row, merge_lane, column);
  // partial[token][head][split]
  const float* maxima = p.partial_max + row * p.num_splits;
  const float* sums = p.partial_sum + row * p.num_splits;
  float split_max = minus_infinity(), split_sum = 0.0f;
  if (threadIdx.x < kMergeBatch && threadIdx.x < num_splits) {
    split_max = maxima[threadIdx.x];
    split_sum = sums[threadIdx.x];
  }
  float max = minus_infinity();
#pragma unroll 4
  for (int split = threadIdx.x % kWarpSize; split < num_splits; split += kWarpSize) max = fmaxf(max, maxima[split]);
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, distance));
  }
  float sum = 0.0f;
  float4 merged = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
  for (int first = 0; first == 0 || first < num_splits; first += kMergeBatch) {
    if (first > 0) {
      load_parts<kHeadDim>(parts, p, num_splits, row, first + merge_lane, column);
      __syncthreads();  // the weights before these have been read
      const int split = first + threadIdx.x;
      split_max = threadIdx.x < kMergeBatch && split < num_splits ? maxima[split] : minus_infinity();
      split_sum = split_max != minus_infinity() ? sums[split] : 0.0f;
    }
    if (threadIdx.x < kMergeBatch) {
      const float factor = exp2_approx((split_max - max) * p.scale_log2);
      weights[threadIdx.x] = make_float2(split_max != minus_infinity() ? factor : -1.0f, split_sum);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kMergeAhead; ++i) {
      const float2 weight = weights[i * kMergeLanes + merge_lane];
      if (!(weight.x < 0.0f)) {  // also NaN, of a split whose scores overflowed: the result shows it
        sum = fmaf(weight.y, weight.x, sum);
        merged.x = fmaf(parts[i].x, weight.x, merged.x);
        merged.y = fmaf(parts[i].y, weight.x, merged.y);
        merged.z = fmaf(parts[i].z, weight.x, merged.z);
        merged.w = fmaf(parts[i].w, weight.x, merged.w);
      }
    }
  }
  lane_out[merge_lane][quad] = merged;
  if (quad == 0) lane_sum[merge_lane] = sum;
  __syncthreads();
  if (merge_lane != 0 || num_splits == 0) return;
#pragma unroll
  for (int other = 1; other < kMergeLanes; ++other) {
    const float4 part = lane_out[other][quad];
    merged.x += part.x;
    merged.y += part.y;
    merged.z += part.z;
    merged.w += part.w;
  }
  sum = lane_sum[0];
#pragma unroll
  for (int other = 1; other < kMergeLanes; ++other) sum += lane_sum[other];
  const float scale = sum > 0.0f ? 1.0f / sum : 0.0f;
  // out[token][head][head_dim]
  *reinterpret_cast<uint2*>(p.out + row * kHeadDim + column) =
      make_uint2(pack2(merged.x * scale, merged.y * scale), pack2(merged.z * scale, merged.w * scale));
  if (p.lse != nullptr && column == 0) p.lse[row] = log_sum_exp(max, sum, p.scale_log2);
}

}  // namespace g4kv

// A kernel of rows of the whole head: head_dim, warp groups, stages of each group's ring, whether keys are split, blocks
// of a multiprocessor, shared bytes. Names, threads and bytes stand again in entries/table.py.
#define G4KV_DECODE(name, head_dim, groups, stages, split, blocks, bytes)                                           \
  static_assert(g4kv::DecodeShape<head_dim, groups, stages>::kSharedBytes == bytes,                                 \
                "entries/table.py states these bytes");                                                             \
  extern "C" __global__ void __launch_bounds__(g4kv::DecodeShape<head_dim, groups, stages>::kThreads, blocks)       \
      name(const g4kv::AttentionParams params) {                                                                    \
    g4kv::attend_keys<head_dim, groups, stages, split>(params);                                                     \
  }
