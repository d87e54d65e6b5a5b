// Prefill attention at head_dim 512 by warpgroups that do one thing each (compute capability 9.0 alone).
//
// A block owns 64 packed query rows of one KV head and walks their keys in blocks:
//   producer warpgroup  a warp copies K, another V, into rings of stages
//   score warpgroup     Q K^T, mask, online softmax; weights of 64 keys at a time into shared memory
//   output warpgroups   two, 256 columns each: weights into registers, sums of weighted values
// The 64 x 512 sums alone are 128 registers a thread in two warpgroups. prefill_hopper_loops.cuh has the loops over split
// rows, prefill_hopper_folded_loops.cuh those over folded ones.
//
// Neighbouring tiles of a request see nearly the same keys, so two blocks make a cluster: each copies half of every
// stage to both. A stage is free when both blocks have used it. Tiles of different requests share nothing and run alone.
//
// Weights are relative to the largest score so far, in every block: that key's own weight is then exactly one, and loses
// nothing as bf16. Raising the maximum only now and then is up to 3 % faster on an H200, and doubles the error of rows
// that one key dominates.
#pragma once

#include "prefill_hopper_folded_loops.cuh"
#include "prefill_hopper_loops.cuh"

namespace g4kv {

template <typename Shape>
__device__ __forceinline__ void score_keys(const AttentionParams& p, const HopperTile& t, unsigned shared,
                                           unsigned char* memory, int warp, int lane) {
  if constexpr (Shape::kFolded) {
    score_folded_keys<Shape>(p, t, shared, memory, warp, lane);
  } else {
    score_split_keys<Shape>(p, t, shared, memory, warp, lane);
  }
}

template <typename Shape>
__device__ __forceinline__ void sum_values(const AttentionParams& p, const HopperTile& t, unsigned shared,
                                           unsigned char* memory, int group, int warp, int lane) {
  if constexpr (Shape::kFolded) {
    sum_folded_values<Shape>(p, t, shared, memory, group, warp, lane);
  } else {
    sum_split_values<Shape>(p, t, shared, memory, group, warp, lane);
  }
}

template <typename Shape>
__device__ __forceinline__ void init_barriers(unsigned shared) {
  constexpr int kOutputWarps = Shape::kOutputWarpgroups * Shape::kWarpsOfGroup;
  for (int stage = 0; stage < Shape::kKeyStages; ++stage) {
    barrier_init(shared + Shape::kKeysThere + stage * 8, 1);
    barrier_init(shared + Shape::kKeysUsed + stage * 8, Shape::kClusterBlocks * Shape::kWarpsOfGroup);
  }
  for (int stage = 0; stage < Shape::kValueStages; ++stage) {
    barrier_init(shared + Shape::kValuesThere + stage * 8, 1);
    barrier_init(shared + Shape::kValuesUsed + stage * 8, Shape::kClusterBlocks * kOutputWarps);
  }
  for (int stage = 0; stage < Shape::kTurnedStages; ++stage) {
    barrier_init(shared + Shape::kTurnedThere + stage * 8, 1);
    barrier_init(shared + Shape::kTurnedUsed + stage * 8, Shape::kClusterBlocks * kOutputWarps);
  }
  // Every lane arrives for its own weights and factors, so that also a tool that follows stores lane by lane (racecheck)
  // sees them ordered.
  for (int barrier = Shape::kWeightsThere; barrier < Shape::kWeightsUsed; barrier += 8) {
    barrier_init(shared + barrier, kWarpgroupSize);
  }
  for (int barrier = Shape::kWeightsUsed; barrier < Shape::kQueriesThere; barrier += 8) {
    barrier_init(shared + barrier, kOutputWarps);
  }
  barrier_init(shared + Shape::kQueriesThere, Shape::kOutputWarpgroups * kWarpgroupSize);
  barrier_init(shared + Shape::kSumsThere, kWarpgroupSize);
  for (int stage = 0; stage < Shape::kFirstValueStage; ++stage) {
    barrier_arrive(shared + Shape::kValuesThere + stage * 8);  // queries, which have a barrier of their own
  }
  fence_barrier_init();
}

template <typename Shape>
__device__ __forceinline__ void attend_rows_hopper(const AttentionParams& p, const TensorMap& key_map,
                                                   const TensorMap& value_map) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const unsigned shared = shared_address(memory);
  const int warp = (int)same_in_warp(threadIdx.x / kWarpSize), lane = threadIdx.x % kWarpSize;
  const int group = warp / Shape::kWarpsOfGroup;

  // What takes its time is begun before the blocks of the cluster have met: all of it stands between a block's first
  // cycle and its first product.
  if (warp == Shape::kWarpsOfGroup - 1 && lane == 0) {  // which copies nothing
    prefetch_map(key_map);
    prefetch_map(value_map);
    init_barriers<Shape>(shared);
  }
  __syncwarp();
  if constexpr (Shape::kClusterBlocks > 1) cluster_arrive();
  HopperTile t;
  const bool has_tile = locate_hopper_tile<Shape>(p, t);
  FirstBox first = {PageRow(nullptr, 0, 0), {0, 0}};
  if (has_tile && group == 0) first = first_box<Shape>(p, t, lane);
  if (has_tile && group >= 2) {
    if (threadIdx.x == 2 * kWarpgroupSize) *reinterpret_cast<TileGeometry*>(memory + Shape::kTile) = t.tile;
    begin_query_copies<Shape>(p, t.tile, shared, warp - 2 * Shape::kWarpsOfGroup, lane);
  }
  __syncwarp();
  if constexpr (Shape::kClusterBlocks > 1) cluster_wait();
  __syncthreads();

  if (group == 0) {
    give_registers<Shape::kProducerRegisters>();
    if constexpr (Shape::kFolded) {
      if (has_tile && warp == 0) {
        produce_turned_keys<Shape>(p, key_map, t, shared, first, lane);
      } else if (has_tile && warp == 1) {
        produce_common_columns<Shape>(p, value_map, t, shared, first, lane);
      } else if (has_tile && warp == 2) {
        produce_turned_values<Shape>(p, value_map, t, shared, first, lane);
      }
    } else {
      if (has_tile && warp == 0) produce_keys<Shape>(p, key_map, t, shared, first, lane);
      if (has_tile && warp == 1) produce_values<Shape>(p, value_map, t, shared, first, lane);
    }
  } else if (group == 1) {
    if (has_tile) score_keys<Shape>(p, t, shared, memory, warp % Shape::kWarpsOfGroup, lane);
  } else {
    take_registers<Shape::kOutputRegisters>();
    if (has_tile) {
      wait_copies<0>();
      fence_async_copies();
      barrier_arrive(shared + Shape::kQueriesThere);
      sum_values<Shape>(p, t, shared, memory, group - 2, warp % Shape::kWarpsOfGroup, lane);
    }
  }
}

}  // namespace g4kv
