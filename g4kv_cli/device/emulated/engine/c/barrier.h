// What the scheduler needs of barriers, and they of it.
#pragma once
#include "engine.h"

// Lanes of a warp that are to run a basic block.
INLINE void make_pending(Warp *w, int block, Mask lanes) {
  w->pending[block] |= lanes;
  w->occupied[block >> 6] |= (u64)1 << (block & 63);
}

void arrive(Warp *w, int number, int threads, int site, int following);
void release_after_exit(Launch *c);
int uniform(Warp *w, const U32 *values, int site);
