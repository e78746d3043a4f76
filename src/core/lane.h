// One lane: the names of `lanes.h` for one number at a time, in the common subset of C11 and C++17;
// for compilers without vector types, among them those of GPUs, and for sanitizers.
#ifndef LANE_H
#define LANE_H

#include "types.h"

enum { LANES = 1, CALLS = 1 };

typedef f32 Floats;
typedef u32 Words;
typedef f64 Doubles;

#define ROLLED
#define COUNT __attribute__((unused)) i64 count  // of lanes, which is always 1

// ---------------------------------------------------------------- values

INLINE Words bits_of(Floats value) { return bits_of_f32(value); }
INLINE Floats floats_of(Words bits) { return f32_of_bits(bits); }
INLINE Floats all_floats(f32 value) { return value; }
INLINE Words all_words(u32 value) { return value; }
INLINE Floats to_floats(Words integer) { return (f32)(i32)integer; }
INLINE Doubles to_doubles(Floats value) { return (f64)value; }
INLINE Floats from_doubles(Doubles value) { return (f32)value; }
INLINE Doubles all_doubles(f64 value) { return value; }

INLINE Words is_less(Floats a, Floats b) { return a < b ? ~0u : 0u; }
INLINE Words is_at_most(Floats a, Floats b) { return a <= b ? ~0u : 0u; }
INLINE Words is_equal(Floats a, Floats b) { return a == b ? ~0u : 0u; }
INLINE Words is_below(Words a, Words b) { return a < b ? ~0u : 0u; }
INLINE Words are_same(Words a, Words b) { return a == b ? ~0u : 0u; }
INLINE Words choose(Words mask, Words when_set, Words when_clear) {
  return (when_set & mask) | (when_clear & ~mask);
}

INLINE Words is_lower(Words a, Words b) { return a < b ? ~0u : 0u; }
INLINE Words is_less_double(Doubles a, Doubles b) { return a < b ? ~0u : 0u; }
INLINE Words is_at_most_double(Doubles a, Doubles b) { return a <= b ? ~0u : 0u; }
INLINE Doubles min_doubles(Doubles a, Doubles b) { return a < b ? a : b; }
INLINE Doubles magnitudes_of_doubles(Doubles value) { return __builtin_fabs(value); }

INLINE Words max_words(Words a, Words b) { return a < b ? b : a; }
INLINE Words min_words(Words a, Words b) { return a < b ? a : b; }

INLINE u32 largest_of(Words value) { return value; }
INLINE u32 least_of(Words value) { return value; }
INLINE u32 sum_of(Words value) { return value; }
INLINE u32 flags_of(Words mask) { return mask & 1; }

// ---------------------------------------------------------------- in memory

// Weights lie where their file put them, which need not be at a multiple of their width.
#define LOAD(type, from) \
  type found;            \
  __builtin_memcpy(&found, from, sizeof(found))
#define STORE(type, to, value)  \
  type stored = (type)value;    \
  __builtin_memcpy(to, &stored, sizeof(stored))

INLINE Floats load(const f32 *from, COUNT) { LOAD(f32, from); return found; }
INLINE Words load_words(const u32 *from, COUNT) { LOAD(u32, from); return found; }
INLINE Words load_16(const u16 *from, COUNT) { LOAD(u16, from); return found; }
INLINE Words load_8(const u8 *from, COUNT) { return *from; }
INLINE Words load_mask(const u8 *from, COUNT) { return (u32)(i32)(i8)*from; }
INLINE Doubles load_doubles(const f64 *from, COUNT) { LOAD(f64, from); return found; }
INLINE void store(f32 *to, Floats value, COUNT) { STORE(f32, to, value); }
INLINE void store_words(u32 *to, Words value, COUNT) { STORE(u32, to, value); }
INLINE void store_16(u16 *to, Words value, COUNT) { STORE(u16, to, value); }
INLINE void store_8(u8 *to, Words value, COUNT) { *to = (u8)value; }
INLINE void store_doubles(f64 *to, Doubles value, COUNT) { STORE(f64, to, value); }
INLINE Words places_from(u32 first) { return first; }
INLINE Words first_lanes(COUNT) { return ~0u; }

INLINE void store_bits(u64 *bits, i64 i, Words mask) {
  u64 others = i % 64 ? bits[i / 64] : 0;
  bits[i / 64] = others | (u64)(mask & 1) << i % 64;
}

INLINE Words load_fields(const u8 *from, i64 i, u32 bits, COUNT) {
  u32 field = (u32)from[i * bits / 8] >> i * bits % 8;
  return (u32)((i32)(field << (32 - bits)) >> (32 - bits));
}

INLINE u64 bits_at_most(const u8 *from, u8 limit) {
  u64 found = 0;
  for (int i = 0; i < 64; i++) found |= (u64)(from[i] <= limit) << i;
  return found;
}

// ---------------------------------------------------------------- calls of Philox

typedef u32 Calls;
typedef u64 Products;
INLINE Products multiply_calls(Calls word, u32 factor) { return (u64)word * factor; }
INLINE Calls lower_half(Products product) { return (u32)product; }
INLINE Calls upper_half(Products product) { return (u32)(product >> 32); }
INLINE Calls all_calls(u32 word) { return word; }
INLINE Products numbers_from(u64 first) { return first; }
INLINE Products load_numbers(const u64 *from) { return *from; }
INLINE void store_calls(u8 *to, Calls word) { __builtin_memcpy(to, &word, 4); }
INLINE u64 compare_calls(u8 *below, u8 *equal, Calls word, u8 limit) {
  u64 some = 0;
  for (int i = 0; i < 4; i++) {
    u8 byte = (u8)(word >> 8 * i);
    below[i] = byte < limit ? 255 : 0;
    equal[i] = byte == limit ? 255 : 0;
    some |= equal[i];
  }
  return some;
}

// ---------------------------------------------------------------- digests

#define WIDE
INLINE void add_stripes(u64 *sums, const u8 *data, const u8 *secret, int stripes) {
  for (int i = 0; i < 8 * stripes; i++) {
    u64 value, key;
    __builtin_memcpy(&value, data + 8 * i, 8);
    __builtin_memcpy(&key, secret + 8 * (i / 8 + i % 8), 8);
    key ^= value;
    sums[(i % 8) ^ 1] += value;
    sums[i % 8] += (key & 0xFFFFFFFFu) * (key >> 32);
  }
}

#endif
