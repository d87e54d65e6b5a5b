// Instructions across the lanes of a warp: shuffles, votes, reductions, and what lanes know about themselves.
#include "async.h"
#include "trace.h"
#include "barrier.h"

// Every lane here must be in its own member mask, and all members that have not exited must be here.
void check_members(Warp *w, const U32 *members, int site) {
  Mask here = w->mask;
  U32 lane_bit;
  for (u32 l = 0; l < LANES; l++) lane_bit[l] = 1u << l;
  U32 wrong = (U32)((*members & w->live & ~here) != 0u) | (U32)((*members & lane_bit) == 0u);
  Mask bad = pack32(wrong) & here;
  if (UNLIKELY(bad)) raise_fault(w, FAULT_MEMBERS, site, bad, 0);
}

// Lanes give each other values.
INLINE void exchange(Warp *w, const U32 *members, int site) {
  check_members(w, members, site);
  if (UNLIKELY(w->launch->trace != 0)) trace_members(w, TRACE_EXCHANGE, site, w->mask, (const u32 *)members);
}

enum { SHUFFLE_BUTTERFLY, SHUFFLE_INDEX, SHUFFLE_UP, SHUFFLE_DOWN };

// Fields: value, in-range predicate, a, b, c, members, mode, site.
HANDLER(shuffle) {
  const u32 *a = &AT(u32, 2), *b = &AT(u32, 3), *c = &AT(u32, 4);
  const int mode = i->field[6], site = i->field[7];
  Mask here = w->mask, in_range = 0, lost = 0;
  u32 result[LANES];
  exchange(w, &AT(U32, 5), site);
  for (u32 l = 0; l < LANES; l++) {
    u32 by = b[l] & 31u, clamp = c[l] & 31u, segment = (c[l] >> 8) & 31u;
    u32 limit = (l & segment) | (clamp & ~segment), from;
    int is_valid;
    if (mode == SHUFFLE_BUTTERFLY) {
      from = l ^ by;
      is_valid = from <= limit;
    } else if (mode == SHUFFLE_INDEX) {
      from = (l & segment) | (by & ~segment);
      is_valid = from <= limit;
    } else if (mode == SHUFFLE_UP) {
      from = l - by;
      is_valid = (i32)from >= (i32)limit;
    } else {
      from = l + by;
      is_valid = from <= limit;
    }
    from = is_valid ? from & 31u : l;
    in_range |= (u32)is_valid << l;
    lost |= (~here >> from & 1u) << l;
    result[l] = a[from];
  }
  lost &= here;
  if (UNLIKELY(lost)) raise_fault(w, FAULT_MEMBERS, site, lost, 0);
  COPY(frame + i->field[0], result, sizeof result);
  AT(Mask, 1) = in_range;
  return done(i);
}

enum { VOTE_ALL, VOTE_ANY, VOTE_UNIFORM };

// Fields: result, predicate, members, mode, site. Lanes with different masks may execute together.
HANDLER(vote) {
  exchange(w, &AT(U32, 2), i->field[4]);
  U32 members = AT(U32, 2) & w->mask, holds = members & AT(Mask, 1);
  U32 all = (U32)(holds == members), none = (U32)(holds == 0u);
  int mode = i->field[3];
  AT(Mask, 0) = pack32(mode == VOTE_ALL ? all : mode == VOTE_ANY ? ~none : all | none);
  return done(i);
}
HANDLER(ballot) {
  exchange(w, &AT(U32, 2), i->field[4]);
  AT(U32, 0) = AT(U32, 2) & w->mask & AT(Mask, 1);
  return done(i);
}

enum {
  REDUCE_ADD,
  REDUCE_MIN_UNSIGNED,
  REDUCE_MAX_UNSIGNED,
  REDUCE_MIN_SIGNED,
  REDUCE_MAX_SIGNED,
  REDUCE_AND,
  REDUCE_OR,
  REDUCE_XOR
};

INLINE u32 reduced(int mode, u32 a, u32 b) {
  switch (mode) {
    case REDUCE_ADD: return a + b;
    case REDUCE_MIN_UNSIGNED: return a < b ? a : b;
    case REDUCE_MAX_UNSIGNED: return a > b ? a : b;
    case REDUCE_MIN_SIGNED: return (i32)a < (i32)b ? a : b;
    case REDUCE_MAX_SIGNED: return (i32)a > (i32)b ? a : b;
    case REDUCE_AND: return a & b;
    case REDUCE_OR: return a | b;
    default: return a ^ b;
  }
}
// Fields: result, a, members, mode, site.
HANDLER(reduce) {
  u32 a[LANES], members[LANES], result[LANES] = {0};
  COPY(a, &AT(u32, 1), sizeof a);
  COPY(members, &AT(u32, 2), sizeof members);
  exchange(w, &AT(U32, 2), i->field[4]);
  for (Mask left = w->mask; left;) {  // the lanes of one member mask at a time
    Mask group = members[first_lane(left)] & w->mask, same = 0;
    if (!group) break;  // a fault was raised
    int first = first_lane(group);
    u32 total = a[first];
    for (int l = first + 1; l < LANES; l++)
      if (group >> l & 1) total = reduced(i->field[3], total, a[l]);
    for (int l = 0; l < LANES; l++)
      if ((left >> l & 1) && (members[l] & w->mask) == group) {
        result[l] = total;
        same |= 1u << l;
      }
    left &= ~same;
  }
  COPY(frame + i->field[0], result, sizeof result);
  return done(i);
}

// bar.warp.sync: if all living lanes meet, what each has done comes before what any does next.
void sync_warp(Warp *w, const U32 *members, int site) {
  Launch *c = w->launch;
  check_members(w, members, site);
  if (UNLIKELY(c->trace != 0)) trace_members(w, TRACE_WARP_BARRIER, site, w->mask, (const u32 *)members);
  const int is_whole = w->mask == w->live && !(pack32((U32)((*members & w->live) != w->live)) & w->live);
  if (!is_whole)
    c->is_guess = 1;
  else
    tick(w, site);
}
// Fields: members, site.
HANDLER(warp_barrier) {
  sync_warp(w, &AT(U32, 0), i->field[1]);
  return done(i);
}
// elect.sync: the lowest lane of the members, and whether a lane is it. Fields: result, predicate, members, site.
HANDLER(elect) {
  check_members(w, &AT(U32, 2), i->field[3]);
  const U32 members = AT(U32, 2) & w->mask;
  u32 leader[LANES];
  Mask is_leader = 0;
  for (int l = 0; l < LANES; l++) {
    leader[l] = members[l] ? (u32)__builtin_ctz(members[l]) : 0;
    is_leader |= (Mask)(leader[l] == (u32)l) << l;
  }
  COPY(frame + i->field[0], leader, sizeof leader);
  AT(Mask, 1) = is_leader;
  return done(i);
}
// match.sync: members of the same value, or all of them if they have one. Fields: result, predicate, value, members,
// all are asked for, values are 64 bits wide, site.
HANDLER(match) {
  exchange(w, &AT(U32, 3), i->field[6]);
  u64 values[LANES];
  u32 found[LANES];
  Mask same = 0;
  const U64 given = i->field[5] ? AT(U64, 2) : widen(AT(U32, 2));
  const U32 members = AT(U32, 3) & w->mask;
  COPY(values, &given, sizeof values);
  for (int l = 0; l < LANES; l++) {
    found[l] = pack64((U64)(given == values[l])) & members[l];
    if (!i->field[4]) continue;
    const int is_same = found[l] == members[l];
    same |= (Mask)is_same << l;
    if (!is_same) found[l] = 0;
  }
  COPY(frame + i->field[0], found, sizeof found);
  AT(Mask, 1) = same;
  return done(i);
}
HANDLER(active_mask) {
  AT(U32, 0) = (U32)(w->mask);
  return done(i);
}

enum {
  SPECIAL_THREAD,
  SPECIAL_BLOCK = 3,
  SPECIAL_BLOCK_EXTENT = 6,
  SPECIAL_GRID_EXTENT = 9,
  SPECIAL_LANE = 12,
  SPECIAL_WARP,
  SPECIAL_WARPS,
  SPECIAL_DYNAMIC_SHARED,
  SPECIAL_TOTAL_SHARED,
  SPECIAL_MASK_EQ,
  SPECIAL_MASK_LT,
  SPECIAL_MASK_LE,
  SPECIAL_MASK_GT,
  SPECIAL_MASK_GE,
  SPECIAL_CLUSTER_RANK,
  SPECIAL_CLUSTER_BLOCKS,
  SPECIAL_IN_CLUSTER,
  SPECIAL_CLUSTER_EXTENT = SPECIAL_IN_CLUSTER + 3,
  SPECIAL_CLUSTER = SPECIAL_CLUSTER_EXTENT + 3,
  SPECIAL_CLUSTERS = SPECIAL_CLUSTER + 3,
  SPECIAL_PROCESSOR = SPECIAL_CLUSTERS + 3
};
#define PROCESSORS 132  // as in interpreter/emit.py

// Where a block lies in its cluster, and the cluster in the grid.
INLINE i32 place_of_cluster(const Launch *c, int which) {
  const int axis = (which - SPECIAL_IN_CLUSTER) % 3, extent = c->cluster[axis];
  if (which < SPECIAL_CLUSTER_EXTENT) return c->coordinates[axis] % extent;
  if (which < SPECIAL_CLUSTER) return extent;
  return (which < SPECIAL_CLUSTERS ? c->coordinates[axis] : c->grid[axis]) / extent;
}

// Fields: result, which special register.
HANDLER(special) {
  const Launch *c = w->launch;
  u32 *result = &AT(u32, 0);
  int which = i->field[1];
  u32 x = (u32)c->extent[0], y = (u32)c->extent[1];
  for (u32 l = 0; l < LANES; l++) {
    u32 thread = (u32)w->number * LANES + l, bit = 1u << l, value;
    switch (which) {
      case SPECIAL_THREAD: value = thread % x; break;
      case SPECIAL_THREAD + 1: value = thread / x % y; break;
      case SPECIAL_THREAD + 2: value = thread / (x * y); break;
      case SPECIAL_LANE: value = l; break;
      case SPECIAL_WARP: value = (u32)w->number; break;
      case SPECIAL_WARPS: value = (u32)c->warp_count; break;
      case SPECIAL_DYNAMIC_SHARED: value = c->dynamic_shared_bytes; break;
      case SPECIAL_TOTAL_SHARED: value = c->total_shared_bytes; break;
      case SPECIAL_MASK_EQ: value = bit; break;
      case SPECIAL_MASK_LT: value = bit - 1; break;
      case SPECIAL_MASK_LE: value = bit | (bit - 1); break;
      case SPECIAL_MASK_GT: value = ~(bit | (bit - 1)); break;
      case SPECIAL_MASK_GE: value = ~(bit - 1); break;
      case SPECIAL_CLUSTER_RANK: value = (u32)w->rank; break;
      case SPECIAL_CLUSTER_BLOCKS: value = (u32)c->ranks; break;
      case SPECIAL_PROCESSOR: value = (u32)c->current % PROCESSORS; break;
      default:
        if (which >= SPECIAL_IN_CLUSTER) {
          value = (u32)place_of_cluster(c, which);
          break;
        }
        value = (u32)(which < SPECIAL_BLOCK_EXTENT  ? c->coordinates[which - SPECIAL_BLOCK]
                      : which < SPECIAL_GRID_EXTENT ? c->extent[which - SPECIAL_BLOCK_EXTENT]
                                                    : c->grid[which - SPECIAL_GRID_EXTENT]);
    }
    result[l] = value;
  }
  return done(i);
}

// A clock, which counts what was executed: each reading is larger than the one before. Field: result.
#define LEAST_TICKS 64
HANDLER(clock) {
  Launch *c = w->launch;
  c->ticks = (c->ticks > c->instructions ? c->ticks : c->instructions) + LEAST_TICKS;
  AT(U64, 0) = (U64)((u64)c->ticks);
  return done(i);
}

// ---- what a partial mask and a guard need ------------------------------------------------------------------------

// The lanes here take the second field's value, the others keep the first's.
HANDLER(blend_b32) {
  AT(U32, 0) = select32(expand(w->mask), AT(U32, 1), AT(U32, 0));
  return done(i);
}
HANDLER(blend_b64) {
  AT(U64, 0) = select64(w->mask, AT(U64, 1), AT(U64, 0));
  return done(i);
}
HANDLER(blend_pred) {
  AT(Mask, 0) = (AT(Mask, 1) & w->mask) | (AT(Mask, 0) & ~w->mask);
  return done(i);
}
// Fields: predicate, is negated, instructions to skip if no lane is left.
HANDLER(guard) {
  Mask holds = AT(Mask, 0) ^ (i->field[1] ? ALL_LANES : 0);
  w->mask = w->block_mask & holds;
  return w->mask ? i + 1 : i + 1 + i->field[2];
}
HANDLER(unguard) {
  (void)frame;
  w->mask = w->block_mask;
  return done(i);
}
