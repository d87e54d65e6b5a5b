// The loops of head_dim 512 prefill over split rows of K and V (compute capability 9.0).
//
// Keys are walked in blocks of 128. A warp copies K, 64 columns of 128 keys a stage, another V, 512 columns of 16 keys a
// stage: K and V of a block are 256 KiB, and both pass through rings of stages and are never there whole.
#pragma once

#include "prefill_hopper_shape.cuh"

namespace g4kv {

// K, a stage: [128 keys][64 columns]. Lane l copies keys [16 l, 16 l + 16) of it.
template <typename Shape>
__device__ __forceinline__ void produce_keys(const AttentionParams& p, const TensorMap& map, const HopperTile& t,
                                             unsigned shared, const FirstBox& first, int lane) {
  constexpr int kBoxes = Shape::kBoxesOfKeys;
  const int blocks = key_blocks<Shape>(t);
  const int box = lane % kBoxes;
  const bool copies = lane < kBoxes && (!t.is_shared || lane / (kBoxes / 2) == (int)t.rank);
  const int first_column_block = t.tile.kv_head * Shape::kColumnBlocks;
  RingPlace<Shape::kKeyStages> ring;
  int key = first_block_key<Shape>(t) + box * kBoxKeys;
  BoxPlace place = first.place;
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    key += Shape::kKeys;
    const BoxPlace next = first.row.place_of(p, key);  // early: the page id is on its way
#pragma unroll 1
    for (int column_block = 0; column_block < Shape::kColumnBlocks; ++column_block) {
      const unsigned there = shared + Shape::kKeysThere + ring.stage * 8;
      const unsigned destination = shared + Shape::kKeyRing + ring.stage * Shape::kStageBytes + box * Shape::kKeyBoxBytes;
      barrier_wait(shared + Shape::kKeysUsed + ring.stage * 8, ring.parity ^ 1);
      if (lane == 0) barrier_expect(there, Shape::kStageBytes);
      __syncwarp();
      // map[page][kv_head, column block][slot][column]
      if (copies) {
        if (Shape::kClusterBlocks == 2 && t.is_shared) {
          copy_box_to_ranks(destination, map, there, 0, place.slot, first_column_block + column_block, place.page, 3);
        } else {
          copy_box(destination, map, there, 0, place.slot, first_column_block + column_block, place.page);
        }
      }
      ring.advance();
    }
    place = next;
  }
  wait_until_used(shared + Shape::kKeysUsed, ring);
}

// V, a stage: [column block][16 keys][64 columns], two boxes. Lane l copies the l-th 16 keys of a block.
template <typename Shape>
__device__ __forceinline__ void produce_values(const AttentionParams& p, const TensorMap& map, const HopperTile& t,
                                               unsigned shared, const FirstBox& first, int lane) {
  constexpr int kBoxes = Shape::kBoxesOfKeys;
  constexpr int kBoxColumnBlocks = Shape::kColumnBlocks / 2;
  const int blocks = key_blocks<Shape>(t);
  const int box = lane % kBoxes;
  const int first_column_block = t.tile.kv_head * Shape::kColumnBlocks;
  RingPlace<Shape::kValueStages> ring;
  int key = first_block_key<Shape>(t) + box * kBoxKeys;
  BoxPlace place = first.place;
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    key += Shape::kKeys;
    const BoxPlace next = first.row.place_of(p, key);
#pragma unroll 1
    for (int number = 0; number < kBoxes; ++number) {
      const unsigned there = shared + Shape::kValuesThere + ring.stage * 8;
      const unsigned destination = shared + Shape::kValueRing + ring.stage * Shape::kStageBytes;
      barrier_wait(shared + Shape::kValuesUsed + ring.stage * 8, ring.parity ^ 1);
      if (lane == number) {
        barrier_expect(there, Shape::kStageBytes);
        // map[page][kv_head, column block][slot][column]
        if (Shape::kClusterBlocks == 2 && t.is_shared) {
          copy_box_to_ranks(destination + t.rank * Shape::kGroupBytes, map, there, 0, place.slot,
                            first_column_block + (int)t.rank * kBoxColumnBlocks, place.page, 3);
        } else {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            copy_box(destination + half * Shape::kGroupBytes, map, there, 0, place.slot,
                     first_column_block + half * kBoxColumnBlocks, place.page);
          }
        }
      }
      __syncwarp();
      ring.advance();
    }
    place = next;
  }
  wait_until_used(shared + Shape::kValuesUsed, ring);
}

// scores[16 tiles of 8 keys] of the block's 128 keys. `between` runs while the tensor cores work on the first stages.
template <typename Shape, typename Between>
__device__ __forceinline__ void score_block(float (&scores)[16][4], unsigned shared,
                                            RingPlace<Shape::kKeyStages>& ring,
                                            const StageRelease<Shape>& release, Between between) {
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

template <typename Shape>
__device__ __forceinline__ void score_split_keys(const AttentionParams& p, const HopperTile& t, unsigned shared,
                                           unsigned char* memory, int warp, int lane) {
  const int blocks = (int)same_in_warp(key_blocks<Shape>(t));
  const int first_row = warp * kRowsPerTile;
  const unsigned weights = shared + Shape::kWeights;
  float* factors = reinterpret_cast<float*>(memory + Shape::kFactors);
  const StageRelease<Shape> release(t, shared, lane);
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
  score_block<Shape>(scores, shared, ring, release, [] {});
  int first_key = first_block_key<Shape>(t);
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
    float factor[2] = {1.0f, 1.0f};
    raise_maxima(max, sum, factor, scores, p.scale_log2);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (lane % 4 == 0) factors[first_row + lane / 4 + i * 8] = factor[i];
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
    barrier_arrive(shared + Shape::kWeightsThere);
#pragma unroll
    for (int key16 = 0; key16 < 4; ++key16) weigh(late[key16], 4 + key16);
    if (block + 1 == blocks) break;

    score_block<Shape>(scores, shared, ring, release, [&] {
      barrier_wait(shared + Shape::kWeightsUsed + 8, parity ^ 1);
      store_late();
    });
    // Only now, so that the second half's sums fill the tensor cores during this block's softmax.
    __syncwarp();
    barrier_arrive(shared + Shape::kWeightsThere + 8);
    first_key += Shape::kKeys;
    parity ^= 1;
  }
  barrier_wait(shared + Shape::kWeightsUsed + 8, parity ^ 1);
  store_late();
  __syncwarp();
  barrier_arrive(shared + Shape::kWeightsThere + 8);

  finish_rows<Shape>(p, shared, memory, max, sum, first_row, lane);
}

// Zeros in the warpgroup's columns of the V rows that the tile does not see: what stands there may be NaN, and zero
// weights do not hide that. `first_key`: of the half.
template <typename Shape>
__device__ __forceinline__ void clear_unseen_values(const HopperTile& t, unsigned values, unsigned values_there,
                                                    unsigned parity, int first_key, int barrier, int thread) {
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

template <typename Shape>
__device__ __forceinline__ void sum_split_values(const AttentionParams& p, const HopperTile& t, unsigned shared,
                                                 unsigned char* memory, int group, int warp, int lane) {
  const int blocks = (int)same_in_warp(key_blocks<Shape>(t));
  const int first_row = warp * kRowsPerTile;
  const StageRelease<Shape> release(t, shared, lane);
  const unsigned values = shared + Shape::kValueRing + group * Shape::kGroupBytes;
  const float* factors = reinterpret_cast<const float*>(memory + Shape::kFactors);
  float out[2][16][4] = {};  // two times 128 columns

  int first_key = first_block_key<Shape>(t);
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
        clear_unseen_values<Shape>(t, values, shared + Shape::kValuesThere, half, first_key, 1 + group,
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

  store_rows<Shape>(p, shared, memory, group, first_row, lane,
                    [&](int column8) -> const float(&)[4] { return out[column8 / 16][column8 % 16]; });
}

}  // namespace g4kv
