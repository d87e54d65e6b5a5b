// bf16 as raw 16-bit halves of 32-bit words. Eight of them travel as one 16-byte uint4.
// Written without <cuda_bf16.h>: the source then compiles in milliseconds and to the same PTX under every NVRTC.
#pragma once

namespace g4kv {

typedef unsigned short bf16_bits;

__device__ __forceinline__ float bf16_to_float(bf16_bits bits) { return __uint_as_float((unsigned)bits << 16); }

// The lower half of a word is the element with the lower index.
__device__ __forceinline__ float low_half(unsigned word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high_half(unsigned word) { return __uint_as_float(word & 0xffff0000u); }

__device__ __forceinline__ void unpack8(uint4 packed, float (&values)[8]) {
  const unsigned words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = low_half(words[i]);
    values[2 * i + 1] = high_half(words[i]);
  }
}

// Round to nearest even, one instruction a pair (PTX ISA: the first source goes to the upper half).
__device__ __forceinline__ unsigned pack2(float low, float high) {
  unsigned word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

__device__ __forceinline__ bf16_bits float_to_bf16(float value) { return (bf16_bits)pack2(value, 0.0f); }

__device__ __forceinline__ uint4 pack8(const float (&values)[8]) {
  return make_uint4(pack2(values[0], values[1]), pack2(values[2], values[3]), pack2(values[4], values[5]),
                    pack2(values[6], values[7]));
}

}  // namespace g4kv
