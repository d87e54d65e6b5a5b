// Prep kernels of the local family, one line an entry (prep_body.cuh says what the numbers are).
#include "prep_body.cuh"

G4KV_PREP_ROWS(qk_norm_rope_prefill_hd256_plain_into, 256, 8, contiguous, none)
G4KV_PREP_ROWS(qkv_norm_rope_paged_prefill_hd256_plain_into, 256, 8, paged_prefill, raw_v)
G4KV_PREP_ROWS(qkv_norm_rope_paged_decode_hd256_plain_into, 256, 8, paged_decode, raw_v)
