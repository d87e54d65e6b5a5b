// Prefill attention of the local family on compute capability 9.0. Name, threads and bytes stand again in
// entries/table.py.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL  // sm_90a; elsewhere there is nothing to compile

#include "prefill_hopper_hd256_body.cuh"

#define G4KV_PREFILL_PAIRS(name, head_dim, bytes)                                                             \
  static_assert(g4kv::PairPrefill::kHeadDim == head_dim && g4kv::PairPrefill::kSharedBytes == bytes,          \
                "entries/table.py states these bytes");                                                       \
  extern "C" __global__ void __launch_bounds__(g4kv::PairPrefill::kThreads, 1)                                \
      name(const g4kv::AttentionParams params, const __grid_constant__ g4kv::TensorMap key_map,               \
           const __grid_constant__ g4kv::TensorMap value_map,                                                 \
           const __grid_constant__ g4kv::TensorMap query_map) {                                               \
    g4kv::attend_pairs(params, key_map, value_map, query_map);                                                \
  }

G4KV_PREFILL_PAIRS(batch_prefill_paged_hd256_tile64_pairs, 256, 232080)

#endif
