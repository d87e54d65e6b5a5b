// Decode attention for sm_90 of pools whose rows of K hold the rotated columns alone, one line a variant: head_dim,
// columns of a warp, 8-head tiles of the group, teams of a block, stages of each team's ring, columns of a row of K,
// tiles of a step, blocks of a multiprocessor; then as in decode_hopper_body.cuh. With 16 heads a tile takes a
// multiprocessor about as long as the memory: on an H200, 64 blocks over 32768 keys of 16 requests took 265 us with steps
// of one tile and 228 us with steps of two. With 8 heads four teams hide what two tiles at a time would save.
#if __CUDA_ARCH__ / 10 == 90
#include "decode_hopper_body.cuh"

#define G4KV_FOLDED_KERNEL(name, blocks, clustered, ...)                                                              \
  extern "C" __global__ void __launch_bounds__(g4kv::ClusterShape<__VA_ARGS__>::kThreads, blocks)                     \
      name(const __grid_constant__ g4kv::AttentionParams params, const __grid_constant__ g4kv::TensorMap keys,        \
           const __grid_constant__ g4kv::TensorMap values) {                                                          \
    g4kv::attend_in_cluster<g4kv::ClusterShape<__VA_ARGS__>, clustered>(params, keys, values);                        \
  }

#define G4KV_DECODE_FOLDED(name, head_dim, columns, head_tiles, teams, stages, k_dim, step, blocks, bytes)            \
  static_assert(                                                                                                      \
      g4kv::ClusterShape<head_dim, columns, head_tiles, teams, stages, k_dim, step>::kAloneBytes == bytes,            \
      "entries/table.py states these bytes");                                                                         \
  G4KV_FOLDED_KERNEL(name, blocks, false, head_dim, columns, head_tiles, teams, stages, k_dim, step)

#define G4KV_DECODE_FOLDED_SPLIT(name, head_dim, columns, head_tiles, teams, stages, k_dim, step, blocks,             \
                                 alone_bytes, bytes)                                                                  \
  static_assert(                                                                                                      \
      g4kv::ClusterShape<head_dim, columns, head_tiles, teams, stages, k_dim, step>::kAloneBytes == alone_bytes &&    \
          g4kv::ClusterShape<head_dim, columns, head_tiles, teams, stages, k_dim, step>::kSharedBytes == bytes,       \
      "entries/table.py states these bytes");                                                                         \
  G4KV_FOLDED_KERNEL(name, blocks, true, head_dim, columns, head_tiles, teams, stages, k_dim, step)

G4KV_DECODE_FOLDED(paged_decode_hopper_folded_hd512_heads8, 512, 256, 1, 4, 2, 128, 1, 1, 180752)
G4KV_DECODE_FOLDED(paged_decode_hopper_folded_hd512_heads16, 512, 256, 2, 2, 4, 128, 2, 1, 197264)
G4KV_DECODE_FOLDED_SPLIT(paged_decode_hopper_folded_split_hd512_heads8, 512, 256, 1, 4, 2, 128, 1, 1, 180752, 198096)
G4KV_DECODE_FOLDED_SPLIT(paged_decode_hopper_folded_split_hd512_heads16, 512, 256, 2, 2, 4, 128, 2, 1, 197264, 231952)
#endif
