// The merge of partial results of blocks alone, for sm_90: it may be launched before they are there.
#if __CUDA_ARCH__ / 10 == 90
#include "decode_body.cuh"
#include "hopper.cuh"

#define G4KV_MERGE_AFTER(name, head_dim)                                                                              \
  extern "C" __global__ void __launch_bounds__(g4kv::kMergeThreads) name(const g4kv::AttentionParams params) {        \
    g4kv::allow_next_launch();                                                                                        \
    g4kv::wait_for_launch_before();                                                                                   \
    g4kv::merge_splits<head_dim>(params);                                                                             \
  }

G4KV_MERGE_AFTER(merge_splits_after_hd256, 256)
G4KV_MERGE_AFTER(merge_splits_after_hd512, 512)
#endif
