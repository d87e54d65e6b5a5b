// The global family's prefill kernels over folded rows of K: also their columns, and how many tiles of V there are. Names,
// threads and bytes stand again in entries/table.py.
#include "prefill_body.cuh"

#define G4KV_FOLDED_PREFILL(name, head_dim, key_dim, row_groups, row_tiles, column_warps, keys, value_tiles, bytes)   \
  static_assert(g4kv::PrefillShape<head_dim, row_groups, row_tiles, column_warps, keys, key_dim,                      \
                                   value_tiles>::kSharedBytes == bytes,                                               \
                "entries/table.py states these bytes");                                                               \
  extern "C" __global__ void __launch_bounds__(                                                                       \
      g4kv::PrefillShape<head_dim, row_groups, row_tiles, column_warps, keys, key_dim, value_tiles>::kThreads, 1)     \
      name(const g4kv::AttentionParams params) {                                                                      \
    g4kv::attend_rows<head_dim, row_groups, row_tiles, column_warps, keys, key_dim, value_tiles>(params);             \
  }

G4KV_FOLDED_PREFILL(batch_prefill_paged_folded_hd512_tile64, 512, 128, 2, 2, 4, 64, 2, 222208)
G4KV_FOLDED_PREFILL(batch_prefill_paged_folded_hd512_tile64_keys32, 512, 128, 4, 1, 2, 32, 1, 111104)
G4KV_FOLDED_PREFILL(batch_prefill_paged_folded_hd512_tile32, 512, 128, 2, 1, 2, 32, 1, 76032)
