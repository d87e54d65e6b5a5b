// mbarriers, copies on their way, and the barriers of warps and clusters.
#include "async.h"

static const u64 mbarrier_content = 0x6d62617272696572u;  // what shared memory holds where an mbarrier lives

// ---- mbarriers ---------------------------------------------------------------------------------------------------

static int check_place(Warp *w, i64 at, int site, Mask lanes) {
  return check_shared(w, at, 8, site, lanes);
}

// The mbarrier at a place of a block of the cluster, intact and known to the lanes; 0 if a fault was raised.
Mbarrier *use_mbarrier(Warp *w, int rank, i64 at, int site, Mask lanes) {
  Launch *c = w->launch;
  if (!check_place(w, at, site, lanes)) return 0;
  const Resident *block = &c->residents[rank];
  const int number = block->mbarrier_at[at >> 3];
  Mbarrier *barrier = number ? &block->mbarriers[number - 1] : 0;
  u64 content;
  COPY(&content, block->shared + at, 8);
  int is_wrong = !barrier || !barrier->is_valid || content != mbarrier_content;
  if (!is_wrong && rank != w->resident)
    for (int l = 0; l < LANES; l++) is_wrong |= (lanes >> l & 1) && w->cluster_seen[l] < barrier->shown_in;
  if (UNLIKELY(is_wrong)) {
    raise_fault(w, FAULT_MBARRIER, site, lanes, (u64)at);
    return 0;
  }
  if (rank == w->resident) note_read(w, marks_of(w), at, 8, site, 0);
  return barrier;
}

static void acquire(Warp *w, const u32 *known) {
  const Launch *c = w->launch;
  for (int set = 0; set < 2; set++) take_latest(clocks_of(c, set, w->row), known + set * c->agents, c->agents);
}
static void publish_clocks(Warp *w, u32 *into, int site) {
  const Launch *c = w->launch;
  for (int set = 0; set < 2; set++) take_latest(into + set * c->agents, clocks_of(c, set, w->row), c->agents);
  tick(w, site);
}

static void wake(Launch *c, int rank, int number, const Mbarrier *barrier) {
  for (int m = 0; m < c->warp_count; m++) {
    Warp *w = &c->residents[rank].warps[m];
    int kept = 0;
    for (int k = 0; k < w->sleeper_count; k++) {
      if (w->sleepers[k].mbarrier == number && (barrier->phase & 1) != w->sleepers[k].parity) {
        acquire(w, barrier->completed);
        make_pending(w, w->sleepers[k].following, w->sleepers[k].lanes);
        w->state = WARP_READY;
      } else
        w->sleepers[kept++] = w->sleepers[k];
    }
    w->sleeper_count = kept;
  }
}

static void complete_phase(Launch *c, int rank, Mbarrier *barrier) {
  const size_t bytes = 8 * (size_t)c->agents;
  barrier->phase++;
  barrier->pending = barrier->expected;
  COPY(barrier->completed, barrier->joining, bytes);
  __builtin_memset(barrier->joining, 0, bytes);
  wake(c, rank, (int)(barrier - c->residents[rank].mbarriers), barrier);
}

// Fields: address, offset, site, address is 64 bits wide, arrivals.
HANDLER(mbarrier_init) {
  Launch *c = w->launch;
  Resident *block = &c->residents[w->resident];
  const Shared s = shared_of(c);
  const int site = i->field[2];
  const u32 *counts = &AT(u32, 4);
  i64 at[LANES];
  shared_offsets(at, frame + i->field[0], i->field[3], i->field[1]);
  for (int l = 0; l < LANES; l++) {
    if (!(w->mask >> l & 1)) continue;
    if (!check_place(w, at[l], site, 1u << l)) return done(i);
    int number = block->mbarrier_at[at[l] >> 3];
    if (!number) {
      if (UNLIKELY(block->mbarrier_count == MBARRIERS)) {
        raise_fault(w, FAULT_UNSURE, site, 1u << l, (u64)at[l]);
        return done(i);
      }
      number = block->mbarrier_at[at[l] >> 3] = (u8)++block->mbarrier_count;
      Mbarrier *fresh = &block->mbarriers[number - 1];
      fresh->is_valid = 0;
      fresh->issued = fresh->delivered = 0;
      __builtin_memset(fresh->joining, 0, 8 * (size_t)c->agents);
      __builtin_memset(fresh->completed, 0, 8 * (size_t)c->agents);
    }
    Mbarrier *barrier = &block->mbarriers[number - 1];
    if (UNLIKELY(barrier->is_valid || counts[l] < 1 || counts[l] > MOST_COUNT)) {
      raise_fault(w, FAULT_MBARRIER, site, 1u << l, (u64)at[l]);
      return done(i);
    }
    COPY(s.data + at[l], &mbarrier_content, 8);
    mark_shared_written(s, at[l], 8);
    note_write(w, marks_of(w), at[l], 8, site, 0, 1);
    barrier->address = (u32)at[l];
    barrier->is_valid = 1;
    barrier->expected = barrier->pending = (i32)counts[l];
    barrier->bytes = barrier->phase = 0;
    barrier->initialiser = w->row;
    barrier->is_fenced = 0;
    barrier->shown_in = NEVER_SHOWN;
  }
  return done(i);
}

// Fields: address, offset, site, address is 64 bits wide.
HANDLER(mbarrier_invalidate) {
  const Shared s = shared_of(w->launch);
  const int site = i->field[2];
  const u64 nothing = 0;
  i64 at[LANES];
  shared_offsets(at, frame + i->field[0], i->field[3], i->field[1]);
  for (int l = 0; l < LANES; l++) {
    if (!(w->mask >> l & 1)) continue;
    Mbarrier *barrier = use_mbarrier(w, w->resident, at[l], site, 1u << l);
    if (!barrier) return done(i);
    COPY(s.data + at[l], &nothing, 8);
    note_write(w, marks_of(w), at[l], 8, site, 0, 1);
    barrier->is_valid = 0;
  }
  return done(i);
}

enum { ARRIVES = 1, EXPECTS = 2, DROPS = 4, RELEASES = 8 };

static void arrive_at(Warp *w, int rank, Mbarrier *barrier, i64 count, int flags, int site) {
  Launch *c = w->launch;
  if (flags & DROPS) barrier->expected -= (i32)count;
  for (i64 left = count;;) {
    publish_clocks(w, barrier->joining, site);
    const i64 taken = left < barrier->pending ? left : barrier->pending;
    barrier->pending -= (i32)taken;
    left -= taken;
    const int is_complete = taken && !barrier->pending && !barrier->bytes;
    if (is_complete) complete_phase(c, rank, barrier);
    if (!left) return;
    if (UNLIKELY(!is_complete)) {  // more than the phase still waits for
      raise_fault(w, FAULT_MBARRIER, site, w->mask, barrier->address);
      return;
    }
  }
}

// Arrivals, announced bytes or both, or what arrivals would hand on alone. Fields: token, address, offset, site, the
// address is 64 bits wide, arrivals, bytes, flags, the address is one of the cluster's. The token is the phase.
HANDLER(mbarrier_arrive) {
  const int site = i->field[3], flags = i->field[7];
  const u32 *counts = &AT(u32, 5), *bytes = &AT(u32, 6);
  i64 at[LANES];
  u64 tokens[LANES] = {0};
  shared_offsets(at, frame + i->field[1], i->field[4], i->field[2]);
  for (Mask left = w->mask; left && !w->launch->stop;) {
    const i64 place = at[first_lane(left)];
    const int rank = i->field[8] ? rank_of(w, (u32)place) : w->resident;
    Mask here = 0;
    i64 arrivals = 0, announced = 0;
    int is_wrong = rank >= w->launch->resident_count;
    for (int l = 0; l < LANES; l++) {
      if (!(left >> l & 1) || at[l] != place) continue;
      here |= 1u << l;
      arrivals += counts[l];
      announced += (i32)bytes[l];
      is_wrong |= (flags & ARRIVES) && counts[l] < 1;
    }
    left &= ~here;
    Mbarrier *barrier = 0;
    if (UNLIKELY(is_wrong))
      raise_fault(w, FAULT_MBARRIER, site, here, (u64)place);
    else
      barrier = use_mbarrier(w, rank, i->field[8] ? offset_of((u32)place) : place, site, here);
    if (!barrier) break;
    if (flags & EXPECTS) {
      barrier->bytes += announced;
      const int is_more = announced < 0 || barrier->bytes > MOST_COUNT;
      if (UNLIKELY(is_more)) raise_fault(w, FAULT_MBARRIER, site, here, (u64)place);
    }
    for (int l = 0; l < LANES; l++)
      if (here >> l & 1) tokens[l] = (u64)barrier->phase;
    if (flags & ARRIVES) arrive_at(w, rank, barrier, arrivals, flags, site);
    if (flags & RELEASES) publish_clocks(w, barrier->joining, site);
  }
  if (flags & ARRIVES) COPY(frame + i->field[0], tokens, sizeof tokens);
  return done(i);
}

// The lanes that may go on; the others sleep.
Mask wait_for_phase(Warp *w, const Block *block, Mask mask) {
  Launch *c = w->launch;
  i64 at[LANES];
  Mask passed = 0;
  const u32 *parities = (const u32 *)(w->frame + ~block->threads);
  shared_offsets(at, w->frame + block->address, block->is_wide, block->offset);
  for (Mask left = mask; left && !c->stop;) {
    const int first = first_lane(left), parity = (int)(parities[first] & 1);
    Mask here = 0;
    for (int l = first; l < LANES; l++)
      here |= (Mask)((left >> l & 1) && at[l] == at[first] && (int)(parities[l] & 1) == parity) << l;
    left &= ~here;
    const Mbarrier *barrier = use_mbarrier(w, w->resident, at[first], block->site, here);
    if (!barrier) return 0;
    if ((barrier->phase & 1) != parity) {
      acquire(w, barrier->completed);
      passed |= here;
      continue;
    }
    const int k = w->sleeper_count++;  // of each lane one at most
    w->sleepers[k].lanes = here;
    w->sleepers[k].following = block->successor[0];
    w->sleepers[k].mbarrier = (int)(barrier - c->residents[w->resident].mbarriers);
    w->sleepers[k].parity = parity;
  }
  return passed;
}

// What a wait that ended found: its phase is over. Field: predicate.
HANDLER(phase_passed) {
  (void)w;
  AT(Mask, 0) = ALL_LANES;
  return done(i);
}

// fence.proxy.async: what the warp knows is shown to wgmma and copies. Field: site.
HANDLER(proxy_fence) {
  (void)frame;
  const Launch *c = w->launch;
  take_latest(clocks_of(c, FENCED, w->row), clocks_of(c, KNOWN, w->row), c->agents);
  tick(w, i->field[0]);
  return done(i);
}

// ---- copies on their way -----------------------------------------------------------------------------------------

int issue_copy(Warp *w, int rank, Mbarrier *barrier, int site, Marks *marks) {
  Launch *c = w->launch;
  const Resident *block = &c->residents[rank];
  const u32 agent = (u32)(rank * c->agents_each + c->reader_stride + (int)(barrier - block->mbarriers));
  const u32 segment = c->origin + ++barrier->issued;
  if (segment > c->latest) c->latest = segment;
  if (UNLIKELY(segment >= CLOCK_MASK)) {
    raise_fault(w, FAULT_CLOCKS, site, w->mask, 0);
    return 0;
  }
  *marks = marks_of(w);
  marks->places = block->places;
  marks->is_by_lanes = 0;
  marks->known = marks->known_of + rank * c->agents_each;
  marks->own = agent << CLOCK_BITS | segment;
  return 1;
}

Transfer *add_transfer(Warp *w, int site) {
  Launch *c = w->launch;
  if (UNLIKELY(c->transfer_count == c->transfer_capacity)) {
    raise_fault(w, FAULT_COPIES_FULL, site, w->mask, 0);
    return 0;
  }
  Transfer *transfer = &c->transfers[c->transfer_count++];
  transfer->site = site;
  transfer->row = w->row;
  transfer->batch = c->batch;
  return transfer;
}

static void signal_copies(Launch *c, const Transfer *first, u32 copies, i64 bytes) {
  Mbarrier *barrier = &c->residents[first->rank].mbarriers[first->mbarrier];
  const int agent = first->rank * c->agents_each + c->reader_stride + first->mbarrier;
  barrier->delivered += copies;
  // What st.async stored is not shown to the asynchronous proxy.
  for (int set = KNOWN; set <= (first->box == PUSHED ? KNOWN : FENCED); set++)
    barrier->joining[set * c->agents + agent] = c->origin + barrier->delivered;
  barrier->bytes -= bytes;
  if (!barrier->pending && !barrier->bytes) complete_phase(c, first->rank, barrier);
}

// Lets all copies arrive, in the order of their issue; of an instruction's copies to one mbarrier the first may be the
// last that a phase waits for. Whether there were any.
int deliver(Launch *c) {
  const i64 count = c->transfer_count;
  c->transfer_count = 0;
  for (i64 begin = 0, end; begin < count; begin = end) {
    for (end = begin; end < count && c->transfers[end].batch == c->transfers[begin].batch; end++) {
      const Transfer *each = &c->transfers[end];
      if (UNLIKELY(!c->residents[each->rank].live_threads))
        raise_fault(warp_of(c, each->row), FAULT_UNFINISHED, each->site, 0, each->to);
      write_box(c, each);
    }
    for (i64 k = begin; k < end; k++) {
      Transfer *first = &c->transfers[k];
      if (first->rank < 0) continue;  // counted with one before
      i64 bytes = 0;
      u32 copies = 0;
      for (i64 other = k + 1; other < end; other++) {
        Transfer *each = &c->transfers[other];
        if (each->rank != first->rank || each->mbarrier != first->mbarrier) continue;
        bytes += each->bytes;
        copies++;
        each->rank = -1;
      }
      signal_copies(c, first, 1, first->bytes);
      if (copies) signal_copies(c, first, copies, bytes);
    }
  }
  return count > 0;
}

// All blocks have ended: copies that nobody waited for, and warpgroups whose warps did not execute the same wgmma.
void check_ended(Launch *c) {
  if (c->transfer_count)
    raise_fault(warp_of(c, c->transfers[0].row), FAULT_UNFINISHED, c->transfers[0].site, 0, c->transfers[0].to);
  if (c->bulk_store_count)
    raise_fault(warp_of(c, c->bulk_stores[0].row), FAULT_UNFINISHED, c->bulk_stores[0].site, 0, 0);
  for (int rank = 0; rank < c->resident_count; rank++)
    for (int m = 0; m < (c->warp_count + 3) / 4 * 4; m++) {
      Warp *warps = c->residents[rank].warps;
      const u32 issued = m < c->warp_count ? warps[m].issued_products : 0;
      if (UNLIKELY(issued != warps[m / 4 * 4].issued_products)) {
        raise_fault(&warps[m / 4 * 4], FAULT_DIVERGENT_BARRIER, -1, 0, 0);
        return;
      }
    }
}

// st.async of up to 16 bytes. Fields: address, offset, site, address of the mbarrier, offset, bytes of a value, values,
// the values; addresses of 32 bits.
HANDLER(push) {
  Launch *c = w->launch;
  const int site = i->field[2], each = i->field[5], count = i->field[6], size = each * count;
  i64 at[LANES], barriers[LANES];
  shared_offsets(at, frame + i->field[0], 0, i->field[1]);
  shared_offsets(barriers, frame + i->field[3], 0, i->field[4]);
  c->batch++;
  for (int l = 0; l < LANES; l++) {
    if (!(w->mask >> l & 1)) continue;
    const int rank = rank_of(w, (u32)at[l]);
    const i64 to = offset_of((u32)at[l]);
    if (UNLIKELY(rank >= c->resident_count || rank != rank_of(w, (u32)barriers[l]))) {
      raise_fault(w, FAULT_MBARRIER, site, 1u << l, (u64)at[l]);
      return done(i);
    }
    if (!check_shared(w, to, size, site, 1u << l)) return done(i);
    Mbarrier *barrier = use_mbarrier(w, rank, offset_of((u32)barriers[l]), site, 1u << l);
    Transfer *transfer = barrier ? add_transfer(w, site) : 0;
    Marks marks;
    if (!transfer || !issue_copy(w, rank, barrier, site, &marks)) return done(i);
    transfer->box = PUSHED;
    transfer->rank = rank;
    transfer->mbarrier = (int)(barrier - c->residents[rank].mbarriers);
    transfer->to = (u32)to;
    transfer->bytes = (u32)size;
    for (int k = 0; k < count; k++)
      __builtin_memcpy(transfer->data + each * k, frame + i->field[7 + k] + each * l, (size_t)each);
    note_write(w, marks, to, size, site, 0, 1);
  }
  return done(i);
}

// ---- lanes of a warp ---------------------------------------------------------------------------------------------

// bar.warp.sync where lanes may wait for a phase: the others wait for them. The lanes that may go straight on.
Mask meet_in_warp(Warp *w, const Block *block, Mask mask) {
  const u32 *members = (const u32 *)(w->frame + ~block->barrier);
  if (mask == ALL_LANES) {
    if (!block->threads) return mask;
    check_members(w, (const U32 *)members, block->site);
    tick(w, block->site);
    return mask;
  }
  for (int l = 0; l < LANES; l++) {
    if (!(mask >> l & 1)) continue;
    w->members[l] = members[l];
    w->parked_to[l] = block->successor[0];
    if (UNLIKELY(!(members[l] >> l & 1))) raise_fault(w, FAULT_MEMBERS, block->site, 1u << l, 0);
  }
  w->parked |= mask;
  release_members(w);
  return 0;
}

// Lanes whose living members have all come go on.
void release_members(Warp *w) {
  Mask going = 0;
  for (int l = 0; l < LANES; l++)
    going |= (Mask)((w->parked >> l & 1) && !(w->members[l] & w->live & ~w->parked)) << l;
  w->parked &= ~going;
  if (going) tick(w, 0);
  for (int l = 0; l < LANES; l++)
    if (going >> l & 1) make_pending(w, w->parked_to[l], 1u << l);
}

// ---- clusters ----------------------------------------------------------------------------------------------------

// mbarriers that the warp has made are released to the cluster.
static void publish_mbarriers(Warp *w) {
  const Launch *c = w->launch;
  for (int rank = 0; rank < c->resident_count; rank++)
    for (int k = 0; k < c->residents[rank].mbarrier_count; k++) {
      Mbarrier *barrier = &c->residents[rank].mbarriers[k];
      barrier->is_fenced |= barrier->is_valid && barrier->initialiser == w->row;
    }
}
HANDLER(mbarrier_publish) {
  (void)frame;
  publish_mbarriers(w);
  return done(i);
}

static void pass_cluster(Warp *w, Mask lanes) {
  const Launch *c = w->launch;
  w->cluster_passed &= ~lanes;
  for (int l = 0; l < LANES; l++)
    if (lanes >> l & 1) w->cluster_seen[l] = c->cluster_phase;
  acquire(w, c->cluster_done);
}

// Ends the phase of the cluster's barrier if all that live have arrived.
void complete_cluster(Launch *c) {
  const int rows = c->resident_count * c->warp_count;
  Mask any = 0;
  for (int row = 0; row < rows; row++) {
    const Warp *w = warp_of(c, row);
    if (w->live & ~w->cluster_arrived) return;
    any |= w->cluster_arrived;
  }
  if (!any) return;
  c->cluster_phase++;
  for (int rank = 0; rank < c->resident_count; rank++)
    for (int k = 0; k < c->residents[rank].mbarrier_count; k++) {
      Mbarrier *barrier = &c->residents[rank].mbarriers[k];
      if (barrier->is_fenced && barrier->shown_in > c->cluster_phase) barrier->shown_in = c->cluster_phase;
    }
  COPY(c->cluster_done, c->cluster_joining, 8 * (size_t)c->agents);
  __builtin_memset(c->cluster_joining, 0, 8 * (size_t)c->agents);
  for (int row = 0; row < rows; row++) {
    Warp *w = warp_of(c, row);
    w->cluster_passed |= w->cluster_arrived;
    w->cluster_arrived = 0;
    const Mask going = w->cluster_waiting & w->cluster_passed;
    if (!going) continue;
    pass_cluster(w, going);
    w->cluster_waiting &= ~going;
    make_pending(w, w->cluster_following, going);
    w->state = WARP_READY;
  }
}

// barrier.cluster.arrive. Fields: whether it releases, site.
HANDLER(cluster_arrive) {
  (void)frame;
  Launch *c = w->launch;
  const int site = i->field[1];
  if (UNLIKELY(w->mask & (w->cluster_arrived | w->cluster_passed))) {
    raise_fault(w, FAULT_DIVERGENT_BARRIER, site, w->mask, 0);
    return done(i);
  }
  w->cluster_arrived |= w->mask;
  if (i->field[0]) {
    publish_mbarriers(w);
    publish_clocks(w, c->cluster_joining, site);
  }
  complete_cluster(c);
  return done(i);
}

// The lanes that may go straight on; the others sleep.
Mask wait_for_cluster(Warp *w, const Block *block, Mask mask) {
  const Mask passed = mask & w->cluster_passed, waiting = mask & ~passed;
  if (UNLIKELY(waiting & ~w->cluster_arrived)) {
    raise_fault(w, FAULT_DIVERGENT_BARRIER, block->site, mask, 0);
    return 0;
  }
  if (UNLIKELY(waiting && w->cluster_waiting && w->cluster_following != block->successor[0]))
    raise_fault(w, FAULT_UNSURE, block->site, mask, 0);
  if (passed) pass_cluster(w, passed);
  if (waiting) {
    w->cluster_waiting |= waiting;
    w->cluster_following = block->successor[0];
  }
  return passed;
}

// mapa: an address with a rank. Fields: result, address, rank, site; of 32 bits.
HANDLER(map_shared) {
  const u32 ranks = (u32)w->launch->resident_count;
  const Mask bad = pack32((U32)(AT(U32, 2) >= ranks)) & w->mask;
  if (UNLIKELY(bad)) raise_fault(w, FAULT_UNSURE, i->field[3], bad, 0);
  AT(U32, 0) = (AT(U32, 1) & ((1u << RANK_SHIFT) - 1)) | (AT(U32, 2) + 1u) << RANK_SHIFT;
  return done(i);
}
