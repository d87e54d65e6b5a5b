// What instructions on f32 have in common.
#pragma once
#include "elementwise.h"

#define NAN32 0x7fffffffu
#define MAGNITUDE 0x7fffffffu
#define INFINITY32 0x7f800000u
#define SIGN 0x80000000u

INLINE U32 is_nan(U32 a) { return (U32)((a & MAGNITUDE) > INFINITY32); }
INLINE U32 canonical(F32 value) { return select32((U32)(value != value), (U32)(NAN32), (U32)value); }
// Subnormals become zeros of their sign.
INLINE U32 flushed(U32 a) { return select32((U32)((a & INFINITY32) == 0u), a & SIGN, a); }
INLINE U32 saturated(U32 a) {
  F32 value = (F32)a, one = (F32)(1.0f);
  U32 cut = select32((U32)(value < one), a, (U32)one);
  return cut & (U32)(value > 0.0f);
}
INLINE U32 sum(U32 a, U32 b) { return canonical((F32)a + (F32)b); }
INLINE U32 difference(U32 a, U32 b) { return canonical((F32)a - (F32)b); }
INLINE U32 product(U32 a, U32 b) { return canonical((F32)a * (F32)b); }
INLINE U32 fused(U32 a, U32 b, U32 c) { return canonical(__builtin_elementwise_fma((F32)a, (F32)b, (F32)c)); }

// The order of floats as integers, -0 below +0.
INLINE I32 order(U32 a) { return (I32)(a ^ ((U32)((I32)a >> 31) >> 1)); }
INLINE U32 pick(U32 a, U32 b, U32 takes_a) {
  U32 nan_a = is_nan(a), nan_b = is_nan(b);
  U32 picked = select32(nan_a, b, select32(nan_b, a, select32(takes_a, a, b)));
  return select32(nan_a & nan_b, (U32)(NAN32), picked);
}
INLINE U32 maximum(U32 a, U32 b) { return pick(a, b, (U32)(order(a) > order(b))); }
INLINE U32 minimum(U32 a, U32 b) { return pick(a, b, (U32)(order(a) < order(b))); }
INLINE U32 with_nan(U32 a, U32 b, U32 value) { return select32(is_nan(a) | is_nan(b), (U32)(NAN32), value); }
INLINE U32 negated(U32 a) { return select32(is_nan(a), (U32)(NAN32), a ^ SIGN); }
INLINE U32 absolute(U32 a) { return select32(is_nan(a), (U32)(NAN32), a & MAGNITUDE); }

typedef _Float16 F16 __attribute__((ext_vector_type(32), aligned(2)));
typedef u16 U16 __attribute__((ext_vector_type(32), aligned(2)));
#define NAN16 0x7fffu

INLINE U32 to_bf16(U32 a) {
  U32 rounded = (a + 0x7fffu + ((a >> 16) & 1u)) >> 16;
  return select32(is_nan(a), (U32)(NAN16), rounded);
}
INLINE U32 to_f16(U32 a) {
  U16 halves = (U16) __builtin_convertvector((F32)a, F16);
  return select32(is_nan(a), (U32)(NAN16), __builtin_convertvector(halves, U32));
}
INLINE U32 from_f16(U32 a) {
  F16 halves = (F16) __builtin_convertvector(a, U16);
  return canonical(__builtin_convertvector(halves, F32));
}
