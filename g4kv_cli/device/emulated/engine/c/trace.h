// What a launch does with memory that several threads use, and by which they meet: written down for checks/order.py,
// whose word it is whether that is ordered (order_trace.py). Only where all that is resident runs together.
#pragma once
#include "engine.h"

// The names stand in order_trace.py too, in this order.
enum TraceKind {
  TRACE_READ,
  TRACE_WRITE,
  TRACE_ATOMIC,
  TRACE_SHARED_READ,
  TRACE_SHARED_WRITE,
  TRACE_SHARED_ATOMIC,
  TRACE_FENCE,
  TRACE_EXCHANGE,
  TRACE_WARP_BARRIER,
  TRACE_EXIT,
  TRACE_BARRIER,
  TRACE_CHUNK
};

// row: the warp's number among all that are resident. members: the warps that met; size: bytes of an access, or the
// number of a barrier; more: bytes that follow. Of an access these are an address for each lane, then what is stored;
// of what members of a warp do their masks.
typedef struct {
  i64 step;
  i32 kind, site, row, size;
  u32 lanes, members;
  i64 more;
} Event;

u8 *trace(Warp *w, int kind, int site, int size, Mask lanes, u32 members, i64 more);
void trace_access(Warp *w, int kind, int site, int size, const u64 *at);
u8 *trace_store(Warp *w, int kind, int site, int size, const u64 *at);
void trace_members(Warp *w, int kind, int site, Mask lanes, const u32 *members);

// Whether an access of global memory is one of those.
INLINE int is_traced(const Launch *c, int site, const u64 *at, int size, Mask lanes) {
  if (c->trace_sites[site]) return 1;
  for (int l = 0; l < LANES; l++)
    if ((lanes >> l & 1) && at[l] < c->trace_end && at[l] + (u64)size > c->trace_begin) return 1;
  return 0;
}
