// Decode attention of the local family for sm_90 (decode_hopper_body.cuh says what the numbers are).
#if __CUDA_ARCH__ / 10 == 90
#include "decode_hopper_body.cuh"

G4KV_DECODE_HOPPER(paged_decode_hopper_hd256_heads8, 256, 128, 1, 4, 1, 2, 78288)
G4KV_DECODE_HOPPER(paged_decode_hopper_hd256_heads16, 256, 256, 2, 4, 1, 1, 78672)
G4KV_DECODE_HOPPER_SPLIT(paged_decode_hopper_split_hd256_heads8, 256, 256, 1, 8, 1, 1, 135952, 145104)
G4KV_DECODE_HOPPER_SPLIT(paged_decode_hopper_split_hd256_heads16, 256, 256, 2, 4, 1, 1, 78672, 96976)
#endif
