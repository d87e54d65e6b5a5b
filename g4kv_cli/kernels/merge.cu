// The splits' partial results as one, a line a family.
#include "decode_body.cuh"

#define G4KV_MERGE(name, head_dim)                                                      \
  extern "C" __global__ void __launch_bounds__(g4kv::kMergeThreads)                     \
      name(const g4kv::AttentionParams params) {                                        \
    g4kv::merge_splits<head_dim>(params, params.num_splits);                            \
  }

G4KV_MERGE(merge_splits_hd256, 256)
G4KV_MERGE(merge_splits_hd512, 512)
