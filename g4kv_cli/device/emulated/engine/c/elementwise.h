// How elementwise handlers are stated: result type, operand types, and the result as an expression of a, b, c, d.
#pragma once
#include "engine.h"

#define UNARY(name, R, A, expression) \
  HANDLER(name) {                     \
    (void)w;                          \
    A a = AT(A, 1);                   \
    AT(R, 0) = (expression);          \
    return done(i);                   \
  }
#define BINARY(name, R, A, B, expression) \
  HANDLER(name) {                         \
    (void)w;                              \
    A a = AT(A, 1);                       \
    B b = AT(B, 2);                       \
    AT(R, 0) = (expression);              \
    return done(i);                       \
  }
#define TERNARY(name, R, A, B, C, expression) \
  HANDLER(name) {                             \
    (void)w;                                  \
    A a = AT(A, 1);                           \
    B b = AT(B, 2);                           \
    C c = AT(C, 3);                           \
    AT(R, 0) = (expression);                  \
    return done(i);                           \
  }
#define QUATERNARY(name, R, A, B, C, D, expression) \
  HANDLER(name) {                                   \
    (void)w;                                        \
    A a = AT(A, 1);                                 \
    B b = AT(B, 2);                                 \
    C c = AT(C, 3);                                 \
    D d = AT(D, 4);                                 \
    AT(R, 0) = (expression);                        \
    return done(i);                                 \
  }

// Names and conditions of floats x and y. A comparison with NaN is false; those that end in u are true then.
#define FLOAT_COMPARISONS(COMPARE)   \
  COMPARE(eq, x == y)                \
  COMPARE(ne, (x < y) | (x > y))     \
  COMPARE(lt, x < y)                 \
  COMPARE(le, x <= y)                \
  COMPARE(gt, x > y)                 \
  COMPARE(ge, x >= y)                \
  COMPARE(equ, ~((x < y) | (x > y))) \
  COMPARE(neu, x != y)               \
  COMPARE(ltu, ~(x >= y))            \
  COMPARE(leu, ~(x > y))             \
  COMPARE(gtu, ~(x <= y))            \
  COMPARE(geu, ~(x < y))             \
  COMPARE(num, (x == x) & (y == y))  \
  COMPARE(nan, (x != x) | (y != y))
