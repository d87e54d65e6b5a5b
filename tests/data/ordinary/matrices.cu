// wmma, and mma.sync with other types than bf16 and f16 into f32.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <mma.h>
using namespace nvcuda;

template <typename In, typename Acc, int M, int N, int K, typename Frag = In>
__device__ void tile(Acc* d, const In* a, const In* b, const Acc* c) {
  wmma::fragment<wmma::matrix_a, M, N, K, Frag, wmma::row_major> fa;
  wmma::fragment<wmma::matrix_b, M, N, K, Frag, wmma::col_major> fb;
  wmma::fragment<wmma::accumulator, M, N, K, Acc> fc;
  wmma::load_matrix_sync(fa, a, K);
  wmma::load_matrix_sync(fb, b, K);
  wmma::load_matrix_sync(fc, c, N, wmma::mem_row_major);
  wmma::mma_sync(fc, fa, fb, fc);
  wmma::store_matrix_sync(d, fc, N, wmma::mem_row_major);
}
extern "C" __global__ void wmma_f16_f32(float* d, const __half* a, const __half* b, const float* c) { tile<__half, float, 16, 16, 16>(d, a, b, c); }
extern "C" __global__ void wmma_f16_f16(__half* d, const __half* a, const __half* b, const __half* c) { tile<__half, __half, 16, 16, 16>(d, a, b, c); }
extern "C" __global__ void wmma_wide(float* d, const __half* a, const __half* b, const float* c) { tile<__half, float, 8, 32, 16>(d, a, b, c); }
extern "C" __global__ void wmma_tall(float* d, const __half* a, const __half* b, const float* c) { tile<__half, float, 32, 8, 16>(d, a, b, c); }
extern "C" __global__ void wmma_bf16(float* d, const __nv_bfloat16* a, const __nv_bfloat16* b, const float* c) { tile<__nv_bfloat16, float, 16, 16, 16>(d, a, b, c); }
extern "C" __global__ void wmma_s8(int* d, const signed char* a, const signed char* b, const int* c) { tile<signed char, int, 16, 16, 16>(d, a, b, c); }
extern "C" __global__ void wmma_u8(int* d, const unsigned char* a, const unsigned char* b, const int* c) { tile<unsigned char, int, 16, 16, 16>(d, a, b, c); }
extern "C" __global__ void wmma_f64(double* d, const double* a, const double* b, const double* c) { tile<double, double, 8, 8, 4>(d, a, b, c); }
extern "C" __global__ void wmma_tf32(float* d, const float* a, const float* b, const float* c) { tile<float, float, 16, 16, 8, wmma::precision::tf32>(d, a, b, c); }

// A column-major A, a row-major B, and a result in column-major order.
extern "C" __global__ void wmma_columns(float* d, const __half* a, const __half* b, float scale) {
  wmma::fragment<wmma::matrix_a, 16, 16, 16, __half, wmma::col_major> fa;
  wmma::fragment<wmma::matrix_b, 16, 16, 16, __half, wmma::row_major> fb;
  wmma::fragment<wmma::accumulator, 16, 16, 16, float> fc;
  wmma::fill_fragment(fc, 0.0f);
  for (int k = 0; k < 32; k += 16) {
    wmma::load_matrix_sync(fa, a + 16 * k, 16);
    wmma::load_matrix_sync(fb, b + 16 * k, 16);
    wmma::mma_sync(fc, fa, fb, fc);
  }
  for (int k = 0; k < fc.num_elements; k++) fc.x[k] *= scale;
  wmma::store_matrix_sync(d, fc, 16, wmma::mem_col_major);
}

#define IN4 "{%4,%5,%6,%7}"
extern "C" __global__ void mma_f16_f16(unsigned* d, const unsigned* a, const unsigned* b, const unsigned* c) {
  int t = threadIdx.x;
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1},{%2,%3,%4,%5},{%6,%7},{%8,%9};"
    : "=r"(d[2*t]), "=r"(d[2*t+1]) : "r"(a[4*t]), "r"(a[4*t+1]), "r"(a[4*t+2]), "r"(a[4*t+3]), "r"(b[2*t]), "r"(b[2*t+1]), "r"(c[2*t]), "r"(c[2*t+1]));
}
extern "C" __global__ void mma_tf32(float* d, const unsigned* a, const unsigned* b, const float* c) {
  int t = threadIdx.x;
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}," IN4 ",{%8,%9},{%10,%11,%12,%13};"
    : "=f"(d[4*t]), "=f"(d[4*t+1]), "=f"(d[4*t+2]), "=f"(d[4*t+3]) : "r"(a[4*t]), "r"(a[4*t+1]), "r"(a[4*t+2]), "r"(a[4*t+3]), "r"(b[2*t]), "r"(b[2*t+1]), "f"(c[4*t]), "f"(c[4*t+1]), "f"(c[4*t+2]), "f"(c[4*t+3]));
}
extern "C" __global__ void mma_s8(int* d, const unsigned* a, const unsigned* b, const int* c) {
  int t = threadIdx.x;
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}," IN4 ",{%8,%9},{%10,%11,%12,%13};"
    : "=r"(d[4*t]), "=r"(d[4*t+1]), "=r"(d[4*t+2]), "=r"(d[4*t+3]) : "r"(a[4*t]), "r"(a[4*t+1]), "r"(a[4*t+2]), "r"(a[4*t+3]), "r"(b[2*t]), "r"(b[2*t+1]), "r"(c[4*t]), "r"(c[4*t+1]), "r"(c[4*t+2]), "r"(c[4*t+3]));
}
extern "C" __global__ void mma_e4m3(float* d, const unsigned* a, const unsigned* b, const float* c) {
#if __CUDA_ARCH__ >= 890
  int t = threadIdx.x;
  asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}," IN4 ",{%8,%9},{%10,%11,%12,%13};"
    : "=f"(d[4*t]), "=f"(d[4*t+1]), "=f"(d[4*t+2]), "=f"(d[4*t+3]) : "r"(a[4*t]), "r"(a[4*t+1]), "r"(a[4*t+2]), "r"(a[4*t+3]), "r"(b[2*t]), "r"(b[2*t+1]), "f"(c[4*t]), "f"(c[4*t+1]), "f"(c[4*t+2]), "f"(c[4*t+3]));
#endif
}
extern "C" __global__ void mma_f64(double* d, const double* a, const double* b, const double* c) {
  int t = threadIdx.x;
  asm volatile("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0,%1},{%2},{%3},{%4,%5};"
    : "=d"(d[2*t]), "=d"(d[2*t+1]) : "d"(a[t]), "d"(b[t]), "d"(c[2*t]), "d"(c[2*t+1]));
}
extern "C" __global__ void mma_sinks(float* d, const unsigned* a, const unsigned* b) {
  int t = threadIdx.x;
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,_,%1,_},{%2,0,%3,0},{%4,%5},{0f3F800000,0f00000000,0f40000000,0f00000000};"
    : "=f"(d[2*t]), "=f"(d[2*t+1]) : "r"(a[2*t]), "r"(a[2*t+1]), "r"(b[2*t]), "r"(b[2*t+1]));
}
