// Products of 16 rows of A and 8 columns of B, 16 deep, of bf16.
#pragma once
#include "engine.h"

// 16 rows of A, or 8 columns of B: raw bits, values, and values without their mantissas. special: a subnormal, infinity
// or NaN is among them; any: something but zeros. Both of each pair of rows.
typedef struct {
  f32 value[16][16], power[16][16];
  u16 raw[16][16];
  u32 special[8], any[8];
} Rows;
typedef struct {
  f32 value[16][8], power[16][8];
  u16 raw[16][8];
  u32 special;
} Columns;

void decode_rows(Rows *to);                                     // what is in raw
void decode_turned(Columns *to);                                // the same
void decode_columns(Columns *to, const u16 chunks[2][64]);      // of column n, k to k + 7 at [k / 8][8 n]
void fragment_rows(Rows *to, const char *frame, const i32 *places);
void multiply_tile(const Rows *a, const Columns *b, u32 sums[4][LANES]);
