// What a launch stored, for the checks at its end; and the way back to the state before it.
#include "memory.h"

// Room for the worst case of a basic block was made before it began, see run.c. Of several threads that save a page at
// once the one counts that has it first: nobody stores to a page before he has seen that it is saved.
void save_page(Launch *c, i64 page) {
  u32 *saved_in = &c->saved_in[page], before = __atomic_load_n(saved_in, __ATOMIC_ACQUIRE);
  if (before == c->launch_number) return;
  i64 begin = page * PAGE_BYTES;
  u8 *to = c->saved + c->saved_count * 2 * PAGE_BYTES;
  COPY(to, c->data + begin, PAGE_BYTES);
  COPY(to + PAGE_BYTES, c->state + begin, PAGE_BYTES);
  if (!__atomic_compare_exchange_n(saved_in, &before, c->launch_number, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) return;
  c->saved_pages[c->saved_count++] = page;
}

// Exchanges the saved pages with those of the arena: undoes a launch, or does it again.
void engine_exchange(Launch *c) {
  u8 held[2 * PAGE_BYTES];
  for (i64 number = 0; number < c->saved_count; number++) {
    i64 begin = c->saved_pages[number] * PAGE_BYTES;
    u8 *saved = c->saved + number * 2 * PAGE_BYTES;
    COPY(held, saved, sizeof held);
    COPY(saved, c->data + begin, PAGE_BYTES);
    COPY(saved + PAGE_BYTES, c->state + begin, PAGE_BYTES);
    COPY(c->data + begin, held, PAGE_BYTES);
    COPY(c->state + begin, held + PAGE_BYTES, PAGE_BYTES);
  }
}

// The allocation of an access; a site only reads, only stores or only updates, and every site comes here first.
int find_range(const Launch *c, u64 begin, u64 end, Range *hint, enum Access access) {
  i64 low = 0, high = c->range_count;
  while (low < high) {
    i64 middle = (low + high) / 2;
    if (c->ranges[middle].begin <= begin)
      low = middle + 1;
    else
      high = middle;
  }
  if (end < begin || low == 0 || end > c->ranges[low - 1].end || c->ranges[low - 1].state < 0) return 0;
  *hint = c->ranges[low - 1];
  c->used[low - 1] |= (u8)access;
  return 1;
}
