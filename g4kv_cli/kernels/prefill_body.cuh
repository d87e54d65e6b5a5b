// Attention of a tile of many packed query rows, all warps walking the same key tiles: the prefill entries' large
// tiles.
//
// kColumnWarps warps own kRowTiles * 16 rows together: each scores its share of the keys over the whole head, they
// exchange row maxima and weights through shared memory, and each sums its share of the output columns. So a K or V
// fragment read from shared memory serves kRowTiles tensor-core tiles, and the accumulators fit the registers. K and
// V are one tile each: the next K tile is on its way while V is used, and the other way round. Folded rows of K need V
// for their scores as well (attention_tile.cuh): both come together, and where there is memory V has a second tile.
#pragma once

#include "attention_tile.cuh"

namespace g4kv {

template <int kHeadDim, int kRowGroups, int kRowTiles, int kColumnWarps, int kKeys, int kKeyDim = kHeadDim,
          int kValueTiles = 1>
struct PrefillShape {
  static constexpr int kWarps = kRowGroups * kColumnWarps;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kGroupRows = kRowTiles * kRowsPerTile;
  static constexpr int kRows = kRowGroups * kGroupRows;
  static constexpr int kColumns = kHeadDim / kColumnWarps;
  static constexpr int kQueryBytes = kRows * kHeadDim * 2;
  static constexpr int kKeyBytes = kKeys * kKeyDim * 2;     // of the tile of K
  static constexpr int kValueBytes = kKeys * kHeadDim * 2;  // of a tile of V
  static constexpr int kWeightBytes = kColumnWarps == 1 ? 0 : kRows * kKeys * 2;
  static constexpr int kStateBytes = kColumnWarps == 1 ? 0 : kColumnWarps * kRows * 4;
  static constexpr int kSharedBytes = kQueryBytes + kKeyBytes + kValueTiles * kValueBytes + kWeightBytes + kStateBytes;
};

// scores[row tile][rows][kScoreTiles * 8 keys from first_key on] = Q K^T over the whole head.
template <int kHeadDim, int kKeyDim, int kRowTiles, int kScoreTiles>
__device__ __forceinline__ void score_rows(float (&scores)[kRowTiles][kScoreTiles][4], unsigned queries, int first_row,
                                           unsigned keys, unsigned values, int first_key, int lane) {
  // The fragments of the next 16 columns are on their way while the tensor cores work on these.
  unsigned a[2][kRowTiles][4], b[2][kScoreTiles / 2][4];
  const auto load = [&](int column16) {
#pragma unroll
    for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) {
      load_a<kHeadDim>(a[column16 % 2][row_tile], queries, first_row + row_tile * kRowsPerTile, column16, lane);
    }
#pragma unroll
    for (int n = 0; n < kScoreTiles / 2; ++n) {
      load_key_columns<kHeadDim, kKeyDim>(b[column16 % 2][n], keys, values, first_key + n * 16, column16, lane);
    }
  };
  load(0);
#pragma unroll
  for (int column16 = 0; column16 < kHeadDim / 16; ++column16) {
    if (column16 + 1 < kHeadDim / 16) load(column16 + 1);
#pragma unroll
    for (int n = 0; n < kScoreTiles / 2; ++n) {
      const unsigned(&k)[4] = b[column16 % 2][n];
#pragma unroll
      for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) {
        multiply_accumulate(scores[row_tile][2 * n], a[column16 % 2][row_tile], k[0], k[1]);
        multiply_accumulate(scores[row_tile][2 * n + 1], a[column16 % 2][row_tile], k[2], k[3]);
      }
    }
  }
}

template <int kHeadDim, int kRowGroups, int kRowTiles, int kColumnWarps, int kKeys, int kKeyDim = kHeadDim,
          int kValueTiles = 1>
__device__ __forceinline__ void attend_rows(const AttentionParams& p) {
  using Shape = PrefillShape<kHeadDim, kRowGroups, kRowTiles, kColumnWarps, kKeys, kKeyDim, kValueTiles>;
  using Copy = KeyCopy<kHeadDim, kKeyDim, Shape::kThreads, kKeys>;
  constexpr bool kFolded = kKeyDim != kHeadDim;
  constexpr bool kExchange = kColumnWarps > 1;
  constexpr int kWarps = Shape::kWarps, kRows = Shape::kRows, kColumns = Shape::kColumns;
  constexpr int kScoreTiles = kKeys / kColumnWarps / 8;
  extern __shared__ __align__(128) unsigned char shared[];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int first_row = warp / kColumnWarps * Shape::kGroupRows, part = warp % kColumnWarps;
  const unsigned queries = shared_address(shared);
  const unsigned keys = queries + Shape::kQueryBytes, first_values = keys + Shape::kKeyBytes;
  const unsigned shared_weights = first_values + kValueTiles * Shape::kValueBytes;
  unsigned char* weight_rows = shared + Shape::kQueryBytes + Shape::kKeyBytes + kValueTiles * Shape::kValueBytes;
  float* part_rows = reinterpret_cast<float*>(weight_rows + Shape::kWeightBytes);  // [kColumnWarps][kRows]

  // The last tiles of a request see the most keys: they start first.
  const int rank = blockIdx.x / p.num_kv_heads;
  const TileGeometry tile = locate_tile(p, p.num_tiles - 1 - rank, blockIdx.x % p.num_kv_heads, kRows);
  const int begin = tile.begin / 16 * 16;
  const auto place_of = [&](int first_key) {
    return Copy::place(p, tile, first_key + Copy::Keys::row_of_lane(warp, lane));
  };

  auto place = place_of(begin);
  copy_queries<kHeadDim>(p, tile, queries, warp, kWarps, kRows, lane);
  Copy::keys(p, place, keys, warp, lane);
  if constexpr (kFolded) Copy::values(p, place, first_values, warp, lane);
  commit_copies();

  const CommonKeys common = common_keys(tile, first_row, Shape::kGroupRows);
  RowState rows[kRowTiles];
#pragma unroll
  for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) rows[row_tile] = empty_rows();
  float out[kRowTiles][kColumns / 8][4] = {};
  unsigned values = first_values;
#pragma unroll 1
  for (int first_key = begin; first_key < tile.end; first_key += kKeys) {
    wait_copies<0>();
    __syncthreads();  // K is there, and V's memory is free; of folded rows V is there too
    if constexpr (!kFolded) {
      Copy::values(p, place, values, warp, lane);
      commit_copies();
    }
    place = place_of(first_key + kKeys);  // early: the page id is on its way while this tile computes

    float scores[kRowTiles][kScoreTiles][4] = {};
    const int score_key = part * (kKeys / kColumnWarps);
    score_rows<kHeadDim, kKeyDim>(scores, queries, first_row, keys, values, score_key, lane);
    float tile_max[kRowTiles][2];
#pragma unroll
    for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) {
      mask(scores[row_tile], tile, common, first_row + row_tile * kRowsPerTile, first_key + score_key, lane);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        tile_max[row_tile][i] = row_max(lane_max(scores[row_tile], i));
        if (kExchange && lane % 4 == 0) {
          // part_rows[part][row]
          part_rows[part * kRows + first_row + row_tile * kRowsPerTile + lane / 4 + i * 8] = tile_max[row_tile][i];
        }
      }
    }
    __syncthreads();  // K's memory is free, and the other parts' maxima are there
    const unsigned next_values = kValueTiles == 1 ? first_values : 2 * first_values + Shape::kValueBytes - values;
    if (first_key + kKeys < tile.end) {
      Copy::keys(p, place, keys, warp, lane);
      if constexpr (kFolded && kValueTiles > 1) Copy::values(p, place, next_values, warp, lane);
    }
    commit_copies();

#pragma unroll
    for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) {
      float factor[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if constexpr (kExchange) {
          const int row = first_row + row_tile * kRowsPerTile + lane / 4 + i * 8;
#pragma unroll
          for (int other = 0; other < kColumnWarps; ++other) {
            tile_max[row_tile][i] = fmaxf(tile_max[row_tile][i], part_rows[other * kRows + row]);
          }
        }
        factor[i] = weigh(scores[row_tile], rows[row_tile], i, tile_max[row_tile][i], p.scale_log2);
        if constexpr (kExchange) {
          const int row = first_row + row_tile * kRowsPerTile + lane / 4 + i * 8;
#pragma unroll
          for (int n = 0; n < kScoreTiles; ++n) {
            const int at = swizzled<kKeys>(row, score_key / 8 + n) + (lane % 4) * 4;
            *reinterpret_cast<unsigned*>(weight_rows + at) =
                pack2(scores[row_tile][n][2 * i], scores[row_tile][n][2 * i + 1]);
          }
        }
      }
      rescale(out[row_tile], factor[0], factor[1]);
    }
    if constexpr (!kFolded) wait_copies<1>();
    __syncthreads();  // V is there, and the other parts' weights

#pragma unroll
    for (int key16 = 0; key16 < kKeys / 16; ++key16) {
      unsigned weights[kRowTiles][4];
#pragma unroll
      for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) {
        if constexpr (kExchange) {
          load_a<kKeys>(weights[row_tile], shared_weights, first_row + row_tile * kRowsPerTile, key16, lane);
        } else {
          weights_as_a(weights[row_tile], scores[row_tile][2 * key16], scores[row_tile][2 * key16 + 1]);
        }
      }
      accumulate_values<kHeadDim, kRowTiles, kColumns>(out, weights, values, key16 * 16, part * (kColumns / 16), lane);
    }
    if constexpr (kFolded && kValueTiles == 1) {
      __syncthreads();  // V's memory is free
      if (first_key + kKeys < tile.end) Copy::values(p, place, first_values, warp, lane);
      commit_copies();
    }
    values = next_values;
  }
  wait_copies<0>();
  __syncthreads();

  // Each part has summed the weights of its own keys; added in the order of the parts, all get the same bits.
  float sum[kRowTiles][2];
#pragma unroll
  for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[row_tile][i] = row_sum(rows[row_tile].sum[i]);
      if (kExchange && lane % 4 == 0) {
        part_rows[part * kRows + first_row + row_tile * kRowsPerTile + lane / 4 + i * 8] = sum[row_tile][i];
      }
    }
  }
  if constexpr (kExchange) __syncthreads();

  // Through the rows' own query memory, so that 16 bytes are stored at once.
#pragma unroll
  for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + row_tile * kRowsPerTile + lane / 4 + i * 8;
      float total = sum[row_tile][i];
      if constexpr (kExchange) {
        total = 0.0f;
#pragma unroll
        for (int other = 0; other < kColumnWarps; ++other) total += part_rows[other * kRows + row];
      }
      const float scale = total > 0.0f ? 1.0f / total : 0.0f;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        const int at = swizzled<kHeadDim>(row, part * (kColumns / 8) + n) + (lane % 4) * 4;
        *reinterpret_cast<unsigned*>(shared + at) =
            pack2(out[row_tile][n][2 * i] * scale, out[row_tile][n][2 * i + 1] * scale);
      }
      if (p.lse != nullptr && part == 0 && lane % 4 == 0 && row < tile.num_rows) {
        // lse[token][head]
        p.lse[query_offset<kHeadDim>(p, tile, row) / kHeadDim] =
            log_sum_exp(rows[row_tile].max[i], total, p.scale_log2);
      }
    }
  }
  __syncwarp();
  constexpr int kOutChunks = kColumns / 8;
  constexpr int kRowsAtOnce = kWarpSize / kOutChunks;
  const int chunk = part * kOutChunks + lane % kOutChunks;
#pragma unroll
  for (int i = 0; i < Shape::kGroupRows / kRowsAtOnce; ++i) {
    const int row = first_row + i * kRowsAtOnce + lane / kOutChunks;
    if (row < tile.num_rows) {
      const uint4 packed = *reinterpret_cast<const uint4*>(shared + swizzled<kHeadDim>(row, chunk));
      *reinterpret_cast<uint4*>(p.out + query_offset<kHeadDim>(p, tile, row) + chunk * 8) = packed;
    }
  }
}

}  // namespace g4kv

// A kernel of rows of the whole head: head_dim, row groups, 16-row tiles a warp, warps that share a row group's columns,
// keys a step, blocks of a multiprocessor, shared bytes. Names, threads and bytes stand again in entries/table.py.
#define G4KV_PREFILL(name, head_dim, row_groups, row_tiles, column_warps, keys, blocks, bytes)                    \
  static_assert(g4kv::PrefillShape<head_dim, row_groups, row_tiles, column_warps, keys>::kSharedBytes == bytes,   \
                "entries/table.py states these bytes");                                                           \
  extern "C" __global__ void __launch_bounds__(                                                                   \
      g4kv::PrefillShape<head_dim, row_groups, row_tiles, column_warps, keys>::kThreads, blocks)                  \
      name(const g4kv::AttentionParams params) {                                                                  \
    g4kv::attend_rows<head_dim, row_groups, row_tiles, column_warps, keys>(params);                               \
  }
