// Bulk stores to global memory, of boxes of tensors and of bytes, and bulk copies of bytes into shared memory
// (memory/bulk_copy.py, memory/bulk_bytes.py). A store reads shared memory and writes global memory when its group is
// waited for; to the race check it reads from its issue on.
#include "tensor.h"

// ---- reads by the asynchronous proxy -----------------------------------------------------------------------------

// The segment counts from 1 in a block.
Reads begin_reads(Warp *w, int site, u32 segment, i64 column) {
  Launch *c = w->launch;
  segment += c->origin;
  if (segment > c->latest) c->latest = segment;
  if (UNLIKELY(segment >= CLOCK_MASK)) raise_fault(w, FAULT_CLOCKS, site, 0, 0);
  const Reads reads = {.shared = shared_of(c),
                       .marks = marks_of(w),
                       .fenced = clocks_of(c, FENCED, w->row),
                       .segment = segment,
                       .column = column,
                       .site = site};
  return reads;
}
// Whether a write is not ordered before the read, or was not shown to the proxy: who waits for copies sees them there,
// too.
INLINE u32 unseen(const Reads *r, u32 mark) {
  const u32 clock = mark & CLOCK_MASK, agent = mark >> CLOCK_BITS;
  return (clock > r->marks.known_of[agent]) | (clock > r->fenced[agent]);
}
int read_chunk(Warp *w, const Reads *r, i64 at, void *to) {
  const Marks *m = &r->marks;
  if (!check_shared(w, at, CHUNK, r->site, ALL_LANES)) return 0;
  check_shared_written(w, r->shared, at, CHUNK, r->site, ALL_LANES);
  const i64 coarse = at >> 4, fine = at >> m->shift;
  u32 clash = unseen(r, m->places.writers[coarse]);
  if (UNLIKELY(m->places.has_fine[coarse])) {
    for (int j = 0; j < 16 >> m->shift; j++) clash |= unseen(r, m->places.fine_writers[fine + j]);
    clash |= atomics_clash(*m, fine, 16 >> m->shift, 0);
  }
  m->places.readers[coarse * m->stride + r->column] = r->segment;
  if (UNLIKELY(clash)) raise_race(w, r->site, LANES, (u64)at);
  COPY(to, r->shared.data + at, CHUNK);
  return 1;
}
// A warp has waited for the work of its agent up to a segment.
void finish_reads(Warp *w, i64 column, i64 segment) {
  const Launch *c = w->launch;
  const i64 agent = w->rank * c->agents_each + column;
  for (int set = 0; set < 2 && segment > 0; set++) {
    u32 *known = clocks_of(c, set, w->row) + agent;
    if (c->origin + (u32)segment > *known) *known = c->origin + (u32)segment;
  }
}

// ---- stores ------------------------------------------------------------------------------------------------------

// The agents of bulk stores come behind those of wgmma.
INLINE i64 store_column(const Warp *w) {
  return w->launch->warp_count + (w->launch->warp_count + 3) / 4 + w->number;
}
static BulkStore *add_store(Warp *w, int site, int lane) {
  Launch *c = w->launch;
  if (UNLIKELY(c->bulk_store_count == c->bulk_capacity)) {
    raise_fault(w, FAULT_COPIES_FULL, site, w->mask, 0);
    return 0;
  }
  BulkStore *store = &c->bulk_stores[c->bulk_store_count++];
  store->row = w->row;
  store->lane = lane;
  store->site = site;
  store->group = w->bulk_committed[lane];
  return store;
}

static void store_box(Warp *w, int number, const i32 *at, i64 from, int site, int lane) {
  Launch *c = w->launch;
  const TensorBox *box = &c->boxes[number];
  BulkStore *store = add_store(w, site, lane);
  if (!store) return;
  store->box = number;
  store->from = (u32)from;
  COPY(store->at, at, sizeof store->at);
  const Reads reads = begin_reads(w, site, store->group + 1, store_column(w));
  for (int line = 0; line < box->rows; line++) {
    const Row row = row_of(box, at, line);
    for (i64 k = 0; k < box->row_bytes; k += CHUNK) {
      u8 unused[CHUNK];
      const i64 place = swizzled(box, from + line * box->pitch + k);
      const int is_inside = row.begin < k + CHUNK && row.end > k;
      if (is_inside ? !read_chunk(w, &reads, place, unused) : !check_shared(w, place, CHUNK, site, 1u << lane))
        return;
    }
  }
  c->spent += box->rows * box->row_bytes / 64;
}

// Fields: shared address, offset, it is 64 bits wide, address of the map, offset, site, dimensions, coordinates.
HANDLER(store_tensor) {
  Launch *c = w->launch;
  const int site = i->field[5], dimensions = i->field[6];
  i64 from[LANES];
  u64 maps[LANES];
  shared_offsets(from, frame + i->field[0], i->field[2], i->field[1]);
  COPY(maps, frame + i->field[3], sizeof maps);
  for (int l = 0; l < LANES && !c->stop; l++) {
    if (!(w->mask >> l & 1)) continue;
    i32 at[DIMENSIONS] = {0};
    for (int d = 0; d < dimensions; d++) at[d] = ((const i32 *)(frame + i->field[7 + d]))[l];
    const int number = find_box(w, maps[l] + (u64)(i64)i->field[4], site, 1u << l);
    if (number < 0) break;
    if (UNLIKELY(c->boxes[number].dimensions != dimensions))
      raise_fault(w, FAULT_UNSURE, site, 1u << l, maps[l]);
    else if (check_box(w, &c->boxes[number], at, from[l], site, 1u << l, STORES))
      store_box(w, number, at, from[l], site, l);
  }
  return done(i);
}

// Whether a lane may move bytes between a shared and a global address; otherwise a fault was raised.
static int check_bytes(Warp *w, i64 shared, u64 outside, u32 bytes, int site, int lane, enum Access access) {
  Launch *c = w->launch;
  if (UNLIKELY(bytes % CHUNK || shared % CHUNK || outside % CHUNK)) {
    raise_fault(w, FAULT_MISALIGNED, site, 1u << lane, outside);
    return 0;
  }
  if (UNLIKELY(shared < 0 || shared > c->shared_bytes - bytes)) {
    raise_fault(w, FAULT_SHARED_BOUNDS, site, 1u << lane, (u64)shared);
    return 0;
  }
  if (UNLIKELY(outside < c->watch_end && outside + bytes > c->watch_begin)) {
    raise_fault(w, FAULT_UNSURE, site, 1u << lane, outside);
    return 0;
  }
  return check_global(w, &c->hints[site], outside, bytes, CHUNK, site, 1u << lane, access);
}

// Fields: shared address, offset, it is 64 bits wide, global address, offset, site, bytes.
HANDLER(store_bytes) {
  Launch *c = w->launch;
  const int site = i->field[5];
  const u32 *sizes = &AT(u32, 6);
  i64 from[LANES];
  u64 to[LANES];
  shared_offsets(from, frame + i->field[0], i->field[2], i->field[1]);
  COPY(to, frame + i->field[3], sizeof to);
  for (int l = 0; l < LANES && !c->stop; l++) {
    const u64 place = to[l] + (u64)(i64)i->field[4];
    if (!(w->mask >> l & 1) || !sizes[l]) continue;
    if (!check_bytes(w, from[l], place, sizes[l], site, l, STORES)) break;
    BulkStore *store = add_store(w, site, l);
    if (!store) break;
    store->box = BYTES;
    store->from = (u32)from[l];
    store->bytes = sizes[l];
    store->to = place;
    const Reads reads = begin_reads(w, site, store->group + 1, store_column(w));
    u8 unused[CHUNK];
    for (u32 k = 0; k < sizes[l]; k += CHUNK)
      if (!read_chunk(w, &reads, from[l] + k, unused)) break;
    c->spent += sizes[l] / 64;
  }
  return done(i);
}

// Some bytes of a store arrive.
static void write_bytes(Warp *w, const BulkStore *store, u64 to, const u8 *from, i64 bytes) {
  Launch *c = w->launch;
  const i64 begin = (i64)(to - c->base), pages = (begin + bytes - 1) / PAGE_BYTES - begin / PAGE_BYTES + 1;
  if (UNLIKELY(c->store_count == c->store_capacity || c->saved_count + pages > c->saved_capacity)) {
    raise_fault(w, FAULT_COPIES_FULL, store->site, w->mask, to);
    return;
  }
  save_old(c, begin, bytes);
  __builtin_memcpy(c->data + begin, from, (size_t)bytes);
  __builtin_memset(c->state + begin, 1, (size_t)bytes);
  log_run(c, begin, (int)bytes, store->site, 0, LANES * w->number + store->lane, (int)bytes);
}
static void write_store(Warp *w, const BulkStore *store) {
  const Launch *c = w->launch;
  if (store->box == BYTES) {
    write_bytes(w, store, store->to, c->shared + store->from, store->bytes);
    return;
  }
  const TensorBox *box = &c->boxes[store->box];
  for (int line = 0; line < box->rows && !c->stop; line++) {
    const Row row = row_of(box, store->at, line);
    u8 bytes[256 * 8];
    for (i64 k = 0; k < box->row_bytes; k += CHUNK)
      COPY(bytes + k, c->shared + swizzled(box, (i64)store->from + line * box->pitch + k), CHUNK);
    if (row.end > row.begin) write_bytes(w, store, row.from, bytes + row.begin, row.end - row.begin);
  }
}

// cp.async.bulk.commit_group.
HANDLER(bulk_commit) {
  (void)frame;
  w->bulk_committed += expand(w->mask) & 1u;
  return done(i);
}
// cp.async.bulk.wait_group: finishes all but the latest groups of these lanes. Field: open groups.
HANDLER(bulk_wait) {
  (void)frame;
  Launch *c = w->launch;
  const i32 open = i->field[0];
  i64 kept = 0;
  i32 latest = 0;
  for (i64 k = 0; k < c->bulk_store_count; k++) {
    const BulkStore *store = &c->bulk_stores[k];
    const int is_done = store->row == w->row && (w->mask >> store->lane & 1) &&
                        (i32)store->group < (i32)w->bulk_committed[store->lane] - open;
    if (is_done)
      write_store(w, store);
    else if (kept++ != k)
      c->bulk_stores[kept - 1] = *store;
  }
  c->bulk_store_count = kept;
  for (int l = 0; l < LANES; l++) {
    const i32 limit = (i32)w->bulk_committed[l] - open;
    if ((w->mask >> l & 1) && limit > latest) latest = limit;
  }
  finish_reads(w, store_column(w), latest);
  return done(i);
}

// ---- bytes into shared memory ------------------------------------------------------------------------------------

// Fields: shared address, offset, it is 64 bits wide, global address, offset, address of the mbarrier, offset, it is 64
// bits wide, site, bytes.
HANDLER(copy_bytes) {
  Launch *c = w->launch;
  const int site = i->field[8];
  const u32 *sizes = &AT(u32, 9);
  i64 to[LANES], barriers[LANES];
  u64 from[LANES];
  shared_offsets(to, frame + i->field[0], i->field[2], i->field[1]);
  shared_offsets(barriers, frame + i->field[5], i->field[7], i->field[6]);
  COPY(from, frame + i->field[3], sizeof from);
  c->batch++;
  for (int l = 0; l < LANES && !c->stop; l++) {
    const u64 place = from[l] + (u64)(i64)i->field[4];
    if (!(w->mask >> l & 1) || !sizes[l]) continue;
    if (!check_bytes(w, to[l], place, sizes[l], site, l, READS)) break;
    Mbarrier *barrier = use_mbarrier(w, w->resident, barriers[l], site, 1u << l);
    Transfer *transfer = barrier ? add_transfer(w, site) : 0;
    Marks marks;
    if (!transfer || !issue_copy(w, w->resident, barrier, site, &marks)) break;
    transfer->box = BYTES;
    transfer->rank = w->resident;
    transfer->mbarrier = (int)(barrier - c->residents[w->resident].mbarriers);
    transfer->to = (u32)to[l];
    transfer->bytes = sizes[l];
    transfer->from = place;
    for (u32 k = 0; k < sizes[l] && !c->stop; k += CHUNK) {
      check_shown(w, marks, w->resident, to[l] + k, site, 1u << l);
      note_write(w, marks, to[l] + k, CHUNK, site, 0, 1);
    }
    c->spent += sizes[l] / 64;
  }
  return done(i);
}
