// Products of 16 rows of A and 8 columns of B, 16 deep, of bf16 or f16.
#pragma once
#include "engine.h"

typedef f32 F8 __attribute__((ext_vector_type(8), aligned(4)));
typedef i32 I8 __attribute__((ext_vector_type(8), aligned(4)));
typedef u32 U8 __attribute__((ext_vector_type(8), aligned(4)));

#define EXPONENT 0x7f800000u
#define MAGNITUDE 0x7fffffffu
#define NAN32 0x7fffffffu

enum { FORM_BF16, FORM_F16 };
// 16 rows of A, or 8 columns of B: raw bits of a form, values, and the powers of two that their exponents say. special:
// an infinity or NaN is among them, or a subnormal that f32 has not as a normal number; any: something but zeros. Both
// of each pair of rows.
typedef struct {
  f32 value[16][16], power[16][16];
  u16 raw[16][16];
  u32 special[8], any[8];
  int form;
} Rows;
typedef struct {
  f32 value[16][8], power[16][8];
  u16 raw[16][8];
  u32 special;
  int form;
} Columns;

// How a sum is made exactly: of so many products, of numbers with these lowest exponents, each addend cut to a multiple
// of 2^(E - fraction_bits); and what an f32 keeps of it, or else the nearest f16.
#define MOST_DEPTH 32
enum { LOWEST_F32 = -126, LOWEST_F16 = -14, LOWEST_E4M3 = -6 };
typedef struct {
  int depth, lowest_a, lowest_b, fraction_bits, is_half;
  u32 kept;
} Exactly;
u32 exact_output(const f32 *a, const f32 *b, u32 addend, const Exactly *how);  // the addend an f32, whatever the sum

void decode_rows(Rows *to);                                     // what is in raw, of the form
void decode_turned(Columns *to);                                // the same
void decode_columns(Columns *to, const u16 chunks[2][64]);      // of column n, k to k + 7 at [k / 8][8 n]
void fragment_rows(Rows *to, const char *frame, const i32 *places);
void multiply_tile(const Rows *a, const Columns *b, u32 sums[4][LANES]);
