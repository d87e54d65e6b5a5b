// Products of the types that mma.c is not for (arithmetic/mma_forms.py says what was recorded of each): f16 into f16;
// 8-bit floats, which mma.sync widens to f16 and multiplies in two halves, and wgmma adds with fewer digits; tf32;
// integers of 8 and 4 bits and single bits.
#include "products.h"

typedef f64 D8 __attribute__((ext_vector_type(8), aligned(8)));
typedef u64 L8 __attribute__((ext_vector_type(8), aligned(8)));

// ---- elements ----------------------------------------------------------------------------------------------------

INLINE f32 half_value(u16 bits) {
  _Float16 half;
  COPY(&half, &bits, 2);
  return (f32)half;
}
// Elements of f16 and tf32, exact in f32.
INLINE f32 float_of(const u8 *raw, int k, int element) {
  u16 half;
  u32 word;
  if (element == ELEMENT_F16) {
    COPY(&half, raw + 2 * k, 2);
    return half_value(half);
  }
  COPY(&word, raw + 4 * k, 4);
  return f32_of(word & ~0x1fffu);
}
INLINE int depth_of(int element) { return element == ELEMENT_TF32 ? 8 : 16; }
INLINE int is_float8(int element) { return element == ELEMENT_E4M3 || element == ELEMENT_E5M2; }
INLINE int is_float(int element) { return element <= ELEMENT_E5M2; }
// The exponent of an element's subnormals; mma.sync has 8-bit floats in f16.
INLINE int lowest_of(int element, Form form) {
  if (element == ELEMENT_TF32) return LOWEST_F32;
  return element == ELEMENT_E4M3 && form.flags & OF_WARPGROUP ? LOWEST_E4M3 : LOWEST_F16;
}
// Puts a value and the power of two of its exponent; whether it is not finite, or has no exponent in f32.
INLINE u32 put_float(f32 *value, f32 *power, f32 number, int lowest) {
  const u32 bits = bits_of(number), least = (u32)(lowest + 127) << 23;
  u32 exponent = bits & EXPONENT;
  const u32 special = exponent == EXPONENT || (!exponent && bits & MAGNITUDE);
  if (exponent < least) exponent = bits & MAGNITUDE ? least : 0;
  *value = number;
  *power = f32_of(exponent);
  return special;
}
// 32 bytes, each by itself.
typedef u8 Bytes __attribute__((ext_vector_type(32), aligned(1)));
typedef int8_t SignedBytes __attribute__((ext_vector_type(32), aligned(1)));
INLINE U32 bytes_at(const u8 *raw) {
  Bytes bytes;
  COPY(&bytes, raw, 32);
  return __builtin_convertvector(bytes, U32);
}
// mma.sync takes k = 0, 1, 4, 5, ... of 8-bit floats before the others.
INLINE U32 halves_apart(U32 a) {
  return __builtin_shufflevector(a, a, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29, 2, 3, 6, 7, 10, 11, 14,
                                 15, 18, 19, 22, 23, 26, 27, 30, 31);
}
// The same of a row of 8-bit floats: their digits are those of tiny numbers, which are made large.
INLINE u32 put_floats8(f32 *value, f32 *power, const u8 *raw, int element, Form form) {
  const U32 bytes = bytes_at(raw), size = bytes & 0x7fu, least = (U32)((u32)(lowest_of(element, form) + 127) << 23);
  U32 bits, is_special;
  if (element == ELEMENT_E4M3) {
    bits = (U32)((F32)(size << 20) * 0x1p120f);
    is_special = (U32)(size == 0x7fu);
    bits = select32(is_special, (U32)(NAN32), bits);
  } else {
    bits = (U32)((F32)(size << 21) * 0x1p112f);
    is_special = (U32)(size >= 0x7cu);
    bits = select32(is_special, select32((U32)(size == 0x7cu), (U32)(EXPONENT), (U32)(NAN32)), bits);
  }
  U32 powers = __builtin_elementwise_max(bits & EXPONENT, least) & (U32)(size != 0u);
  U32 values = bits | (bytes & 0x80u) << 24;
  if (!(form.flags & OF_WARPGROUP)) {
    powers = halves_apart(powers);
    values = halves_apart(values);
  }
  COPY(value, &values, 128);
  COPY(power, &powers, 128);
  return __builtin_reduce_or(is_special) != 0;
}
INLINE int integers_of(int element) { return element == ELEMENT_S8 || element == ELEMENT_U8 ? 32 : 64; }
static void put_integers(i32 *value, const u8 *raw, int element) {
  if (integers_of(element) == 32) {
    SignedBytes bytes;
    COPY(&bytes, raw, 32);
    const U32 whole = element == ELEMENT_S8 ? (U32)__builtin_convertvector(bytes, I32) : bytes_at(raw);
    COPY(value, &whole, 128);
    return;
  }
  for (int k = 0; k < 64; k++) {
    const i32 four = raw[k >> 1] >> (4 * (k & 1)) & 15;
    value[k] = element == ELEMENT_S4 && four > 7 ? four - 16 : four;
  }
}
INLINE u32 put_floats(f32 *value, f32 *power, const u8 *raw, int element, Form form) {
  if (is_float8(element)) return put_floats8(value, power, raw, element, form);
  u32 special = 0;
  for (int k = 0; k < depth_of(element); k++)
    special |= put_float(value + k, power + k, float_of(raw, k, element), lowest_of(element, form));
  return special;
}

void read_rows(AnyRows *to, const u8 raw[16][32], Form form) {
  if (form.a == ELEMENT_B1) {
    __builtin_memcpy(to->bits, raw, 16 * 32);
    return;
  }
  for (int row = 0; row < 16; row++) {
    FloatRows *floats = &to->floats;
    if (is_float(form.a))
      floats->special[row] = put_floats(floats->value[row], floats->power[row], raw[row], form.a, form);
    else
      put_integers(to->integers.value[row], raw[row], form.a);
  }
}
void read_columns(AnyColumns *to, const u8 raw[8][32], Form form) {
  if (form.b == ELEMENT_B1) {
    __builtin_memcpy(to->bits, raw, 8 * 32);
    return;
  }
  to->floats.special = 0;
  for (int n = 0; n < 8; n++) {
    if (is_float(form.b)) {
      f32 value[MOST_DEPTH], power[MOST_DEPTH];
      to->floats.special |= put_floats(value, power, raw[n], form.b, form);
      for (int k = 0; k < (is_float8(form.b) ? 32 : depth_of(form.b)); k++) {
        to->floats.value[k][n] = value[k];
        to->floats.power[k][n] = power[k];
      }
    } else {
      i32 value[MOST_INTEGERS];
      put_integers(value, raw[n], form.b);
      for (int k = 0; k < integers_of(form.b); k++) to->integers.value[k][n] = value[k];
    }
  }
}

// ---- sums of floats ----------------------------------------------------------------------------------------------

// f64 integers of at most 33 bits, times powers of two, to the nearest f16.
INLINE U8 nearest_halves(D8 total, D8 back) {
  const D8 exact = total * back;
  const L8 bits = (L8)exact, lost = bits & 0x1fffffff;
  const L8 odd = (bits & ~(u64)0x1fffffff) | ((L8)(lost != 0ul) & ((u64)1 << 29));
  const F8 cut = __builtin_convertvector((D8)odd, F8);
  f32 numbers[8];
  u32 found[8];
  COPY(numbers, &cut, 32);
  for (int n = 0; n < 8; n++) {
    const _Float16 half = (_Float16)numbers[n];
    u16 raw;
    COPY(&raw, &half, 2);
    found[n] = raw & 0x7fffu ? raw : 0;
  }
  U8 result;
  COPY(&result, found, 32);
  return result;
}
// One row of the result, as mma.c has two; c the addends, of f16 as f32. Returns 0 if it needs the exact form.
INLINE int fast_row(const f32 *av, const f32 *ap, u32 odd, const FloatColumns *b, int from, U8 c, const Exactly *how,
                    U8 *result) {
  const U8 size = c & MAGNITUDE;
  U8 top = c & EXPONENT;
  U8 rare = (U8)(top == EXPONENT) | ((U8)(top == 0u) & (U8)(size != 0u));
  if (how->is_half) top = __builtin_elementwise_max(top, (U8)(113u << 23) & (U8)(size != 0u));
  F8 row;
  for (int k = 0; k < how->depth; k++) {
    COPY(&row, b->power[from + k], 32);
    top = __builtin_elementwise_max(top, (U8)(row * ap[from + k]));
  }
  const U8 zero = (U8)(top == 0u);
  rare |= (U8)(top - (27u << 23) > (200u << 23)) & ~zero;
  if (UNLIKELY(odd | __builtin_reduce_or(rare))) return 0;
  top |= zero & (127u << 23);
  const u32 fraction = (u32)how->fraction_bits;
  const F8 scale = (F8)(((254u + fraction) << 23) - top), back = (F8)(top - (fraction << 23));
  I8 sum = (I8)(0);
  for (int k = 0; k < how->depth; k++) {
    COPY(&row, b->value[from + k], 32);
    sum += __builtin_convertvector((row * av[from + k]) * scale, I8);
  }
  D8 total = __builtin_convertvector(__builtin_convertvector((F8)c * scale, I8), D8);
  total += __builtin_convertvector(sum, D8);
  const D8 wide = __builtin_convertvector(back, D8);
  if (how->is_half) {
    *result = nearest_halves(total, wide);
    return 1;
  }
  const L8 cut = (L8)total & ~(u64)0x1fffffff;  // to 24 significant bits
  *result = (U8) __builtin_convertvector((D8)cut * wide, F8) & how->kept;
  return 1;
}
INLINE U8 wide_halves(U8 halves) {
  u32 raw[8];
  f32 wide[8];
  COPY(raw, &halves, 32);
  for (int n = 0; n < 8; n++) wide[n] = half_value((u16)raw[n]);
  U8 result;
  COPY(&result, wide, 32);
  return result;
}
// A row of 8 sums, in the lanes 4 (row % 8) to 4 (row % 8) + 3.
INLINE U8 take_row(u32 sums[4][LANES], int row) {
  u32 found[8];
  for (int n = 0; n < 8; n++) found[n] = sums[2 * (row >> 3) + (n & 1)][4 * (row & 7) + (n >> 1)];
  U8 result;
  COPY(&result, found, 32);
  return result;
}
INLINE void put_row(u32 sums[4][LANES], int row, U8 values) {
  u32 given[8];
  COPY(given, &values, 32);
  for (int n = 0; n < 8; n++) sums[2 * (row >> 3) + (n & 1)][4 * (row & 7) + (n >> 1)] = given[n];
}
// Adds `how->depth` products from place `from` on.
static void add_products(const FloatRows *a, const FloatColumns *b, int from, const Exactly *how, u32 sums[4][LANES]) {
  for (int r = 0; r < 16; r++) {
    U8 c = take_row(sums, r), d;
    if (how->is_half) c = wide_halves(c);
    if (UNLIKELY(!fast_row(a->value[r], a->power[r], a->special[r] | b->special, b, from, c, how, &d))) {
      u32 addends[8], results[8];
      COPY(addends, &c, 32);
      for (int n = 0; n < 8; n++) {
        f32 column[MOST_DEPTH];
        for (int k = 0; k < how->depth; k++) column[k] = b->value[from + k][n];
        results[n] = exact_output(a->value[r] + from, column, addends[n], how);
      }
      COPY(&d, results, 32);
    }
    put_row(sums, r, d);
  }
}
// C is added at the end, rounded by itself: as add.f32, or add.f16, of which f32 holds twice the digits and two more.
static void add_at_the_end(u32 sums[4][LANES], const u32 c[4][LANES], int is_half) {
  for (int number = 0; number < 4; number++)
    for (int l = 0; l < LANES; l++) {
      const u32 x = c[number][l], y = sums[number][l];
      const f32 sum = is_half ? half_value((u16)x) + half_value((u16)y) : f32_of(x) + f32_of(y);
      u32 bits = bits_of(sum);
      if (is_half) {
        const _Float16 half = (_Float16)sum;
        u16 raw;
        COPY(&raw, &half, 2);
        bits = raw;
      }
      sums[number][l] = sum == sum ? bits : is_half ? 0x7fffu : NAN32;
    }
}
static void multiply_floats(const FloatRows *a, const FloatColumns *b, Form form, u32 sums[4][LANES]) {
  const int is_half = form.sum == SUM_F16;
  Exactly how = {16, lowest_of(form.a, form), lowest_of(form.b, form), 25, is_half, 0xffffffffu};
  if (form.a == ELEMENT_TF32) {
    how.depth = form.flags & TWO_STEPS ? 4 : 8;
    for (int from = 0; from < 8; from += how.depth) add_products(a, b, from, &how, sums);
  } else if (!is_float8(form.a)) {
    add_products(a, b, 0, &how, sums);
  } else if (form.flags & OF_WARPGROUP) {
    how.depth = 32;
    how.fraction_bits = 13;
    how.kept = ~0x3ffu;
    add_products(a, b, 0, &how, sums);
  } else {
    u32 c[4][LANES];
    COPY(c, sums, sizeof c);
    __builtin_memset(sums, 0, sizeof c);
    for (int from = 0; from < 32; from += 16) add_products(a, b, from, &how, sums);
    add_at_the_end(sums, c, is_half);
  }
}

// ---- integers ----------------------------------------------------------------------------------------------------

static void multiply_integers(const IntegerRows *a, const IntegerColumns *b, Form form, u32 sums[4][LANES]) {
  for (int r = 0; r < 16; r++) {
    I8 product = (I8)(0), column;
    for (int k = 0; k < integers_of(form.a); k++) {
      COPY(&column, b->value[k], 32);
      product += column * a->value[r][k];
    }
    const U8 given = take_row(sums, r);
    i32 c[8], products[8];
    u32 found[8];
    COPY(c, &given, 32);
    COPY(products, &product, 32);
    for (int n = 0; n < 8; n++) {
      const i64 sum = (i64)products[n] + c[n];
      const i64 kept = sum > INT32_MAX ? INT32_MAX : sum < INT32_MIN ? INT32_MIN : sum;
      found[n] = (u32)(form.flags & SATURATES ? kept : sum);
    }
    U8 results;
    COPY(&results, found, 32);
    put_row(sums, r, results);
  }
}
static void count_bits(const u64 a[16][4], const u64 b[8][4], Form form, u32 sums[4][LANES]) {
  for (int r = 0; r < 16; r++)
    for (int n = 0; n < 8; n++) {
      int ones = 0;
      for (int k = 0; k < 4; k++)
        ones += __builtin_popcountll(form.flags & COMBINES_BY_XOR ? a[r][k] ^ b[n][k] : a[r][k] & b[n][k]);
      sums[2 * (r >> 3) + (n & 1)][4 * (r & 7) + (n >> 1)] += (u32)ones;
    }
}
void multiply_form(const AnyRows *a, const AnyColumns *b, Form form, u32 sums[4][LANES]) {
  if (form.a == ELEMENT_B1)
    count_bits(a->bits, b->bits, form, sums);
  else if (is_float(form.a))
    multiply_floats(&a->floats, &b->floats, form, sums);
  else
    multiply_integers(&a->integers, &b->integers, form, sums);
}

// ---- mma.sync ----------------------------------------------------------------------------------------------------

// Fields: d 0 to 3, a 4 to 7, b 8 and 9, c 10 to 13, site, form; of f16 sums d and c have two registers. What the shape
// has not are zeros, and d is scratch.
HANDLER(mma_form) {
  if (UNLIKELY(w->mask != ALL_LANES)) raise_fault(w, FAULT_MEMBERS, i->field[14], w->mask, 0);
  const Form form = form_of(i->field[15]);
  u8 rows[16][32], columns[8][32];
  u32 sums[4][LANES], halves[2][LANES];  // copies, for a result may lie in any operand's register
  for (int number = 0; number < 4; number++)
    for (int g = 0; g < 8; g++)
      COPY(&rows[8 * (number & 1) + g][16 * (number >> 1)], frame + i->field[4 + number] + 16 * g, 16);
  for (int number = 0; number < 2; number++)
    for (int n = 0; n < 8; n++) COPY(&columns[n][16 * number], frame + i->field[8 + number] + 16 * n, 16);
  if (form.sum == SUM_F16) {
    for (int number = 0; number < 2; number++) COPY(halves[number], frame + i->field[10 + number], 128);
    split_halves(sums, halves);
  } else
    for (int number = 0; number < 4; number++) COPY(sums[number], frame + i->field[10 + number], 128);
  AnyRows a;
  AnyColumns b;
  read_rows(&a, rows, form);
  read_columns(&b, columns, form);
  multiply_form(&a, &b, form, sums);
  if (form.sum == SUM_F16) {
    join_halves(halves, sums);
    for (int number = 0; number < 2; number++) COPY(frame + i->field[number], halves[number], 128);
  } else
    for (int number = 0; number < 4; number++) COPY(frame + i->field[number], sums[number], 128);
  return done(i);
}

// ---- wmma --------------------------------------------------------------------------------------------------------

// Field: site.
HANDLER(whole_warp) {
  (void)frame;
  if (UNLIKELY(w->mask != ALL_LANES)) raise_fault(w, FAULT_MEMBERS, i->field[0], w->mask, 0);
  return done(i);
}
// Where each lane has an element of a matrix in memory. Fields: result, address, elements from one row or column to the
// next, addresses are 64 bits wide; the row of lane 0, what it grows by with lane / 4 and with lane % 4, the same of
// the column; the matrix lies by rows, bits of an element.
HANDLER(matrix_place) {
  (void)w;
  const i64 *wide = &AT(i64, 1);
  const u32 *narrow = &AT(u32, 1), *stride = &AT(u32, 2);
  for (int l = 0; l < LANES; l++) {
    const i64 row = i->field[4] + i->field[5] * (l >> 2) + i->field[6] * (l & 3);
    const i64 column = i->field[7] + i->field[8] * (l >> 2) + i->field[9] * (l & 3);
    const i64 major = i->field[10] ? row : column, minor = i->field[10] ? column : row;
    const i64 place = (major * (i64)stride[l] + minor) * i->field[11] / 8;
    if (i->field[3])
      ((u64 *)(frame + i->field[0]))[l] = (u64)wide[l] + (u64)place;
    else
      ((u32 *)(frame + i->field[0]))[l] = narrow[l] + (u32)place;
  }
  return done(i);
}
