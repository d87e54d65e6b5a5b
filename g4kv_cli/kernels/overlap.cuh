// A launch that begins before the one in front of it has ended (programmatic dependent launch), from sm_90 on.
#pragma once

namespace g4kv {

// The launch behind may begin once every block has come here or has ended.
__device__ __forceinline__ void allow_next_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Until the launch in front has ended and all that it wrote is there.
__device__ __forceinline__ void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace g4kv
