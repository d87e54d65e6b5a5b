// Prefill at head_dim 256 for sm_90: a tile's results, merged with those of the cluster's other block, and stored.
#pragma once

#include "hopper.cuh"
#include "prefill_hopper_hd256_tile.cuh"

namespace g4kv {

// A quad of lanes holds 4 words of each of four 8-column tiles, a word of each a lane; afterwards each lane holds the
// four words of one tile.
__device__ __forceinline__ void transpose_quad(unsigned (&words)[4], int lane) {
#pragma unroll
  for (int bit = 1; bit <= 2; bit *= 2) {
    const bool upper = lane & bit;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & bit) continue;
      const unsigned received = __shfl_xor_sync(kAllLanes, upper ? words[i] : words[i + bit], bit);
      (upper ? words[i] : words[i + bit]) = received;
    }
  }
}

// Normalised sums of kTiles * 8 columns from kFirst * 8 on, `inverse` one over the sum of weights; to `out_rows`, of
// which -1 is nowhere.
template <int kFirst, int kTiles>
__device__ __forceinline__ void store_columns(const AttentionParams& p, const float (&out)[32][4],
                                              const int (&out_rows)[2], const float (&inverse)[2], int lane) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    bf16_bits* destination = p.out + (long long)max(out_rows[i], 0) * PairPrefill::kHeadDim + lane % 4 * 8;
#pragma unroll
    for (int n = kFirst; n < kFirst + kTiles; n += 4) {
      unsigned words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        words[j] = pack2(out[n + j][2 * i] * inverse[i], out[n + j][2 * i + 1] * inverse[i]);
      }
      transpose_quad(words, lane);
      if (out_rows[i] >= 0) {
        *reinterpret_cast<uint4*>(destination + n * 8) = make_uint4(words[0], words[1], words[2], words[3]);
      }
    }
  }
}

__device__ __forceinline__ float inverse_of(float total) { return total > 0.0f ? 1.0f / total : 0.0f; }

__device__ __forceinline__ void store_log_sums(const AttentionParams& p, const int (&out_rows)[2],
                                               const float (&reference)[2], const float (&total)[2], int lane) {
  if (p.lse == nullptr || lane % 4 != 0) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (out_rows[i] >= 0) p.lse[out_rows[i]] = log_sum_exp(reference[i], total[i], p.scale_log2);
  }
}

__device__ __forceinline__ void store_pair_rows(const AttentionParams& p, const TileTask& task,
                                                const float (&out)[32][4], const PairRows& rows, int first_row,
                                                int lane) {
  const int row = first_row + lane / 4;
  const int out_rows[2] = {task.out_row[row], task.out_row[row + 8]};
  const float total[2] = {row_sum(rows.sum[0]), row_sum(rows.sum[1])};
  const float inverse[2] = {inverse_of(total[0]), inverse_of(total[1])};
  store_columns<0, 32>(p, out, out_rows, inverse, lane);
  store_log_sums(p, out_rows, rows.reference, total, lane);
}

// The consumer of the cluster's other block that has the same tile and the other keys. Each puts what it found of the
// other's columns where that one's queries were, once they are not read any more.
struct PairPeer {
  unsigned own;    // this block's shared memory
  unsigned other;  // and the other's
  int which;

  __device__ __forceinline__ PairPeer(unsigned shared, int consumer)
      : own(shared), other(shared_of_rank(shared, 1 - cluster_rank())), which(consumer) {}

  // From here on the other may store there: this consumer's last scores are done.
  __device__ __forceinline__ void let_store(int warp, int lane) const {
    if (lane != 0) return;
    if (warp == 0) barrier_expect(own + PairPrefill::kPeerSums + which * 8, kBytes);
    barrier_arrive_at_rank(other + PairPrefill::kPeerReady + which * 8);
  }

  __device__ __forceinline__ void wait_until_ready(unsigned parity) const {
    barrier_wait(own + PairPrefill::kPeerReady + which * 8, parity);
  }

  // queries[tile of 8 columns][thread][4], states[warp][8][4]
  __device__ __forceinline__ void store_tile(int tile, const float (&sums)[4], int thread) const {
    push(other + columns_at(tile, thread), make_float4(sums[0], sums[1], sums[2], sums[3]), there());
  }

  __device__ __forceinline__ void store_state(const float (&reference)[2], const float (&total)[2], int warp,
                                              int lane) const {
    if (lane % 4 != 0) return;
    push(other + state_at(warp, lane), make_float4(reference[0], total[0], reference[1], total[1]), there());
  }

  __device__ __forceinline__ void wait_for_sums(unsigned parity) const {
    barrier_wait(own + PairPrefill::kPeerSums + which * 8, parity);
  }

  __device__ __forceinline__ float4 tile(const unsigned char* memory, int tile, int thread) const {
    return *reinterpret_cast<const float4*>(memory + columns_at(tile, thread));
  }

  __device__ __forceinline__ float4 state(const unsigned char* memory, int warp, int lane) const {
    return *reinterpret_cast<const float4*>(memory + state_at(warp, lane));
  }

 private:
  static constexpr int kBytes = PairPrefill::kRows * PairPrefill::kHeadDim / 2 * 4 + PairPrefill::kStateBytes;
  static_assert(PairPrefill::kRows * PairPrefill::kHeadDim / 2 * 4 == PairPrefill::kQueryBytes, "");

  __device__ __forceinline__ unsigned there() const { return other + PairPrefill::kPeerSums + which * 8; }
  __device__ __forceinline__ int columns_at(int tile, int thread) const {
    return PairPrefill::kQueries + which * PairPrefill::kQueryBytes + (tile * kWarpgroupSize + thread) * 16;
  }
  __device__ __forceinline__ int state_at(int warp, int lane) const {
    return PairPrefill::kStates + which * PairPrefill::kStateBytes + (warp * 8 + lane / 4) * 16;
  }
};

// A tile whose keys two blocks share out: the one of rank kRank stores 128 columns, from what both found.
template <int kRank>
__device__ __forceinline__ void store_merged_rows(const AttentionParams& p, const TileTask& task, const PairPeer& peer,
                                                  float (&out)[32][4], const PairRows& rows,
                                                  const unsigned char* memory, unsigned parity,
                                                  unsigned queries_used, int warp, int lane) {
  constexpr int kOwn = kRank * 16, kOthers = 16 - kOwn;  // tiles of 8 columns
  const int row = warp * kRowsPerTile + lane / 4, thread = warp * kWarpSize + lane;
  const int out_rows[2] = {task.out_row[row], task.out_row[row + 8]};
  const float total[2] = {row_sum(rows.sum[0]), row_sum(rows.sum[1])};
  peer.wait_until_ready(parity);
  peer.store_state(rows.reference, total, warp, lane);
#pragma unroll
  for (int n = 0; n < 16; ++n) peer.store_tile(n, out[kOthers + n], thread);
  peer.wait_for_sums(parity);
  const float4 state = peer.state(memory, warp, lane);
  const float other_reference[2] = {state.x, state.z}, other_total[2] = {state.y, state.w};
  float reference[2], all[2], inverse[2], own_factor[2], other_factor[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    reference[i] = fmaxf(rows.reference[i], other_reference[i]);
    const float finite = finite_max(reference[i]);
    own_factor[i] = exp2_approx((rows.reference[i] - finite) * p.scale_log2);
    other_factor[i] = exp2_approx((other_reference[i] - finite) * p.scale_log2);
    all[i] = total[i] * own_factor[i] + other_total[i] * other_factor[i];
    inverse[i] = inverse_of(all[i]);
  }
#pragma unroll
  for (int n = 0; n < 16; ++n) {
    const float4 found = peer.tile(memory, n, thread);
    float(&tile)[4] = out[kOwn + n];
    tile[0] = tile[0] * own_factor[0] + found.x * other_factor[0];
    tile[1] = tile[1] * own_factor[0] + found.y * other_factor[0];
    tile[2] = tile[2] * own_factor[1] + found.z * other_factor[1];
    tile[3] = tile[3] * own_factor[1] + found.w * other_factor[1];
  }
  fence_async_copies();  // before queries are copied there again
  __syncwarp();
  if (lane == 0) barrier_arrive(queries_used);
  store_columns<kOwn, 16>(p, out, out_rows, inverse, lane);
  if (kRank == 0) store_log_sums(p, out_rows, reference, all, lane);
}

}  // namespace g4kv
