// Decode for sm_90: how a block lays out its shared memory, and which keys of which request it serves.
#pragma once

#include "hopper.cuh"

namespace g4kv {

constexpr int kClusterTileKeys = 16;
constexpr int kBoxColumns = 64;  // of a tensor-map box: 128 bytes, the span of its swizzle
constexpr int kWarpHeads = 8;
constexpr int kMaxClusterBlocks = 8;  // what every device with clusters takes

// kKeyColumns: of a row of K in the pool, all of the head's or, folded, the rotated ones; V has the others then too.
// kStepTiles: tiles that a team takes at a time.
template <int kHeadDim_, int kWarpColumns_, int kHeadTiles, int kTeams_, int kStages_, int kKeyColumns_ = kHeadDim_,
          int kStepTiles_ = 1>
struct ClusterShape {
  static constexpr int kHeadDim = kHeadDim_, kWarpColumns = kWarpColumns_, kTeams = kTeams_, kStages = kStages_;
  static constexpr int kKeyColumns = kKeyColumns_, kStepTiles = kStepTiles_;
  static constexpr bool kFolded = kKeyColumns < kHeadDim;
  static constexpr int kParts = kHeadDim / kWarpColumns;  // of a head, a warp each
  static constexpr int kTeamWarps = kParts * kHeadTiles;
  static constexpr int kHeads = kHeadTiles * kWarpHeads;
  static constexpr int kThreads = kTeams * kTeamWarps * kWarpSize;
  static constexpr int kKeyBytes = kClusterTileKeys * kKeyColumns * 2;  // of a tile
  static constexpr int kValueBytes = kClusterTileKeys * kHeadDim * 2;
  static constexpr int kStageBytes = kKeyBytes + kValueBytes;
  static constexpr int kRingBytes = kStages * kStageBytes;  // of a team
  static constexpr int kPairs = kHeads / 2;
  // Results travel in items of 16 bytes: two head dims of two heads. A pair's items lie side by side, and pairs half a
  // line of banks apart: what the four pairs of a warp store then meets no bank twice.
  static constexpr int kPairBytes = kHeadDim / 2 * 16 + 64;
  static constexpr int kResultBytes = kPairBytes * kPairs;
  // A team's result is kept where its ring was.
  static constexpr int kTeamBytes = ((kResultBytes > kRingBytes ? kResultBytes : kRingBytes) + 1023) / 1024 * 1024;
  static constexpr int kReceiveBytes = (kHeadDim / 2 + kMaxClusterBlocks - 1) * kPairs * 16;
  static constexpr int kReceiveStateBytes = kMaxClusterBlocks * kPairs * 16;
  static constexpr int kTeamStateBytes = kTeams * kPairs * 16;
  static constexpr int kExchangeBytes =
      kParts == 1 ? 0 : kTeams * 2 * kStepTiles * kTeamWarps * kWarpSize * 16;
  static constexpr int kBarrierBytes = (kTeams * kStages + 1) * 16;
  static constexpr int kTeamStateAt = kTeams * kTeamBytes;
  static constexpr int kExchangeAt = kTeamStateAt + kTeamStateBytes;
  static constexpr int kBarriersAt = kExchangeAt + kExchangeBytes;
  // Rows of queries lie a chunk more than their length apart: eight of them meet no bank twice.
  static constexpr int kQueryRowBytes = kHeadDim * 2 + kChunkBytes;
  static constexpr int kQueriesAt = kBarriersAt + kBarrierBytes;
  // A cluster of one block receives nothing, and its launch leaves out what stands from here on.
  static constexpr int kAloneBytes = kQueriesAt + kHeads * kQueryRowBytes;
  static constexpr int kReceiveStateAt = kAloneBytes;
  static constexpr int kReceiveAt = kReceiveStateAt + kReceiveStateBytes;
  static constexpr int kSharedBytes = kReceiveAt + kReceiveBytes;
};

// What a block knows of its request and of its share of the tiles.
struct ClusterWork {
  int request;
  int split;  // of the request's tiles; a cluster serves one
  int kv_head;
  int group;
  int begin;  // keys [begin, end) are visible
  int end;
  int first_tile;
  int last_tile;   // past the last
  int newest_tile;  // of the newest key, if it is this block's split
  int page_row;    // place in page_indices of the request's logical page 0, origin taken off
  int origin;
  int tiles_per_page;
};

// The block's request and KV head; what the request has is asked for, and not waited for yet.
__device__ __forceinline__ ClusterWork locate_cluster_work(const AttentionParams& p) {
  ClusterWork work;
  // The grid: blocks of a cluster, KV heads, requests and their splits.
  work.request = blockIdx.z;
  work.split = 0;
  if (p.num_splits > 1) {
    work.request /= p.num_splits;
    work.split = blockIdx.z - work.request * p.num_splits;
  }
  work.kv_head = blockIdx.y;
  work.end = p.kv_lens[work.request];
  work.page_row = p.page_indptr[work.request];
  work.origin = p.page_origins[work.request];
  work.group = p.num_qo_heads / p.num_kv_heads;
  return work;
}

__device__ __forceinline__ void share_keys(const AttentionParams& p, ClusterWork& work) {
  const int kv_len = work.end;
  work.page_row -= work.origin;
  work.begin = p.window_left < 0 ? 0 : max(0, kv_len - 1 - p.window_left);
  work.first_tile = work.begin / kClusterTileKeys;
  work.last_tile = (kv_len + kClusterTileKeys - 1) / kClusterTileKeys;
  work.newest_tile = work.last_tile - 1;
  work.tiles_per_page = p.layout.page_size / kClusterTileKeys;
  if (p.num_splits > 1) {
    const int per_split = (work.last_tile - work.first_tile + p.num_splits - 1) / p.num_splits;
    work.first_tile += work.split * per_split;
    work.last_tile = min(work.last_tile, work.first_tile + per_split);
  }
}

// Where a tile of keys lies.
struct TilePlace {
  int page;
  int slot;  // of the tile's first key
};

__device__ __forceinline__ TilePlace place_of(const AttentionParams& p, const ClusterWork& work, int tile) {
  TilePlace place;
  place.page = place.slot = 0;
  if (tile < work.last_tile) {
    const int logical_page = work.tiles_per_page == 1 ? tile : tile / work.tiles_per_page;
    // page_indices[request row][logical page - origin]
    place.page = p.page_indices[work.page_row + logical_page];
    place.slot = (tile - logical_page * work.tiles_per_page) * kClusterTileKeys;
  }
  return place;
}

}  // namespace g4kv
