// Checks of addresses, for every space.
#pragma once
#include "engine.h"

// Whether size bytes of state all equal one repeated byte.
INLINE int state_is(const u8 *state, int size, u64 repeated) {
  u64 differs = 0, eight;
  u32 four;
  u16 two;
  switch (size) {
    case 1: return state[0] == (u8)repeated;
    case 2: COPY(&two, state, 2); return two == (u16)repeated;
    case 4: COPY(&four, state, 4); return four == (u32)repeated;
    default:
      for (int at = 0; at < size; at += 8) {
        COPY(&eight, state + at, 8);
        differs |= eight ^ repeated;
      }
      return differs == 0;
  }
}
INLINE u64 repeated(u8 byte) { return 0x0101010101010101u * (u64)byte; }

void check_reader(Warp *w, u64 address, u64 bytes, int site, Mask lanes);
int find_range(const Launch *c, u64 begin, u64 end, Range *hint, enum Access access);

// Whether lanes may access bytes at a global address, in pieces of size bytes; otherwise a fault was raised.
INLINE int check_global(Warp *w, Range *hint, u64 address, u64 bytes, int size, int site, Mask lanes,
                        enum Access access) {
  Launch *c = w->launch;
  if (UNLIKELY(address < hint->begin || address + bytes > hint->end || address + bytes < address) &&
      !find_range(c, address, address + bytes, hint, access)) {
    raise_fault(w, FAULT_GLOBAL_BOUNDS, site, lanes, address);
    return 0;
  }
  if (UNLIKELY(address & (u64)(size - 1))) {
    raise_fault(w, FAULT_MISALIGNED, site, lanes, address);
    return 0;
  }
  if (access == READS && UNLIKELY(c->owned_count | c->in_front_count)) check_reader(w, address, bytes, site, lanes);
  if (access != STORES && hint->state == 0) {
    const u8 *state = c->state + (address - c->base);
    int is_good = 1;
    if (bytes == (u64)size)
      is_good = state_is(state, size, repeated(1));
    else
      for (u64 at = 0; at < bytes; at += (u64)size) is_good &= state_is(state + at, size, repeated(1));
    if (UNLIKELY(!is_good)) raise_fault(w, FAULT_UNINITIALISED, site, lanes, address);
  }
  return 1;
}

// Shared memory of the block that runs, held in registers over the lanes of an instruction.
typedef struct {
  u8 *data, *state;
  u64 generation;
} Shared;
INLINE Shared shared_of(const Launch *c) {
  const Shared shared = {c->shared, c->shared_state, c->generation};
  return shared;
}
// Whether a lane may access bytes at a shared offset: of the variable of which the address was made (ptx/origins.py).
INLINE int check_shared(Warp *w, i64 at, int size, int site, Mask lanes) {
  const i32 *within = w->launch->within[site];
  if (UNLIKELY(at < within[0] || at > within[1] - size)) {  // at may be any 64 bits
    raise_fault(w, FAULT_SHARED_BOUNDS, site, lanes, (u64)at);
    return 0;
  }
  if (UNLIKELY(at & (size - 1))) {
    raise_fault(w, FAULT_MISALIGNED, site, lanes, (u64)at);
    return 0;
  }
  return 1;
}
INLINE void check_shared_written(Warp *w, Shared s, i64 at, int size, int site, Mask lanes) {
  if (UNLIKELY(!state_is(s.state + at, size, s.generation)))
    raise_fault(w, FAULT_SHARED_UNINITIALISED, site, lanes, (u64)at);
}
INLINE void mark_shared_written(Shared s, i64 at, int size) {
  for (int k = 0; k < size; k += size < 8 ? size : 8) COPY(s.state + at + k, &s.generation, size < 8 ? size : 8);
}
// Shared offsets of all lanes; a 32-bit base plus its offset wraps at 32 bits.
INLINE void shared_offsets(i64 *at, const char *base, int is_wide, i64 offset) {
  if (is_wide)
    for (int l = 0; l < LANES; l++) at[l] = (i64)(((const u64 *)base)[l] + (u64)offset);
  else
    for (int l = 0; l < LANES; l++) at[l] = (i64)(u32)(((const u32 *)base)[l] + (u32)offset);
}

// Element k of a lane's access lies element_bytes * k behind the lane's address.
INLINE void load_element(char *frame, int field, int lane, const u8 *from, int bytes, int is_signed) {
  if (bytes == 8) {
    COPY(frame + field + 8 * lane, from, 8);
    return;
  }
  u32 value;
  u16 half;
  if (bytes == 4)
    COPY(&value, from, 4);
  else if (bytes == 2) {
    COPY(&half, from, 2);
    value = is_signed ? (u32)(i32)(int16_t)half : half;
  } else
    value = is_signed ? (u32)(i32)(int8_t)*from : *from;
  COPY(frame + field + 4 * lane, &value, 4);
}
INLINE void put_lane(const Instruction *i, const char *frame, u8 *to, int lane, int bytes, int count) {
  for (int k = 0; k < count; k++) COPY(to + k * bytes, frame + i->field[4 + k] + (bytes == 8 ? 8 : 4) * lane, bytes);
}

// Runs of bytes that threads stored to, or loaded where that is watched. Warps that run together may do so in other
// company the next time, so that their runs are kept apart.
#define SEVERAL_THREADS (-1)
INLINE void log_run(Launch *c, i64 begin, int bytes, int site, int is_load, int first, int each) {
  if (c->store_count) {
    Store *last = &c->stores[c->store_count - 1];
    if (last->site == site && last->block == c->current && last->begin + last->bytes == begin &&
        last->is_load == is_load && last->each == each && last->first + last->bytes / each == first &&
        !(c->together && first % LANES == 0)) {
      last->bytes += bytes;
      return;
    }
  }
  Store *store = &c->stores[c->store_count++];
  store->begin = begin;
  store->bytes = bytes;
  store->site = site;
  store->block = c->current;
  store->is_load = is_load;
  store->first = first;
  store->each = each;
}
INLINE void watch_load(Warp *w, u64 address, int bytes, int site, int first, int each) {
  Launch *c = w->launch;
  if (UNLIKELY(address < c->watch_end && address + (u64)bytes > c->watch_begin))
    log_run(c, (i64)(address - c->base), bytes, site, 1, first, each);
}

// Loads and stores of every space, as FORM(name, bytes, count); registers of signed ones are extended by the sign.
#define ACCESS_FORMS(FORM) \
  FORM(v1_8, 1, 1)         \
  FORM(v2_8, 1, 2)         \
  FORM(v4_8, 1, 4)         \
  FORM(v1_16, 2, 1)        \
  FORM(v2_16, 2, 2)        \
  FORM(v4_16, 2, 4)        \
  FORM(v1_32, 4, 1)        \
  FORM(v2_32, 4, 2)        \
  FORM(v4_32, 4, 4)        \
  FORM(v1_64, 8, 1)        \
  FORM(v2_64, 8, 2)
#define SIGNED_ACCESS_FORMS(FORM) \
  FORM(v1_8, 1, 1)                \
  FORM(v2_8, 1, 2)                \
  FORM(v4_8, 1, 4)                \
  FORM(v1_16, 2, 1)               \
  FORM(v2_16, 2, 2)               \
  FORM(v4_16, 2, 4)

// Before global bytes change: keep what their page held (undo.c).
#define PAGE_SHIFT 10
#define PAGE_BYTES (1 << PAGE_SHIFT)
void save_page(Launch *c, i64 page);
INLINE void save_old(Launch *c, i64 begin, i64 bytes) {
  for (i64 page = begin >> PAGE_SHIFT; page <= (begin + bytes - 1) >> PAGE_SHIFT; page++)
    if (UNLIKELY(__atomic_load_n(&c->saved_in[page], __ATOMIC_ACQUIRE) != c->launch_number)) save_page(c, page);
}
