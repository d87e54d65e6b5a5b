// Building blocks of the attention kernels: asynchronous copies into swizzled shared memory, tensor-core tiles, and
// the online softmax of one warp's 16 rows. Everything here runs from sm_80 on.
//
// Fragment layouts are PTX's for mma.m16n8k16: lane l holds rows l / 4 and l / 4 + 8, columns 2 * (l % 4) and + 1 of
// each 8-column tile; accumulator elements 0, 1 belong to the first row and 2, 3 to the second.
#pragma once

#include "attention_params.cuh"
#include "bf16.cuh"
#include "kv_offsets.cuh"
#include "warp.cuh"

namespace g4kv {

constexpr int kRowsPerTile = 16;
constexpr int kChunkBytes = 16;

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return (unsigned)__cvta_generic_to_shared(pointer);
}

// 16 bytes to shared memory; zeros where `valid` is false (nothing is read then).
__device__ __forceinline__ void copy_async(unsigned destination, const void* source, bool valid) {
  const int source_bytes = valid ? kChunkBytes : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(destination), "l"(source), "r"(source_bytes)
               : "memory");
}

__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most kPending of the newest groups of this thread are still on their way.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void load_matrix(unsigned (&fragment)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_matrix_transposed(unsigned (&fragment)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void multiply_accumulate(float (&sum)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Byte offset of 16-byte chunk `chunk` of row `row` in a tile of kColumns bf16 columns. The exclusive or spreads the
// eight rows that one ldmatrix phase reads over all banks; rows shorter than 128 bytes share a line of banks.
template <int kColumns>
__device__ __forceinline__ int swizzled(int row, int chunk) {
  constexpr int kChunks = kColumns / 8;
  constexpr int kSpread = kChunks < 8 ? kChunks : 8;
  // tile[row][chunk ^ line % kSpread][8]
  const int line = row / (8 / kSpread);
  return row * (kColumns * 2) + ((chunk ^ (line & (kSpread - 1))) * kChunkBytes);
}

// A fragment (16 rows x 16 columns) of a row-major tile.
template <int kColumns>
__device__ __forceinline__ void load_a(unsigned (&fragment)[4], unsigned tile, int first_row, int column16, int lane) {
  load_matrix(fragment, tile + swizzled<kColumns>(first_row + (lane & 15), column16 * 2 + (lane >> 4)));
}

// B fragments of K (16 keys x 16 columns, keys are the n side): [0], [1] serve keys 0..7, [2], [3] keys 8..15.
template <int kColumns>
__device__ __forceinline__ void load_k(unsigned (&fragment)[4], unsigned tile, int first_key, int column16, int lane) {
  const int row = first_key + (lane & 7) + ((lane >> 4) << 3);
  load_matrix(fragment, tile + swizzled<kColumns>(row, column16 * 2 + ((lane >> 3) & 1)));
}

// Where 16 columns of K stand, by their number in the head: in K's tile, where a row holds all of them (split) or those
// that turn, both halves of the pairs one behind the other (folded). A folded row's other columns are V's own.
template <int kHeadDim, int kKeyDim>
struct KeyColumns {
  static constexpr int kHalf = kHeadDim / 32;
  static constexpr int kTurned = kKeyDim / 32;  // of each half
  static_assert(kHeadDim % 32 == 0 && kKeyDim % 32 == 0, "whole fragments");
  static __device__ __forceinline__ constexpr bool in_keys(int column16) { return column16 % kHalf < kTurned; }
  static __device__ __forceinline__ constexpr int place(int column16) {
    return column16 / kHalf * kTurned + column16 % kHalf;
  }
};

// B fragments of 16 columns of K of either format: from the tiles of K and of V.
template <int kHeadDim, int kKeyDim>
__device__ __forceinline__ void load_key_columns(unsigned (&fragment)[4], unsigned keys, unsigned values, int first_key,
                                                 int column16, int lane) {
  using Columns = KeyColumns<kHeadDim, kKeyDim>;
  if constexpr (kKeyDim == kHeadDim) {
    load_k<kHeadDim>(fragment, keys, first_key, column16, lane);
  } else if (Columns::in_keys(column16)) {
    load_k<kKeyDim>(fragment, keys, first_key, Columns::place(column16), lane);
  } else {
    load_k<kHeadDim>(fragment, values, first_key, column16, lane);
  }
}

// B fragments of V (16 keys x 16 columns, columns are the n side): [0], [1] serve columns 0..7, [2], [3] 8..15.
template <int kColumns>
__device__ __forceinline__ void load_v(unsigned (&fragment)[4], unsigned tile, int first_key, int column16, int lane) {
  load_matrix_transposed(fragment, tile + swizzled<kColumns>(first_key + (lane & 15), column16 * 2 + (lane >> 4)));
}

// One request as a tile of query rows sees it. Rows pack (token, head of the group), so that each K and V byte is
// read once for all heads that share it: row = token * group + head.
struct TileGeometry {
  int request;
  int kv_head;
  int group;
  int first_token;     // in q and out, of the request
  int first_row;       // packed row of the tile's row 0, inside the request
  int num_rows;        // packed rows of the request from first_row on
  int first_position;  // position of the request's first query token
  int window_left;
  int begin;  // keys [begin, end) are visible to at least one row of the tile
  int end;
};

__device__ __forceinline__ int position_of(const TileGeometry& tile, int row) {
  // Rows past the last repeat it: they are computed and never stored.
  const int last = min(row, tile.num_rows - 1);
  return tile.first_position + (tile.first_row + last) / tile.group;
}

__device__ __forceinline__ int first_visible(const TileGeometry& tile, int position) {
  return tile.window_left < 0 ? 0 : max(0, position - tile.window_left);
}

// What a request's tiles are located by.
struct RequestRows {
  int request;
  int first_token;  // in q and out
  int q_len;
  int kv_len;
};

__device__ __forceinline__ RequestRows load_request(const AttentionParams& p, int request) {
  RequestRows rows;
  rows.request = request;
  rows.first_token = p.q_indptr == nullptr ? request : p.q_indptr[request];
  rows.q_len = p.q_indptr == nullptr ? 1 : p.q_indptr[request + 1] - rows.first_token;
  rows.kv_len = p.kv_lens[request];
  return rows;
}

// The request's tile of this index.
__device__ __forceinline__ TileGeometry tile_of(const AttentionParams& p, const RequestRows& rows, int index,
                                                int kv_head, int rows_per_tile) {
  TileGeometry tile;
  tile.request = rows.request;
  tile.kv_head = kv_head;
  tile.group = p.num_qo_heads / p.num_kv_heads;
  tile.first_token = rows.first_token;
  tile.first_row = index * rows_per_tile;
  tile.num_rows = min(rows_per_tile, rows.q_len * tile.group - tile.first_row);
  tile.first_position = rows.kv_len - rows.q_len;
  tile.window_left = p.window_left;
  tile.begin = first_visible(tile, position_of(tile, 0));
  // An empty request sees no key at all.
  tile.end = rows.kv_len == 0 ? tile.begin : position_of(tile, rows_per_tile - 1) + 1;
  return tile;
}

__device__ __forceinline__ TileGeometry locate_tile(const AttentionParams& p, int tile_number, int kv_head,
                                                    int rows_per_tile) {
  const int request = p.tile_requests == nullptr ? tile_number : p.tile_requests[tile_number];
  const int index = p.tile_indices == nullptr ? 0 : p.tile_indices[tile_number];
  return tile_of(p, load_request(p, request), index, kv_head, rows_per_tile);
}

// Element offset into q and out of a packed row.
template <int kHeadDim>
__device__ __forceinline__ long long query_offset(const AttentionParams& p, const TileGeometry& tile, int row) {
  const int packed = tile.first_row + row;
  const int token = tile.first_token + packed / tile.group;
  const int head = tile.kv_head * tile.group + packed % tile.group;
  // q[token][head][head_dim]
  return ((long long)token * p.num_qo_heads + head) * kHeadDim;
}

// The page that key j of the request lies in.
__device__ __forceinline__ int page_of_key(const AttentionParams& p, const TileGeometry& tile, int logical_page) {
  // page_indices[request row][logical page - origin]
  return p.page_indices[p.page_indptr[tile.request] + logical_page - p.page_origins[tile.request]];
}

// Element offset of key j's K row, -1 where j is not in [begin, end).
__device__ __forceinline__ long long key_offset(const AttentionParams& p, const TileGeometry& tile, int key, int begin,
                                                int end) {
  if (key < begin || key >= end) return -1;
  const int logical_page = key / p.layout.page_size;
  const int slot = key - logical_page * p.layout.page_size;
  const int page = page_of_key(p, tile, logical_page);
  return kv_row_offset(p.layout, page, p.layer, false, slot, tile.kv_head);
}

// Where a key's rows lie whose K and V are of unequal length: their number in the blocks of a page, -1 for no page.
struct FoldedPlace {
  int page;
  int row;
};

__device__ __forceinline__ FoldedPlace folded_place(const AttentionParams& p, const TileGeometry& tile, int key,
                                                    int begin, int end) {
  FoldedPlace place = {-1, 0};
  if (key >= begin && key < end) {
    const int logical_page = key / p.layout.page_size;
    place.page = page_of_key(p, tile, logical_page);
    // block[slot][head][..]
    place.row = (key - logical_page * p.layout.page_size) * p.layout.num_kv_heads + tile.kv_head;
  }
  return place;
}

__device__ __forceinline__ long long folded_offset(const AttentionParams& p, const FoldedPlace& place, bool is_v) {
  // block[slot][head][..]: a row's number is its slot and head in one
  return place.page < 0 ? -1 : kv_row_offset(p.layout, place.page, p.layer, is_v, 0, place.row);
}

// How kThreads threads copy kRows K or V rows: eight neighbouring threads take 128 bytes of a row at a time, so a
// thread stays with kPasses rows and every address but its first is a constant away.
template <int kHeadDim, int kThreads, int kRows>
struct RowCopy {
  static constexpr int kThreadsPerRow = 8;
  static constexpr int kRowsAtOnce = kThreads / kThreadsPerRow;
  static constexpr int kRowsOfWarp = kWarpSize / kThreadsPerRow;  // at once
  static constexpr int kPasses = kRows / kRowsAtOnce;
  static constexpr int kSteps = kHeadDim / 8 / kThreadsPerRow;
  static_assert(kRowsAtOnce % 8 == 0 || kRowsAtOnce == 4, "the swizzle of a thread's rows differs by a constant");
  static_assert(kRows % kRowsAtOnce == 0 && kPasses * kRowsOfWarp <= kWarpSize, "a lane looks up at most one row");

  // The row whose offset this lane looks up for its warp.
  static __device__ __forceinline__ int row_of_lane(int warp, int lane) {
    return warp * kRowsOfWarp + lane % kRowsOfWarp + lane / kRowsOfWarp % kPasses * kRowsAtOnce;
  }

  // `lane_offset`: element offset of that row's K, -1 for zeros. `block`: 0 for K, kv_block_len for V.
  static __device__ __forceinline__ void run(const bf16_bits* pool, long long lane_offset, long long block,
                                             unsigned destination, int warp, int lane) {
    const int chunk = lane % kThreadsPerRow;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const long long offset = __shfl_sync(kAllLanes, lane_offset, lane / kThreadsPerRow + pass * kRowsOfWarp);
      const bool valid = offset >= 0;
      const bf16_bits* source = pool + (valid ? offset + block : 0) + chunk * 8;
      const int row = warp * kRowsOfWarp + lane / kThreadsPerRow + pass * kRowsAtOnce;
      const unsigned at = destination + swizzled<kHeadDim>(row, chunk);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        // row[step][8 threads][8]: the swizzle stays within 128 bytes
        copy_async(at + step * kThreadsPerRow * kChunkBytes, source + step * kThreadsPerRow * 8, valid);
      }
    }
  }
};

// Rows of K and of V of a tile's keys. A lane knows where one key's lie: by the offset of its row of K where V's are as
// long and a block behind (split), or by its FoldedPlace.
template <int kHeadDim, int kKeyDim, int kThreads, int kRows>
struct KeyCopy {
  using Keys = RowCopy<kKeyDim, kThreads, kRows>;
  using Values = RowCopy<kHeadDim, kThreads, kRows>;

  // Of no key where `is_there` is false.
  static __device__ __forceinline__ auto place(const AttentionParams& p, const TileGeometry& tile, int key,
                                               bool is_there = true) {
    if constexpr (kKeyDim == kHeadDim) {
      return is_there ? key_offset(p, tile, key, tile.begin, tile.end) : -1ll;
    } else {
      return is_there ? folded_place(p, tile, key, tile.begin, tile.end) : FoldedPlace{-1, 0};
    }
  }

  template <typename Place>
  static __device__ __forceinline__ void keys(const AttentionParams& p, const Place& place, unsigned to, int warp,
                                              int lane) {
    if constexpr (kKeyDim == kHeadDim) {
      Keys::run(p.pool, place, 0, to, warp, lane);
    } else {
      Keys::run(p.pool, folded_offset(p, place, false), 0, to, warp, lane);
    }
  }

  template <typename Place>
  static __device__ __forceinline__ void values(const AttentionParams& p, const Place& place, unsigned to, int warp,
                                                int lane) {
    if constexpr (kKeyDim == kHeadDim) {
      Values::run(p.pool, place, p.layout.kv_block_len, to, warp, lane);
    } else {
      Values::run(p.pool, folded_offset(p, place, true), 0, to, warp, lane);
    }
  }
};

// Query rows first, first + step, ... into shared memory, zeros past the last.
template <int kHeadDim>
__device__ __forceinline__ void copy_queries(const AttentionParams& p, const TileGeometry& tile, unsigned destination,
                                             int first, int step, int rows, int lane) {
  for (int row = first; row < rows; row += step) {
    const bool valid = row < tile.num_rows;
    const bf16_bits* source = p.q + query_offset<kHeadDim>(p, tile, valid ? row : 0);
#pragma unroll
    for (int chunk = lane; chunk < kHeadDim / 8; chunk += kWarpSize) {
      copy_async(destination + swizzled<kHeadDim>(row, chunk), source + chunk * 8, valid);
    }
  }
}

// The online softmax of a warp's 16 rows, two of them a lane.
struct RowState {
  float max[2];
  float sum[2];  // of this lane's columns only, until finish_sum
};

__device__ __forceinline__ RowState empty_rows() {
  RowState rows;
  rows.max[0] = rows.max[1] = minus_infinity();
  rows.sum[0] = rows.sum[1] = 0.0f;
  return rows;
}

// Over the four lanes that share a row.
__device__ __forceinline__ float row_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, 1));
  return fmaxf(value, __shfl_xor_sync(kAllLanes, value, 2));
}

__device__ __forceinline__ float row_sum(float value) {
  value += __shfl_xor_sync(kAllLanes, value, 1);
  return value + __shfl_xor_sync(kAllLanes, value, 2);
}

// A maximum that may be subtracted: a row that has seen no key yet has none.
__device__ __forceinline__ float finite_max(float max) { return max == minus_infinity() ? 0.0f : max; }

// The keys that every one of a warp's rows sees.
struct CommonKeys {
  int oldest;
  int newest;
};

__device__ __forceinline__ CommonKeys common_keys(const TileGeometry& tile, int first_row, int rows) {
  CommonKeys common;
  common.oldest = first_visible(tile, position_of(tile, first_row + rows - 1));
  common.newest = position_of(tile, first_row);
  return common;
}

// Hide the keys outside of [oldest, newest] from one of a lane's two rows. A hidden score is replaced, whatever it was:
// NaN in a slot that nobody may read stays there. first_key: key of column 0.
template <int kTiles>
__device__ __forceinline__ void hide_keys(float (&scores)[kTiles][4], int half, int oldest, int newest, int first_key,
                                          int lane) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int key = first_key + n * 8 + (lane % 4) * 2 + i;
      float& score = scores[n][half * 2 + i];
      score = key <= newest && key >= oldest ? score : minus_infinity();
    }
  }
}

// Hide the keys that a row does not see. Most tiles are visible whole; only the others work out positions.
template <int kTiles>
__device__ __forceinline__ void mask(float (&scores)[kTiles][4], const TileGeometry& tile, const CommonKeys& common,
                                     int first_row, int first_key, int lane) {
  if (first_key >= common.oldest && first_key + kTiles * 8 - 1 <= common.newest) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int newest = position_of(tile, first_row + lane / 4 + half * 8);
    hide_keys(scores, half, first_visible(tile, newest), newest, first_key, lane);
  }
}

// This lane's columns only.
template <int kTiles>
__device__ __forceinline__ float lane_max(const float (&scores)[kTiles][4], int half) {
  float max = minus_infinity();
#pragma unroll
  for (int n = 0; n < kTiles; ++n) max = fmaxf(max, fmaxf(scores[n][half * 2], scores[n][half * 2 + 1]));
  return max;
}

// Scores become weights exp2((score - max) * scale_log2); returns the factor that rescales what was summed under the
// old maximum. Scores and maxima are unscaled: scale_log2 is positive, so the order is the same.
template <int kTiles>
__device__ __forceinline__ float weigh(float (&scores)[kTiles][4], RowState& rows, int half, float tile_max,
                                       float scale_log2) {
  const float new_max = fmaxf(rows.max[half], tile_max);
  const float subtrahend = finite_max(new_max) * scale_log2;
  const float factor = exp2_approx(fmaf(rows.max[half], scale_log2, -subtrahend));
  rows.max[half] = new_max;
  float sum = 0.0f;
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float& score = scores[n][half * 2 + i];
      score = exp2_approx(fmaf(score, scale_log2, -subtrahend));
      sum += score;
    }
  }
  rows.sum[half] = fmaf(rows.sum[half], factor, sum);
  return factor;
}

template <int kTiles>
__device__ __forceinline__ void scale_rows(float (&out)[kTiles][4], float factor0, float factor1) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
    out[n][0] *= factor0;
    out[n][1] *= factor0;
    out[n][2] *= factor1;
    out[n][3] *= factor1;
  }
}

// Multiplying by one changes no bit, so rows whose maximum stayed are left alone.
template <int kTiles>
__device__ __forceinline__ void rescale(float (&out)[kTiles][4], float factor0, float factor1) {
  if (__any_sync(kAllLanes, factor0 != 1.0f || factor1 != 1.0f)) scale_rows(out, factor0, factor1);
}

// Two 8-key score tiles as the A fragment of the 16 keys.
__device__ __forceinline__ void weights_as_a(unsigned (&a)[4], const float (&left)[4], const float (&right)[4]) {
  a[0] = pack2(left[0], left[1]);
  a[1] = pack2(left[2], left[3]);
  a[2] = pack2(right[0], right[1]);
  a[3] = pack2(right[2], right[3]);
}

// out[row tile][rows][kColumns] += weights[row tile][rows][16 keys] * V[16 keys][kColumns from first_column16 * 16 on].
// A V fragment serves all row tiles.
template <int kHeadDim, int kRowTiles, int kColumns>
__device__ __forceinline__ void accumulate_values(float (&out)[kRowTiles][kColumns / 8][4],
                                                  const unsigned (&weights)[kRowTiles][4], unsigned values,
                                                  int first_key, int first_column16, int lane) {
  constexpr int kAhead = 2;  // fragments on their way while the tensor cores work on this one
  unsigned v[kAhead + 1][4];
#pragma unroll
  for (int n = 0; n < kAhead; ++n) load_v<kHeadDim>(v[n], values, first_key, first_column16 + n, lane);
#pragma unroll
  for (int n = 0; n < kColumns / 16; ++n) {
    if (n + kAhead < kColumns / 16) {
      load_v<kHeadDim>(v[(n + kAhead) % (kAhead + 1)], values, first_key, first_column16 + n + kAhead, lane);
    }
    const unsigned(&now)[4] = v[n % (kAhead + 1)];
#pragma unroll
    for (int row_tile = 0; row_tile < kRowTiles; ++row_tile) {
      multiply_accumulate(out[row_tile][2 * n], weights[row_tile], now[0], now[1]);
      multiply_accumulate(out[row_tile][2 * n + 1], weights[row_tile], now[2], now[3]);
    }
  }
}

// Natural logarithm of the sum of exp(sm_scale * score), from the largest score and the sum relative to it.
__device__ __forceinline__ float log_sum_exp(float max, float sum, float scale_log2) {
  constexpr float kLn2 = 0.693147180559945309f;
  return sum > 0.0f ? fmaf(max, scale_log2, log2_approx(sum)) * kLn2 : minus_infinity();
}

}  // namespace g4kv
