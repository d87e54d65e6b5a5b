// Prefill attention at head_dim 256 by warpgroups (compute capability 9.0 alone).
//
// A block serves two neighbouring tiles of 64 packed query rows of one KV head, one a consumer warpgroup. K and V pass
// through shared memory in blocks of 64 keys, which both tiles use; each skips the blocks that it does not see. Of
// different requests they share no keys: the block then walks the one's and behind them the other's. Blocks of threads
// stay, one a multiprocessor, and take pair after pair: copies for the next are on their way while this one ends.
//
// A short request's tiles leave most of the card idle. There two blocks of threads, a cluster, serve a pair of tiles,
// half of the keys each. What they found is merged at the end through each other's shared memory (TileUnit, PairPeer).
//
// In a consumer the scores of the next block are computed beside the sums of this one's weighted values.
#pragma once

#include "prefill_hopper_hd256_output.cuh"
#include "prefill_hopper_hd256_producers.cuh"

namespace g4kv {

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
    if (same_in_warp(task.is_end)) return;
    const bool is_split = same_in_warp(task.is_split);
    skip_blocks((int)same_in_warp(task.skip_before), shared, rings, lane);
    int first_key = (int)same_in_warp(task.first_key);
    const int last_key = (int)same_in_warp(task.last_key);
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
    const int oldest_whole = (int)same_in_warp(task.oldest_whole);
    const int newest_whole = (int)same_in_warp(task.newest_whole);
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
    skip_blocks((int)same_in_warp(task.skip_behind), shared, rings, lane);
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

// What the first unit is worked out from lies in arrays of their own, and is read one after the other: a warp has the
// beginnings of all fetched at once.
__device__ __forceinline__ void prefetch_plan(const AttentionParams& p, int lane) {
  const int* array = p.page_indices;
  if (lane == 1) array = p.page_indptr;
  if (lane == 2) array = p.page_origins;
  if (lane == 3) array = p.kv_lens;
  if (lane == 4) array = p.q_indptr;
  if (lane == 5) array = p.tile_indices;
  if (lane < 6) prefetch_line(array);
}

__device__ __forceinline__ void attend_pairs(const AttentionParams& p, const TensorMap& key_map,
                                             const TensorMap& value_map, const TensorMap& query_map) {
  using Shape = PairPrefill;
  extern __shared__ __align__(1024) unsigned char memory[];
  const unsigned shared = shared_address(memory);
  const int warp = (int)same_in_warp(threadIdx.x / kWarpSize), lane = threadIdx.x % kWarpSize;
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
  if (warp == 0) prefetch_plan(p, lane);
  if (group == Shape::kTiles) {
    give_registers<Shape::kProducerRegisters>();
    produce_pairs(p, key_map, value_map, query_map, shared, memory, warp % Shape::kWarpsOfGroup, lane);
  } else {
    take_registers<Shape::kConsumerRegisters>();
    consume_pairs(p, shared, memory, group, warp % Shape::kWarpsOfGroup, lane);
  }
}

}  // namespace g4kv
