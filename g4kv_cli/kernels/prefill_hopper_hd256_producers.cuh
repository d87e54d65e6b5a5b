// Prefill at head_dim 256 for sm_90: the warps that copy keys, values and queries, and tell consumers of their tiles.
#pragma once

#include "hopper.cuh"
#include "prefill_hopper_hd256_units.cuh"

namespace g4kv {

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

// Units come longest first, and who had one of a round's first has one of the next round's last: on 132 multiprocessors
// the longest share of 8192 tokens of 12b-local is then 128 blocks of keys, not 132, and the mean 124. A cluster's
// blocks stay with their halves.
__device__ __forceinline__ int block_in_next_round(const AttentionParams& p, int block) {
  const int turned = (int)gridDim.x - 1 - block;
  return p.num_splits > 0 ? turned ^ 1 : turned;
}

// By the four warps that produce: K, V, and each consumer's tiles.
__device__ __forceinline__ void produce_pairs(const AttentionParams& p, const TensorMap& key_map,
                                              const TensorMap& value_map, const TensorMap& query_map, unsigned shared,
                                              unsigned char* memory, int warp, int lane) {
  ProducerPlace place;
#pragma unroll 1
  for (int first = 0, block = blockIdx.x;; first += gridDim.x) {
    const int number = first + block;
    block = block_in_next_round(p, block);
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

}  // namespace g4kv
