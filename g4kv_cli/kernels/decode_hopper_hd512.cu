// Decode attention of the global family for sm_90 (decode_hopper_body.cuh says what the numbers are).
#if __CUDA_ARCH__ / 10 == 90
#include "decode_hopper_body.cuh"

G4KV_DECODE_HOPPER(paged_decode_hopper_hd512_heads8, 512, 128, 1, 2, 1, 2, 82224)
G4KV_DECODE_HOPPER(paged_decode_hopper_hd512_heads16, 512, 128, 2, 1, 2, 2, 90544)
G4KV_DECODE_HOPPER_SPLIT(paged_decode_hopper_split_hd512_heads8, 512, 128, 1, 2, 2, 1, 147792, 165136)
G4KV_DECODE_HOPPER_SPLIT(paged_decode_hopper_split_hd512_heads16, 512, 256, 2, 2, 2, 1, 156240, 190928)
#endif
