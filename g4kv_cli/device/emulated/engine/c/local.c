// Loads and stores of local memory: every lane has bytes of its own at the same addresses.
#include "memory.h"

// The offsets of all lanes, and whether they may access size bytes there; otherwise a fault was raised.
INLINE int local_offsets(const Instruction *i, const char *frame, Warp *w, int size, i64 *at) {
  const Launch *c = w->launch;
  const int site = i->field[2];
  shared_offsets(at, frame + i->field[0], i->field[3], i->field[1]);
  for (int l = 0; l < LANES; l++) {
    if (!(w->mask >> l & 1)) continue;
    if (UNLIKELY(at[l] < 0 || at[l] > c->local_bytes - size)) {
      raise_fault(w, FAULT_LOCAL_BOUNDS, site, 1u << l, (u64)at[l]);
      return 0;
    }
    if (UNLIKELY(at[l] & (size - 1))) {
      raise_fault(w, FAULT_MISALIGNED, site, 1u << l, (u64)at[l]);
      return 0;
    }
    at[l] += l * c->local_stride;
  }
  return 1;
}

// Fields: address, offset, site, address is 64 bits wide, registers.
INLINE void load_local(const Instruction *i, char *frame, Warp *w, int bytes, int count, int is_signed) {
  const u64 generation = w->launch->generation;
  const int size = bytes * count, site = i->field[2];
  i64 at[LANES];
  if (!local_offsets(i, frame, w, size, at)) return;
  for (int l = 0; l < LANES; l++) {
    if (!(w->mask >> l & 1)) continue;
    if (UNLIKELY(!state_is(w->local_state + at[l], size, generation)))
      raise_fault(w, FAULT_UNINITIALISED, site, 1u << l, (u64)at[l]);
    for (int k = 0; k < count; k++)
      load_element(frame, i->field[4 + k], l, w->local + at[l] + k * bytes, bytes, is_signed);
  }
}

INLINE void store_local(const Instruction *i, char *frame, Warp *w, int bytes, int count) {
  const u64 generation = w->launch->generation;
  const int size = bytes * count;
  i64 at[LANES];
  if (!local_offsets(i, frame, w, size, at)) return;
  for (int l = 0; l < LANES; l++) {
    if (!(w->mask >> l & 1)) continue;
    put_lane(i, frame, w->local + at[l], l, bytes, count);
    for (int k = 0; k < size; k += size < 8 ? size : 8)
      COPY(w->local_state + at[l] + k, &generation, size < 8 ? size : 8);
  }
}

// Where each lane's bytes lie. Field: result.
HANDLER(local_memory) {
  u64 *places = &AT(u64, 0);
  for (int l = 0; l < LANES; l++) places[l] = (u64)(uintptr_t)(w->local + l * w->launch->local_stride);
  return done(i);
}

#define LOCAL(name, bytes, count)             \
  HANDLER(load_local_##name) {                \
    load_local(i, frame, w, bytes, count, 0); \
    return done(i);                           \
  }                                           \
  HANDLER(store_local_##name) {               \
    store_local(i, frame, w, bytes, count);   \
    return done(i);                           \
  }
#define SIGNED_LOCAL(name, bytes, count)      \
  HANDLER(load_local_signed_##name) {         \
    load_local(i, frame, w, bytes, count, 1); \
    return done(i);                           \
  }
ACCESS_FORMS(LOCAL)
SIGNED_ACCESS_FORMS(SIGNED_LOCAL)
