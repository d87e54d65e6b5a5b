// Decode for sm_90: products and softmax of a tile of 16 keys and up to 8 heads, turned around: keys, then head dims, are
// the rows of a tensor-core tile, and heads its columns.
#pragma once

#include "decode_hopper_shape.cuh"

namespace g4kv {

// An 8 x 8 matrix of 16-bit elements, one row of 4 lanes' words each, turned around within the warp.
__device__ __forceinline__ unsigned transpose_8x8(unsigned word) {
  unsigned turned;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(word));
  return turned;
}

// Queries of the block's heads, on their way to shared memory: [head][head_dim], zeros past the group. Where teams have
// several warps, those ask that do not ask for keys.
template <typename Shape>
__device__ __forceinline__ void ask_queries(const AttentionParams& p, const ClusterWork& work, unsigned queries,
                                            int team, int member, int lane) {
  constexpr bool kApart = Shape::kTeamWarps > 1;
  constexpr int kTeamAskers = Shape::kTeamWarps - (kApart ? 1 : 0);
  if (kApart && member == 0) return;
  constexpr int kChunks = Shape::kHeadDim * 2 / kChunkBytes;
  // q[token][head][head_dim]
  const bf16_bits* rows =
      p.q + ((long long)work.request * p.num_qo_heads + work.kv_head * work.group) * Shape::kHeadDim;
#pragma unroll 4
  for (int i = (team * kTeamAskers + member - (kApart ? 1 : 0)) * kWarpSize + lane; i < Shape::kHeads * kChunks;
       i += Shape::kTeams * kTeamAskers * kWarpSize) {
    const int head = i / kChunks, chunk = i % kChunks;
    const bool valid = head < work.group;
    copy_async(queries + head * Shape::kQueryRowBytes + chunk * kChunkBytes,
               rows + (valid ? head : 0) * Shape::kHeadDim + chunk * 8, valid);
  }
  commit_copies();
}

// Query fragments of a warp: 8 heads are the columns, kWarpColumns of the head's dims the depth.
template <typename Shape>
__device__ __forceinline__ void load_query_columns(unsigned (&queries)[Shape::kWarpColumns / 16][2], unsigned rows,
                                                   int part, int head_tile, int lane) {
  const unsigned row = rows + (head_tile * kWarpHeads + lane % 8) * Shape::kQueryRowBytes +
                       (part * Shape::kWarpColumns / 8 + lane / 8) * kChunkBytes;
#pragma unroll
  for (int step = 0; step < Shape::kWarpColumns / 16; step += 2) {
    unsigned b[4];
    load_matrix(b, row + step * 2 * kChunkBytes);
    queries[step][0] = b[0];
    queries[step][1] = b[1];
    queries[step + 1][0] = b[2];
    queries[step + 1][1] = b[3];
  }
}

// Over the eight lanes that share a head.
__device__ __forceinline__ float column_max(float value) {
  value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, 4));
  value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, 8));
  return fmaxf(value, __shfl_xor_sync(kAllLanes, value, 16));
}

__device__ __forceinline__ float column_sum(float value) {
  value += __shfl_xor_sync(kAllLanes, value, 4);
  value += __shfl_xor_sync(kAllLanes, value, 8);
  return value + __shfl_xor_sync(kAllLanes, value, 16);
}

// A 16-key tile in shared memory is [column block][16 keys][64], each row of 128 bytes swizzled by the copy engine:
// 16-byte chunk c of row r stands at c ^ (r % 8). These are the four offsets, without the block, that one lane's
// ldmatrix of chunk pair j needs; `row` and `odd_chunk` are the row and the chunk of the pair that it names.
__device__ __forceinline__ void chunk_offsets(unsigned (&offsets)[4], int row, int odd_chunk) {
#pragma unroll
  for (int j = 0; j < 4; ++j) offsets[j] = row * 128 + (((2 * j + odd_chunk) ^ (row % 8)) * kChunkBytes);
}

constexpr int kBlockBytes = kClusterTileKeys * kBoxColumns * 2;  // of a tile's column block

// Scores of 16 keys (rows) and 8 heads (columns) over kWarpColumns of the head, in four chains of sums. The first column
// block may lie apart from the others, which stand as if it were before them at `keys`.
template <int kWarpColumns>
__device__ __forceinline__ void score_keys(float (&scores)[4], const unsigned (&queries)[kWarpColumns / 16][2],
                                           unsigned first_block, unsigned keys, const unsigned (&offsets)[4]) {
  float chain[4][4] = {};
#pragma unroll
  for (int step = 0; step < kWarpColumns / 16; ++step) {
    unsigned a[4];
    load_matrix(a, (step < 4 ? first_block : keys + step / 4 * kBlockBytes) + offsets[step % 4]);
    multiply_accumulate(chain[step % 4], a, queries[step][0], queries[step][1]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) scores[i] = (chain[0][i] + chain[1][i]) + (chain[2][i] + chain[3][i]);
}

// out[dims (rows)][8 heads] += V^T[dims][16 keys] * weights[16 keys][8 heads].
template <int kWarpColumns>
__device__ __forceinline__ void accumulate_dims(float (&out)[kWarpColumns / 16][4], const unsigned (&weights)[2],
                                                unsigned values, const unsigned (&offsets)[4]) {
#pragma unroll
  for (int step = 0; step < kWarpColumns / 16; ++step) {
    unsigned a[4];
    load_matrix_transposed(a, values + step / 4 * kBlockBytes + offsets[step % 4]);
    multiply_accumulate(out[step], a, weights[0], weights[1]);
  }
}

// Hide the keys outside of [begin, end). A hidden score is replaced, whatever it was: NaN in a slot that nobody may read
// stays there. first_key: key of row 0.
__device__ __forceinline__ void hide_rows(float (&scores)[4], int begin, int end, int first_key, int lane) {
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    const int key = first_key + upper * 8 + lane / 4;
    const bool seen = key >= begin && key < end;
    scores[upper * 2] = seen ? scores[upper * 2] : minus_infinity();
    scores[upper * 2 + 1] = seen ? scores[upper * 2 + 1] : minus_infinity();
  }
}

// The online softmax of a lane's two heads.
struct ColumnState {
  float max[2];
  float sum[2];  // of this lane's keys only, until the end
};

// Scores of so many tiles become weights; `factor` rescales what was summed under the old maxima.
template <int kTiles>
__device__ __forceinline__ void weigh_columns(float (&scores)[kTiles][4], ColumnState& columns, float (&factor)[2],
                                              float scale_log2) {
#pragma unroll
  for (int head = 0; head < 2; ++head) {
    float largest = fmaxf(scores[0][head], scores[0][head + 2]);
#pragma unroll
    for (int i = 1; i < kTiles; ++i) largest = fmaxf(largest, fmaxf(scores[i][head], scores[i][head + 2]));
    const float new_max = fmaxf(columns.max[head], column_max(largest));
    const float subtrahend = finite_max(new_max) * scale_log2;
    factor[head] = exp2_approx(fmaf(columns.max[head], scale_log2, -subtrahend));
    columns.max[head] = new_max;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      scores[i][head] = exp2_approx(fmaf(scores[i][head], scale_log2, -subtrahend));
      scores[i][head + 2] = exp2_approx(fmaf(scores[i][head + 2], scale_log2, -subtrahend));
    }
    float sum = scores[0][head] + scores[0][head + 2];
#pragma unroll
    for (int i = 1; i < kTiles; ++i) sum += scores[i][head] + scores[i][head + 2];
    columns.sum[head] = fmaf(columns.sum[head], factor[head], sum);
  }
}

// Scores have keys as rows; as the second operand of the next product, weights have them as depth.
__device__ __forceinline__ void weights_as_b(unsigned (&b)[2], const float (&weights)[4]) {
  b[0] = transpose_8x8(pack2(weights[0], weights[1]));
  b[1] = transpose_8x8(pack2(weights[2], weights[3]));
}

template <int kSteps>
__device__ __forceinline__ void rescale_columns(float (&out)[kSteps][4], const float (&factor)[2]) {
  if (__any_sync(kAllLanes, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      out[step][0] *= factor[0];
      out[step][1] *= factor[1];
      out[step][2] *= factor[0];
      out[step][3] *= factor[1];
    }
  }
}

// Zeros in the rows of a V tile that are outside of [begin, end): a weight of zero does not silence what lies in a row
// that nobody may read. `values` is this warp's first column block.
template <int kWarpColumns>
__device__ __forceinline__ void silence_rows(unsigned char* values, int begin, int end, int first_key, int lane) {
  for (int row = 0; row < kClusterTileKeys; ++row) {
    const int key = first_key + row;
    if ((key < begin || key >= end) && lane < kWarpColumns / 8) {
      // tile[column block][key][64]
      *reinterpret_cast<uint4*>(values + lane / 8 * kBlockBytes + row * 128 + lane % 8 * kChunkBytes) =
          make_uint4(0u, 0u, 0u, 0u);
    }
  }
  fence_async_copies();
}

}  // namespace g4kv
