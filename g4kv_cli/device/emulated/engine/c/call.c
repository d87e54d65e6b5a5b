// Opcodes without a handler: the table's own function, in Python, for the lanes of one warp.
#include "engine.h"

// Operands and results pass through `called`, a place of 256 bytes for each field. Fields: results 0 and 1, operands 2
// to 6, number of the function, site, then the bytes of each of the seven, 0 for what there is not.
enum { CALL_RESULTS = 2, CALL_PLACES = 7, CALL_BYTES = 9, PLACE_BYTES = 256 };
// How many handlers run in the time of a call, so that a run pauses as often with calls as without.
#define HANDLERS_A_CALL 400

// A failed assert, or a call of no function: the interpreter says which. Field: site.
HANDLER(fail) {
  (void)frame;
  raise_fault(w, FAULT_TRAP, i->field[0], w->mask, 0);
  return done(i);
}

HANDLER(call) {
  Launch *c = w->launch;
  if (UNLIKELY(c->stop)) return done(i);  // the lanes may hold anything
  c->spent += HANDLERS_A_CALL;
  for (int k = CALL_RESULTS; k < CALL_PLACES; k++)
    __builtin_memcpy(c->called + PLACE_BYTES * k, frame + i->field[k], (size_t)i->field[CALL_BYTES + k]);
  if (UNLIKELY(c->call(i->field[CALL_PLACES], w->mask))) {
    raise_fault(w, FAULT_UNKNOWN_RESULT, i->field[CALL_PLACES + 1], w->mask, 0);
    return done(i);
  }
  for (int k = 0; k < CALL_RESULTS; k++)
    __builtin_memcpy(frame + i->field[k], c->called + PLACE_BYTES * k, (size_t)i->field[CALL_BYTES + k]);
  return done(i);
}
