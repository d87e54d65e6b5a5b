// Whether this processor has what the library was compiled for; the one function that must run on any of its family.
#include "engine.h"

#ifndef ENGINE_SOURCES
#define ENGINE_SOURCES ""
#endif
// Digest of the sources that the library was made of.
const char engine_sources[] = ENGINE_SOURCES;

#if defined(__x86_64__)
#include <cpuid.h>
#define BIT(word, number) ((word) >> (number) & 1u)

// x86-64-v3 as far as the compiler uses it: AVX2, FMA, F16C, BMI, LZCNT, and an operating system that keeps YMM
// registers.
__attribute__((target("no-avx,no-bmi,no-bmi2,no-lzcnt,no-popcnt"))) i32 engine_runs_here(void) {
  u32 a, b, c, d, low, high;
  if (!__get_cpuid_count(1, 0, &a, &b, &c, &d)) return 0;
  if (!(BIT(c, 12) && BIT(c, 23) && BIT(c, 27) && BIT(c, 28) && BIT(c, 29))) return 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & 6u) != 6u) return 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(BIT(b, 3) && BIT(b, 5) && BIT(b, 8))) return 0;
  return __get_cpuid_count(0x80000001u, 0, &a, &b, &c, &d) && BIT(c, 5);
}
#else
i32 engine_runs_here(void) { return 1; }
#endif
