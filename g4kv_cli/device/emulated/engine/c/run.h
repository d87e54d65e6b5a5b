// What both schedulers share (run.c, together.c).
#pragma once
#include "barrier.h"

void enter_block(Launch *c, Resident *r);
void start_block(Launch *c, Resident *r, i64 block);
void start_generation(Launch *c);
void engine_settle(Launch *c);
int run_together(Launch *c);
size_t lay_out_chunk(Launch *c, u8 *base);
void exit_lanes(Warp *w, Mask lanes);
// Marks hold 21 bits of clock; before those run out, all marks are forgotten between two blocks.
#define LAST_CLOCK 0x180000u

INLINE void execute(const Instruction *i, char *frame, Warp *w) {
  while (i->run) i = i->run(i, frame, w);
}

INLINE int must_pause(const Launch *c, const Block *block) {
  const i64 stores = (i64)LANES * (block->stores + (c->watch_end ? block->loads : 0));
  if (c->store_count + stores > c->store_capacity || c->saved_count + stores > c->saved_capacity) return RUN_LOGS_FULL;
  return c->spent > c->slice ? RUN_SLICE_OVER : 0;
}

// Begins a basic block for some lanes of a warp; 0 if the launch runs too long.
INLINE int begin_block(Warp *w, int current, Mask mask) {
  Launch *c = w->launch;
  const Block *block = &c->blocks[current];
  w->mask = w->block_mask = mask;
  c->at_warp = w->number;
  c->at_block = current;
  c->instructions += (i64)block->size * __builtin_popcount(mask);
  c->spent += block->size;
  if (UNLIKELY(++c->steps > c->step_limit || c->instructions > c->instruction_limit)) {
    raise_fault(w, FAULT_WATCHDOG, block->site, mask, 0);
    return 0;
  }
  return 1;
}

// The barrier at the end of a basic block; afterwards the warp waits, or others go on with it.
INLINE void meet_at_barrier(Warp *w, const Block *block) {
  int number = block->barrier, threads = block->threads;
  if (number < 0) number = uniform(w, (const U32 *)(w->frame + ~number), block->site);
  if (threads < 0) threads = uniform(w, (const U32 *)(w->frame + ~threads), block->site);
  if (!w->launch->stop) arrive(w, number, threads, block->site, block->successor[0]);
}
