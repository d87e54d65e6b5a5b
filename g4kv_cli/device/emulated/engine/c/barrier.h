// What the scheduler needs of barriers, and they of it.
#pragma once
#include "engine.h"

void note_ready(Warp *w, int block);

// Lanes of a warp that are to run a basic block.
INLINE void make_pending(Warp *w, int block, Mask lanes) {
  w->pending[block] |= lanes;
  w->occupied[block >> 6] |= (u64)1 << (block & 63);
  if (w->launch->together) note_ready(w, block);
}

void arrive(Warp *w, int number, int threads, int site, int following);
void release_after_exit(Launch *c);
int uniform(Warp *w, const U32 *values, int site);
void sync_warp(Warp *w, const U32 *members, int site);
