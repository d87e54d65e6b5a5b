// What kernels for sm_90 add: mbarriers, bulk copies that signal them, clusters (warp/mbarriers.py, memory/bulk_copy.py
// and warp/clusters.py say how they behave), and the order that they make.
//
// A lane that waits for a phase sleeps until it completes. A copy changes shared memory as late as possible: when no
// warp can run. If then none can run either, the interpreter decides whether that is a deadlock.
#pragma once
#include "barrier.h"
#include "memory.h"
#include "races.h"

#define MBARRIERS 64
#define MOST_COUNT ((1 << 20) - 1)
#define NEVER_SHOWN ((i64)1 << 62)

// expected, pending: arrivals of a phase, and those that are missing; bytes: those that are missing of copies.
// shown_in: the phase of the cluster's barrier from which on other blocks may use it. issued, delivered: copies that
// signal it. joining: clocks of what arrivals in the current phase know; completed: of the phase before.
struct Mbarrier {
  u32 address;
  i32 is_valid, expected, pending, initialiser, is_fenced;
  i64 bytes, phase, shown_in;
  u32 issued, delivered;
  u32 *joining, *completed;
};

// A bulk copy or st.async that was issued: to where in the block of a rank, and whose mbarrier it signals. box is the
// number of its tensor's, with the coordinates, or says that it has data, or bytes from an address. Those of one
// instruction have one batch.
enum { PUSHED = -1, BYTES = -2 };
struct Transfer {
  i32 box, rank, mbarrier, site, row, batch;
  u32 to, bytes;
  union {
    i32 at[5];
    u8 data[16];
    u64 from;
  };
};

// A bulk store that was issued by a lane of a warp, in a group of its: from where in shared memory, and to a box of a
// tensor, or `bytes` to an address.
struct BulkStore {
  i32 box, row, lane, site;
  u32 group, from, bytes, unused;
  union {
    i32 at[5];
    u64 to;
  };
};

// What reads by the asynchronous proxy have in common: of one instruction, by the agent of a column of the readers.
typedef struct {
  Shared shared;
  Marks marks;
  const u32 *fenced;
  u32 segment;
  i64 column;
  int site;
} Reads;
Reads begin_reads(Warp *w, int site, u32 segment, i64 column);
int read_chunk(Warp *w, const Reads *r, i64 at, void *to);
void finish_reads(Warp *w, i64 column, i64 segment);

#define TENSOR_BOXES 64
// A tensor map (memory/tensor_map.py), innermost first.
struct TensorBox {
  u8 packed[128];
  u64 address;
  i64 extents[5], strides[5];
  i32 box[5], dimensions, element_bytes, swizzle, row_bytes, pitch, rows;
};

// A warp by its number among those of all resident blocks.
INLINE Warp *warp_of(const Launch *c, int row) { return c->residents[0].warps + row; }

Mbarrier *use_mbarrier(Warp *w, int rank, i64 at, int site, Mask lanes);
// Marks for accesses of the copies that signal an mbarrier, the next of which is issued; 0 if there is no room.
int issue_copy(Warp *w, int rank, Mbarrier *barrier, int site, Marks *marks);
Transfer *add_transfer(Warp *w, int site);
void write_box(Launch *c, const Transfer *transfer);

Mask wait_for_phase(Warp *w, const Block *block, Mask mask);
Mask wait_for_cluster(Warp *w, const Block *block, Mask mask);
Mask meet_in_warp(Warp *w, const Block *block, Mask mask);
void release_members(Warp *w);
void complete_cluster(Launch *c);
int deliver(Launch *c);
void check_ended(Launch *c);
i64 product_bytes(void);
void check_members(Warp *w, const U32 *members, int site);

// Where an address of shared::cluster lies: mapa put the rank there.
#define RANK_SHIFT 24
INLINE int rank_of(const Warp *w, u32 address) {
  return address >> RANK_SHIFT ? (int)(address >> RANK_SHIFT) - 1 : w->resident;
}
INLINE i64 offset_of(u32 address) { return (i64)(address & ((1u << RANK_SHIFT) - 1)); }
