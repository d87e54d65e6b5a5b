// The merge of partial results of blocks alone, for sm_90: it may be launched before they are there.
#if __CUDA_ARCH__ / 10 == 90
#include "decode_body.cuh"
#include "hopper.cuh"

namespace g4kv {

// The first round is over no splits: it brings the code in while the blocks in front still run.
template <int kHeadDim>
__device__ __forceinline__ void merge_splits_after(const AttentionParams& p) {
#pragma unroll 1
  for (int round = 0; round < 2; ++round) {
    if (round == 1) wait_for_launch_before();
    merge_splits<kHeadDim>(p, round == 0 ? 0 : p.num_splits);
  }
}

}  // namespace g4kv

#define G4KV_MERGE_AFTER(name, head_dim)                                                                              \
  extern "C" __global__ void __launch_bounds__(g4kv::kMergeThreads) name(const g4kv::AttentionParams params) {        \
    g4kv::allow_next_launch();                                                                                        \
    g4kv::merge_splits_after<head_dim>(params);                                                                       \
  }

G4KV_MERGE_AFTER(merge_splits_after_hd256, 256)
G4KV_MERGE_AFTER(merge_splits_after_hd512, 512)
#endif
