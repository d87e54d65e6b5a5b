// The scheduler. Thread blocks run one after another, those of a cluster together, and their warps in turn to where
// they wait; of a warp's lanes those run that wait at the lowest basic block, which joins them again where their paths
// meet (ptx/flow.py). A warp can be left between any two basic blocks, so that a run can pause and go on.
#include "async.h"
#include "owned.h"
#include "run.h"
#include "trace.h"

void raise_fault(Warp *w, int kind, int site, Mask lanes, u64 address) {
  Launch *c = w->launch;
  c->stop = 1;
  if (c->fault_count >= c->fault_capacity) return;
  Fault *fault = &c->faults[c->fault_count++];
  fault->kind = kind;
  fault->site = site;
  fault->warp = w->number;
  fault->block = c->current;
  fault->lanes = lanes;
  fault->address = address;
}

void raise_race(Warp *w, int site, u32 lane, u64 address) {
  const Mask lanes = lane < LANES ? 1u << lane : w->mask;
  raise_fault(w, w->launch->is_guess ? FAULT_GUESSED_RACE : FAULT_SHARED_RACE, site, lanes, address);
}

static int take_pending(Warp *w) {
  const i64 words = (w->launch->block_count + 63) >> 6;
  for (i64 word = 0; word < words; word++) {
    if (!w->occupied[word]) continue;
    const int block = (int)(64 * word) + __builtin_ctzll(w->occupied[word]);
    w->occupied[word] &= w->occupied[word] - 1;
    return block;
  }
  return -1;
}
static int has_pending(const Warp *w) {
  u64 any = 0;
  for (i64 word = 0; word < (w->launch->block_count + 63) >> 6; word++) any |= w->occupied[word];
  return any != 0;
}

void exit_lanes(Warp *w, Mask lanes) {
  if (UNLIKELY(w->launch->trace != 0)) trace(w, TRACE_EXIT, 0, 0, lanes, 0, 0);
  Launch *c = w->launch;
  w->live &= ~lanes;
  c->here->live_threads -= __builtin_popcount(lanes);
  release_after_exit(c);
  if (c->together) return;
  if (w->parked) release_members(w);
  if (c->is_async && c->ranks > 1) complete_cluster(c);
}

// Runs a warp until it waits, ends, faults, or the run pauses (the result is then why).
static int run_warp(Warp *w) {
  Launch *c = w->launch;
  while (!c->stop) {
    int current = take_pending(w);
    if (current < 0) {
      const int waits = w->waiting || w->sleeper_count || w->parked || w->cluster_waiting;
      w->state = waits ? WARP_WAITS : WARP_ENDED;
      return 0;
    }
    Mask mask = w->pending[current];
    w->pending[current] = 0;
    for (;;) {
      const Block *block = &c->blocks[current];
      const int pause = must_pause(c, block);
      if (UNLIKELY(pause)) {
        make_pending(w, current, mask);
        return pause;
      }
      if (!begin_block(w, current, mask)) return 0;
      execute(mask == ALL_LANES ? block->full : block->masked, w->frame, w);
      if (UNLIKELY(c->stop)) return 0;
      int next = block->successor[0];
      if (block->end == END_BRANCH) {
        const Mask holds = *(const Mask *)(w->frame + block->guard), taken = mask & holds, other = mask & ~holds;
        if (taken && other) {
          make_pending(w, next, taken);
          make_pending(w, block->successor[1], other);
          break;
        }
        if (!taken) next = block->successor[1];
      } else if (block->end == END_EXIT) {
        exit_lanes(w, mask);
        break;
      } else if (block->end == END_TRAP) {
        raise_fault(w, FAULT_TRAP, block->site, mask, 0);
        return 0;
      } else if (block->end == END_BARRIER) {
        meet_at_barrier(w, block);
        if (c->stop) return 0;
        if (w->state == WARP_WAITS) return 0;
        break;
      } else if (block->end >= END_WARP) {
        if (c->stop) return 0;
        mask = block->end == END_PHASE  ? wait_for_phase(w, block, mask)
               : block->end == END_WARP ? meet_in_warp(w, block, mask)
                                        : wait_for_cluster(w, block, mask);
        if (!mask) break;
      }
      if (has_pending(w)) {
        make_pending(w, next, mask);
        break;
      }
      current = next;
    }
  }
  return 0;
}

// Lets handlers see a block that is resident.
void enter_block(Launch *c, Resident *r) {
  c->here = r;
  c->warps = r->warps;
  c->shared = r->shared;
  c->shared_state = r->shared_state;
  c->places = r->places;
  c->barriers = r->barriers;
  c->current = r->number;
  COPY(c->coordinates, r->coordinates, sizeof c->coordinates);
}

static void start_clocks(Launch *c, const Resident *r) {
  for (int m = 0; m < c->warp_count; m++) {
    const Warp *w = &r->warps[m];
    for (int set = 0; set < set_count(c); set++) {
      u32 *known = clocks_of(c, set, w->row);
      for (int of = 0; of < c->agents; of++) known[of] = c->clock;
    }
    clocks_of(c, KNOWN, w->row)[agent_of(w)]++;
  }
  c->latest = c->clock;
}
// Later blocks begin behind all marks of those that are resident.
void engine_settle(Launch *c) {
  if (!c->is_running) return;
  for (int row = 0; row < c->resident_count * c->warp_count; row++) {
    const u32 own = clocks_of(c, KNOWN, row)[agent_of(warp_of(c, row))];
    if (own > c->latest) c->latest = own;
  }
  if (c->latest > c->clock) c->clock = c->latest;
  c->is_running = 0;
}

static void forget_local(Launch *c) {
  for (int row = 0; row < c->resident_count * c->warp_count; row++)
    __builtin_memset(warp_of(c, row)->local_state, 0, (size_t)(LANES * c->local_stride));
}

// A byte of shared or local memory counts as written if its state is the generation, 1 to 255 in every byte.
void start_generation(Launch *c) {
  if (c->generation == ~(u64)0 || c->generation == 0) {
    __builtin_memset(c->residents[0].shared_state, 0, (size_t)c->shared_room);
    forget_local(c);
    c->generation = 0;
  }
  c->generation += 0x0101010101010101u;
}

static void start_warp(Launch *c, Warp *w) {
  const int left = c->threads - LANES * w->number;
  w->live = left >= LANES ? ALL_LANES : (1u << left) - 1;
  w->waiting = w->waited = 0;
  w->state = WARP_READY;
  w->copy_count = 0;
  w->committed = (U32)(0u);
  w->parked = w->asleep = w->turning = 0;
  __builtin_memset(w->turn_block, 0xff, sizeof w->turn_block);
  __builtin_memset(w->slept, 0xff, sizeof(Slept) * (size_t)c->loops);
  w->sleeper_count = w->product_count = 0;
  w->cluster_arrived = w->cluster_passed = w->cluster_waiting = 0;
  w->issued_products = w->committed_products = w->finished_products = 0;
  w->bulk_committed = (U32)(0u);
  __builtin_memset(w->cluster_seen, 0, sizeof w->cluster_seen);
  __builtin_memset(w->pending, 0, 4 * (size_t)c->block_count);
  __builtin_memset(w->occupied, 0, 8 * (size_t)((c->block_count + 63) >> 6));
  if (c->clear_frames) __builtin_memcpy(w->frame, c->image, (size_t)c->image_bytes);
  make_pending(w, (int)c->entry, w->live);
}

void start_block(Launch *c, Resident *r, i64 block) {
  const i64 x = c->grid[0], y = c->grid[1];
  r->number = (i32)block;
  r->coordinates[0] = (i32)(block % x);
  r->coordinates[1] = (i32)(block / x % y);
  r->coordinates[2] = (i32)(block / (x * y));
  r->live_threads = c->threads;
  r->mbarrier_count = 0;
  enter_block(c, r);
  __builtin_memset(c->places.has_fine, 0, (size_t)c->granules);
  __builtin_memset(c->barriers, 0, sizeof r->barriers);
  if (c->is_async) {
    __builtin_memset(r->signals, 0, BARRIERS * 8 * (size_t)c->agents);
    __builtin_memset(r->mbarrier_at, 0, (size_t)(2 * c->granules));
  }
  start_owned(c);
  start_clocks(c, r);
  c->steps = 0;
  c->is_guess = c->always_guesses;
  for (int m = 0; m < c->warp_count; m++) start_warp(c, &r->warps[m]);
}

// The blocks that run together next.
static void start_blocks(Launch *c) {
  start_generation(c);
  c->transfer_count = c->box_count = c->bulk_store_count = c->cluster_phase = 0;
  if (c->is_async) {
    __builtin_memset(c->cluster_joining, 0, 8 * (size_t)c->agents);
    __builtin_memset(c->cluster_done, 0, 8 * (size_t)c->agents);
  }
  for (i32 slot = 0; slot < c->resident_count; slot++)
    start_block(c, &c->residents[slot], c->order ? c->order[c->next + slot] : c->next);
  c->origin = c->clock++;
  c->latest = c->clock;
  c->is_running = 1;
}

// Runs the blocks to their end; otherwise the result says why they stand still.
static int run_blocks(Launch *c) {
  const int rows = c->resident_count * c->warp_count;
  for (;;) {
    int ended = 0, ran = 0, sleeps = 0;
    for (int row = 0; row < rows; row++) {
      Warp *w = warp_of(c, row);
      if (w->state == WARP_READY) {
        Resident *r = &c->residents[w->resident];
        if (r != c->here) enter_block(c, r);
        const int pause = run_warp(w);
        if (pause) return pause;
        ran = 1;
      }
      if (c->stop) return RUN_FAULT;
      ended += w->state == WARP_ENDED;
      sleeps |= w->sleeper_count;
    }
    if (ended == rows) {
      if (c->is_async) check_ended(c);
      return c->stop ? RUN_FAULT : RUN_ENDED;
    }
    if (ran || (c->is_async && deliver(c))) continue;
    // Who only asks whether a phase is over goes on after a while.
    raise_fault(c->warps, sleeps ? FAULT_UNSURE : FAULT_DEADLOCK, -1, 0, 0);
    return RUN_FAULT;
  }
}

// The next block of this thread.
static i64 following(const Launch *c) {
  if (!c->cursor) return c->next + c->step;
  const i64 next = __atomic_fetch_add(c->cursor, c->step, __ATOMIC_RELAXED);
  return (c->step > 0 ? next < c->last : next > c->last) ? next : c->last;
}

static int run_grid(Launch *c) {
  while (c->next != c->last) {
    if (!c->is_running) {
      if (c->clock > LAST_CLOCK) return RUN_CLOCKS_FULL;
      start_blocks(c);
    }
    const int why = run_blocks(c);
    if (why != RUN_ENDED) return why;
    engine_settle(c);
    c->next = following(c);
  }
  return RUN_ENDED;
}

// A library may have told the processor to flush subnormals; PTX keeps them.
INLINE u64 plain_floats(void) {
#if defined(__x86_64__)
  const u32 before = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(0x1f80);
  return before;
#elif defined(__aarch64__)
  u64 before;
  __asm__ volatile("mrs %0, fpcr" : "=r"(before));
  __asm__ volatile("msr fpcr, %0" : : "r"((u64)0));
  return before;
#else
  return 0;
#endif
}
INLINE void floats_as_before(u64 before) {
#if defined(__x86_64__)
  __builtin_ia32_ldmxcsr((u32)before);
#elif defined(__aarch64__)
  __asm__ volatile("msr fpcr, %0" : : "r"(before));
#else
  (void)before;
#endif
}

// Starts or goes on with a launch; a value of enum Pause.
i32 engine_run(Launch *c) {
  const u64 before = plain_floats();
  c->spent = 0;
  const int why = c->together ? run_together(c) : run_grid(c);
  floats_as_before(before);
  return why;
}

// Runs instructions alone for some lanes of a warp: the tests' way to one handler.
void engine_execute(Launch *c, const Instruction *i, char *frame, Mask mask) {
  const u64 before = plain_floats();
  Warp w = {0};
  w.launch = c;
  w.frame = frame;
  w.mask = w.block_mask = w.live = mask;
  execute(i, frame, &w);
  floats_as_before(before);
}

// ---- the memory of a launch's warps: one piece, laid out here ----------------------------------------------------

static size_t rounded(size_t bytes) { return (bytes + 63) & ~(size_t)63; }
// Takes bytes from a piece of memory that begins at base, or only counts them if it is null.
static u8 *take(u8 *base, size_t *used, size_t bytes) {
  u8 *found = base ? base + *used : 0;
  *used += rounded(bytes);
  return found;
}
static void lay_out_warp(Launch *c, Warp *w, int row, u8 *base, size_t *used) {
  const size_t local = (size_t)(LANES * c->local_stride);
  u8 *frame = take(base, used, (size_t)c->frame_bytes), *pending = take(base, used, 4 * (size_t)c->block_count);
  u8 *occupied = take(base, used, 8 * (size_t)((c->block_count + 63) >> 6));
  u8 *copies = take(base, used, sizeof(Copy) * (size_t)c->copies_each), *memory = take(base, used, local);
  u8 *state = take(base, used, local), *slept = take(base, used, sizeof(Slept) * (size_t)c->loops);
  u8 *products = take(base, used, (size_t)(product_bytes() * c->products_each));
  if (!base) return;
  w->launch = c;
  w->row = row;
  w->number = row % c->warp_count;
  w->resident = row / c->warp_count;
  w->rank = w->resident % c->ranks;
  w->frame = (char *)frame;
  w->pending = (u32 *)pending;
  w->occupied = (u64 *)occupied;
  w->copies = (Copy *)copies;
  w->local = memory;
  w->local_state = state;
  w->slept = (Slept *)slept;
  w->products = (Product *)products;
  __builtin_memcpy(w->frame, c->image, (size_t)c->image_bytes);
}
static void lay_out_resident(Launch *c, Warp *warps, i32 slot, u8 *base, size_t *used) {
  const size_t clocks = 8 * (size_t)c->agents;
  u8 *signals = take(base, used, BARRIERS * clocks), *mbarriers = 0, *places = 0, *knowledge = 0;
  if (c->is_async) {
    mbarriers = take(base, used, MBARRIERS * sizeof(Mbarrier));
    places = take(base, used, (size_t)(2 * c->granules));
    knowledge = take(base, used, MBARRIERS * 2 * clocks);
  }
  if (!base) return;
  Resident *r = &c->residents[slot];
  const i64 at = slot * c->granules, fine = at << (4 - c->granule_shift);
  r->warps = warps + slot * c->warp_count;
  r->shared = c->shared + 16 * at;
  r->shared_state = c->shared_state + 16 * at;
  const Places *all = &c->places;
  r->places.has_fine = all->has_fine + at;
  r->places.lane_of = all->lane_of + at;
  r->places.fine_lane_of = all->fine_lane_of + fine;
  r->places.writers = all->writers + at;
  r->places.readers = all->readers + at * c->reader_stride;
  r->places.fine_writers = all->fine_writers + fine;
  r->places.fine_readers = all->fine_readers + fine * c->reader_stride;
  r->places.fine_atomics = all->fine_atomics ? all->fine_atomics + fine * c->reader_stride : 0;
  r->signals = (u32 *)signals;
  r->mbarriers = (Mbarrier *)mbarriers;
  r->mbarrier_at = places;
  __builtin_memset(signals, 0, BARRIERS * clocks);
  for (int k = 0; c->is_async && k < MBARRIERS; k++) {
    r->mbarriers[k].joining = (u32 *)(knowledge + (size_t)(2 * k) * clocks);
    r->mbarriers[k].completed = (u32 *)(knowledge + (size_t)(2 * k + 1) * clocks);
  }
}
static size_t clock_bytes(const Launch *c) {
  return 4 * (size_t)set_count(c) * (size_t)(c->resident_count * c->warp_count) * (size_t)clock_stride(c);
}
static size_t lay_out(Launch *c, u8 *base) {
  const int rows = c->resident_count * c->warp_count;
  size_t used = 0;
  c->agents = c->ranks * c->agents_each;
  const size_t clocks = 8 * (size_t)c->agents;  // of both sets
  Warp *warps = (Warp *)take(base, &used, sizeof(Warp) * (size_t)rows);
  c->residents = (Resident *)take(base, &used, sizeof(Resident) * (size_t)c->resident_count);
  c->joined = (u32 *)take(base, &used, clocks);
  c->cluster_joining = (u32 *)take(base, &used, clocks);
  c->cluster_done = (u32 *)take(base, &used, clocks);
  c->clocks = (u32 *)take(base, &used, clock_bytes(c));
  c->transfers = (Transfer *)take(base, &used, sizeof(Transfer) * (size_t)c->transfer_capacity);
  c->bulk_stores = (BulkStore *)take(base, &used, sizeof(BulkStore) * (size_t)c->bulk_capacity);
  c->boxes = (TensorBox *)take(base, &used, c->is_async ? TENSOR_BOXES * sizeof(TensorBox) : 0);
  for (int row = 0; row < rows; row++) lay_out_warp(c, base ? &warps[row] : 0, row, base, &used);
  for (i32 slot = 0; slot < c->resident_count; slot++) lay_out_resident(c, warps, slot, base, &used);
  return used + lay_out_chunk(c, base ? base + used : 0);
}
// Marks that are left from other launches may name agents that this one has not: all of them are known.
void engine_begin(Launch *c, u8 *scratch) {
  lay_out(c, scratch);
  c->batch = 0;
  __builtin_memset(c->clocks, 0xff, clock_bytes(c));
  for (int row = 0; row < set_count(c) * c->resident_count * c->warp_count; row++)
    __builtin_memset(clocks_of(c, KNOWN, row), 0, 4 * (size_t)c->agents);
  forget_local(c);
}
i64 engine_scratch_bytes(Launch *c) { return (i64)lay_out(c, 0); }

// So that the Python side can see that it knows the structures as they are.
i64 engine_size(i32 which) {
  const size_t sizes[] = {sizeof(Launch), sizeof(Instruction), sizeof(Block),     sizeof(Fault),
                          sizeof(Store),  sizeof(Range),       sizeof(OwnedRange)};
  return (i64)sizes[which];
}
