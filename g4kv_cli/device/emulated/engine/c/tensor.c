// cp.async.bulk.tensor into shared memory (memory/bulk_copy.py): a box is a list of rows of contiguous bytes, of which
// what leaves the tensor is read as zeros. With a swizzle of 128, 64 or 32 bytes the number of a 16-byte chunk is XORed
// with as many of the bits above bit 6 of the shared address as the span has chunks.
//
// The box is looked at when the copy is issued and moved when it arrives: nobody may store to what a launch reads.
#include "tensor.h"

#define PARAMETER_WINDOW 0x7c0000000000u
#define SHARED_WINDOW 0x7e0000000000u
#define MAP_BYTES 128
#define MAP_ALIGNMENT 64
#define DESTINATION_ALIGNMENT 128
#define MULTICAST_RANKS 16

// As TensorMap.pack writes it: extents are less one, strides those of all dimensions but the innermost, and the lower
// byte of what is said of an element its bytes.
typedef struct {
  u8 magic[8];
  u64 address;
  i64 strides[DIMENSIONS - 1];
  u32 extents[DIMENSIONS];
  u16 box[DIMENSIONS], element, dimensions, swizzle;
} PackedMap;

static int unpack(TensorBox *box, const u8 *packed) {
  PackedMap map;
  COPY(&map, packed, sizeof map);
  if (__builtin_memcmp(map.magic, "g4kvTMAP", 8) || !map.dimensions || map.dimensions > DIMENSIONS) return 0;
  COPY(box->packed, packed, MAP_BYTES);
  box->address = map.address;
  box->dimensions = map.dimensions;
  box->element_bytes = map.element & 255;
  box->swizzle = map.swizzle;
  const int bytes = box->element_bytes, swizzle = map.swizzle;
  int is_good = (bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8) && map.address % CHUNK == 0 && map.address &&
                (swizzle == 0 || swizzle == 32 || swizzle == 64 || swizzle == 128);
  box->rows = 1;
  for (int d = 0; d < box->dimensions; d++) {
    const u16 size = map.box[d];
    box->extents[d] = (i64)map.extents[d] + 1;
    box->box[d] = size;
    is_good &= size >= 1 && size <= 256;
    box->strides[d] = 0;
    if (d == 0) continue;
    box->strides[d] = map.strides[d - 1];
    is_good &= box->strides[d] % CHUNK == 0 && box->strides[d] >= 0 && box->strides[d] < (i64)1 << 40;
    box->rows *= size;
    is_good &= box->rows <= 1 << 16;
  }
  box->row_bytes = box->box[0] * bytes;
  box->pitch = swizzle ? swizzle : box->row_bytes;
  return is_good && box->row_bytes % CHUNK == 0 && (!swizzle || box->row_bytes <= swizzle);
}

// The number of the tensor map at a generic address, or -1 with a fault: what is no map is the interpreter's to name.
int find_box(Warp *w, u64 address, int site, Mask lanes) {
  Launch *c = w->launch;
  const u8 *packed = 0;
  if (address % MAP_ALIGNMENT == 0) {
    if (address >= PARAMETER_WINDOW && address + MAP_BYTES <= PARAMETER_WINDOW + (u64)c->parameter_bytes)
      packed = c->parameters + (address - PARAMETER_WINDOW);
    else if (address >= c->base) {
      Range hint = {(u64)1 << 63, 0, 0};
      if (!check_global(w, &hint, address, MAP_BYTES, CHUNK, site, lanes, LOOKS)) return -1;
      packed = c->data + (address - c->base);
    }
  }
  for (int number = 0; packed && number < c->box_count; number++)
    if (!__builtin_memcmp(c->boxes[number].packed, packed, MAP_BYTES)) return number;
  if (packed && c->box_count < TENSOR_BOXES && unpack(&c->boxes[c->box_count], packed)) return (int)c->box_count++;
  raise_fault(w, FAULT_UNSURE, site, lanes, address);
  return -1;
}

// Whether the lanes may copy a box, and where its bytes come from or go may be accessed; otherwise a fault was raised.
int check_box(Warp *w, const TensorBox *box, const i32 *at, i64 shared, int site, Mask lanes, enum Access access) {
  Launch *c = w->launch;
  Range *hint = &c->hints[site];
  if (UNLIKELY((i64)at[0] * box->element_bytes % CHUNK || shared % DESTINATION_ALIGNMENT)) {
    raise_fault(w, FAULT_MISALIGNED, site, lanes, box->address);
    return 0;
  }
  for (int number = 0; number < box->rows; number++) {
    const Row row = row_of(box, at, number);
    const i64 bytes = row.end - row.begin;
    if (!bytes) continue;
    if (UNLIKELY(row.from < c->watch_end && row.from + (u64)bytes > c->watch_begin)) {
      raise_fault(w, FAULT_UNSURE, site, lanes, row.from);  // whose bytes these are is the interpreter's to judge
      return 0;
    }
    if (!check_global(w, hint, row.from, (u64)bytes, bytes % CHUNK ? 1 : CHUNK, site, lanes, access)) return 0;
  }
  return 1;
}

// Whether a mark is of another block's ordinary write that was not shown to the asynchronous proxy.
INLINE u32 is_unshown(const Launch *c, const u32 *fenced, int rank, u32 mark) {
  const u32 agent = mark >> CLOCK_BITS, is_own = agent - (u32)(rank * c->agents_each) < (u32)c->warp_count;
  return !is_own & ((mark & CLOCK_MASK) > fenced[agent]);
}
void check_shown(Warp *w, Marks m, int rank, i64 at, int site, Mask lanes) {
  const Launch *c = w->launch;
  const u32 *fenced = clocks_of(c, FENCED, w->row);
  const i64 coarse = at >> 4, fine = at >> m.shift;
  u32 unshown = is_unshown(c, fenced, rank, m.places.writers[coarse]);
  if (UNLIKELY(m.places.has_fine[coarse]))
    for (int j = 0; j < 16 >> m.shift; j++) unshown |= is_unshown(c, fenced, rank, m.places.fine_writers[fine + j]);
  if (UNLIKELY(unshown)) raise_fault(w, FAULT_SHARED_RACE, site, lanes, (u64)at);
}

static void copy_to(Warp *w, int rank, int number, const i32 *at, i64 to, i64 barrier_at, int site, Mask lanes) {
  Launch *c = w->launch;
  const TensorBox *box = &c->boxes[number];
  if (UNLIKELY(rank >= c->resident_count)) {
    raise_fault(w, FAULT_UNSURE, site, lanes, (u64)to);
    return;
  }
  Mbarrier *barrier = use_mbarrier(w, rank, barrier_at, site, lanes);
  Transfer *transfer = barrier ? add_transfer(w, site) : 0;
  Marks marks;
  if (!transfer || !issue_copy(w, rank, barrier, site, &marks)) return;
  transfer->box = number;
  transfer->rank = rank;
  transfer->mbarrier = (int)(barrier - c->residents[rank].mbarriers);
  transfer->to = (u32)to;
  transfer->bytes = (u32)(box->rows * box->row_bytes);
  COPY(transfer->at, at, sizeof transfer->at);
  for (int row = 0; row < box->rows && !c->stop; row++)
    for (i64 k = 0; k < box->row_bytes; k += CHUNK) {
      const i64 place = swizzled(box, to + row * box->pitch + k);
      if (!check_shared(w, place, CHUNK, site, lanes)) return;
      check_shown(w, marks, rank, place, site, lanes);
      note_write(w, marks, place, CHUNK, site, 0, 1);
    }
  c->spent += box->rows * box->row_bytes / 64;
}

// Fields: shared address, offset, it is 64 bits wide, address of the map, offset, address of the mbarrier, offset, it
// is 64 bits wide, site, dimensions, coordinates, ranks that get a copy (b32), whether there are such.
enum { TENSOR_AT = 10, TENSOR_RANKS = TENSOR_AT + DIMENSIONS };
HANDLER(copy_tensor) {
  Launch *c = w->launch;
  const int site = i->field[8], dimensions = i->field[9], is_multicast = i->field[TENSOR_RANKS + 1];
  i64 to[LANES], barriers[LANES];
  u64 maps[LANES];
  shared_offsets(to, frame + i->field[0], i->field[2], i->field[1]);
  shared_offsets(barriers, frame + i->field[5], i->field[7], i->field[6]);
  COPY(maps, frame + i->field[3], sizeof maps);
  c->batch++;
  for (int l = 0; l < LANES && !c->stop; l++) {
    if (!(w->mask >> l & 1)) continue;
    i32 at[DIMENSIONS] = {0};
    for (int d = 0; d < dimensions; d++) at[d] = ((const i32 *)(frame + i->field[TENSOR_AT + d]))[l];
    const int number = find_box(w, maps[l] + (u64)(i64)i->field[4], site, 1u << l);
    if (number < 0) break;
    if (UNLIKELY(c->boxes[number].dimensions != dimensions)) {
      raise_fault(w, FAULT_UNSURE, site, 1u << l, maps[l]);
      break;
    }
    if (!check_box(w, &c->boxes[number], at, to[l], site, 1u << l, READS)) break;
    if (!is_multicast) {
      copy_to(w, w->resident, number, at, to[l], barriers[l], site, 1u << l);
      continue;
    }
    const u32 ranks = ((const u32 *)(frame + i->field[TENSOR_RANKS]))[l];
    for (int rank = 0; rank < MULTICAST_RANKS; rank++)
      if (ranks >> rank & 1) copy_to(w, rank, number, at, to[l], barriers[l], site, 1u << l);
  }
  return done(i);
}

// A new value of a tensor map's field that has one value here. Fields: value, site.
HANDLER(require_one) {
  const Mask others = pack32((U32)(AT(U32, 0) != 1u)) & w->mask;
  if (UNLIKELY(others)) raise_fault(w, FAULT_UNSURE, i->field[1], others, 0);
  return done(i);
}

// A copy arrives.
void write_box(Launch *c, const Transfer *transfer) {
  const Resident *block = &c->residents[transfer->rank];
  const Shared s = {block->shared, block->shared_state, c->generation};
  if (transfer->box < 0) {
    const u8 *from = transfer->box == PUSHED ? transfer->data : c->data + (transfer->from - c->base);
    __builtin_memcpy(s.data + transfer->to, from, transfer->bytes);
    mark_shared_written(s, transfer->to, (int)transfer->bytes);
    return;
  }
  const TensorBox *box = &c->boxes[transfer->box];
  for (int number = 0; number < box->rows; number++) {
    const Row row = row_of(box, transfer->at, number);
    for (i64 k = 0; k < box->row_bytes; k += CHUNK) {
      const i64 to = swizzled(box, (i64)transfer->to + number * box->pitch + k);
      u8 chunk[CHUNK] = {0};
      const i64 begin = row.begin > k ? row.begin : k, end = row.end < k + CHUNK ? row.end : k + CHUNK;
      if (begin < end) {
        const u8 *from = c->data + (row.from - c->base) + (begin - row.begin);
        if (end - begin == CHUNK)
          COPY(chunk, from, CHUNK);
        else
          __builtin_memcpy(chunk + (begin - k), from, (size_t)(end - begin));
      }
      COPY(s.data + to, chunk, CHUNK);
      mark_shared_written(s, to, CHUNK);
    }
  }
}
