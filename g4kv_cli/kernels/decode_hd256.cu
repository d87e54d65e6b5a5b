// Attention of tiles of up to 16 packed query rows of the local family (decode_body.cuh says what the numbers are).
#include "decode_body.cuh"

G4KV_DECODE(paged_decode_hd256_groups4, 256, 4, 1, false, 2, 74240)
G4KV_DECODE(paged_decode_split_hd256_groups4, 256, 4, 1, true, 2, 74240)
