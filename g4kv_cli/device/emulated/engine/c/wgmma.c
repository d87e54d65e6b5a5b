// wgmma by one of its four warps: 16 of the 64 rows. warp/wgmma.py says where operands and results lie.
//
// Destination registers hold placeholders until a wait of the warp, which puts the results there: NaNs that no
// arithmetic gives, each for one register of one instruction. A chain of instructions on the same registers keeps one
// Product, whose placeholders are always the newest ones. Whatever else meets a placeholder is the interpreter's to
// judge.
#include "async.h"
#include "products.h"

#define DEPTH 16
#define CHUNK 16
#define MOST_REGISTERS 128
#define PLACEHOLDER 0xffa00000u
#define PLACEHOLDER_MASK 0xffe00000u
#define REGISTER_BITS 7
#define SERIALS (1u << 14)

struct Product {
  u32 serial, group;
  i32 registers, unused;
  u32 values[MOST_REGISTERS][LANES];
};

// ---- operands in shared memory -----------------------------------------------------------------------------------

typedef struct {
  i64 start, leading, stride, span;  // span: of a row of a tile, by the swizzle; a chunk where there is none
} Tiles;

// What a descriptor says; 0 with a fault for what was not recorded.
static int decode(Warp *w, u64 descriptor, int extent, int is_mn_major, int site, Tiles *tiles) {
  static const i64 spans[] = {CHUNK, 128, 64, 32};
  const i64 span = spans[descriptor >> 62], pattern = 8 * span;
  tiles->start = (i64)(descriptor & 0x3fff) << 4;
  tiles->leading = (i64)(descriptor >> 16 & 0x3fff) << 4;
  tiles->stride = (i64)(descriptor >> 32 & 0x3fff) << 4;
  tiles->span = span;
  int is_wrong = (descriptor >> 49 & 7) != 0;
  if (span != CHUNK) {
    is_wrong |= tiles->start % pattern > (is_mn_major ? 0 : span - 2 * DEPTH) || tiles->stride % pattern;
    is_wrong |= is_mn_major && extent > span / 2 && tiles->leading % pattern;
  }
  if (UNLIKELY(is_wrong)) raise_fault(w, FAULT_UNSURE, site, w->mask, descriptor);
  return !is_wrong;
}
// The shared address of a chunk: 8 k of a row (K-major), or 8 rows of one k.
INLINE i64 chunk_of(const Tiles *t, int row, int k, int is_mn_major) {
  const int plain = t->span == CHUNK;
  i64 linear;
  if (is_mn_major)
    linear = t->start + 2 * row / t->span * (plain ? t->stride : t->leading) +
             k / 8 * (plain ? t->leading : t->stride) + k % 8 * t->span + 2 * row % t->span;
  else
    linear = t->start + row / 8 * t->stride + row % 8 * t->span + k / 8 * (plain ? t->leading : CHUNK);
  return linear ^ ((linear >> 7 & (t->span / CHUNK - 1)) << 4);
}

// The read of a warpgroup by its next group of wgmma.
static Reads read_operands(Warp *w, int site) {
  return begin_reads(w, site, w->committed_products + 1, w->launch->warp_count + w->number / 4);
}

// A descriptor, which all lanes have alike; otherwise a fault was raised.
static u64 descriptor_of(Warp *w, const char *frame, int place, int site) {
  const U64 all = *(const U64 *)(frame + place);
  if (UNLIKELY(pack64((U64)(all != all[0])))) raise_fault(w, FAULT_UNSURE, site, w->mask, all[0]);
  return all[0];
}

// ---- placeholders ------------------------------------------------------------------------------------------------

INLINE u32 placeholder(u32 serial, int number) { return PLACEHOLDER + (serial << REGISTER_BITS) + (u32)number; }
// Lanes in which a register may hold one: others of these bits are numbers like any.
static Mask placeholders_in(const Warp *w, const char *frame, int place) {
  const Mask alike = pack32((U32)((*(const U32 *)(frame + place) & PLACEHOLDER_MASK) == PLACEHOLDER));
  const u32 open = w->issued_products - w->finished_products, *values = (const u32 *)(frame + place);
  Mask held = 0;
  for (int l = 0; alike && l < LANES; l++) {
    const u32 serial = (values[l] - PLACEHOLDER) >> REGISTER_BITS;
    if ((alike >> l & 1) && (serial - w->finished_products) % SERIALS < open) held |= 1u << l;
  }
  return held;
}
static Product *product_of(const Warp *w, u32 serial) {
  for (int k = 0; k < w->product_count; k++)
    if (w->products[k].serial == serial) return &w->products[k];
  return 0;
}

enum { WGMMA_SCALE, WGMMA_B, WGMMA_A, WGMMA_SITE = 6, WGMMA_REGISTERS, WGMMA_FLAGS, WGMMA_FIRST };
enum { A_IN_REGISTERS = 1, B_IS_TRANSPOSED = 2, IS_F16 = 4, NEGATES_A = 8, NEGATES_B = 16, A_IS_TRANSPOSED = 32 };
#define FORM_SHIFT 8  // of the other types

// The product that an instruction adds to or begins, with its addends; 0 with a fault.
static Product *open_product(Warp *w, const char *frame, const i32 *places, int count, int adds, int site) {
  const Launch *c = w->launch;
  const u32 token = *(const u32 *)(frame + places[0]) - PLACEHOLDER;
  Product *product = adds && token < SERIALS << REGISTER_BITS ? product_of(w, token >> REGISTER_BITS) : 0;
  if (product && product->registers == count) {
    U32 differs = (U32)(0u);
    for (int number = 0; number < count; number++)
      differs |= *(const U32 *)(frame + places[number]) ^ placeholder(product->serial, number);
    if (UNLIKELY(__builtin_reduce_or(differs))) {
      raise_fault(w, FAULT_UNSURE, site, w->mask, 0);
      return 0;
    }
    return product;
  }
  if (UNLIKELY(w->product_count == c->products_each)) {
    raise_fault(w, FAULT_COPIES_FULL, site, w->mask, 0);
    return 0;
  }
  product = &w->products[w->product_count++];
  product->registers = count;
  Mask held = 0;
  for (int number = 0; number < count; number++) {
    if (adds) {
      held |= placeholders_in(w, frame, places[number]);
      COPY(product->values[number], frame + places[number], 4 * LANES);
    } else
      __builtin_memset(product->values[number], 0, 4 * LANES);
  }
  if (UNLIKELY(held)) {
    raise_fault(w, FAULT_UNSURE, site, held, 0);
    return 0;
  }
  return product;
}

// Whether all of a warp execute an instruction alike; otherwise a fault was raised.
static int begins_whole(Warp *w, Mask scale, int site) {
  if (UNLIKELY(w->launch->stop)) return 0;
  if (w->mask == ALL_LANES && (!scale || scale == ALL_LANES)) return 1;
  raise_fault(w, FAULT_UNSURE, site, w->mask, 0);
  return 0;
}
// Reads this warp's rows of A, of 32 bytes each: from four registers, or where a descriptor says. 0 with a fault.
static int read_a(Warp *w, const char *frame, const Instruction *i, const Reads *reads, int flags, u8 to[16][32]) {
  const int site = i->field[WGMMA_SITE], first = 16 * (w->number % 4);
  if (flags & A_IN_REGISTERS) {
    for (int number = 0; number < 4; number++)
      for (int g = 0; g < 8; g++)
        COPY(&to[8 * (number & 1) + g][16 * (number >> 1)], frame + i->field[WGMMA_A + number] + 16 * g, 16);
    return 1;
  }
  const int is_transposed = (flags & A_IS_TRANSPOSED) != 0;
  Tiles tiles;
  if (!decode(w, descriptor_of(w, frame, i->field[WGMMA_A], site), 64, is_transposed, site, &tiles)) return 0;
  for (int row = 0; !is_transposed && row < 16; row++)
    for (int k = 0; k < DEPTH; k += 8)
      if (!read_chunk(w, reads, chunk_of(&tiles, first + row, k, 0), &to[row][2 * k])) return 0;
  for (int k = 0; is_transposed && k < DEPTH; k++)
    for (int row = 0; row < 16; row += 8) {
      u8 chunk[CHUNK];
      if (!read_chunk(w, reads, chunk_of(&tiles, first + row, k, 1), chunk)) return 0;
      for (int r = 0; r < 8; r++) COPY(&to[row + r][2 * k], chunk + 2 * r, 2);
    }
  return 1;
}
// The other sign of elements, of each of which the highest bit is the sign's.
INLINE void negate(u8 *raw, int bytes, int element_bytes) {
  for (int k = element_bytes - 1; k < bytes; k += element_bytes) raw[k] ^= 0x80u;
}
// The results have placeholders until somebody waits for them.
static void issue_product(Warp *w, char *frame, Product *product, const i32 *places) {
  product->serial = w->issued_products++ % SERIALS;
  product->group = w->committed_products;
  for (int number = 0; number < product->registers; number++)
    *(U32 *)(frame + places[number]) = (U32)(placeholder(product->serial, number));
}

// Of bf16 or f16 into f32. Fields: scale-d, descriptor of B, descriptor or four registers of A, site, accumulators,
// flags, the accumulators.
HANDLER(wgmma_multiply) {
  Launch *c = w->launch;
  const int site = i->field[WGMMA_SITE], count = i->field[WGMMA_REGISTERS], flags = i->field[WGMMA_FLAGS];
  const int columns = 2 * count, is_transposed = (flags & B_IS_TRANSPOSED) != 0, negates = (flags & NEGATES_B) != 0;
  const Mask scale = AT(Mask, WGMMA_SCALE);
  if (!begins_whole(w, scale, site)) return done(i);
  i32 places[MOST_REGISTERS];
  for (int number = 0; number < count; number++) places[number] = field_of(c, i, WGMMA_FIRST + number);
  const Reads reads = read_operands(w, site);
  Rows a;
  a.form = flags & IS_F16 ? FORM_F16 : FORM_BF16;
  if (!read_a(w, frame, i, &reads, flags, (u8(*)[32])a.raw)) return done(i);
  if (flags & NEGATES_A) negate((u8 *)a.raw, sizeof a.raw, 2);
  decode_rows(&a);
  const u64 b = descriptor_of(w, frame, i->field[WGMMA_B], site);
  Tiles tiles;
  if (!decode(w, b, columns, is_transposed, site, &tiles)) return done(i);
  Product *product = open_product(w, frame, places, count, scale != 0, site);
  if (!product) return done(i);
  for (int tile = 0; tile < columns / 8; tile++) {
    Columns b;
    b.form = a.form;
    if (is_transposed) {
      for (int k = 0; k < DEPTH; k++)
        if (!read_chunk(w, &reads, chunk_of(&tiles, 8 * tile, k, 1), b.raw[k])) return done(i);
      if (negates) negate((u8 *)b.raw, sizeof b.raw, 2);
      decode_turned(&b);
    } else {
      u16 chunks[2][64];
      for (int n = 0; n < 8; n++)
        for (int half = 0; half < 2; half++)
          if (!read_chunk(w, &reads, chunk_of(&tiles, 8 * tile + n, 8 * half, 0), &chunks[half][8 * n])) return done(i);
      if (negates) negate((u8 *)chunks, sizeof chunks, 2);
      decode_columns(&b, chunks);
    }
    multiply_tile(&a, &b, &product->values[4 * tile]);
  }
  issue_product(w, frame, product, places);
  c->spent += columns;
  return done(i);
}

// Of other types, which are K-major but for f16. Fields as above, with the form above the flags.
HANDLER(wgmma_form) {
  Launch *c = w->launch;
  const int site = i->field[WGMMA_SITE], count = i->field[WGMMA_REGISTERS];
  const int flags = i->field[WGMMA_FLAGS] & ((1 << FORM_SHIFT) - 1), is_transposed = (flags & B_IS_TRANSPOSED) != 0;
  const Form form = form_of(i->field[WGMMA_FLAGS] >> FORM_SHIFT);
  const int is_half = form.sum == SUM_F16, columns = (is_half ? 4 : 2) * count;
  const int element_bytes = form.a == ELEMENT_F16 ? 2 : form.a == ELEMENT_TF32 ? 4 : 1;
  const Mask scale = AT(Mask, WGMMA_SCALE);
  if (!begins_whole(w, scale, site)) return done(i);
  i32 places[MOST_REGISTERS];
  for (int number = 0; number < count; number++) places[number] = field_of(c, i, WGMMA_FIRST + number);
  const Reads reads = read_operands(w, site);
  u8 rows[16][32], columns_of_b[8][32];
  AnyRows a;
  AnyColumns b;
  if (!read_a(w, frame, i, &reads, flags, rows)) return done(i);
  if (flags & NEGATES_A) negate(rows[0], sizeof rows, element_bytes);
  read_rows(&a, rows, form);
  const u64 descriptor = descriptor_of(w, frame, i->field[WGMMA_B], site);
  Tiles tiles;
  if (!decode(w, descriptor, columns, is_transposed, site, &tiles)) return done(i);
  Product *product = open_product(w, frame, places, count, scale != 0, site);
  if (!product) return done(i);
  for (int tile = 0; tile < columns / 8; tile++) {
    for (int n = 0; !is_transposed && n < 8; n++)
      for (int half = 0; half < 2; half++)
        if (!read_chunk(w, &reads, chunk_of(&tiles, 8 * tile + n, 8 * half, 0), &columns_of_b[n][16 * half]))
          return done(i);
    for (int k = 0; is_transposed && k < DEPTH; k++) {
      u8 chunk[CHUNK];
      if (!read_chunk(w, &reads, chunk_of(&tiles, 8 * tile, k, 1), chunk)) return done(i);
      for (int n = 0; n < 8; n++) COPY(&columns_of_b[n][2 * k], chunk + 2 * n, 2);
    }
    if (flags & NEGATES_B) negate(columns_of_b[0], sizeof columns_of_b, element_bytes);
    read_columns(&b, columns_of_b, form);
    if (is_half) {
      u32 sums[4][LANES];
      split_halves(sums, &product->values[2 * tile]);
      multiply_form(&a, &b, form, sums);
      join_halves(&product->values[2 * tile], sums);
    } else
      multiply_form(&a, &b, form, &product->values[4 * tile]);
  }
  issue_product(w, frame, product, places);
  c->spent += columns;
  return done(i);
}

// All lanes of a warp execute it. Field: site.
HANDLER(wgmma_fence) {
  (void)frame;
  if (UNLIKELY(w->mask != ALL_LANES)) raise_fault(w, FAULT_UNSURE, i->field[0], w->mask, 0);
  return done(i);
}
HANDLER(wgmma_commit) {
  (void)frame;
  if (UNLIKELY(w->mask != ALL_LANES)) raise_fault(w, FAULT_UNSURE, i->field[0], w->mask, 0);
  w->committed_products++;
  return done(i);
}

// Puts the results of all but the latest open groups into the registers that may hold their placeholders. Fields: open
// groups, site, registers, the registers.
HANDLER(wgmma_wait) {
  Launch *c = w->launch;
  const int site = i->field[1];
  if (UNLIKELY(w->mask != ALL_LANES)) {
    raise_fault(w, FAULT_UNSURE, site, w->mask, 0);
    return done(i);
  }
  const i32 limit = (i32)w->committed_products - i->field[0];
  for (int number = 0; number < i->field[2]; number++) {
    const int place = field_of(c, i, 3 + number);
    const Mask held = placeholders_in(w, frame, place);
    if (!held) continue;
    const u32 token = *(const u32 *)(frame + place);
    const Product *product = product_of(w, (token - PLACEHOLDER) >> REGISTER_BITS);
    const u32 which = (token - PLACEHOLDER) & ((1u << REGISTER_BITS) - 1);
    if (UNLIKELY(!product || which >= (u32)product->registers ||
                 pack32((U32)(*(const U32 *)(frame + place) != token)))) {
      raise_fault(w, FAULT_UNSURE, site, held, 0);
      return done(i);
    }
    if ((i32)product->group < limit) COPY(frame + place, product->values[which], 4 * LANES);
  }
  int kept = 0;
  for (int k = 0; k < w->product_count; k++) {
    if ((i32)w->products[k].group < limit) continue;
    if (kept != k) __builtin_memcpy(&w->products[kept], &w->products[k], sizeof(Product));
    kept++;
  }
  w->product_count = kept;
  if (!kept) w->finished_products = w->issued_products;
  finish_reads(w, c->warp_count + w->number / 4, limit);
  return done(i);
}

// Registers that an instruction is about to read: none of them may still be computed. Fields: site, registers, the
// registers.
HANDLER(wgmma_look) {
  for (int number = 0; number < i->field[1]; number++) {
    const Mask held = placeholders_in(w, frame, field_of(w->launch, i, 2 + number)) & w->mask;
    if (UNLIKELY(held)) raise_fault(w, FAULT_UNSURE, i->field[0], held, 0);
  }
  return done(i);
}

i64 product_bytes(void) { return sizeof(Product); }
