// Loads and stores of shared memory, and the loads of 8x8 matrices.
#include "memory.h"
#include "races.h"
#include "trace.h"

// Fields: address, offset, site, address is 64 bits wide, registers. Elements are 32 or 64 bits, or smaller ones
// extended to 32.
INLINE void load_shared(const Instruction *i, char *frame, Warp *w, int bytes, int count, int is_signed) {
  const Shared s = shared_of(w->launch);
  const Marks marks = marks_of(w);
  const int size = bytes * count, site = i->field[2];
  i64 at[LANES];
  shared_offsets(at, frame + i->field[0], i->field[3], i->field[1]);
  if (UNLIKELY(w->launch->trace != 0) && w->launch->trace_sites[site])
    trace_access(w, TRACE_SHARED_READ, site, size, (const u64 *)at);
  for (int l = 0; l < LANES; l++) {
    if (!(w->mask >> l & 1)) continue;
    if (!check_shared(w, at[l], size, site, 1u << l)) return;
    check_shared_written(w, s, at[l], size, site, 1u << l);
    note_read(w, marks, at[l], size, site, (u32)l);
    for (int k = 0; k < count; k++) {
      const u8 *from = s.data + at[l] + k * bytes;
      char *to = frame + i->field[4 + k];
      if (bytes >= 4)
        COPY(to + bytes * l, from, bytes);
      else {
        u16 half = *from;
        if (bytes == 2) COPY(&half, from, 2);
        u32 value = !is_signed ? half : bytes == 2 ? (u32)(i32)(int16_t)half : (u32)(i32)(int8_t)half;
        COPY(to + 4 * l, &value, 4);
      }
    }
  }
}

static void trace_shared_store(const Instruction *i, char *frame, Warp *w, int bytes, int count, const i64 *at) {
  u8 *to = trace_store(w, TRACE_SHARED_WRITE, i->field[2], bytes * count, (const u64 *)at);
  for (int l = 0; to && l < LANES; l++) {
    if (!(w->mask >> l & 1)) continue;
    put_lane(i, frame, to, l, bytes, count);
    to += bytes * count;
  }
}

INLINE void store_shared(const Instruction *i, char *frame, Warp *w, int bytes, int count) {
  const Shared s = shared_of(w->launch);
  const Marks marks = marks_of(w);
  const int size = bytes * count, site = i->field[2], stride = bytes == 8 ? 8 : 4;
  i64 at[LANES];
  shared_offsets(at, frame + i->field[0], i->field[3], i->field[1]);
  if (UNLIKELY(w->launch->trace != 0) && w->launch->trace_sites[site])
    trace_shared_store(i, frame, w, bytes, count, at);
  for (int l = 0; l < LANES; l++) {
    if (!(w->mask >> l & 1)) continue;
    if (!check_shared(w, at[l], size, site, 1u << l)) return;
    u8 item[16];
    for (int k = 0; k < count; k++) COPY(item + k * bytes, frame + i->field[4 + k] + stride * l, bytes);
    u8 *to = s.data + at[l];
    // What nobody wrote is not the same bytes, whatever lies there.
    const int is_change =
        __builtin_memcmp(to, item, (size_t)size) != 0 || !state_is(s.state + at[l], size, s.generation);
    COPY(to, item, size);
    mark_shared_written(s, at[l], size);
    note_write(w, marks, at[l], size, site, (u32)l, is_change);
  }
  if (marks.lanes) return;  // otherwise the race check does not tell lanes apart
  for (int l = 0; l < LANES; l++) {
    u8 item[16];
    for (int k = 0; k < count; k++) COPY(item + k * bytes, frame + i->field[4 + k] + stride * l, bytes);
    if (UNLIKELY((w->mask >> l & 1) && __builtin_memcmp(s.data + at[l], item, (size_t)size)))
      raise_fault(w, FAULT_LOST_WRITE, site, 1u << l, (u64)at[l]);
  }
}

#define SHARED(name, bytes, count)             \
  HANDLER(load_shared_##name) {                \
    load_shared(i, frame, w, bytes, count, 0); \
    return done(i);                            \
  }                                            \
  HANDLER(store_shared_##name) {               \
    store_shared(i, frame, w, bytes, count);   \
    return done(i);                            \
  }
#define SIGNED_SHARED(name, bytes, count)      \
  HANDLER(load_shared_signed_##name) {         \
    load_shared(i, frame, w, bytes, count, 1); \
    return done(i);                            \
  }
ACCESS_FORMS(SHARED)
SIGNED_ACCESS_FORMS(SIGNED_SHARED)

typedef u16 Matrix __attribute__((ext_vector_type(64), aligned(2)));
#define COLUMN(k) k, k + 8, k + 16, k + 24, k + 32, k + 40, k + 48, k + 56
INLINE void transpose(void *to, const void *from) {
  Matrix plain;
  COPY(&plain, from, sizeof plain);
  const Matrix turned = __builtin_shufflevector(plain, plain, COLUMN(0), COLUMN(1), COLUMN(2), COLUMN(3), COLUMN(4),
                                                COLUMN(5), COLUMN(6), COLUMN(7));
  COPY(to, &turned, sizeof turned);
}

// Lane 4 g + t holds row g, columns 2 t and 2 t + 1 of an 8x8 matrix; lane 8 m + r gives the address of row r of matrix
// m. Fields: address, offset, site, address is 64 bits wide, is transposed, matrices, registers.
HANDLER(load_matrix) {
  if (UNLIKELY(w->launch->trace && !w->launch->races_on)) raise_fault(w, FAULT_TRACE_FULL, i->field[2], w->mask, 0);
  const Shared s = shared_of(w->launch);
  const Marks marks = marks_of(w);
  const int site = i->field[2];
  i64 at[LANES];
  if (UNLIKELY(w->mask != ALL_LANES)) {
    raise_fault(w, FAULT_MEMBERS, site, w->mask, 0);
    return done(i);
  }
  shared_offsets(at, frame + i->field[0], i->field[3], i->field[1]);
  for (int m = 0; m < i->field[5]; m++) {
    u16 rows[8][8];
    for (int r = 0; r < 8; r++) {
      const int lane = 8 * m + r;
      if (!check_shared(w, at[lane], 16, site, 1u << lane)) return done(i);
      check_shared_written(w, s, at[lane], 16, site, 1u << lane);
      note_read(w, marks, at[lane], 16, site, SEVERAL_LANES);
      COPY(rows[r], s.data + at[lane], 16);
    }
    char *to = frame + i->field[6 + m];
    if (i->field[4])
      transpose(to, rows);
    else
      COPY(to, rows, sizeof rows);
  }
  return done(i);
}

// The same fields, of matrices that are stored.
HANDLER(store_matrix) {
  if (UNLIKELY(w->launch->trace && !w->launch->races_on)) raise_fault(w, FAULT_TRACE_FULL, i->field[2], w->mask, 0);
  const Shared s = shared_of(w->launch);
  const Marks marks = marks_of(w);
  const int site = i->field[2], matrices = i->field[5];
  i64 at[LANES];
  u16 rows[4][8][8];
  if (UNLIKELY(w->mask != ALL_LANES)) {
    raise_fault(w, FAULT_MEMBERS, site, w->mask, 0);
    return done(i);
  }
  shared_offsets(at, frame + i->field[0], i->field[3], i->field[1]);
  for (int m = 0; m < matrices; m++) {
    if (i->field[4])
      transpose(rows[m], frame + i->field[6 + m]);
    else
      COPY(rows[m], frame + i->field[6 + m], sizeof rows[m]);
  }
  for (int lane = 0; lane < 8 * matrices; lane++) {
    if (!check_shared(w, at[lane], 16, site, 1u << lane)) return done(i);
    u8 *to = s.data + at[lane];
    const u16 *row = rows[lane / 8][lane % 8];
    const int is_change = __builtin_memcmp(to, row, 16) != 0 || !state_is(s.state + at[lane], 16, s.generation);
    COPY(to, row, 16);
    mark_shared_written(s, at[lane], 16);
    note_write(w, marks, at[lane], 16, site, (u32)lane, is_change);
  }
  for (int lane = 0; lane < 8 * matrices; lane++)
    if (UNLIKELY(__builtin_memcmp(s.data + at[lane], rows[lane / 8][lane % 8], 16)))
      raise_fault(w, FAULT_LOST_WRITE, site, 1u << lane, (u64)at[lane]);
  return done(i);
}

// movmatrix: rows and columns changed round. Fields: result, matrix, site.
HANDLER(turn_matrix) {
  if (UNLIKELY(w->mask != ALL_LANES)) raise_fault(w, FAULT_MEMBERS, i->field[2], w->mask, 0);
  u16 turned[64];
  transpose(turned, frame + i->field[1]);
  COPY(frame + i->field[0], turned, sizeof turned);
  return done(i);
}
