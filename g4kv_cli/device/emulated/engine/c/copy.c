// cp.async: the source is read when the copy is issued, the destination changes when its group is waited for. Until
// then it counts as unwritten. Both moments are writes to the race check.
#include "memory.h"
#include "races.h"

// Whether lane l may read bytes from its source address; copies them.
INLINE int read_source(Warp *w, Range *hint, u64 from, u32 bytes, int whole, int site, int l, u8 *to) {
  const Launch *c = w->launch;
  __builtin_memset(to, 0, 16);
  if (bytes == (u32)whole) {
    if (!check_global(w, hint, from, bytes, whole, site, 1u << l, READS)) return 0;
    watch_load(w, from, whole, site, LANES * w->number + l, whole);
    __builtin_memcpy(to, c->data + (from - c->base), (size_t)whole);
    return 1;
  }
  for (u32 k = 0; k < bytes; k++) {
    if (!check_global(w, hint, from + k, 1, 1, site, 1u << l, READS)) return 0;
    to[k] = c->data[from + k - c->base];
  }
  if (bytes) watch_load(w, from, (int)bytes, site, SEVERAL_THREADS, 1);
  return 1;
}

// Fields: shared address, offset, site, address is 64 bits wide, global address, offset, source bytes.
INLINE void copy_async(const Instruction *i, const char *frame, Warp *w, int whole) {
  const Launch *c = w->launch;
  const Shared s = shared_of(c);
  const Marks marks = marks_of(w);
  const int site = i->field[2];
  if (UNLIKELY(c->trace != 0)) raise_fault(w, FAULT_TRACE_FULL, site, w->mask, 0);
  Range *hint = &c->hints[site];
  if (UNLIKELY(w->copy_count >= c->copies_each)) {
    raise_fault(w, FAULT_COPIES_FULL, site, w->mask, 0);
    return;
  }
  Copy *copy = &w->copies[w->copy_count++];
  copy->lanes = w->mask;
  copy->site = site;
  copy->bytes = whole;
  copy->group = w->committed;
  i64 to[LANES];
  u64 from[LANES];
  u32 sizes[LANES];
  shared_offsets(to, frame + i->field[0], i->field[3], i->field[1]);
  const U64 sources = AT(const U64, 4) + (u64)(i64)i->field[5];
  COPY(from, &sources, sizeof from);
  COPY(sizes, frame + i->field[6], sizeof sizes);
  U64 step;
  for (u32 l = 0; l < LANES; l++) step[l] = (u64)whole * (u64)l;
  const int in_a_row = w->mask == ALL_LANES && pack64((U64)(sources == step + from[0])) == ALL_LANES &&
                       pack32((U32)(AT(const U32, 6) >= (u32)whole)) == ALL_LANES;
  if (in_a_row) {
    if (!check_global(w, hint, from[0], (u64)(LANES * whole), whole, site, w->mask, READS)) return;
    watch_load(w, from[0], LANES * whole, site, LANES * w->number, whole);
    const u8 *row = c->data + (from[0] - c->base);
    for (int l = 0; l < LANES; l++) __builtin_memcpy(copy->data[l], row + l * whole, (size_t)whole);
  }
  for (int l = 0; l < LANES; l++) {
    if (!(w->mask >> l & 1)) continue;
    if (!check_shared(w, to[l], whole, site, 1u << l)) return;
    copy->to[l] = (u32)to[l];
    const u32 bytes = sizes[l] < (u32)whole ? sizes[l] : (u32)whole;
    if (!in_a_row && !read_source(w, hint, from[l], bytes, whole, site, l, copy->data[l])) return;
    note_write(w, marks, to[l], whole, site, (u32)l, 0);  // the interpreter knows what bytes meet
    __builtin_memset(s.state + to[l], 0, (size_t)whole);
  }
}
#define COPY_ASYNC(bytes)               \
  HANDLER(copy_async_##bytes) {         \
    copy_async(i, frame, w, bytes);     \
    return done(i);                     \
  }
COPY_ASYNC(4)
COPY_ASYNC(8)
COPY_ASYNC(16)

HANDLER(copy_commit) {
  (void)frame;
  w->committed += expand(w->mask) & 1u;
  return done(i);
}

INLINE void take_effect(Warp *w, Shared s, Marks marks, const Copy *copy, Mask ready, int bytes) {
  u32 to[LANES];
  COPY(to, &copy->to, sizeof to);
  for (int l = 0; l < LANES; l++) {
    if (!(ready >> l & 1)) continue;
    COPY(s.data + to[l], copy->data[l], bytes);
    mark_shared_written(s, to[l], bytes);
    note_write(w, marks, to[l], bytes, copy->site, (u32)l, 0);
  }
}
// Completes the copies of these lanes but for the latest open groups; -1: those of no group too. Field: open groups.
HANDLER(copy_wait) {
  (void)frame;
  const Shared s = shared_of(w->launch);
  const Marks marks = marks_of(w);
  const int open = i->field[0];
  i64 kept = 0;
  Mask arrived = 0;
  for (i64 number = 0; number < w->copy_count; number++) {
    Copy *copy = &w->copies[number];
    Mask ready = copy->lanes & w->mask;
    if (open >= 0) ready &= pack32((U32)((I32)copy->group < (I32)(w->committed - (u32)open)));
    arrived |= ready;
    switch (copy->bytes) {
      case 4: take_effect(w, s, marks, copy, ready, 4); break;
      case 8: take_effect(w, s, marks, copy, ready, 8); break;
      default: take_effect(w, s, marks, copy, ready, 16);
    }
    copy->lanes &= ~ready;
    if (copy->lanes) {
      if (kept != number) w->copies[kept] = *copy;
      kept++;
    }
  }
  // What has arrived may lie where another copy goes that is still in flight.
  for (i64 number = 0; arrived && number < kept; number++) {
    const Copy *copy = &w->copies[number];
    for (int l = 0; l < LANES; l++)
      if (copy->lanes >> l & 1) __builtin_memset(s.state + copy->to[l], 0, (size_t)copy->bytes);
  }
  w->copy_count = kept;
  return done(i);
}
