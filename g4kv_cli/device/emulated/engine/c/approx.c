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
INLINE f32 as_float(u32 bits) {
  f32 value;
  COPY(&value, &bits, 4);
  return value;
}
INLINE u32 as_bits(f32 value) {
  u32 bits;
  COPY(&bits, &value, 4);
  return value != value ? NAN32 : bits;
}
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
  return as_bits(as_float(rsqrt_lane(c, as_bits(as_float(bits) * 16777216.0f))) * 4096.0f);
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
  u32 root = sqrt_lane(c, as_bits(as_float(bits) * 16777216.0f));
  return as_bits(as_float(root) * 0x1p-12f);
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
  const f32 size = as_float(bits & ~SIGN), scale = size > 0x1p126f ? 0.25f : size < 0x1p-126f ? 16777216.0f : 1.0f;
  return as_bits(as_float(rcp_lane(c, as_bits(as_float(bits) * scale))) * scale);
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
  u64 size = fixed < 0 ? ~(u64)fixed : (u64)fixed;
  if (size == 0) return fixed < 0 ? SIGN : 0;
  int leading = 63 - __builtin_clzll(size);
  u64 cut = leading >= 23 ? size >> (leading - 23) : size << (23 - leading);
  return (((u32)(leading - 36 + 126) << 23) + (u32)cut) | (fixed < 0 ? SIGN : 0);
}
INLINE u32 lg2_full_lane(const Launch *c, u32 bits) {
  if (!is_subnormal(bits)) return lg2_lane(c, bits);
  return as_bits(as_float(lg2_lane(c, as_bits(as_float(bits) * 16777216.0f))) - 24.0f);
}

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
