// Attention of tiles of up to 16 packed query rows, one line a variant: head_dim, warp groups, stages of each group's
// ring. A second variant serves cards whose shared memory is too small for the first. Names, threads and bytes stand
// again in entries/table.py.
#include "decode_body.cuh"

#define G4KV_DECODE(name, head_dim, groups, stages, split, blocks, bytes)                                           \
  static_assert(g4kv::DecodeShape<head_dim, groups, stages>::kSharedBytes == bytes,                                 \
                "entries/table.py states these bytes");                                                             \
  extern "C" __global__ void __launch_bounds__(g4kv::DecodeShape<head_dim, groups, stages>::kThreads, blocks)       \
      name(const g4kv::AttentionParams params) {                                                                    \
    g4kv::attend_keys<head_dim, groups, stages, split>(params);                                                     \
  }

G4KV_DECODE(paged_decode_hd256_groups4, 256, 4, 1, false, 2, 74240)
G4KV_DECODE(paged_decode_hd512_groups4, 512, 4, 1, false, 1, 147968)
G4KV_DECODE(paged_decode_hd512_groups2, 512, 2, 1, false, 1, 82176)
G4KV_DECODE(paged_decode_split_hd256_groups4, 256, 4, 1, true, 2, 74240)
G4KV_DECODE(paged_decode_split_hd512_groups3, 512, 3, 2, true, 1, 213376)
G4KV_DECODE(paged_decode_split_hd512_groups2, 512, 2, 1, true, 1, 82176)

// The same over rows of K of key_dim columns, those that turn: the other columns of K are V's.
#define G4KV_FOLDED_DECODE(name, head_dim, key_dim, groups, stages, split, bytes)                                   \
  static_assert(g4kv::DecodeShape<head_dim, groups, stages, key_dim>::kSharedBytes == bytes,                        \
                "entries/table.py states these bytes");                                                             \
  extern "C" __global__ void __launch_bounds__(g4kv::DecodeShape<head_dim, groups, stages, key_dim>::kThreads, 1)   \
      name(const g4kv::AttentionParams params) {                                                                    \
    g4kv::attend_keys<head_dim, groups, stages, split, key_dim>(params);                                            \
  }

G4KV_FOLDED_DECODE(paged_decode_folded_hd512_groups4, 512, 128, 4, 2, false, 180736)
G4KV_FOLDED_DECODE(paged_decode_folded_hd512_groups2, 512, 128, 2, 1, false, 82176)
G4KV_FOLDED_DECODE(paged_decode_split_folded_hd512_groups4, 512, 128, 4, 2, true, 180736)
G4KV_FOLDED_DECODE(paged_decode_split_folded_hd512_groups2, 512, 128, 2, 1, true, 82176)

#define G4KV_MERGE(name, head_dim)                                                      \
  extern "C" __global__ void __launch_bounds__(g4kv::kMergeThreads)                     \
      name(const g4kv::AttentionParams params) {                                        \
    g4kv::merge_splits<head_dim>(params);                                               \
  }

G4KV_MERGE(merge_splits_hd256, 256)
G4KV_MERGE(merge_splits_hd512, 512)
