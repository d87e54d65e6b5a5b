// Races between warps in shared memory, by vector clocks: exact for every access.
//
// clocks[w][v] is the latest event of warp v that warp w knows of. A write marks its location with warp << 24 | clock,
// a read with the reader's clock in a column of its own. An access clashes with a mark later than what its warp knows.
// Accesses of 16 bytes use the marks of 16 bytes, smaller ones those of 1 << granule_shift bytes and set has_fine
// there: a mark of 16 bytes concerns all its bytes, so that looking at both kinds is exact, and most code never sets
// has_fine. Clocks go on from block to block and launch to launch (clock), so that marks need no clearing.
#pragma once
#include "engine.h"

#define CLOCK_BITS 24
#define CLOCK_MASK ((1u << CLOCK_BITS) - 1)
typedef u32 U32x8 __attribute__((ext_vector_type(8), aligned(4)));

INLINE u32 is_later(const u32 *known, u32 mark) { return (mark & CLOCK_MASK) > known[mark >> CLOCK_BITS]; }
INLINE u32 any_later(const u32 *readers, const u32 *known, int stride) {
  U32x8 later = (U32x8)(0u), readers8, known8;
  for (int at = 0; at < stride; at += 8) {
    COPY(&readers8, readers + at, 32);
    COPY(&known8, known + at, 32);
    later |= (U32x8)(readers8 > known8);
  }
  return __builtin_reduce_or(later);
}

INLINE void note_read(Warp *w, i64 at, int size, int site, Mask lanes) {
  Launch *c = w->launch;
  if (!c->races_on) return;
  const i64 coarse = at >> 4, fine = at >> c->granule_shift, stride = c->reader_stride;
  const u32 *known = c->clocks[w->number];
  const u32 now = known[w->number];
  u32 clash = is_later(known, c->writers[coarse]);
  if (size >= 16) {
    c->readers[coarse * stride + w->number] = now;
    if (UNLIKELY(c->has_fine[coarse]))
      for (int j = 0; j < 16 >> c->granule_shift; j++) clash |= is_later(known, c->fine_writers[fine + j]);
  } else {
    c->has_fine[coarse] = 1;
    for (int j = 0; j < size >> c->granule_shift; j++) {
      clash |= is_later(known, c->fine_writers[fine + j]);
      c->fine_readers[(fine + j) * stride + w->number] = now;
    }
  }
  if (UNLIKELY(clash)) raise_fault(w, FAULT_SHARED_RACE, site, lanes, (u64)at);
}

INLINE void note_write(Warp *w, i64 at, int size, int site, Mask lanes) {
  Launch *c = w->launch;
  if (!c->races_on) return;
  const i64 coarse = at >> 4, fine = at >> c->granule_shift;
  const int stride = c->reader_stride;
  const u32 *known = c->clocks[w->number];
  const u32 mark = (u32)w->number << CLOCK_BITS | known[w->number];
  u32 clash = is_later(known, c->writers[coarse]) | any_later(c->readers + coarse * stride, known, stride);
  if (size >= 16) {
    c->writers[coarse] = mark;
    if (UNLIKELY(c->has_fine[coarse]))
      for (int j = 0; j < 16 >> c->granule_shift; j++)
        clash |= is_later(known, c->fine_writers[fine + j]) |
                 any_later(c->fine_readers + (fine + j) * stride, known, stride);
  } else {
    c->has_fine[coarse] = 1;
    for (int j = 0; j < size >> c->granule_shift; j++) {
      clash |=
          is_later(known, c->fine_writers[fine + j]) | any_later(c->fine_readers + (fine + j) * stride, known, stride);
      c->fine_writers[fine + j] = mark;
    }
  }
  if (UNLIKELY(clash)) raise_fault(w, FAULT_SHARED_RACE, site, lanes, (u64)at);
}
