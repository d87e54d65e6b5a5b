// f32 instructions: IEEE operations of the host's units, with the hardware's one NaN and its order of signed zeros.
#include "float.h"

BINARY(add_f32, U32, U32, U32, sum(a, b))
BINARY(sub_f32, U32, U32, U32, difference(a, b))
BINARY(mul_f32, U32, U32, U32, product(a, b))
TERNARY(fma_rn_f32, U32, U32, U32, U32, fused(a, b, c))
BINARY(add_sat_f32, U32, U32, U32, saturated(sum(a, b)))
BINARY(sub_sat_f32, U32, U32, U32, saturated(difference(a, b)))
BINARY(mul_sat_f32, U32, U32, U32, saturated(product(a, b)))
TERNARY(fma_rn_sat_f32, U32, U32, U32, U32, saturated(fused(a, b, c)))
// A sum of two normal numbers that lands among the subnormals is exact, so the rounded sum tells.
BINARY(add_ftz_f32, U32, U32, U32, flushed(sum(flushed(a), flushed(b))))
BINARY(sub_ftz_f32, U32, U32, U32, flushed(difference(flushed(a), flushed(b))))
BINARY(div_rn_f32, U32, U32, U32, canonical((F32)a / (F32)b))
UNARY(rcp_rn_f32, U32, U32, canonical((F32)(1.0f) / (F32)a))
UNARY(sqrt_rn_f32, U32, U32, canonical(__builtin_elementwise_sqrt((F32)a)))
BINARY(max_f32, U32, U32, U32, maximum(a, b))
BINARY(min_f32, U32, U32, U32, minimum(a, b))
BINARY(max_ftz_f32, U32, U32, U32, maximum(flushed(a), flushed(b)))
BINARY(min_ftz_f32, U32, U32, U32, minimum(flushed(a), flushed(b)))
BINARY(max_NaN_f32, U32, U32, U32, with_nan(a, b, maximum(a, b)))
BINARY(min_NaN_f32, U32, U32, U32, with_nan(a, b, minimum(a, b)))
UNARY(neg_f32, U32, U32, negated(a))
UNARY(abs_f32, U32, U32, absolute(a))
UNARY(neg_ftz_f32, U32, U32, negated(flushed(a)))
UNARY(abs_ftz_f32, U32, U32, absolute(flushed(a)))
BINARY(copysign_f32, U32, U32, U32, (a & SIGN) | (b & MAGNITUDE))

#define COMPARE(name, condition)                         \
  BINARY(setp_##name##_f32, Mask, U32, U32, ({           \
           F32 x = (F32)a, y = (F32)b;                   \
           pack32((U32)(condition));                     \
         }))                                             \
  BINARY(setp_##name##_ftz_f32, Mask, U32, U32, ({       \
           F32 x = (F32)flushed(a), y = (F32)flushed(b); \
           pack32((U32)(condition));                     \
         }))
FLOAT_COMPARISONS(COMPARE)

// ---- conversions -------------------------------------------------------------------------------------------------

// An integral f32 as an integer: cut to the type's range, 0 for NaN.
INLINE U32 to_signed(F32 value) {
  U32 below = (U32)(value < -2147483648.0f), above = (U32)(value >= 2147483648.0f), nan = (U32)(value != value);
  F32 inside = (F32)((U32)value & ~(below | above | nan));
  U32 result = (U32) __builtin_convertvector(inside, I32);
  return select32(below, (U32)(SIGN), select32(above, (U32)(MAGNITUDE), result));
}
INLINE U32 to_unsigned(F32 value) {
  U32 below = (U32)(value < 0.0f), above = (U32)(value >= 4294967296.0f), nan = (U32)(value != value);
  F32 inside = (F32)((U32)value & ~(below | above | nan));
  U32 result = low32((U64) __builtin_convertvector(inside, I64));
  return select32(above, (U32)(ALL_LANES), result);
}

BINARY(cvt_rn_bf16x2_f32, U32, U32, U32, (to_bf16(a) << 16) | to_bf16(b))
UNARY(cvt_rn_bf16_f32, U32, U32, to_bf16(a))
UNARY(cvt_sat_f32_f32, U32, U32, saturated(a))
UNARY(cvt_f32_bf16, U32, U32, a << 16)
BINARY(cvt_rn_f16x2_f32, U32, U32, U32, (to_f16(a) << 16) | to_f16(b))
UNARY(cvt_rn_f16_f32, U32, U32, to_f16(a))
UNARY(cvt_f32_f16, U32, U32, from_f16(a))
UNARY(cvt_rn_f32_s32, U32, U32, (U32) __builtin_convertvector((I32)a, F32))
UNARY(cvt_rn_f32_u32, U32, U32, (U32) __builtin_convertvector(a, F32))
#define ROUNDED(mode, round)                                                              \
  UNARY(cvt_##mode##_f32_f32, U32, U32, canonical(__builtin_elementwise_##round((F32)a))) \
  UNARY(cvt_##mode##_s32_f32, U32, U32, to_signed(__builtin_elementwise_##round((F32)a))) \
  UNARY(cvt_##mode##_u32_f32, U32, U32, to_unsigned(__builtin_elementwise_##round((F32)a)))
ROUNDED(rni, roundeven)
ROUNDED(rzi, trunc)
ROUNDED(rmi, floor)
ROUNDED(rpi, ceil)
