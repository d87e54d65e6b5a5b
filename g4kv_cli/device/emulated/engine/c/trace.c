#include "trace.h"

// Room for one event, and what follows it; 0 if there is none.
u8 *trace(Warp *w, int kind, int site, int size, Mask lanes, u32 members, i64 more) {
  Launch *c = w->launch;
  more = (more + 7) & ~(i64)7;
  if (c->trace_bytes + (i64)sizeof(Event) + more > c->trace_room) {
    raise_fault(w, FAULT_TRACE_FULL, site, lanes, 0);
    return 0;
  }
  u8 *at = c->trace + c->trace_bytes;
  const Event event = {.step = c->trace_step,
                       .kind = kind,
                       .site = site,
                       .row = w->resident * c->warp_count + w->number,
                       .size = size,
                       .lanes = lanes,
                       .members = members,
                       .more = more};
  COPY(at, &event, sizeof event);
  c->trace_bytes += (i64)sizeof(Event) + more;
  return at + sizeof(Event);
}

u8 *trace_store(Warp *w, int kind, int site, int size, const u64 *at) {
  const int count = __builtin_popcount(w->mask), is_stored = kind == TRACE_WRITE || kind == TRACE_SHARED_WRITE;
  u8 *to = trace(w, kind, site, size, w->mask, 0, count * (8 + (is_stored ? size : 0)));
  if (!to) return 0;
  for (int l = 0; l < LANES; l++) {
    if (!(w->mask >> l & 1)) continue;
    COPY(to, at + l, 8);
    to += 8;
  }
  return to;
}
void trace_access(Warp *w, int kind, int site, int size, const u64 *at) { trace_store(w, kind, site, size, at); }

void trace_members(Warp *w, int kind, int site, Mask lanes, const u32 *members) {
  u8 *to = trace(w, kind, site, 0, lanes, 0, 4 * __builtin_popcount(lanes));
  for (int l = 0; to && l < LANES; l++) {
    if (!(lanes >> l & 1)) continue;
    COPY(to, members + l, 4);
    to += 4;
  }
}

// A fence of the lanes here. Fields: site, whether it is for their block alone, or for their cluster: of clusters with
// several blocks nothing is written down.
HANDLER(fence) {
  (void)frame;
  if (w->launch->trace) trace(w, TRACE_FENCE, i->field[0], i->field[1], w->mask, 0, 0);
  return done(i);
}
