// Prefill attention with large tiles, local family (prefill_body.cuh says what the numbers are).
#include "prefill_body.cuh"

G4KV_PREFILL(batch_prefill_paged_hd256_tile64, 256, 4, 1, 1, 48, 2, 81920)
