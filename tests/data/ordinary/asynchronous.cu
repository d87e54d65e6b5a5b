// mbarrier tokens, cuda::barrier, bulk copies, and clusters.
#include <cooperative_groups.h>
#include <cooperative_groups/memcpy_async.h>
#include <cuda/barrier>
#include <cuda/pipeline>
namespace cg = cooperative_groups;

extern "C" __global__ void tokens(int* out, const int* in) {
  __shared__ cuda::barrier<cuda::thread_scope_block> meet;
  __shared__ int row[128];
  if (threadIdx.x == 0) init(&meet, blockDim.x);
  __syncthreads();
  row[threadIdx.x] = in[threadIdx.x];
  auto token = meet.arrive();
  int own = in[threadIdx.x] * 3;
  meet.wait(cuda::std::move(token));
  out[threadIdx.x] = own + row[(threadIdx.x + 1) % blockDim.x];
  meet.arrive_and_wait();
  row[threadIdx.x] = own;
  meet.arrive_and_wait();
  out[threadIdx.x] += row[(threadIdx.x + 5) % blockDim.x];
}
extern "C" __global__ void test_wait(int* out, const int* in) {
  __shared__ alignas(8) unsigned long long barrier;
  __shared__ int row[64];
  unsigned at = (unsigned)__cvta_generic_to_shared(&barrier);
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(blockDim.x) : "memory");
  __syncthreads();
  row[threadIdx.x] = in[threadIdx.x];
  unsigned long long state;
  asm volatile("mbarrier.arrive.shared.b64 %0, [%1];" : "=l"(state) : "r"(at) : "memory");
  unsigned done = 0;
  while (!done)
    asm volatile("{.reg .pred p; mbarrier.test_wait.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(at), "l"(state) : "memory");
  out[threadIdx.x] = row[63 - threadIdx.x];
}
extern "C" __global__ void async_arrive(int* out, const int* in) {
  __shared__ alignas(8) unsigned long long barrier;
  __shared__ alignas(16) int row[128];
  unsigned at = (unsigned)__cvta_generic_to_shared(&barrier), to = (unsigned)__cvta_generic_to_shared(row + 4 * threadIdx.x);
  if (threadIdx.x == 0) asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(blockDim.x) : "memory");
  __syncthreads();
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(in + 4 * threadIdx.x) : "memory");
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(at) : "memory");
  unsigned done = 0;
  while (!done)
    asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(at) : "memory");
  out[threadIdx.x] = row[127 - threadIdx.x];
}
extern "C" __global__ void pipeline(int* out, const int* in) {
  __shared__ int row[2][64];
  cuda::pipeline<cuda::thread_scope_thread> pipe = cuda::make_pipeline();
  int sum = 0;
  pipe.producer_acquire();
  cuda::memcpy_async(&row[0][threadIdx.x], in + threadIdx.x, sizeof(int), pipe);
  pipe.producer_commit();
  for (int k = 1; k <= 4; k++) {
    if (k < 4) {
      pipe.producer_acquire();
      cuda::memcpy_async(&row[k % 2][threadIdx.x], in + 64 * k + threadIdx.x, sizeof(int), pipe);
      pipe.producer_commit();
      cuda::pipeline_consumer_wait_prior<1>(pipe);
    } else {
      cuda::pipeline_consumer_wait_prior<0>(pipe);
    }
    sum += k * row[(k - 1) % 2][threadIdx.x];
    pipe.consumer_release();
  }
  out[threadIdx.x] = sum;
}
#if __CUDA_ARCH__ >= 900
extern "C" __global__ void bulk_copy(int* out, const int* in) {
  __shared__ alignas(16) int row[256];
  __shared__ alignas(8) unsigned long long barrier;
  unsigned at = (unsigned)__cvta_generic_to_shared(&barrier), to = (unsigned)__cvta_generic_to_shared(row);
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(at) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], 1024;" ::"r"(at) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 1024, [%2];" ::"r"(to), "l"(in), "r"(at) : "memory");
  }
  unsigned done = 0;
  while (!done)
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], 0; selp.u32 %0, 1, 0, p;}" : "=r"(done) : "r"(at) : "memory");
  row[threadIdx.x] = 2 * row[threadIdx.x] + 1;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 1024;" ::"l"(out), "r"(to) : "memory");
    asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
  }
}
extern "C" __global__ void __cluster_dims__(2, 1, 1) cluster_exchange(int* out, const int* in) {
  __shared__ int row[64];
  cg::cluster_group cluster = cg::this_cluster();
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  row[threadIdx.x] = in[i];
  cluster.sync();
  int* other = cluster.map_shared_rank(row, cluster.block_rank() ^ 1);
  out[i] = other[threadIdx.x] + 1000 * cluster.block_rank();
  cluster.sync();
}
#endif
extern "C" __global__ void grid_meets(int* out, const int* in) {
  cg::grid_group grid = cg::this_grid();
  out[grid.thread_rank()] = in[grid.thread_rank()];
  grid.sync();
  int other = out[(grid.thread_rank() + blockDim.x) % grid.size()];
  grid.barrier_wait(grid.barrier_arrive());
  out[grid.thread_rank()] = 2 * other;
}
extern "C" __global__ void block_tiles(int* out, const int* in) {
  __shared__ cg::block_tile_memory<256> memory;
  cg::thread_block block = cg::this_thread_block(memory);
  auto tile = cg::tiled_partition<128>(block);
  int sum = tile.any(in[threadIdx.x] == in[0]);
  tile.sync();
  out[threadIdx.x] = sum + 10 * tile.shfl(in[threadIdx.x], 77);
}
