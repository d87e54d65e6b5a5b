// Attention of tiles of up to 16 packed query rows of the global family (decode_body.cuh says what the numbers are). A
// second variant serves cards whose shared memory is too small for the first.
#include "decode_body.cuh"

G4KV_DECODE(paged_decode_hd512_groups4, 512, 4, 1, false, 1, 147968)
G4KV_DECODE(paged_decode_hd512_groups2, 512, 2, 1, false, 1, 82176)
G4KV_DECODE(paged_decode_split_hd512_groups3, 512, 3, 2, true, 1, 213376)
G4KV_DECODE(paged_decode_split_hd512_groups2, 512, 2, 1, true, 1, 82176)
