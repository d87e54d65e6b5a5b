// A chunk of thread blocks run together, in the order of the interpreter (interpreter/chunk.py): step by step all lanes
// of all blocks that wait at the lowest basic block, warp after warp. Who comes first at an atomic, and who waits how
// long for whom, is then the same.
//
// A loop that waits for other threads (warp/spins.py): lanes that come to its begin again, and find memory as it was
// when they came there before, sleep until something has changed and nobody else can run.
#include "races.h"
#include "run.h"
#include "trace.h"

// ready: for each basic block, the warps of the chunk of which lanes wait to run it, one bit each; ready_blocks: one
// bit a basic block; left: the warps that the step has still to run, stepped: all of it. step: its basic block, or -1.
struct Chunk {
  u64 *ready, *ready_blocks, *left, *stepped;
  i64 words, block_words, live, step_lanes, idle_turns, idle_at;
  i32 residents, step, is_whole, has_parked, has_asleep, has_turning;
};

static size_t align64(size_t bytes) { return (bytes + 63) & ~(size_t)63; }
size_t lay_out_chunk(Launch *c, u8 *base) {
  if (!c->together) return 0;
  const size_t words = ((size_t)c->resident_count * (size_t)c->warp_count + 63) >> 6;
  const size_t block_words = ((size_t)c->block_count + 63) >> 6, bits = align64(8 * words);
  const size_t ready = align64(8 * words * (size_t)c->block_count), ready_blocks = align64(8 * block_words);
  if (base) {
    Chunk *k = c->chunk = (Chunk *)base;
    base += align64(sizeof(Chunk));
    k->ready = (u64 *)base;
    k->ready_blocks = (u64 *)(base + ready);
    k->left = (u64 *)(base + ready + ready_blocks);
    k->stepped = (u64 *)(base + ready + ready_blocks + bits);
    k->words = (i64)words;
    k->block_words = (i64)block_words;
    __builtin_memset(base, 0, ready + ready_blocks + 2 * bits);
  }
  return align64(sizeof(Chunk)) + ready + ready_blocks + 2 * bits;
}

INLINE Warp *warp_at(const Launch *c, i64 index) {
  return &c->residents[index / c->warp_count].warps[index % c->warp_count];
}
void note_ready(Warp *w, int block) {
  Chunk *k = w->launch->chunk;
  const i64 index = (i64)w->resident * w->launch->warp_count + w->number;
  k->ready[block * k->words + (index >> 6)] |= (u64)1 << (index & 63);
  k->ready_blocks[block >> 6] |= (u64)1 << (block & 63);
}

// Calls for each warp of a set of bits, in their order.
#define FOR_WARPS(c, bits, w)                                                     \
  for (i64 word_ = 0; word_ < (c)->chunk->words; word_++)                         \
    for (u64 rest_ = (bits)[word_]; rest_; rest_ &= rest_ - 1)                    \
      for (Warp *w = warp_at(c, 64 * word_ + __builtin_ctzll(rest_)); w; w = 0)

static void start_chunk(Launch *c) {
  Chunk *k = c->chunk;
  const i64 left = (c->last - c->next) / c->step;
  k->residents = left < c->resident_count ? (i32)left : c->resident_count;
  k->step = -1;
  k->has_parked = k->has_asleep = 0;
  k->idle_turns = 0;
  k->live = (i64)k->residents * c->threads;
  start_generation(c);
  for (i32 slot = 0; slot < k->residents; slot++, c->next += c->step) start_block(c, &c->residents[slot], c->next);
  c->clock++;
  c->is_running = 1;
  c->trace_step++;  // behind the last step of the chunk before
  if (c->trace) trace(c->warps, TRACE_CHUNK, 0, k->residents, 0, 0, 0);
}

// The next step: the lowest basic block that lanes wait for; 0 if there is none.
static int begin_step(Launch *c) {
  Chunk *k = c->chunk;
  for (i64 word = 0; word < k->block_words; word++) {
    if (!k->ready_blocks[word]) continue;
    k->step = (i32)(64 * word) + __builtin_ctzll(k->ready_blocks[word]);
    k->ready_blocks[word] &= k->ready_blocks[word] - 1;
    u64 *ready = k->ready + k->step * k->words;
    const size_t bytes = 8 * (size_t)k->words;
    __builtin_memcpy(k->left, ready, bytes);
    __builtin_memcpy(k->stepped, ready, bytes);
    __builtin_memset(ready, 0, bytes);
    c->trace_step++;
    k->step_lanes = 0;
    k->is_whole = 1;
    k->has_turning = 0;
    return 1;
  }
  return 0;
}

// Where lanes go on: those that come back to a loop that waits are looked at when the step has ended.
static void go_on(Warp *w, int following, Mask lanes) {
  Chunk *k = w->launch->chunk;
  if (following > k->step || !w->launch->blocks[following].waits) {
    make_pending(w, following, lanes);
    return;
  }
  k->has_turning = 1;
  w->turning |= lanes;
  for (int l = 0; l < LANES; l++)
    if (lanes >> l & 1) w->turning_to[l] = following;
}

static void run_part(Warp *w) {
  Launch *c = w->launch;
  Chunk *k = c->chunk;
  const int current = k->step;
  const Block *block = &c->blocks[current];
  const Mask mask = w->pending[current];
  w->pending[current] = 0;
  w->occupied[current >> 6] &= ~((u64)1 << (current & 63));
  w->stepping = mask;
  if (!mask) return;
  if (c->here != &c->residents[w->resident]) enter_block(c, &c->residents[w->resident]);
  if (!begin_block(w, current, mask)) return;
  k->step_lanes += __builtin_popcount(mask);
  k->is_whole &= mask == ALL_LANES;
  execute(mask == ALL_LANES ? block->full : block->masked, w->frame, w);
  if (UNLIKELY(c->stop)) return;
  switch (block->end) {
    case END_BRANCH: {
      const Mask holds = *(const Mask *)(w->frame + block->guard), taken = mask & holds, other = mask & ~holds;
      if (taken) go_on(w, block->successor[0], taken);
      if (other) go_on(w, block->successor[1], other);
      break;
    }
    case END_EXIT:
      k->live -= __builtin_popcount(mask);
      exit_lanes(w, mask);
      break;
    case END_TRAP: raise_fault(w, FAULT_TRAP, block->site, mask, 0); break;
    case END_BARRIER: meet_at_barrier(w, block); break;
    case END_WARP: break;
    default: go_on(w, block->successor[0], mask);
  }
}

// Lanes of a warp whose living members have all come to the meeting go on.
static int release_parked(Warp *w) {
  Launch *c = w->launch;
  Mask going = 0;
  for (int l = 0; l < LANES; l++)
    if ((w->parked >> l & 1) && !(w->members[l] & w->live & ~w->parked)) going |= 1u << l;
  if (!going) return 0;
  w->parked &= ~going;
  for (int l = 0; l < LANES; l++)
    if (going >> l & 1) make_pending(w, w->parked_to[l], 1u << l);
  c->is_guess = 1;  // some lanes met alone: the interpreter knows better what that orders
  return 1;
}
static int release_all_parked(Launch *c) {
  Chunk *k = c->chunk;
  int found = 0, kept = 0;
  if (!k->has_parked) return 0;
  for (i64 index = 0; index < (i64)k->residents * c->warp_count; index++) {
    Warp *w = warp_at(c, index);
    if (w->parked) found |= release_parked(w);
    kept |= w->parked != 0;
  }
  k->has_parked = kept;
  return found;
}

// The step ended where lanes of a warp meet.
static void meet_in_warps(Launch *c, const Block *block) {
  Chunk *k = c->chunk;
  FOR_WARPS(c, k->stepped, w) {
    const U32 *members = (const U32 *)(w->frame + ~block->barrier);
    if (k->is_whole) {
      if (c->here != &c->residents[w->resident]) enter_block(c, &c->residents[w->resident]);
      w->mask = w->stepping;
      if (block->threads) sync_warp(w, members, block->site);
      go_on(w, block->successor[0], w->stepping);
      continue;
    }
    if (UNLIKELY(c->trace != 0) && block->threads) raise_fault(w, FAULT_TRACE_FULL, block->site, w->stepping, 0);
    k->has_parked = 1;
    w->parked |= w->stepping;
    for (int l = 0; l < LANES; l++)
      if (w->stepping >> l & 1) {
        w->members[l] = ((const u32 *)members)[l];
        w->parked_to[l] = block->successor[0];
      }
  }
  if (!k->is_whole) release_all_parked(c);
}

// Digests the registers that live where a loop begins.
INLINE u64 mixed(u64 seen, u64 value) { return ((seen ^ value) * 0x9e3779b97f4a7c15u) ^ (seen >> 29); }
HANDLER(look_b32) {
  for (int l = 0; l < LANES; l++) w->seen[l] = mixed(w->seen[l], (&AT(u32, 0))[l]);
  return done(i);
}
HANDLER(look_b64) {
  for (int l = 0; l < LANES; l++) w->seen[l] = mixed(w->seen[l], (&AT(u64, 0))[l]);
  return done(i);
}
HANDLER(look_pred) {
  for (int l = 0; l < LANES; l++) w->seen[l] = mixed(w->seen[l], AT(Mask, 0) >> l & 1);
  return done(i);
}

static void fall_asleep(Warp *w, int l, i32 block) {
  Launch *c = w->launch;
  const Block *begin = &c->blocks[block];
  Slept *slept = &w->slept[begin->waits - 1];
  __builtin_memset(w->seen, 0, sizeof w->seen);
  execute(begin->look, w->frame, w);
  const int repeats = slept->changes[l] == c->changes && slept->seen[l] == w->seen[l];
  slept->changes[l] = c->changes;
  slept->seen[l] = w->seen[l];
  w->asleep |= 1u << l;
  w->repeats = (w->repeats & ~(1u << l)) | (Mask)repeats << l;
  w->asleep_to[l] = block;
  w->asleep_changes[l] = c->changes;
  c->chunk->has_asleep = 1;
}

// Lanes that begin a loop again: they sleep if nothing has changed since they began it last.
static void take_turns(Launch *c) {
  Chunk *k = c->chunk;
  FOR_WARPS(c, k->stepped, w) {
    for (int l = 0; l < LANES; l++) {
      if (!(w->turning >> l & 1)) continue;
      const i32 block = w->turning_to[l];
      if (w->turn_block[l] != block || w->turn_changes[l] != c->changes) {
        w->turn_block[l] = block;
        w->turn_changes[l] = c->changes;
        make_pending(w, block, 1u << l);
        continue;
      }
      w->turn_block[l] = -1;
      fall_asleep(w, l, block);
    }
    w->turning = 0;
  }
}
// Lets go on who has not seen the latest change, or (again) all of a warp of which any lane's turns do not repeat; 0 if
// there is none.
static int wake(Launch *c, int again) {
  Chunk *k = c->chunk;
  int found = 0, kept = 0;
  if (!k->has_asleep) return 0;
  for (i64 index = 0; index < (i64)k->residents * c->warp_count; index++) {
    Warp *w = warp_at(c, index);
    const int moves = (w->asleep & ~w->repeats) != 0;
    for (int l = 0; w->asleep && l < LANES; l++)
      if ((w->asleep >> l & 1) && (again ? moves : w->asleep_changes[l] < c->changes)) {
        make_pending(w, w->asleep_to[l], 1u << l);
        w->asleep &= ~(1u << l);
        found = 1;
      }
    kept |= w->asleep != 0;
  }
  k->has_asleep = kept;
  return found;
}
// The same where nothing changes: they may count their turns, but not for ever.
#define IDLE_TURNS 100000
static int wake_again(Launch *c) {
  Chunk *k = c->chunk;
  k->idle_turns = k->idle_at == c->changes ? k->idle_turns + 1 : 0;
  k->idle_at = c->changes;
  return k->idle_turns < IDLE_TURNS && wake(c, 1);
}

// Where all that live met at a barrier and went straight on, they too may begin a loop again.
static void go_straight_on(Launch *c, int following) {
  Chunk *k = c->chunk;
  if (following > k->step || !c->blocks[following].waits || k->step_lanes != k->live) return;
  FOR_WARPS(c, k->stepped, w) {
    w->pending[following] &= ~w->stepping;
    go_on(w, following, w->stepping);
  }
}

static void end_step(Launch *c) {
  Chunk *k = c->chunk;
  const Block *block = &c->blocks[k->step];
  if (block->end == END_WARP) meet_in_warps(c, block);
  if (block->end == END_BARRIER && block->barrier >= 0 && block->threads >= 0) go_straight_on(c, block->successor[0]);
  if (k->has_turning) take_turns(c);
  k->step = -1;
}

// Runs the chunk to its end; otherwise the result says why it stands still.
static int run_chunk(Launch *c) {
  Chunk *k = c->chunk;
  for (;;) {
    if (k->step < 0 && !begin_step(c)) {
      if (!k->live) return RUN_ENDED;
      if (release_all_parked(c) || wake(c, 0) || wake_again(c)) continue;
      raise_fault(&c->warps[0], k->has_asleep ? FAULT_ALL_WAIT : FAULT_DEADLOCK, -1, 0, 0);
      return RUN_FAULT;
    }
    for (i64 word = 0; word < k->words; word++)
      while (k->left[word]) {
        const int pause = must_pause(c, &c->blocks[k->step]);
        if (UNLIKELY(pause)) return pause;
        const i64 index = 64 * word + __builtin_ctzll(k->left[word]);
        k->left[word] &= k->left[word] - 1;
        run_part(warp_at(c, index));
        if (UNLIKELY(c->stop)) return RUN_FAULT;
      }
    end_step(c);
    if (UNLIKELY(c->stop)) return RUN_FAULT;
  }
}

int run_together(Launch *c) {
  while (c->is_running || c->next != c->last) {
    if (!c->is_running) {
      if (c->clock > LAST_CLOCK) return RUN_CLOCKS_FULL;
      start_chunk(c);
    }
    const int why = run_chunk(c);
    if (why != RUN_ENDED) return why;
    engine_settle(c);
  }
  return RUN_ENDED;
}
