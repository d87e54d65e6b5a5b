// Exact results in f64: a sum that f64 does not hold is rounded to odd, after which one rounding to a format at least
// two bits narrower equals rounding the exact sum (arithmetic/rounding.py).
#pragma once
#include "float.h"

#define MAGNITUDE64 0x7fffffffffffffffu
#define INFINITY64 0x7ff0000000000000u
INLINE U64 magnitude64(F64 a) { return (U64)a & MAGNITUDE64; }
INLINE U64 is_finite64(F64 a) { return (U64)(magnitude64(a) < INFINITY64); }
INLINE F64 wide_f32(U32 a) { return __builtin_convertvector((F32)a, F64); }
INLINE F64 exact_sum(F64 a, F64 b) {
  const F64 total = a + b, part = total - a, error = (a - (total - part)) + (b - part);
  const U64 bits = (U64)total;
  const U64 is_inexact = (U64)(error != 0.0) & is_finite64(error) & (U64)((bits & 1u) == 0u);
  const U64 grows = (U64)((I64)(error > 0.0) == (I64)(total > 0.0));
  return (F64)(bits + (is_inexact & ((grows & 2u) - 1u)));
}
