// Prefill attention over folded rows on compute capability 9.0, one line a variant: head_dim, the neighbouring tiles that
// make a cluster, columns of a row of K, shared memory. Names, threads and bytes stand again in entries/table.py.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // sm_90a; elsewhere there is nothing to compile

#include "prefill_hopper_body.cuh"

#define G4KV_PREFILL_FOLDED(name, head_dim, tiles, key_dim, bytes)                                                    \
  static_assert(g4kv::HopperPrefill<tiles, true>::kHeadDim == head_dim &&                                             \
                    g4kv::HopperPrefill<tiles, true>::kKeyDim == key_dim &&                                           \
                    g4kv::HopperPrefill<tiles, true>::kSharedBytes == bytes,                                          \
                "entries/table.py states these bytes");                                                               \
  extern "C" __global__ void __launch_bounds__(g4kv::HopperPrefill<tiles, true>::kThreads, 1)                         \
      name(const g4kv::AttentionParams params, const __grid_constant__ g4kv::TensorMap key_map,                       \
           const __grid_constant__ g4kv::TensorMap value_map) {                                                       \
    g4kv::attend_rows_hopper<g4kv::HopperPrefill<tiles, true>>(params, key_map, value_map);                           \
  }

G4KV_PREFILL_FOLDED(batch_prefill_paged_folded_hd512_tile64_cluster2, 512, 2, 128, 230392)
G4KV_PREFILL_FOLDED(batch_prefill_paged_folded_hd512_tile64_cluster1, 512, 1, 128, 230392)

#endif
