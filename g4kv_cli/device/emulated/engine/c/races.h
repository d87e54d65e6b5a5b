// Races in shared memory between the lanes of a warp and the warps of a block, by vector clocks.
//
// clocks[w][v] is the latest event of warp v that warp w knows of; a barrier, and a bar.warp.sync of all its living
// lanes, begins a new event of the warp. A write marks its location with warp, lane and clock, a read with lane and
// clock in the column of its warp. Of another warp's marks those clash that are later than what the warp knows, of its
// own those of another lane since its last event. Two writes of the same bytes do no harm.
//
// Accesses of 16 bytes use the marks of 16 bytes, smaller ones those of 1 << granule_shift bytes and set has_fine
// there: a mark of 16 bytes concerns all its bytes, so that looking at both kinds is exact, and most code never sets
// has_fine. Clocks go on from block to block and launch to launch (clock), so that marks need no clearing.
//
// An atomic marks a location with lane and clock in the column of its warp, as a read does: others that load and store
// there must be ordered with it, other atomics need not.
//
// A bar.warp.sync of some lanes orders nothing here (is_guess): the interpreter looks at it more closely. So it does
// where a lane stores what another lane of its warp has read: all of them may have shuffled in between.
//
// Kernels with mbarriers, bulk copies or wgmma (is_async) have agents beside their warps (checks/clock_races.py): the
// wgmma of each warpgroup and the bulk copies that signal each mbarrier. Of each of the blocks that run together these
// are agents_each: the columns of the readers (warps, then warpgroups, reader_stride in all), then the mbarriers. A
// mark names the agent in place of warp and lane; lane_of has the lane of a warp's write. The second set of clocks,
// FENCED, knows only what a fence.proxy.async has shown to wgmma.
#pragma once
#include "engine.h"

#define CLOCK_BITS 21
#define CLOCK_MASK ((1u << CLOCK_BITS) - 1)
#define LANE_BITS 6
#define LANE_MASK (((1u << LANE_BITS) - 1) << CLOCK_BITS)
#define WARP_SHIFT (CLOCK_BITS + LANE_BITS)
#define SEVERAL_LANES 63u
enum { KNOWN, FENCED };
typedef u32 U32x8 __attribute__((ext_vector_type(8), aligned(4)));

// What the check needs of a launch and a warp, held in registers over the lanes of an instruction.
typedef struct {
  Places places;
  const u32 *known, *known_of;  // by the columns of readers; by the warps or agents of marks
  i64 stride;
  u32 now, own, lanes, is_by_lanes;
  int shift, number, is_on, owner_shift;
} Marks;

// One for whatever a mark may name: an agent, or a warp of a block.
INLINE int clock_stride(const Launch *c) {
  return c->is_async ? 1 << (32 - CLOCK_BITS) : c->agents + (1 << (32 - WARP_SHIFT));
}
INLINE u32 *clocks_of(const Launch *c, int set, int row) {
  return c->clocks + ((i64)set * c->resident_count * c->warp_count + row) * clock_stride(c);
}
INLINE int agent_of(const Warp *w) { return w->rank * w->launch->agents_each + w->number; }
INLINE int set_count(const Launch *c) { return c->is_async ? 2 : 1; }
INLINE void take_latest(u32 *latest, const u32 *known, int count) {
  for (int of = 0; of < count; of++) latest[of] = known[of] > latest[of] ? known[of] : latest[of];
}
// A new event of a warp.
INLINE void tick(Warp *w, int site) {
  u32 *own = clocks_of(w->launch, KNOWN, w->row) + agent_of(w);
  if (__builtin_expect(++*own >= CLOCK_MASK, 0)) raise_fault(w, FAULT_CLOCKS, site, 0, 0);
}

INLINE Marks marks_of(const Warp *w) {
  const Launch *c = w->launch;
  const u32 *all = clocks_of(c, KNOWN, w->row), *known = all + w->rank * c->agents_each;
  const u32 now = known[w->number];
  const Marks marks = {.places = c->places,
                       .is_by_lanes = 1,
                       .known = known,
                       .known_of = c->is_async ? all : known,
                       .stride = c->reader_stride,
                       .now = now,
                       .own = (c->is_async ? (u32)agent_of(w) << CLOCK_BITS : (u32)w->number << WARP_SHIFT) | now,
                       .lanes = c->is_async ? 0 : SEVERAL_LANES,
                       .owner_shift = c->is_async ? CLOCK_BITS : WARP_SHIFT,
                       .shift = c->granule_shift,
                       .number = w->number,
                       .is_on = c->races_on};
  return marks;
}

INLINE u32 mark_of(Marks m, u32 lane) { return m.own | (lane & m.lanes) << CLOCK_BITS; }
// Whether a write of another warp that this one does not know of, or of another lane since the last event. lane_of: one
// more than the lane that wrote, where marks do not name it.
INLINE u32 clashes(Marks m, u32 mark, const u8 *lane_of, u32 lane) {
  const u32 clock = mark & CLOCK_MASK, owner = mark >> m.owner_shift, own = mark_of(m, lane);
  const u32 later = clock > m.known_of[owner], same_event = m.lanes && ((mark ^ own) & ~LANE_MASK) == 0;
  const u32 by_other = !m.lanes && m.is_by_lanes && mark == own && *lane_of && *lane_of != (u8)(lane + 1);
  return later | by_other | (same_event & (((mark ^ own) & LANE_MASK) != 0 || lane == SEVERAL_LANES));
}
INLINE u32 coarse_clashes(Marks m, i64 coarse, u32 lane) {
  return clashes(m, m.places.writers[coarse], m.places.lane_of + coarse, lane);
}
INLINE u32 fine_clashes(Marks m, i64 fine, u32 lane) {
  return clashes(m, m.places.fine_writers[fine], m.places.fine_lane_of + fine, lane);
}
INLINE void mark_lane(Marks m, u8 *lane_of, u32 lane) {
  if (!m.lanes) *lane_of = m.is_by_lanes ? (u8)(lane + 1) : 0;
}
enum { BY_WARP = 1, BY_LANE = 2 };  // who read there
INLINE u32 read_clashes(Marks m, const u32 *readers, u32 lane) {
  U32x8 later = (U32x8)(0u), readers8, known8;
  for (i64 at = 0; at < m.stride; at += 8) {
    COPY(&readers8, readers + at, 32);
    COPY(&known8, m.known + at, 32);
    later |= (U32x8)((readers8 & CLOCK_MASK) > known8);
  }
  const u32 mine = readers[m.number];
  const u32 by_lane = m.is_by_lanes && (mine & CLOCK_MASK) == m.now && mine >> CLOCK_BITS != lane;
  return (__builtin_reduce_or(later) & BY_WARP) | by_lane << 1;
}
INLINE void mark_read(Marks m, u32 *reader, u32 lane) {
  const u32 mine = lane << CLOCK_BITS | m.now, old = *reader;
  *reader = (old & CLOCK_MASK) == m.now && old != mine ? SEVERAL_LANES << CLOCK_BITS | m.now : mine;
}

// Whether atomics at fine locations from one on are not ordered with an access of this lane.
INLINE u32 atomics_clash(Marks m, i64 fine, int count, u32 lane) {
  u32 clash = 0;
  if (UNLIKELY(m.places.fine_atomics != 0))
    for (int j = 0; j < count; j++) clash |= read_clashes(m, m.places.fine_atomics + (fine + j) * m.stride, lane);
  return clash;
}

// A read by a lane, or by several.
INLINE void note_read(Warp *w, Marks m, i64 at, int size, int site, u32 lane) {
  if (!m.is_on) return;
  const i64 coarse = at >> 4, fine = at >> m.shift;
  u32 clash = coarse_clashes(m, coarse, lane);
  if (size >= 16) {
    mark_read(m, &m.places.readers[coarse * m.stride + m.number], lane);
    if (UNLIKELY(m.places.has_fine[coarse])) {
      for (int j = 0; j < 16 >> m.shift; j++) clash |= fine_clashes(m, fine + j, lane);
      clash |= atomics_clash(m, fine, 16 >> m.shift, lane);
    }
  } else {
    m.places.has_fine[coarse] = 1;
    clash |= atomics_clash(m, fine, size >> m.shift, lane);
    for (int j = 0; j < size >> m.shift; j++) {
      clash |= fine_clashes(m, fine + j, lane);
      mark_read(m, &m.places.fine_readers[(fine + j) * m.stride + m.number], lane);
    }
  }
  if (UNLIKELY(clash)) raise_race(w, site, lane, (u64)at);
}

// What only other lanes of the warp have read is stored to.
INLINE void raise_guess(Warp *w, int site, u32 lane, i64 at) {
  raise_fault(w, FAULT_GUESSED_RACE, site, lane < LANES ? 1u << lane : w->mask, (u64)at);
}

// A write by a lane of other bytes than those that are there, or of the same.
INLINE void note_write(Warp *w, Marks m, i64 at, int size, int site, u32 lane, int is_change) {
  if (!m.is_on) return;
  const i64 coarse = at >> 4, fine = at >> m.shift;
  u32 clash = coarse_clashes(m, coarse, lane);
  u32 read = read_clashes(m, m.places.readers + coarse * m.stride, lane);
  if (size >= 16) {
    m.places.writers[coarse] = mark_of(m, lane);
    mark_lane(m, m.places.lane_of + coarse, lane);
    if (UNLIKELY(m.places.has_fine[coarse])) {
      for (int j = 0; j < 16 >> m.shift; j++) {
        clash |= fine_clashes(m, fine + j, lane);
        read |= read_clashes(m, m.places.fine_readers + (fine + j) * m.stride, lane);
      }
      read |= atomics_clash(m, fine, 16 >> m.shift, lane);
    }
  } else {
    m.places.has_fine[coarse] = 1;
    read |= atomics_clash(m, fine, size >> m.shift, lane);
    for (int j = 0; j < size >> m.shift; j++) {
      clash |= fine_clashes(m, fine + j, lane);
      read |= read_clashes(m, m.places.fine_readers + (fine + j) * m.stride, lane);
      m.places.fine_writers[fine + j] = mark_of(m, lane);
      mark_lane(m, m.places.fine_lane_of + fine + j, lane);
    }
  }
  if (UNLIKELY(clash | read)) {
    if (read == BY_LANE && !(clash && is_change))
      raise_guess(w, site, lane, at);
    else if (is_change || read)
      raise_race(w, site, lane, (u64)at);
    else
      raise_fault(w, FAULT_EQUAL_STORES, site, 1u << lane, (u64)at);
  }
}

// An atomic by a lane, on 4 or 8 bytes.
INLINE void note_atomic(Warp *w, Marks m, i64 at, int size, int site, u32 lane) {
  if (!m.is_on) return;
  const i64 coarse = at >> 4, fine = at >> m.shift;
  u32 clash = coarse_clashes(m, coarse, lane) | read_clashes(m, m.places.readers + coarse * m.stride, lane);
  m.places.has_fine[coarse] = 1;
  for (int j = 0; j < size >> m.shift; j++) {
    clash |= fine_clashes(m, fine + j, lane);
    clash |= read_clashes(m, m.places.fine_readers + (fine + j) * m.stride, lane);
    mark_read(m, &m.places.fine_atomics[(fine + j) * m.stride + m.number], lane);
  }
  if (UNLIKELY(clash == BY_LANE))
    raise_guess(w, site, lane, at);
  else if (UNLIKELY(clash))
    raise_race(w, site, lane, (u64)at);
}
