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
