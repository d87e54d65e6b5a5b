// f16 and bf16 instructions, one value in a register or two: every result is exact and rounded once
// (arithmetic/packed16.py).
#include "exact.h"

enum { F16_FORM, BF16_FORM };
INLINE U32 single(U32 a, int form) { return form == F16_FORM ? from_f16(a) : a << 16; }
INLINE F64 wide(U32 a, int form) { return wide_f32(single(a, form)); }
// The last f32 bit is made odd where bits are cut, so that rounding twice is safe.
INLINE U32 narrow(F64 exact, int form) {
  const F32 nearest = __builtin_convertvector(exact, F32);
  const U64 is_beyond = (U64)(magnitude64(__builtin_convertvector(nearest, F64)) > magnitude64(exact));
  const U32 is_finite = low32(is_finite64(exact));
  const U32 cut = (U32)nearest - (low32(is_beyond) & is_finite & 1u);
  const U32 is_inexact = low32((U64)(__builtin_convertvector((F32)cut, F64) != exact)) & is_finite;
  const U32 odd = cut | (is_inexact & 1u);
  return form == F16_FORM ? to_f16(odd) : to_bf16(odd);
}
INLINE U32 half_sum(U32 a, U32 b, int form) { return narrow(exact_sum(wide(a, form), wide(b, form)), form); }
INLINE U32 half_difference(U32 a, U32 b, int form) { return narrow(exact_sum(wide(a, form), -wide(b, form)), form); }
INLINE U32 half_product(U32 a, U32 b, int form) { return narrow(wide(a, form) * wide(b, form), form); }
INLINE U32 half_fused(U32 a, U32 b, U32 c, int form) {
  return narrow(exact_sum(wide(a, form) * wide(b, form), wide(c, form)), form);
}

INLINE U32 is_nan16(U32 a, int form) { return (U32)((a & 0x7fffu) > (form == F16_FORM ? 0x7c00u : 0x7f80u)); }
// The order of the values as integers, -0 below +0.
INLINE I32 order16(U32 a) { return (I32)((a ^ ((U32)(-(I32)(a >> 15)) & 0x7fffu)) << 16); }
INLINE U32 one_of16(U32 a, U32 b, U32 takes_a, int form, int keeps_nan) {
  const U32 nan_a = is_nan16(a, form), nan_b = is_nan16(b, form);
  const U32 picked = select32(nan_b | (takes_a & ~nan_a), a, b);
  return select32(keeps_nan ? nan_a | nan_b : nan_a & nan_b, (U32)(NAN16), picked);
}
INLINE U32 half_minimum(U32 a, U32 b, int form) { return one_of16(a, b, (U32)(order16(a) <= order16(b)), form, 0); }
INLINE U32 half_maximum(U32 a, U32 b, int form) { return one_of16(a, b, (U32)(order16(a) >= order16(b)), form, 0); }
INLINE U32 half_minimum_nan(U32 a, U32 b, int form) { return one_of16(a, b, (U32)(order16(a) <= order16(b)), form, 1); }
INLINE U32 half_maximum_nan(U32 a, U32 b, int form) { return one_of16(a, b, (U32)(order16(a) >= order16(b)), form, 1); }
INLINE U32 half_negated(U32 a, int form) { return select32(is_nan16(a, form), (U32)(NAN16), a ^ 0x8000u); }
INLINE U32 half_absolute(U32 a, int form) { return select32(is_nan16(a, form), (U32)(NAN16), a & 0x7fffu); }

#define OF_INTEGERS(word, form)                                                                                      \
  UNARY(cvt_rn_##word##_s32, U32, U32, narrow(__builtin_convertvector((I32)a, F64), form))                  \
  UNARY(cvt_rn_##word##_u32, U32, U32, narrow(__builtin_convertvector(a, F64), form))                       \
  UNARY(cvt_rn_##word##_s16, U32, U32, narrow(__builtin_convertvector((I32)(a << 16) >> 16, F64), form))    \
  UNARY(cvt_rn_##word##_u16, U32, U32, narrow(__builtin_convertvector(a, F64), form))
OF_INTEGERS(f16, F16_FORM)
OF_INTEGERS(bf16, BF16_FORM)

#define LOW(a) ((a) & 0xffffu)
#define HIGH(a) ((a) >> 16)
#define UNARY16(name, function, word, form)            \
  UNARY(name##_##word, U32, U32, function(a, form))    \
  UNARY(name##_##word##x2, U32, U32, function(HIGH(a), form) << 16 | function(LOW(a), form))
#define BINARY16(name, function, word, form)                   \
  BINARY(name##_##word, U32, U32, U32, function(a, b, form))   \
  BINARY(name##_##word##x2, U32, U32, U32, function(HIGH(a), HIGH(b), form) << 16 | function(LOW(a), LOW(b), form))
#define TERNARY16(name, function, word, form)                          \
  TERNARY(name##_##word, U32, U32, U32, U32, function(a, b, c, form))  \
  TERNARY(name##_##word##x2, U32, U32, U32, U32,                       \
          function(HIGH(a), HIGH(b), HIGH(c), form) << 16 | function(LOW(a), LOW(b), LOW(c), form))
#define HALVES(word, form)                           \
  BINARY16(add, half_sum, word, form)                \
  BINARY16(sub, half_difference, word, form)         \
  BINARY16(mul, half_product, word, form)            \
  TERNARY16(fma_rn, half_fused, word, form)          \
  BINARY16(min, half_minimum, word, form)            \
  BINARY16(max, half_maximum, word, form)            \
  BINARY16(min_NaN, half_minimum_nan, word, form)    \
  BINARY16(max_NaN, half_maximum_nan, word, form)    \
  UNARY16(neg, half_negated, word, form)             \
  UNARY16(abs, half_absolute, word, form)
HALVES(f16, F16_FORM)
HALVES(bf16, BF16_FORM)

#define COMPARE(name, condition)                                                       \
  BINARY(setp_##name##_f16, Mask, U32, U32, ({                                         \
           F32 x = (F32)single(a, F16_FORM), y = (F32)single(b, F16_FORM);             \
           pack32((U32)(condition));                                                   \
         }))                                                                           \
  BINARY(setp_##name##_bf16, Mask, U32, U32, ({                                        \
           F32 x = (F32)single(a, BF16_FORM), y = (F32)single(b, BF16_FORM);           \
           pack32((U32)(condition));                                                   \
         }))
FLOAT_COMPARISONS(COMPARE)
