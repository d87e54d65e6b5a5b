// Prefill attention with large tiles, global family (prefill_body.cuh says what the numbers are). A tile size has a
// second variant where a card's shared memory is too small for the first.
#include "prefill_body.cuh"

G4KV_PREFILL(batch_prefill_paged_hd512_tile64, 512, 2, 2, 4, 64, 1, 205824)
G4KV_PREFILL(batch_prefill_paged_hd512_tile64_keys32, 512, 4, 1, 2, 32, 1, 135680)
G4KV_PREFILL(batch_prefill_paged_hd512_tile32, 512, 2, 1, 2, 32, 1, 100608)
