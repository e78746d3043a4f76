// The tallies of an analysis: a chunk of the base and of all models at once, in tiles that stay in
// a close cache. What is left of a tile's rows up to a multiple of SIGN_BLOCK is zero, so that no
// loop over one has an end of its own.

enum {
  INTERLEAVED = 64,             // sums of each quantity
  POSITIONS = INTERLEAVED / LANES,
  ANALYSED = 2048,              // elements of a tile
  DELTA_ROW = ANALYSED + 16,    // not a power of two, or rows would share cache sets
  SIGNS = 16,                   // in a word of 32 bits; each has two: above zero, below zero
  SIGN_BLOCK = 16 * SIGNS,
  SIGN_WORDS = ANALYSED / 32,   // words of 64 bits
  SAMPLED = 64,                 // elements that are sampled together
  MAGNITUDE_SHIFT = 15,         // bits of a magnitude that its bin does not tell
  MAGNITUDE_BINS = 1 << 16
};
#define ABOVE 0x5555555555555555u

typedef struct {
  f32 delta[DELTA_ROW];
  u64 signs[SIGN_WORDS];
  f64 scale, sums[6][INTERLEAVED], unused[7];
} Measuring;  // a tile of one model, or of the base; its size stands in `core.py` too
_Static_assert(sizeof(Measuring) == 11904, "");

// ---------------------------------------------------------------- one model

typedef struct {
  Words peak, least, missing;
} Extremes;  // the bits of magnitudes, the least above zero less 1; and how many were not finite

INLINE i64 padded_size(i64 size) { return (size + SIGN_BLOCK - 1) / SIGN_BLOCK * SIGN_BLOCK; }

INLINE void pad(f32 *values, i64 size) {
  for (i64 i = size; i < padded_size(size); i++) values[i] = 0;
}

// The base counts as zero where `has_base` is 0. What is not finite becomes zero if it `mends`.
INLINE Extremes subtract_kind(enum Kind kind, const void *raw, enum Kind base_kind,
                              const void *base, i64 has_base, int mends, i64 size, f32 *out) {
  Extremes found = {all_words(0), all_words(~0u), all_words(0)};
  Words mask = all_words(has_base ? ~0u : 0);
  EACH(size, {
    Floats own = load_kind(kind, raw, i, count), origin = load_kind(base_kind, base, i, count);
    Floats value = own - masked(origin, mask);
    if (mends) {
      Words is_finite = is_below(magnitude_of(value), all_words(INFINITE));
      found.missing -= ~is_finite;
      value = masked(value, is_finite);
    }
    found.peak = max_words(found.peak, magnitude_of(value));
    found.least = min_words(found.least, magnitude_of(value) - 1);
    store(out + i, value, count);
  });
  return found;
}

static Extremes mend(f32 *values, i64 size) {
  return subtract_kind(F32, values, F32, values, 0, 1, size, values);
}

static Extremes subtract_tile(const Array *raw, i64 first, i64 size, const f32 *base, i64 has_base,
                              f32 *out) {
  Extremes found;
  const void *from = from_place(raw, first);
  FOR_KIND(raw->kind, found = subtract_kind(K, from, F32, base, has_base, 0, size, out));
  pad(out, size);
  return largest_of(found.peak) < INFINITE ? found : mend(out, size);
}

// The power of two that brings a magnitude to [1, 2), as far as float32 has it.
INLINE f32 scale_for(u32 peak) {
  i64 exponent = 127 - (i64)(peak >> 23);
  return power_of_two((int)most_i64(-126, least_i64(exponent, 127)));
}

// Add a tile's sums, of values that were scaled, to those of the tiles before.
INLINE void add_tile(f64 *lanes, Floats sums, f64 back) {
  store_doubles(lanes, load_doubles(lanes, LANES) + to_doubles(sums) * back, LANES);
}

INLINE f64 add_interleaved(const f64 *lanes) {
  f64 total = 0;
  for (int i = 0; i < INTERLEAVED; i++) total += lanes[i];
  return total;
}

// Σ of values, their second, third and fourth powers, their magnitudes, and their products with the
// base.
static void add_powers(const f32 *values, const f32 *base, i64 size, f64 scale, f64 base_scale,
                       f64 lanes[6][INTERLEAVED]) {
  f32 of_values = (f32)scale, of_base = (f32)base_scale;
  f64 back = 1 / scale;
  for (int part = 0; part < INTERLEAVED; part += LANES) {
    Floats one = all_floats(0), two = one, three = one, four = one, plain = one, product = one;
    for (i64 i = part; i < size; i += INTERLEAVED) {
      Floats value = load(values + i, LANES) * of_values, square = value * value;
      one += value;
      two += square;
      three += square * value;
      four += square * square;
      plain += magnitudes(value);
      product += value * (load(base + i, LANES) * of_base);
    }
    add_tile(lanes[0] + part, one, back);
    add_tile(lanes[1] + part, two, back * back);
    add_tile(lanes[2] + part, three, back * back * back);
    add_tile(lanes[3] + part, four, back * back * back * back);
    add_tile(lanes[4] + part, plain, back);
    add_tile(lanes[5] + part, product, back / base_scale);
  }
}

// Into rows of bins that take turns, for equal magnitudes often follow each other.
static void count_magnitudes(const f32 *values, i64 elements, u32 *even, u32 *odd) {
  u16 places[2 * SIGN_BLOCK];
  EACH_TILE(elements, 2 * SIGN_BLOCK) {
    for (i64 i = 0; i < size; i += LANES) {
      Words bits = bits_of(load(values + first + i, LANES));
      store_16(places + i, bits >> MAGNITUDE_SHIFT & (MAGNITUDE_BINS - 1u), LANES);
    }
    for (i64 i = 0; i + 1 < size; i += 2) {
      even[places[i]]++;
      odd[places[i + 1]]++;
    }
    if (size % 2) even[places[size - 1]]++;
  }
}

// ---------------------------------------------------------------- signs

// From the bits of a magnitude on, which is above zero; the order of the signs is their own.
static void take_signs(const f32 *values, i64 size, u32 least, u64 *signs) {
  for (i64 first = 0; first < size; first += SIGNS * LANES) {
    Words found = all_words(0);
    for (int place = 0; place < SIGNS; place++) {
      Floats value = load(values + first + place * LANES, LANES);
      Words seen = ~is_below(magnitude_of(value), all_words(least));
      found |= (((bits_of(value) >> 31) + 1) & seen) << (2 * place);
    }
    store_words((u32 *)signs + first / SIGNS, found, LANES);
  }
}

INLINE u64 changed_bits(u64 signs) { return (signs | signs >> 1) & ABOVE; }

INLINE i64 count_changed(const u64 *signs, i64 words) {
  i64 found = 0;
  for (i64 i = 0; i < words; i++) found += __builtin_popcountll(changed_bits(signs[i]));
  return found;
}

// Count the elements that both models of a pair change, and those changed in the same direction.
static void compare_pairs(const Measuring *room, i64 models, i64 words, i64 *counts) {
  for (i64 one = 0; one < models; one++) {
    for (i64 other = one + 1; other < models; other++, counts += 2) {
      for (i64 i = 0; i < words; i++) {
        u64 left = room[one].signs[i], right = room[other].signs[i];
        counts[0] += __builtin_popcountll(changed_bits(left) & changed_bits(right));
        counts[1] += __builtin_popcountll(changed_bits(left & right));
      }
    }
  }
}

// Count the elements that two models or more change, and those changed in both directions.
static void count_conflicts(const Measuring *room, i64 models, i64 words, i64 *counts) {
  for (i64 i = 0; i < words; i++) {
    u64 seen = 0, many = 0;
    for (i64 model = 0; model < models; model++) {
      u64 signs = room[model].signs[i];
      many |= changed_bits(seen) & changed_bits(signs);
      seen |= signs;
    }
    counts[0] += __builtin_popcountll(many);
    counts[1] += __builtin_popcountll(seen & seen >> 1 & ABOVE);
  }
}

// ---------------------------------------------------------------- models together

// Σ left·right.
static void add_products(const f32 *left, const f32 *right, i64 size, f64 left_scale,
                         f64 right_scale, f64 *lanes) {
  f32 of_left = (f32)left_scale, of_right = (f32)right_scale;
  Floats sums[POSITIONS] = {};
  for (i64 i = 0; i < size; i += INTERLEAVED) {
    for (int part = 0; part < POSITIONS; part++) {
      i64 at = i + part * LANES;
      sums[part] += (load(left + at, LANES) * of_left) * (load(right + at, LANES) * of_right);
    }
  }
  f64 back = 1 / (left_scale * right_scale);
  for (int part = 0; part < POSITIONS; part++) add_tile(lanes + part * LANES, sums[part], back);
}

// Σ|Σδ|.
static void add_together(const Measuring *room, i64 models, i64 size, f64 *lanes) {
  f64 scale = room[0].scale;
  for (i64 model = 1; model < models; model++) {
    if (room[model].scale < scale) scale = room[model].scale;
  }
  Floats sums[POSITIONS] = {}, terms[POSITIONS];
  for (i64 i = 0; i < size; i += INTERLEAVED) {
    const f32 *delta = room[0].delta + i;
    for (int part = 0; part < POSITIONS; part++) terms[part] = load(delta + part * LANES, LANES);
    for (i64 model = 1; model < models; model++) {
      delta = room[model].delta + i;
      for (int part = 0; part < POSITIONS; part++) terms[part] += load(delta + part * LANES, LANES);
    }
    for (int part = 0; part < POSITIONS; part++) sums[part] += magnitudes(terms[part] * (f32)scale);
  }
  for (int part = 0; part < POSITIONS; part++) add_tile(lanes + part * LANES, sums[part], 1 / scale);
}

// ---------------------------------------------------------------- a chunk

typedef struct {
  i64 changed, missing, peak, least;
} CountsOfModel;

// Take a tile's deltas, and what is counted of them.
static void take_deltas(const Array *base, const Array *raws, const u8 *are_deltas, i64 models,
                        i64 first, i64 used, CountsOfModel *counts, Array *bins, Measuring *room) {
  f32 *own = room[models].delta;
  decode_tile(base, first, used, own);
  for (i64 model = 0; model < models; model++) {
    f32 *delta = room[model].delta;
    u32 *even = AT(u32, bins) + 2 * model * bins->columns;
    Extremes found = subtract_tile(raws + model, first, used, own, !are_deltas[model], delta);
    take_signs(delta, padded_size(used), 1, room[model].signs);
    count_magnitudes(delta, used, even, even + bins->columns);
    room[model].scale = scale_for(largest_of(found.peak));
    counts[model].changed += count_changed(room[model].signs, padded_size(used) / 32);
    counts[model].missing += sum_of(found.missing);
    counts[model].peak = most_i64(counts[model].peak, largest_of(found.peak));
    counts[model].least = least_i64(counts[model].least, least_of(found.least));
  }
  room[models].scale = scale_for(largest_of(mend(own, used).peak));
  pad(own, used);
}

// The arrays from `sums` on are those of `reference.py`.
ENTRY(void, measure)(const Array *base, const Array *raws, const Array *are_deltas, Array *sums,
                     Array *counts, Array *pair_sums, Array *pair_counts, Array *shared,
                     Array *totals, Array *bins, Measuring *room) {
  i64 models = are_deltas->size;
  Measuring *own = room + models;
  f64 *pairs = (f64 *)(own + 1), *together = pairs + INTERLEAVED * pair_sums->size;
  for (i64 model = 0; model <= models; model++) {
    for (int i = 0; i < 6 * INTERLEAVED; i++) room[model].sums[i / INTERLEAVED][i % INTERLEAVED] = 0;
  }
  for (i64 i = 0; i < INTERLEAVED * (pair_sums->size + 1); i++) pairs[i] = 0;
  EACH_TILE(base->size, ANALYSED) {
    i64 padded = padded_size(size), words = padded / 32;
    take_deltas(base, raws, AT(u8, are_deltas), models, first, size, AT(CountsOfModel, counts),
                bins, room);
    add_products(own->delta, own->delta, padded, own->scale, own->scale, own->sums[0]);
    for (i64 one = 0, pair = 0; one < models; one++) {
      add_powers(room[one].delta, own->delta, padded, room[one].scale, own->scale, room[one].sums);
      for (i64 other = one + 1; other < models; other++, pair++) {
        add_products(room[one].delta, room[other].delta, padded, room[one].scale, room[other].scale,
                     pairs + INTERLEAVED * pair);
      }
    }
    if (models > 1) {
      compare_pairs(room, models, words, AT(i64, pair_counts));
      count_conflicts(room, models, words, AT(i64, shared));
      add_together(room, models, padded, together);
    }
  }
  for (i64 i = 0; i < sums->size; i++) AT(f64, sums)[i] += add_interleaved(room[i / 6].sums[i % 6]);
  for (i64 i = 0; i < pair_sums->size; i++) {
    AT(f64, pair_sums)[i] += add_interleaved(pairs + INTERLEAVED * i);
  }
  AT(f64, totals)[0] += add_interleaved(own->sums[0]);
  AT(f64, totals)[1] += add_interleaved(together);
}

// ---------------------------------------------------------------- the largest

// Take the deltas of one run of elements in every `period` runs of a chunk. Which one depends on
// its position in the tensor alone. `start` is a multiple of period·SAMPLED.
ENTRY(void, sample)(const Array *raw, const Array *base, i64 is_delta, i64 start, i64 period,
                    Array *out, Measuring *room) {
  i64 run = period > 1 ? SAMPLED : ANALYSED;
  for (i64 place = 0; place * run < out->size; place++) {
    u64 number = (u64)(start / (run * period) + place);
    i64 turn = (i64)(number * 0x9E3779B97F4A7C15u >> 32) % period;
    i64 first = (place * period + turn) * run, room_left = least_i64(run, out->size - place * run);
    i64 size = most_i64(0, least_i64(room_left, raw->size - first));
    f32 *to = AT(f32, out) + place * run;
    const void *from = from_place(raw, first);
    const void *base_from = in_kinds(raw->kind, base, first, size, room->delta);
    FOR_KINDS(raw->kind, base->kind, subtract_kind(K, from, L, base_from, !is_delta, 1, size, to));
    for (i64 i = size; i < room_left; i++) to[i] = 0;
  }
}

// Count what is in the tops of models, from `least` on; in both tops of each pair; and there alike.
// values: float32[models, elements]. sizes: int64[models]. pair_counts: int64[pairs, 2].
ENTRY(void, compare_tops)(const Array *values, const Array *least, Array *sizes, Array *pair_counts,
                          Measuring *room) {
  i64 models = least->size, elements = values->columns;
  EACH_TILE(elements, ANALYSED) {
    i64 padded = padded_size(size), words = padded / 32;
    for (i64 model = 0; model < models; model++) {
      f32 *delta = room[model].delta;
      subtract_tile(values, model * elements + first, size, delta, 0, delta);
      take_signs(delta, padded, AT(u32, least)[model], room[model].signs);
      AT(i64, sizes)[model] += count_changed(room[model].signs, words);
    }
    compare_pairs(room, models, words, AT(i64, pair_counts));
  }
}
