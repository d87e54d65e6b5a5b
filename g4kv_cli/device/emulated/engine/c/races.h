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

// What the check needs of a launch and a warp, held in registers over the lanes of an instruction.
typedef struct {
  u32 *writers, *readers, *fine_writers, *fine_readers;
  u8 *has_fine;
  const u32 *known;
  i64 stride;
  u32 now, mark;
  int shift, number, is_on;
} Marks;

INLINE Marks marks_of(const Warp *w) {
  const Launch *c = w->launch;
  const u32 *known = c->clocks[w->number], now = known[w->number];
  const Marks marks = {.writers = c->writers,
                       .readers = c->readers,
                       .fine_writers = c->fine_writers,
                       .fine_readers = c->fine_readers,
                       .has_fine = c->has_fine,
                       .known = known,
                       .stride = c->reader_stride,
                       .now = now,
                       .mark = (u32)w->number << CLOCK_BITS | now,
                       .shift = c->granule_shift,
                       .number = w->number,
                       .is_on = c->races_on};
  return marks;
}

INLINE u32 is_later(const u32 *known, u32 mark) { return (mark & CLOCK_MASK) > known[mark >> CLOCK_BITS]; }
INLINE u32 any_later(const u32 *readers, const u32 *known, i64 stride) {
  U32x8 later = (U32x8)(0u), readers8, known8;
  for (i64 at = 0; at < stride; at += 8) {
    COPY(&readers8, readers + at, 32);
    COPY(&known8, known + at, 32);
    later |= (U32x8)(readers8 > known8);
  }
  return __builtin_reduce_or(later);
}

INLINE void note_read(Warp *w, Marks m, i64 at, int size, int site, Mask lanes) {
  if (!m.is_on) return;
  const i64 coarse = at >> 4, fine = at >> m.shift;
  u32 clash = is_later(m.known, m.writers[coarse]);
  if (size >= 16) {
    m.readers[coarse * m.stride + m.number] = m.now;
    if (UNLIKELY(m.has_fine[coarse]))
      for (int j = 0; j < 16 >> m.shift; j++) clash |= is_later(m.known, m.fine_writers[fine + j]);
  } else {
    m.has_fine[coarse] = 1;
    for (int j = 0; j < size >> m.shift; j++) {
      clash |= is_later(m.known, m.fine_writers[fine + j]);
      m.fine_readers[(fine + j) * m.stride + m.number] = m.now;
    }
  }
  if (UNLIKELY(clash)) raise_fault(w, FAULT_SHARED_RACE, site, lanes, (u64)at);
}

INLINE u32 fine_clash(Marks m, i64 fine) {
  return is_later(m.known, m.fine_writers[fine]) | any_later(m.fine_readers + fine * m.stride, m.known, m.stride);
}
INLINE void note_write(Warp *w, Marks m, i64 at, int size, int site, Mask lanes) {
  if (!m.is_on) return;
  const i64 coarse = at >> 4, fine = at >> m.shift;
  u32 clash = is_later(m.known, m.writers[coarse]) | any_later(m.readers + coarse * m.stride, m.known, m.stride);
  if (size >= 16) {
    m.writers[coarse] = m.mark;
    if (UNLIKELY(m.has_fine[coarse]))
      for (int j = 0; j < 16 >> m.shift; j++) clash |= fine_clash(m, fine + j);
  } else {
    m.has_fine[coarse] = 1;
    for (int j = 0; j < size >> m.shift; j++) {
      clash |= fine_clash(m, fine + j);
      m.fine_writers[fine + j] = m.mark;
    }
  }
  if (UNLIKELY(clash)) raise_fault(w, FAULT_SHARED_RACE, site, lanes, (u64)at);
}
