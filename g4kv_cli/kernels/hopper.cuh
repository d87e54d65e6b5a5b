// What sm_90 adds and the Hopper kernels use: mbarriers, copies by tensor map, clusters and their shared memory.
// Addresses of shared memory are 32-bit; those of another block of the cluster come from shared_of_rank.
#pragma once

#include "attention_tile.cuh"
#include "overlap.cuh"

namespace g4kv {

// A CUtensorMap, made on the host. The copy engine reads it where it lies: in the kernel's parameters.
struct __align__(64) TensorMap {
  unsigned char bytes[128];
};

// --- mbarriers -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(unsigned barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// One arrival that also announces `bytes` of copies.
__device__ __forceinline__ void barrier_expect(unsigned barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Announces `bytes` more of copies, without an arrival.
__device__ __forceinline__ void barrier_expect_more(unsigned barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ bool barrier_passed(unsigned barrier, unsigned parity) {
  unsigned passed;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n}"
      : "=r"(passed)
      : "r"(barrier), "r"(parity)
      : "memory");
  return passed != 0;
}

// Until the phase of this parity is over.
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
#ifdef G4KV_BOUNDED_WAITS
#pragma unroll 1
  for (int tries = 0; !barrier_passed(barrier, parity); ++tries) {
    if (tries == G4KV_BOUNDED_WAITS) __trap();
  }
#else
#pragma unroll 1
  while (!barrier_passed(barrier, parity)) {
  }
#endif
}

// 128 bytes of global memory into the multiprocessor's cache. Nothing waits for it.
__device__ __forceinline__ void prefetch_line(const void* at) { asm volatile("prefetch.global.L1 [%0];" ::"l"(at)); }

// --- copies by tensor map ------------------------------------------------------------------------------------------

__device__ __forceinline__ void prefetch_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// A box of a five-dimensional tensor to shared memory; `barrier` counts its bytes. Nobody reads it a second time soon:
// the cache may drop it first.
__device__ __forceinline__ void copy_box_once(unsigned destination, const TensorMap& map, unsigned barrier, int at0,
                                              int at1, int at2, int at3, int at4) {
  asm volatile(
      "{\n.reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5, %6}], [%7], policy;\n}" ::"r"(destination),
      "l"(&map), "r"(at0), "r"(at1), "r"(at2), "r"(at3), "r"(at4), "r"(barrier)
      : "memory");
}

// A box of a four-dimensional tensor to shared memory; `barrier` counts its bytes.
__device__ __forceinline__ void copy_box(unsigned destination, const TensorMap& map, unsigned barrier, int at0,
                                         int at1, int at2, int at3) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(destination),
      "l"(&map), "r"(at0), "r"(at1), "r"(at2), "r"(at3), "r"(barrier)
      : "memory");
}

// The same to each block of the cluster that `ranks` has a bit for, at the same place; that block's barrier counts.
__device__ __forceinline__ void copy_box_to_ranks(unsigned destination, const TensorMap& map, unsigned barrier,
                                                  int at0, int at1, int at2, int at3, unsigned short ranks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(destination),
      "l"(&map), "r"(at0), "r"(at1), "r"(at2), "r"(at3), "r"(barrier), "h"(ranks)
      : "memory");
}

// Ordinary stores to shared memory, to what comes after them: copies that overwrite them, or wgmma that reads them.
__device__ __forceinline__ void fence_async_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// --- clusters ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ int cluster_size() {
  int size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

// Makes barrier_init seen by the copy engine and by the blocks of the cluster that wait for this one's arrival.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Relaxed: it orders no memory but what fence_barrier_init published, and so waits for none.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// The same place in the shared memory of another block of the cluster.
__device__ __forceinline__ unsigned shared_of_rank(unsigned address, int rank) {
  unsigned mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// On another block's barrier. No scope is named: with one the compiler puts a full memory barrier before it.
__device__ __forceinline__ void barrier_arrive_at_rank(unsigned mapped_barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapped_barrier) : "memory");
}

// All threads of the cluster, and all that they did to each other's shared memory.
__device__ __forceinline__ void synchronize_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// 16 bytes into a block of the cluster; that block's barrier counts them.
__device__ __forceinline__ void push(unsigned destination, float4 value, unsigned barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(destination),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(barrier)
      : "memory");
}

}  // namespace g4kv
