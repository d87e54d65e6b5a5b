// Conversions to and from narrow types: tf32, 8-bit floats (satfinite), integers that saturate; dot products, sums with
// carries, and what is seldom asked for.
#include "exact.h"

// Half away from zero, or to even, on the lower 13 bits; infinities and NaN as arithmetic/conversions.py has them.
INLINE U32 to_tf32(U32 a) {
  const U32 is_special = (U32)((a & INFINITY32) == INFINITY32);
  const U32 rounded = (a & SIGN) | (((a & MAGNITUDE) + 0x1000u) & ~0x1fffu);
  return select32(is_special, a & ~0x1fffu, rounded);
}
INLINE U32 to_tf32_even(U32 a) {
  return select32(is_nan(a), (U32)(NAN32 & ~0x1fffu), (a + 0xfffu + (a >> 13 & 1u)) & ~0x1fffu);
}
UNARY(cvt_rna_tf32_f32, U32, U32, to_tf32(a))
UNARY(cvt_rn_tf32_f32, U32, U32, to_tf32_even(a))

// ---- 8-bit floats ------------------------------------------------------------------------------------------------

// Digits of the mantissa, the exponent that is 0 in the code, the largest finite code, and the f32 whose last place is
// that of subnormals.
typedef struct {
  u32 digits, bias, largest;
  f32 step;
} Small;
static const Small E4M3 = {3, 120, 0x7e, 16384.0f}, E5M2 = {2, 112, 0x7b, 128.0f};
INLINE U32 to_small(U32 a, Small form, int relu) {
  const U32 size = a & MAGNITUDE;
  const u32 cut = 23 - form.digits;
  const U32 rounded = ((size + ((1u << (cut - 1)) - 1u) + (size >> cut & 1u)) >> cut) - (form.bias << form.digits);
  const F32 step = (F32)(form.step);
  const U32 tiny = (U32)((F32)size + step) - (U32)step;
  U32 code = select32((U32)(size < (form.bias + 1) << 23), tiny, rounded);
  code = select32((U32)(code > form.largest), (U32)(form.largest), code);
  code = select32(is_nan(a), (U32)(0x7fu), code | (a >> 24 & 0x80u));
  return relu ? code & ~(U32)(0u - (code >> 7 & 1u)) : code;
}
INLINE U32 pair_of_small(U32 high, U32 low, Small form, int relu) {
  return to_small(high, form, relu) << 8 | to_small(low, form, relu);
}
// The half of an 8-bit float: exact.
INLINE U32 half_of_e4m3(U32 code) {
  const U32 magnitude = code & 0x7fu;
  const U32 half = to_f16((U32)((F32)(magnitude << 20) * 0x1p120f)) | (code & 0x80u) << 8;
  return select32((U32)(magnitude == 0x7fu), (U32)(NAN16), half);
}
INLINE U32 half_of_e5m2(U32 code) {
  return select32((U32)((code & 0x7fu) > 0x7cu), (U32)(NAN16), (code & 0xffu) << 8);
}
INLINE U32 relu16(U32 half) { return half & ~(U32)(0u - (half >> 15 & 1u)); }
#define SMALL(name, form, widened)                                                                               \
  BINARY(cvt_rn_satfinite_##name##x2_f32, U32, U32, U32, pair_of_small(a, b, form, 0))                           \
  BINARY(cvt_rn_satfinite_relu_##name##x2_f32, U32, U32, U32, pair_of_small(a, b, form, 1))                      \
  UNARY(cvt_rn_satfinite_##name##x2_f16x2, U32, U32,                                                             \
        pair_of_small(from_f16(a >> 16), from_f16(a & 0xffffu), form, 0))                                        \
  UNARY(cvt_rn_satfinite_relu_##name##x2_f16x2, U32, U32,                                                        \
        pair_of_small(from_f16(a >> 16), from_f16(a & 0xffffu), form, 1))                                        \
  UNARY(cvt_rn_f16x2_##name##x2, U32, U32, widened(a >> 8) << 16 | widened(a & 0xffu))                           \
  UNARY(cvt_rn_relu_f16x2_##name##x2, U32, U32, relu16(widened(a >> 8)) << 16 | relu16(widened(a & 0xffu)))
SMALL(e4m3, E4M3, half_of_e4m3)
SMALL(e5m2, E5M2, half_of_e5m2)

// ---- results that are never negative -----------------------------------------------------------------------------

UNARY(relu_16, U32, U32, relu16(a))
UNARY(relu_16x2, U32, U32, relu16(a >> 16) << 16 | relu16(a & 0xffffu))

// ---- integers ----------------------------------------------------------------------------------------------------

INLINE U32 clamped(U32 a, i32 least, i32 greatest) {
  const I32 low = (I32)(least), high = (I32)(greatest);
  return (U32)__builtin_elementwise_min(__builtin_elementwise_max((I32)a, low), high);
}
INLINE U32 clamped_above(U32 a, u32 greatest) { return __builtin_elementwise_min(a, (U32)(greatest)); }
// Of s32 and u32; results of 8 and 16 bits lie in 16.
UNARY(clamp_u8_s32, U32, U32, clamped(a, 0, 255))
UNARY(clamp_s8_s32, U32, U32, clamped(a, -128, 127) & 0xffffu)
UNARY(clamp_u16_s32, U32, U32, clamped(a, 0, 65535))
UNARY(clamp_s16_s32, U32, U32, clamped(a, -32768, 32767) & 0xffffu)
UNARY(clamp_u32_s32, U32, U32, clamped(a, 0, 0x7fffffff))
UNARY(clamp_u8_u32, U32, U32, clamped_above(a, 255))
UNARY(clamp_s8_u32, U32, U32, clamped_above(a, 127))
UNARY(clamp_u16_u32, U32, U32, clamped_above(a, 65535))
UNARY(clamp_s16_u32, U32, U32, clamped_above(a, 32767))
UNARY(clamp_s32_u32, U32, U32, clamped_above(a, 0x7fffffff))
TERNARY(cvt_pack_sat_u8_s32_b32, U32, U32, U32, U32, c << 16 | clamped(a, 0, 255) << 8 | clamped(b, 0, 255))
TERNARY(cvt_pack_sat_s8_s32_b32, U32, U32, U32, U32,
        c << 16 | (clamped(a, -128, 127) & 255u) << 8 | (clamped(b, -128, 127) & 255u))
BINARY(cvt_pack_sat_u16_s32, U32, U32, U32, clamped(a, 0, 65535) << 16 | clamped(b, 0, 65535))
BINARY(cvt_pack_sat_s16_s32, U32, U32, U32,
       clamped(a, -32768, 32767) << 16 | (clamped(b, -32768, 32767) & 0xffffu))

// Dot products of bytes, added to c.
INLINE U32 part_of(U32 a, int by, int bits, int is_signed) {
  const U32 raised = a << (32 - by - bits);
  return is_signed ? (U32)((I32)raised >> (32 - bits)) : raised >> (32 - bits);
}
INLINE U32 dot4(U32 a, U32 b, U32 c, int a_signed, int b_signed) {
  for (int k = 0; k < 32; k += 8) c += part_of(a, k, 8, a_signed) * part_of(b, k, 8, b_signed);
  return c;
}
INLINE U32 dot2(U32 a, U32 b, U32 c, int a_signed, int b_signed, int from) {
  for (int k = 0; k < 2; k++) c += part_of(a, 16 * k, 16, a_signed) * part_of(b, from + 8 * k, 8, b_signed);
  return c;
}
#define DOTS(types, a_signed, b_signed)                                                        \
  TERNARY(dp4a_##types, U32, U32, U32, U32, dot4(a, b, c, a_signed, b_signed))                 \
  TERNARY(dp2a_lo_##types, U32, U32, U32, U32, dot2(a, b, c, a_signed, b_signed, 0))           \
  TERNARY(dp2a_hi_##types, U32, U32, U32, U32, dot2(a, b, c, a_signed, b_signed, 16))
DOTS(u32_u32, 0, 0)
DOTS(u32_s32, 0, 1)
DOTS(s32_u32, 1, 0)
DOTS(s32_s32, 1, 1)

// The less and the larger of two 16-bit integers in each half.
INLINE U32 halves_of(U32 a, U32 b, int is_signed, int takes_most) {
  U32 found[2];
  for (int k = 0; k < 2; k++) {
    const U32 x = part_of(a, 16 * k, 16, is_signed), y = part_of(b, 16 * k, 16, is_signed);
    const U32 is_less = is_signed ? (U32)((I32)x < (I32)y) : (U32)(x < y);
    found[k] = select32(takes_most ? ~is_less : is_less, x, y) & 0xffffu;
  }
  return found[1] << 16 | found[0];
}
BINARY(min_u16x2, U32, U32, U32, halves_of(a, b, 0, 0))
BINARY(max_u16x2, U32, U32, U32, halves_of(a, b, 0, 1))
BINARY(min_s16x2, U32, U32, U32, halves_of(a, b, 1, 0))
BINARY(max_s16x2, U32, U32, U32, halves_of(a, b, 1, 1))
BINARY(add_16x2, U32, U32, U32, ((a & 0xffff0000u) + (b & 0xffff0000u)) | ((a + b) & 0xffffu))
UNARY(relu_s32, U32, U32, a & ~(U32)((I32)a >> 31))

// ---- seldom alone -------------------------------------------------------------------------------------------------

BINARY(mul24_lo_u32, U32, U32, U32, (a & 0xffffffu) * (b & 0xffffffu))
BINARY(mul24_lo_s32, U32, U32, U32, part_of(a, 0, 24, 1) * part_of(b, 0, 24, 1))
TERNARY(mad_hi_u32, U32, U32, U32, U32, low32((widen(a) * widen(b)) >> 32) + c)
TERNARY(mad_hi_s32, U32, U32, U32, U32, low32((U64)((widen_signed(a) * widen_signed(b)) >> 32)) + c)
UNARY(cnot_b32, U32, U32, (U32)(a == 0u) & 1u)
TERNARY(slct_b32_s32, U32, U32, U32, U32, select32((U32)((I32)c >= 0), a, b))
TERNARY(slct_b32_f32, U32, U32, U32, U32, select32((U32)((F32)c >= 0.0f), a, b))
// Two f32 in a register of 64 bits.
INLINE U64 pair_of(U32 low, U32 high) { return widen(high) << 32 | widen(low); }
INLINE U32 high32(U64 a) { return low32(a >> 32); }
BINARY(add_f32x2, U64, U64, U64, pair_of(sum(low32(a), low32(b)), sum(high32(a), high32(b))))
BINARY(sub_f32x2, U64, U64, U64, pair_of(difference(low32(a), low32(b)), difference(high32(a), high32(b))))
BINARY(mul_f32x2, U64, U64, U64, pair_of(product(low32(a), low32(b)), product(high32(a), high32(b))))
TERNARY(fma_f32x2, U64, U64, U64, U64,
        pair_of(fused(low32(a), low32(b), low32(c)), fused(high32(a), high32(b), high32(c))))

// ---- carries -----------------------------------------------------------------------------------------------------

// Fields: result, carry, a, b, carry in, whether b is taken away: then a and ~b are added.
HANDLER(add_carry_b32) {
  const U32 a = AT(U32, 2), b = i->field[5] ? ~AT(U32, 3) : AT(U32, 3), first = a + b;
  const U32 total = first + (expand(AT(Mask, 4)) & 1u);
  const Mask carry = pack32((U32)(first < a) | (U32)(total < first));
  (void)w;
  AT(U32, 0) = total;
  AT(Mask, 1) = carry;
  return done(i);
}
HANDLER(add_carry_b64) {
  const U64 a = AT(U64, 2), b = i->field[5] ? ~AT(U64, 3) : AT(U64, 3), first = a + b;
  const U64 total = first + (widen(expand(AT(Mask, 4))) & 1u);
  const Mask carry = pack64((U64)(first < a)) | pack64((U64)(total < first));
  (void)w;
  AT(U64, 0) = total;
  AT(Mask, 1) = carry;
  return done(i);
}
