// f64 instructions: IEEE operations of the host's units, with the hardware's choice among NaNs (arithmetic/float64.py).
#include "elementwise.h"

#define SIGN64 0x8000000000000000u
#define INFINITY64 0x7ff0000000000000u
#define QUIET 0x0008000000000000u
#define INVALID_NAN 0xfff8000000000000u

INLINE U64 pick64(U64 flags, U64 yes, U64 no) { return (yes & flags) | (no & ~flags); }
INLINE U64 is_nan64(U64 a) { return (U64)((a & ~SIGN64) > INFINITY64); }
// Where a result is NaN it is that of the last NaN operand, quiet, or that of invalid operations.
INLINE U64 with_nan_of(U64 a, U64 chosen) { return pick64(is_nan64(a), a | QUIET, chosen); }
INLINE U64 result(F64 value, U64 first, U64 second) {
  U64 nan = with_nan_of(second, with_nan_of(first, (U64)(INVALID_NAN)));
  return pick64((U64)(value != value), nan, (U64)value);
}
INLINE U64 fused64(U64 a, U64 b, U64 c) {
  F64 value = __builtin_elementwise_fma((F64)a, (F64)b, (F64)c);
  U64 nan = with_nan_of(b, with_nan_of(c, with_nan_of(a, (U64)(INVALID_NAN))));
  return pick64((U64)(value != value), nan, (U64)value);
}
// mma of f64: a chain of fma, k ascending, that begins with C. Fields: d 0 to 3, a 4 to 11 (2 * step + row half), b 12
// to 15, c 16 to 19, site, steps of four k and halves of 16 rows (in the bits from 4 up).
HANDLER(mma_f64) {
  const int steps = i->field[21] & 15, halves = i->field[21] >> 4;
  if (UNLIKELY(w->mask != ALL_LANES)) raise_fault(w, FAULT_MEMBERS, i->field[20], w->mask, 0);
  U64 sums[4];
  for (int number = 0; number < 2 * halves; number++) {
    sums[number] = AT(U64, 16 + number);
    for (int k = 0; k < 4 * steps; k++) {
      const u64 *a = &AT(u64, 4 + 2 * (k / 4) + number / 2), *b = &AT(u64, 12 + k / 4);
      U64 left, right;
      for (int l = 0; l < LANES; l++) {  // the row of lane / 4, the column of 2 * (lane % 4)
        left[l] = a[4 * (l / 4) + k % 4];
        right[l] = b[4 * (2 * (l % 4) + number % 2) + k % 4];
      }
      sums[number] = fused64(left, right, sums[number]);
    }
  }
  for (int number = 0; number < 2 * halves; number++) AT(U64, number) = sums[number];
  return done(i);
}
// The order of floats as integers, -0 below +0.
INLINE I64 order64(U64 a) { return (I64)(a ^ ((U64)((I64)a >> 63) >> 1)); }
INLINE U64 one_of(U64 a, U64 b, U64 takes_a) {
  U64 nan_a = is_nan64(a), nan_b = is_nan64(b);
  U64 picked = pick64(nan_a, b, pick64(nan_b, a, pick64(takes_a, a, b)));
  return pick64(nan_a & nan_b, b | QUIET, picked);
}

BINARY(add_f64, U64, U64, U64, result((F64)a + (F64)b, a, b))
BINARY(sub_f64, U64, U64, U64, result((F64)a - (F64)b, a, b))
BINARY(mul_f64, U64, U64, U64, result((F64)a * (F64)b, a, b))
BINARY(div_rn_f64, U64, U64, U64, result((F64)a / (F64)b, b, a))
UNARY(rcp_rn_f64, U64, U64, result((F64)(1.0) / (F64)a, a, a))
UNARY(sqrt_rn_f64, U64, U64, result(__builtin_elementwise_sqrt((F64)a), a, a))
TERNARY(fma_rn_f64, U64, U64, U64, U64, fused64(a, b, c))
BINARY(min_f64, U64, U64, U64, one_of(a, b, (U64)(order64(a) < order64(b))))
BINARY(max_f64, U64, U64, U64, one_of(a, b, (U64)(order64(a) > order64(b))))
UNARY(neg_f64, U64, U64, pick64(is_nan64(a), a | QUIET, a ^ SIGN64))
UNARY(abs_f64, U64, U64, pick64(is_nan64(a), a | QUIET, a & ~SIGN64))
BINARY(copysign_f64, U64, U64, U64, (a & SIGN64) | (b & ~SIGN64))

#define COMPARE(name, condition)               \
  BINARY(setp_##name##_f64, Mask, U64, U64, ({ \
           F64 x = (F64)a, y = (F64)b;         \
           pack64((U64)(condition));           \
         }))
FLOAT_COMPARISONS(COMPARE)

// A NaN keeps its sign and what fits of its payload, and is made quiet.
INLINE U64 from_f32(U32 a) {
  U64 wide = widen(a), nan = (wide & 0x80000000u) << 32 | 0x7ff8000000000000u | (wide & 0x7fffffu) << 29;
  U64 value = (U64) __builtin_convertvector((F32)a, F64);
  return pick64((U64)((wide & 0x7fffffffu) > (U64)(0x7f800000u)), nan, value);
}
INLINE U32 to_f32(U64 a) {
  U32 value = (U32) __builtin_convertvector((F64)a, F32);
  U32 nan = (low32(a >> 32) & 0x80000000u) | 0x7fc00000u | (low32(a >> 29) & 0x3fffffu);
  return select32(low32(is_nan64(a)), nan, value);
}
// Cut towards zero and to the type's range; the top bit alone for NaN.
INLINE U32 cut_to(U64 a, f64 low, f64 high, u32 least, u32 most) {
  F64 value = __builtin_elementwise_trunc((F64)a);
  U64 below = (U64)(value < low), above = (U64)(value > high), nan = is_nan64(a);
  F64 inside = (F64)((U64)value & ~(below | above | nan));
  U32 number = low32((U64) __builtin_convertvector(inside, I64));
  number = select32(low32(below), (U32)(least), select32(low32(above), (U32)(most), number));
  return select32(low32(nan), (U32)(0x80000000u), number);
}

// The same to 64 bits.
INLINE U64 cut_to_64(U64 a, int is_signed) {
  const F64 value = __builtin_elementwise_trunc((F64)a);
  const f64 low = is_signed ? -0x1p63 : 0.0, high = is_signed ? 0x1p63 : 0x1p64;
  const U64 below = (U64)(value < low), above = (U64)(value >= high), nan = is_nan64(a);
  const F64 inside = (F64)((U64)value & ~(below | above | nan));
  const U64 is_large = (U64)(inside >= 0x1p63);
  const F64 small = (F64)pick64(is_large, (U64)(inside - 0x1p63), (U64)inside);
  U64 number = (U64) __builtin_convertvector(small, I64) ^ (is_large & SIGN64);
  number = pick64(above, (U64)(is_signed ? ~SIGN64 : ~(u64)0), pick64(below, (U64)(is_signed ? SIGN64 : 0), number));
  return pick64(nan, (U64)(SIGN64), number);
}

UNARY(cvt_f64_f32, U64, U32, from_f32(a))
UNARY(cvt_rn_f32_f64, U32, U64, to_f32(a))
UNARY(cvt_rn_f64_s32, U64, U32, (U64) __builtin_convertvector((I32)a, F64))
UNARY(cvt_rn_f64_u32, U64, U32, (U64) __builtin_convertvector(a, F64))
UNARY(cvt_rn_f64_s64, U64, U64, (U64) __builtin_convertvector((I64)a, F64))
UNARY(cvt_rn_f64_u64, U64, U64, (U64) __builtin_convertvector(a, F64))
UNARY(cvt_rn_f32_s64, U32, U64, (U32) __builtin_convertvector((I64)a, F32))
UNARY(cvt_rn_f32_u64, U32, U64, (U32) __builtin_convertvector(a, F32))
UNARY(cvt_rzi_s64_f32, U64, U32, cut_to_64(from_f32(a), 1))
UNARY(cvt_rzi_u64_f32, U64, U32, cut_to_64(from_f32(a), 0))
UNARY(cvt_rzi_s64_f64, U64, U64, cut_to_64(a, 1))
UNARY(cvt_rzi_u64_f64, U64, U64, cut_to_64(a, 0))
UNARY(cvt_rzi_s32_f64, U32, U64, cut_to(a, -2147483648.0, 2147483647.0, 0x80000000u, 0x7fffffffu))
UNARY(cvt_rzi_u32_f64, U32, U64, cut_to(a, 0.0, 4294967295.0, 0u, 0xffffffffu))
