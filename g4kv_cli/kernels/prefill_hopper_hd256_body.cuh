// Prefill attention at head_dim 256 by warpgroups (compute capability 9.0 alone).
//
// A block serves two neighbouring tiles of 64 packed query rows of one KV head, one a consumer warpgroup. K and V pass
// through shared memory in blocks of 64 keys, which both tiles use; each skips the blocks that it does not see. Tiles of
// different requests share no keys: the block then walks the one's and behind them the other's. Blocks of threads stay,
// one a multiprocessor, and take pair after pair: copies for the next are on their way while this one ends.
//
// In a consumer the scores of the next block are computed beside the sums of this one's weighted values.
#pragma once

#include "attention_tile.cuh"
#include "hopper.cuh"
#include "page_boxes.cuh"
#include "wgmma.cuh"

namespace g4kv {

struct PairPrefill {
  static constexpr int kHeadDim = 256;
  static constexpr int kRows = 64;  // of a tile
  static constexpr int kTiles = 2;
  static constexpr int kKeys = 64;  // of a block of keys
  static constexpr int kColumnBlocks = kHeadDim / kBlockColumns;
  static constexpr int kBoxesOfKeys = kKeys / kBoxKeys;
  static constexpr int kStageColumnBlocks = 2;  // of K
  static constexpr int kKeyStagesOfBlock = kColumnBlocks / kStageColumnBlocks;
  static constexpr int kKeyStages = 5;
  static constexpr int kValueStages = 2;
  static constexpr int kKeyBlockBytes = kKeys * kSwizzleRowBytes;  // one column block of K
  static constexpr int kKeyStageBytes = kStageColumnBlocks * kKeyBlockBytes;
  static constexpr int kKeyBoxBytes = kBoxKeys * kSwizzleRowBytes;
  static constexpr int kValueBlockBytes = kBoxKeys * kSwizzleRowBytes;  // one column block of 16 keys of V
  static constexpr int kValueBoxBytes = kColumnBlocks * kValueBlockBytes;
  static constexpr int kValueStageBytes = kBoxesOfKeys * kValueBoxBytes;
  static constexpr int kQueryBlockBytes = kRows * kSwizzleRowBytes;
  static constexpr int kQueryBytes = kColumnBlocks * kQueryBlockBytes;

  static constexpr int kWarpsOfGroup = kWarpgroupSize / kWarpSize;
  static constexpr int kThreads = (kTiles + 1) * kWarpgroupSize;
  static constexpr int kConsumerWarps = kTiles * kWarpsOfGroup;
  static constexpr int kConsumerRegisters = 224;
  static constexpr int kProducerRegisters = 56;

  // Byte offsets in shared memory.
  static constexpr int kQueries = 0;  // [tile][column block][row][128 bytes]
  static constexpr int kKeyRing = kQueries + kTiles * kQueryBytes;
  static constexpr int kValueRing = kKeyRing + kKeyStages * kKeyStageBytes;
  static constexpr int kBarriers = kValueRing + kValueStages * kValueStageBytes;
  static constexpr int kKeysThere = kBarriers;  // [stage]
  static constexpr int kKeysUsed = kKeysThere + kKeyStages * 8;
  static constexpr int kValuesThere = kKeysUsed + kKeyStages * 8;
  static constexpr int kValuesUsed = kValuesThere + kValueStages * 8;
  static constexpr int kValuesLanded = kValuesUsed + kValueStages * 8;  // those that are not used before they are cleared
  static constexpr int kTaskSlots = 3;
  static constexpr int kTaskThere = kValuesLanded + 8;  // [tile][slot]
  static constexpr int kTaskUsed = kTaskThere + kTiles * kTaskSlots * 8;
  static constexpr int kTasks = kTaskUsed + kTiles * kTaskSlots * 8;  // [tile][slot]
  static constexpr int kTaskBytes = 544;
  static constexpr int kSharedBytes = kTasks + kTiles * kTaskSlots * kTaskBytes;

  static __device__ __forceinline__ int task_offset(int tile, int slot) {
    return kTasks + (tile * kTaskSlots + slot) * kTaskBytes;
  }
};

// What a consumer warpgroup has to know of a tile: a warp works it out beside the tiles before.
struct TileTask {
  int newest[PairPrefill::kRows];   // the last key that each row sees
  int out_row[PairPrefill::kRows];  // in q, out and lse; -1: past the tile's last
  int skip_before;                  // blocks that the walk has in front of the tile's and behind them
  int skip_behind;
  int first_key;  // of the tile's first and last block; nothing to do if the last is in front of the first
  int last_key;
  int oldest_whole;  // keys from here on to newest_whole are seen by all rows
  int newest_whole;
};

static_assert(sizeof(TileTask) <= PairPrefill::kTaskBytes, "");

// Keys [begin, end) of a request, walked in whole blocks. Those of [oldest, kv_len) are the request's and seen by some
// query of it: what stands in other slots may be NaN.
struct KeyWalk {
  int request;
  int begin;
  int end;
  int oldest;
  int kv_len;

  __device__ __forceinline__ int first_key() const { return begin / PairPrefill::kKeys * PairPrefill::kKeys; }
  __device__ __forceinline__ int blocks() const {
    return max(1, ceil_divide(end, PairPrefill::kKeys) - begin / PairPrefill::kKeys);
  }
};

// The pair of tiles that a block of threads works on.
struct TilePair {
  int first_tile;
  int kv_head;
  bool has_second;
  bool is_shared;  // both tiles are one request's

  // pairs[pair, last first][kv_head]: the last tiles of a request see the most keys
  __device__ __forceinline__ TilePair(const AttentionParams& p, int number) {
    const int pairs = ceil_divide(p.num_tiles, PairPrefill::kTiles);
    first_tile = (pairs - 1 - number / p.num_kv_heads) * PairPrefill::kTiles;
    kv_head = number % p.num_kv_heads;
    has_second = first_tile + 1 < p.num_tiles;
    is_shared = has_second && p.tile_requests[first_tile] == p.tile_requests[first_tile + 1];
  }

  static __device__ __forceinline__ int count(const AttentionParams& p) {
    return ceil_divide(p.num_tiles, PairPrefill::kTiles) * p.num_kv_heads;
  }

  __device__ __forceinline__ int walks() const { return has_second && !is_shared ? 2 : 1; }

  __device__ __forceinline__ TileGeometry tile(const AttentionParams& p, int which) const {
    return locate_tile(p, first_tile + which, kv_head, PairPrefill::kRows);
  }

  __device__ __forceinline__ KeyWalk walk(const AttentionParams& p, int which) const {
    const TileGeometry own = tile(p, which);
    const int first_position = own.first_position;
    KeyWalk walk = {own.request, own.begin, own.end, first_visible(own, first_position), p.kv_lens[own.request]};
    if (is_shared) {
      const TileGeometry other = tile(p, 1);
      walk.begin = min(walk.begin, other.begin);
      walk.end = max(walk.end, other.end);
    }
    return walk;
  }
};

// K, a stage: [2 column blocks][64 keys][64 columns]. Lane l copies 16 keys of one column block.
__device__ __forceinline__ void produce_pair_keys(const AttentionParams& p, const TensorMap& map, unsigned shared,
                                                  int lane) {
  using Shape = PairPrefill;
  const int box = lane % Shape::kBoxesOfKeys, column_block = lane / Shape::kBoxesOfKeys % Shape::kStageColumnBlocks;
  const unsigned place_in_stage = column_block * Shape::kKeyBlockBytes + box * Shape::kKeyBoxBytes;
  RingPlace<Shape::kKeyStages> ring;
#pragma unroll 1
  for (int number = blockIdx.x; number < TilePair::count(p); number += gridDim.x) {
    const TilePair pair(p, number);
#pragma unroll 1
    for (int which = 0; which < pair.walks(); ++which) {
      const KeyWalk walk = pair.walk(p, which);
      const PageRow row(p, walk.request, walk.begin, walk.end);
      const int first_column_block = pair.kv_head * Shape::kColumnBlocks + column_block;
      int key = walk.first_key() + box * kBoxKeys;
      BoxPlace place = row.place_of(p, key);
#pragma unroll 1
      for (int blocks = walk.blocks(); blocks > 0; --blocks) {
        key += Shape::kKeys;
        const BoxPlace next = row.place_of(p, key);  // early: the page id is on its way
#pragma unroll 1
        for (int part = 0; part < Shape::kKeyStagesOfBlock; ++part) {
          const unsigned there = shared + Shape::kKeysThere + ring.stage * 8;
          barrier_wait(shared + Shape::kKeysUsed + ring.stage * 8, ring.parity ^ 1);
          if (lane == 0) barrier_expect(there, Shape::kKeyStageBytes);
          __syncwarp();
          if (lane < Shape::kBoxesOfKeys * Shape::kStageColumnBlocks) {
            // map[page][kv_head, column block][slot][column]
            copy_box(shared + Shape::kKeyRing + ring.stage * Shape::kKeyStageBytes + place_in_stage, map, there, 0,
                     place.slot, first_column_block + part * Shape::kStageColumnBlocks, place.page);
          }
          ring.advance();
        }
        place = next;
      }
    }
  }
}

// V, a stage: [16 keys four times][column block][16 keys][64 columns]. Lane l copies 16 keys. Rows that are
// no visible key of the request are cleared before the stage counts as there: zero weights do not hide NaN.
__device__ __forceinline__ void produce_pair_values(const AttentionParams& p, const TensorMap& map, unsigned shared,
                                                    int lane) {
  using Shape = PairPrefill;
  const int box = lane % Shape::kBoxesOfKeys;
  RingPlace<Shape::kValueStages> ring;
  unsigned landed_parity = 0;
#pragma unroll 1
  for (int number = blockIdx.x; number < TilePair::count(p); number += gridDim.x) {
    const TilePair pair(p, number);
#pragma unroll 1
    for (int which = 0; which < pair.walks(); ++which) {
      const KeyWalk walk = pair.walk(p, which);
      const PageRow row(p, walk.request, walk.begin, walk.end);
      int first_key = walk.first_key();
      BoxPlace place = row.place_of(p, first_key + box * kBoxKeys);
#pragma unroll 1
      for (int blocks = walk.blocks(); blocks > 0; --blocks) {
        const BoxPlace next = row.place_of(p, first_key + Shape::kKeys + box * kBoxKeys);
        const unsigned stage = shared + Shape::kValueRing + ring.stage * Shape::kValueStageBytes;
        const unsigned there = shared + Shape::kValuesThere + ring.stage * 8;
        const bool is_whole = first_key >= walk.oldest && first_key + Shape::kKeys <= walk.kv_len;
        const unsigned counting = is_whole ? there : shared + Shape::kValuesLanded;
        barrier_wait(shared + Shape::kValuesUsed + ring.stage * 8, ring.parity ^ 1);
        if (lane == 0) barrier_expect(counting, Shape::kValueStageBytes);
        __syncwarp();
        if (lane < Shape::kBoxesOfKeys) {
          // map[page][kv_head, column block][slot][column]
          copy_box(stage + box * Shape::kValueBoxBytes, map, counting, 0, place.slot,
                   pair.kv_head * Shape::kColumnBlocks, place.page);
        }
        if (!is_whole) {
          barrier_wait(counting, landed_parity);
          landed_parity ^= 1;
#pragma unroll 1
          for (int slot = lane / 8; slot < Shape::kKeys; slot += kWarpSize / 8) {
            const int key = first_key + slot;
            if (key >= walk.oldest && key < walk.kv_len) continue;
#pragma unroll
            for (int column_block = 0; column_block < Shape::kColumnBlocks; ++column_block) {
              // stage[box][column block][16 keys][8 chunks][16 bytes]
              const unsigned at = stage + slot / kBoxKeys * Shape::kValueBoxBytes +
                                  column_block * Shape::kValueBlockBytes + slot % kBoxKeys * kSwizzleRowBytes +
                                  lane % 8 * kChunkBytes;
              asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
            }
          }
          fence_async_copies();
          __syncwarp();
          if (lane == 0) barrier_arrive(there);
        }
        ring.advance();
        first_key += Shape::kKeys;
        place = next;
      }
    }
  }
}

// What a consumer has to know of its tile, by one warp.
__device__ __forceinline__ void write_task(TileTask& task, const AttentionParams& p, const TilePair& pair, int which,
                                           int lane) {
  using Shape = PairPrefill;
  const KeyWalk walk = pair.walk(p, 0);
  if (which == 1 && !pair.has_second) {
    for (int row = lane; row < Shape::kRows; row += kWarpSize) task.out_row[row] = -1;
    if (lane == 0) {
      task.skip_before = walk.blocks();
      task.first_key = 0;
      task.last_key = -1;
    }
    return;
  }
  const TileGeometry tile = pair.tile(p, which);
#pragma unroll
  for (int row = lane; row < Shape::kRows; row += kWarpSize) {
    task.newest[row] = position_of(tile, row);
    // out[row][head_dim]
    task.out_row[row] =
        row < tile.num_rows ? (int)(query_offset<Shape::kHeadDim>(p, tile, row) / Shape::kHeadDim) : -1;
  }
  if (lane != 0) return;
  const int first_block = tile.begin / Shape::kKeys;
  const int last_block = max(ceil_divide(tile.end, Shape::kKeys) - 1, first_block);
  if (pair.is_shared) {
    task.skip_before = first_block - walk.begin / Shape::kKeys;
    task.skip_behind = walk.blocks() - 1 - (last_block - walk.begin / Shape::kKeys);
  } else {
    task.skip_before = which == 0 ? 0 : walk.blocks();
    task.skip_behind = which == 0 && pair.has_second ? pair.walk(p, 1).blocks() : 0;
  }
  task.first_key = first_block * Shape::kKeys;
  task.last_key = last_block * Shape::kKeys;
  task.oldest_whole = first_visible(tile, position_of(tile, Shape::kRows - 1));
  task.newest_whole = position_of(tile, 0);
}

__device__ __forceinline__ void produce_tasks(const AttentionParams& p, unsigned shared, unsigned char* memory,
                                              int which, int lane) {
  using Shape = PairPrefill;
  RingPlace<Shape::kTaskSlots> slots;
#pragma unroll 1
  for (int number = blockIdx.x; number < TilePair::count(p); number += gridDim.x) {
    const TilePair pair(p, number);
    const int barrier = (which * Shape::kTaskSlots + slots.stage) * 8;
    barrier_wait(shared + Shape::kTaskUsed + barrier, slots.parity ^ 1);
    write_task(*reinterpret_cast<TileTask*>(memory + Shape::task_offset(which, slots.stage)), p, pair, which, lane);
    __syncwarp();
    if (lane == 0) barrier_arrive(shared + Shape::kTaskThere + barrier);
    slots.advance();
  }
}

// What a consumer warpgroup knows of the rings.
struct PairRings {
  RingPlace<PairPrefill::kKeyStages> keys;
  RingPlace<PairPrefill::kValueStages> values;
};

// A block that the tile does not see: waited for, so that the release counts in the right phase.
__device__ __forceinline__ void skip_block(unsigned shared, PairRings& rings, int lane) {
  using Shape = PairPrefill;
#pragma unroll 1
  for (int part = 0; part < Shape::kKeyStagesOfBlock; ++part) {
    barrier_wait(shared + Shape::kKeysThere + rings.keys.stage * 8, rings.keys.parity);
    if (lane == 0) barrier_arrive(shared + Shape::kKeysUsed + rings.keys.stage * 8);
    rings.keys.advance();
  }
  barrier_wait(shared + Shape::kValuesThere + rings.values.stage * 8, rings.values.parity);
  if (lane == 0) barrier_arrive(shared + Shape::kValuesUsed + rings.values.stage * 8);
  rings.values.advance();
}

// Starts the scores of a block; `stages` says where its keys are, for the release.
__device__ __forceinline__ void start_scores(float (&scores)[8][4], unsigned shared, unsigned queries, PairRings& rings,
                                             int (&stages)[PairPrefill::kKeyStagesOfBlock]) {
  using Shape = PairPrefill;
#pragma unroll
  for (int part = 0; part < Shape::kKeyStagesOfBlock; ++part) {
    barrier_wait(shared + Shape::kKeysThere + rings.keys.stage * 8, rings.keys.parity);
    stages[part] = rings.keys.stage;
    rings.keys.advance();
  }
  fence_wgmma();
#pragma unroll
  for (int part = 0; part < Shape::kKeyStagesOfBlock; ++part) {
#pragma unroll
    for (int block = 0; block < Shape::kStageColumnBlocks; ++block) {
      const int column_block = part * Shape::kStageColumnBlocks + block;
      const unsigned a = matrix_descriptor(queries + column_block * Shape::kQueryBlockBytes, 0);
      const unsigned b = matrix_descriptor(
          shared + Shape::kKeyRing + stages[part] * Shape::kKeyStageBytes + block * Shape::kKeyBlockBytes, 0);
      // row[4][16 columns]: 32 bytes on each time, inside the swizzled 128
      if (column_block == 0) {
        multiply_rows_64<0, false>(scores, a, b);
      } else {
        multiply_rows_64<0, true>(scores, a, b);
      }
      multiply_rows_64<32, true>(scores, a, b);
      multiply_rows_64<64, true>(scores, a, b);
      multiply_rows_64<96, true>(scores, a, b);
    }
  }
  commit_wgmma();
}

__device__ __forceinline__ void release_keys(unsigned shared, const int (&stages)[PairPrefill::kKeyStagesOfBlock],
                                             int lane) {
  if (lane >= PairPrefill::kKeyStagesOfBlock) return;
  barrier_arrive(shared + PairPrefill::kKeysUsed + (lane == 0 ? stages[0] : stages[1]) * 8);
}

// Starts the sums of a block's weighted values.
__device__ __forceinline__ void start_sums(float (&out)[32][4], const unsigned (&weights)[4][4], unsigned shared,
                                           const PairRings& rings) {
  using Shape = PairPrefill;
  barrier_wait(shared + Shape::kValuesThere + rings.values.stage * 8, rings.values.parity);
  // stage[box of 16 keys][column block][16 keys][64 columns]
  const unsigned b = matrix_descriptor(
      shared + Shape::kValueRing + rings.values.stage * Shape::kValueStageBytes, Shape::kValueBlockBytes);
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

// Two rows of a lane: what they see, and their online softmax.
struct PairRows {
  int newest[2];
  float max[2];
  float sum[2];
};

// Scores become weights relative to the rows' new maxima; `factor` rescales what was summed before.
template <bool kMasked>
__device__ __forceinline__ void weigh_block(float (&scores)[8][4], PairRows& rows, float (&factor)[2],
                                            const AttentionParams& p, int first_key, int lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if constexpr (kMasked) {
      const int oldest = p.window_left < 0 ? 0 : max(0, rows.newest[i] - p.window_left);
      hide_keys(scores, i, oldest, rows.newest[i], first_key, lane);
    }
    const float block_max = row_max(lane_max(scores, i));
    factor[i] = 1.0f;
    if (block_max > rows.max[i]) {
      factor[i] = exp2_approx((rows.max[i] - block_max) * p.scale_log2);
      rows.max[i] = block_max;
      rows.sum[i] *= factor[i];
    }
    const float subtrahend = finite_max(rows.max[i]) * p.scale_log2;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float& score = scores[n][i * 2 + j];
        score = exp2_approx(fmaf(score, p.scale_log2, -subtrahend));
        rows.sum[i] += score;
      }
    }
  }
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
                                           const AttentionParams& p, unsigned shared, unsigned queries,
                                           PairRings& rings, int first_key, int lane) {
  float scores[8][4];
  int stages[PairPrefill::kKeyStagesOfBlock];
  start_scores(scores, shared, queries, rings, stages);
  start_sums(out, weights, shared, rings);
  wait_wgmma<1>();
  hold_order(scores);
  release_keys(shared, stages, lane);
  float factor[2];
  weigh_block<kMasked>(scores, rows, factor, p, first_key, lane);
  hold_order(scores);
  hold_before_wait(rows.sum[0] + rows.sum[1], shared);
  wait_wgmma<0>();
  hold_order(out);
#pragma unroll
  for (int key16 = 0; key16 < 4; ++key16) hold_registers(weights[key16], shared, p.num_tiles < 0);
  release_values(shared, rings, lane);
  rescale(out, factor[0], factor[1]);
  pack_weights(weights, scores);
}

// A quad of lanes holds 4 words of each of four 8-column tiles, a word of each a lane; afterwards each lane holds the
// four words of one tile.
__device__ __forceinline__ void transpose_quad(unsigned (&words)[4], int lane) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = lane & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const unsigned received = __shfl_xor_sync(kAllLanes, upper ? words[i] : words[i + bit], bit);
      (upper ? words[i] : words[i + bit]) = received;
    }
  }
}

__device__ __forceinline__ void store_pair_rows(const AttentionParams& p, const TileTask& task,
                                                const float (&out)[32][4], const PairRows& rows, int first_row,
                                                int lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int out_row = task.out_row[first_row + lane / 4 + i * 8];
    const float total = row_sum(rows.sum[i]);
    const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
    bf16_bits* destination = p.out + (long long)max(out_row, 0) * PairPrefill::kHeadDim + lane % 4 * 8;
#pragma unroll
    for (int n = 0; n < 32; n += 4) {
      unsigned words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) words[j] = pack2(out[n + j][2 * i] * inverse, out[n + j][2 * i + 1] * inverse);
      transpose_quad(words, lane);
      if (out_row >= 0) {
        *reinterpret_cast<uint4*>(destination + n * 8) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
    if (p.lse != nullptr && lane % 4 == 0 && out_row >= 0) {
      p.lse[out_row] = log_sum_exp(rows.max[i], total, p.scale_log2);
    }
  }
}

// Starts the copies of a tile's query rows to [column block][row][128 bytes], zeros past the last.
__device__ __forceinline__ void copy_pair_queries(const AttentionParams& p, const TileTask& task, unsigned queries,
                                                  int warp, int lane) {
  using Shape = PairPrefill;
  const unsigned at = queries + lane / 8 * Shape::kQueryBlockBytes;
#pragma unroll
  for (int i = 0; i < Shape::kRows / Shape::kWarpsOfGroup; ++i) {
    const int row = i * Shape::kWarpsOfGroup + warp;
    const int out_row = task.out_row[row];
    // q[row][lane][8 columns]
    const bf16_bits* source = p.q + (long long)max(out_row, 0) * Shape::kHeadDim + lane * 8;
    copy_async(at + swizzled<kBlockColumns>(row, lane % 8), source, out_row >= 0);
  }
  commit_copies();
}

// One of the two tiles of every pair.
__device__ __forceinline__ void consume_pairs(const AttentionParams& p, unsigned shared, const unsigned char* memory,
                                              int which, int warp, int lane) {
  using Shape = PairPrefill;
  const int first_row = warp * kRowsPerTile;
  const unsigned queries = shared + Shape::kQueries + which * Shape::kQueryBytes;
  const int count = TilePair::count(p);
  PairRings rings;
  RingPlace<Shape::kTaskSlots> slots;
  const auto task_of_slot = [&]() -> const TileTask& {
    barrier_wait(shared + Shape::kTaskThere + (which * Shape::kTaskSlots + slots.stage) * 8, slots.parity);
    return *reinterpret_cast<const TileTask*>(memory + Shape::task_offset(which, slots.stage));
  };
  const auto release_task = [&](int stage) {
    __syncwarp();
    if (lane == 0) barrier_arrive(shared + Shape::kTaskUsed + (which * Shape::kTaskSlots + stage) * 8);
  };
  if ((int)blockIdx.x < count) copy_pair_queries(p, task_of_slot(), queries, warp, lane);
#pragma unroll 1
  for (int number = blockIdx.x; number < count; number += gridDim.x) {
    const TileTask& task = task_of_slot();
    const int slot = slots.stage;
    slots.advance();
    wait_copies<0>();
    fence_async_copies();
    for (int blocks = task.skip_before; blocks > 0; --blocks) skip_block(shared, rings, lane);
    synchronize_warpgroup(1 + which);
    const auto copy_next = [&] {
      if (number + (int)gridDim.x < count) copy_pair_queries(p, task_of_slot(), queries, warp, lane);
    };
    int first_key = task.first_key;
    const int last_key = task.last_key;
    if (last_key < first_key) {
      copy_next();
      release_task(slot);
      continue;
    }

    PairRows rows;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows.newest[i] = task.newest[first_row + lane / 4 + i * 8];
      rows.max[i] = minus_infinity();
      rows.sum[i] = 0.0f;
    }
    const int oldest_whole = task.oldest_whole, newest_whole = task.newest_whole;
    float out[32][4] = {};
    unsigned weights[4][4];
    {
      float scores[8][4];
      int stages[Shape::kKeyStagesOfBlock];
      start_scores(scores, shared, queries, rings, stages);
      wait_wgmma<0>();
      hold_order(scores);
      release_keys(shared, stages, lane);
      float factor[2];  // of nothing
      weigh_block<true>(scores, rows, factor, p, first_key, lane);
      pack_weights(weights, scores);
    }
    // A loop for the blocks that all of the tile's rows see whole, one for those that some row does not.
#pragma unroll 1
    while (first_key < last_key) {
#pragma unroll 1
      while (first_key < last_key && first_key + Shape::kKeys >= oldest_whole &&
             first_key + 2 * Shape::kKeys - 1 <= newest_whole) {
        first_key += Shape::kKeys;
        step_block<false>(out, weights, rows, p, shared, queries, rings, first_key, lane);
      }
      if (first_key < last_key) {
        first_key += Shape::kKeys;
        step_block<true>(out, weights, rows, p, shared, queries, rings, first_key, lane);
      }
    }
    start_sums(out, weights, shared, rings);
    synchronize_warpgroup(1 + which);  // nobody reads the queries any more
    copy_next();
    wait_wgmma<0>();
    hold_order(out);
    release_values(shared, rings, lane);
    for (int blocks = task.skip_behind; blocks > 0; --blocks) skip_block(shared, rings, lane);
    store_pair_rows(p, task, out, rows, first_row, lane);
    release_task(slot);
  }
}

__device__ __forceinline__ void attend_pairs(const AttentionParams& p, const TensorMap& key_map,
                                             const TensorMap& value_map) {
  using Shape = PairPrefill;
  extern __shared__ __align__(1024) unsigned char memory[];
  const unsigned shared = shared_address(memory);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int group = warp / Shape::kWarpsOfGroup;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Shape::kKeyStages; ++stage) {
      barrier_init(shared + Shape::kKeysThere + stage * 8, 1);
      barrier_init(shared + Shape::kKeysUsed + stage * 8, Shape::kConsumerWarps);
    }
    for (int stage = 0; stage < Shape::kValueStages; ++stage) {
      barrier_init(shared + Shape::kValuesThere + stage * 8, 1);
      barrier_init(shared + Shape::kValuesUsed + stage * 8, Shape::kConsumerWarps);
    }
    barrier_init(shared + Shape::kValuesLanded, 1);
    for (int tile = 0; tile < Shape::kTiles; ++tile) {
      for (int slot = 0; slot < Shape::kTaskSlots; ++slot) {
        barrier_init(shared + Shape::kTaskThere + (tile * Shape::kTaskSlots + slot) * 8, 1);
        barrier_init(shared + Shape::kTaskUsed + (tile * Shape::kTaskSlots + slot) * 8, Shape::kWarpsOfGroup);
      }
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (group == Shape::kTiles) {
    give_registers<Shape::kProducerRegisters>();
    switch (warp % Shape::kWarpsOfGroup) {
      case 0:
        produce_pair_keys(p, key_map, shared, lane);
        break;
      case 1:
        produce_pair_values(p, value_map, shared, lane);
        break;
      default:
        produce_tasks(p, shared, memory, warp % Shape::kWarpsOfGroup - 2, lane);
    }
  } else {
    take_registers<Shape::kConsumerRegisters>();
    consume_pairs(p, shared, memory, group, warp % Shape::kWarpsOfGroup, lane);
  }
}

}  // namespace g4kv
