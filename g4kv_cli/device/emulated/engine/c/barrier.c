// Barriers of a thread block: who waits, who goes on, and what the race check learns from it.
//
// A barrier that counts threads completes with the warp that makes the count full. Whoever arrives after that must come
// after the meeting, and all must give the same count: checks/barrier_counts.py says why. bar.arrive, which does not
// wait, is left to the interpreter.
#include "barrier.h"
#include "races.h"

// After a barrier all members know what any of them knew before it: the result.
static void join_clocks(Launch *c, u32 members, u32 *latest) {
  __builtin_memset(latest, 0, 4 * LANES);
  for (int m = 0; m < c->warp_count; m++)
    for (int of = 0; of < c->warp_count; of++)
      if ((members >> m & 1) && c->clocks[m][of] > latest[of]) latest[of] = c->clocks[m][of];
  for (int m = 0; m < c->warp_count; m++) {
    if (!(members >> m & 1)) continue;
    COPY(c->clocks[m], latest, 4 * (size_t)c->warp_count);
    if (++c->clocks[m][m] >= CLOCK_MASK) raise_fault(&c->warps[m], FAULT_CLOCKS, c->warps[m].site, 0, 0);
  }
}

static void release(Launch *c, Barrier *barrier, int number) {
  const int needed = barrier->expected ? barrier->expected : c->here->live_threads, counts = barrier->expected != 0;
  if (barrier->arrived == 0 || barrier->arrived < needed) return;
  for (int m = 0; m < c->warp_count; m++) {
    if (!(barrier->waiting >> m & 1)) continue;
    Warp *w = &c->warps[m];
    // Named barriers are named so that different code can meet there.
    if (number == 0 && w->site != barrier->site) raise_fault(w, FAULT_DIVERGENT_BARRIER, w->site, w->waiting, 0);
    if (counts && barrier->arrived > needed) raise_fault(w, FAULT_BARRIER_COUNT, w->site, w->waiting, 0);
    make_pending(w, w->following, w->waiting);
    w->waiting = 0;
    w->state = WARP_READY;
  }
  join_clocks(c, barrier->waiting, barrier->met);
  barrier->has_met = counts;
  if (!counts)
    for (int other = 0; other < BARRIERS; other++) c->barriers[other].has_met = 0;
  barrier->last_held = barrier->held;
  barrier->last_given = barrier->given;
  barrier->waiting = 0;
  barrier->arrived = barrier->held = barrier->given = 0;
}

static Barrier *barrier_of(Warp *w, int number, int site) {
  if (number >= 0 && number < BARRIERS) return &w->launch->barriers[number];
  raise_fault(w, FAULT_DIVERGENT_BARRIER, site, w->mask, 0);
  return 0;
}

// Whether a warp comes after the latest meeting at a barrier that counts.
static int is_after_meeting(const Launch *c, const Barrier *barrier, int warp) {
  int is_after = 1;
  for (int of = 0; of < c->warp_count; of++) is_after &= c->clocks[warp][of] >= barrier->met[of];
  return is_after;
}

void arrive(Warp *w, int number, int threads, int site, int following) {
  Launch *c = w->launch;
  Barrier *barrier = barrier_of(w, number, site);
  if (!barrier) return;
  const int is_whole = threads == c->threads || threads == LANES * c->warp_count, expected = is_whole ? 0 : threads;
  if (w->mask != w->live) raise_fault(w, FAULT_DIVERGENT_BARRIER, site, w->mask, 0);
  if ((barrier->arrived && barrier->expected != expected) ||
      (barrier->has_met && !is_after_meeting(c, barrier, w->number)))
    raise_fault(w, FAULT_BARRIER_COUNT, site, w->mask, 0);
  if (!barrier->waiting) barrier->site = site;
  w->waiting = w->mask;
  w->following = following;
  w->site = site;
  w->state = WARP_WAITS;
  barrier->waiting |= 1u << w->number;
  // Threads that have exited do not count; but a warp stands for 32 at a barrier with a count.
  barrier->arrived += expected ? LANES : __builtin_popcount(w->mask);
  barrier->expected = expected;
  release(c, barrier, number);
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
