// Intrinsics of cuda_fp16.h and cuda_bf16.h.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

extern "C" __global__ void half_functions(__half* out, const __half* in, int n) {
  int i = threadIdx.x;
  if (i >= n) return;
  __half x = in[i];
  out[i] = hexp(x);
  out[n + i] = hrcp(x);
  out[2 * n + i] = hsqrt(x);
  out[3 * n + i] = hexp2(x);
  out[4 * n + i] = hlog(x);
  out[5 * n + i] = hrsqrt(x);
  out[6 * n + i] = hfloor(x);
  out[7 * n + i] = __hdiv(x, __float2half(3.0f));
}
extern "C" __global__ void half2_functions(__half2* out, const __half2* in, int n) {
  int i = threadIdx.x;
  if (i >= n) return;
  __half2 x = in[i], y = in[(i + 1) % n];
  out[i] = h2exp(x);
  out[n + i] = h2rcp(x);
  out[2 * n + i] = h2sqrt(x);
  out[3 * n + i] = __hfma2(x, y, x);
  out[4 * n + i] = __hmax2(x, y);
  out[5 * n + i] = h2log2(y);
  out[6 * n + i] = __hgt2(x, y);
  out[7 * n + i] = __hadd2_sat(x, y);
}
extern "C" __global__ void bfloat_functions(__nv_bfloat16* out, const __nv_bfloat16* in, int n) {
  int i = threadIdx.x;
  if (i >= n) return;
  __nv_bfloat16 x = in[i];
  out[i] = hexp(x);
  out[n + i] = hrcp(x);
  out[2 * n + i] = hsqrt(x);
  out[3 * n + i] = __hmul(x, in[(i + 1) % n]);
  out[4 * n + i] = hexp2(x);
  out[5 * n + i] = hlog2(x);
  out[6 * n + i] = __hfma(x, x, x);
}
extern "C" __global__ void half_tanh(__half* out, const __half* in, __nv_bfloat16* bout, const __nv_bfloat16* bin) {
  int i = threadIdx.x;
  asm("tanh.approx.f16 %0, %1;" : "=h"(*(unsigned short*)(out + i)) : "h"(*(const unsigned short*)(in + i)));
  asm("tanh.approx.f16x2 %0, %1;" : "=r"(*(unsigned*)(out + 64 + 2 * i)) : "r"(*(const unsigned*)(in + 2 * i)));
#if __CUDA_ARCH__ >= 900
  asm("tanh.approx.bf16 %0, %1;" : "=h"(*(unsigned short*)(bout + i)) : "h"(*(const unsigned short*)(bin + i)));
  asm("ex2.approx.ftz.bf16x2 %0, %1;" : "=r"(*(unsigned*)(bout + 64 + 2 * i)) : "r"(*(const unsigned*)(bin + 2 * i)));
#endif
}
