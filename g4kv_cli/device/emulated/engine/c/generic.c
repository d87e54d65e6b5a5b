// Accesses through generic addresses: those of a warp lie in one state space, or the interpreter looks at them.
#include "memory.h"

enum Space { SPACE_PARAMETERS, SPACE_LOCAL, SPACE_SHARED, SPACE_GLOBAL };
// Where the windows begin, as in state/memory.py; whatever lies below them all is looked for in global memory.
static const u64 windows[] = {0x7c0000000000u, 0x7d0000000000u, 0x7e0000000000u, 0x7f0000000000u};

INLINE int space_of(u64 address) {
  for (int space = SPACE_GLOBAL; space > SPACE_PARAMETERS; space--)
    if (address >= windows[space]) return space;
  return address >= windows[SPACE_PARAMETERS] ? SPACE_PARAMETERS : SPACE_GLOBAL;
}

// Where each lane's local memory begins among generic addresses (LaneSet.local_window).
#define LOCAL_SHIFT 20
INLINE U64 local_window(const Warp *w) {
  U64 begin;
  const u64 first = (u64)w->launch->current * (u64)w->launch->threads + (u64)(LANES * w->number);
  for (u64 l = 0; l < LANES; l++)
    begin[l] = windows[SPACE_LOCAL] + (((first + l) & (((u64)1 << LOCAL_SHIFT) - 1)) << LOCAL_SHIFT);
  return begin;
}
// Fields: result, address.
HANDLER(to_local_window) {
  AT(U64, 0) = AT(U64, 1) + local_window(w);
  return done(i);
}
HANDLER(from_local_window) {
  AT(U64, 0) = AT(U64, 1) - local_window(w);
  return done(i);
}

// Finds the space that the next access is to, and its addresses there. Fields: address in the space, address, offset,
// site.
HANDLER(generic_space) {
  u64 at[LANES];
  COPY(at, &AT(U64, 1), sizeof at);
  const u64 offset = (u64)(i64)i->field[2];
  const int space = space_of(at[first_lane(w->mask)] + offset);
  Mask elsewhere = 0;
  for (int l = 0; l < LANES; l++) elsewhere |= (Mask)(space_of(at[l] + offset) != space) << l;
  elsewhere &= w->mask;
  w->space = space;
  if (UNLIKELY(elsewhere || space == SPACE_PARAMETERS)) {
    raise_fault(w, FAULT_SEVERAL_SPACES, i->field[3], w->mask, at[0]);
    w->space = SPACE_GLOBAL;
  }
  if (w->space == SPACE_LOCAL)
    AT(U64, 0) = AT(U64, 1) + offset - local_window(w);  // another thread's is out of bounds
  else
    AT(U64, 0) = AT(U64, 1) + offset - (w->space == SPACE_GLOBAL ? 0 : windows[w->space]);
  return done(i);
}

// isspacep. Fields: result, generic address, the space, begins and ends of up to two constants, which are not of global
// memory, and how many there are.
enum { ASKS_GLOBAL = SPACE_GLOBAL, ASKS_CONSTANT, ASKS_CLUSTER };
#define RANKS_ABOVE 24
HANDLER(is_in_space) {
  u64 at[LANES];
  COPY(at, &AT(U64, 1), sizeof at);
  const int asked = i->field[2];
  Mask found = 0;
  for (int l = 0; l < LANES; l++) {
    const int space = space_of(at[l]);
    int is_constant = 0;
    for (int k = 0; k < i->field[7]; k++)
      is_constant |= at[l] >= (&AT(u64, 3 + 2 * k))[l] && at[l] < (&AT(u64, 4 + 2 * k))[l];
    const u64 rank = (at[l] - windows[SPACE_SHARED]) >> RANKS_ABOVE;
    const int is_own = !rank || rank == (u64)w->rank + 1;
    const int holds = asked == ASKS_CONSTANT  ? is_constant
                      : asked == ASKS_CLUSTER ? space == SPACE_SHARED
                      : asked == SPACE_SHARED ? space == SPACE_SHARED && is_own
                      : asked == ASKS_GLOBAL  ? space == SPACE_GLOBAL && !is_constant
                                              : space == asked;
    found |= (Mask)holds << l;
  }
  AT(Mask, 0) = found;
  return done(i);
}

#define IN_ITS_SPACE(access, name)                                                               \
  const Instruction *op_##access##_global_##name(const Instruction *, char *, Warp *);           \
  const Instruction *op_##access##_shared_##name(const Instruction *, char *, Warp *);           \
  const Instruction *op_##access##_local_##name(const Instruction *, char *, Warp *);            \
  HANDLER(access##_generic_##name) {                                                             \
    if (w->space == SPACE_GLOBAL) return op_##access##_global_##name(i, frame, w);               \
    if (w->space == SPACE_SHARED) return op_##access##_shared_##name(i, frame, w);               \
    return op_##access##_local_##name(i, frame, w);                                              \
  }
#define GENERIC(name, bytes, count) \
  IN_ITS_SPACE(load, name)          \
  IN_ITS_SPACE(store, name)
#define SIGNED_GENERIC(name, bytes, count) IN_ITS_SPACE(load, signed_##name)
ACCESS_FORMS(GENERIC)
SIGNED_ACCESS_FORMS(SIGNED_GENERIC)

#define GENERIC_ATOMIC(name)                                                               \
  const Instruction *op_atomic_global_##name(const Instruction *, char *, Warp *);         \
  const Instruction *op_atomic_shared_##name(const Instruction *, char *, Warp *);         \
  HANDLER(atomic_generic_##name) {                                                         \
    if (w->space == SPACE_SHARED) return op_atomic_shared_##name(i, frame, w);             \
    if (w->space == SPACE_GLOBAL) return op_atomic_global_##name(i, frame, w);             \
    raise_fault(w, FAULT_SEVERAL_SPACES, i->field[2], w->mask, 0);                         \
    return done(i);                                                                        \
  }
GENERIC_ATOMIC(16)
GENERIC_ATOMIC(32)
GENERIC_ATOMIC(64)
