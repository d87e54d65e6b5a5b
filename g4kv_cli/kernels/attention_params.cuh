// The one by-value parameter of every attention kernel. Its Python twin is entries/attention_parameters.py: the size
// is asserted on both sides, and a probe kernel in the tests reports every offset as the compiler placed it.
#pragma once

#include "bf16.cuh"
#include "kv_offsets.cuh"

namespace g4kv {

// Query token i of request r (0 <= i < q_len) has position kv_lens[r] - q_len + i. It sees key j iff j <= position and
// (window_left < 0 or j >= position - window_left). Keys lie in the pages of the request's row of page_indices,
// whose index 0 is logical page page_origins[r].
struct AttentionParams {
  const bf16_bits* q;         // [tokens][num_qo_heads][head_dim]
  bf16_bits* out;             // [tokens][num_qo_heads][head_dim]
  float* lse;                 // [tokens][num_qo_heads], natural logarithm; null: not wanted
  const bf16_bits* pool;      // [num_pages][num_layers][K, V][page_size][num_kv_heads][head_dim]
  const int* page_indices;    // all rows
  const int* page_indptr;     // [requests + 1]
  const int* page_origins;    // [requests]
  const int* kv_lens;         // [requests], keys up to and with the last query token
  const int* q_indptr;        // [requests + 1]; null: token r is request r (decode)
  const int* tile_requests;   // [tiles]; null: tile r is request r (decode)
  const int* tile_indices;    // [tiles], the tile's number inside its request
  float* partial_out;         // split: [tokens][num_qo_heads][num_splits][head_dim], not normalised
  float* partial_max;         // split: [tokens][num_qo_heads][num_splits], largest unscaled score
  float* partial_sum;         // split: [tokens][num_qo_heads][num_splits]
  KvLayout layout;
  int layer;
  int num_qo_heads;
  int num_kv_heads;
  int num_tiles;
  int num_splits;    // of decode; prefill at head_dim 256 on sm_90a: see prefill_hopper_hd256_units.cuh
  int window_left;   // inclusive distance of the oldest visible key; -1: no window
  float scale_log2;  // sm_scale * log2(e), positive
  int overlaps;      // of decode for sm_90: the launch in front may still write q and each request's newest key
};

static_assert(sizeof(AttentionParams) == 192, "entries/attention_parameters.py states this size");

}  // namespace g4kv
