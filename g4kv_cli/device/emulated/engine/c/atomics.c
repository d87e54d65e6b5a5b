// Atomics on integers whose results nobody reads, and whose order therefore does not matter.
#include "memory.h"
#include "races.h"

enum { ATOMIC_ADD, ATOMIC_MIN_UNSIGNED, ATOMIC_MAX_UNSIGNED, ATOMIC_MIN_SIGNED, ATOMIC_MAX_SIGNED, ATOMIC_AND, ATOMIC_OR, ATOMIC_XOR };

INLINE u64 updated(int operation, u64 old, u64 value, int bytes) {
  const i64 a = bytes == 8 ? (i64)old : (i32)(u32)old, b = bytes == 8 ? (i64)value : (i32)(u32)value;
  switch (operation) {
    case ATOMIC_ADD: return old + value;
    case ATOMIC_MIN_UNSIGNED: return old < value ? old : value;
    case ATOMIC_MAX_UNSIGNED: return old > value ? old : value;
    case ATOMIC_MIN_SIGNED: return a < b ? old : value;
    case ATOMIC_MAX_SIGNED: return a > b ? old : value;
    case ATOMIC_AND: return old & value;
    case ATOMIC_OR: return old | value;
    default: return old ^ value;
  }
}
INLINE u64 value_of(const Instruction *i, const char *frame, int lane, int bytes) {
  return bytes == 8 ? ((const u64 *)(frame + i->field[4]))[lane] : ((const u32 *)(frame + i->field[4]))[lane];
}
INLINE void update(u8 *at, int operation, u64 value, int bytes) {
  u64 old = 0;
  COPY(&old, at, bytes);  // the low bytes: all processors here are little-endian
  old = updated(operation, old, value, bytes);
  COPY(at, &old, bytes);
}

static void log_atomic(Launch *c, i64 begin, int bytes) {
  const Store *last = c->store_count ? &c->stores[c->store_count - 1] : 0;
  if (last && !last->each && last->begin == begin && last->bytes == bytes) return;
  const Store store = {.begin = begin, .bytes = bytes};
  c->stores[c->store_count++] = store;
}

// Fields: address, offset, site, address is 64 bits wide, value, operation.
INLINE void atomic_global(const Instruction *i, char *frame, Warp *w, int bytes) {
  Launch *c = w->launch;
  const int site = i->field[2];
  Range *hint = &c->hints[site];
  const U64 address = AT(U64, 0) + (u64)(i64)i->field[1];
  u64 at[LANES];
  COPY(at, &address, sizeof at);
  for (int l = 0; l < LANES; l++) {
    if (!(w->mask >> l & 1)) continue;
    if (!check_global(w, hint, at[l], (u64)bytes, bytes, site, 1u << l, UPDATES)) return;
    const i64 begin = (i64)(at[l] - c->base);
    save_old(c, begin, bytes);
    update(c->data + begin, i->field[5], value_of(i, frame, l, bytes), bytes);
    log_atomic(c, begin, bytes);
  }
}
INLINE void atomic_shared(const Instruction *i, char *frame, Warp *w, int bytes) {
  const Shared s = shared_of(w->launch);
  const Marks marks = marks_of(w);
  const int site = i->field[2];
  i64 at[LANES];
  shared_offsets(at, frame + i->field[0], i->field[3], i->field[1]);
  for (int l = 0; l < LANES; l++) {
    if (!(w->mask >> l & 1)) continue;
    if (!check_shared(w, s, at[l], bytes, site, 1u << l)) return;
    check_shared_written(w, s, at[l], bytes, site, 1u << l);
    update(s.data + at[l], i->field[5], value_of(i, frame, l, bytes), bytes);
    note_atomic(w, marks, at[l], bytes, site, (u32)l);
  }
}

#define ATOMIC(name, bytes)                \
  HANDLER(atomic_global_##name) {          \
    atomic_global(i, frame, w, bytes);     \
    return done(i);                        \
  }                                        \
  HANDLER(atomic_shared_##name) {          \
    atomic_shared(i, frame, w, bytes);     \
    return done(i);                        \
  }
ATOMIC(32, 4)
ATOMIC(64, 8)
