// Decode attention of one request and KV head by a cluster of blocks, in one launch (sm_90).
//
// A team of warps takes tiles of 16 keys through its own ring, filled by the copy engine: a box of the tensor map is a
// tile's K or V of one head. Products are turned around: keys, then head dims, are the rows of a tensor-core tile and
// query heads its 8 columns, so a group of two heads wastes less, and a warp's outputs are 64 registers a lane. A team
// has a warp for every kWarpColumns columns of the head and every 8 heads of the group; warps that have parts of one
// score exchange them. No barrier of the whole block stands inside the loop.
//
// Tile i of a request goes to team i % teams of block i / teams % blocks. The teams' results are merged in team order
// in their block; each block pushes slices of its result to the blocks of the cluster, which own a slice of head dims
// each and merge in block order. So the bits depend on the request and the cluster's size, on nothing else.
#pragma once

#include "decode_hopper_merge.cuh"
#include "decode_hopper_shape.cuh"
#include "decode_hopper_tile.cuh"

namespace g4kv {

// The warps of one team.
template <int kTeamWarps>
__device__ __forceinline__ void sync_team(int team) {
  if constexpr (kTeamWarps == 1) {
    __syncwarp();
  } else {
    asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(kTeamWarps * kWarpSize) : "memory");
  }
}

// The team has read a stage's values; only the warp that fills waits for the others.
template <int kTeamWarps>
__device__ __forceinline__ void release_values(int barrier, bool fills) {
  if constexpr (kTeamWarps == 1) {
    __syncwarp();
  } else if (fills) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kTeamWarps * kWarpSize) : "memory");
  } else {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(kTeamWarps * kWarpSize) : "memory");
  }
}

// Scores of a team's warps, each over its part of the head, as one: every warp gets the sums of its heads. The team has
// read its keys then.
template <typename Shape>
__device__ __forceinline__ void add_parts(float (&scores)[4], unsigned char* shared, int team, int member,
                                          unsigned buffer, int lane) {
  if constexpr (Shape::kParts == 1) {
    sync_team<Shape::kTeamWarps>(team);
  } else {
    // exchange[team][buffer][member][lane]
    unsigned char* exchange =
        shared + Shape::kExchangeAt + ((team * 2 + buffer) * Shape::kTeamWarps * kWarpSize + lane) * 16;
    *reinterpret_cast<float4*>(exchange + member * kWarpSize * 16) =
        make_float4(scores[0], scores[1], scores[2], scores[3]);
    sync_team<Shape::kTeamWarps>(team);
    const unsigned char* first = exchange + member / Shape::kParts * Shape::kParts * kWarpSize * 16;
    float4 sum = *reinterpret_cast<const float4*>(first);
#pragma unroll
    for (int part = 1; part < Shape::kParts; ++part) {
      const float4 more = *reinterpret_cast<const float4*>(first + part * kWarpSize * 16);
      sum.x += more.x;
      sum.y += more.y;
      sum.z += more.z;
      sum.w += more.w;
    }
    scores[0] = sum.x;
    scores[1] = sum.y;
    scores[2] = sum.z;
    scores[3] = sum.w;
  }
}

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

// Without kClustered a block is alone with its request and KV head: no instruction here needs a cluster then.
template <int kHeadDim, int kWarpColumns, int kHeadTiles, int kTeams, int kStages, bool kClustered>
__device__ __forceinline__ void attend_in_cluster(const AttentionParams& p, const TensorMap& map) {
  using Shape = ClusterShape<kHeadDim, kWarpColumns, kHeadTiles, kTeams, kStages>;
  constexpr int kTeamWarps = Shape::kTeamWarps, kParts = Shape::kParts;
  extern __shared__ __align__(1024) unsigned char shared[];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int team = warp / kTeamWarps, member = warp % kTeamWarps;
  const int part = member % kParts, head_tile = member / kParts;
  const bool fills = member == 0;  // this warp asks for the team's copies
  const int rank = kClustered ? cluster_rank() : 0, ranks = kClustered ? cluster_size() : 1;
  const unsigned base = shared_address(shared);
  const unsigned ring = base + team * Shape::kTeamBytes;
  // [stage][K, V]
  const unsigned full = base + Shape::kBarriersAt + team * kStages * 16;
  const unsigned received = base + Shape::kBarriersAt + kTeams * kStages * 16;

  if (threadIdx.x == 0) prefetch_map(map);
  const ClusterWork work = locate_cluster_work(p);
  if (fills && lane == 0) {
#pragma unroll
    for (int i = 0; i < kStages * 2; ++i) barrier_init(full + i * 8, 1);
    if (kClustered && team == 0) barrier_init(received, 1);
    fence_barrier_init();
  }
  sync_team<kTeamWarps>(team);
  if constexpr (kClustered) {
    if (ranks > 1) cluster_arrive();
    allow_next_launch();
  }
  const int tiles = work.last_tile - work.first_tile;
  // --- the team's tiles ---
  const int tile_step = ranks * kTeams;
  const int first_tile = work.first_tile + rank * kTeams + team;
  TilePlace places, later_places;  // a lane's of the 32 tiles that are asked for now, and of the next 32
  TilePlace newest = {0, 0};       // of the tile whose keys were asked for last
  int next_tile = first_tile + kStages * tile_step, asked = kStages;
  const auto ask = [&](unsigned destination, unsigned barrier, int is_value) {
    barrier_expect(barrier, Shape::kTileBytes);
    // map[page][layer, K or V][kv head and column block][slot][64 columns]
    copy_box_once(destination, map, barrier, 0, newest.slot, work.kv_head * (kHeadDim / kBoxColumns),
                  p.layer * 2 + is_value, newest.page);
  };
  const auto keys_of = [&](int stage) { return ring + stage * 2 * Shape::kTileBytes; };
  const auto values_of = [&](int stage) { return keys_of(stage) + Shape::kTileBytes; };
  const auto keys_full = [&](int stage) { return full + stage * 16; };
  const auto values_full = [&](int stage) { return full + stage * 16 + 8; };
  const auto ask_keys = [&](int stage) {
    if (asked % kWarpSize == 0) {
      places = later_places;
      later_places = place_of(p, work, next_tile + (kWarpSize + lane) * tile_step);
    }
    newest.page = __shfl_sync(kAllLanes, places.page, asked % kWarpSize);
    newest.slot = __shfl_sync(kAllLanes, places.slot, asked % kWarpSize);
    if (lane == 0) ask(keys_of(stage), keys_full(stage), 0);
    next_tile += tile_step;
    ++asked;
  };
  const auto ask_values = [&](int stage) {
    if (lane == 0) ask(values_of(stage), values_full(stage), 1);
  };
  if (fills) {
    places = place_of(p, work, first_tile + lane * tile_step);
    if (lane < kStages && first_tile + lane * tile_step < work.last_tile) {
      // A lane asks for a stage.
      newest = places;
      ask(keys_of(lane), keys_full(lane), 0);
      ask(values_of(lane), values_full(lane), 1);
    }
    later_places = place_of(p, work, first_tile + (kWarpSize + lane) * tile_step);
  }
  unsigned queries[kWarpColumns / 16][2];
  {
    const int head = head_tile * kWarpHeads + lane / 4;
    // q[token][head][head_dim]
    const long long row = (long long)work.request * p.num_qo_heads + work.kv_head * work.group + head;
    load_query_columns<kWarpColumns>(queries, p.q + row * kHeadDim + part * kWarpColumns, head < work.group, lane);
  }

  // How the merge is shared out: a warp takes one pair of heads and every merge_parts-th run of 32 dim pairs.
  constexpr int kWarps = Shape::kThreads / kWarpSize, kDimPairs = kHeadDim / 2;
  const int active_ranks = kClustered ? max(1, min(ranks, (tiles + kTeams - 1) / kTeams)) : 1;
  const int pairs = (work.group + 1) / 2;
  const int merge_parts = kWarps / pairs, merge_part = warp / pairs, pair = warp - merge_part * pairs;
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

  unsigned key_offsets[4], value_offsets[4];
  chunk_offsets(key_offsets, lane % 16, lane / 16);
  chunk_offsets(value_offsets, lane % 8 + lane / 16 * 8, lane / 8 % 2);
  const unsigned part_at = part * (kWarpColumns / kBoxColumns) * kBlockBytes;
  ColumnState columns = {{minus_infinity(), minus_infinity()}, {0.0f, 0.0f}};
  float out[kWarpColumns / 16][4] = {};
  int stage = 0;
  unsigned parity = 0, buffer = 0;
#pragma unroll 1
  for (int tile = first_tile; tile < work.last_tile; tile += tile_step) {
    float scores[4];
    barrier_wait(keys_full(stage), parity);
    score_keys<kWarpColumns>(scores, queries, keys_of(stage) + part_at, key_offsets);
    add_parts<Shape>(scores, shared, team, member, buffer, lane);
    buffer ^= 1;
    const bool more = tile + kStages * tile_step < work.last_tile;
    if (fills && more) ask_keys(stage);  // the whole team has read this stage's
    const int first_key = tile * kClusterTileKeys;
    const bool whole = first_key >= work.begin && first_key + kClusterTileKeys <= work.end;
    if (!whole) hide_rows(scores, work.begin, work.end, first_key, lane);
    float factor[2];
    weigh_columns(scores, columns, factor, p.scale_log2);
    unsigned weights[2];
    weights_as_b(weights, scores);
    rescale_columns(out, factor);
    barrier_wait(values_full(stage), parity);
    if (!whole) {
      if (head_tile == 0) {
        silence_rows<kWarpColumns>(shared + (values_of(stage) - base) + part_at, work.begin, work.end, first_key, lane);
      }
      sync_team<kTeamWarps>(team);
    }
    accumulate_dims<kWarpColumns>(out, weights, values_of(stage) + part_at, value_offsets);
    if (more) {
      release_values<kTeamWarps>(kTeams + team + 1, fills);
      if (fills) ask_values(stage);
    }
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
  // --- the block's result: its teams', merged ---
  const int teams_here = max(0, min(kTeams, tiles - rank * kTeams));
  sync_team<kTeamWarps>(team);
  if (team < teams_here) {
    keep_result<Shape>(out, columns, shared, team, part, head_tile, pairs, lane);
  }
  __syncthreads();
  PairMerge merge;
  if (rank < active_ranks && merge_part < merge_parts) {
    merge.weigh_states(shared + Shape::kTeamStateAt + pair * 16, Shape::kPairs * 16, teams_here, p.scale_log2, lane);
    if (active_ranks > 1 && merge_part == 0 && lane < ranks) {
      // received state[from][pair of heads]
      const unsigned at = base + Shape::kReceiveStateAt + (rank * Shape::kPairs + pair) * 16;
      push(shared_of_rank(at, lane),
           make_float4(merge.total.max[0], merge.total.sum[0], merge.total.max[1], merge.total.sum[1]),
           shared_of_rank(received, lane));
    }
    for (int first = merge_part * kWarpSize; first < kDimPairs; first += merge_parts * kWarpSize) {
      const int dim_pair = first + lane;
      const float4 item = merge.item(shared + pair * Shape::kPairBytes + dim_pair * 16, Shape::kTeamBytes, teams_here);
      if (active_ranks == 1) {
        store_item<kHeadDim>(p, work, dim_pair, pair, item, merge.total);
      } else {
        const int to = dim_pair * slice_inverse >> 16;  // dim_pair / slice_pairs
        // received[from][pair of heads][dim pair of the slice][dim][head]
        const unsigned at =
            base + Shape::kReceiveAt + ((rank * pairs + pair) * slice_pairs + dim_pair - to * slice_pairs) * 16;
        push(shared_of_rank(at, to), item, shared_of_rank(received, to));
      }
    }
    if (active_ranks == 1 && merge_part == 0 && lane == 0) store_state(p, work, pair, merge.total);
  }
  if (active_ranks == 1) return;

  // --- this block's slice of the cluster's result ---
  barrier_wait(received, 0);  // of all warps: a block that has left cannot be pushed to
  if (merge_part >= merge_parts || merge_part * kWarpSize >= own_pairs) return;
  merge.weigh_states(shared + Shape::kReceiveStateAt + pair * 16, Shape::kPairs * 16, active_ranks, p.scale_log2,
                     lane);
  for (int first = merge_part * kWarpSize; first < own_pairs; first += merge_parts * kWarpSize) {
    const int own = first + lane;
    const int readable = min(own, own_pairs - 1);
    const float4 item = merge.item(shared + Shape::kReceiveAt + (pair * slice_pairs + readable) * 16,
                                   pairs * slice_pairs * 16, active_ranks);
    if (own < own_pairs) store_item<kHeadDim>(p, work, rank * slice_pairs + own, pair, item, merge.total);
  }
  if (rank == 0 && merge_part == 0 && lane == 0) store_state(p, work, pair, merge.total);
}

}  // namespace g4kv
