// Decode for sm_90: a team's tiles on their way through its stages of shared memory.
#pragma once

#include "decode_hopper_shape.cuh"

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

// The team has read a stage; only the warp that fills waits for the others.
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

// Tiles `first_tile`, `first_tile + tile_step`, .. of a team, each in the next stage. Its first warp fills the stages:
// it alone calls what asks for copies, all lanes together.
template <typename Shape>
struct TeamRing {
  const AttentionParams& p;
  const ClusterWork& work;
  const TensorMap& key_map;
  const TensorMap& value_map;
  unsigned ring;  // of stage 0
  unsigned full;  // barriers [stage][K, V]; of a folded stage, whose K and V are awaited together, the first
  int lane;
  int first_tile;
  int tile_step;
  TilePlace places, later_places;  // a lane's of the 32 tiles that are asked for now, and of the next 32
  TilePlace newest;                // of the tile whose keys were asked for last
  int next_tile;
  int asked;

  __device__ __forceinline__ TeamRing(const AttentionParams& p, const ClusterWork& work, const TensorMap& key_map,
                                      const TensorMap& value_map, unsigned ring, unsigned full, int lane,
                                      int first_tile, int tile_step)
      : p(p),
        work(work),
        key_map(key_map),
        value_map(value_map),
        ring(ring),
        full(full),
        lane(lane),
        first_tile(first_tile),
        tile_step(tile_step),
        newest{0, 0},
        next_tile(first_tile + Shape::kStages * tile_step),
        asked(Shape::kStages) {}

  __device__ __forceinline__ unsigned keys_of(int stage) const { return ring + stage * Shape::kStageBytes; }
  __device__ __forceinline__ unsigned values_of(int stage) const { return keys_of(stage) + Shape::kKeyBytes; }
  __device__ __forceinline__ unsigned keys_full(int stage) const { return full + stage * 16; }
  __device__ __forceinline__ unsigned values_full(int stage) const { return full + stage * 16 + 8; }

  // The place of the next tile, into `newest`.
  __device__ __forceinline__ void look_up() {
    if (asked % kWarpSize == 0) {
      places = later_places;
      later_places = place_of(p, work, next_tile + (kWarpSize + lane) * tile_step);
    }
    newest.page = __shfl_sync(kAllLanes, places.page, asked % kWarpSize);
    newest.slot = __shfl_sync(kAllLanes, places.slot, asked % kWarpSize);
    next_tile += tile_step;
    ++asked;
  }

  // One lane: the newest tile's K or V.
  __device__ __forceinline__ void copy(int stage, unsigned barrier, int is_value) const {
    // split: map[page][layer, K or V][kv head and column block][slot][64 columns]; folded: K and V in a map each
    const int blocks = (is_value ? Shape::kHeadDim : Shape::kKeyColumns) / kBoxColumns;
    copy_box_once(is_value ? values_of(stage) : keys_of(stage), is_value ? value_map : key_map, barrier, 0, newest.slot,
                  work.kv_head * blocks, Shape::kFolded ? p.layer : p.layer * 2 + is_value, newest.page);
  }

  __device__ __forceinline__ void copy_keys(int stage) const {
    barrier_expect(keys_full(stage), Shape::kKeyBytes);
    copy(stage, keys_full(stage), 0);
  }

  __device__ __forceinline__ void copy_values(int stage) const {
    barrier_expect(values_full(stage), Shape::kValueBytes);
    copy(stage, values_full(stage), 1);
  }

  __device__ __forceinline__ void copy_tile(int stage) const {
    if constexpr (Shape::kFolded) {
      barrier_expect(keys_full(stage), Shape::kStageBytes);
      copy(stage, keys_full(stage), 0);
      copy(stage, keys_full(stage), 1);
    } else {
      copy_keys(stage);
      copy_values(stage);
    }
  }

  // The first tile of each stage; a lane asks for a stage. The request's newest key is left for later.
  __device__ __forceinline__ void ask_first() {
    const int tile = first_tile + lane * tile_step;
    places = place_of(p, work, tile);
    newest = places;
    if (lane < Shape::kStages && tile < min(work.last_tile, work.newest_tile)) copy_tile(lane);
    later_places = place_of(p, work, tile + kWarpSize * tile_step);
  }

  // The tile of the request's newest key, if ask_first has left it.
  __device__ __forceinline__ void ask_newest() {
    const int tile = first_tile + lane * tile_step;
    if (lane < Shape::kStages && tile == work.newest_tile && tile < work.last_tile) copy_tile(lane);
  }

  // Split: the next tile's keys, and later its values.
  __device__ __forceinline__ void ask_keys(int stage) {
    look_up();
    if (lane == 0) copy_keys(stage);
  }

  __device__ __forceinline__ void ask_values(int stage) const {
    if (lane == 0) copy_values(stage);
  }

  // Folded: the next tile.
  __device__ __forceinline__ void ask_tile(int stage) {
    look_up();
    if (lane == 0) copy_tile(stage);
  }
};

}  // namespace g4kv
