// mma.sync and wgmma of bf16 and f16 into f32, as the H200 was recorded to do it: the 16 products and the addend
// are each cut to a multiple of 2^(E - 25), E the highest exponent among them, summed exactly, and the sum cut to an
// f32.
#include "mma.h"

typedef f32 F16 __attribute__((ext_vector_type(16), aligned(4)));
typedef i32 I16 __attribute__((ext_vector_type(16), aligned(4)));
typedef u32 U16 __attribute__((ext_vector_type(16), aligned(4)));
typedef f64 D16 __attribute__((ext_vector_type(16), aligned(8)));
typedef u64 L16 __attribute__((ext_vector_type(16), aligned(8)));
typedef u16 H16 __attribute__((ext_vector_type(16), aligned(2)));
typedef _Float16 P16 __attribute__((ext_vector_type(16), aligned(2)));
typedef u16 H64 __attribute__((ext_vector_type(64), aligned(2)));

// size * 2^by, cut toward zero.
INLINE u64 scaled(u64 size, int by) { return by >= 0 ? size << by : by < -62 ? 0 : size >> -by; }

// The digits of a number's mantissa, 24 of f32 at most, and its exponent, that of its form's subnormals or above.
INLINE u32 digits_of(f32 number, int lowest, int *exponent) {
  const u32 bits = bits_of(number);
  const int field = (int)(bits >> 23 & 255u);
  const u32 digits = field ? (bits & 0x7fffffu) | 0x800000u : bits & 0x7fffffu;
  *exponent = (field ? field : 1) - 127;
  const int by = lowest - *exponent;
  if (by <= 0) return digits;
  *exponent = lowest;
  return by < 24 ? digits >> by : 0;  // the form has no digits there
}
// The 64 bits of value * 2^unit to the nearest f16, of two the even one; a zero has no sign.
static u32 nearest_f16(i64 value, int unit) {
  const u64 bits = (u64)(unit + 1023) << 52;
  f64 power;
  COPY(&power, &bits, 8);
  const f64 exact = (f64)value * power;
  u64 odd;  // the last digit that f32 has says whether there were more
  COPY(&odd, &exact, 8);
  odd = (odd & ~(u64)0x1fffffff) | (u64)((odd & 0x1fffffff) != 0) << 29;
  f64 cut;
  COPY(&cut, &odd, 8);
  const _Float16 half = (_Float16)(f32)cut;
  u16 found;
  COPY(&found, &half, 2);
  return found & 0x7fffu ? found : 0;
}
// One output in integers: every class of number.
u32 exact_output(const f32 *a, const f32 *b, u32 addend, const Exactly *how) {
  u64 size[MOST_DEPTH + 1];
  int exponent[MOST_DEPTH + 1], highest = -1000000, is_nan = 0, plus = 0, minus = 0;
  u32 negative[MOST_DEPTH + 1];
  const int last = how->depth;
  for (int k = 0; k < last; k++) {
    int ex, ey;
    const u32 sx = digits_of(a[k], how->lowest_a, &ex), sy = digits_of(b[k], how->lowest_b, &ey);
    u32 x, y;
    COPY(&x, a + k, 4);
    COPY(&y, b + k, 4);
    const int infinite_x = (x & MAGNITUDE) == EXPONENT, infinite_y = (y & MAGNITUDE) == EXPONENT;
    negative[k] = (x ^ y) >> 31;
    is_nan |= (x & MAGNITUDE) > EXPONENT || (y & MAGNITUDE) > EXPONENT || (infinite_x && !sy) || (infinite_y && !sx);
    if (infinite_x || infinite_y) {
      plus |= !negative[k];
      minus |= (int)negative[k];
    }
    size[k] = (u64)sx * sy;
    exponent[k] = ex + ey - 46;  // of the last place
    if (size[k] && ex + ey > highest) highest = ex + ey;
  }
  int ec;
  f32 number;
  COPY(&number, &addend, 4);
  negative[last] = addend >> 31;
  size[last] = digits_of(number, how->is_half ? LOWEST_F16 : LOWEST_F32, &ec);
  exponent[last] = ec - 23;
  if ((addend & EXPONENT) == EXPONENT) {
    is_nan |= (addend & MAGNITUDE) > EXPONENT;
    plus |= !negative[last];
    minus |= (int)negative[last];
  }
  if (size[last] && ec > highest) highest = ec;
  if (is_nan || (plus && minus)) return how->is_half ? 0x7fffu : NAN32;
  if (plus || minus) return how->is_half ? (plus ? 0x7c00u : 0xfc00u) : EXPONENT | (minus ? 0x80000000u : 0);
  const int unit = highest - how->fraction_bits;
  i64 total = 0;
  for (int k = 0; k <= last; k++) {
    if (!size[k]) continue;
    const i64 part = (i64)scaled(size[k], exponent[k] - unit);
    total += negative[k] ? -part : part;
  }
  if (total == 0) return 0;
  if (how->is_half) return nearest_f16(total, unit);
  const u64 sum = total < 0 ? (u64)-total : (u64)total;
  const int leading = 63 - __builtin_clzll(sum) + unit, power = leading < -126 ? -126 : leading;
  const u64 cut = scaled(sum, unit - (power - 23));
  u64 bits = cut >= 1u << 23 ? ((u64)(power + 127) << 23) + (cut - (1u << 23)) : cut;
  if (bits > EXPONENT) bits = EXPONENT;
  return ((u32)bits | (total < 0 ? 0x80000000u : 0)) & how->kept;
}

void decode_columns(Columns *to, const u16 chunks[2][64]) {
  for (int half = 0; half < 2; half++) {
    H64 raw;
    COPY(&raw, chunks[half], 128);
#define ROW(k) k, k + 8, k + 16, k + 24, k + 32, k + 40, k + 48, k + 56
    const H64 turned =
        __builtin_shufflevector(raw, raw, ROW(0), ROW(1), ROW(2), ROW(3), ROW(4), ROW(5), ROW(6), ROW(7));
    COPY(to->raw[8 * half], &turned, 128);
  }
  decode_turned(to);
}
// 16 numbers. A subnormal counts with the lowest exponent of its form, in which those of f16 are normal in f32.
#define LEAST_F16 (113u << 23)
INLINE u32 decode(const u16 *from, int form, f32 *values, f32 *powers, u32 *any) {
  H16 raw;
  COPY(&raw, from, 32);
  U16 value, power, special;
  if (form == FORM_F16) {
    value = (U16) __builtin_convertvector((P16)raw, F16);
    const U16 is_zero = (U16)((value & MAGNITUDE) == 0u), lowest = (U16)(LEAST_F16);
    power = __builtin_elementwise_max(value & EXPONENT, lowest) & ~is_zero;
    special = (U16)(power == EXPONENT);
  } else {
    value = __builtin_convertvector(raw, U16) << 16;
    power = value & EXPONENT;
    special = (U16)(power == EXPONENT) | ((U16)(power == 0u) & (U16)((value & MAGNITUDE) != 0u));
  }
  COPY(values, &value, 64);
  COPY(powers, &power, 64);
  *any |= __builtin_reduce_or(value & MAGNITUDE);
  return __builtin_reduce_or(special);
}
void decode_turned(Columns *to) {
  u32 any = 0;
  to->special = 0;
  for (int k = 0; k < 16; k += 2) to->special |= decode(to->raw[k], to->form, to->value[k], to->power[k], &any);
}
void decode_rows(Rows *to) {
  for (int pair = 0; pair < 8; pair++) {
    u32 special = 0, any = 0;
    for (int row = 2 * pair; row < 2 * pair + 2; row++)
      special |= decode(to->raw[row], to->form, to->value[row], to->power[row], &any);
    to->special[pair] = special;
    to->any[pair] = any;
  }
}

// Two rows of the result, 16 numbers: those of A from av and ap on, c the addends. The highest exponents come from
// products of the operands without mantissas, the cut from a conversion to int32 of products scaled by a power of two:
// 16 of at most 2^27 fit. Only for exponents within 2^-100 .. 2^100 of a sum; returns 0 if the two rows need the exact
// form.
INLINE int fast_rows(const f32 *av, const f32 *ap, u32 odd, const Columns *b, U16 c, U16 *result) {
  U16 top = c & EXPONENT;
  const U16 subnormal = (U16)(top == 0u) & (U16)((c & MAGNITUDE) != 0u);
  U8 top0 = (U8)(0u), top1 = (U8)(0u);
  F8 row;
  for (int k = 0; k < 16; k++) {
    COPY(&row, b->power[k], 32);
    top0 = __builtin_elementwise_max(top0, (U8)(row * ap[k]));
    top1 = __builtin_elementwise_max(top1, (U8)(row * ap[16 + k]));
  }
#define BOTH 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
  top = __builtin_elementwise_max(top, (U16)__builtin_shufflevector(top0, top1, BOTH));
  const U16 zero = (U16)(top == 0u);
  const U16 far = ((U16)(top - (27u << 23) > (200u << 23)) & ~zero) | subnormal;
  if (UNLIKELY(odd | __builtin_reduce_or(far))) return 0;
  top |= zero & (127u << 23);
  const F16 scale = (F16)((279u << 23) - top), back = (F16)(top - (25u << 23));
  const F8 scale0 = __builtin_shufflevector(scale, scale, 0, 1, 2, 3, 4, 5, 6, 7);
  const F8 scale1 = __builtin_shufflevector(scale, scale, 8, 9, 10, 11, 12, 13, 14, 15);
  D16 total = __builtin_convertvector(__builtin_convertvector((F16)c * scale, I16), D16);
  I8 sum0 = (I8)(0), sum1 = (I8)(0);
  for (int k = 0; k < 16; k++) {
    COPY(&row, b->value[k], 32);
    sum0 += __builtin_convertvector((row * av[k]) * scale0, I8);
    sum1 += __builtin_convertvector((row * av[16 + k]) * scale1, I8);
  }
  total += __builtin_convertvector(__builtin_shufflevector(sum0, sum1, BOTH), D16);
  const L16 cut = (L16)total & ~(u64)0x1fffffff;  // to 24 significant bits
  *result = (U16) __builtin_convertvector((D16)cut * __builtin_convertvector(back, D16), F16);
  return 1;
}

// sums[2 * (row half) + (column parity)][lane] += A B, as in registers.
void multiply_tile(const Rows *a, const Columns *b, u32 sums[4][LANES]) {
  const int lowest = a->form == FORM_F16 ? LOWEST_F16 : LOWEST_F32;
  const Exactly how = {16, lowest, lowest, 25, 0, 0xffffffffu};
  for (int pair = 0; pair < 8; pair++) {  // rows 2 pair and 2 pair + 1: lanes 8 (pair % 4) to 8 (pair % 4) + 7
    const int half = pair >> 2, at = 8 * (pair & 3);
    F8 even, odd;
    COPY(&even, &sums[2 * half][at], 32);
    COPY(&odd, &sums[2 * half + 1][at], 32);
    const U16 c = (U16)__builtin_shufflevector(even, odd, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    const u32 special = a->special[pair] | b->special;
    U16 d;
    if (!a->any[pair] && __builtin_reduce_or(c) == 0 && !b->special)
      d = (U16)(0u);
    else if (UNLIKELY(!fast_rows(a->value[2 * pair], a->power[2 * pair], special, b, c, &d))) {
      u32 addends[16], results[16];
      COPY(addends, &c, 64);
      for (int n = 0; n < 16; n++) {
        f32 column[16];
        for (int k = 0; k < 16; k++) column[k] = b->value[k][n & 7];
        results[n] = exact_output(a->value[2 * pair + (n >> 3)], column, addends[n], &how);
      }
      COPY(&d, results, 64);
    }
    const U8 d_even = __builtin_shufflevector(d, d, 0, 2, 4, 6, 8, 10, 12, 14);
    const U8 d_odd = __builtin_shufflevector(d, d, 1, 3, 5, 7, 9, 11, 13, 15);
    COPY(&sums[2 * half][at], &d_even, 32);
    COPY(&sums[2 * half + 1][at], &d_odd, 32);
  }
}

// Registers of A: 2 * (k half) + (row half).
void fragment_rows(Rows *to, const char *frame, const i32 *places) {
  for (int half = 0; half < 4; half++)
    for (int g = 0; g < 8; g++) COPY(&to->raw[(half & 1) * 8 + g][(half >> 1) * 8], frame + places[half] + 16 * g, 16);
  decode_rows(to);
}

// Fields: d 0 to 3, a 4 to 7, b 8 and 9, c 10 to 13, site.
INLINE void multiply(const Instruction *i, char *frame, Warp *w, int form) {
  if (UNLIKELY(w->mask != ALL_LANES)) raise_fault(w, FAULT_MEMBERS, i->field[14], w->mask, 0);
  u16 b_registers[2][64];  // lane 4 n + k/2 holds k and k + 1 of column n
  u32 sums[4][LANES];      // copies, for a result may lie in any operand's register
  Rows a;
  Columns b;
  for (int half = 0; half < 2; half++) COPY(b_registers[half], frame + i->field[8 + half], 128);
  for (int number = 0; number < 4; number++) COPY(sums[number], frame + i->field[10 + number], 128);
  a.form = b.form = form;
  fragment_rows(&a, frame, i->field + 4);
  decode_columns(&b, b_registers);
  multiply_tile(&a, &b, sums);
  for (int number = 0; number < 4; number++) COPY(frame + i->field[number], sums[number], 128);
}
HANDLER(mma_m16n8k16_bf16) {
  multiply(i, frame, w, FORM_BF16);
  return done(i);
}
HANDLER(mma_m16n8k16_f16) {
  multiply(i, frame, w, FORM_F16);
  return done(i);
}
