// Which levels of its processors this machine has code for; and what C needs to be there.
#include "types.h"
#ifndef ONE_LANE  // that is tested where there is a library of C
#include "memory.h"
#endif

// The digest of the sources, which `hatch_build.py` computes.
#define AS_TEXT_(word) #word
#define AS_TEXT(word) AS_TEXT_(word)
EXTERN VISIBLE const char *dare_sources(void) { return AS_TEXT(DIGEST); }

#if defined(__x86_64__) && !defined(ONE_LANE)
INLINE void ask(u32 leaf, u32 *a, u32 *b, u32 *c, u32 *d) {
  __asm__ volatile("cpuid" : "=a"(*a), "=b"(*b), "=c"(*c), "=d"(*d) : "a"(leaf), "c"(0));
}

EXTERN VISIBLE const char *dare_levels(void) {
  u32 a, b, c, d, leaf7, extended, enabled = 0, high;
  ask(1, &a, &b, &c, &d);
  if (c >> 27 & 1) __asm__ volatile("xgetbv" : "=a"(enabled), "=d"(high) : "c"(0));
  u32 has_fma = c >> 12 & 1, has_f16c = c >> 29 & 1, has_movbe = c >> 22 & 1;
  ask(7, &a, &leaf7, &extended, &d);
  ask(0x80000001u, &a, &b, &c, &d);
  u32 has_lzcnt = c >> 5 & 1;
  u32 v3 = 1u << 3 | 1u << 5 | 1u << 8, v4 = 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31;
  int is_v3 = has_fma && has_f16c && has_movbe && has_lzcnt && (leaf7 & v3) == v3 && (enabled & 6) == 6;
  int is_v4 = is_v3 && (leaf7 & v4) == v4 && (enabled & 0xE6) == 0xE6;
  return is_v4 ? "v2 v3 v4" : is_v3 ? "v2 v3" : "v2";
}
#else
EXTERN VISIBLE const char *dare_levels(void) { return "any"; }
#endif
