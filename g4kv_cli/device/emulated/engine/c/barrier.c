// Barriers of a thread block: who waits, who goes on, and what the race check learns from it.
//
// A barrier that counts threads completes with the warp that makes the count full. Whoever arrives after that must come
// after the meeting, and all must give the same count: checks/barrier_counts.py says why. Where warps arrive without
// waiting, not all are ordered, so that such a barrier is never one of the whole block.
#include "barrier.h"
#include "races.h"
#include "trace.h"

INLINE u32 *signals_of(const Launch *c, int number) {
  return c->here->signals + (i64)number * set_count(c) * c->agents;
}

// After a barrier all members know what any of them knew before it, and who only arrived.
static void join_clocks(Launch *c, Barrier *barrier, int number) {
  const int sets = set_count(c), agents = c->agents;
  u32 *signals = signals_of(c, number);
  for (int set = 0; set < sets; set++) {
    u32 *latest = c->joined + set * agents;
    if (barrier->signalled) {
      COPY(latest, signals + set * agents, 4 * (size_t)agents);
      __builtin_memset(signals + set * agents, 0, 4 * (size_t)agents);
    } else
      __builtin_memset(latest, 0, 4 * (size_t)agents);
    for (int m = 0; m < c->warp_count; m++)
      if (barrier->waiting >> m & 1) take_latest(latest, clocks_of(c, set, c->warps[m].row), agents);
    for (int m = 0; m < c->warp_count; m++)
      if (barrier->waiting >> m & 1) COPY(clocks_of(c, set, c->warps[m].row), latest, 4 * (size_t)agents);
  }
  COPY(barrier->met, c->joined + c->warps->rank * c->agents_each, 4 * (size_t)c->warp_count);
  for (int m = 0; m < c->warp_count; m++)
    if (barrier->waiting >> m & 1) tick(&c->warps[m], c->warps[m].site);
}

static void release(Launch *c, Barrier *barrier, int number) {
  const int needed = barrier->expected ? barrier->expected : c->here->live_threads, counts = barrier->expected != 0;
  if (barrier->arrived == 0 || barrier->arrived < needed) return;
  for (int m = 0; m < c->warp_count; m++) {
    if (!(barrier->waiting >> m & 1)) continue;
    Warp *w = c->warps + m;
    // Named barriers are named so that different code can meet there.
    if (number == 0 && w->site != barrier->site) raise_fault(w, FAULT_DIVERGENT_BARRIER, w->site, w->waiting, 0);
    make_pending(w, w->following, w->waiting);
    w->waiting = 0;
    w->state = WARP_READY;
  }
  if (UNLIKELY(c->trace != 0)) trace(c->warps, TRACE_BARRIER, counts, number, 0, barrier->waiting, 0);
  if (counts && barrier->arrived > needed) raise_fault(c->warps, FAULT_BARRIER_COUNT, barrier->site, 0, 0);
  join_clocks(c, barrier, number);
  barrier->has_met = counts;
  if (!counts)
    for (int other = 0; other < BARRIERS; other++) c->barriers[other].has_met = 0;
  barrier->last_held = barrier->held;
  barrier->last_given = barrier->given;
  barrier->waiting = barrier->signalled = 0;
  barrier->arrived = barrier->held = barrier->given = 0;
}

static Barrier *barrier_of(Warp *w, int number, int site) {
  if (number >= 0 && number < BARRIERS) return &w->launch->barriers[number];
  raise_fault(w, FAULT_DIVERGENT_BARRIER, site, w->mask, 0);
  return 0;
}

// Whether a warp comes after the latest meeting at a barrier that counts.
static int is_after_meeting(const Launch *c, const Barrier *barrier, const Warp *w) {
  const u32 *known = clocks_of(c, KNOWN, w->row) + w->rank * c->agents_each;
  int is_after = 1;
  for (int of = 0; of < c->warp_count; of++) is_after &= known[of] >= barrier->met[of];
  return is_after;
}

// Whether the lanes here, all that live of a warp, may arrive at a barrier with a count; otherwise a fault was raised.
static void check_arrival(Warp *w, const Barrier *barrier, int expected, int site) {
  const Launch *c = w->launch;
  const int given = barrier->expected ? barrier->expected : c->threads, wanted = expected ? expected : c->threads;
  if (w->mask != w->live) raise_fault(w, FAULT_DIVERGENT_BARRIER, site, w->mask, 0);
  if ((barrier->arrived && given != wanted) || (barrier->has_met && !is_after_meeting(c, barrier, w)) ||
      (barrier->signalled >> w->number & 1))
    raise_fault(w, FAULT_BARRIER_COUNT, site, w->mask, 0);
}

void arrive(Warp *w, int number, int threads, int site, int following) {
  Launch *c = w->launch;
  Barrier *barrier = barrier_of(w, number, site);
  if (!barrier) return;
  const int takes_all = threads == 0 || threads == c->threads || threads == LANES * c->warp_count;
  const int is_whole = takes_all && !barrier->signalled, expected = is_whole ? 0 : threads ? threads : c->threads;
  check_arrival(w, barrier, expected, site);
  if (!barrier->waiting) barrier->site = site;
  w->waiting = w->mask;
  w->following = following;
  w->site = site;
  w->state = WARP_WAITS;
  barrier->waiting |= 1u << w->number;
  // Threads that have exited are not waited for and do not count; but a warp stands for 32 at a barrier with a count.
  barrier->arrived += expected ? LANES : __builtin_popcount(w->mask);
  barrier->expected = expected;
  release(c, barrier, number);
}

// bar.arrive: counts a warp that goes on. Fields: number, threads, site.
HANDLER(barrier_signal) {
  Launch *c = w->launch;
  const int site = i->field[2], number = uniform(w, &AT(U32, 0), site), threads = uniform(w, &AT(U32, 1), site);
  Barrier *barrier = barrier_of(w, number, site);
  // What that orders is not written down.
  if (UNLIKELY(c->trace != 0)) raise_fault(w, FAULT_TRACE_FULL, site, w->mask, 0);
  if (UNLIKELY(threads == 0)) raise_fault(w, FAULT_UNSURE, site, w->mask, 0);
  if (!barrier || threads <= 0) return done(i);
  check_arrival(w, barrier, threads, site);
  if (!barrier->waiting) barrier->site = site;
  barrier->signalled |= 1u << w->number;
  barrier->arrived += LANES;
  barrier->expected = threads;
  for (int set = 0; set < set_count(c); set++)
    take_latest(signals_of(c, number) + set * c->agents, clocks_of(c, set, w->row), c->agents);
  tick(w, site);
  release(c, barrier, number);
  return done(i);
}

void release_after_exit(Launch *c) {
  for (int number = 0; number < BARRIERS; number++)
    if (c->barriers[number].waiting) release(c, &c->barriers[number], number);
}

// The value all lanes here have in a register, or -1 with a fault: other values are the interpreter's to judge.
int uniform(Warp *w, const U32 *values, int site) {
  const u32 first = ((const u32 *)values)[first_lane(w->mask)];
  const Mask differs = pack32((U32)(*values != first)) & w->mask;
  if (UNLIKELY(differs)) raise_fault(w, FAULT_UNKNOWN_RESULT, site, differs, 0);
  return differs ? -1 : (int)first;
}

// First half of bar.red. Fields: number, predicate, site.
HANDLER(barrier_contribute) {
  const int number = uniform(w, &AT(U32, 0), i->field[2]);
  Barrier *barrier = barrier_of(w, number, i->field[2]);
  if (!barrier) return done(i);
  barrier->held += __builtin_popcount(AT(Mask, 1) & w->mask);
  barrier->given += __builtin_popcount(w->mask);
  return done(i);
}

enum { REDUCTION_AND, REDUCTION_OR };

// Second half of bar.red, behind the barrier: the count of predicates that held. Fields: result, number, site.
HANDLER(barrier_count) {
  const int number = uniform(w, &AT(U32, 1), i->field[2]);
  const Barrier *barrier = barrier_of(w, number, i->field[2]);
  if (barrier) AT(U32, 0) = (U32)((u32)barrier->last_held);
  return done(i);
}
// The same as a predicate. Fields: result, number, site, which.
HANDLER(barrier_vote) {
  const int number = uniform(w, &AT(U32, 1), i->field[2]);
  const Barrier *barrier = barrier_of(w, number, i->field[2]);
  if (!barrier) return done(i);
  const int holds = i->field[3] == REDUCTION_OR ? barrier->last_held > 0 : barrier->last_held == barrier->last_given;
  AT(Mask, 0) = holds ? ALL_LANES : 0;
  return done(i);
}
