// The scheduler. Thread blocks run one after another, the warps of a block in turn to their next barrier; of a warp's
// lanes those run that wait at the lowest basic block, which joins them again where their paths meet (ptx/flow.py).
// A warp can be left between any two basic blocks, so that a run can pause and go on.
#include "run.h"
#include "owned.h"

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
  w->live &= ~lanes;
  w->launch->here->live_threads -= __builtin_popcount(lanes);
  release_after_exit(w->launch);
}

// Runs a warp until it waits, ends, faults, or the run pauses (the result is then why).
static int run_warp(Warp *w) {
  Launch *c = w->launch;
  while (!c->stop) {
    int current = take_pending(w);
    if (current < 0) {
      w->state = w->waiting ? WARP_WAITS : WARP_ENDED;
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
  c->has_fine = r->has_fine;
  c->writers = r->writers;
  c->readers = r->readers;
  c->fine_writers = r->fine_writers;
  c->fine_readers = r->fine_readers;
  c->fine_atomics = r->fine_atomics;
  c->barriers = r->barriers;
  c->clocks = r->clocks;
  c->current = r->number;
  COPY(c->coordinates, r->coordinates, sizeof c->coordinates);
}

static void start_clocks(Launch *c) {
  for (int k = 0; k < LANES; k++)
    for (int of = 0; of < LANES; of++) c->clocks[k][of] = c->clock + (k == of);
}
// Later blocks begin behind all marks of this one.
static u32 latest_clock(const Launch *c, const Resident *r) {
  u32 latest = c->clock;
  for (int k = 0; k < c->warp_count; k++)
    if (r->clocks[k][k] > latest) latest = r->clocks[k][k];
  return latest;
}
void engine_settle(Launch *c) {
  if (!c->is_running) return;
  for (i32 slot = 0; slot < c->resident_count; slot++) c->clock = latest_clock(c, &c->residents[slot]);
  c->is_running = 0;
}

static void forget_local(Launch *c) {
  for (i32 slot = 0; slot < c->resident_count; slot++)
    for (int number = 0; number < c->warp_count; number++)
      __builtin_memset(c->residents[slot].warps[number].local_state, 0, (size_t)(LANES * c->local_stride));
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

void start_block(Launch *c, Resident *r, i64 block) {
  const i64 x = c->grid[0], y = c->grid[1];
  r->number = (i32)block;
  r->coordinates[0] = (i32)(block % x);
  r->coordinates[1] = (i32)(block / x % y);
  r->coordinates[2] = (i32)(block / (x * y));
  r->live_threads = c->threads;
  enter_block(c, r);
  __builtin_memset(c->has_fine, 0, (size_t)c->granules);
  __builtin_memset(c->barriers, 0, sizeof r->barriers);
  start_owned(c);
  start_clocks(c);
  c->steps = 0;
  c->is_guess = c->always_guesses;
  for (int number = 0; number < c->warp_count; number++) {
    Warp *w = &c->warps[number];
    const int left = c->threads - LANES * number;
    w->live = left >= LANES ? ALL_LANES : (1u << left) - 1;
    w->waiting = 0;
    w->state = WARP_READY;
    w->copy_count = 0;
    w->committed = (U32)(0u);
    w->parked = w->asleep = w->turning = 0;
    __builtin_memset(w->turn_block, 0xff, sizeof w->turn_block);
    __builtin_memset(w->slept, 0xff, sizeof(Slept) * (size_t)c->loops);
    __builtin_memset(w->pending, 0, 4 * (size_t)c->block_count);
    __builtin_memset(w->occupied, 0, 8 * (size_t)((c->block_count + 63) >> 6));
    if (c->clear_frames) __builtin_memcpy(w->frame, c->image, (size_t)c->image_bytes);
    make_pending(w, (int)c->entry, w->live);
  }
}

// Runs the block to its end; otherwise the result says why it stands still.
static int run_block(Launch *c) {
  for (;;) {
    int ended = 0, ran = 0;
    for (int number = 0; number < c->warp_count; number++) {
      Warp *w = &c->warps[number];
      if (w->state == WARP_READY) {
        const int pause = run_warp(w);
        if (pause) return pause;
        ran = 1;
      }
      if (c->stop) return RUN_FAULT;
      ended += w->state == WARP_ENDED;
    }
    if (ended == c->warp_count) return RUN_ENDED;
    if (!ran) {
      raise_fault(&c->warps[0], FAULT_DEADLOCK, -1, 0, 0);
      return RUN_FAULT;
    }
  }
}

static int run_grid(Launch *c) {
  while (c->next != c->last) {
    if (!c->is_running) {
      if (c->clock > LAST_CLOCK) return RUN_CLOCKS_FULL;
      start_generation(c);
      start_block(c, c->residents, c->next);
      c->clock++;
      c->is_running = 1;
    }
    const int why = run_block(c);
    if (why != RUN_ENDED) return why;
    engine_settle(c);
    c->next += c->step;
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
static size_t lay_out(Launch *c, u8 *base) {
  const size_t pending = rounded(4 * (size_t)c->block_count), copies = rounded(sizeof(Copy) * (size_t)c->copies_each);
  const size_t occupied = rounded(8 * (size_t)((c->block_count + 63) >> 6)), frame = rounded((size_t)c->frame_bytes);
  const size_t local = rounded((size_t)(LANES * c->local_stride)), warps = rounded(sizeof(Warp) * (size_t)c->warp_count);
  const size_t slept = rounded(sizeof(Slept) * (size_t)c->loops);
  const size_t each = pending + copies + occupied + frame + 2 * local + slept, resident = warps + each * (size_t)c->warp_count;
  const size_t residents = rounded(sizeof(Resident) * (size_t)c->resident_count);
  const size_t all = residents + resident * (size_t)c->resident_count;
  if (!base) return all + lay_out_chunk(c, 0);
  lay_out_chunk(c, base + all);
  const i64 fine = c->granules << (4 - c->granule_shift);
  c->residents = (Resident *)base;
  for (i32 slot = 0; slot < c->resident_count; slot++) {
    Resident *r = &c->residents[slot];
    u8 *own = base + residents + resident * (size_t)slot;
    r->warps = (Warp *)own;
    r->shared = c->shared + slot * c->granules * 16;
    r->shared_state = c->shared_state + slot * c->granules * 16;
    r->has_fine = c->has_fine + slot * c->granules;
    r->writers = c->writers + slot * c->granules;
    r->readers = c->readers + slot * c->granules * c->reader_stride;
    r->fine_writers = c->fine_writers + slot * fine;
    r->fine_readers = c->fine_readers + slot * fine * c->reader_stride;
    r->fine_atomics = c->fine_atomics ? c->fine_atomics + slot * fine * c->reader_stride : 0;
    for (int number = 0; number < c->warp_count; number++) {
      Warp *w = &r->warps[number];
      u8 *at = own + warps + each * (size_t)number;
      w->launch = c;
      w->number = number;
      w->resident = slot;
      w->frame = (char *)at;
      w->pending = (u32 *)(at + frame);
      w->occupied = (u64 *)(at + frame + pending);
      w->copies = (Copy *)(at + frame + pending + occupied);
      w->local = at + frame + pending + occupied + copies;
      w->local_state = w->local + local;
      w->slept = (Slept *)(w->local_state + local);
      __builtin_memcpy(w->frame, c->image, (size_t)c->image_bytes);
    }
  }
  return 0;
}
i64 engine_scratch_bytes(Launch *c) { return (i64)lay_out(c, 0); }
void engine_begin(Launch *c, u8 *scratch) {
  lay_out(c, scratch);
  forget_local(c);
}

// So that the Python side can see that it knows the structures as they are.
i64 engine_size(i32 which) {
  const size_t sizes[] = {sizeof(Launch), sizeof(Instruction), sizeof(Block),     sizeof(Fault),
                          sizeof(Store),  sizeof(Range),       sizeof(OwnedRange)};
  return (i64)sizes[which];
}
