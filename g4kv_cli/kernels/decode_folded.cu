// The global family's decode kernels over rows of K of key_dim columns, those that turn: the other columns of K are V's.
// Names, threads and bytes stand again in entries/table.py.
#include "decode_body.cuh"

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
