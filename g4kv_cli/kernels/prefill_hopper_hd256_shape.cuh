// Prefill at head_dim 256 for sm_90: a block's shared memory, and what a consumer warpgroup is told of a tile.
#pragma once

#include "attention_tile.cuh"
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
  static constexpr int kValuesLanded = kValuesUsed + kValueStages * 8;       // if they have to be cleared first
  static constexpr int kFirstKeysThere = kValuesLanded + 8;                  // once
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

}  // namespace g4kv
