// Boxes of tensors (tensor.c), for copies in both directions.
#pragma once
#include "async.h"

#define CHUNK 16
#define DIMENSIONS 5

int find_box(Warp *w, u64 address, int site, Mask lanes);
int check_box(Warp *w, const TensorBox *box, const i32 *at, i64 shared, int site, Mask lanes, enum Access access);
void check_shown(Warp *w, Marks m, int rank, i64 at, int site, Mask lanes);

// The part of a row of the box that lies in the tensor: from where its bytes come, and which of the row they are.
typedef struct {
  u64 from;
  i64 begin, end;
} Row;
INLINE Row row_of(const TensorBox *box, const i32 *at, int number) {
  const i64 first = (i64)at[0] * box->element_bytes, bytes = box->extents[0] * box->element_bytes;
  i64 offset = first;
  int left = number;
  Row row = {0, first < 0 ? -first : 0, bytes - first < box->row_bytes ? bytes - first : box->row_bytes};
  for (int d = 1; d < box->dimensions; d++) {
    const i64 index = (i64)at[d] + left % box->box[d];
    left /= box->box[d];
    if (index < 0 || index >= box->extents[d]) row.end = 0;
    offset += index * box->strides[d];
  }
  if (row.end < row.begin) row.begin = row.end = 0;
  row.from = box->address + (u64)(offset + row.begin);
  return row;
}
INLINE i64 swizzled(const TensorBox *box, i64 at) {
  return box->swizzle ? at ^ ((at >> 7 & (box->swizzle / CHUNK - 1)) << 4) : at;
}
