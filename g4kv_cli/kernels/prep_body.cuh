// The one body of every prep kernel: RMS norm, rotation, and the store of Q, K and V rows.
//
// A block serves one token; a warp serves kRowsPerWarp head rows of one band (Q, K or V) of that token, so the RoPE
// table row and the norm weights are loaded once for all of them. A row's kLanes lanes are the warp's, or half of them,
// which then has two rows at once. Lane l of them holds columns 8 * (c * kLanes + l) .. + 7 of the row (one 16-byte
// access per chunk c): one chunk of head_dim 256 by the whole warp, else two, and columns that turn with each other are
// then one lane's. Every warp of a block makes the same checks on the same token before it stores to the pool: a trap
// comes before the block's first store.
//
// float32 throughout, rounded to bf16 once, at the store. The sources are compiled with --fmad=false: an fmaf
// written here is the only fused operation, and the bits do not depend on the compiler.
#pragma once

#include "bf16.cuh"
#include "kv_offsets.cuh"
#include "overlap.cuh"
#include "prep_params.cuh"
#include "warp.cuh"

namespace g4kv {

enum class Form { contiguous, paged_prefill, paged_decode };
enum class ValueSource { none, raw_v, raw_k };

// Lanes of a row, threads of a block at most, and blocks that a multiprocessor holds at least: room for the registers
// that each variant takes.
template <int kHeadDim, int kRowsPerWarp>
struct PrepShape {
  static constexpr bool kHalves = kHeadDim == 256 && kRowsPerWarp > 1;
  static constexpr int kLanes = kHalves ? kWarpSize / 2 : kWarpSize;
  static constexpr int kThreads = kHalves || kRowsPerWarp == 1 ? 128 : 256;
  static constexpr int kBlocks = (kHeadDim == 256 && kRowsPerWarp == 1 ? 1024 : 768) / kThreads;
};

// One head row as its lanes hold it: this lane's columns, still packed.
template <int kHeadDim, int kLanes>
struct Row {
  static constexpr int kChunks = kHeadDim / (kLanes * 8);
  uint4 packed[kChunks];
};

// The sum over a row's lanes, in each of them.
template <int kLanes>
__device__ __forceinline__ float lane_sum(float value) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, distance);
  }
  return value;
}

template <int kHeadDim, int kLanes>
__device__ __forceinline__ Row<kHeadDim, kLanes> load_row(const bf16_bits* row, int lane) {
  Row<kHeadDim, kLanes> loaded;
#pragma unroll
  for (int chunk = 0; chunk < Row<kHeadDim, kLanes>::kChunks; ++chunk) {
    // row[chunk][lane][8]
    loaded.packed[chunk] = __ldg(reinterpret_cast<const uint4*>(row) + chunk * kLanes + lane);
  }
  return loaded;
}

// 1 / sqrt(mean(x^2) + eps), the same in every lane of the row. Half a warp adds up as a whole one does: a lane's two
// chunks are those of two lanes there, which meet first.
template <int kHeadDim, int kLanes>
__device__ __forceinline__ float inverse_rms(const Row<kHeadDim, kLanes>& row, float eps) {
  constexpr int kSums = kWarpSize / kLanes;
  float sums[kSums] = {};
#pragma unroll
  for (int chunk = 0; chunk < Row<kHeadDim, kLanes>::kChunks; ++chunk) {
    float x[8];
    unpack8(row.packed[chunk], x);
    float& sum = sums[chunk % kSums];
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = fmaf(x[i], x[i], sum);
  }
  const float sum = lane_sum<kLanes>(kSums == 1 ? sums[0] : sums[0] + sums[kSums - 1]);
  return rsqrtf(sum * (1.0f / kHeadDim) + eps);
}

// x * inverse_rms * w, in that order.
__device__ __forceinline__ void normed8(uint4 packed_x, float inv_rms, uint4 packed_weight, float (&y)[8]) {
  float weight[8];
  unpack8(packed_x, y);
  unpack8(packed_weight, weight);
#pragma unroll
  for (int i = 0; i < 8; ++i) y[i] = (y[i] * inv_rms) * weight[i];
}

template <int kHeadDim, int kLanes>
__device__ __forceinline__ void store_row(bf16_bits* row, const float (&y)[Row<kHeadDim, kLanes>::kChunks][8],
                                          int lane) {
#pragma unroll
  for (int chunk = 0; chunk < Row<kHeadDim, kLanes>::kChunks; ++chunk) {
    // row[chunk][lane][8]
    reinterpret_cast<uint4*>(row)[chunk * kLanes + lane] = pack8(y[chunk]);
  }
}

// V: x * inverse_rms, no weight, never rotated.
template <int kHeadDim, int kLanes>
__device__ __forceinline__ void store_value_row(bf16_bits* out, const Row<kHeadDim, kLanes>& raw, float inv_rms,
                                                int lane) {
  float y[Row<kHeadDim, kLanes>::kChunks][8];
#pragma unroll
  for (int chunk = 0; chunk < Row<kHeadDim, kLanes>::kChunks; ++chunk) {
    unpack8(raw.packed[chunk], y[chunk]);
#pragma unroll
    for (int i = 0; i < 8; ++i) y[chunk][i] *= inv_rms;
  }
  store_row<kHeadDim, kLanes>(out, y, lane);
}

// The rotation of one token for the columns that this lane holds, kept packed across the rows of a warp.
template <int kHeadDim, int kLanes>
struct Rotation {
  Row<kHeadDim, kLanes> cos;
  Row<kHeadDim, kLanes> sin;
};

// Lanes that hold columns that turn, both of a pair, where only kKeyDim of 512 do: the first of each half of the head.
template <int kKeyDim>
constexpr int kTurningLanes = kKeyDim / 2 / 8;

// The same where only kKeyDim columns turn. The others of a query take K's weight: a turn by (weight, 0).
template <int kHeadDim, int kLanes, int kKeyDim>
__device__ __forceinline__ Rotation<kHeadDim, kLanes> load_folded_rotation(const PrepParams& p, int position,
                                                                           int lane, bool is_q) {
  static_assert(Row<kHeadDim, kLanes>::kChunks == 2, "both columns of a pair are one lane's");
  Rotation<kHeadDim, kLanes> rotation;
  // cos[position][rotary_dim], sin[position][rotary_dim]: rotary_dim is head_dim
  const long long row = (long long)position * kHeadDim;
#pragma unroll
  for (int chunk = 0; chunk < Row<kHeadDim, kLanes>::kChunks; ++chunk) {
    rotation.cos.packed[chunk] = rotation.sin.packed[chunk] = make_uint4(0, 0, 0, 0);
  }
  if (lane < kTurningLanes<kKeyDim>) {
    rotation.cos = load_row<kHeadDim, kLanes>(p.cos + row, lane);
    rotation.sin = load_row<kHeadDim, kLanes>(p.sin + row, lane);
  } else if (is_q) {
    rotation.cos = load_row<kHeadDim, kLanes>(p.k_weight, lane);
  }
  return rotation;
}

template <int kHeadDim, int kLanes>
__device__ __forceinline__ Rotation<kHeadDim, kLanes> load_rotation(const PrepParams& p, int position, int lane) {
  Rotation<kHeadDim, kLanes> rotation;
  // cos[position][rotary_dim], sin[position][rotary_dim]: rotary_dim is head_dim
  const long long first = (long long)position * kHeadDim;
  rotation.cos = load_row<kHeadDim, kLanes>(p.cos + first, lane);
  rotation.sin = load_row<kHeadDim, kLanes>(p.sin + first, lane);
  return rotation;
}

// y[d] * cos[d] -/+ y[partner] * sin[d]: minus in the first half of the rotated span, plus in the second.
__device__ __forceinline__ float rotate(float y, float partner, float cos, float sin, bool first_half) {
  const float cross = partner * sin;
  return fmaf(y, cos, first_half ? -cross : cross);
}

// The whole head rotates: partners lie half a head apart, in another lane or in this lane's other chunk.
template <int kHeadDim, int kLanes>
__device__ __forceinline__ void rotate_whole_head(const Rotation<kHeadDim, kLanes>& rotation, int lane,
                                                  float (&y)[Row<kHeadDim, kLanes>::kChunks][8]) {
  float cos[Row<kHeadDim, kLanes>::kChunks][8], sin[Row<kHeadDim, kLanes>::kChunks][8];
#pragma unroll
  for (int chunk = 0; chunk < Row<kHeadDim, kLanes>::kChunks; ++chunk) {
    unpack8(rotation.cos.packed[chunk], cos[chunk]);
    unpack8(rotation.sin.packed[chunk], sin[chunk]);
  }
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if constexpr (Row<kHeadDim, kLanes>::kChunks == 1) {
      const float partner = __shfl_xor_sync(kAllLanes, y[0][i], kWarpSize / 2);
      y[0][i] = rotate(y[0][i], partner, cos[0][i], sin[0][i], lane < kWarpSize / 2);
    } else {
      static_assert(Row<kHeadDim, kLanes>::kChunks == 2, "lanes hold one or two chunks");
      const float first = y[0][i], second = y[1][i];
      y[0][i] = rotate(first, second, cos[0][i], sin[0][i], true);
      y[1][i] = rotate(second, first, cos[1][i], sin[1][i], false);
    }
  }
}

// Q and K: x * inverse_rms * w, the whole head rotated.
template <int kHeadDim, int kLanes>
__device__ __forceinline__ void store_rotated_row(bf16_bits* out, const Row<kHeadDim, kLanes>& raw, float inv_rms,
                                                  const Row<kHeadDim, kLanes>& packed_weight,
                                                  const Rotation<kHeadDim, kLanes>& rotation, int lane) {
  float y[Row<kHeadDim, kLanes>::kChunks][8];
#pragma unroll
  for (int chunk = 0; chunk < Row<kHeadDim, kLanes>::kChunks; ++chunk) {
    normed8(raw.packed[chunk], inv_rms, packed_weight.packed[chunk], y[chunk]);
  }
  rotate_whole_head<kHeadDim, kLanes>(rotation, lane, y);
  store_row<kHeadDim, kLanes>(out, y, lane);
}

// K's columns that turn, in ascending order.
template <int kHeadDim, int kLanes, int kKeyDim>
__device__ __forceinline__ void store_folded_row(bf16_bits* out, const Row<kHeadDim, kLanes>& raw, float inv_rms,
                                                 const Row<kHeadDim, kLanes>& packed_weight,
                                                 const Rotation<kHeadDim, kLanes>& rotation, int lane) {
  float y[Row<kHeadDim, kLanes>::kChunks][8];
#pragma unroll
  for (int chunk = 0; chunk < Row<kHeadDim, kLanes>::kChunks; ++chunk) {
    normed8(raw.packed[chunk], inv_rms, packed_weight.packed[chunk], y[chunk]);
  }
  rotate_whole_head<kHeadDim, kLanes>(rotation, lane, y);
  if (lane >= kTurningLanes<kKeyDim>) return;
#pragma unroll
  for (int chunk = 0; chunk < Row<kHeadDim, kLanes>::kChunks; ++chunk) {
    // row[chunk][turning lane][8]
    reinterpret_cast<uint4*>(out)[chunk * kTurningLanes<kKeyDim> + lane] = pack8(y[chunk]);
  }
}

// Q and K with any even rotary_dim < head_dim: partners (d, d + rotary_dim / 2) may lie anywhere, and columns from
// rotary_dim on pass through. No form that Gemma 4 serves with, so it is kept small: one column a lane and step.
template <int kHeadDim>
__device__ __forceinline__ void store_partly_rotated_row(bf16_bits* out, const bf16_bits* raw, float inv_rms,
                                                         const bf16_bits* weight, const PrepParams& p, int position,
                                                         int lane) {
  const int half = p.rotary_dim / 2;
  // cos[position][rotary_dim], sin[position][rotary_dim]
  const long long first = (long long)position * p.rotary_dim;
#pragma unroll 1
  for (int column = lane; column < kHeadDim; column += kWarpSize) {
    float y = (bf16_to_float(raw[column]) * inv_rms) * bf16_to_float(weight[column]);
    if (column < p.rotary_dim) {
      const bool first_half = column < half;
      const int other = first_half ? column + half : column - half;
      const float partner = (bf16_to_float(raw[other]) * inv_rms) * bf16_to_float(weight[other]);
      y = rotate(y, partner, bf16_to_float(p.cos[first + column]), bf16_to_float(p.sin[first + column]), first_half);
    }
    // row[column]
    out[column] = float_to_bf16(y);
  }
}

// The pages of a token's request: entries [begin, end) of page_indices, the first of them logical page `origin`.
struct PageRow {
  int begin;
  int end;
  int origin;
};

// A number of the metadata. kEarly: by a load that no store or trap before it holds back.
template <bool kEarly>
__device__ __forceinline__ int load_number(const int* number) {
  return kEarly ? __ldg(number) : *number;
}

// A token's request: itself, unless the plan names another.
template <Form kForm, bool kEarly>
__device__ __forceinline__ int load_request(const PrepParams& p, int token) {
  const bool is_own = kForm != Form::paged_decode || p.token_requests == nullptr;
  return is_own ? token : load_number<kEarly>(p.token_requests + token);
}

template <Form kForm, bool kEarly>
__device__ __forceinline__ PageRow load_page_row(const PrepParams& p, int request) {
  PageRow row = {0, p.page_row_len, p.page_origin};
  if constexpr (kForm == Form::paged_decode) {
    if (request < 0 || request >= p.num_requests) __trap();  // no such row
    row.begin = load_number<kEarly>(p.page_indptr + request);
    row.end = load_number<kEarly>(p.page_indptr + (request + 1));
    row.origin = load_number<kEarly>(p.page_origins + request);
  }
  return row;
}

// The second layer of defence behind the host's checks; every trap comes before the first store to the pool. The page is
// not checked yet: there is work to do while it is on the way.
template <Form kForm, bool kEarly>
__device__ __forceinline__ int load_page(const PrepParams& p, const PageRow& row, int logical_page) {
  if constexpr (kForm == Form::paged_decode) {
    if (row.begin < 0 || row.end < row.begin || row.end > p.page_row_len) __trap();  // a row outside the array
  }
  if (row.origin < 0 || logical_page < row.origin) __trap();           // a page before the resident ones
  if (logical_page - row.origin >= row.end - row.begin) __trap();  // the row ends before the token's page
  return load_number<kEarly>(p.page_indices + (row.begin + (logical_page - row.origin)));
}

// This warp's number in its block. kUniform: by a shuffle, of which the compiler knows that it is one in all lanes, so
// that no branch on it has to bring lanes together again; it takes a while, and registers.
template <bool kUniform>
__device__ __forceinline__ int warp_of_block() {
  const int warp = threadIdx.x / kWarpSize;
  return kUniform ? __shfl_sync(kAllLanes, warp, 0) : warp;
}

__host__ __device__ constexpr int divide_up(int value, int by) { return (value + by - 1) / by; }

// Rows of K have kKeyDim columns: all of the head (split), or those that turn (folded). kWholeHead: rotary_dim is
// head_dim.
template <int kHeadDim, int kRowsPerWarp, Form kForm, ValueSource kValue, int kKeyDim, bool kWholeHead>
__device__ __forceinline__ void prep_rows(const PrepParams& p) {
  constexpr bool kFolded = kKeyDim != kHeadDim;
  constexpr int kLanes = PrepShape<kHeadDim, kRowsPerWarp>::kLanes;
  constexpr int kAtOnce = kWarpSize / kLanes;  // rows
  constexpr int kSteps = kRowsPerWarp / kAtOnce;
  constexpr bool kOneRow = kRowsPerWarp == 1;
  // Four rows of 512 columns come first and keep the rest busy: with metadata ahead of them 8192 tokens by a plan took
  // 83 us on an H200 in place of 79.
  constexpr bool kEarly = kOneRow || kHeadDim == 256;
  const int warp_lane = threadIdx.x % kWarpSize;
  const int lane = warp_lane % kLanes;
  const int token = blockIdx.x;
  const int q_groups = divide_up(p.num_qo_heads, kRowsPerWarp);
  const int kv_groups = divide_up(p.num_kv_heads, kRowsPerWarp);
  const int groups = q_groups + (kValue == ValueSource::raw_v ? 2 : 1) * kv_groups;
  const int group = blockIdx.y * (blockDim.x / kWarpSize) + warp_of_block<kOneRow>();
  if (group >= groups) return;
  allow_next_launch();  // attention may begin: it waits before it reads what this launch writes

  // K waits longest, for its page: of few tokens it begins first. Of many, whose blocks take turns, it is best last.
  const int first_q = kOneRow ? groups - q_groups : 0;
  const int first_k = kOneRow ? 0 : q_groups;
  const bool is_q = kOneRow ? group >= first_q : group < q_groups;
  const bool is_v = kValue == ValueSource::raw_v && !is_q && group >= first_k + kv_groups;
  const bool takes_page = kForm != Form::contiguous && !is_q;
  const int first_head = (group - (is_q ? first_q : is_v ? first_k + kv_groups : first_k)) * kRowsPerWarp;
  const int num_heads = is_q ? p.num_qo_heads : p.num_kv_heads;
  const int rows = min(kRowsPerWarp, num_heads - first_head);
  const bf16_bits* raw = is_q ? p.q : is_v ? p.v : p.k;
  // raw[token][head][head_dim]
  const long long rows_offset = ((long long)token * num_heads + first_head) * kHeadDim;

  // Loads that wait for no other come first, and then those that wait for one: every wait is part of the launch's time.
  // Of many rows what others wait for comes before them, where kEarly.
  Row<kHeadDim, kLanes> raw_rows[kSteps];
  const auto load_raw_rows = [&] {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int r = step * kAtOnce + warp_lane / kLanes;
      if (kAtOnce > 1) raw_rows[step] = {};  // half a warp may have no row
      if (kOneRow || r < rows) raw_rows[step] = load_row<kHeadDim, kLanes>(raw + rows_offset + r * kHeadDim, lane);
    }
  };
  if constexpr (kWholeHead && kOneRow) load_raw_rows();
  const int position = kForm == Form::paged_decode ? load_number<kEarly>(p.positions + token) : p.start_pos + token;
  int request = token;
  if (kEarly && takes_page) request = load_request<kForm, kEarly>(p, token);
  if constexpr (kWholeHead && !kOneRow) load_raw_rows();
  // Four rows of 512 columns and a V of their own leave no registers for weights and RoPE rows that early.
  constexpr bool kRoom = kWholeHead && (kOneRow || kHeadDim == 256 || kValue == ValueSource::raw_k);
  const bf16_bits* weight = is_q ? p.q_weight : p.k_weight;
  Row<kHeadDim, kLanes> packed_weight;
  if (kRoom && !is_v) packed_weight = load_row<kHeadDim, kLanes>(weight, lane);
  PageRow page_row;
  if (takes_page) {
    if (!kEarly) request = load_request<kForm, kEarly>(p, token);
    page_row = load_page_row<kForm, kEarly>(p, request);
  }
  if (position < 0 || position >= p.cos_max_pos) __trap();  // no such row in the RoPE tables
  Rotation<kHeadDim, kLanes> rotation;
  const auto load_rope_rows = [&] {
    if constexpr (kFolded) {
      rotation = load_folded_rotation<kHeadDim, kLanes, kKeyDim>(p, position, lane, is_q);
    } else {
      rotation = load_rotation<kHeadDim, kLanes>(p, position, lane);
    }
  };
  if (kRoom && !is_v) load_rope_rows();
  const int logical_page = takes_page ? (int)((unsigned)position / (unsigned)p.layout.page_size) : 0;
  int page = 0;
  if (takes_page) page = load_page<kForm, kEarly>(p, page_row, logical_page);
  // Where the first row goes: into the pool but for the page, which is on the way.
  bf16_bits* out;
  bf16_bits* value_out = nullptr;
  if (is_q) {
    // q_out[token][head][head_dim]
    out = p.q_out + rows_offset;
  } else if constexpr (kForm == Form::contiguous) {
    // k_out[token][head][head_dim]
    out = p.k_out + rows_offset;
  } else {
    const int slot = position - logical_page * p.layout.page_size;
    out = p.pool + kv_row_offset(p.layout, 0, p.layer, is_v, slot, first_head);
    if constexpr (kValue == ValueSource::raw_k) {
      value_out = p.pool + kv_row_offset(p.layout, 0, p.layer, true, slot, first_head);
    }
  }
  // Of one row meanwhile; of more there are no registers.
  float first_inv_rms = 0.0f;
  if constexpr (kWholeHead && kOneRow) first_inv_rms = inverse_rms<kHeadDim, kLanes>(raw_rows[0], p.eps);
  const auto inv_rms_of = [&](int step) {
    return kOneRow ? first_inv_rms : inverse_rms<kHeadDim, kLanes>(raw_rows[step], p.eps);
  };
  if (takes_page) {
    if (page < 0 || page >= p.num_pages) __trap();  // no such page in the pool
    out += kv_layer_k_offset(p.layout, page, 0);
    if constexpr (kValue == ValueSource::raw_k) value_out += kv_layer_k_offset(p.layout, page, 0);
  }

  const bool writes_v = kValue == ValueSource::raw_k && !is_q;  // K=V: V from the same raw K and the same inverse RMS
  if constexpr (!kWholeHead) {
    if (is_v) value_out = out;
#pragma unroll 1
    for (int r = 0; r < rows; ++r) {
      const bf16_bits* raw_row = raw + rows_offset + r * kHeadDim;
      const auto row = load_row<kHeadDim, kWarpSize>(raw_row, warp_lane);
      const float inv_rms = inverse_rms<kHeadDim, kWarpSize>(row, p.eps);
      if (is_v || writes_v) {
        store_value_row<kHeadDim, kWarpSize>(value_out + r * kHeadDim, row, inv_rms, warp_lane);
      }
      if (is_v) continue;
      store_partly_rotated_row<kHeadDim>(out + r * kHeadDim, raw_row, inv_rms, weight, p, position, warp_lane);
    }
    return;
  }

  if (is_v) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      if (step * kAtOnce < rows) {
        const float inv_rms = inv_rms_of(step);
        const int r = step * kAtOnce + warp_lane / kLanes;
        if (r < rows) store_value_row<kHeadDim, kLanes>(out + r * kHeadDim, raw_rows[step], inv_rms, lane);
      }
    }
    return;
  }

  if constexpr (!kRoom) {
    packed_weight = load_row<kHeadDim, kLanes>(weight, lane);
    load_rope_rows();
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (kOneRow || step * kAtOnce < rows) {
      const float inv_rms = inv_rms_of(step);
      const int r = step * kAtOnce + warp_lane / kLanes;
      if (!kOneRow && r >= rows) continue;  // half a warp
      if (writes_v) store_value_row<kHeadDim, kLanes>(value_out + r * kHeadDim, raw_rows[step], inv_rms, lane);
      if constexpr (kFolded) {
        if (!is_q) {
          store_folded_row<kHeadDim, kLanes, kKeyDim>(out + r * kKeyDim, raw_rows[step], inv_rms, packed_weight,
                                                      rotation, lane);
          continue;
        }
      }
      store_rotated_row<kHeadDim, kLanes>(out + r * kHeadDim, raw_rows[step], inv_rms, packed_weight, rotation, lane);
    }
  }
}

// A partly rotated head has a body of its own, so that code that is seldom run does not stand among what a token waits
// for.
template <int kHeadDim, int kRowsPerWarp, Form kForm, ValueSource kValue, int kKeyDim>
__device__ __forceinline__ void prep(const PrepParams& p) {
  if constexpr (kKeyDim == kHeadDim) {
    if (p.rotary_dim != kHeadDim) {
      prep_rows<kHeadDim, kRowsPerWarp, kForm, kValue, kKeyDim, false>(p);
      return;
    }
  }
  prep_rows<kHeadDim, kRowsPerWarp, kForm, kValue, kKeyDim, true>(p);
}

}  // namespace g4kv

// A kernel of an entry: head_dim, columns of a row of K, head rows that a warp serves, form, where V comes from. The name
// is the entry's, with `_folded` where rows of K have the columns that turn alone. One row a warp spreads few tokens over
// many warps; more share the RoPE row and the weights where there are many tokens, and what a token waits for: a decode
// form's warps ask where the token's page is, one load after the other.
#define G4KV_PREP(entry, head_dim, key_dim, rows, form, value)                                                      \
  extern "C" __global__ void __launch_bounds__((g4kv::PrepShape<head_dim, rows>::kThreads),       \
                                               (g4kv::PrepShape<head_dim, rows>::kBlocks))        \
      entry##_rows##rows(const g4kv::PrepParams params) {                                                           \
    g4kv::prep<head_dim, rows, g4kv::Form::form, g4kv::ValueSource::value, key_dim>(params);                        \
  }

#define G4KV_PREP_ROWS(entry, head_dim, many, form, value) \
  G4KV_PREP(entry, head_dim, head_dim, 1, form, value)     \
  G4KV_PREP(entry, head_dim, head_dim, many, form, value)
