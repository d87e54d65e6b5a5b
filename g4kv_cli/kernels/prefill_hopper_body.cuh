// Prefill attention at head_dim 512 by warpgroups that do one thing each (compute capability 9.0 alone).
//
// A block owns 64 packed query rows of one KV head and walks their keys in blocks of 128:
//   producer warpgroup  a warp copies K, 64 columns of 128 keys a stage, another V, 512 columns of 16 keys a stage
//   score warpgroup     Q K^T, mask, online softmax; weights of 64 keys at a time (a half) into shared memory
//   output warpgroups   two, 256 columns each: weights into registers, sums of weighted values
// The 64 x 512 sums alone are 128 registers a thread in two warpgroups, and K and V of a block of keys are 256 KiB: both
// pass through rings of stages and are never there whole.
//
// Neighbouring tiles of a request see nearly the same keys, so two blocks make a cluster: each copies half of every
// stage to both. A stage is free when both blocks have used it. Tiles of different requests share nothing and run alone.
//
// Weights are relative to the largest score so far, in every block: that key's own weight is then exactly one, and loses
// nothing as bf16. Raising the maximum only now and then is up to 3 % faster on an H200, and doubles the error of rows
// that one key dominates.
#pragma once

#include "attention_tile.cuh"
#include "hopper.cuh"
#include "page_boxes.cuh"
#include "wgmma.cuh"

namespace g4kv {

template <int kClusterBlocks>
struct HopperPrefill {
  static constexpr int kHeadDim = 512;
  static constexpr int kRows = 64;
  static constexpr int kKeys = 128;      // of a block of keys
  static constexpr int kHalfKeys = 64;   // of which weights are handed over at a time
  static constexpr int kColumnBlocks = kHeadDim / kBlockColumns;
  static constexpr int kBoxesOfKeys = kKeys / kBoxKeys;
  static constexpr int kKeyStages = 5;
  static constexpr int kValueStages = kHalfKeys / kBoxKeys;  // a half's: its stages have fixed places
  static constexpr int kStageBytes = 16384;
  static constexpr int kKeyBoxBytes = kBoxKeys * kSwizzleRowBytes;
  static constexpr int kValueBoxBytes = kStageBytes / 2;  // 256 columns, so an output warpgroup's
  static constexpr int kColumnBlockBytes = kBoxKeys * kSwizzleRowBytes;  // of a V stage
  static constexpr int kQueryBlockBytes = kRows * kSwizzleRowBytes;
  static constexpr int kWeightBytes = kRows * kHalfKeys * 2;

  static constexpr int kWarps = 16;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kOutputWarpgroups = 2;
  static constexpr int kOutputColumns = kHeadDim / kOutputWarpgroups;
  static constexpr int kWarpsOfGroup = kWarpgroupSize / kWarpSize;
  static constexpr int kProducerRegisters = 32;  // with 128 for the scores and twice 176: all there are
  static constexpr int kOutputRegisters = 176;

  // Byte offsets in shared memory.
  static constexpr int kQueries = 0;  // [column block][row][128 bytes], later the output rows
  static constexpr int kKeyRing = kQueries + kRows * kHeadDim * 2;
  static constexpr int kValueRing = kKeyRing + kKeyStages * kStageBytes;
  static constexpr int kWeights = kValueRing + kValueStages * kStageBytes;  // [half][row][64 keys]
  static constexpr int kFactors = kWeights + 2 * kWeightBytes;              // [row], of the block's rescaling
  static constexpr int kInverses = kFactors + kRows * 4;                    // [row], one over the sum of weights
  static constexpr int kBarriers = kInverses + kRows * 4;
  static constexpr int kKeysThere = kBarriers;  // [stage]
  static constexpr int kKeysUsed = kKeysThere + kKeyStages * 8;
  static constexpr int kValuesThere = kKeysUsed + kKeyStages * 8;
  static constexpr int kValuesUsed = kValuesThere + kValueStages * 8;
  static constexpr int kWeightsThere = kValuesUsed + kValueStages * 8;  // [half]
  static constexpr int kWeightsUsed = kWeightsThere + 2 * 8;
  static constexpr int kQueriesThere = kWeightsUsed + 2 * 8;
  static constexpr int kSumsThere = kQueriesThere + 8;
  static constexpr int kTile = kSumsThere + 8;  // TileGeometry, so that no loop has to keep it
  static constexpr int kSharedBytes = kTile + sizeof(TileGeometry);
};

// What a block works on, and what it shares with the other block of its cluster.
struct HopperTile {
  TileGeometry tile;
  int begin;  // keys [begin, end) are walked, from begin's block on: those that this tile or the other's sees
  int end;
  unsigned rank;  // in the cluster
  bool is_shared;
};

// False: the last cluster has a block more than there are tiles.
template <int kClusterBlocks>
__device__ __forceinline__ bool locate_hopper_tile(const AttentionParams& p, HopperTile& found) {
  using Shape = HopperPrefill<kClusterBlocks>;
  // block[cluster of tiles, last first][kv_head][rank]: the last tiles of a request see the most keys
  const int cluster = blockIdx.x / kClusterBlocks;
  const int clusters = ceil_divide(p.num_tiles, kClusterBlocks);
  const int first = (clusters - 1 - cluster / p.num_kv_heads) * kClusterBlocks;
  found.rank = kClusterBlocks == 1 ? 0 : blockIdx.x % kClusterBlocks;
  const int number = first + (int)found.rank;
  if (number >= p.num_tiles) return false;
  const int kv_head = cluster % p.num_kv_heads;
  found.tile = locate_tile(p, number, kv_head, Shape::kRows);
  found.begin = found.tile.begin;
  found.end = found.tile.end;
  found.is_shared = false;
  if constexpr (kClusterBlocks == 2) {
    const int other_number = number ^ 1;
    if (other_number < p.num_tiles && p.tile_requests[other_number] == found.tile.request) {
      const TileGeometry other = locate_tile(p, other_number, kv_head, Shape::kRows);
      found.begin = min(found.begin, other.begin);
      found.end = max(found.end, other.end);
      found.is_shared = true;
    }
  }
  return true;
}

// Blocks of keys; at least one, so that rows that see no key are written too.
template <int kClusterBlocks>
__device__ __forceinline__ int key_blocks(const HopperTile& t) {
  constexpr int kKeys = HopperPrefill<kClusterBlocks>::kKeys;
  return max(1, ceil_divide(t.end, kKeys) - t.begin / kKeys);
}

template <int kClusterBlocks>
__device__ __forceinline__ int first_block_key(const HopperTile& t) {
  constexpr int kKeys = HopperPrefill<kClusterBlocks>::kKeys;
  return t.begin / kKeys * kKeys;
}

// K, a stage: [128 keys][64 columns]. Lane l copies keys [16 l, 16 l + 16) of it.
template <int kClusterBlocks>
__device__ __forceinline__ void produce_keys(const AttentionParams& p, const TensorMap& map, const HopperTile& t,
                                             unsigned shared, int lane) {
  using Shape = HopperPrefill<kClusterBlocks>;
  constexpr int kBoxes = Shape::kBoxesOfKeys;
  const int blocks = key_blocks<kClusterBlocks>(t);
  const int box = lane % kBoxes;
  const bool copies = lane < kBoxes && (!t.is_shared || lane / (kBoxes / 2) == (int)t.rank);
  const int first_column_block = t.tile.kv_head * Shape::kColumnBlocks;
  RingPlace<Shape::kKeyStages> ring;
  int key = first_block_key<kClusterBlocks>(t) + box * kBoxKeys;
  const PageRow row(p, t.tile.request, t.begin, t.end);
  BoxPlace place = row.place_of(p, key);
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    key += Shape::kKeys;
    const BoxPlace next = row.place_of(p, key);  // early: the page id is on its way
#pragma unroll 1
    for (int column_block = 0; column_block < Shape::kColumnBlocks; ++column_block) {
      const unsigned there = shared + Shape::kKeysThere + ring.stage * 8;
      const unsigned destination = shared + Shape::kKeyRing + ring.stage * Shape::kStageBytes + box * Shape::kKeyBoxBytes;
      barrier_wait(shared + Shape::kKeysUsed + ring.stage * 8, ring.parity ^ 1);
      if (lane == 0) barrier_expect(there, Shape::kStageBytes);
      __syncwarp();
      // map[page][kv_head, column block][slot][column]
      if (copies) {
        if (kClusterBlocks == 2 && t.is_shared) {
          copy_box_to_ranks(destination, map, there, 0, place.slot, first_column_block + column_block, place.page, 3);
        } else {
          copy_box(destination, map, there, 0, place.slot, first_column_block + column_block, place.page);
        }
      }
      ring.advance();
    }
    place = next;
  }
}

// V, a stage: [column block][16 keys][64 columns], two boxes. Lane l copies the l-th 16 keys of a block.
template <int kClusterBlocks>
__device__ __forceinline__ void produce_values(const AttentionParams& p, const TensorMap& map, const HopperTile& t,
                                               unsigned shared, int lane) {
  using Shape = HopperPrefill<kClusterBlocks>;
  constexpr int kBoxes = Shape::kBoxesOfKeys;
  constexpr int kBoxColumnBlocks = Shape::kColumnBlocks / 2;
  const int blocks = key_blocks<kClusterBlocks>(t);
  const int box = lane % kBoxes;
  const int first_column_block = t.tile.kv_head * Shape::kColumnBlocks;
  RingPlace<Shape::kValueStages> ring;
  int key = first_block_key<kClusterBlocks>(t) + box * kBoxKeys;
  const PageRow row(p, t.tile.request, t.begin, t.end);
  BoxPlace place = row.place_of(p, key);
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    key += Shape::kKeys;
    const BoxPlace next = row.place_of(p, key);
#pragma unroll 1
    for (int number = 0; number < kBoxes; ++number) {
      const unsigned there = shared + Shape::kValuesThere + ring.stage * 8;
      const unsigned destination = shared + Shape::kValueRing + ring.stage * Shape::kStageBytes;
      barrier_wait(shared + Shape::kValuesUsed + ring.stage * 8, ring.parity ^ 1);
      if (lane == number) {
        barrier_expect(there, Shape::kStageBytes);
        // map[page][kv_head, column block][slot][column]
        if (kClusterBlocks == 2 && t.is_shared) {
          copy_box_to_ranks(destination + t.rank * Shape::kValueBoxBytes, map, there, 0, place.slot,
                            first_column_block + (int)t.rank * kBoxColumnBlocks, place.page, 3);
        } else {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            copy_box(destination + half * Shape::kValueBoxBytes, map, there, 0, place.slot,
                     first_column_block + half * kBoxColumnBlocks, place.page);
          }
        }
      }
      __syncwarp();
      ring.advance();
    }
    place = next;
  }
}

// Tells the blocks that share a stage that this warp is done with it: lane i tells one of them.
template <int kClusterBlocks>
struct StageRelease {
  unsigned memory;  // of the block to tell
  bool tells;

  __device__ __forceinline__ StageRelease(const HopperTile& t, unsigned shared, int lane) {
    memory = shared;
    tells = lane < (t.is_shared ? kClusterBlocks : 1);
    if constexpr (kClusterBlocks > 1) {
      memory = shared_of_rank(shared, t.is_shared ? lane % kClusterBlocks : (int)t.rank);
    }
  }

  __device__ __forceinline__ void operator()(int barrier) const {
    if (!tells) return;
    if constexpr (kClusterBlocks > 1) {
      barrier_arrive_at_rank(memory + barrier);
    } else {
      barrier_arrive(memory + barrier);
    }
  }
};

__device__ __forceinline__ void store_matrix(unsigned address, const unsigned (&fragment)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(fragment[0]),
               "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
               : "memory");
}

// weights[row][64 keys], 16 keys from key16 * 16 on
template <int kHalfKeys>
__device__ __forceinline__ void store_weights(unsigned weights, const unsigned (&packed)[4], int first_row, int key16,
                                              int lane) {
  store_matrix(weights + swizzled<kHalfKeys>(first_row + lane % 16, key16 * 2 + lane / 16), packed);
}

// scores[16 tiles of 8 keys] of the block's 128 keys. `between` runs while the tensor cores work on the first stages.
template <int kClusterBlocks, typename Between>
__device__ __forceinline__ void score_block(float (&scores)[16][4], unsigned shared,
                                            RingPlace<HopperPrefill<kClusterBlocks>::kKeyStages>& ring,
                                            const StageRelease<kClusterBlocks>& release, Between between) {
  using Shape = HopperPrefill<kClusterBlocks>;
  int previous = 0;
#pragma unroll
  for (int column_block = 0; column_block < Shape::kColumnBlocks; ++column_block) {
    barrier_wait(shared + Shape::kKeysThere + ring.stage * 8, ring.parity);
    fence_wgmma();
    const unsigned a = matrix_descriptor(shared + Shape::kQueries + column_block * Shape::kQueryBlockBytes, 0);
    const unsigned b = matrix_descriptor(shared + Shape::kKeyRing + ring.stage * Shape::kStageBytes, 0);
    // row[4][16 columns]: 32 bytes on each time, inside the swizzled 128
    if (column_block == 0) {
      multiply_rows_128<0, 0, false>(scores, a, b);
    } else {
      multiply_rows_128<0, 0, true>(scores, a, b);
    }
    multiply_rows_128<32, 32, true>(scores, a, b);
    multiply_rows_128<64, 64, true>(scores, a, b);
    multiply_rows_128<96, 96, true>(scores, a, b);
    commit_wgmma();
    if (column_block > 0) {
      wait_wgmma<1>();
      release(Shape::kKeysUsed + previous * 8);
    }
    if (column_block == 1) between();
    previous = ring.stage;
    ring.advance();
  }
  wait_wgmma<0>();
  release(Shape::kKeysUsed + previous * 8);
}

template <int kClusterBlocks>
__device__ __forceinline__ void score_keys(const AttentionParams& p, const HopperTile& t, unsigned shared,
                                           unsigned char* memory, int warp, int lane) {
  using Shape = HopperPrefill<kClusterBlocks>;
  const int blocks = key_blocks<kClusterBlocks>(t);
  const int first_row = warp * kRowsPerTile;
  const unsigned weights = shared + Shape::kWeights;
  float* factors = reinterpret_cast<float*>(memory + Shape::kFactors);
  const StageRelease<kClusterBlocks> release(t, shared, lane);
  const CommonKeys common = common_keys(t.tile, first_row, kRowsPerTile);
  const int newest[2] = {position_of(t.tile, first_row + lane / 4), position_of(t.tile, first_row + lane / 4 + 8)};
  RingPlace<Shape::kKeyStages> ring;
  float max[2] = {minus_infinity(), minus_infinity()};
  float sum[2] = {0.0f, 0.0f};
  float scores[16][4];
  unsigned late[4][4];  // weights of the second half, stored beside the next block's products
  const auto store_late = [&] {
#pragma unroll
    for (int key16 = 0; key16 < 4; ++key16) {
      store_weights<Shape::kHalfKeys>(weights + Shape::kWeightBytes, late[key16], first_row, key16, lane);
    }
  };

  barrier_wait(shared + Shape::kQueriesThere, 0);
  score_block<kClusterBlocks>(scores, shared, ring, release, [] {});
  int first_key = first_block_key<kClusterBlocks>(t);
  unsigned parity = 0;  // of the block's number
#pragma unroll 1
  for (int block = 0;; ++block) {
    if (first_key < common.oldest || first_key + Shape::kKeys - 1 > common.newest) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        hide_keys(scores, i, first_visible(t.tile, newest[i]), newest[i], first_key, lane);
      }
    }
    barrier_wait(shared + Shape::kWeightsUsed, parity ^ 1);  // the factors too
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float block_max = row_max(lane_max(scores, i));
      float factor = 1.0f;
      if (block_max > max[i]) {
        factor = exp2_approx((max[i] - block_max) * p.scale_log2);
        max[i] = block_max;
        sum[i] *= factor;
      }
      if (lane % 4 == 0) factors[first_row + lane / 4 + i * 8] = factor;
    }
    const float subtrahend[2] = {finite_max(max[0]) * p.scale_log2, finite_max(max[1]) * p.scale_log2};
    const auto weigh = [&](unsigned(&packed)[4], int tile16) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float(&tile)[4] = scores[tile16 * 2 + n];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          tile[i] = exp2_approx(fmaf(tile[i], p.scale_log2, -subtrahend[i / 2]));
          sum[i / 2] += tile[i];
        }
        packed[n * 2] = pack2(tile[0], tile[1]);
        packed[n * 2 + 1] = pack2(tile[2], tile[3]);
      }
    };
#pragma unroll
    for (int key16 = 0; key16 < 4; ++key16) {
      unsigned early[4];
      weigh(early, key16);
      store_weights<Shape::kHalfKeys>(weights, early, first_row, key16, lane);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(shared + Shape::kWeightsThere);
#pragma unroll
    for (int key16 = 0; key16 < 4; ++key16) weigh(late[key16], 4 + key16);
    if (block + 1 == blocks) break;

    score_block<kClusterBlocks>(scores, shared, ring, release, [&] {
      barrier_wait(shared + Shape::kWeightsUsed + 8, parity ^ 1);
      store_late();
    });
    // Only now, so that the second half's sums fill the tensor cores during this block's softmax.
    __syncwarp();
    if (lane == 0) barrier_arrive(shared + Shape::kWeightsThere + 8);
    first_key += Shape::kKeys;
    parity ^= 1;
  }
  barrier_wait(shared + Shape::kWeightsUsed + 8, parity ^ 1);
  store_late();
  __syncwarp();
  if (lane == 0) barrier_arrive(shared + Shape::kWeightsThere + 8);

  float* inverses = reinterpret_cast<float*>(memory + Shape::kInverses);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sum[i] = row_sum(sum[i]);
    if (lane % 4 == 0) inverses[first_row + lane / 4 + i * 8] = sum[i] > 0.0f ? 1.0f / sum[i] : 0.0f;
  }
  __syncwarp();
  if (lane == 0) barrier_arrive(shared + Shape::kSumsThere);
  if (p.lse == nullptr || lane % 4 != 0) return;
  const TileGeometry& tile = *reinterpret_cast<const TileGeometry*>(memory + Shape::kTile);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = first_row + lane / 4 + i * 8;
    if (row < tile.num_rows) {
      // lse[token][head]
      p.lse[query_offset<Shape::kHeadDim>(p, tile, row) / Shape::kHeadDim] =
          log_sum_exp(max[i], sum[i], p.scale_log2);
    }
  }
}

// Query rows to [column block][row][128 bytes], zeros past the last; 16 bytes a copy.
template <int kClusterBlocks>
__device__ __forceinline__ void copy_swizzled_queries(const AttentionParams& p, const TileGeometry& tile,
                                                      unsigned shared, int warp, int warps, int lane) {
  using Shape = HopperPrefill<kClusterBlocks>;
#pragma unroll 1
  for (int row = warp; row < Shape::kRows; row += warps) {
    const bool valid = row < tile.num_rows;
    const bf16_bits* source = p.q + query_offset<Shape::kHeadDim>(p, tile, valid ? row : 0);
#pragma unroll
    for (int step = 0; step < Shape::kHeadDim / 8 / kWarpSize; ++step) {
      const int chunk = step * kWarpSize + lane;
      const unsigned at = shared + Shape::kQueries + chunk / 8 * Shape::kQueryBlockBytes;
      copy_async(at + swizzled<kBlockColumns>(row, chunk % 8), source + chunk * 8, valid);
    }
  }
  commit_copies();
  wait_copies<0>();
  fence_async_copies();
}

// Zeros in the warpgroup's columns of the V rows that the tile does not see: what stands there may be NaN, and zero
// weights do not hide that. `first_key`: of the half.
template <int kClusterBlocks>
__device__ __forceinline__ void clear_unseen_values(const HopperTile& t, unsigned values, unsigned values_there,
                                                    unsigned parity, int first_key, int barrier, int thread) {
  using Shape = HopperPrefill<kClusterBlocks>;
#pragma unroll 1
  for (int stage = 0; stage < Shape::kValueStages; ++stage) {
    barrier_wait(values_there + stage * 8, parity);
    const int key = first_key + stage * kBoxKeys + thread / 8;
    if (key >= t.tile.begin && key < t.tile.end) continue;
#pragma unroll
    for (int column_block = 0; column_block < Shape::kColumnBlocks / 2; ++column_block) {
      // stage[column block][16 keys][8 chunks][16 bytes]
      const unsigned at =
          values + stage * Shape::kStageBytes + column_block * Shape::kColumnBlockBytes + thread * kChunkBytes;
      asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
    }
  }
  fence_async_copies();
  synchronize_warpgroup(barrier);
}

template <int kClusterBlocks>
__device__ __forceinline__ void sum_values(const AttentionParams& p, const HopperTile& t, unsigned shared,
                                           unsigned char* memory, int group, int warp, int lane) {
  using Shape = HopperPrefill<kClusterBlocks>;
  const int blocks = key_blocks<kClusterBlocks>(t);
  const int first_row = warp * kRowsPerTile;
  const StageRelease<kClusterBlocks> release(t, shared, lane);
  const unsigned values = shared + Shape::kValueRing + group * Shape::kValueBoxBytes;
  const float* factors = reinterpret_cast<const float*>(memory + Shape::kFactors);
  float out[2][16][4] = {};  // two times 128 columns

  int first_key = first_block_key<kClusterBlocks>(t);
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      barrier_wait(shared + Shape::kWeightsThere + half * 8, block & 1);
      unsigned weights[4][4];
#pragma unroll
      for (int key16 = 0; key16 < Shape::kHalfKeys / 16; ++key16) {
        load_a<Shape::kHalfKeys>(weights[key16], shared + Shape::kWeights + half * Shape::kWeightBytes, first_row,
                                 key16, lane);
      }
      if (half == 0) {
        const float factor0 = factors[first_row + lane / 4], factor1 = factors[first_row + lane / 4 + 8];
        rescale(out[0], factor0, factor1);
        rescale(out[1], factor0, factor1);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(shared + Shape::kWeightsUsed + half * 8);
      if (first_key < t.tile.begin || first_key + Shape::kHalfKeys > t.tile.end) {
        clear_unseen_values<kClusterBlocks>(t, values, shared + Shape::kValuesThere, half, first_key, 1 + group,
                                            warp * kWarpSize + lane);
      }
#pragma unroll
      for (int stage = 0; stage < Shape::kValueStages; ++stage) {
        barrier_wait(shared + Shape::kValuesThere + stage * 8, half);
        fence_wgmma();
// stage[column block][16 keys][64 columns]: 128 columns are two column blocks
        const unsigned b = matrix_descriptor(values + stage * Shape::kStageBytes, Shape::kColumnBlockBytes);
        multiply_columns_128<0>(out[0], weights[stage], b);
        multiply_columns_128<2 * Shape::kColumnBlockBytes>(out[1], weights[stage], b);
        commit_wgmma();
        if (stage > 0) {
          wait_wgmma<1>();
          release(Shape::kValuesUsed + (stage - 1) * 8);
        }
      }
      wait_wgmma<0>();
      release(Shape::kValuesUsed + (Shape::kValueStages - 1) * 8);
      first_key += Shape::kHalfKeys;
    }
  }

  // Through the memory of the queries, which nobody reads any more, so that 512 bytes are stored at once.
  barrier_wait(shared + Shape::kSumsThere, 0);
  const float* inverses = reinterpret_cast<const float*>(memory + Shape::kInverses);
  const float inverse0 = inverses[first_row + lane / 4], inverse1 = inverses[first_row + lane / 4 + 8];
  constexpr int kColumns = Shape::kOutputColumns;
  // rows[group][row][256 columns]
  const int rows = Shape::kQueries + group * Shape::kRows * kColumns * 2;
#pragma unroll
  for (int column16 = 0; column16 < kColumns / 16; ++column16) {
    const float(&left)[4] = out[column16 / 8][column16 % 8 * 2];
    const float(&right)[4] = out[column16 / 8][column16 % 8 * 2 + 1];
    const unsigned packed[4] = {pack2(left[0] * inverse0, left[1] * inverse0),
                                pack2(left[2] * inverse1, left[3] * inverse1),
                                pack2(right[0] * inverse0, right[1] * inverse0),
                                pack2(right[2] * inverse1, right[3] * inverse1)};
    store_matrix(shared + rows + swizzled<kColumns>(first_row + lane % 16, column16 * 2 + lane / 16), packed);
  }
  __syncwarp();
  const TileGeometry tile = *reinterpret_cast<const TileGeometry*>(memory + Shape::kTile);
#pragma unroll
  for (int i = 0; i < kRowsPerTile; ++i) {
    const int row = first_row + i;
    if (row < tile.num_rows) {
      const uint4 packed = *reinterpret_cast<const uint4*>(memory + rows + swizzled<kColumns>(row, lane));
      *reinterpret_cast<uint4*>(p.out + query_offset<Shape::kHeadDim>(p, tile, row) + group * kColumns + lane * 8) =
          packed;
    }
  }
}

template <int kClusterBlocks>
__device__ __forceinline__ void attend_rows_hopper(const AttentionParams& p, const TensorMap& key_map,
                                                   const TensorMap& value_map) {
  using Shape = HopperPrefill<kClusterBlocks>;
  static_assert(kClusterBlocks == 1 || kClusterBlocks == 2, "a pair of tiles at most");
  extern __shared__ __align__(1024) unsigned char memory[];
  const unsigned shared = shared_address(memory);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int group = warp / Shape::kWarpsOfGroup;

  HopperTile t;
  const bool has_tile = locate_hopper_tile<kClusterBlocks>(p, t);
  if (has_tile && threadIdx.x == 0) {
    *reinterpret_cast<TileGeometry*>(memory + Shape::kTile) = t.tile;
    const int sharers = t.is_shared ? kClusterBlocks : 1;
    for (int stage = 0; stage < Shape::kKeyStages; ++stage) {
      barrier_init(shared + Shape::kKeysThere + stage * 8, 1);
      barrier_init(shared + Shape::kKeysUsed + stage * 8, sharers * Shape::kWarpsOfGroup);
    }
    for (int stage = 0; stage < Shape::kValueStages; ++stage) {
      barrier_init(shared + Shape::kValuesThere + stage * 8, 1);
      barrier_init(shared + Shape::kValuesUsed + stage * 8,
                   sharers * Shape::kOutputWarpgroups * Shape::kWarpsOfGroup);
    }
    for (int half = 0; half < 2; ++half) {
      barrier_init(shared + Shape::kWeightsThere + half * 8, Shape::kWarpsOfGroup);
      barrier_init(shared + Shape::kWeightsUsed + half * 8, Shape::kOutputWarpgroups * Shape::kWarpsOfGroup);
    }
    barrier_init(shared + Shape::kQueriesThere, Shape::kOutputWarpgroups * kWarpgroupSize);
    barrier_init(shared + Shape::kSumsThere, Shape::kWarpsOfGroup);
    fence_barrier_init();
  }
  if constexpr (kClusterBlocks == 1) {
    __syncthreads();
  } else {
    synchronize_cluster();
  }

  if (group == 0) {
    give_registers<Shape::kProducerRegisters>();
    if (has_tile && warp == 0) produce_keys<kClusterBlocks>(p, key_map, t, shared, lane);
    if (has_tile && warp == 1) produce_values<kClusterBlocks>(p, value_map, t, shared, lane);
  } else if (group == 1) {
    if (has_tile) score_keys<kClusterBlocks>(p, t, shared, memory, warp % Shape::kWarpsOfGroup, lane);
  } else {
    take_registers<Shape::kOutputRegisters>();
    if (has_tile) {
      copy_swizzled_queries<kClusterBlocks>(p, t.tile, shared, warp - 2 * Shape::kWarpsOfGroup,
                                            2 * Shape::kWarpsOfGroup, lane);
      barrier_arrive(shared + Shape::kQueriesThere);
      sum_values<kClusterBlocks>(p, t, shared, memory, group - 2, warp % Shape::kWarpsOfGroup, lane);
    }
  }
  if constexpr (kClusterBlocks > 1) {
    // The other block may still copy into this one's memory, or tell its barriers.
    __syncwarp();
    synchronize_cluster();
  }
}

}  // namespace g4kv
