// Prep kernels of the global family for rows of K of key_dim columns alone, those that turn.
#include "prep_body.cuh"

#define G4KV_PREP_FOLDED(entry, head_dim, key_dim, many, form) \
  G4KV_PREP(entry, head_dim, key_dim, 1, form, raw_k)          \
  G4KV_PREP(entry, head_dim, key_dim, many, form, raw_k)

G4KV_PREP_FOLDED(qk_norm_rope_paged_prefill_hd512_k_eq_v_plain_into_folded, 512, 128, 4, paged_prefill)
G4KV_PREP_FOLDED(qk_norm_rope_paged_decode_hd512_k_eq_v_plain_into_folded, 512, 128, 4, paged_decode)
