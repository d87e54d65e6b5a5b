// Decode attention of one request and KV head by a cluster of blocks, in one launch (sm_90).
//
// A team of warps takes tiles of 16 keys through its own ring, filled by the copy engine: a box of the tensor map is a
// tile's K or V of one head. Products are turned around: keys, then head dims, are the rows of a tensor-core tile and
// query heads its 8 columns, so a group of two heads wastes less, and a warp's outputs are 64 registers a lane. A team
// has a warp for every 256 columns of the head and every 8 heads of the group; where a score has two halves, the two
// warps exchange them. No barrier of the whole block stands inside the loop.
//
// Tile i of a request goes to team i % teams of block i / teams % blocks. The teams' results are merged in team order
// in their block; each block pushes slices of its result to the blocks of the cluster, which own a slice of head dims
// each and merge in block order. So the bits depend on the request and the cluster's size, on nothing else.
#pragma once

#include "hopper.cuh"

namespace g4kv {

constexpr int kClusterTileKeys = 16;
constexpr int kBoxColumns = 64;  // of a tensor-map box: 128 bytes, the span of its swizzle
constexpr int kWarpHeads = 8;
constexpr int kMaxClusterBlocks = 8;  // what every device with clusters takes

template <int kHeadDim, int kWarpColumns, int kHeadTiles, int kTeams, int kStages>
struct ClusterShape {
  static constexpr int kParts = kHeadDim / kWarpColumns;  // of a head, a warp each
  static constexpr int kTeamWarps = kParts * kHeadTiles;
  static constexpr int kThreads = kTeams * kTeamWarps * kWarpSize;
  static constexpr int kTileBytes = kClusterTileKeys * kHeadDim * 2;  // of K, and the same of V
  static constexpr int kRingBytes = kStages * 2 * kTileBytes;         // of a team
  static constexpr int kPairs = kHeadTiles * kWarpHeads / 2;
  // Results travel in items of 16 bytes: two head dims of two heads. A pair's items lie side by side, and pairs half a
  // line of banks apart: what the four pairs of a warp store then meets no bank twice.
  static constexpr int kPairBytes = kHeadDim / 2 * 16 + 64;
  static constexpr int kResultBytes = kPairBytes * kPairs;
  // A team's result is kept where its ring was.
  static constexpr int kTeamBytes = ((kResultBytes > kRingBytes ? kResultBytes : kRingBytes) + 1023) / 1024 * 1024;
  static constexpr int kReceiveBytes = (kHeadDim / 2 + kMaxClusterBlocks - 1) * kPairs * 16;
  static constexpr int kReceiveStateBytes = kMaxClusterBlocks * kPairs * 16;
  static constexpr int kTeamStateBytes = kTeams * kPairs * 16;
  static constexpr int kExchangeBytes = kParts == 1 ? 0 : kTeams * 2 * kTeamWarps * kWarpSize * 16;
  static constexpr int kBarrierBytes = (kTeams * kStages + 1) * 16;
  static constexpr int kTeamStateAt = kTeams * kTeamBytes;
  static constexpr int kExchangeAt = kTeamStateAt + kTeamStateBytes;
  static constexpr int kBarriersAt = kExchangeAt + kExchangeBytes;
  // A cluster of one block receives nothing, and its launch leaves out what stands from here on.
  static constexpr int kAloneBytes = kBarriersAt + kBarrierBytes;
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
  int page_row;    // place in page_indices of the request's logical page 0, origin taken off
  int tiles_per_page;
};

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
  const int kv_len = p.kv_lens[work.request];
  work.page_row = p.page_indptr[work.request] - p.page_origins[work.request];
  work.group = p.num_qo_heads / p.num_kv_heads;
  work.begin = p.window_left < 0 ? 0 : max(0, kv_len - 1 - p.window_left);
  work.end = kv_len;
  work.first_tile = work.begin / kClusterTileKeys;
  work.last_tile = (kv_len + kClusterTileKeys - 1) / kClusterTileKeys;
  work.tiles_per_page = p.layout.page_size / kClusterTileKeys;
  if (p.num_splits > 1) {
    const int per_split = (work.last_tile - work.first_tile + p.num_splits - 1) / p.num_splits;
    work.first_tile += work.split * per_split;
    work.last_tile = min(work.last_tile, work.first_tile + per_split);
  }
  return work;
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

// An 8 x 8 matrix of 16-bit elements, one row of 4 lanes' words each, turned around within the warp.
__device__ __forceinline__ unsigned transpose_8x8(unsigned word) {
  unsigned turned;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(word));
  return turned;
}

// Query fragments of a warp: 8 heads are the columns, kWarpColumns of the head's dims the depth. Zeros past the group.
template <int kWarpColumns>
__device__ __forceinline__ void load_query_columns(unsigned (&queries)[kWarpColumns / 16][2], const bf16_bits* row,
                                                   bool valid, int lane) {
#pragma unroll
  for (int step = 0; step < kWarpColumns / 16; ++step) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // row[step][half][4 lanes][2]
      const bf16_bits* at = row + step * 16 + half * 8 + (lane % 4) * 2;
      queries[step][half] = valid ? *reinterpret_cast<const unsigned*>(at) : 0u;
    }
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

// Scores of 16 keys (rows) and 8 heads (columns) over kWarpColumns of the head, in four chains of sums.
template <int kWarpColumns>
__device__ __forceinline__ void score_keys(float (&scores)[4], const unsigned (&queries)[kWarpColumns / 16][2],
                                           unsigned keys, const unsigned (&offsets)[4]) {
  float chain[4][4] = {};
#pragma unroll
  for (int step = 0; step < kWarpColumns / 16; ++step) {
    unsigned a[4];
    load_matrix(a, keys + step / 4 * kBlockBytes + offsets[step % 4]);
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

// Maxima and sums of a pair's two heads.
struct PairState {
  float max[2];
  float sum[2];
};

// Merges up to 16 partial results of one pair of heads, a warp together: lane 16 * head + source holds the weight
// exp2((max - overall max) * scale_log2) of a source. A partial result is a state (max, sum, max, sum) and items of two
// dims and two heads, [dim][head].
struct PairMerge {
  float factor;
  PairState total;

  __device__ __forceinline__ void weigh_states(const unsigned char* states, int stride, int count, float scale_log2,
                                               int lane) {
    const int source = lane % 16, head = lane / 16;
    const float2 state = source < count ? *reinterpret_cast<const float2*>(states + source * stride + head * 8)
                                        : make_float2(minus_infinity(), 0.0f);
    float max = state.x;
#pragma unroll
    for (int distance = 8; distance > 0; distance /= 2) {
      max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, distance));
    }
    factor = exp2_approx((state.x - finite_max(max)) * scale_log2);
    float sum = state.y * factor;
#pragma unroll
    for (int distance = 8; distance > 0; distance /= 2) sum += __shfl_xor_sync(kAllLanes, sum, distance);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      total.max[i] = __shfl_sync(kAllLanes, max, i * 16);
      total.sum[i] = __shfl_sync(kAllLanes, sum, i * 16);
    }
  }

  // This lane's item; all lanes of the warp come here.
  __device__ __forceinline__ float4 item(const unsigned char* items, int stride, int count) const {
    float4 merged = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
    for (int source = 0; source < count; ++source) {
      const float4 part = *reinterpret_cast<const float4*>(items + source * stride);
      const float factor0 = __shfl_sync(kAllLanes, factor, source);
      const float factor1 = __shfl_sync(kAllLanes, factor, 16 + source);
      merged.x = fmaf(part.x, factor0, merged.x);
      merged.y = fmaf(part.y, factor1, merged.y);
      merged.z = fmaf(part.z, factor0, merged.z);
      merged.w = fmaf(part.w, factor1, merged.w);
    }
    return merged;
  }
};

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The first of a pair's two query rows in [token][head].
__device__ __forceinline__ long long row_of_pair(const AttentionParams& p, const ClusterWork& work, int pair) {
  return (long long)work.request * p.num_qo_heads + work.kv_head * work.group + pair * 2;
}

// A merged item, two dims of two heads: the output, or with splits a partial result.
template <int kHeadDim>
__device__ __forceinline__ void store_item(const AttentionParams& p, const ClusterWork& work, int dim_pair, int pair,
                                           const float4& item, const PairState& total) {
  const long long row = row_of_pair(p, work, pair);
  const bool both = pair * 2 + 1 < work.group;
  if (p.num_splits > 1) {
    // partial_out[token][head][split][head_dim]
    float* out = p.partial_out + (row * p.num_splits + work.split) * kHeadDim + dim_pair * 2;
    *reinterpret_cast<float2*>(out) = make_float2(item.x, item.z);
    if (both) *reinterpret_cast<float2*>(out + p.num_splits * kHeadDim) = make_float2(item.y, item.w);
    return;
  }
  const float scale0 = total.sum[0] > 0.0f ? reciprocal_approx(total.sum[0]) : 0.0f;
  const float scale1 = total.sum[1] > 0.0f ? reciprocal_approx(total.sum[1]) : 0.0f;
  // out[token][head][head_dim]
  bf16_bits* out = p.out + row * kHeadDim + dim_pair * 2;
  *reinterpret_cast<unsigned*>(out) = pack2(item.x * scale0, item.z * scale0);
  if (both) *reinterpret_cast<unsigned*>(out + kHeadDim) = pack2(item.y * scale1, item.w * scale1);
}

// What belongs to a row and not to a dim: the lse, or with splits the partial maximum and sum.
__device__ __forceinline__ void store_state(const AttentionParams& p, const ClusterWork& work, int pair,
                                            const PairState& total) {
  const long long row = row_of_pair(p, work, pair);
#pragma unroll
  for (int head = 0; head < 2; ++head) {
    if (pair * 2 + head >= work.group) return;
    if (p.num_splits > 1) {
      // partial[token][head][split]
      const long long partial = (row + head) * p.num_splits + work.split;
      p.partial_max[partial] = total.max[head];
      p.partial_sum[partial] = total.sum[head];
    } else if (p.lse != nullptr) {
      // lse[token][head]
      p.lse[row + head] = log_sum_exp(total.max[head], total.sum[head], p.scale_log2);
    }
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
    copy_box(destination, map, barrier, 0, newest.slot, work.kv_head * (kHeadDim / kBoxColumns),
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
  float top[2] = {minus_infinity(), minus_infinity()};
  float sums[2] = {0.0f, 0.0f};  // of this lane's keys only, until the end
  float out[kWarpColumns / 16][4] = {};
  int stage = 0;
  unsigned parity = 0, buffer = 0;
#pragma unroll 1
  for (int tile = first_tile; tile < work.last_tile; tile += tile_step) {
    float scores[4];
    barrier_wait(keys_full(stage), parity);
    score_keys<kWarpColumns>(scores, queries, keys_of(stage) + part_at, key_offsets);
    if constexpr (kParts > 1) {
      // exchange[team][buffer][member][lane]
      unsigned char* exchange =
          shared + Shape::kExchangeAt + ((team * 2 + buffer) * kTeamWarps * kWarpSize + lane) * 16;
      *reinterpret_cast<float4*>(exchange + member * kWarpSize * 16) =
          make_float4(scores[0], scores[1], scores[2], scores[3]);
      sync_team<kTeamWarps>(team);
      float4 sum = *reinterpret_cast<const float4*>(exchange + head_tile * kParts * kWarpSize * 16);
#pragma unroll
      for (int other = 1; other < kParts; ++other) {
        const float4 more_sum =
            *reinterpret_cast<const float4*>(exchange + (head_tile * kParts + other) * kWarpSize * 16);
        sum.x += more_sum.x;
        sum.y += more_sum.y;
        sum.z += more_sum.z;
        sum.w += more_sum.w;
      }
      scores[0] = sum.x;
      scores[1] = sum.y;
      scores[2] = sum.z;
      scores[3] = sum.w;
      buffer ^= 1;
    } else {
      sync_team<kTeamWarps>(team);
    }
    const bool more = tile + kStages * tile_step < work.last_tile;
    if (fills && more) ask_keys(stage);  // the whole team has read this stage's
    const int first_key = tile * kClusterTileKeys;
    const bool whole = first_key >= work.begin && first_key + kClusterTileKeys <= work.end;
    if (!whole) {
      // A hidden score is replaced, whatever it was: NaN in a slot that nobody may read stays there.
      const int key = first_key + lane / 4;
      const bool sees0 = key >= work.begin && key < work.end;
      const bool sees1 = key + 8 >= work.begin && key + 8 < work.end;
      scores[0] = sees0 ? scores[0] : minus_infinity();
      scores[1] = sees0 ? scores[1] : minus_infinity();
      scores[2] = sees1 ? scores[2] : minus_infinity();
      scores[3] = sees1 ? scores[3] : minus_infinity();
    }
    float factor[2];
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      const float new_max = fmaxf(top[head], column_max(fmaxf(scores[head], scores[head + 2])));
      const float subtrahend = finite_max(new_max) * p.scale_log2;
      factor[head] = exp2_approx(fmaf(top[head], p.scale_log2, -subtrahend));
      top[head] = new_max;
      scores[head] = exp2_approx(fmaf(scores[head], p.scale_log2, -subtrahend));
      scores[head + 2] = exp2_approx(fmaf(scores[head + 2], p.scale_log2, -subtrahend));
      sums[head] = fmaf(sums[head], factor[head], scores[head] + scores[head + 2]);
    }
    // Scores have keys as rows; as the second operand of the next product, weights have them as depth.
    unsigned weights[2];
    weights[0] = transpose_8x8(pack2(scores[0], scores[1]));
    weights[1] = transpose_8x8(pack2(scores[2], scores[3]));
    if (__any_sync(kAllLanes, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
      for (int step = 0; step < kWarpColumns / 16; ++step) {
        out[step][0] *= factor[0];
        out[step][1] *= factor[1];
        out[step][2] *= factor[0];
        out[step][3] *= factor[1];
      }
    }
    barrier_wait(values_full(stage), parity);
    if (!whole) {
      // A weight of zero does not silence what lies in a row that nobody may read.
      if (head_tile == 0) {
        for (int row = 0; row < kClusterTileKeys; ++row) {
          const int key = first_key + row;
          if (key < work.begin || key >= work.end) {
            // tile[column block][key][64]
            const unsigned at = (values_of(stage) - base) + part_at + lane / 8 * kBlockBytes + row * 128;
            if (lane < kWarpColumns / 8) {
              *reinterpret_cast<uint4*>(shared + at + lane % 8 * kChunkBytes) = make_uint4(0u, 0u, 0u, 0u);
            }
          }
        }
        fence_async_copies();
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
    const int own_pair = head_tile * (kWarpHeads / 2) + lane % 4;
    if (own_pair < pairs) {
      unsigned char* result = shared + team * Shape::kTeamBytes + own_pair * Shape::kPairBytes;
#pragma unroll
      for (int step = 0; step < kWarpColumns / 16; ++step) {
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
          // result[team][pair of heads][dim pair][dim][head]
          const int dim = part * kWarpColumns + step * 16 + upper * 8 + lane / 4;
          *reinterpret_cast<float2*>(result + dim * 8) = make_float2(out[step][upper * 2], out[step][upper * 2 + 1]);
        }
      }
    }
    sums[0] = column_sum(sums[0]);
    sums[1] = column_sum(sums[1]);
    if (part == 0 && lane < 4) {
      // state[team][pair of heads]
      *reinterpret_cast<float4*>(shared + Shape::kTeamStateAt + (team * Shape::kPairs + own_pair) * 16) =
          make_float4(top[0], sums[0], top[1], sums[1]);
    }
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
