// Decode attention of one request and KV head by a cluster of blocks, in one launch (sm_90).
//
// A team of warps takes tiles of 16 keys through its own ring, filled by the copy engine: a box of a tensor map is a
// tile's K or V of one head. Products are turned around: keys, then head dims, are the rows of a tensor-core tile and
// query heads its 8 columns, so a group of two heads wastes less, and a warp's outputs are 64 registers a lane. A team
// has a warp for every kWarpColumns columns of the head and every 8 heads of the group; warps that have parts of one
// score exchange them. No barrier of the whole block stands inside the loops (decode_hopper_loops.cuh).
//
// Tile i of a request goes to team i % teams of block i / teams % blocks. The teams' results are merged in team order
// in their block; each block pushes slices of its result to the blocks of the cluster, which own a slice of head dims
// each and merge in block order. So the bits depend on the request and the cluster's size, on nothing else.
#pragma once

#include "decode_hopper_loops.cuh"
#include "decode_hopper_merge.cuh"

namespace g4kv {

// A warp's share of its team's result into shared memory, for the merge.
template <typename Shape, int kSteps>
__device__ __forceinline__ void keep_result(const float (&out)[kSteps][4], const ColumnState& columns,
                                            unsigned char* shared, int team, int part, int head_tile, int pairs,
                                            int lane) {
  const int own_pair = head_tile * (kWarpHeads / 2) + lane % 4;
  if (own_pair < pairs) {
    unsigned char* result = shared + team * Shape::kTeamBytes + own_pair * Shape::kPairBytes;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        // result[team][pair of heads][dim pair][dim][head]
        const int dim = (part * kSteps + step) * 16 + upper * 8 + lane / 4;
        *reinterpret_cast<float2*>(result + dim * 8) = make_float2(out[step][upper * 2], out[step][upper * 2 + 1]);
      }
    }
  }
  const float sum0 = column_sum(columns.sum[0]), sum1 = column_sum(columns.sum[1]);
  if (part == 0 && lane < 4) {
    // state[team][pair of heads]
    *reinterpret_cast<float4*>(shared + Shape::kTeamStateAt + (team * Shape::kPairs + own_pair) * 16) =
        make_float4(columns.max[0], sum0, columns.max[1], sum1);
  }
}

// Of splits that are a block alone, with one team: what its warps have is the partial result, straight from registers.
template <typename Shape, int kSteps>
__device__ __forceinline__ void store_partial(const AttentionParams& p, const ClusterWork& work,
                                              const float (&out)[kSteps][4], const ColumnState& columns, int part,
                                              int head_tile, int lane) {
  const int head = head_tile * kWarpHeads + lane % 4 * 2;
  const long long row = (long long)work.request * p.num_qo_heads + work.kv_head * work.group + head;
  // partial[token][head][split]
  const long long partial = row * p.num_splits + work.split;
  const float sum0 = column_sum(columns.sum[0]), sum1 = column_sum(columns.sum[1]);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (head + i >= work.group) return;
    // partial_out[token][head][split][head_dim]
    float* at = p.partial_out + (partial + i * p.num_splits) * Shape::kHeadDim + part * Shape::kWarpColumns + lane / 4;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      at[step * 16] = out[step][i];
      at[step * 16 + 8] = out[step][2 + i];
    }
    if (part == 0 && lane < 4) {
      p.partial_max[partial + i * p.num_splits] = columns.max[i];
      p.partial_sum[partial + i * p.num_splits] = i == 0 ? sum0 : sum1;
    }
  }
}

// Without kClustered a block is alone with its request and KV head: no instruction here needs a cluster then.
// The maps of K and V are one where a row of K is as long as one of V.
template <typename Shape, bool kClustered>
__device__ __forceinline__ void attend_in_cluster(const AttentionParams& p, const TensorMap& key_map,
                                                  const TensorMap& value_map) {
  constexpr int kHeadDim = Shape::kHeadDim, kWarpColumns = Shape::kWarpColumns, kTeams = Shape::kTeams;
  constexpr int kStages = Shape::kStages, kTeamWarps = Shape::kTeamWarps, kParts = Shape::kParts;
  extern __shared__ __align__(1024) unsigned char shared[];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int team = warp / kTeamWarps, member = warp % kTeamWarps;
  const int part = member % kParts, head_tile = member / kParts;
  const bool fills = member == 0;  // this warp asks for the team's copies
  const int rank = kClustered ? cluster_rank() : 0, ranks = kClustered ? cluster_size() : 1;
  const unsigned base = shared_address(shared);
  // [stage][K, V]
  const unsigned full = base + Shape::kBarriersAt + team * kStages * 16;
  const unsigned received = base + Shape::kBarriersAt + kTeams * kStages * 16;

  if (threadIdx.x == 0) {
    prefetch_map(key_map);
    if constexpr (Shape::kFolded) prefetch_map(value_map);
  }
  ClusterWork work = locate_cluster_work(p);
  const bool early = kTeamWarps > 1 && !p.overlaps;
  if (early) ask_queries<Shape>(p, work, base + Shape::kQueriesAt, team, member, lane);
  if (fills && lane == 0) {
#pragma unroll
    for (int i = 0; i < kStages * 2; ++i) barrier_init(full + i * 8, 1);
    if (kClustered && team == 0) barrier_init(received, 1);
    fence_barrier_init();
  }
  sync_team<kTeamWarps>(team);
  if constexpr (kClustered) {
    if (ranks > 1) cluster_arrive();
  }
  share_keys(p, work);
  const int tiles = work.last_tile - work.first_tile;
  // --- the team's tiles ---
  TeamRing<Shape> ring(p, work, key_map, value_map, base + team * Shape::kTeamBytes, full, lane,
                       work.first_tile + rank * kTeams + team, ranks * kTeams);
  if (fills) ring.ask_first();
  // What this block still has to ask for goes before what the next launch does.
  if (tiles <= ranks * kTeams * kStages) allow_next_launch();
  // The launch in front may still be writing q and the newest key of each request (entries/attention.py).
  wait_for_launch_before();
  if (!early) ask_queries<Shape>(p, work, base + Shape::kQueriesAt, team, member, lane);
  if (fills) ring.ask_newest();

  // How the merge is shared out: a warp takes one pair of heads and every merge_parts-th run of 32 dim pairs.
  constexpr int kWarps = Shape::kThreads / kWarpSize, kDimPairs = kHeadDim / 2;
  const int active_ranks = kClustered ? max(1, min(ranks, (tiles + kTeams - 1) / kTeams)) : 1;
  const int pairs = (work.group + 1) / 2;
  const int merge_parts = kWarps / pairs, merge_part = warp / pairs, pair = warp - merge_part * pairs;
  constexpr int kMergeUnroll = kTeams > 2 ? 1 : 4;
  const int slice_pairs = (kDimPairs + ranks - 1) / ranks;  // dim pairs that a block of the cluster owns
  int slice_inverse = (65535 + slice_pairs) / slice_pairs;
  asm volatile("" : "+r"(slice_inverse));  // here, while the first keys are on their way
  const int own_pairs = max(0, min(slice_pairs, kDimPairs - rank * slice_pairs));
  if (threadIdx.x == 0 && active_ranks > 1) {
    barrier_expect(received, active_ranks * (own_pairs + 1) * pairs * 16);
  }
  if constexpr (kClustered) {
    if (ranks > 1) cluster_wait();  // from here on the others' barriers may be pushed to
  }

  unsigned queries[kWarpColumns / 16][2];
  wait_copies<0>();
  __syncthreads();  // the queries are there for all warps
  load_query_columns<Shape>(queries, base + Shape::kQueriesAt, part, head_tile, lane);
  const TeamMember<Shape> own(team, member, lane);
  ColumnState columns = {{minus_infinity(), minus_infinity()}, {0.0f, 0.0f}};
  float out[kWarpColumns / 16][4] = {};
  if constexpr (Shape::kFolded) {
    attend_folded_tiles(out, columns, queries, ring, own, shared);
  } else {
    attend_split_tiles(out, columns, queries, ring, own, shared);
  }
  if constexpr (kTeams == 1) {
    if (ranks == 1 && p.num_splits > 1) {
      store_partial<Shape>(p, work, out, columns, part, head_tile, lane);
      return;
    }
  }
  // --- the block's result: its teams', merged ---
  const int teams_here = max(0, min(kTeams, tiles - rank * kTeams));
  sync_team<kTeamWarps>(team);
  if (team < teams_here) {
    keep_result<Shape>(out, columns, shared, team, part, head_tile, pairs, lane);
  }
  __syncthreads();
  if (rank < active_ranks && merge_part < merge_parts) {
    PairMerge<kTeams> merge;
    merge.weigh_states(shared + Shape::kTeamStateAt + pair * 16, Shape::kPairs * 16, teams_here, p.scale_log2);
    const unsigned char* items = shared + pair * Shape::kPairBytes;
    if (active_ranks == 1) {
      const PairOutput<kHeadDim> output(p, work, pair, merge.total);
#pragma unroll kMergeUnroll
      for (int dim_pair = merge_part * kWarpSize + lane; dim_pair < kDimPairs; dim_pair += merge_parts * kWarpSize) {
        output.store(dim_pair, merge.item(items + dim_pair * 16, Shape::kTeamBytes, teams_here));
      }
      if (merge_part == 0 && lane == 0) store_state(p, work, pair, merge.total);
      return;
    }
    if (merge_part == 0 && lane < ranks) {
      // received state[from][pair of heads]
      const unsigned at = base + Shape::kReceiveStateAt + (rank * Shape::kPairs + pair) * 16;
      push(shared_of_rank(at, lane),
           make_float4(merge.total.max[0], merge.total.sum[0], merge.total.max[1], merge.total.sum[1]),
           shared_of_rank(received, lane));
    }
#pragma unroll kMergeUnroll
    for (int dim_pair = merge_part * kWarpSize + lane; dim_pair < kDimPairs; dim_pair += merge_parts * kWarpSize) {
      const float4 item = merge.item(items + dim_pair * 16, Shape::kTeamBytes, teams_here);
      const int to = dim_pair * slice_inverse >> 16;  // dim_pair / slice_pairs
      // received[from][pair of heads][dim pair of the slice][dim][head]
      const unsigned at =
          base + Shape::kReceiveAt + ((rank * pairs + pair) * slice_pairs + dim_pair - to * slice_pairs) * 16;
      push(shared_of_rank(at, to), item, shared_of_rank(received, to));
    }
  }
  if (active_ranks == 1) return;

  // --- this block's slice of the cluster's result ---
  barrier_wait(received, 0);  // of all warps: a block that has left cannot be pushed to
  if (merge_part >= merge_parts || merge_part * kWarpSize >= own_pairs) return;
  PairMerge<kMaxClusterBlocks> merge;
  merge.weigh_states(shared + Shape::kReceiveStateAt + pair * 16, Shape::kPairs * 16, active_ranks, p.scale_log2);
  const PairOutput<kHeadDim> output(p, work, pair, merge.total);
  for (int own = merge_part * kWarpSize + lane; own < own_pairs; own += merge_parts * kWarpSize) {
    output.store(rank * slice_pairs + own, merge.item(shared + Shape::kReceiveAt + (pair * slice_pairs + own) * 16,
                                                      pairs * slice_pairs * 16, active_ranks));
  }
  if (rank == 0 && merge_part == 0 && lane == 0) store_state(p, work, pair, merge.total);
}

}  // namespace g4kv

// A kernel of rows of the whole head: head_dim, columns of a warp, 8-head tiles of the group, teams of a block, stages of
// each team's ring, blocks of a multiprocessor; where keys are spread over blocks, the shared memory of a block alone;
// that of a block. Names, threads and bytes stand again in entries/table.py.
#define G4KV_DECODE_KERNEL(name, blocks, clustered, ...)                                                              \
  extern "C" __global__ void __launch_bounds__(g4kv::ClusterShape<__VA_ARGS__>::kThreads, blocks)                     \
      name(const __grid_constant__ g4kv::AttentionParams params, const __grid_constant__ g4kv::TensorMap map) {       \
    g4kv::attend_in_cluster<g4kv::ClusterShape<__VA_ARGS__>, clustered>(params, map, map);                            \
  }

#define G4KV_DECODE_HOPPER(name, head_dim, columns, head_tiles, teams, stages, blocks, bytes)                         \
  static_assert(g4kv::ClusterShape<head_dim, columns, head_tiles, teams, stages>::kAloneBytes == bytes,               \
                "entries/table.py states these bytes");                                                               \
  G4KV_DECODE_KERNEL(name, blocks, false, head_dim, columns, head_tiles, teams, stages)

#define G4KV_DECODE_HOPPER_SPLIT(name, head_dim, columns, head_tiles, teams, stages, blocks, alone_bytes, bytes)      \
  static_assert(g4kv::ClusterShape<head_dim, columns, head_tiles, teams, stages>::kAloneBytes == alone_bytes &&       \
                    g4kv::ClusterShape<head_dim, columns, head_tiles, teams, stages>::kSharedBytes == bytes,          \
                "entries/table.py states these bytes");                                                               \
  G4KV_DECODE_KERNEL(name, blocks, true, head_dim, columns, head_tiles, teams, stages)
