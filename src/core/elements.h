// What is computed of single elements: storage types, masks, deltas, votes. `reference.py` says in
// the words of NumPy what each of them is.
#ifndef ELEMENTS_H
#define ELEMENTS_H

#define MAGNITUDE 0x7FFFFFFFu
#define INFINITE 0x7F800000u
#define QUIET_NAN 0x7FC00000u

INLINE Words magnitude_of(Floats values) { return bits_of(values) & MAGNITUDE; }
INLINE Words is_nan(Floats values) { return ~is_equal(values, values); }
INLINE Floats masked(Floats values, Words mask) { return floats_of(bits_of(values) & mask); }
INLINE Floats choose_floats(Words mask, Floats when_set, Floats when_clear) {
  return floats_of(choose(mask, bits_of(when_set), bits_of(when_clear)));
}
// The second where either is NaN.
INLINE Floats min_floats(Floats a, Floats b) { return choose_floats(is_less(a, b), a, b); }
INLINE Floats magnitudes(Floats values) { return floats_of(magnitude_of(values)); }

// ---------------------------------------------------------------- storage types

// Two to a power that float32 has as a normal number.
INLINE f32 power_of_two(int exponent) { return f32_of_bits((u32)(exponent + 127) << 23); }

// Widen floats of `width` bits; codes from `first_special` up become `special`.
INLINE Floats widen(Words code, u32 width, u32 mantissa, u32 bias, u32 first_special, u32 special) {
  Words sign = code >> (width - 1) << 31, magnitude = code & ((1u << (width - 1)) - 1);
  u32 shift = 23 - mantissa;
  Words normal = (magnitude << shift) + ((127 - bias) << 23);
  Words subnormal = bits_of(to_floats(magnitude) * power_of_two(1 - (int)bias - (int)mantissa));
  Words result = choose(is_below(magnitude, all_words(1u << mantissa)), subnormal, normal);
  Words is_special = ~is_below(magnitude, all_words(first_special));
  result = choose(is_special, (magnitude << shift) | special, result);
  return floats_of(sign | (result & MAGNITUDE));
}

// Round to nearest even in floats of `width` bits; any NaN becomes `nan_code`.
INLINE Words shrink(Floats values, u32 width, u32 mantissa, u32 bias, u32 overflow_bits,
                    u32 overflow_code, u32 nan_code) {
  Words bits = bits_of(values), sign = bits >> 31 << (width - 1), magnitude = bits & MAGNITUDE;
  u32 shift = 23 - mantissa;
  Words rebased = magnitude - ((127 - bias) << 23), odd = (rebased >> shift) & 1u;
  Words normal = (rebased + ((1u << (22 - mantissa)) - 1) + odd) >> shift;
  f32 unit = power_of_two(24 - (int)bias - (int)mantissa);  // its last bit is the smallest subnormal
  Words subnormal = bits_of(floats_of(magnitude) + unit) - bits_of(all_floats(unit));
  Words result = choose(is_below(magnitude, all_words((128 - bias) << 23)), subnormal, normal);
  result = choose(is_below(magnitude, all_words(overflow_bits)), result, all_words(overflow_code));
  return choose(is_below(all_words(INFINITE), magnitude), all_words(nan_code), sign | result);
}

INLINE Words round_bf16(Words bits) { return (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16; }

// The values of codes of a kind of 16 or 8 bits.
INLINE Floats decoded(enum Kind kind, Words code) {
  switch (kind) {
    case F16: return widen(code, 16, 10, 15, 0x7C00, INFINITE);
    case BF16: return floats_of(code << 16);
    case F8_E4M3: return widen(code, 8, 3, 7, 0x7F, QUIET_NAN);
    default: return widen(code, 8, 2, 15, 0x7C, INFINITE);
  }
}

// Elements from the place `i` on of an array of a kind, as float32.
INLINE Floats load_kind(enum Kind kind, const void *raw, i64 i, i64 count) {
  switch (width_of(kind)) {
    case 8: return from_doubles(load_doubles((const f64 *)raw + i, count));
    case 4: return load((const f32 *)raw + i, count);
    case 2: return decoded(kind, load_16((const u16 *)raw + i, count));
    default: return decoded(kind, load_8((const u8 *)raw + i, count));
  }
}

INLINE Floats quieted(Floats values) {
  return choose_floats(is_nan(values), floats_of(all_words(QUIET_NAN)), values);
}

// The codes of a kind of 16 or 8 bits that values round to.
INLINE Words encoded(enum Kind kind, Floats values) {
  switch (kind) {
    case F16: return shrink(values, 16, 10, 15, 0x477FF000, 0x7C00, 0x7E00);
    case BF16: return round_bf16(bits_of(quieted(values))) & 0xFFFFu;
    case F8_E4M3: return shrink(values, 8, 3, 7, 0x43E80001, 0x7F, 0x7F);
    default: return shrink(values, 8, 2, 15, 0x47700000, 0x7C, 0x7E);
  }
}

// Round to a kind; every NaN becomes the positive quiet one.
INLINE void store_kind(enum Kind kind, void *raw, i64 i, Floats values, i64 count) {
  switch (width_of(kind)) {
    case 8: store_doubles((f64 *)raw + i, to_doubles(quieted(values)), count); break;
    case 4: store((f32 *)raw + i, quieted(values), count); break;
    case 2: store_16((u16 *)raw + i, encoded(kind, values), count); break;
    default: store_8((u8 *)raw + i, encoded(kind, values), count);
  }
}

// Do the same where nothing is NaN.
INLINE void store_number(enum Kind kind, void *raw, i64 i, Floats values, i64 count) {
  if (kind == BF16) store_16((u16 *)raw + i, round_bf16(bits_of(values)), count);
  else store_kind(kind, raw, i, values, count);
}

// ---------------------------------------------------------------- the mask

enum { GROUP = 128, CALLS_PER_GROUP = 8, ROUNDS = 7, TIE_BREAK = 1 };

typedef struct {
  Calls words[4];
} Philox;

// Calls of Philox4x32 with seven rounds; the third word of their counters is the domain.
INLINE Philox philox(Products number, u32 domain, u32 key0, u32 key1) {
  Calls c0 = lower_half(number), c1 = upper_half(number), c2 = all_calls(domain), c3 = all_calls(0);
  for (int round = 0; round < ROUNDS; round++) {
    Products first = multiply_calls(c0, 0xD2511F53u), second = multiply_calls(c2, 0xCD9E8D57u);
    c0 = upper_half(second) ^ c1 ^ all_calls(key0);
    c2 = upper_half(first) ^ c3 ^ all_calls(key1);
    c1 = lower_half(second);
    c3 = lower_half(first);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  Philox found = {{c0, c1, c2, c3}};
  return found;
}

// The bytes of the elements of one group, from element number `start` on.
INLINE void draw_group(u8 *bytes, u64 start, u32 key0, u32 key1) {
  for (int call = 0; call < CALLS_PER_GROUP; call += CALLS) {
    Philox found = philox(numbers_from(start / GROUP * CALLS_PER_GROUP + (u64)call), 0, key0, key1);
    for (int word = 0; word < 4; word++) store_calls(bytes + 32 * word + 4 * call, found.words[word]);
  }
}

// Set the lanes of the elements of one group that are below a limit, and mark those that are equal to
// it; return something else than 0 if any is.
INLINE u64 compare_group(u8 *lanes, u8 *ties, u64 start, u32 key0, u32 key1, u8 limit) {
  u64 some = 0;
  for (int call = 0; call < CALLS_PER_GROUP; call += CALLS) {
    Philox found = philox(numbers_from(start / GROUP * CALLS_PER_GROUP + (u64)call), 0, key0, key1);
    for (int word = 0; word < 4; word++) {
      int at = 32 * word + 4 * call;
      some |= compare_calls(lanes + at, ties + at, found.words[word], limit);
    }
  }
  return some;
}

// The words that break the ties of CALLS_PER_GROUP elements.
INLINE void break_ties(u32 *words, const u64 *elements, u32 key0, u32 key1) {
  for (int call = 0; call < CALLS_PER_GROUP; call += CALLS) {
    Philox found = philox(load_numbers(elements + call), TIE_BREAK, key0, key1);
    store_calls((u8 *)(words + call), found.words[0]);
  }
}

// ---------------------------------------------------------------- models of a merge

typedef struct {
  i64 least, end, most, begin;
} Band;  // as `Band` in Python

typedef struct {
  const void *tuned;
  i64 key0, key1, high, low;  // `high` is 256 where there is no mask
  Band band;                  // `least` is -1 where there is none
  f64 weight, share;
} Operand;

// ---------------------------------------------------------------- votes

typedef struct {
  Floats above, below, above_share, below_share;
} Sides;  // of an election: the terms of both signs, and what to divide them by

// Cast weighted values: a NaN goes into both sums.
INLINE Sides cast(Sides sides, Floats value, f32 share) {
  Words above = is_less(all_floats(0), value), below = is_less(value, all_floats(0));
  sides.above += masked(value, ~below);
  sides.below += masked(value, ~above);
  sides.above_share += masked(all_floats(share), above);
  sides.below_share += masked(all_floats(share), below);
  return sides;
}

// The mean of the side that the balance is on; its sum where there are no shares.
INLINE Floats outcome(Sides sides, Floats balance) {
  Words above = is_less(all_floats(0), balance);
  Floats side = choose_floats(above, sides.above, sides.below);
  Floats share = choose_floats(above, sides.above_share, sides.below_share);
  Floats mean = side / choose_floats(is_equal(share, all_floats(0)), all_floats(1), share);
  Words missing = is_nan(sides.above + sides.below);
  Floats elected = masked(mean, ~is_equal(balance, all_floats(0)));
  return choose_floats(missing, floats_of(all_words(QUIET_NAN)), elected);
}

#endif
