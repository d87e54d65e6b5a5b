// Prep kernels of the global family, one line an entry (prep_body.cuh says what the numbers are).
#include "prep_body.cuh"

G4KV_PREP_ROWS(qkv_norm_rope_paged_prefill_hd512_plain_into, 512, 4, paged_prefill, raw_v)
G4KV_PREP_ROWS(qkv_norm_rope_paged_decode_hd512_plain_into, 512, 4, paged_decode, raw_v)
G4KV_PREP_ROWS(qk_norm_rope_paged_prefill_hd512_k_eq_v_plain_into, 512, 4, paged_prefill, raw_k)
G4KV_PREP_ROWS(qk_norm_rope_paged_decode_hd512_k_eq_v_plain_into, 512, 4, paged_decode, raw_k)
