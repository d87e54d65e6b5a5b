// Atomics. Lanes take turns in their order; where that matters to anybody, all that is resident runs together
// (together.c), so that warps and blocks take turns in one order too.
#include "memory.h"
#include "races.h"
#include "trace.h"

// The names stand in lower_atomics.py too, in this order.
enum {
  ATOMIC_ADD,
  ATOMIC_MIN_UNSIGNED,
  ATOMIC_MAX_UNSIGNED,
  ATOMIC_MIN_SIGNED,
  ATOMIC_MAX_SIGNED,
  ATOMIC_AND,
  ATOMIC_OR,
  ATOMIC_XOR,
  ATOMIC_EXCHANGE,
  ATOMIC_SWAP,
  ATOMIC_INCREMENT,
  ATOMIC_DECREMENT,
  ATOMIC_ADD_FLOAT,
  ATOMIC_ADD_F16,
  ATOMIC_MIN_F16,
  ATOMIC_MAX_F16,
  ATOMIC_ADD_BF16,
  ATOMIC_MIN_BF16,
  ATOMIC_MAX_BF16,
};

// ---- floats: the roundings of arithmetic/ and of memory/atomics.py -----------------------------------------------

INLINE u32 flushed1(u32 a) { return a & 0x7f800000u ? a : a & 0x80000000u; }
INLINE u32 sum32(u32 a, u32 b) {
  const f32 value = f32_of(a) + f32_of(b);
  return value == value ? bits_of(value) : 0x7fffffffu;
}
// Shared memory keeps subnormals, global memory does not.
INLINE u32 added32(u32 old, u32 b, int is_shared) {
  return is_shared ? sum32(old, b) : flushed1(sum32(flushed1(old), flushed1(b)));
}
INLINE int is_nan1(u64 a) { return (a & 0x7fffffffffffffffu) > 0x7ff0000000000000u; }
// A NaN of global memory stays as it is, the operand's before the memory's; of shared memory the other way, and quiet.
INLINE u64 added64(u64 old, u64 b, int is_shared) {
  f64 x, y;
  COPY(&x, &old, 8);
  COPY(&y, &b, 8);
  const f64 value = x + y;
  u64 bits;
  COPY(&bits, &value, 8);
  if (value == value) return bits;
  const u64 quiet = is_shared ? 0x0008000000000000u : 0, first = is_shared ? old : b, second = is_shared ? b : old;
  return is_nan1(first) ? first | quiet : is_nan1(second) ? second | quiet : 0xfff8000000000000u;
}
// Sums of two halves are rounded once: f32 holds twice the digits of a half and two more.
INLINE f32 f16_as_f32(u32 a) {
  const u16 half = (u16)a;
  _Float16 value;
  COPY(&value, &half, 2);
  return (f32)value;
}
INLINE u32 f16_of(f32 value) {
  const _Float16 half = (_Float16)value;
  u16 bits;
  COPY(&bits, &half, 2);
  return value == value ? bits : 0x7fffu;
}
INLINE u32 bf16_of(f32 value) {
  const u32 bits = bits_of(value);
  return value == value ? (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16 : 0x7fffu;
}
INLINE i32 order16(u32 a) { return (i32)(int16_t)(a ^ (a >> 15 ? 0x7fffu : 0u)); }
INLINE u32 half_of_two(u32 old, u32 b, u32 infinity, int takes_least) {
  const int is_nan = (old & 0x7fffu) > infinity, other_is_nan = (b & 0x7fffu) > infinity;
  if (is_nan && other_is_nan) return 0x7fffu;
  if (is_nan || other_is_nan) return is_nan ? b : old;
  return takes_least == (order16(old) <= order16(b)) ? old : b;
}
INLINE u32 updated_half(int operation, u32 old, u32 b) {
  switch (operation) {
    case ATOMIC_ADD_F16: return f16_of(f16_as_f32(old) + f16_as_f32(b));
    case ATOMIC_MIN_F16: return half_of_two(old, b, 0x7c00u, 1);
    case ATOMIC_MAX_F16: return half_of_two(old, b, 0x7c00u, 0);
    case ATOMIC_ADD_BF16: return bf16_of(f32_of(old << 16) + f32_of(b << 16));
    case ATOMIC_MIN_BF16: return half_of_two(old, b, 0x7f80u, 1);
    default: return half_of_two(old, b, 0x7f80u, 0);
  }
}

// ---- all of them -------------------------------------------------------------------------------------------------

INLINE u64 updated(int operation, u64 old, u64 b, u64 other, int bytes, int is_shared) {
  const i64 x = bytes == 8 ? (i64)old : (i32)(u32)old, y = bytes == 8 ? (i64)b : (i32)(u32)b;
  switch (operation) {
    case ATOMIC_ADD: return old + b;
    case ATOMIC_MIN_UNSIGNED: return old < b ? old : b;
    case ATOMIC_MAX_UNSIGNED: return old > b ? old : b;
    case ATOMIC_MIN_SIGNED: return x < y ? old : b;
    case ATOMIC_MAX_SIGNED: return x > y ? old : b;
    case ATOMIC_AND: return old & b;
    case ATOMIC_OR: return old | b;
    case ATOMIC_XOR: return old ^ b;
    case ATOMIC_EXCHANGE: return b;
    case ATOMIC_SWAP: return old == b ? other : old;
    case ATOMIC_INCREMENT: return old >= b ? 0 : old + 1;
    case ATOMIC_DECREMENT: return old == 0 || old > b ? b : old - 1;
    case ATOMIC_ADD_FLOAT: return bytes == 8 ? added64(old, b, is_shared) : added32((u32)old, (u32)b, is_shared);
    default:
      if (bytes == 2) return updated_half(operation, (u32)old, (u32)b);
      return updated_half(operation, (u32)old & 0xffffu, (u32)b & 0xffffu) |
             updated_half(operation, (u32)old >> 16, (u32)b >> 16) << 16;
  }
}
INLINE u64 value_of(const char *frame, i32 field, int lane, int bytes) {
  if (bytes == 8) return ((const u64 *)(frame + field))[lane];
  const u32 value = ((const u32 *)(frame + field))[lane];
  return bytes == 2 ? value & 0xffffu : value;
}

// Puts a value in the place of the old one; 0 where another thread of the launch came before. The bytes are aligned.
INLINE int put_back(const Launch *c, void *at, u64 old, u64 now, int bytes, int is_shared) {
  if (is_shared || !c->cursor) {
    COPY(at, &now, bytes);
    return 1;
  }
  u16 half = (u16)old;
  u32 word = (u32)old;
  switch (bytes) {
    case 2: return __atomic_compare_exchange_n((u16 *)at, &half, (u16)now, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    case 4: return __atomic_compare_exchange_n((u32 *)at, &word, (u32)now, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    default: return __atomic_compare_exchange_n((u64 *)at, &old, now, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  }
}

// One lane's turn. Fields: address, offset, site, address is 64 bits wide, result, operand, second operand, operation,
// bytes that the address is a multiple of.
INLINE void take_turn(const Instruction *i, char *frame, Launch *c, u8 *at, int lane, int bytes, int is_shared) {
  u64 old = 0, now;
  const u64 b = value_of(frame, i->field[5], lane, bytes), other = value_of(frame, i->field[6], lane, bytes);
  do {
    COPY(&old, at, bytes);  // the low bytes: all processors here are little-endian
    now = updated(i->field[7], old, b, other, bytes, is_shared);
  } while (UNLIKELY(!put_back(c, at, old, now, bytes, is_shared)));
  if (__builtin_memcmp(&now, &old, (size_t)bytes)) c->changes++;
  if (bytes == 8)
    ((u64 *)(frame + i->field[4]))[lane] = old;
  else
    ((u32 *)(frame + i->field[4]))[lane] = (u32)old;
}

static void log_atomic(Launch *c, i64 begin, int bytes, int operation) {
  const Store *last = c->store_count ? &c->stores[c->store_count - 1] : 0;
  if (last && !last->each && last->begin == begin && last->bytes == bytes && last->first == operation) return;
  const Store store = {.begin = begin, .bytes = bytes, .first = operation};
  c->stores[c->store_count++] = store;
}
INLINE int is_misaligned(Warp *w, const Instruction *i, u64 at, int lane) {
  if (!(at & (u64)(i->field[8] - 1))) return 0;
  raise_fault(w, FAULT_MISALIGNED, i->field[2], 1u << lane, at);
  return 1;
}

INLINE void atomic_global(const Instruction *i, char *frame, Warp *w, int bytes) {
  Launch *c = w->launch;
  const int site = i->field[2];
  Range *hint = &c->hints[site];
  const U64 address = AT(U64, 0) + (u64)(i64)i->field[1];
  u64 at[LANES];
  COPY(at, &address, sizeof at);
  if (UNLIKELY(c->trace != 0)) trace_access(w, TRACE_ATOMIC, site, bytes, at);
  for (int l = 0; l < LANES; l++) {
    if (!(w->mask >> l & 1)) continue;
    if (!check_global(w, hint, at[l], (u64)bytes, bytes, site, 1u << l, UPDATES)) return;
    if (UNLIKELY(is_misaligned(w, i, at[l], l))) return;
    const i64 begin = (i64)(at[l] - c->base);
    save_old(c, begin, bytes);
    take_turn(i, frame, c, c->data + begin, l, bytes, 0);
    log_atomic(c, begin, bytes, i->field[7]);
  }
}
INLINE void atomic_shared(const Instruction *i, char *frame, Warp *w, int bytes) {
  const Shared s = shared_of(w->launch);
  const Marks marks = marks_of(w);
  const int site = i->field[2];
  i64 at[LANES];
  shared_offsets(at, frame + i->field[0], i->field[3], i->field[1]);
  if (UNLIKELY(w->launch->trace != 0)) trace_access(w, TRACE_SHARED_ATOMIC, site, bytes, (const u64 *)at);
  for (int l = 0; l < LANES; l++) {
    if (!(w->mask >> l & 1)) continue;
    if (!check_shared(w, at[l], bytes, site, 1u << l)) return;
    if (UNLIKELY(is_misaligned(w, i, (u64)at[l], l))) return;
    check_shared_written(w, s, at[l], bytes, site, 1u << l);
    take_turn(i, frame, w->launch, s.data + at[l], l, bytes, 1);
    note_atomic(w, marks, at[l], bytes, site, (u32)l);
  }
}

#define ATOMIC(name, bytes)                \
  HANDLER(atomic_global_##name) {          \
    atomic_global(i, frame, w, bytes);     \
    return done(i);                        \
  }                                        \
  HANDLER(atomic_shared_##name) {          \
    atomic_shared(i, frame, w, bytes);     \
    return done(i);                        \
  }
ATOMIC(16, 2)
ATOMIC(32, 4)
ATOMIC(64, 8)
