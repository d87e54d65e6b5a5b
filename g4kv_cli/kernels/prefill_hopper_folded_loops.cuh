// The loops of head_dim 512 prefill over folded rows (compute capability 9.0): a row of K holds the columns that turn,
// which are the first 64 of either half of the head; in all others K is V.
//
// Keys are walked in blocks of 64. A stage is a column block of either half of the head, [half][64 keys][64 columns]: a
// block of keys has one of K, three of V that are K's too, and one of V's columns where K turns. V has to stay from the
// scores to the sums; K-major to the scores and MN-major to the sums are the same bytes, of which an output warpgroup
// has its half. What both K and V need passes through a ring of more than two blocks of keys, so that the next scores
// find their columns soon after the sums before them let the first go; the other two kinds have one stage each.
//
// Scores of 64 keys with both operands in shared memory need all of its bandwidth, and the sums, the softmax and whoever
// waits for a barrier want some of it: half of the queries are kept in registers, those whose turn is last, when weights
// are handed over.
#pragma once

#include "prefill_hopper_shape.cuh"

namespace g4kv {

// The half steps of a block's scores before which the weights of the block before are handed over to either output
// warpgroup: its sums then begin beside these scores, one half of the head's and then the other's, and fill the tensor
// cores during the softmax too.
constexpr int kFirstHandOver = 3;
constexpr int kSecondHandOver = 5;

constexpr int kCommonBlocks = 3;  // of a half of the head's column blocks: 1, 2 and 3; block 0 turns
constexpr int kFirstHeld = 2;     // of either half's column blocks whose queries are kept in registers
constexpr int kHeldBlocks = 2;

using HeldQueries = unsigned[kHeldBlocks][2][4][4];  // [column block][half][16 columns]

// One stage: [half][64 keys][64 columns] of column block `column_block` of either half. Lane l < 8 copies 16 keys.
template <typename Shape>
__device__ __forceinline__ void copy_column_pair(const TensorMap& map, const HopperTile& t, const BoxPlace& place,
                                                 unsigned stage, unsigned there, unsigned used, unsigned parity,
                                                 int column_block, int lane) {
  constexpr int kBoxes = 2 * Shape::kBoxesOfKeys;
  barrier_wait(used, parity ^ 1);
  if (lane == 0) barrier_expect(there, Shape::kStageBytes);
  __syncwarp();
  // map[page][kv_head, column block][slot][column]
  const unsigned destination = stage + lane * Shape::kKeyBoxBytes;
  if (Shape::kClusterBlocks == 2 && t.is_shared) {
    if (lane < kBoxes && lane / Shape::kBoxesOfKeys == (int)t.rank) {
      copy_box_to_ranks(destination, map, there, 0, place.slot, column_block, place.page, 3);
    }
  } else if (lane < kBoxes) {
    copy_box(destination, map, there, 0, place.slot, column_block, place.page);
  }
}

// Stages of column blocks, kBlockStages a block of keys, from first_column_block (of this lane's half) on.
template <typename Shape, int kStages, int kBlockStages, int kFirstStage = 0>
__device__ __forceinline__ void produce_column_pairs(const AttentionParams& p, const TensorMap& map, const HopperTile& t,
                                                     unsigned stages, unsigned there, unsigned used,
                                                     int first_column_block, const FirstBox& first, int lane) {
  const int blocks = key_blocks<Shape>(t);
  RingPlace<kStages> ring{kFirstStage};
  int key = first_block_key<Shape>(t) + lane % Shape::kBoxesOfKeys * kBoxKeys;
  BoxPlace place = first.place;
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    key += Shape::kKeys;
    const BoxPlace next = first.row.place_of(p, key);  // early: the page id is on its way
#pragma unroll 1
    for (int number = 0; number < kBlockStages; ++number) {
      copy_column_pair<Shape>(map, t, place, stages + ring.stage * Shape::kStageBytes, there + ring.stage * 8,
                              used + ring.stage * 8, ring.parity, first_column_block + number, lane);
      ring.advance();
    }
    place = next;
  }
  wait_until_used(used, ring);
}

// The half of the head that this lane copies.
template <typename Shape>
__device__ __forceinline__ int half_of_lane(int lane) {
  return lane / Shape::kBoxesOfKeys % 2;
}

template <typename Shape>
__device__ __forceinline__ void produce_turned_keys(const AttentionParams& p, const TensorMap& map, const HopperTile& t,
                                                    unsigned shared, const FirstBox& first, int lane) {
  const int column_block = t.tile.kv_head * 2 + half_of_lane<Shape>(lane);
  produce_column_pairs<Shape, Shape::kKeyStages, 1>(p, map, t, shared + Shape::kKeyRing, shared + Shape::kKeysThere,
                                                    shared + Shape::kKeysUsed, column_block, first, lane);
}

template <typename Shape>
__device__ __forceinline__ void produce_common_columns(const AttentionParams& p, const TensorMap& map,
                                                       const HopperTile& t, unsigned shared, const FirstBox& first,
                                                       int lane) {
  const int turned = (t.tile.kv_head * 2 + half_of_lane<Shape>(lane)) * (1 + kCommonBlocks);
  produce_column_pairs<Shape, Shape::kValueStages, kCommonBlocks, Shape::kFirstValueStage>(
      p, map, t, shared + Shape::kValueRing, shared + Shape::kValuesThere, shared + Shape::kValuesUsed, turned + 1, first,
      lane);
}

template <typename Shape>
__device__ __forceinline__ void produce_turned_values(const AttentionParams& p, const TensorMap& map,
                                                      const HopperTile& t, unsigned shared, const FirstBox& first,
                                                      int lane) {
  const int turned = (t.tile.kv_head * 2 + half_of_lane<Shape>(lane)) * (1 + kCommonBlocks);
  produce_column_pairs<Shape, Shape::kTurnedStages, 1>(p, map, t, shared + Shape::kTurnedRing,
                                                       shared + Shape::kTurnedThere, shared + Shape::kTurnedUsed, turned,
                                                       first, lane);
}

// sum[64 rows][64 keys] (+)= Q's column block times one of K, four steps of 16 columns.
template <typename Shape, bool kAccumulate>
__device__ __forceinline__ void multiply_column_block(float (&scores)[8][4], unsigned shared, int column_block,
                                                      unsigned keys) {
  const unsigned a = matrix_descriptor(shared + Shape::query_block(column_block), 0);
  const unsigned b = matrix_descriptor(keys, 0);
  // row[4][16 columns]: 32 bytes on each time, inside the swizzled 128
  multiply_rows_64<0, 0, kAccumulate>(scores, a, b);
  multiply_rows_64<32, 32, true>(scores, a, b);
  multiply_rows_64<64, 64, true>(scores, a, b);
  multiply_rows_64<96, 96, true>(scores, a, b);
}

// The same of queries in registers. K's bytes are those of the column block of both halves.
template <typename Shape, int kHalf>
__device__ __forceinline__ void multiply_held_block(float (&scores)[8][4], const unsigned (&queries)[4][4],
                                                    unsigned keys) {
  constexpr int kFirst = kHalf * Shape::kGroupBytes;
  multiply_held_rows_64<kFirst, true>(scores, queries[0], keys);
  multiply_held_rows_64<kFirst + 32, true>(scores, queries[1], keys);
  multiply_held_rows_64<kFirst + 64, true>(scores, queries[2], keys);
  multiply_held_rows_64<kFirst + 96, true>(scores, queries[3], keys);
}

// scores[8 tiles of 8 keys] of a block's 64 keys. before(n) runs before the n-th half step of eight.
template <typename Shape, typename Before>
__device__ __forceinline__ void score_folded_block(float (&scores)[8][4], const HeldQueries& queries,
                                                   unsigned shared, int block,
                                                   RingPlace<Shape::kValueStages>& ring,
                                                   const StageRelease<Shape>& release, Before before) {
  constexpr int kHalf = Shape::kColumnBlocks / 2;
  before(0);
  barrier_wait(shared + Shape::kKeysThere, block & 1);
  fence_wgmma();
  const unsigned keys = shared + Shape::kKeyRing;
  multiply_column_block<Shape, false>(scores, shared, 0, keys);
  before(1);
  multiply_column_block<Shape, true>(scores, shared, kHalf, keys + Shape::kGroupBytes);
  commit_wgmma();
#pragma unroll
  for (int column_block = 1; column_block < kHalf; ++column_block) {
    before(2 * column_block);
    barrier_wait(shared + Shape::kValuesThere + ring.stage * 8, ring.parity);
    fence_wgmma();
    const unsigned columns = shared + Shape::kValueRing + ring.stage * Shape::kStageBytes;
    if (column_block >= kFirstHeld) {
      const int held = column_block - kFirstHeld;
      multiply_held_block<Shape, 0>(scores, queries[held][0], matrix_descriptor(columns, 0));
      before(2 * column_block + 1);
      multiply_held_block<Shape, 1>(scores, queries[held][1], matrix_descriptor(columns, 0));
    } else {
      multiply_column_block<Shape, true>(scores, shared, column_block, columns);
      before(2 * column_block + 1);
      multiply_column_block<Shape, true>(scores, shared, kHalf + column_block, columns + Shape::kGroupBytes);
    }
    commit_wgmma();
    if (column_block == 1) {
      wait_wgmma<1>();
      release(Shape::kKeysUsed);
    }
    ring.advance();
  }
  wait_wgmma<0>();
}

template <typename Shape>
__device__ __forceinline__ void score_folded_keys(const AttentionParams& p, const HopperTile& t, unsigned shared,
                                                  unsigned char* memory, int warp, int lane) {
  constexpr int kHalf = Shape::kColumnBlocks / 2;
  const int blocks = (int)same_in_warp(key_blocks<Shape>(t));
  const int first_row = warp * kRowsPerTile;
  float* factors = reinterpret_cast<float*>(memory + Shape::kFactors);
  const StageRelease<Shape> release(t, shared, lane);
  const CommonKeys keys_of_all = common_keys(t.tile, first_row, kRowsPerTile);
  const CommonKeys common = {(int)same_in_warp(keys_of_all.oldest), (int)same_in_warp(keys_of_all.newest)};
  float max[2] = {minus_infinity(), minus_infinity()};
  float sum[2] = {0.0f, 0.0f};
  RingPlace<Shape::kValueStages> ring{Shape::kFirstValueStage};
  float scores[8][4];

  barrier_wait(shared + Shape::kQueriesThere, 0);
  HeldQueries queries;
#pragma unroll
  for (int held = 0; held < kHeldBlocks; ++held) {
#pragma unroll
    for (int column16 = 0; column16 < 8; ++column16) {
      const int half = column16 / 4;
      load_a<kBlockColumns>(queries[held][half][column16 % 4],
                            shared + Shape::query_block(half * kHalf + kFirstHeld + held), first_row, column16 % 4, lane);
    }
  }
  __syncwarp();
#pragma unroll
  for (int group = 0; group < Shape::kOutputWarpgroups; ++group) release(Shape::kValuesUsed);  // as if by theirs
  score_folded_block<Shape>(scores, queries, shared, 0, ring, release, [](int) {});
  int first_key = (int)same_in_warp(first_block_key<Shape>(t));
  int block = 0;
  const auto hand_over = [&](int group) {
    __syncwarp();
    barrier_arrive(shared + Shape::weights_there(block & 1, group));
  };
#pragma unroll 1
  for (;; ++block) {
    if (first_key < common.oldest || first_key + Shape::kKeys - 1 > common.newest) {
      const TileGeometry& tile = *reinterpret_cast<const TileGeometry*>(memory + Shape::kTile);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int newest = position_of(tile, first_row + lane / 4 + i * 8);
        hide_keys(scores, i, first_visible(tile, newest), newest, first_key, lane);
      }
    }
    float factor[2] = {1.0f, 1.0f};
    raise_maxima(max, sum, factor, scores, p.scale_log2);
    const float subtrahend[2] = {finite_max(max[0]) * p.scale_log2, finite_max(max[1]) * p.scale_log2};
    // The weights and factors that stood here are used: the last stage that these scores have met came when both output
    // warpgroups had let go one of that block, behind their first sums.
    static_assert(Shape::kValueStages < (Shape::kBlockPlaces + 1) * kCommonBlocks, "");
    const int place = block & 1;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (lane % 4 == 0) factors[place * Shape::kRows + first_row + lane / 4 + i * 8] = factor[i];
    }
#pragma unroll
    for (int key16 = 0; key16 < 4; ++key16) {
#pragma unroll
      for (int n = key16 * 2; n < key16 * 2 + 2; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          scores[n][i] = exp2_approx(fmaf(scores[n][i], p.scale_log2, -subtrahend[i / 2]));
          sum[i / 2] += scores[n][i];
        }
      }
      unsigned weights[4];
      weights_as_a(weights, scores[key16 * 2], scores[key16 * 2 + 1]);
      store_weights<Shape::kHalfKeys>(shared + Shape::kWeights + place * Shape::kWeightBytes, weights, first_row, key16,
                                      lane);
    }
    if (block + 1 == blocks) break;

    score_folded_block<Shape>(scores, queries, shared, block + 1, ring, release, [&](int step) {
      if (step == kFirstHandOver) hand_over(0);
      if (step == kSecondHandOver) hand_over(1);
    });
    first_key += Shape::kKeys;
  }
  hand_over(0);
  hand_over(1);
  finish_rows<Shape>(p, shared, memory, max, sum, first_row, lane);
}

// Zeros in the warpgroup's columns of a stage, where the tile does not see the key: what stands there may be NaN, and zero
// weights do not hide that. The scores have taken theirs, and hidden them.
template <typename Shape>
__device__ __forceinline__ void clear_unseen_columns(const HopperTile& t, unsigned columns, unsigned there,
                                                     unsigned parity, int first_key, int thread) {
  constexpr int kRowsAtOnce = kWarpgroupSize * kChunkBytes / kSwizzleRowBytes;
  barrier_wait(there, parity);
#pragma unroll
  for (int row = 0; row < Shape::kKeys; row += kRowsAtOnce) {
    const int key = first_key + row + thread / 8;
    if (key >= t.tile.begin && key < t.tile.end) continue;
    // columns[64 keys][8 chunks][16 bytes]
    const unsigned at = columns + row * kSwizzleRowBytes + thread * kChunkBytes;
    asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
  }
}

// sum[64 rows][64 columns] += weights[64 rows][64 keys] times the warpgroup's columns of a stage.
__device__ __forceinline__ void multiply_weights(float (&sum)[8][4], const unsigned (&weights)[4][4], unsigned columns) {
  const unsigned b = matrix_descriptor(columns, 0);
  // columns[4][16 keys][64 columns]
  multiply_columns_64<0>(sum, weights[0], b);
  multiply_columns_64<2048>(sum, weights[1], b);
  multiply_columns_64<4096>(sum, weights[2], b);
  multiply_columns_64<6144>(sum, weights[3], b);
}

template <typename Shape>
__device__ __forceinline__ void sum_folded_values(const AttentionParams& p, const HopperTile& t, unsigned shared,
                                                  unsigned char* memory, int group, int warp, int lane) {
  constexpr int kHalf = Shape::kColumnBlocks / 2;
  const int blocks = (int)same_in_warp(key_blocks<Shape>(t));
  const int first_row = warp * kRowsPerTile;
  const StageRelease<Shape> release(t, shared, lane);
  const float* factors = reinterpret_cast<const float*>(memory + Shape::kFactors);
  const unsigned values = shared + Shape::kValueRing + group * Shape::kGroupBytes;
  const unsigned turned = shared + Shape::kTurnedRing + group * Shape::kGroupBytes;
  RingPlace<Shape::kValueStages> ring{Shape::kFirstValueStage};
  float out[kHalf][8][4] = {};  // [column block of the half]

  int first_key = first_block_key<Shape>(t);
#pragma unroll 1
  for (int block = 0; block < blocks; ++block) {
    const int place = block & 1;
    const unsigned parity = block >> 1 & 1;  // of what is there once for each place
    barrier_wait(shared + Shape::weights_there(place, group), parity);
    unsigned weights[4][4];
#pragma unroll
    for (int key16 = 0; key16 < Shape::kKeys / 16; ++key16) {
      load_a<Shape::kHalfKeys>(weights[key16], shared + Shape::kWeights + place * Shape::kWeightBytes, first_row, key16,
                               lane);
    }
    const float* row_factors = factors + place * Shape::kRows + first_row;
    const float factor0 = row_factors[lane / 4], factor1 = row_factors[lane / 4 + 8];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) rescale(out[i], factor0, factor1);
    if (first_key < t.tile.begin || first_key + Shape::kKeys > t.tile.end) {
      const int thread = warp * kWarpSize + lane;
      RingPlace<Shape::kValueStages> place = ring;
#pragma unroll 1
      for (int i = 0; i < kCommonBlocks; ++i) {
        clear_unseen_columns<Shape>(t, values + place.stage * Shape::kStageBytes,
                                    shared + Shape::kValuesThere + place.stage * 8, place.parity, first_key, thread);
        place.advance();
      }
      clear_unseen_columns<Shape>(t, turned, shared + Shape::kTurnedThere, block & 1, first_key, thread);
      fence_async_copies();
      synchronize_warpgroup(1 + group);
    }
    int previous = 0;
#pragma unroll
    for (int step = 0; step < kHalf; ++step) {
      const bool is_turned = step == kHalf - 1;
      if (is_turned) {
        barrier_wait(shared + Shape::kTurnedThere, block & 1);
      } else {
        barrier_wait(shared + Shape::kValuesThere + ring.stage * 8, ring.parity);
      }
      fence_wgmma();
      multiply_weights(out[(step + 1) % kHalf], weights, is_turned ? turned : values + ring.stage * Shape::kStageBytes);
      commit_wgmma();
      if (step > 0) {
        wait_wgmma<1>();
        release(Shape::kValuesUsed + previous * 8);
      }
      if (!is_turned) {
        previous = ring.stage;
        ring.advance();
      }
    }
    wait_wgmma<0>();
    release(Shape::kTurnedUsed);
    first_key += Shape::kKeys;
  }
  store_rows<Shape>(p, shared, memory, group, first_row, lane,
                    [&](int column8) -> const float(&)[4] { return out[column8 / 8][column8 % 8]; });
}

}  // namespace g4kv
