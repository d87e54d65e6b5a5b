// Loads and stores of global memory, and loads of parameters by address.
#include "memory.h"
#include "trace.h"

#define MOST_BYTES 32
#define MOST_TRACED 16  // of an access, which is written down as one

INLINE Mask lanes_in_a_row(U64 address, int size, u64 *first) {
  U64 step;
  for (u32 l = 0; l < LANES; l++) step[l] = (u64)l * (u64)size;
  *first = address[0];
  return pack64((U64)(address == step + *first));
}

// Fields: address, offset, site, is signed, registers. An address is a 64-bit register.
INLINE void load_global(const Instruction *i, char *frame, Warp *w, int bytes, int count, int is_signed) {
  Launch *c = w->launch;
  const int size = bytes * count, site = i->field[2];
  Range *hint = &c->hints[site];
  const U64 address = AT(U64, 0) + (u64)(i64)i->field[1];
  const Mask here = w->mask;
  u64 first;
  if (UNLIKELY(c->trace != 0)) {
    u64 at[LANES];
    COPY(at, &address, sizeof at);
    if (size > MOST_TRACED) raise_fault(w, FAULT_TRACE_FULL, site, here, at[0]);
    if (is_traced(c, site, at, size, here)) trace_access(w, TRACE_READ, site, size, at);
  }
  if (here == ALL_LANES && lanes_in_a_row(address, size, &first) == here) {
    if (!check_global(w, hint, first, (u64)(LANES * size), size, site, here, READS)) return;
    watch_load(w, first, LANES * size, site, LANES * w->number, size);
    const u8 *from = c->data + (first - c->base);
    for (int k = 0; k < count; k++)
      for (int l = 0; l < LANES; l++)
        load_element(frame, i->field[4 + k], l, from + l * size + k * bytes, bytes, is_signed);
    return;
  }
  u64 at[LANES];
  COPY(at, &address, sizeof at);
  first = at[first_lane(here)];
  if ((pack64((U64)(address == first)) & here) == here) {
    if (!check_global(w, hint, first, (u64)size, size, site, here, READS)) return;
    watch_load(w, first, size, site, here & (here - 1) ? SEVERAL_THREADS : LANES * w->number + first_lane(here), size);
    const u8 *from = c->data + (first - c->base);
    for (int k = 0; k < count; k++)
      for (int l = 0; l < LANES; l++) load_element(frame, i->field[4 + k], l, from + k * bytes, bytes, is_signed);
    return;
  }
  for (int l = 0; l < LANES; l++) {
    if (!(here >> l & 1)) continue;
    if (!check_global(w, hint, at[l], (u64)size, size, site, 1u << l, READS)) return;
    watch_load(w, at[l], size, site, LANES * w->number + l, size);
    const u8 *from = c->data + (at[l] - c->base);
    for (int k = 0; k < count; k++) load_element(frame, i->field[4 + k], l, from + k * bytes, bytes, is_signed);
  }
}

INLINE void store_global(const Instruction *i, char *frame, Warp *w, int bytes, int count) {
  Launch *c = w->launch;
  const int size = bytes * count, site = i->field[2];
  Range *hint = &c->hints[site];
  const U64 address = AT(U64, 0) + (u64)(i64)i->field[1];
  const Mask here = w->mask;
  u64 first;
  if (UNLIKELY(c->trace != 0)) {
    u64 at[LANES];
    COPY(at, &address, sizeof at);
    if (size > MOST_TRACED) raise_fault(w, FAULT_TRACE_FULL, site, here, at[0]);
    u8 *to = is_traced(c, site, at, size, here) ? trace_store(w, TRACE_WRITE, site, size, at) : 0;
    for (int l = 0; to && l < LANES; l++) {
      if (!(here >> l & 1)) continue;
      put_lane(i, frame, to, l, bytes, count);
      to += size;
    }
  }
  if (here == ALL_LANES && lanes_in_a_row(address, size, &first) == here) {
    if (!check_global(w, hint, first, (u64)(LANES * size), size, site, here, STORES)) return;
    i64 begin = (i64)(first - c->base);
    u8 row[LANES * MOST_BYTES];
    for (int l = 0; l < LANES; l++) put_lane(i, frame, row + l * size, l, bytes, count);
    save_old(c, begin, LANES * size);
    __builtin_memcpy(c->data + begin, row, (size_t)(LANES * size));
    if (hint->state == 0) __builtin_memset(c->state + begin, 1, (size_t)(LANES * size));
    log_run(c, begin, LANES * size, site, 0, LANES * w->number, size);
    return;
  }
  u64 at[LANES];
  COPY(at, &address, sizeof at);
  for (int l = 0; l < LANES; l++) {
    if (!(here >> l & 1)) continue;
    if (!check_global(w, hint, at[l], (u64)size, size, site, 1u << l, STORES)) return;
    i64 begin = (i64)(at[l] - c->base);
    u8 item[MOST_BYTES];
    put_lane(i, frame, item, l, bytes, count);
    save_old(c, begin, size);
    COPY(c->data + begin, item, size);
    if (hint->state == 0) __builtin_memset(c->state + begin, 1, (size_t)size);
    log_run(c, begin, size, site, 0, LANES * w->number + l, size);
  }
}

#define GLOBAL(name, bytes, count)             \
  HANDLER(load_global_##name) {                \
    load_global(i, frame, w, bytes, count, 0); \
    return done(i);                            \
  }                                            \
  HANDLER(store_global_##name) {               \
    store_global(i, frame, w, bytes, count);   \
    return done(i);                            \
  }
#define SIGNED_GLOBAL(name, bytes, count)      \
  HANDLER(load_global_signed_##name) {         \
    load_global(i, frame, w, bytes, count, 1); \
    return done(i);                            \
  }
ACCESS_FORMS(GLOBAL)
GLOBAL(v8_32, 4, 8)
GLOBAL(v4_64, 8, 4)
SIGNED_ACCESS_FORMS(SIGNED_GLOBAL)

// Fields: address, offset, site, element bytes, registers 4 to 7, count, is signed.
HANDLER(load_parameter) {
  const Launch *c = w->launch;
  const int bytes = i->field[3], count = i->field[8];
  const u64 *base = &AT(u64, 0);
  for (int l = 0; l < LANES; l++) {
    if (!(w->mask >> l & 1)) continue;
    u64 at = base[l] + (u64)(i64)i->field[1], size = (u64)(bytes * count);
    if (at > (u64)c->parameter_bytes || at + size > (u64)c->parameter_bytes) {
      raise_fault(w, FAULT_PARAMETER_BOUNDS, i->field[2], 1u << l, at);
      return done(i);
    }
    for (int k = 0; k < count; k++)
      load_element(frame, i->field[4 + k], l, c->parameters + at + (u64)(k * bytes), bytes, i->field[9]);
  }
  return done(i);
}
