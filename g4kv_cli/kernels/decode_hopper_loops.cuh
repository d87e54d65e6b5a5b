// Decode for sm_90: a team's loop over its tiles, of pools whose rows of K are whole (split) or hold the rotated columns
// alone (folded). Afterwards `out` and `columns` are what a warp has of all of them.
#pragma once

#include "decode_hopper_ring.cuh"
#include "decode_hopper_tile.cuh"

namespace g4kv {

// Scores of a team's warps, each over its part of the head, go to where the others read them: write_parts, the team's
// meeting, add_parts.
template <typename Shape>
__device__ __forceinline__ int exchange_at(int team, unsigned buffer, int i, int member, int lane) {
  // exchange[team][buffer][tile of the step][member][lane]
  const int tile = (team * 2 + buffer) * Shape::kStepTiles + i;
  return Shape::kExchangeAt + ((tile * Shape::kTeamWarps + member) * kWarpSize + lane) * 16;
}

template <typename Shape, int kTiles>
__device__ __forceinline__ void write_parts(const float (&scores)[kTiles][4], unsigned char* shared, int team,
                                            int member, unsigned buffer, int lane) {
  if constexpr (Shape::kParts > 1) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      *reinterpret_cast<float4*>(shared + exchange_at<Shape>(team, buffer, i, member, lane)) =
          make_float4(scores[i][0], scores[i][1], scores[i][2], scores[i][3]);
    }
  }
}

// Every warp gets the sums of its heads.
template <typename Shape, int kTiles>
__device__ __forceinline__ void add_parts(float (&scores)[kTiles][4], const unsigned char* shared, int team, int member,
                                          unsigned buffer, int lane) {
  if constexpr (Shape::kParts > 1) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const unsigned char* first =
          shared + exchange_at<Shape>(team, buffer, i, member / Shape::kParts * Shape::kParts, lane);
      float4 sum = *reinterpret_cast<const float4*>(first);
#pragma unroll
      for (int part = 1; part < Shape::kParts; ++part) {
        const float4 more = *reinterpret_cast<const float4*>(first + part * kWarpSize * 16);
        sum.x += more.x;
        sum.y += more.y;
        sum.z += more.z;
        sum.w += more.w;
      }
      scores[i][0] = sum.x;
      scores[i][1] = sum.y;
      scores[i][2] = sum.z;
      scores[i][3] = sum.w;
    }
  }
}

// What a warp of a team computes with: its part of the head and its heads, and where its lanes read a tile.
template <typename Shape>
struct TeamMember {
  int team, member, lane;
  bool fills;
  int part, head_tile;
  unsigned part_at;  // its first column block in a tile
  unsigned key_offsets[4], value_offsets[4];

  __device__ __forceinline__ TeamMember(int team, int member, int lane)
      : team(team),
        member(member),
        lane(lane),
        fills(member == 0),
        part(member % Shape::kParts),
        head_tile(member / Shape::kParts),
        part_at(part * (Shape::kWarpColumns / kBoxColumns) * kBlockBytes) {
    chunk_offsets(key_offsets, lane % 16, lane / 16);
    chunk_offsets(value_offsets, lane % 8 + lane / 16 * 8, lane / 8 % 2);
  }

  // Rows of V that nobody may read, as zeros; the whole team comes here.
  template <int kTiles>
  __device__ __forceinline__ void silence(unsigned char* shared, const TeamRing<Shape>& ring, int stage,
                                          int tile) const {
    if (head_tile == 0) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        unsigned char* values = shared + (ring.values_of(stage + i) - shared_address(shared)) + part_at;
        silence_rows<Shape::kWarpColumns>(values, ring.work.begin, ring.work.end,
                                          (tile + i * ring.tile_step) * kClusterTileKeys, lane);
      }
    }
    sync_team<Shape::kTeamWarps>(team);
  }
};

// Split: K and V of a tile are awaited apart, and the next tile's K is asked for as soon as the scores are there.
template <typename Shape>
__device__ __forceinline__ void attend_split_tiles(float (&out)[Shape::kWarpColumns / 16][4], ColumnState& columns,
                                                   const unsigned (&queries)[Shape::kWarpColumns / 16][2],
                                                   TeamRing<Shape>& ring, const TeamMember<Shape>& own,
                                                   unsigned char* shared) {
  constexpr int kWarpColumns = Shape::kWarpColumns, kStages = Shape::kStages, kTeamWarps = Shape::kTeamWarps;
  const ClusterWork& work = ring.work;
  int stage = 0;
  unsigned parity = 0, buffer = 0;
#pragma unroll 1
  for (int tile = ring.first_tile; tile < work.last_tile; tile += ring.tile_step) {
    float scores[1][4];
    barrier_wait(ring.keys_full(stage), parity);
    const unsigned keys = ring.keys_of(stage) + own.part_at;
    score_keys<kWarpColumns>(scores[0], queries, keys, keys, own.key_offsets);
    write_parts<Shape>(scores, shared, own.team, own.member, buffer, own.lane);
    sync_team<kTeamWarps>(own.team);
    add_parts<Shape>(scores, shared, own.team, own.member, buffer, own.lane);
    buffer ^= 1;
    const bool more = tile + kStages * ring.tile_step < work.last_tile;
    if (!more) {
      allow_next_launch();
    } else if (own.fills) {
      ring.ask_keys(stage);  // the whole team has read this stage's
    }
    const int first_key = tile * kClusterTileKeys;
    const bool whole = first_key >= work.begin && first_key + kClusterTileKeys <= work.end;
    if (!whole) hide_rows(scores[0], work.begin, work.end, first_key, own.lane);
    float factor[2];
    weigh_columns(scores, columns, factor, ring.p.scale_log2);
    unsigned weights[2];
    weights_as_b(weights, scores[0]);
    rescale_columns(out, factor);
    barrier_wait(ring.values_full(stage), parity);
    if (!whole) own.template silence<1>(shared, ring, stage, tile);
    accumulate_dims<kWarpColumns>(out, weights, ring.values_of(stage) + own.part_at, own.value_offsets);
    if (more) {
      release_values<kTeamWarps>(Shape::kTeams + own.team + 1, own.fills);
      if (own.fills) ring.ask_values(stage);
    }
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

// Folded: V stays from the scores to the output, so K and V of a tile come and go together. kStepTiles tiles are taken
// at a time: what a step costs beside its products, meetings and the softmax above all, is for all of them once.
template <typename Shape>
struct FoldedTiles {
  static constexpr int kWarpColumns = Shape::kWarpColumns, kStages = Shape::kStages;
  float (&out)[kWarpColumns / 16][4];
  ColumnState& columns;
  const unsigned (&queries)[kWarpColumns / 16][2];
  TeamRing<Shape>& ring;
  const TeamMember<Shape>& own;
  unsigned char* shared;
  unsigned first_at;  // of a stage: the warp's first column block, of K where its columns are rotated, else of V
  int stage;
  unsigned parity, buffer;

  template <int kTiles>
  __device__ __forceinline__ void step(int tile) {
    const ClusterWork& work = ring.work;
    float scores[kTiles][4];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      barrier_wait(ring.keys_full(stage + i), parity);
      score_keys<kWarpColumns>(scores[i], queries, ring.keys_of(stage + i) + first_at,
                               ring.values_of(stage + i) + own.part_at, own.key_offsets);
    }
    write_parts<Shape>(scores, shared, own.team, own.member, buffer, own.lane);
    sync_team<Shape::kTeamWarps>(own.team);
    add_parts<Shape>(scores, shared, own.team, own.member, buffer, own.lane);
    buffer ^= 1;
    const int first_key = tile * kClusterTileKeys, key_step = ring.tile_step * kClusterTileKeys;
    if (first_key < work.begin || first_key + (kTiles - 1) * key_step + kClusterTileKeys > work.end) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        hide_rows(scores[i], work.begin, work.end, first_key + i * key_step, own.lane);
      }
      own.template silence<kTiles>(shared, ring, stage, tile);
    }
    float factor[2];
    weigh_columns(scores, columns, factor, ring.p.scale_log2);
    unsigned weights[kTiles][2];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) weights_as_b(weights[i], scores[i]);
    rescale_columns(out, factor);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      accumulate_dims<kWarpColumns>(out, weights[i], ring.values_of(stage + i) + own.part_at, own.value_offsets);
    }
    const int refill = tile + kStages * ring.tile_step;
    if (refill >= work.last_tile) {
      allow_next_launch();
    } else {
      release_values<Shape::kTeamWarps>(Shape::kTeams + own.team + 1, own.fills);
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        if (own.fills && refill + i * ring.tile_step < work.last_tile) ring.ask_tile(stage + i);
      }
    }
    stage += kTiles;
    if (stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <typename Shape>
__device__ __forceinline__ void attend_folded_tiles(float (&out)[Shape::kWarpColumns / 16][4], ColumnState& columns,
                                                    const unsigned (&queries)[Shape::kWarpColumns / 16][2],
                                                    TeamRing<Shape>& ring, const TeamMember<Shape>& own,
                                                    unsigned char* shared) {
  // K's two blocks of columns are the first of either half of the head.
  constexpr int kHalf = Shape::kHeadDim / 2, kStepTiles = Shape::kStepTiles;
  static_assert(Shape::kKeyColumns == 2 * kBoxColumns, "the rotated columns of a half are one block");
  static_assert(kStepTiles <= 2 && Shape::kStages % kStepTiles == 0, "one tile may be left, and a step's lie together");
  const int first_column = own.part * Shape::kWarpColumns;
  const unsigned first_at =
      first_column % kHalf == 0 ? first_column / kHalf * kBlockBytes : Shape::kKeyBytes + own.part_at;
  FoldedTiles<Shape> tiles{out, columns, queries, ring, own, shared, first_at, 0, 0, 0};
  int tile = ring.first_tile;
#pragma unroll 1
  for (; tile + (kStepTiles - 1) * ring.tile_step < ring.work.last_tile; tile += kStepTiles * ring.tile_step) {
    tiles.template step<kStepTiles>(tile);
  }
  if constexpr (kStepTiles > 1) {
    if (tile < ring.work.last_tile) tiles.template step<1>(tile);
  }
}

}  // namespace g4kv
