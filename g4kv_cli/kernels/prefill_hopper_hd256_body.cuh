// Prefill attention at head_dim 256 by warpgroups (compute capability 9.0 alone).
//
// A block serves two neighbouring tiles of 64 packed query rows of one KV head, one a consumer warpgroup. K and V pass
// through shared memory in blocks of 64 keys, which both tiles use; each skips the blocks that it does not see. Tiles of
// different requests share no keys: the block then walks the one's and behind them the other's. Blocks of threads stay,
// one a multiprocessor, and take pair after pair: copies for the next are on their way while this one ends.
//
// A short request's tiles leave most of the card idle. There two blocks of threads, a cluster, serve a pair of tiles,
// half of the keys each. What they found is merged at the end through each other's shared memory (TileUnit, PairPeer).
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
  static constexpr int kKeyStages = 3;
  static constexpr int kValueStages = 2;
  static constexpr int kKeyBlockBytes = kKeys * kSwizzleRowBytes;  // one column block of K
  static constexpr int kKeyStageBytes = kColumnBlocks * kKeyBlockBytes;
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
  static constexpr int kFirstKeysThere = kValuesLanded + 8;             // once
  static constexpr int kTaskSlots = 2;
  static constexpr int kTaskThere = kFirstKeysThere + 8;                // [tile][slot], the tile's queries too
  static constexpr int kTaskUsed = kTaskThere + kTiles * kTaskSlots * 8;
  static constexpr int kQueriesUsed = kTaskUsed + kTiles * kTaskSlots * 8;  // [tile]
  static constexpr int kPeerReady = kQueriesUsed + kTiles * 8;              // [tile]
  static constexpr int kPeerSums = kPeerReady + kTiles * 8;                 // [tile]
  static constexpr int kStates = kPeerSums + kTiles * 8;  // [tile][warp][8 pairs of rows][reference, sum, and again]
  static constexpr int kStateBytes = kRows * 2 * 4;
  static constexpr int kTasks = kStates + kTiles * kStateBytes;  // [tile][slot]
  static constexpr int kTaskBytes = 368;
  static constexpr int kSharedBytes = kTasks + kTiles * kTaskSlots * kTaskBytes;

  static __device__ __forceinline__ int task_offset(int tile, int slot) {
    return kTasks + (tile * kTaskSlots + slot) * kTaskBytes;
  }
};

// What a consumer warpgroup has to know of a tile: a warp works it out beside the tiles before.
struct TileTask {
  int out_row[PairPrefill::kRows];           // in q, out and lse; -1: past the tile's last
  unsigned char newer[PairPrefill::kRows];  // the last key that each row sees, from newest_whole on
  int skip_before;                          // blocks that the walk has in front of the consumer's and behind them
  int skip_behind;
  bool is_end;    // no more tasks
  bool is_split;  // the other block of the cluster has the same tile and the other keys
  int first_key;  // of its first and last block; none if the last is in front of the first
  int last_key;
  int oldest_whole;  // keys from here on to newest_whole are seen by all rows
  int newest_whole;
};

static_assert(sizeof(TileTask) <= PairPrefill::kTaskBytes, "");

// Keys [begin, end) of a request, walked in whole blocks. Those of [oldest, kv_len) are the request's and seen by some
// query of it: what stands in other slots may be NaN.
struct KeyWalk {
  int first_page;  // where in page_indices the request's page 0 is, or would be
  int begin;
  int end;
  int oldest;
  int kv_len;

  __device__ __forceinline__ int first_key() const { return begin / PairPrefill::kKeys * PairPrefill::kKeys; }
  __device__ __forceinline__ int blocks() const {
    return max(1, ceil_divide(end, PairPrefill::kKeys) - begin / PairPrefill::kKeys);
  }
};

// What a block of threads works on in one go: a pair of tiles, one a consumer, of which each has all its keys or half of
// them. A cluster's two blocks have the halves of the same pairs in the same order. Keys of tiles of requests that leave
// most of the card idle are halved: it is the request alone that decides whether and where.
//
// A warp works it out together, lane l what is tile l % 2's: a launch begins with this, and its instructions are fetched
// one line after the other.
struct TileUnit {
  static constexpr int kSplitKeys = 512;  // fewer keys of a request's first token are not worth it
  static constexpr int kAllKeys = 2;

  int kv_head;
  int part;                       // of the keys: 0, 1 or kAllKeys
  bool has[PairPrefill::kTiles];  // a tile for this consumer
  bool is_shared;                 // the consumers' keys are one request's, and walked once

  // Wholes [pair, last first][kv_head], and halves [pair, last first][kv_head][part], where a launch has clusters: the
  // last tiles of a request see the most keys. A pair whose tiles are of both kinds is in both, with one tile each. Halves
  // come behind the wholes, which take longer, unless there can be no wholes of many tiles.
  __device__ __forceinline__ TileUnit(const AttentionParams& p, int number, int lane) {
    // Each time anew: what the compiler works out ahead of all units takes registers.
    int num_tiles = p.num_tiles;
    asm volatile("" : "+r"(num_tiles));
    const int pairs = ceil_divide(num_tiles, PairPrefill::kTiles), units = pairs * p.num_kv_heads;
    part = kAllKeys;
    if (p.num_splits > 0) {
      const bool halves_first = num_tiles * p.num_kv_heads <= p.num_splits;
      const int half = halves_first ? number : number - whole_numbers(units);
      if (half >= 0 && half < 2 * units) {
        part = half % 2;
        number = half / 2;
      } else if (halves_first) {
        number -= 2 * units;
      }
    }
    const int rank = (unsigned)number / (unsigned)p.num_kv_heads;
    kv_head = number - rank * p.num_kv_heads;
    // Negative behind the last unit, where there is nothing.
    const int tile = (pairs - 1 - rank) * PairPrefill::kTiles + lane % PairPrefill::kTiles;
    const int nearest = min(max(tile, 0), num_tiles - 1);
    index_ = p.tile_indices[nearest];
    rows_ = load_request(p, p.tile_requests[nearest]);
    oldest_ = p.window_left < 0 ? 0 : max(0, rows_.kv_len - rows_.q_len - p.window_left);
    first_page_ = p.page_indptr[rows_.request] - p.page_origins[rows_.request];
    const bool is_mine = tile == nearest && is_split_request(p) == (part != kAllKeys);
    const unsigned tiles = __ballot_sync(kAllLanes, is_mine);
    has[0] = tiles & 1;
    has[1] = tiles & 2;
    is_shared = has[0] && has[1] && of(rows_.request, 0) == of(rows_.request, 1);
    // The middle is that of a pair which begins at an even tile of the request, whatever pair the tile is in here. Lanes
    // 2 and 3 have that pair's keys.
    const bool of_pair = part != kAllKeys && lane % 4 >= 2;
    begin_ = tile_of(p, rows_, of_pair ? index_ & ~1 : index_, kv_head, PairPrefill::kRows).begin;
    end_ = tile_of(p, rows_, of_pair ? index_ | 1 : index_, kv_head, PairPrefill::kRows).end;
    if (part != kAllKeys) {
      const int blocks = begin_ / PairPrefill::kKeys + ceil_divide(end_, PairPrefill::kKeys);
      const int middle = (__shfl_sync(kAllLanes, blocks, lane | 2) + 1) / 2 * PairPrefill::kKeys;
      if (part == 0) {
        end_ = min(end_, middle);
      } else {
        begin_ = max(begin_, middle);
      }
    }
  }

  static __device__ __forceinline__ int count(const AttentionParams& p) {
    const int units = ceil_divide(p.num_tiles, PairPrefill::kTiles) * p.num_kv_heads;
    return p.num_splits > 0 ? whole_numbers(units) + 2 * units : units;
  }

  __device__ __forceinline__ int walks() const { return has[0] + (has[1] && !(has[0] && is_shared)); }

  // All lanes of the warp come here, as below.
  __device__ __forceinline__ TileGeometry tile(const AttentionParams& p, int which) const {
    const RequestRows rows = {of(rows_.request, which), of(rows_.first_token, which), of(rows_.q_len, which),
                              of(rows_.kv_len, which)};
    TileGeometry tile = tile_of(p, rows, of(index_, which), kv_head, PairPrefill::kRows);
    tile.begin = of(begin_, which);
    tile.end = of(end_, which);
    return tile;
  }

  __device__ __forceinline__ KeyWalk walk(const AttentionParams& p, int number) const {
    const int which = has[0] ? number : 1;
    KeyWalk walk = {of(first_page_, which), of(begin_, which), of(end_, which), of(oldest_, which),
                    of(rows_.kv_len, which)};
    if (is_shared) {
      walk.begin = min(walk.begin, of(begin_, 1));
      walk.end = max(walk.end, of(end_, 1));
    }
    return walk;
  }

 private:
  // Of tile lane % 2; keys of the part.
  RequestRows rows_;
  int index_;
  int first_page_;
  int oldest_;  // that the request's first token sees
  int begin_;
  int end_;

  static __device__ __forceinline__ int of(int value, int which) { return __shfl_sync(kAllLanes, value, which); }

  // Even, so that each part is that of one block of the cluster.
  static __device__ __forceinline__ int whole_numbers(int units) { return units + units % 2; }

  // p.num_splits: tiles times KV heads of such a request at most. Each part of its keys then has some of every row.
  __device__ __forceinline__ bool is_split_request(const AttentionParams& p) const {
    const int tiles = ceil_divide(rows_.q_len * (p.num_qo_heads / p.num_kv_heads), PairPrefill::kRows);
    const int seen_first = rows_.kv_len - rows_.q_len + 1 - oldest_;
    return tiles > 1 && tiles * p.num_kv_heads <= p.num_splits && seen_first >= kSplitKeys;
  }
};

// Where a producing warp is: the stage of its ring, and the phase of what else it waits for.
struct ProducerPlace {
  int stage = 0;
  unsigned parity = 0;
  unsigned other_parity = 0;
  bool is_first = true;
  template <int kStages>
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// K, a stage: [column block][64 keys][64 columns]. Lane l copies 16 keys of one column block. The first block of all
// (of both consumers) has the way for itself, with the queries: nothing can begin before it is there.
__device__ __forceinline__ void copy_pair_keys(const AttentionParams& p, const TensorMap& map, const TileUnit& unit,
                                               ProducerPlace& ring, unsigned shared, int lane) {
  using Shape = PairPrefill;
  const int box = lane % Shape::kBoxesOfKeys, column_block = lane / Shape::kBoxesOfKeys % Shape::kColumnBlocks;
  const unsigned place_in_stage = column_block * Shape::kKeyBlockBytes + box * Shape::kKeyBoxBytes;
#pragma unroll 1
  for (int which = 0; which < unit.walks(); ++which) {
    const KeyWalk walk = unit.walk(p, which);
    const PageRow row(p.page_indices + walk.first_page, walk.begin, walk.end);
    const int first_column_block = unit.kv_head * Shape::kColumnBlocks + column_block;
    int key = walk.first_key() + box * kBoxKeys;
#pragma unroll 1
    for (int blocks = walk.blocks(); blocks > 0; --blocks) {
      const BoxPlace place = row.place_of(p, key);  // early: the page id is on its way
      const unsigned there = shared + Shape::kKeysThere + ring.stage * 8;
      barrier_wait(shared + Shape::kKeysUsed + ring.stage * 8, ring.parity ^ 1);
      if (lane == 0) barrier_expect(there, Shape::kKeyStageBytes);
      __syncwarp();
      if (lane < Shape::kBoxesOfKeys * Shape::kColumnBlocks) {
        // map[page][kv_head, column block][slot][column]
        copy_box(shared + Shape::kKeyRing + ring.stage * Shape::kKeyStageBytes + place_in_stage, map, there, 0,
                 place.slot, first_column_block, place.page);
      }
      if (ring.is_first) {
        barrier_wait(shared + Shape::kKeysThere, 0);
        if (lane == 0) barrier_arrive(shared + Shape::kFirstKeysThere);
        ring.is_first = false;
      }
      ring.advance<Shape::kKeyStages>();
      key += Shape::kKeys;
    }
  }
}

// V, a stage: [16 keys four times][column block][16 keys][64 columns]. Lane l copies 16 keys. Rows that are
// no visible key of the request are cleared before the stage counts as there: zero weights do not hide NaN.
__device__ __forceinline__ void copy_pair_values(const AttentionParams& p, const TensorMap& map, const TileUnit& unit,
                                                 ProducerPlace& ring, unsigned shared, int lane) {
  using Shape = PairPrefill;
  const int box = lane % Shape::kBoxesOfKeys;
#pragma unroll 1
  for (int which = 0; which < unit.walks(); ++which) {
    const KeyWalk walk = unit.walk(p, which);
    const PageRow row(p.page_indices + walk.first_page, walk.begin, walk.end);
    int first_key = walk.first_key();
#pragma unroll 1
    for (int blocks = walk.blocks(); blocks > 0; --blocks) {
      const BoxPlace place = row.place_of(p, first_key + box * kBoxKeys);
      const unsigned stage = shared + Shape::kValueRing + ring.stage * Shape::kValueStageBytes;
      const unsigned there = shared + Shape::kValuesThere + ring.stage * 8;
      const bool is_whole = first_key >= walk.oldest && first_key + Shape::kKeys <= walk.kv_len;
      const unsigned counting = is_whole ? there : shared + Shape::kValuesLanded;
      if (ring.is_first) barrier_wait(shared + Shape::kFirstKeysThere, 0);
      ring.is_first = false;
      barrier_wait(shared + Shape::kValuesUsed + ring.stage * 8, ring.parity ^ 1);
      if (lane == 0) barrier_expect(counting, Shape::kValueStageBytes);
      __syncwarp();
      if (lane < Shape::kBoxesOfKeys) {
        // map[page][kv_head, column block][slot][column]
        copy_box(stage + box * Shape::kValueBoxBytes, map, counting, 0, place.slot,
                 unit.kv_head * Shape::kColumnBlocks, place.page);
      }
      if (!is_whole) {
        barrier_wait(counting, ring.other_parity);
        ring.other_parity ^= 1;
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
      ring.advance<Shape::kValueStages>();
      first_key += Shape::kKeys;
    }
  }
}

// What a consumer has to know of its tile, by one warp.
__device__ __forceinline__ void write_task(TileTask& task, const AttentionParams& p, const TileUnit& unit,
                                           const TileGeometry& tile, int which, int lane) {
  using Shape = PairPrefill;
#pragma unroll
  for (int row = lane; row < Shape::kRows; row += kWarpSize) {
    task.newer[row] = position_of(tile, row) - position_of(tile, 0);
    // out[row][head_dim]
    task.out_row[row] =
        row < tile.num_rows ? (int)(query_offset<Shape::kHeadDim>(p, tile, row) / Shape::kHeadDim) : -1;
  }
  const KeyWalk walk = unit.walk(p, 0);
  const int blocks_behind = which == 0 && unit.has[1] && !unit.is_shared ? unit.walk(p, 1).blocks() : 0;
  if (lane != 0) return;
  const int first_block = tile.begin / Shape::kKeys;
  const int last_block = max(ceil_divide(tile.end, Shape::kKeys) - 1, first_block);
  task.is_end = false;
  task.is_split = unit.part != TileUnit::kAllKeys;
  task.first_key = first_block * Shape::kKeys;
  task.last_key = last_block * Shape::kKeys;
  if (unit.is_shared) {
    task.skip_before = first_block - walk.begin / Shape::kKeys;
    task.skip_behind = walk.blocks() - 1 - (last_block - walk.begin / Shape::kKeys);
  } else {
    task.skip_before = which == 1 && unit.has[0] ? walk.blocks() : 0;
    task.skip_behind = blocks_behind;
  }
  task.oldest_whole = first_visible(tile, position_of(tile, Shape::kRows - 1));
  task.newest_whole = position_of(tile, 0);
}

// Nothing but blocks of the other consumer's to pass over, or the end.
__device__ __forceinline__ void write_no_task(TileTask& task, bool is_end, int blocks, int lane) {
  if (lane != 0) return;
  task.is_end = is_end;
  task.is_split = false;
  task.skip_before = blocks;
  task.first_key = 0;
  task.last_key = -1;
}

// A tile's query rows to [column block][row][128 bytes], by one copy, which `there` counts.
__device__ __forceinline__ void copy_query_box(const TensorMap& map, const TileGeometry& tile, unsigned queries,
                                               unsigned there, int lane) {
  if (lane != 0) return;
  barrier_expect_more(there, PairPrefill::kQueryBytes);
  // map[column block][token][head][column]: rows past the tile's last are other tokens', or zeros
  copy_box(queries, map, there, 0, tile.kv_head * tile.group, tile.first_token + tile.first_row / tile.group, 0);
}

// The same of a tile that begins inside of a token, row by row, by one warp: zeros past the last.
__device__ __forceinline__ void copy_query_rows(const AttentionParams& p, const TileTask& task, unsigned queries,
                                                int lane) {
  using Shape = PairPrefill;
  const unsigned at = queries + lane / 8 * Shape::kQueryBlockBytes;
  __syncwarp();
#pragma unroll 1
  for (int row = 0; row < Shape::kRows; ++row) {
    const int out_row = task.out_row[row];
    // q[row][lane][8 columns]
    const bf16_bits* source = p.q + (long long)max(out_row, 0) * Shape::kHeadDim + lane * 8;
    copy_async(at + swizzled<kBlockColumns>(row, lane % 8), source, out_row >= 0);
  }
  commit_copies();
  wait_copies<0>();
  fence_async_copies();
}

// A consumer's tiles: what it has to know of each, and the queries.
__device__ __forceinline__ void produce_task(const AttentionParams& p, const TensorMap& map, const TileUnit& unit,
                                             bool is_end, ProducerPlace& slots, unsigned shared,
                                             unsigned char* memory, int which, int lane) {
  using Shape = PairPrefill;
  const int barrier = (which * Shape::kTaskSlots + slots.stage) * 8;
  const unsigned there = shared + Shape::kTaskThere + barrier;
  TileTask& task = *reinterpret_cast<TileTask*>(memory + Shape::task_offset(which, slots.stage));
  barrier_wait(shared + Shape::kTaskUsed + barrier, slots.parity ^ 1);
  slots.advance<Shape::kTaskSlots>();
  if (is_end || !(which ? unit.has[1] : unit.has[0])) {
    write_no_task(task, is_end, is_end ? 0 : unit.walk(p, 0).blocks(), lane);
    barrier_arrive(there);
    return;
  }
  const TileGeometry tile = unit.tile(p, which);
  const unsigned queries = shared + Shape::kQueries + which * Shape::kQueryBytes;
  barrier_wait(shared + Shape::kQueriesUsed + which * 8, slots.other_parity ^ 1);
  slots.other_parity ^= 1;
  const bool is_box = Shape::kRows % tile.group == 0;
  if (is_box) copy_query_box(map, tile, queries, there, lane);
  write_task(task, p, unit, tile, which, lane);
  if (!is_box) copy_query_rows(p, task, queries, lane);
  barrier_arrive(there);
}

// By the four warps that produce: K, V, and each consumer's tiles.
__device__ __forceinline__ void produce_pairs(const AttentionParams& p, const TensorMap& key_map,
                                              const TensorMap& value_map, const TensorMap& query_map, unsigned shared,
                                              unsigned char* memory, int warp, int lane) {
  ProducerPlace place;
#pragma unroll 1
  for (int number = blockIdx.x;; number += gridDim.x) {
    const TileUnit unit(p, number, lane);
    const bool is_end = number >= TileUnit::count(p);
    if (!is_end && unit.walks() == 0) continue;
    if (warp == 0) {
      if (!is_end) copy_pair_keys(p, key_map, unit, place, shared, lane);
    } else if (warp == 1) {
      if (!is_end) copy_pair_values(p, value_map, unit, place, shared, lane);
    } else {
      produce_task(p, query_map, unit, is_end, place, shared, memory, warp - 2, lane);
    }
    if (is_end) return;
  }
}

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
// row that a new one has to exceed by kSlack, as weights go (log2), to take its place: raised at every new maximum it is
// 9 % slower on an H200. No weight is above 2 to the kSlack. A key that outweighs all before it by more weighs one,
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

// Normalised sums of kColumns columns from kFirst * 8 on, `inverse` one over the sum of weights; to `out_rows`, of which
// -1 is nowhere.
template <int kFirst, int kTiles>
__device__ __forceinline__ void store_columns(const AttentionParams& p, const float (&out)[32][4],
                                              const int (&out_rows)[2], const float (&inverse)[2], int lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    bf16_bits* destination = p.out + (long long)max(out_rows[i], 0) * PairPrefill::kHeadDim + lane % 4 * 8;
#pragma unroll
    for (int n = kFirst; n < kFirst + kTiles; n += 4) {
      unsigned words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        words[j] = pack2(out[n + j][2 * i] * inverse[i], out[n + j][2 * i + 1] * inverse[i]);
      }
      transpose_quad(words, lane);
      if (out_rows[i] >= 0) {
        *reinterpret_cast<uint4*>(destination + n * 8) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

__device__ __forceinline__ float inverse_of(float total) { return total > 0.0f ? 1.0f / total : 0.0f; }

__device__ __forceinline__ void store_log_sums(const AttentionParams& p, const int (&out_rows)[2],
                                               const float (&reference)[2], const float (&total)[2], int lane) {
  if (p.lse == nullptr || lane % 4 != 0) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (out_rows[i] >= 0) p.lse[out_rows[i]] = log_sum_exp(reference[i], total[i], p.scale_log2);
  }
}

__device__ __forceinline__ void store_pair_rows(const AttentionParams& p, const TileTask& task,
                                                const float (&out)[32][4], const PairRows& rows, int first_row,
                                                int lane) {
  const int row = first_row + lane / 4;
  const int out_rows[2] = {task.out_row[row], task.out_row[row + 8]};
  const float total[2] = {row_sum(rows.sum[0]), row_sum(rows.sum[1])};
  const float inverse[2] = {inverse_of(total[0]), inverse_of(total[1])};
  store_columns<0, 32>(p, out, out_rows, inverse, lane);
  store_log_sums(p, out_rows, rows.reference, total, lane);
}

// The consumer of the cluster's other block that has the same tile and the other keys. Each puts what it found of the
// other's columns where that one's queries were, once they are not read any more.
struct PairPeer {
  unsigned own;    // this block's shared memory
  unsigned other;  // and the other's
  int which;

  __device__ __forceinline__ PairPeer(unsigned shared, int consumer)
      : own(shared), other(shared_of_rank(shared, 1 - cluster_rank())), which(consumer) {}

  // From here on the other may store there: this consumer's last scores are done.
  __device__ __forceinline__ void let_store(int warp, int lane) const {
    if (lane != 0) return;
    if (warp == 0) barrier_expect(own + PairPrefill::kPeerSums + which * 8, kBytes);
    barrier_arrive_at_rank(other + PairPrefill::kPeerReady + which * 8);
  }

  __device__ __forceinline__ void wait_until_ready(unsigned parity) const {
    barrier_wait(own + PairPrefill::kPeerReady + which * 8, parity);
  }

  // queries[tile of 8 columns][thread][4], states[warp][8][4]
  __device__ __forceinline__ void store_tile(int tile, const float (&sums)[4], int thread) const {
    push(other + columns_at(tile, thread), make_float4(sums[0], sums[1], sums[2], sums[3]), there());
  }

  __device__ __forceinline__ void store_state(const float (&reference)[2], const float (&total)[2], int warp,
                                              int lane) const {
    if (lane % 4 != 0) return;
    push(other + state_at(warp, lane), make_float4(reference[0], total[0], reference[1], total[1]), there());
  }

  __device__ __forceinline__ void wait_for_sums(unsigned parity) const {
    barrier_wait(own + PairPrefill::kPeerSums + which * 8, parity);
  }

  __device__ __forceinline__ float4 tile(const unsigned char* memory, int tile, int thread) const {
    return *reinterpret_cast<const float4*>(memory + columns_at(tile, thread));
  }

  __device__ __forceinline__ float4 state(const unsigned char* memory, int warp, int lane) const {
    return *reinterpret_cast<const float4*>(memory + state_at(warp, lane));
  }

 private:
  static constexpr int kBytes = PairPrefill::kRows * PairPrefill::kHeadDim / 2 * 4 + PairPrefill::kStateBytes;
  static_assert(PairPrefill::kRows * PairPrefill::kHeadDim / 2 * 4 == PairPrefill::kQueryBytes, "");

  __device__ __forceinline__ unsigned there() const { return other + PairPrefill::kPeerSums + which * 8; }
  __device__ __forceinline__ int columns_at(int tile, int thread) const {
    return PairPrefill::kQueries + which * PairPrefill::kQueryBytes + (tile * kWarpgroupSize + thread) * 16;
  }
  __device__ __forceinline__ int state_at(int warp, int lane) const {
    return PairPrefill::kStates + which * PairPrefill::kStateBytes + (warp * 8 + lane / 4) * 16;
  }
};

// A tile whose keys two blocks share out: the one of rank kRank stores 128 columns, from what both found.
template <int kRank>
__device__ __forceinline__ void store_merged_rows(const AttentionParams& p, const TileTask& task, const PairPeer& peer,
                                                  float (&out)[32][4], const PairRows& rows,
                                                  const unsigned char* memory, unsigned parity,
                                                  unsigned queries_used, int warp, int lane) {
  constexpr int kOwn = kRank * 16, kOthers = 16 - kOwn;  // tiles of 8 columns
  const int row = warp * kRowsPerTile + lane / 4, thread = warp * kWarpSize + lane;
  const int out_rows[2] = {task.out_row[row], task.out_row[row + 8]};
  const float total[2] = {row_sum(rows.sum[0]), row_sum(rows.sum[1])};
  peer.wait_until_ready(parity);
  peer.store_state(rows.reference, total, warp, lane);
#pragma unroll
  for (int n = 0; n < 16; ++n) peer.store_tile(n, out[kOthers + n], thread);
  peer.wait_for_sums(parity);
  const float4 state = peer.state(memory, warp, lane);
  const float other_reference[2] = {state.x, state.z}, other_total[2] = {state.y, state.w};
  float reference[2], all[2], inverse[2], own_factor[2], other_factor[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    reference[i] = fmaxf(rows.reference[i], other_reference[i]);
    const float finite = finite_max(reference[i]);
    own_factor[i] = exp2_approx((rows.reference[i] - finite) * p.scale_log2);
    other_factor[i] = exp2_approx((other_reference[i] - finite) * p.scale_log2);
    all[i] = total[i] * own_factor[i] + other_total[i] * other_factor[i];
    inverse[i] = inverse_of(all[i]);
  }
#pragma unroll
  for (int n = 0; n < 16; ++n) {
    const float4 found = peer.tile(memory, n, thread);
    float(&tile)[4] = out[kOwn + n];
    tile[0] = tile[0] * own_factor[0] + found.x * other_factor[0];
    tile[1] = tile[1] * own_factor[0] + found.y * other_factor[0];
    tile[2] = tile[2] * own_factor[1] + found.z * other_factor[1];
    tile[3] = tile[3] * own_factor[1] + found.w * other_factor[1];
  }
  fence_async_copies();  // before queries are copied there again
  __syncwarp();
  if (lane == 0) barrier_arrive(queries_used);
  store_columns<kOwn, 16>(p, out, out_rows, inverse, lane);
  if (kRank == 0) store_log_sums(p, out_rows, reference, all, lane);
}

// A consumer's tile of every unit.
__device__ __forceinline__ void consume_pairs(const AttentionParams& p, unsigned shared, unsigned char* memory,
                                              int which, int warp, int lane) {
  using Shape = PairPrefill;
  const int first_row = warp * kRowsPerTile;
  const unsigned queries = matrix_descriptor(shared + Shape::kQueries + which * Shape::kQueryBytes, 0);
  const unsigned queries_used = shared + Shape::kQueriesUsed + which * 8;
  const float slack = PairRows::kSlack / p.scale_log2;
  PairRings rings;
  unsigned turn = 0, peer_parity = 0;
  if (p.num_splits > 0) cluster_wait();  // from here on the other block may be stored to
#pragma unroll 1
  for (;;) {
    const int slot = turn % Shape::kTaskSlots;
    barrier_wait(shared + Shape::kTaskThere + (which * Shape::kTaskSlots + slot) * 8, turn / Shape::kTaskSlots % 2);
    const TileTask& task = *reinterpret_cast<TileTask*>(memory + Shape::task_offset(which, slot));
    const auto release_task = [&] {
      __syncwarp();
      if (lane == 0) barrier_arrive(shared + Shape::kTaskUsed + (which * Shape::kTaskSlots + slot) * 8);
      ++turn;
      __syncwarp();
    };
    if (task.is_end) return;
    const bool is_split = task.is_split;
    skip_blocks(task.skip_before, shared, rings, lane);
    int first_key = task.first_key;
    const int last_key = task.last_key;
    if (last_key < first_key) {
      release_task();
      continue;
    }
    float out[32][4] = {};
    PairRows rows;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows.newest[i] = task.newest_whole + task.newer[first_row + lane / 4 + i * 8];
      rows.reference[i] = minus_infinity();
      rows.sum[i] = 0.0f;
    }
    const unsigned used = is_split ? 0 : queries_used;
    const int oldest_whole = task.oldest_whole, newest_whole = task.newest_whole;
    unsigned weights[4][4];
    {
      float scores[8][4];
      start_scores(scores, shared, queries, rings);
      hold_order(out);  // zeros now, beside the products
      wait_wgmma<0>();
      hold_order(scores);
      release_keys(shared, rings, first_key < last_key ? 0 : used, lane);
      float factor[2];  // of nothing
      weigh_block<true>(scores, rows, factor, p, slack, first_key, lane);
      pack_weights(weights, scores);
    }
    // A loop for the blocks that all of the tile's rows see whole, one for those that some row does not.
#pragma unroll 1
    while (first_key < last_key) {
#pragma unroll 1
      while (first_key < last_key && first_key + Shape::kKeys >= oldest_whole &&
             first_key + Shape::kKeys + Shape::kKeys - 1 <= newest_whole) {
        first_key += Shape::kKeys;
        step_block<false>(out, weights, rows, p, slack, shared, queries, rings, first_key,
                          first_key < last_key ? 0 : used, lane);
      }
      if (first_key < last_key) {
        first_key += Shape::kKeys;
        step_block<true>(out, weights, rows, p, slack, shared, queries, rings, first_key,
                         first_key < last_key ? 0 : used, lane);
      }
    }
    if (is_split) PairPeer(shared, which).let_store(warp, lane);
    start_sums(out, weights, shared, rings);
    wait_wgmma<0>();
    hold_order(out);
    release_values(shared, rings, lane);
    skip_blocks(task.skip_behind, shared, rings, lane);
    if (is_split) {
      const PairPeer peer(shared, which);
      if (cluster_rank() == 0) {
        store_merged_rows<0>(p, task, peer, out, rows, memory, peer_parity, queries_used, warp, lane);
      } else {
        store_merged_rows<1>(p, task, peer, out, rows, memory, peer_parity, queries_used, warp, lane);
      }
      peer_parity ^= 1;
    } else {
      store_pair_rows(p, task, out, rows, first_row, lane);
    }
    release_task();
  }
}

__device__ __forceinline__ void attend_pairs(const AttentionParams& p, const TensorMap& key_map,
                                             const TensorMap& value_map, const TensorMap& query_map) {
  using Shape = PairPrefill;
  extern __shared__ __align__(1024) unsigned char memory[];
  const unsigned shared = shared_address(memory);
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int group = warp / Shape::kWarpsOfGroup;
  if (threadIdx.x == 0) {
    prefetch_map(query_map);
    prefetch_map(key_map);
    prefetch_map(value_map);
    for (int stage = 0; stage < Shape::kKeyStages; ++stage) {
      barrier_init(shared + Shape::kKeysThere + stage * 8, 1);
      barrier_init(shared + Shape::kKeysUsed + stage * 8, Shape::kConsumerWarps);
    }
    for (int stage = 0; stage < Shape::kValueStages; ++stage) {
      barrier_init(shared + Shape::kValuesThere + stage * 8, 1);
      barrier_init(shared + Shape::kValuesUsed + stage * 8, Shape::kConsumerWarps);
    }
    barrier_init(shared + Shape::kValuesLanded, 1);
    barrier_init(shared + Shape::kFirstKeysThere, 1);
    for (int tile = 0; tile < Shape::kTiles; ++tile) {
      barrier_init(shared + Shape::kQueriesUsed + tile * 8, Shape::kWarpsOfGroup);
      barrier_init(shared + Shape::kPeerReady + tile * 8, Shape::kWarpsOfGroup);
      barrier_init(shared + Shape::kPeerSums + tile * 8, 1);
      for (int slot = 0; slot < Shape::kTaskSlots; ++slot) {
        barrier_init(shared + Shape::kTaskThere + (tile * Shape::kTaskSlots + slot) * 8, kWarpSize);
        barrier_init(shared + Shape::kTaskUsed + (tile * Shape::kTaskSlots + slot) * 8, Shape::kWarpsOfGroup);
      }
    }
    fence_barrier_init();
  }
  __syncthreads();
  if (p.num_splits > 0) cluster_arrive();
  allow_next_launch();
  wait_for_launch_before();
  if (group == Shape::kTiles) {
    give_registers<Shape::kProducerRegisters>();
    produce_pairs(p, key_map, value_map, query_map, shared, memory, warp % Shape::kWarpsOfGroup, lane);
  } else {
    take_registers<Shape::kConsumerRegisters>();
    consume_pairs(p, shared, memory, group, warp % Shape::kWarpsOfGroup, lane);
  }
}

}  // namespace g4kv
