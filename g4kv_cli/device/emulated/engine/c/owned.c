// Reads of cells that are somebody else's: by a block, of what no owner has, or of what no one owner has all of. Reads
// of what a launch in front may still be writing, by lanes that have not waited for it.
#include "memory.h"
#include "owned.h"

void start_owned(Launch *c) {
  for (i64 k = 0; k < c->owned_count; k++) {
    OwnedRange *range = &c->owned[k];
    const i64 slot = c->here - c->residents;
    range->last[slot] = -1;
    __builtin_memset(range->may_be + slot * range->words, 0xff, 8 * (size_t)range->words);
  }
}

// Whether the block may still work for somebody after it has read this cell.
static int has_an_owner(OwnedRange *range, i64 slot, i64 cell) {
  const i64 number = range->numbers[cell];
  if (number < 0) return 0;
  if (!range->words) return 1;
  const u64 *owners = range->owners + number * range->words;
  u64 left = 0;
  for (i64 word = 0; word < range->words; word++) left |= range->may_be[slot * range->words + word] &= owners[word];
  return left != 0;
}

static void check_owned(Warp *w, u64 address, u64 bytes, int site, Mask lanes) {
  Launch *c = w->launch;
  const i64 slot = c->here - c->residents;
  for (i64 k = 0; k < c->owned_count; k++) {
    OwnedRange *range = &c->owned[k];
    const u64 begin = address < range->begin ? range->begin : address;
    const u64 end = address + bytes > range->end ? range->end : address + bytes;
    if (begin >= end) continue;
    const i64 last = (i64)((end - 1 - range->begin) / range->cell_bytes);
    for (i64 cell = (i64)((begin - range->begin) / range->cell_bytes); cell <= last; cell++) {
      if (cell == range->last[slot]) continue;
      range->last[slot] = cell;
      if (UNLIKELY(!has_an_owner(range, slot, cell))) raise_fault(w, FAULT_FOREIGN_READ, site, lanes, address);
    }
  }
}

// Lanes that come after another thread's wait are the interpreter's to find.
static void check_in_front(Warp *w, u64 address, u64 bytes, int site, Mask lanes) {
  const Launch *c = w->launch;
  const i64 begin = (i64)(address - c->base), end = begin + (i64)bytes;
  i64 low = 0, high = c->in_front_count;  // of the ranges that begin before the end, the last
  while (low < high) {
    const i64 middle = (low + high) / 2;
    if (c->in_front[2 * middle] < end)
      low = middle + 1;
    else
      high = middle;
  }
  if (low > 0 && c->in_front[2 * low - 1] > begin) raise_fault(w, FAULT_UNSURE, site, lanes & ~w->waited, address);
}

void check_reader(Warp *w, u64 address, u64 bytes, int site, Mask lanes) {
  if (w->launch->owned_count) check_owned(w, address, bytes, site, lanes);
  if (w->launch->in_front_count && (lanes & ~w->waited)) check_in_front(w, address, bytes, site, lanes);
}

// griddepcontrol.wait: the launch in front has ended.
HANDLER(wait_for_front) {
  (void)frame;
  w->waited |= w->mask;
  return done(i);
}
