// The approximate functions of the special-function unit, from its recorded tables: floor(C0[s] + C1[s] x + C2[s]
// sq(x)).
//
// Tables hold the constant, the linear and the quadratic coefficient of all segments one after another, scaled to units
// of the result's last place; square_table holds sq(x), x of 17 bits, in units of 2^19. All terms are exact in f64.
#include "elementwise.h"

#define INFINITY32 0x7f800000u
#define NAN32 0x7fffffffu
#define SIGN 0x80000000u

INLINE f64 segment_value(const f64 *table, int segments, u32 segment, u32 x, const u16 *squares) {
  return table[segments + segment] * (f64)x + table[segment] + table[2 * segments + segment] * (f64)squares[x];
}
INLINE u32 canonical_bits(f32 value) { return value != value ? NAN32 : bits_of(value); }
INLINE i64 floored(f64 value) {
  i64 cut = (i64)value;
  return (f64)cut > value ? cut - 1 : cut;
}
INLINE int is_subnormal(u32 bits) { return (bits & INFINITY32) == 0 && (bits & ~SIGN) != 0; }

// 2^x: the fraction of |x| is cut to 23 bits, a negative x takes its one's complement. Only the look-up goes lane by
// lane.
INLINE U32 ex2(const Launch *c, U32 a) {
  const F32 x = (F32)a;
  const U32 nan = (U32)(x != x);
  // Beyond 200 the result is 0 or infinity anyway, and the product fits.
  const U32 low = (U32)(x < -200.0f), high = (U32)(x > 200.0f);
  const U32 inside = select32(low, (U32)(F32)(-200.0f), select32(high, (U32)(F32)(200.0f), a)) & ~nan;
  I32 fixed = __builtin_convertvector((F32)inside * 8388608.0f, I32);
  fixed += (I32)((U32)(fixed < 0) & (U32)((fixed & 0x7fffff) != 0));
  const U32 mantissas = (U32)fixed & 0x7fffffu;
  u32 mantissa[LANES], value[LANES];
  COPY(mantissa, &mantissas, sizeof mantissa);
  for (int l = 0; l < LANES; l++) {
    const u32 segment = mantissa[l] >> 17, rest = mantissa[l] & 0x1ffffu;
    value[l] = (u32)(i32)segment_value(c->ex2_table, 64, segment, rest, c->square_table);
  }
  U32 values;
  COPY(&values, value, sizeof value);
  const I32 power = fixed >> 23;
  U32 result = ((U32)(power + 126) << 23) + values;
  result = select32((U32)(power > 127), (U32)(INFINITY32), result) & ~(U32)(power < -126);
  return select32(nan, (U32)(NAN32), result);
}
// Below -126 the form without .ftz halves the argument and squares the result.
INLINE U32 ex2_full(const Launch *c, U32 a) {
  const U32 is_low = (U32)((F32)a < -126.0f);
  const U32 power = ex2(c, select32(is_low, (U32)((F32)a * 0.5f), a));
  return select32(is_low, (U32)((F32)power * (F32)power), power);
}

INLINE u32 rsqrt_lane(const Launch *c, u32 bits) {
  u32 exponent = (bits >> 23) & 255u, mantissa = bits & 0x7fffffu, sign = bits & SIGN;
  if (exponent == 0) return INFINITY32 | sign;
  if (exponent == 255) return mantissa || sign ? NAN32 : 0;
  if (sign) return NAN32;
  i32 half = ((i32)exponent - 127) >> 1;  // floor: what is left of the argument lies in [1, 4)
  i64 value = (i64)segment_value(c->rsqrt_table, 128, (bits >> 17) & 127u, mantissa & 0x1ffffu, c->square_table);
  i64 root = mantissa == 0 && (exponent & 1) ? (i64)127 << 23 : ((i64)125 << 23) + value;
  return (u32)(root - (i64)half * (1 << 23));
}
// Subnormals are scaled by 2^24, the result by 2^12.
INLINE u32 rsqrt_full_lane(const Launch *c, u32 bits) {
  if (!is_subnormal(bits)) return rsqrt_lane(c, bits);
  return canonical_bits(f32_of(rsqrt_lane(c, canonical_bits(f32_of(bits) * 16777216.0f))) * 4096.0f);
}

INLINE u32 sqrt_lane(const Launch *c, u32 bits) {
  u32 exponent = (bits >> 23) & 255u, mantissa = bits & 0x7fffffu, sign = bits & SIGN;
  if (exponent == 0) return sign;
  if (exponent == 255) return mantissa || sign ? NAN32 : INFINITY32;
  if (sign) return NAN32;
  i32 half = ((i32)exponent - 127) >> 1;
  i64 value = (i64)segment_value(c->sqrt_table, 128, (bits >> 17) & 127u, mantissa & 0x1ffffu, c->square_table);
  return (u32)(((i64)126 << 23) + value + (i64)half * (1 << 23));
}
INLINE u32 sqrt_full_lane(const Launch *c, u32 bits) {
  if (!is_subnormal(bits)) return sqrt_lane(c, bits);
  u32 root = sqrt_lane(c, canonical_bits(f32_of(bits) * 16777216.0f));
  return canonical_bits(f32_of(root) * 0x1p-12f);
}

// Its x has 16 bits: sq(2 x) of 17 bits is four times theirs.
INLINE u32 rcp_lane(const Launch *c, u32 bits) {
  const u32 exponent = (bits >> 23) & 255u, mantissa = bits & 0x7fffffu, sign = bits & SIGN;
  if (exponent == 0) return INFINITY32 | sign;
  if (exponent == 255) return mantissa ? NAN32 : sign;
  const u32 segment = mantissa >> 16, x = mantissa & 0xffffu;
  const f64 *table = c->rcp_table;
  const f64 bend = table[256 + segment] * (f64)c->square_table[2 * x];
  const i64 value = (i64)(table[128 + segment] * (f64)x + table[segment] + bend);
  const i64 result = (253 - (i64)exponent) * (1 << 23) + (value - (1 << 23));
  return (result < 1 << 23 ? 0 : (u32)result) | sign;
}
// The argument and the result carry the same scale.
INLINE u32 rcp_full_lane(const Launch *c, u32 bits) {
  const f32 size = f32_of(bits & ~SIGN), scale = size > 0x1p126f ? 0.25f : size < 0x1p-126f ? 16777216.0f : 1.0f;
  return canonical_bits(f32_of(rcp_lane(c, canonical_bits(f32_of(bits) * scale))) * scale);
}

// Quotients multiply the reciprocal of the scaled divisor by the equally scaled dividend; those with .ftz flush at
// every step, those of div.approx scale no large divisor.
INLINE u32 scaled_quotient(const Launch *c, u32 a, u32 b, f32 scale) {
  const u32 reciprocal = rcp_lane(c, canonical_bits(f32_of(b) * scale));
  return canonical_bits(f32_of(reciprocal) * (f32_of(a) * scale));
}
INLINE u32 div_full_lane(const Launch *c, u32 a, u32 b) {
  const f32 size = f32_of(b & ~SIGN);
  return scaled_quotient(c, a, b, size > 0x1p126f ? 0.25f : size < 0x1p-126f ? 16777216.0f : 1.0f);
}
INLINE u32 div_lane(const Launch *c, u32 a, u32 b) {
  return scaled_quotient(c, a, b, f32_of(b & ~SIGN) < 0x1p-126f ? 16777216.0f : 1.0f);
}
INLINE u32 flushed_lane(u32 bits) { return bits & INFINITY32 ? bits : bits & SIGN; }
INLINE u32 times_ftz(u32 a, u32 b) {
  const f64 exact = (f64)f32_of(flushed_lane(a)) * (f64)f32_of(flushed_lane(b));
  const u32 rounded = canonical_bits(f32_of(flushed_lane(a)) * f32_of(flushed_lane(b)));
  return (exact < 0 ? -exact : exact) < 0x1p-126 * (1 - 0x1p-25) ? rounded & SIGN : rounded;
}
INLINE u32 div_ftz_lane(const Launch *c, u32 a, u32 b) { return times_ftz(a, rcp_lane(c, b)); }
INLINE u32 div_full_ftz_lane(const Launch *c, u32 a, u32 b) {
  const u32 scale = f32_of(b & ~SIGN) > 0x1p126f ? 0x3e800000u : 0x3f800000u;
  return times_ftz(rcp_lane(c, times_ftz(b, scale)), times_ftz(a, scale));
}

// A positive value of so many fraction bits, cut to f32.
INLINE u32 cut_to_f32(u64 size, int fraction_bits) {
  if (!size) return 0;
  const int leading = 63 - __builtin_clzll(size);
  const u64 cut = leading >= 23 ? size >> (leading - 23) : size << (23 - leading);
  return ((u32)(leading - fraction_bits + 126) << 23) + (u32)cut;
}
// Sine and cosine (arithmetic/mufu_trig.py): the argument in revolutions, cut to f32, of which 25 fraction bits count:
// two for the quadrant, 6 for the segment, 17 below it. Quadrants that run backwards take the one's complement.
INLINE u32 wave(const Launch *c, u32 bits, u32 quarters, u32 *is_lower) {
  f64 turns = (f64)f32_of(bits & ~SIGN) * (f64)0.15915494f;
  u64 raw;
  COPY(&raw, &turns, 8);
  raw &= ~(u64)0x1fffffff;
  COPY(&turns, &raw, 8);
  const u32 fixed = turns < 0x1p24 ? (u32)((u64)(turns * 0x1p25) & 0x1ffffffu) : 0;
  const u32 quadrant = (fixed >> 23) + quarters, part = fixed & 0x7fffffu;
  const u32 angle = quadrant & 1 ? 0x7fffffu - part : part;
  *is_lower = quadrant & 2 ? SIGN : 0;
  return cut_to_f32((u64)segment_value(c->sin_table, 64, angle >> 17, angle & 0x1ffffu, c->square_table), 37);
}
INLINE u32 sin_lane(const Launch *c, u32 bits) {
  u32 is_lower;
  const u32 size = wave(c, bits, 0, &is_lower);
  return (bits & INFINITY32) == INFINITY32 ? NAN32 : size | ((bits & SIGN) ^ is_lower);
}
INLINE u32 cos_lane(const Launch *c, u32 bits) {
  u32 is_lower;
  const u32 size = wave(c, bits, 1, &is_lower);
  return (bits & INFINITY32) == INFINITY32 ? NAN32 : size | is_lower;
}

// Exponent plus table in fixed point with 36 fraction bits, then cut to 24 bits.
INLINE u32 lg2_lane(const Launch *c, u32 bits) {
  u32 exponent = (bits >> 23) & 255u, mantissa = bits & 0x7fffffu, sign = bits & SIGN;
  if (exponent == 255) return mantissa || sign ? NAN32 : INFINITY32;
  if (exponent == 0) return SIGN | INFINITY32;
  if (sign) return NAN32;
  if (bits == 0x3f800000u) return 0;
  i64 part = floored(segment_value(c->lg2_table, 64, mantissa >> 17, mantissa & 0x1ffffu, c->square_table));
  i64 fixed = ((i64)exponent - 127) * ((i64)1 << 36) + part;
  return cut_to_f32(fixed < 0 ? ~(u64)fixed : (u64)fixed, 36) | (fixed < 0 ? SIGN : 0);
}
INLINE u32 lg2_full_lane(const Launch *c, u32 bits) {
  if (!is_subnormal(bits)) return lg2_lane(c, bits);
  return canonical_bits(f32_of(lg2_lane(c, canonical_bits(f32_of(bits) * 16777216.0f))) - 24.0f);
}

// tanh: below 2^-8 the argument itself, from 8 on 1; between, each binade has 1 to 16 segments.
#define TANH_FIRST (-8)
#define TANH_BINADES 11
#define TANH_SEGMENTS 16
INLINE u32 tanh_lane(const Launch *c, u32 bits) {
  static const u8 segment_bits[TANH_BINADES] = {0, 0, 0, 1, 1, 2, 2, 2, 3, 4, 3};
  const u32 size = bits & ~SIGN, sign = bits & SIGN, mantissa = bits & 0x7fffffu;
  const i32 exponent = (i32)(size >> 23) - 127, row = exponent - TANH_FIRST;
  if (size > INFINITY32) return NAN32;
  if (row < 0) return bits;
  if (row >= TANH_BINADES) return sign | 0x3f800000u;
  const u32 shift = 23u - segment_bits[row], x = mantissa >> (shift - 17) & 0x1ffffu;
  const f64 *at = c->tanh_table + row * TANH_SEGMENTS + (mantissa >> shift);
  const int next = TANH_BINADES * TANH_SEGMENTS;
  const f64 value = at[0] + at[next] * (f64)x + at[2 * next] * (f64)c->square_table[x];
  return cut_to_f32((u64)value, 41 - (exponent < -1 ? exponent : -1) - 1) | sign;
}
// The f32 result of a half, cut; what is too large for f16 is infinite.
INLINE u32 half_cut(u32 bits) {
  const u32 size = bits & ~SIGN, sign = bits >> 16 & 0x8000u;
  if (size > INFINITY32) return 0x7fffu;
  if (size >= 0x47800000u) return sign | 0x7c00u;
  const f32 nearest = (f32)(_Float16)f32_of(size);
  const _Float16 half = (_Float16)f32_of(size);
  u16 found;
  COPY(&found, &half, 2);
  return sign | (u32)(found - (nearest > f32_of(size)));
}
INLINE u32 float_of_half(u32 a) {
  const u16 raw = (u16)a;
  _Float16 half;
  COPY(&half, &raw, 2);
  return canonical_bits((f32)half);
}
INLINE u32 ex2_lane(const Launch *c, u32 bits) {
  const f32 x = f32_of(bits);
  if (x != x) return NAN32;
  if (x < -126.0f) return 0;
  if (x >= 128.0f) return INFINITY32;
  i32 fixed = (i32)(x * 8388608.0f);
  if (fixed < 0 && fixed & 0x7fffff) fixed--;
  const u32 mantissa = (u32)fixed & 0x7fffffu;
  const i64 value = (i64)segment_value(c->ex2_table, 64, mantissa >> 17, mantissa & 0x1ffffu, c->square_table);
  return (u32)(((i64)(fixed >> 23) + 126) * (1 << 23) + value);
}
#define HALF_LANES(name, lane)                                                                                       \
  INLINE u32 name##_f16_lane(const Launch *c, u32 a) { return half_cut(lane(c, float_of_half(a))); }                 \
  INLINE u32 name##_bf16_lane(const Launch *c, u32 a) { return lane(c, a << 16) >> 16; }                             \
  INLINE u32 name##_f16x2_lane(const Launch *c, u32 a) {                                                             \
    return name##_f16_lane(c, a >> 16) << 16 | name##_f16_lane(c, a);                                                \
  }                                                                                                                  \
  INLINE u32 name##_bf16x2_lane(const Launch *c, u32 a) {                                                            \
    return name##_bf16_lane(c, a >> 16) << 16 | name##_bf16_lane(c, a);                                              \
  }
HALF_LANES(tanh, tanh_lane)
HALF_LANES(ex2, ex2_lane)

// Of f64: the unit sees and gives the upper word alone (arithmetic/mufu_double.py), by the tables of f32.
#define INFINITY_WORD 0x7ff00000u
INLINE u32 upper_word(i32 exponent, u32 result) {
  const i32 moved = (i32)(result >> 23) - 127 + exponent;
  return moved <= 0 ? 0 : (u32)moved << 20 | (result & 0x7fffffu) >> 3;
}
INLINE u64 rcp64_lane(const Launch *c, u64 a) {
  const u32 high = (u32)(a >> 32), sign = high & SIGN, mantissa = (high & 0xfffffu) << 3;
  const i32 exponent = (i32)(high >> 20 & 0x7ffu);
  if ((high & ~SIGN) > INFINITY_WORD) return (u64)NAN32 << 32;
  if (exponent == 0) return (u64)(INFINITY_WORD | sign) << 32;
  if (exponent == 0x7ff) return (u64)sign << 32;
  return (u64)(upper_word(2 * 1023 - exponent, rcp_lane(c, 127u << 23 | mantissa)) | sign) << 32;
}
INLINE u64 rsqrt64_lane(const Launch *c, u64 a) {
  const u32 high = (u32)(a >> 32), sign = high & SIGN, mantissa = (high & 0xfffffu) << 3;
  const i32 exponent = (i32)(high >> 20 & 0x7ffu), odd = (exponent - 1023) & 1;
  if ((high & ~SIGN) > INFINITY_WORD) return (u64)NAN32 << 32;
  if (exponent == 0) return (u64)(INFINITY_WORD | sign) << 32;
  if (sign) return (u64)NAN32 << 32;
  if (exponent == 0x7ff) return 0;
  const u32 result = rsqrt_lane(c, (u32)(127 + odd) << 23 | mantissa);
  return (u64)upper_word(1023 - (exponent - 1023 - odd) / 2, result) << 32;
}
INLINE f64 double_of(u64 bits) {
  f64 value;
  COPY(&value, &bits, 8);
  return value;
}
INLINE u64 bits_of_double(f64 value) {
  u64 bits;
  COPY(&bits, &value, 8);
  return bits;
}
// One step of refinement; subnormals are scaled by 2^54, the result by 2^27.
INLINE u64 rsqrt64_full_lane(const Launch *c, u64 a) {
  f64 x = double_of(a);
  if (x != x) return a | 0x0008000000000000u;
  if (x < 0) return 0xfff8000000000000u;
  if (x == 0) return (a & 0x8000000000000000u) | 0x7ff0000000000000u;
  if (a == 0x7ff0000000000000u) return 0;
  const int is_small = x < 0x1p-1022;
  if (is_small) x *= 0x1p54;
  const f64 first = double_of(rsqrt64_lane(c, bits_of_double(x)));
  const f64 rest = __builtin_fma(x, -(first * first), 1.0);
  const f64 root = __builtin_fma(__builtin_fma(rest, 0.375, 0.5), first * rest, first);
  return bits_of_double(is_small ? root * 0x1p27 : root);
}
#define APPROXIMATE64(name, lane)                                      \
  HANDLER(name) {                                                      \
    const u64 *a = (const u64 *)(frame + i->field[1]);                 \
    u64 result[LANES];                                                 \
    for (int l = 0; l < LANES; l++) result[l] = lane(w->launch, a[l]); \
    COPY(frame + i->field[0], result, sizeof result);                  \
    return done(i);                                                    \
  }
APPROXIMATE64(rcp_approx_ftz_f64, rcp64_lane)
APPROXIMATE64(rsqrt_approx_ftz_f64, rsqrt64_lane)
APPROXIMATE64(rsqrt_approx_f64, rsqrt64_full_lane)

#define APPROXIMATE(name, lane)                                        \
  HANDLER(name) {                                                      \
    const u32 *a = (const u32 *)(frame + i->field[1]);                 \
    u32 result[LANES];                                                 \
    for (int l = 0; l < LANES; l++) result[l] = lane(w->launch, a[l]); \
    COPY(frame + i->field[0], result, sizeof result);                  \
    return done(i);                                                    \
  }
HANDLER(ex2_approx_ftz_f32) {
  AT(U32, 0) = ex2(w->launch, AT(U32, 1));
  return done(i);
}
HANDLER(ex2_approx_f32) {
  AT(U32, 0) = ex2_full(w->launch, AT(U32, 1));
  return done(i);
}
APPROXIMATE(rsqrt_approx_ftz_f32, rsqrt_lane)
APPROXIMATE(rsqrt_approx_f32, rsqrt_full_lane)
APPROXIMATE(rcp_approx_ftz_f32, rcp_lane)
APPROXIMATE(rcp_approx_f32, rcp_full_lane)
APPROXIMATE(sqrt_approx_ftz_f32, sqrt_lane)
APPROXIMATE(sqrt_approx_f32, sqrt_full_lane)
APPROXIMATE(lg2_approx_ftz_f32, lg2_lane)
APPROXIMATE(lg2_approx_f32, lg2_full_lane)
APPROXIMATE(sin_approx_f32, sin_lane)
APPROXIMATE(cos_approx_f32, cos_lane)
APPROXIMATE(tanh_approx_f32, tanh_lane)
APPROXIMATE(tanh_approx_f16, tanh_f16_lane)
APPROXIMATE(tanh_approx_f16x2, tanh_f16x2_lane)
APPROXIMATE(tanh_approx_bf16, tanh_bf16_lane)
APPROXIMATE(tanh_approx_bf16x2, tanh_bf16x2_lane)
APPROXIMATE(ex2_approx_f16, ex2_f16_lane)
APPROXIMATE(ex2_approx_f16x2, ex2_f16x2_lane)
APPROXIMATE(ex2_approx_bf16, ex2_bf16_lane)
APPROXIMATE(ex2_approx_bf16x2, ex2_bf16x2_lane)
#define APPROXIMATE_QUOTIENT(name, lane)                                     \
  HANDLER(name) {                                                            \
    const u32 *a = (const u32 *)(frame + i->field[1]);                       \
    const u32 *b = (const u32 *)(frame + i->field[2]);                       \
    u32 result[LANES];                                                       \
    for (int l = 0; l < LANES; l++) result[l] = lane(w->launch, a[l], b[l]); \
    COPY(frame + i->field[0], result, sizeof result);                        \
    return done(i);                                                          \
  }
APPROXIMATE_QUOTIENT(div_full_f32, div_full_lane)
APPROXIMATE_QUOTIENT(div_full_ftz_f32, div_full_ftz_lane)
APPROXIMATE_QUOTIENT(div_approx_f32, div_lane)
APPROXIMATE_QUOTIENT(div_approx_ftz_f32, div_ftz_lane)
