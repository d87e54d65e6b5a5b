// Decode attention for sm_90, one line a variant: head_dim, columns of a warp, 8-head tiles of the group, teams of a
// block, stages of each team's ring, blocks of a multiprocessor; where keys are spread over blocks, the shared memory of
// a block alone; that of a block. Names, threads and bytes stand again in entries/table.py.
#if __CUDA_ARCH__ / 10 == 90
#include "decode_body.cuh"
#include "decode_hopper_body.cuh"

#define G4KV_DECODE_KERNEL(name, blocks, clustered, ...)                                                              \
  extern "C" __global__ void __launch_bounds__(g4kv::ClusterShape<__VA_ARGS__>::kThreads, blocks)                     \
      name(const __grid_constant__ g4kv::AttentionParams params, const __grid_constant__ g4kv::TensorMap map) {       \
    g4kv::attend_in_cluster<g4kv::ClusterShape<__VA_ARGS__>, clustered>(params, map, map);                            \
  }

#define G4KV_DECODE_HOPPER(name, head_dim, columns, head_tiles, teams, stages, blocks, bytes)                         \
  static_assert(g4kv::ClusterShape<head_dim, columns, head_tiles, teams, stages>::kAloneBytes == bytes,               \
                "entries/table.py states these bytes");                                                               \
  G4KV_DECODE_KERNEL(name, blocks, false, head_dim, columns, head_tiles, teams, stages)

#define G4KV_DECODE_HOPPER_SPLIT(name, head_dim, columns, head_tiles, teams, stages, blocks, alone_bytes, bytes)      \
  static_assert(g4kv::ClusterShape<head_dim, columns, head_tiles, teams, stages>::kAloneBytes == alone_bytes &&       \
                    g4kv::ClusterShape<head_dim, columns, head_tiles, teams, stages>::kSharedBytes == bytes,          \
                "entries/table.py states these bytes");                                                               \
  G4KV_DECODE_KERNEL(name, blocks, true, head_dim, columns, head_tiles, teams, stages)

G4KV_DECODE_HOPPER(paged_decode_hopper_hd256_heads8, 256, 128, 1, 4, 1, 2, 74064)
G4KV_DECODE_HOPPER(paged_decode_hopper_hd256_heads16, 256, 256, 2, 4, 1, 1, 70224)
G4KV_DECODE_HOPPER(paged_decode_hopper_hd512_heads8, 512, 128, 1, 2, 1, 2, 73904)
G4KV_DECODE_HOPPER(paged_decode_hopper_hd512_heads16, 512, 128, 2, 1, 1, 2, 42144)
G4KV_DECODE_HOPPER_SPLIT(paged_decode_hopper_split_hd256_heads8, 256, 256, 1, 8, 1, 1, 131728, 140880)
G4KV_DECODE_HOPPER_SPLIT(paged_decode_hopper_split_hd256_heads16, 256, 256, 2, 4, 1, 1, 70224, 88528)
G4KV_DECODE_HOPPER_SPLIT(paged_decode_hopper_split_hd512_heads8, 512, 128, 1, 2, 2, 1, 139472, 156816)
G4KV_DECODE_HOPPER_SPLIT(paged_decode_hopper_split_hd512_heads16, 512, 256, 2, 2, 2, 1, 139600, 174288)

// The merge of partial results of blocks alone. It may be launched before they are there.
#define G4KV_MERGE_AFTER(name, head_dim)                                                                              \
  extern "C" __global__ void __launch_bounds__(g4kv::kMergeThreads) name(const g4kv::AttentionParams params) {        \
    g4kv::wait_for_launch_before();                                                                                   \
    g4kv::merge_splits<head_dim>(params);                                                                             \
  }

G4KV_MERGE_AFTER(merge_splits_after_hd256, 256)
G4KV_MERGE_AFTER(merge_splits_after_hd512, 512)
#endif
