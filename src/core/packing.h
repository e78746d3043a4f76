// What is kept, packed; values in few bits; and into a live model.

typedef u16 Places[TILE + PLACES_AT_ONCE];  // in a tile

// Write the places of the lanes of a tile that are set; return how many there are.
static i64 find_lanes(const u8 *lanes, i64 size, u16 *places) {
  i64 found = 0, first = 0;
  for (; first + 64 <= size; first += 64) {
    found += list_bits(bits_of_bytes(lanes + first), first, places + found);
  }
  u64 last = 0;
  for (i64 i = first; i < size; i++) last |= (u64)(lanes[i] != 0) << (i - first);
  return last ? found + list_bits(last, first, places + found) : found;
}

enum Way { GATHER, SCATTER };  // into packed elements, and out of them

// Copy elements of a width; those of files need not lie at a multiple of it.
INLINE void copy_width(u64 width, enum Way way, u8 *whole, const u16 *places, i64 count, u8 *packed) {
  for (u64 i = 0; i < (u64)count; i++) {
    if (way == GATHER) __builtin_memcpy(packed + width * i, whole + width * places[i], width);
    else __builtin_memcpy(whole + width * places[i], packed + width * i, width);
  }
}

INLINE void copy_places(i64 width, enum Way way, u8 *whole, const u16 *places, i64 count, u8 *packed) {
  switch (width) {  // so that each one is known to the compiler
    case 8: copy_width(8, way, whole, places, count, packed); break;
    case 4: copy_width(4, way, whole, places, count, packed); break;
    case 2: copy_width(2, way, whole, places, count, packed); break;
    default: copy_width(1, way, whole, places, count, packed);
  }
}

INLINE i64 clamp(i64 value, i64 most) { return value < 0 ? 0 : least_i64(value, most); }

INLINE i64 copy_kept(enum Way way, const Array *whole, const Array *lanes, const Array *packed,
                     i64 width, u16 *places) {
  i64 total = 0;
  EACH_TILE(whole->size, TILE) {
    i64 found = find_lanes(AT(u8, lanes) + first, size, places);
    i64 used = clamp(packed->size - total, found);
    copy_places(width, way, AT(u8, whole) + first * width, places, used, AT(u8, packed) + total * width);
    total += found;
  }
  return total;
}

ENTRY(i64, select)(const Array *raw, const Array *lanes, Array *out, i64 width, void *room) {
  return copy_kept(GATHER, raw, lanes, out, width, (u16 *)room);
}

ENTRY(i64, expand)(const Array *packed, const Array *lanes, Array *into, i64 width, void *room) {
  return copy_kept(SCATTER, into, lanes, packed, width, (u16 *)room);
}

// ---------------------------------------------------------------- values in few bits

enum { SCALE_GROUP = 256, PARTS = 1 << 12, FINE_PARTS = 1 << 20 };
#define LARGEST 0x1.FEp127f     // the largest bfloat16
#define ROUNDER (f32)(3 << 22)  // added to a number of moderate size, it rounds it to an integer
static const u32 STEPS_OF_4[12] = {585, 552, 521, 492, 464, 438, 414, 391, 369, 348, 328, 310};
static const u32 STEPS_OF_2[8] = {4096, 3444, 2896, 2435, 2048, 1722, 1448, 1218};
static const u32 STEPS_OF_ODD[12] = {1365, 1216, 1084, 965, 860, 766,
                                     683,  608,  542,  483, 430, 383};

typedef struct {
  u32 step, error;
} Step;

// Find the step of least squared error, the first of equals. Of what is not used, all parts are 0.
INLINE Step best_step(const u32 *parts, i64 used, const u32 *steps, int number_of_steps, u32 most) {
  Step best = {0, ~0u};
  for (int number = 0; number < number_of_steps; number++) {
    // masks tell compilers that products have factors of 16 bits, which are faster
    u32 step = steps[number] & (most == 7 ? 0x3FFu : 0x1FFFu);
    u32 inverse = ((65536 + step / 2) / step) & 0xFFu;
    Words errors = all_words(0);
    EACH(SCALE_GROUP, {
      Words part = load_words(parts + i, count) & 0x1FFFu, level;
      if (most == 3) level = 1 + (~is_below(part, all_words(2 * step)) & 2u);
      else level = min_words((part * inverse + 32768u) >> 16, all_words(most));
      Words left = part - level * step;
      errors += left * left;
    });
    u32 error = sum_of(errors) - (most == 3 ? (u32)(SCALE_GROUP - used) * step * step : 0);
    if (error < best.error) best.step = step, best.error = error;
  }
  return best;
}

INLINE f64 sum_of_whole(Doubles values) {  // in any order, for nothing is rounded
  f64 each[LANES], sum = 0;
  store_doubles(each, values, LANES);
  for (int i = 0; i < LANES; i++) sum += each[i];
  return sum;
}

// The bfloat16 nearest to a number; and, decoded, in its place.
INLINE u16 round_scale(f32 *scale) {
  u32 rounded = largest_of(round_bf16(all_words(bits_of_f32(*scale))));
  *scale = f32_of_bits(rounded << 16);
  return (u16)rounded;
}

// Return the scale of a group, and write the integers that its values are rounded to. They lie where
// the parts were, for the stack is small.
INLINE u16 quantise_group(const f32 *values, i64 used, u32 bits, u32 *parts) {
  u8 *fields = (u8 *)parts;
  f32 shares[SCALE_GROUP];
  Words peak = all_words(0);
  EACH(SCALE_GROUP, peak = max_words(peak, magnitude_of(load(values + i, count))));
  peak = min_words(all_words(largest_of(peak)), bits_of(all_floats(LARGEST)));
  f32 largest = f32_of_bits(largest_of(peak));
  f32 divisor = largest == 0 ? 1 : largest;
  EACH(SCALE_GROUP, {
    Floats share = floats_of(min_words(magnitude_of(load(values + i, count)), peak)) / divisor;
    Words part = bits_of(share * (f32)PARTS + ROUNDER) - bits_of(all_floats(ROUNDER));
    store(shares + i, share, count);
    store_words(parts + i, part, count);
  });
  Step best = bits == 4 ? best_step(parts, used, STEPS_OF_4, 12, 7)
                        : best_step(parts, used, STEPS_OF_2, 8, 1);
  int odd = 0;
  if (bits == 2) {
    Step other = best_step(parts, used, STEPS_OF_ODD, 12, 3);
    if (other.error < best.error) best = other, odd = 1;
  }
  f32 scale = largest * ((f32)best.step / PARTS);
  u16 rounded = round_scale(&scale);
  odd = odd && rounded;
  Floats unit = all_floats(rounded ? scale : 1), most = all_floats(bits == 4 ? 7 : 1);
  Doubles squares = to_doubles(all_floats(0)), products = squares;
  Words top = bits_of(all_floats(1));
  EACH(SCALE_GROUP, {
    Floats value = load(values + i, count), level;
    if (odd) {
      Words over = is_at_most(unit * 2, value), under = is_less(value, unit * -2);
      Words number = choose(is_less(value, all_floats(0)), all_words(~0u), all_words(0));
      store_8(fields + i, (number - over + under) & 3u, count);
      level = choose_floats(over | under, all_floats(3), all_floats(1));
    } else {
      Floats number = value / unit;
      number = choose_floats(is_less(most, number), most, number);
      number = choose_floats(is_less(number, -most), -most, number) + ROUNDER;
      store_8(fields + i, bits_of(number) & ((1u << bits) - 1), count);
      level = magnitudes(number - ROUNDER);
    }
    Floats part = load(shares + i, count) * (f32)FINE_PARTS + ROUNDER - ROUNDER;
    squares += to_doubles(part) * to_doubles(part);
    products += to_doubles(part * level);
    top = max_words(top, bits_of(level));
  });
  if (!rounded) return 0;
  // the scale that gives the stored values the same share of the values' direction
  f64 product = sum_of_whole(products);
  f64 fair = largest * (sum_of_whole(squares) / product) / FINE_PARTS;
  f64 most_fair = (f64)LARGEST / f32_of_bits(largest_of(top));
  if (fair > most_fair) fair = most_fair;
  scale = product == 0 ? 0 : (f32)fair;
  return (u16)(round_scale(&scale) | odd << 15);
}

INLINE void quantise_all(const Array *values, u32 bits, u8 *codes, u16 *scales) {
  u32 parts[SCALE_GROUP];
  f32 padded[SCALE_GROUP];
  EACH_TILE(values->size, SCALE_GROUP) {
    const f32 *some = AT(f32, values) + first;
    EACH(SCALE_GROUP, store(padded + i, all_floats(0), count));
    EACH(size, store(padded + i, load(some + i, count), LANES));
    scales[first / SCALE_GROUP] = quantise_group(padded, size, bits, parts);
    for (i64 i = 0; i < (size * bits + 7) / 8; i++) {
      u32 code = 0;
      for (u32 j = 0; j < 8 / bits; j++) code |= (u32)((u8 *)parts)[8 / bits * i + j] << bits * j;
      codes[first * bits / 8 + i] = (u8)code;
    }
  }
}

ENTRY(void, quantise)(const Array *values, i64 bits, Array *codes, Array *scales) {
  if (bits == 4) quantise_all(values, 4, AT(u8, codes), AT(u16, scales));
  else quantise_all(values, 2, AT(u8, codes), AT(u16, scales));
}

INLINE void unpack(const u8 *codes, u32 bits, u16 given, f32 *out, i64 size) {
  Floats scale = floats_of(all_words((u32)(given & 0x7FFF) << 16));
  u32 odd = given >> 15;
  EACH(size, {
    Words number = bits == 8 ? load_mask(codes + i, count) : load_fields(codes, i, bits, count);
    store(out + i, to_floats((number << odd) + odd) * scale, count);
  });
}

ENTRY(void, dequantise)(const Array *codes, const Array *scales, i64 bits, Array *out) {
  EACH_TILE(out->size, SCALE_GROUP) {
    const u8 *some = AT(u8, codes) + first * bits / 8;
    u16 scale = AT(u16, scales)[first / SCALE_GROUP];
    f32 *to = AT(f32, out) + first;
    switch (bits) {
      case 8: unpack(some, 8, scale, to, size); break;
      case 4: unpack(some, 4, scale, to, size); break;
      case 2: unpack(some, 2, scale, to, size); break;
      default: unpack(some, 1, scale, to, size);
    }
  }
}

// ---------------------------------------------------------------- into a live model

typedef struct {
  Places places;
  f32 change[TILE];
  f64 fresh[TILE];  // wide enough for any kind
} ApplyRoom;
FITS(ApplyRoom);

// Add the packed elements' changes to stored ones.
INLINE void apply_kind(enum Kind kind, enum Kind packed_kind, const void *stored,
                       const void *packed, i64 are_deltas, f32 factor, f32 *changes, void *fresh,
                       i64 size) {
  Words peak = all_words(0), subtracted = all_words(are_deltas ? 0 : ~0u);
  EACH(size, {
    Floats origin = load_kind(kind, stored, i, count);
    Floats value = load_kind(packed_kind, packed, i, count);
    Floats change = (value - masked(origin, subtracted)) * factor, sum = origin + change;
    store(changes + i, change, count);
    store_kind(kind, fresh, i, choose_floats(is_equal(change, all_floats(0)), origin, sum), count);
    peak = max_words(peak, magnitude_of(sum));
  });
  if (kind == F64 || largest_of(peak) > INFINITE) {
    keep_unchanged(width_of(kind), (const u8 *)stored, changes, (u8 *)fresh, size);
  }
}

ENTRY(i64, apply_packed)(const Array *base, const Array *packed, i64 are_deltas, const Array *lanes,
                         f32 factor, Array *out, Array *saved, void *given) {
  ApplyRoom *room = (ApplyRoom *)given;
  i64 total = 0, width = width_of((enum Kind)base->kind);
  i64 end = least_i64(packed->size, saved->size);
  EACH_TILE(base->size, TILE) {
    i64 found = find_lanes(AT(u8, lanes) + first, size, room->places);
    i64 used = clamp(end - total, found);
    i64 whole = (used + LANES - 1) / LANES * LANES;
    i64 taken = total + whole <= end ? whole : used;  // some are computed in vain, for speed
    u8 *stored = AT(u8, saved) + total * width;
    const void *values = in_kinds(base->kind, packed, total, taken, room->change);
    copy_places(width, GATHER, AT(u8, base) + first * width, room->places, used, stored);
    f32 *change = room->change;
    FOR_KINDS(base->kind, packed->kind,
              apply_kind(K, L, stored, values, are_deltas, factor, change, room->fresh, taken));
    u8 *to = AT(u8, out) + first * width;
    copy_places(width, SCATTER, to, room->places, used, (u8 *)room->fresh);
    total += found;
  }
  return total;
}
