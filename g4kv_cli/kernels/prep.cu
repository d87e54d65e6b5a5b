// Prep kernels of the local family (head_dim 256) and the global family (head_dim 512), one line an entry and row
// count. The name is the entry's, with `_folded` where rows of K have the columns that turn alone; `_rowsN` the head
// rows that one warp serves: 1 spreads few tokens over many warps, more share the RoPE row and the weights where there
// are many tokens, and what a token waits for: a decode form's warps ask where the token's page is, one load after the
// other.
#include "prep_body.cuh"

#define G4KV_PREP(entry, head_dim, key_dim, rows, form, value)                                                    \
  extern "C" __global__ void __launch_bounds__(g4kv::kMaxThreads<rows>, (g4kv::kMinBlocks<head_dim, rows>))       \
      entry##_rows##rows(const g4kv::PrepParams params) {                                                         \
    g4kv::prep<head_dim, rows, g4kv::Form::form, g4kv::ValueSource::value, key_dim>(params);                      \
  }

#define G4KV_PREP_ROWS(entry, head_dim, many, form, value) \
  G4KV_PREP(entry, head_dim, head_dim, 1, form, value)     \
  G4KV_PREP(entry, head_dim, head_dim, many, form, value)

// Rows of K of key_dim columns alone, those that turn.
#define G4KV_PREP_FOLDED(entry, head_dim, key_dim, many, form) \
  G4KV_PREP(entry, head_dim, key_dim, 1, form, raw_k)          \
  G4KV_PREP(entry, head_dim, key_dim, many, form, raw_k)

G4KV_PREP_ROWS(qk_norm_rope_prefill_hd256_plain_into, 256, 4, contiguous, none)
G4KV_PREP_ROWS(qkv_norm_rope_paged_prefill_hd256_plain_into, 256, 4, paged_prefill, raw_v)
G4KV_PREP_ROWS(qkv_norm_rope_paged_decode_hd256_plain_into, 256, 8, paged_decode, raw_v)
G4KV_PREP_ROWS(qkv_norm_rope_paged_prefill_hd512_plain_into, 512, 4, paged_prefill, raw_v)
G4KV_PREP_ROWS(qkv_norm_rope_paged_decode_hd512_plain_into, 512, 4, paged_decode, raw_v)
G4KV_PREP_ROWS(qk_norm_rope_paged_prefill_hd512_k_eq_v_plain_into, 512, 4, paged_prefill, raw_k)
G4KV_PREP_ROWS(qk_norm_rope_paged_decode_hd512_k_eq_v_plain_into, 512, 4, paged_decode, raw_k)
G4KV_PREP_FOLDED(qk_norm_rope_paged_prefill_hd512_k_eq_v_plain_into_folded, 512, 128, 4, paged_prefill)
G4KV_PREP_FOLDED(qk_norm_rope_paged_decode_hd512_k_eq_v_plain_into_folded, 512, 128, 4, paged_decode)
