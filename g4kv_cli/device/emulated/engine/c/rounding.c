// f32 instructions that need an exact result: directed roundings, and .ftz of what is rounded (arithmetic/rounding.py).
#include "exact.h"

// Toward zero, down or up from the nearest f32, which is at most one step away.
enum { TO_ZERO, DOWN, UP };
INLINE U32 directed(F64 exact, int mode) {
  const F32 nearest = __builtin_convertvector(exact, F32);
  const F64 back = __builtin_convertvector(nearest, F64);
  const U32 bits = (U32)nearest, is_negative = (U32)((I32)bits >> 31);
  const U64 beyond = mode == TO_ZERO ? (U64)(magnitude64(back) > magnitude64(exact))
                     : mode == DOWN  ? (U64)(back > exact)
                                     : (U64)(back < exact);
  const U32 moves = low32(beyond & is_finite64(exact));
  // The step to the number below is one down for positive bits, one up for negative ones.
  const U32 outward = mode == TO_ZERO ? (U32)(0u) : mode == DOWN ? is_negative : ~is_negative;
  return canonical((F32)select32(moves, select32(outward, bits + 1u, bits - 1u), bits));
}
// Toward minus infinity an exactly zero sum is -0 unless both addends are +0.
INLINE U32 directed_sum(F64 exact, U32 both_plus_zero, int mode) {
  const U32 rounded = directed(exact, mode);
  if (mode != DOWN) return rounded;
  return select32(low32((U64)(exact == 0.0)) & ~both_plus_zero, (U32)(SIGN), rounded);
}
INLINE U32 directed_add(U32 a, U32 b, int mode) {
  return directed_sum(exact_sum(wide_f32(a), wide_f32(b)), (U32)((a | b) == 0u), mode);
}
INLINE U32 directed_fma(U32 a, U32 b, U32 c, int mode) {
  const F64 product = wide_f32(a) * wide_f32(b);
  const U32 plus_zero = low32((U64)((U64)product == 0u)) & (U32)(c == 0u);
  return directed_sum(exact_sum(product, wide_f32(c)), plus_zero, mode);
}

#define DIRECTED(word, mode)                                                              \
  BINARY(add_##word##_f32, U32, U32, U32, directed_add(a, b, mode))                       \
  BINARY(sub_##word##_f32, U32, U32, U32, directed_add(a, b ^ SIGN, mode))                \
  BINARY(mul_##word##_f32, U32, U32, U32, directed(wide_f32(a) * wide_f32(b), mode))      \
  TERNARY(fma_##word##_f32, U32, U32, U32, U32, directed_fma(a, b, c, mode))
DIRECTED(rz, TO_ZERO)
DIRECTED(rm, DOWN)
DIRECTED(rp, UP)

// ---- results that are flushed where they were tiny before they were rounded ---------------------------------------

#define FLUSH_LIMIT (0x1p-126 * (1 - 0x1p-25))
INLINE int may_be_tiny(U32 a) { return __builtin_reduce_or((U32)((a & MAGNITUDE) <= 0x00800000u)) != 0; }
INLINE U32 flushed_where(U32 rounded, F64 exact) {
  const U32 is_tiny = low32((U64)((F64)magnitude64(exact) < FLUSH_LIMIT));
  return select32(is_tiny, rounded & SIGN, rounded);
}
INLINE U32 product_ftz(U32 a, U32 b) {
  a = flushed(a);
  b = flushed(b);
  const U32 rounded = product(a, b);
  return may_be_tiny(rounded) ? flushed_where(rounded, wide_f32(a) * wide_f32(b)) : rounded;
}
INLINE U32 fused_ftz(U32 a, U32 b, U32 c) {
  a = flushed(a);
  b = flushed(b);
  c = flushed(c);
  const U32 rounded = fused(a, b, c);
  if (!may_be_tiny(rounded)) return rounded;
  return flushed_where(rounded, exact_sum(wide_f32(a) * wide_f32(b), wide_f32(c)));
}
// No quotient of 24-bit numbers is as near to the limit as an f64's rounding.
INLINE U32 quotient_ftz(U32 a, U32 b) {
  a = flushed(a);
  b = flushed(b);
  const U32 rounded = canonical((F32)a / (F32)b);
  return may_be_tiny(rounded) ? flushed_where(rounded, wide_f32(a) / wide_f32(b)) : rounded;
}

BINARY(mul_ftz_f32, U32, U32, U32, product_ftz(a, b))
TERNARY(fma_rn_ftz_f32, U32, U32, U32, U32, fused_ftz(a, b, c))
BINARY(add_ftz_sat_f32, U32, U32, U32, saturated(flushed(sum(flushed(a), flushed(b)))))
BINARY(sub_ftz_sat_f32, U32, U32, U32, saturated(flushed(difference(flushed(a), flushed(b)))))
BINARY(mul_ftz_sat_f32, U32, U32, U32, saturated(product_ftz(a, b)))
TERNARY(fma_rn_ftz_sat_f32, U32, U32, U32, U32, saturated(fused_ftz(a, b, c)))
BINARY(div_rn_ftz_f32, U32, U32, U32, quotient_ftz(a, b))
UNARY(rcp_rn_ftz_f32, U32, U32, quotient_ftz((U32)(0x3f800000u), a))
UNARY(sqrt_rn_ftz_f32, U32, U32, canonical(__builtin_elementwise_sqrt((F32)flushed(a))))
