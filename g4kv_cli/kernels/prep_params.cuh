// The one by-value parameter of every prep kernel. Its Python twin is entries/prep_parameters.py: the size is asserted on
// both sides, and a probe kernel in the tests reports every offset as the compiler placed it (NVRTC 13.0 has no offsetof).
#pragma once

#include "bf16.cuh"
#include "kv_offsets.cuh"

namespace g4kv {

struct PrepParams {
  const bf16_bits* q;         // [tokens][num_qo_heads][head_dim]
  const bf16_bits* k;         // [tokens][num_kv_heads][head_dim]
  const bf16_bits* v;         // [tokens][num_kv_heads][head_dim]; unused where V comes from raw K
  const bf16_bits* q_weight;  // [head_dim]
  const bf16_bits* k_weight;  // [head_dim]
  const bf16_bits* cos;       // [cos_max_pos][rotary_dim]
  const bf16_bits* sin;       // [cos_max_pos][rotary_dim]
  bf16_bits* q_out;           // [tokens][num_qo_heads][head_dim]
  bf16_bits* k_out;           // [tokens][num_kv_heads][head_dim]; contiguous form only
  bf16_bits* pool;            // [num_pages][num_layers][K, V][page_size][num_kv_heads][head_dim]
  const int* page_indices;    // prefill: the request's row [page_row_len]; decode: all rows [page_row_len]
  const int* positions;       // decode: [tokens]
  const int* token_requests;  // decode: [tokens], or null where token t is request t
  const int* page_indptr;     // decode: [requests + 1]
  const int* page_origins;    // decode: [requests]
  KvLayout layout;            // paged forms only
  int layer;                  // paged forms only
  int num_qo_heads;
  int num_kv_heads;
  int rotary_dim;
  int cos_max_pos;
  int start_pos;     // prefill and contiguous forms
  int page_origin;   // prefill: logical page of page_indices[0]
  int num_pages;     // pages of the pool
  int page_row_len;  // entries of page_indices
  int num_requests;  // decode: rows of page_indptr
  float eps;
};

static_assert(sizeof(PrepParams) == 216, "entries/prep_parameters.py states this size");

}  // namespace g4kv
