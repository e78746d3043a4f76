// Lanes: sixteen numbers at a time, in the vector types of clang, which splits them to the width of
// the machine. `lane.h` defines the same names for one number at a time. What computes is written
// over these names, once, and has the same bits with either.
#ifndef LANES_H
#define LANES_H

#include "types.h"

enum { LANES = 16, CALLS = 8 };  // elements, and calls of Philox, side by side

typedef f32 Floats __attribute__((vector_size(64)));
typedef u32 Words __attribute__((vector_size(64)));
typedef i32 Integers __attribute__((vector_size(64)));
typedef f64 Doubles __attribute__((vector_size(128)));
typedef i64 LongIntegers __attribute__((vector_size(128)));
typedef u8 Bytes16 __attribute__((vector_size(16)));
typedef i8 SignedBytes16 __attribute__((vector_size(16)));
typedef u16 Halves __attribute__((vector_size(32)));

// Before a loop of few steps: unrolled, the compiler would order it chain by chain, and units wait.
#define ROLLED _Pragma("clang loop unroll(disable)")

// ---------------------------------------------------------------- values

INLINE Words bits_of(Floats values) { return (Words)values; }
INLINE Floats floats_of(Words bits) { return (Floats)bits; }
INLINE Floats all_floats(f32 value) { return (Floats){} + value; }
INLINE Words all_words(u32 value) { return (Words){} + value; }
INLINE Floats to_floats(Words integers) { return __builtin_convertvector((Integers)integers, Floats); }
INLINE Doubles to_doubles(Floats values) { return __builtin_convertvector(values, Doubles); }
INLINE Floats from_doubles(Doubles values) { return __builtin_convertvector(values, Floats); }
INLINE Doubles all_doubles(f64 value) { return (Doubles){} + value; }

// Comparisons give all ones where they hold, and zero elsewhere.
INLINE Words is_less(Floats a, Floats b) { return (Words)(a < b); }
INLINE Words is_at_most(Floats a, Floats b) { return (Words)(a <= b); }
INLINE Words is_equal(Floats a, Floats b) { return (Words)(a == b); }
INLINE Words is_below(Words a, Words b) { return (Words)(a < b); }
INLINE Words are_same(Words a, Words b) { return (Words)(a == b); }
INLINE Words choose(Words mask, Words when_set, Words when_clear) {
  return (when_set & mask) | (when_clear & ~mask);
}

// Both are below 2³¹: processors compare numbers with a sign faster.
INLINE Words is_lower(Words a, Words b) { return (Words)((Integers)a < (Integers)b); }
INLINE Words narrowed(LongIntegers mask) { return (Words)__builtin_convertvector(mask, Integers); }
INLINE Words is_less_double(Doubles a, Doubles b) { return narrowed((LongIntegers)(a < b)); }
INLINE Words is_at_most_double(Doubles a, Doubles b) { return narrowed((LongIntegers)(a <= b)); }
// The second where either is NaN.
INLINE Doubles min_doubles(Doubles a, Doubles b) {
  LongIntegers mask = (LongIntegers)(a < b);
  return (Doubles)(((LongIntegers)a & mask) | ((LongIntegers)b & ~mask));
}

INLINE Doubles magnitudes_of_doubles(Doubles values) {
  return (Doubles)((LongIntegers)values & 0x7FFFFFFFFFFFFFFFll);
}

INLINE Words max_words(Words a, Words b) { return __builtin_elementwise_max(a, b); }
INLINE Words min_words(Words a, Words b) { return __builtin_elementwise_min(a, b); }

INLINE u32 largest_of(Words values) { return __builtin_reduce_max(values); }
INLINE u32 least_of(Words values) { return __builtin_reduce_min(values); }
INLINE u32 sum_of(Words values) { return __builtin_reduce_add(values); }
// The lanes of a mask as bits, the first one in the lowest.
INLINE u32 flags_of(Words mask) {
  typedef _Bool Flags __attribute__((ext_vector_type(16)));
  Flags flags = __builtin_convertvector((Integers)mask < 0, Flags);
  u16 found;
  __builtin_memcpy(&found, &flags, 2);
  return found;
}

// ---------------------------------------------------------------- in memory

// `count` is LANES, or less at the end of an array; what is beyond is read as zero, and not written.
#define LOAD(type, from, count)                                        \
  type found = {};                                                     \
  __builtin_memcpy(&found, from, (count) < LANES ? sizeof(found) / LANES * (u64)(count) : sizeof(found))
#define STORE(to, value, count)                                        \
  __builtin_memcpy(to, &(value), (count) < LANES ? sizeof(value) / LANES * (u64)(count) : sizeof(value))

INLINE Floats load(const f32 *from, i64 count) { LOAD(Floats, from, count); return found; }
INLINE Words load_words(const u32 *from, i64 count) { LOAD(Words, from, count); return found; }
INLINE Words load_16(const u16 *from, i64 count) {
  LOAD(Halves, from, count);
  return __builtin_convertvector(found, Words);
}
INLINE Words load_8(const u8 *from, i64 count) {
  LOAD(Bytes16, from, count);
  return __builtin_convertvector(found, Words);
}
// All ones for each lane of a mask that is 255.
INLINE Words load_mask(const u8 *from, i64 count) {
  LOAD(SignedBytes16, from, count);
  return (Words)__builtin_convertvector(found, Integers);
}
INLINE Doubles load_doubles(const f64 *from, i64 count) { LOAD(Doubles, from, count); return found; }

INLINE void store(f32 *to, Floats values, i64 count) { STORE(to, values, count); }
INLINE void store_words(u32 *to, Words values, i64 count) { STORE(to, values, count); }
INLINE void store_16(u16 *to, Words values, i64 count) {
  Halves halves = __builtin_convertvector(values, Halves);
  STORE(to, halves, count);
}
INLINE void store_8(u8 *to, Words values, i64 count) {
  Bytes16 bytes = __builtin_convertvector(values, Bytes16);
  STORE(to, bytes, count);
}
INLINE void store_doubles(f64 *to, Doubles values, i64 count) { STORE(to, values, count); }

// Numbers that follow each other; and all ones in the first `count` lanes.
INLINE Words places_from(u32 first) {
  return (Words){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + first;
}
INLINE Words first_lanes(i64 count) { return is_below(places_from(0), all_words((u32)count)); }

// Store a mask of lanes as bits, from the bit `i` on, a multiple of LANES.
INLINE void store_bits(u64 *bits, i64 i, Words mask) {
  u16 flags = (u16)flags_of(mask);
  __builtin_memcpy((u8 *)bits + i / 8, &flags, 2);
}

// Signed numbers of 4, 2 or 1 bits from number `i` on, the first one in a byte's lowest bits.
INLINE Words load_fields(const u8 *from, i64 i, u32 bits, i64 count) {
  u64 some = 0;
  __builtin_memcpy(&some, from + i * bits / 8, (u64)(count * bits + 7) / 8);
  Words place = bits * places_from(0);
  Words lower = is_below(place, all_words(32));
  Words fields = choose(lower, all_words((u32)some), all_words((u32)(some >> 32)));
  return (Words)((Integers)(fields << (32 - bits - (place & 31u))) >> (32 - bits));
}

// The 64 bytes at an address as bits, the first one in the lowest: set where one is at most a limit.
INLINE u64 bits_at_most(const u8 *from, u8 limit) {
  typedef u8 Bytes64 __attribute__((vector_size(64)));
  u64 found = 0;
  Bytes64 bytes;
  __builtin_memcpy(&bytes, from, 64);
  bytes = (Bytes64)(bytes <= limit);
#ifdef __wasm__  // it has an instruction for this, which clang does not find
  SignedBytes16 parts[4];
  __builtin_memcpy(parts, &bytes, 64);
  for (int i = 0; i < 4; i++) found |= (u64)__builtin_wasm_bitmask_i8x16(parts[i]) << 16 * i;
#else
  typedef _Bool Flags __attribute__((ext_vector_type(64)));
  Flags flags = __builtin_convertvector(bytes, Flags);
  __builtin_memcpy(&found, &flags, 8);
#endif
  return found;
}

// ---------------------------------------------------------------- calls of Philox, side by side

typedef u64 Products __attribute__((vector_size(64)));
#ifdef __x86_64__
// Each word lies in 64 bits, and its upper half is whatever it is: the processor multiplies the
// lower halves alone, and to pack words would take longer than all the rest.
typedef u64 Calls __attribute__((vector_size(64)));
INLINE Products multiply_calls(Calls words, u32 factor) { return (words & 0xFFFFFFFFu) * (u64)factor; }
INLINE Calls lower_half(Products products) { return products; }
INLINE Calls upper_half(Products products) { return products >> 32; }
#else
typedef u32 Calls __attribute__((vector_size(32)));
INLINE Products multiply_calls(Calls words, u32 factor) {
  return __builtin_convertvector(words, Products) * (u64)factor;
}
INLINE Calls lower_half(Products products) { return __builtin_convertvector(products, Calls); }
INLINE Calls upper_half(Products products) { return __builtin_convertvector(products >> 32, Calls); }
#endif
INLINE Calls all_calls(u32 word) { return (Calls){} + word; }
INLINE Products numbers_from(u64 first) { return (Products){0, 1, 2, 3, 4, 5, 6, 7} + first; }
INLINE Products load_numbers(const u64 *from) {
  Products found;
  __builtin_memcpy(&found, from, sizeof(found));
  return found;
}
typedef u32 Packed __attribute__((vector_size(32)));
typedef u8 Bytes32 __attribute__((vector_size(32)));
typedef u64 Quarters __attribute__((vector_size(32)));
INLINE void store_calls(u8 *to, Calls words) {
  Packed packed = __builtin_convertvector(words, Packed);
  __builtin_memcpy(to, &packed, sizeof(packed));
}
// Store 255 for each byte of the words that is below a limit, and for each that is equal to it;
// return something else than 0 if any is equal.
INLINE u64 compare_calls(u8 *below, u8 *equal, Calls words, u8 limit) {
  Bytes32 bytes = (Bytes32)__builtin_convertvector(words, Packed);
  Bytes32 is_below = (Bytes32)(bytes < limit), is_equal = (Bytes32)(bytes == limit);
  __builtin_memcpy(below, &is_below, sizeof(is_below));
  __builtin_memcpy(equal, &is_equal, sizeof(is_equal));
  return __builtin_reduce_or((Quarters)is_equal);
}

// ---------------------------------------------------------------- digests

// For functions that gain by registers of 64 bytes, where there are some.
#define WIDE __attribute__((min_vector_width(512)))

// Mix stripes of 64 bytes with a secret, of which each begins 8 bytes later, and add them to sums.
INLINE void add_stripes(u64 *sums, const u8 *data, const u8 *secret, int stripes) {
  typedef u64 Stripe __attribute__((vector_size(64)));
  Stripe total, values, keys;
  __builtin_memcpy(&total, sums, 64);
#pragma unroll
  for (int i = 0; i < stripes; i++) {
    __builtin_memcpy(&values, data + 64 * i, 64);
    __builtin_memcpy(&keys, secret + 8 * i, 64);
    keys ^= values;
    total += __builtin_shufflevector(values, values, 1, 0, 3, 2, 5, 4, 7, 6);
    total += (keys & 0xFFFFFFFFu) * (keys >> 32);
  }
  __builtin_memcpy(sums, &total, 64);
}

#endif
