// What a block of the head_dim 512 prefill kernels for compute capability 9.0 works on, its shared memory, and what the
// loops over split and over folded rows have in common.
#pragma once

#include "attention_tile.cuh"
#include "hopper.cuh"
#include "page_boxes.cuh"
#include "wgmma.cuh"

namespace g4kv {

template <int kClusterTiles, bool kFoldedRows = false>
struct HopperPrefill {
  static constexpr int kClusterBlocks = kClusterTiles;
  static constexpr bool kFolded = kFoldedRows;
  static constexpr int kHeadDim = 512;
  static constexpr int kKeyDim = kFolded ? 128 : kHeadDim;  // columns of a row of K
  static constexpr int kRows = 64;
  static constexpr int kKeys = kFolded ? 64 : 128;  // of a block of keys
  static constexpr int kHalfKeys = 64;              // of which weights are handed over at a time
  static constexpr int kHalves = kKeys / kHalfKeys;
  static constexpr int kBlockPlaces = kFolded ? 2 : 1;  // of weights and factors: blocks of keys take turns
  static constexpr int kWeightPlaces = kHalves * kBlockPlaces;
  static constexpr int kColumnBlocks = kHeadDim / kBlockColumns;
  static constexpr int kBoxesOfKeys = kKeys / kBoxKeys;
  static constexpr int kKeyStages = kFolded ? 1 : 5;
  static constexpr int kValueStages = kFolded ? 8 : kHalfKeys / kBoxKeys;
  static constexpr int kFirstValueStage = kFolded ? 1 : 0;  // to be filled: before it queries stand in the ring
  static constexpr int kTurnedStages = kFolded ? 1 : 0;  // of V's columns where K has its own
  static constexpr int kOutputWarpgroups = 2;
  static constexpr int kStageBytes = 16384;
  static constexpr int kKeyBoxBytes = kBoxKeys * kSwizzleRowBytes;
  static constexpr int kGroupBytes = kStageBytes / kOutputWarpgroups;  // of a V stage: an output warpgroup's columns
  static constexpr int kColumnBlockBytes = (kFolded ? kKeys : kBoxKeys) * kSwizzleRowBytes;  // of a V stage
  static constexpr int kQueryBlockBytes = kRows * kSwizzleRowBytes;
  static constexpr int kWeightBytes = kRows * kHalfKeys * 2;

  static constexpr int kWarps = 16;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kOutputColumns = kHeadDim / kOutputWarpgroups;
  static constexpr int kWarpsOfGroup = kWarpgroupSize / kWarpSize;
  static constexpr int kProducerRegisters = 32;  // with 128 for the scores and twice 176: all there are
  static constexpr int kOutputRegisters = 176;

  // Byte offsets in shared memory.
  static constexpr int kQueries = 0;  // [column block][row][128 bytes], later the output rows, over K's ring too if need be
  static constexpr int kQueryBytes = kRows * kHeadDim * 2 - (kFolded ? kStageBytes : 0);
  static constexpr int kKeyRing = kQueries + kQueryBytes;
  static constexpr int kValueRing = kKeyRing + kKeyStages * kStageBytes;
  static constexpr int kTurnedRing = kValueRing + kValueStages * kStageBytes;
  static constexpr int kWeights = kTurnedRing + kTurnedStages * kStageBytes;  // [place][row][64 keys]
  static constexpr int kFactors = kWeights + kWeightPlaces * kWeightBytes;  // [place][row], of the block's rescaling
  static constexpr int kInverses = kFactors + kBlockPlaces * kRows * 4;     // [row], one over the sum of weights
  static constexpr int kBarriers = kInverses + kRows * 4;
  static constexpr int kKeysThere = kBarriers;  // [stage]
  static constexpr int kKeysUsed = kKeysThere + kKeyStages * 8;
  static constexpr int kValuesThere = kKeysUsed + kKeyStages * 8;
  static constexpr int kValuesUsed = kValuesThere + kValueStages * 8;
  static constexpr int kTurnedThere = kValuesUsed + kValueStages * 8;
  static constexpr int kTurnedUsed = kTurnedThere + kTurnedStages * 8;
  static constexpr int kWeightsThere = kTurnedUsed + kTurnedStages * 8;  // [place], folded [place][output warpgroup]
  static constexpr int kWeightsUsed = kWeightsThere + kWeightPlaces * (kFolded ? kOutputWarpgroups : 1) * 8;  // [place]
  static constexpr int kQueriesThere = kWeightsUsed + (kFolded ? 0 : kWeightPlaces * 8);
  static constexpr int kSumsThere = kQueriesThere + 8;
  static constexpr int kTile = kSumsThere + 8;  // TileGeometry, so that no loop has to keep it
  static constexpr int kSharedBytes = kTile + sizeof(TileGeometry);

  // Folded, of an output warpgroup.
  static __device__ __forceinline__ constexpr int weights_there(int place, int group) {
    return kWeightsThere + (place * kOutputWarpgroups + group) * 8;
  }

  // Where a column block of the queries is. Folded, [3 of the half][half] as in the stages that they meet; of either half
  // the last two are kept in registers, and the last begins in the first stage of V's ring.
  static __device__ __forceinline__ constexpr int query_block(int column_block) {
    if constexpr (!kFolded) return kQueries + column_block * kQueryBlockBytes;
    const int of_half = column_block % (kColumnBlocks / 2), half = column_block / (kColumnBlocks / 2);
    return (of_half == kColumnBlocks / 2 - 1 ? kValueRing : kQueries + of_half * kStageBytes) + half * kGroupBytes;
  }

  static_assert(kClusterTiles == 1 || kClusterTiles == 2, "a pair of tiles at most");
};

// What a block works on, and what it shares with the other block of its cluster.
struct HopperTile {
  TileGeometry tile;
  int begin;  // keys [begin, end) are walked, from begin's block on: those that this tile or the other's sees
  int end;
  unsigned rank;  // in the cluster
  bool is_shared;
};

// False: the last cluster has a block more than there are tiles.
template <typename Shape>
__device__ __forceinline__ bool locate_hopper_tile(const AttentionParams& p, HopperTile& found) {
  // block[cluster of tiles, last first][kv_head][rank]: the last tiles of a request see the most keys
  const int cluster = blockIdx.x / Shape::kClusterBlocks;
  const int clusters = ceil_divide(p.num_tiles, Shape::kClusterBlocks);
  const int first = (clusters - 1 - cluster / p.num_kv_heads) * Shape::kClusterBlocks;
  found.rank = Shape::kClusterBlocks == 1 ? 0 : blockIdx.x % Shape::kClusterBlocks;
  const int number = first + (int)found.rank;
  if (number >= p.num_tiles) return false;
  const int kv_head = cluster % p.num_kv_heads;
  const int other_number = number ^ 1;
  const bool has_other = Shape::kClusterBlocks == 2 && other_number < p.num_tiles;
  const int request = p.tile_requests[number], index = p.tile_indices[number];
  // Now, not when the request is known: nothing else runs on the multiprocessor while these are on their way.
  const int other_request = has_other ? p.tile_requests[other_number] : -1;
  const int other_index = has_other ? p.tile_indices[other_number] : 0;
  const RequestRows rows = load_request(p, request);
  found.tile = tile_of(p, rows, index, kv_head, Shape::kRows);
  found.begin = found.tile.begin;
  found.end = found.tile.end;
  found.is_shared = other_request == request;
  if (found.is_shared) {
    const TileGeometry other = tile_of(p, rows, other_index, kv_head, Shape::kRows);
    found.begin = min(found.begin, other.begin);
    found.end = max(found.end, other.end);
  }
  return true;
}

// Blocks of keys; at least one, so that rows that see no key are written too.
template <typename Shape>
__device__ __forceinline__ int key_blocks(const HopperTile& t) {
  return max(1, ceil_divide(t.end, Shape::kKeys) - t.begin / Shape::kKeys);
}

template <typename Shape>
__device__ __forceinline__ int first_block_key(const HopperTile& t) {
  return t.begin / Shape::kKeys * Shape::kKeys;
}

// A producer's end: until all stages from the next on are used. Nobody tells this block's barriers after that, nor copies
// into its memory, and it need not wait for the other of its cluster.
template <int kStages>
__device__ __forceinline__ void wait_until_used(unsigned used, RingPlace<kStages>& next) {
#pragma unroll 1
  for (int i = 0; i < kStages; ++i) {
    barrier_wait(used + next.stage * 8, next.parity ^ 1);
    next.advance();
  }
}

// The request's pages, and where the 16 keys lie that a producer's lane copies first.
struct FirstBox {
  PageRow row;
  BoxPlace place;
};

template <typename Shape>
__device__ __forceinline__ FirstBox first_box(const AttentionParams& p, const HopperTile& t, int lane) {
  const PageRow row(p, t.tile.request, t.begin, t.end);
  return {row, row.place_of(p, first_block_key<Shape>(t) + lane % Shape::kBoxesOfKeys * kBoxKeys)};
}

// Tells the blocks that share a stage that this warp is done with it: lane i tells one of them. Each hears from as many
// warps whether it shares or not, so that barriers are ready before tiles are located: alone, a warp tells twice.
template <typename Shape>
struct StageRelease {
  unsigned memory;  // of the block to tell
  bool tells;

  __device__ __forceinline__ StageRelease(const HopperTile& t, unsigned shared, int lane) {
    memory = shared;
    tells = lane < Shape::kClusterBlocks;
    if constexpr (Shape::kClusterBlocks > 1) {
      memory = shared_of_rank(shared, t.is_shared ? lane % Shape::kClusterBlocks : (int)t.rank);
    }
  }

  __device__ __forceinline__ void operator()(int barrier) const {
    if (!tells) return;
    if constexpr (Shape::kClusterBlocks > 1) {
      barrier_arrive_at_rank(memory + barrier);
    } else {
      barrier_arrive(memory + barrier);
    }
  }
};

__device__ __forceinline__ void store_matrix(unsigned address, const unsigned (&fragment)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(fragment[0]),
               "r"(fragment[1]), "r"(fragment[2]), "r"(fragment[3])
               : "memory");
}

// weights[row][64 keys], 16 keys from key16 * 16 on
template <int kHalfKeys>
__device__ __forceinline__ void store_weights(unsigned weights, const unsigned (&packed)[4], int first_row, int key16,
                                              int lane) {
  store_matrix(weights + swizzled<kHalfKeys>(first_row + lane % 16, key16 * 2 + lane / 16), packed);
}

// Begins the copies of query rows to [column block][row][128 bytes], zeros past the last; 16 bytes a copy. By the output
// warps.
template <typename Shape>
__device__ __forceinline__ void begin_query_copies(const AttentionParams& p, const TileGeometry& tile, unsigned shared,
                                                   int output_warp, int lane) {
  constexpr int kWarps = Shape::kOutputWarpgroups * Shape::kWarpsOfGroup;
  constexpr int kRowsOfWarp = Shape::kRows / kWarps;
  // An offset takes divisions: a lane works out one, for all.
  const int row_of_lane = output_warp + lane % kRowsOfWarp * kWarps;
  const long long offset_of_lane =
      query_offset<Shape::kHeadDim>(p, tile, row_of_lane < tile.num_rows ? row_of_lane : 0);
#pragma unroll
  for (int i = 0; i < kRowsOfWarp; ++i) {
    const int row = output_warp + i * kWarps;
    const bool valid = row < tile.num_rows;
    const bf16_bits* source = p.q + __shfl_sync(kAllLanes, offset_of_lane, i);
#pragma unroll
    for (int step = 0; step < Shape::kHeadDim / 8 / kWarpSize; ++step) {
      const int chunk = step * kWarpSize + lane;
      const unsigned at = shared + Shape::query_block(chunk / 8);
      copy_async(at + swizzled<kBlockColumns>(row, chunk % 8), source + chunk * 8, valid);
    }
  }
  commit_copies();
}

// Largest of the lane's scores in either of its rows, in short chains: the multiplications wait for it.
template <int kTiles>
__device__ __forceinline__ void find_lane_maxima(float (&maxima)[2], const float (&scores)[kTiles][4]) {
  constexpr int kChains = 4;
  float chains[2][kChains];
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float of_tile = fmaxf(scores[n][i * 2], scores[n][i * 2 + 1]);
      chains[i][n % kChains] = n < kChains ? of_tile : fmaxf(chains[i][n % kChains], of_tile);
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) maxima[i] = fmaxf(fmaxf(chains[i][0], chains[i][1]), fmaxf(chains[i][2], chains[i][3]));
}

// The maxima of the lane's rows with those of a block's scores; what was summed before is rescaled by factor, which stays
// as it is where no row's is raised, as in most blocks.
template <int kTiles>
__device__ __forceinline__ void raise_maxima(float (&max)[2], float (&sum)[2], float (&factor)[2],
                                             const float (&scores)[kTiles][4], float scale_log2) {
  float lane_maxima[2];
  find_lane_maxima(lane_maxima, scores);
  if (!__any_sync(kAllLanes, lane_maxima[0] > max[0] || lane_maxima[1] > max[1])) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float block_max = row_max(lane_maxima[i]);
    if (block_max > max[i]) {
      factor[i] = exp2_approx((max[i] - block_max) * scale_log2);
      max[i] = block_max;
      sum[i] *= factor[i];
    }
  }
}

// One over each row's sum for the output warpgroups, and its log-sum-exp.
template <typename Shape>
__device__ __forceinline__ void finish_rows(const AttentionParams& p, unsigned shared, unsigned char* memory,
                                            const float (&max)[2], float (&sum)[2], int first_row, int lane) {
  float* inverses = reinterpret_cast<float*>(memory + Shape::kInverses);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    sum[i] = row_sum(sum[i]);
    if (lane % 4 == 0) inverses[first_row + lane / 4 + i * 8] = sum[i] > 0.0f ? 1.0f / sum[i] : 0.0f;
  }
  __syncwarp();
  barrier_arrive(shared + Shape::kSumsThere);
  if (p.lse == nullptr || lane % 4 != 0) return;
  const TileGeometry& tile = *reinterpret_cast<const TileGeometry*>(memory + Shape::kTile);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = first_row + lane / 4 + i * 8;
    if (row < tile.num_rows) {
      // lse[token][head]
      p.lse[query_offset<Shape::kHeadDim>(p, tile, row) / Shape::kHeadDim] =
          log_sum_exp(max[i], sum[i], p.scale_log2);
    }
  }
}

// An output warp's rows. sums_of(n): of the n-th 8 of the group's columns.
template <typename Shape, typename SumsOf>
__device__ __forceinline__ void store_rows(const AttentionParams& p, unsigned shared, unsigned char* memory, int group,
                                           int first_row, int lane, SumsOf sums_of) {
  const TileGeometry tile = *reinterpret_cast<const TileGeometry*>(memory + Shape::kTile);
  // As of the queries; before the wait.
  const long long offset_of_lane = query_offset<Shape::kHeadDim>(p, tile, first_row + lane % kRowsPerTile);
  // Through the memory of the queries, which nobody reads any more, so that 512 bytes are stored at once.
  barrier_wait(shared + Shape::kSumsThere, 0);
  const float* inverses = reinterpret_cast<const float*>(memory + Shape::kInverses);
  const float inverse0 = inverses[first_row + lane / 4], inverse1 = inverses[first_row + lane / 4 + 8];
  constexpr int kColumns = Shape::kOutputColumns;
  // rows[group][row][256 columns]
  const int rows = Shape::kQueries + group * Shape::kRows * kColumns * 2;
#pragma unroll
  for (int column16 = 0; column16 < kColumns / 16; ++column16) {
    const float(&left)[4] = sums_of(column16 * 2);
    const float(&right)[4] = sums_of(column16 * 2 + 1);
    const unsigned packed[4] = {pack2(left[0] * inverse0, left[1] * inverse0),
                                pack2(left[2] * inverse1, left[3] * inverse1),
                                pack2(right[0] * inverse0, right[1] * inverse0),
                                pack2(right[2] * inverse1, right[3] * inverse1)};
    store_matrix(shared + rows + swizzled<kColumns>(first_row + lane % 16, column16 * 2 + lane / 16), packed);
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kRowsPerTile; ++i) {
    const int row = first_row + i;
    const long long offset = __shfl_sync(kAllLanes, offset_of_lane, i);
    if (row < tile.num_rows) {
      const uint4 packed = *reinterpret_cast<const uint4*>(memory + rows + swizzled<kColumns>(row, lane));
      *reinterpret_cast<uint4*>(p.out + offset + group * kColumns + lane * 8) = packed;
    }
  }
}

}  // namespace g4kv
