// Matrix products of 16 rows of A and 8 columns of B, of every type. A row of A and a column of B have 32 bytes, with k
// ascending, or fewer and zeros behind.
#pragma once
#include "mma.h"

// As in lower_products.py.
enum Element {
  ELEMENT_F16,
  ELEMENT_TF32,
  ELEMENT_E4M3,
  ELEMENT_E5M2,
  ELEMENT_S8,
  ELEMENT_U8,
  ELEMENT_S4,
  ELEMENT_U4,
  ELEMENT_B1
};
enum Sum { SUM_F32, SUM_F16, SUM_S32 };
enum { SATURATES = 1, COMBINES_BY_XOR = 2, OF_WARPGROUP = 4, TWO_STEPS = 8 };
typedef struct {
  int a, b, sum, flags;
} Form;
INLINE Form form_of(i32 field) { return (Form){field & 15, field >> 4 & 15, field >> 8 & 3, field >> 10}; }

// Decoded elements: values and powers of two of floats, or integers; words of single bits.
typedef struct {
  f32 value[16][MOST_DEPTH], power[16][MOST_DEPTH];
  u32 special[16];  // of each row: the exact form has to look at it
} FloatRows;
typedef struct {
  f32 value[MOST_DEPTH][8], power[MOST_DEPTH][8];
  u32 special;
} FloatColumns;
#define MOST_INTEGERS 64
typedef struct {
  i32 value[16][MOST_INTEGERS];
} IntegerRows;
typedef struct {
  i32 value[MOST_INTEGERS][8];
} IntegerColumns;
typedef union {
  FloatRows floats;
  IntegerRows integers;
  u64 bits[16][4];
} AnyRows;
typedef union {
  FloatColumns floats;
  IntegerColumns integers;
  u64 bits[8][4];
} AnyColumns;

void read_rows(AnyRows *to, const u8 raw[16][32], Form form);
void read_columns(AnyColumns *to, const u8 raw[8][32], Form form);
// sums[2 * (row half) + (column parity)][lane] += A B; an f16 lies in the low bits of a sum.
void multiply_form(const AnyRows *a, const AnyColumns *b, Form form, u32 sums[4][LANES]);
// Registers of f16 sums hold two: numbers[2] to or from sums.
INLINE void split_halves(u32 sums[4][LANES], const u32 numbers[2][LANES]) {
  for (int half = 0; half < 2; half++)
    for (int l = 0; l < LANES; l++) {
      sums[2 * half][l] = numbers[half][l] & 0xffffu;
      sums[2 * half + 1][l] = numbers[half][l] >> 16;
    }
}
INLINE void join_halves(u32 numbers[2][LANES], const u32 sums[4][LANES]) {
  for (int half = 0; half < 2; half++)
    for (int l = 0; l < LANES; l++) numbers[half][l] = sums[2 * half][l] | sums[2 * half + 1][l] << 16;
}
