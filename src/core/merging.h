// A chunk through a merge: decoded, masked, kept in a band, added up or elected, added to the base.

// Widen some elements of an array, from the place `first` on.
static void decode_tile(const Array *raw, i64 first, i64 size, f32 *out) {
  FOR_KIND(raw->kind, EACH(size, store(out + i, load_kind(K, raw->data, first + i, count), count)));
}

// The elements of an array from a place on.
INLINE const void *from_place(const Array *raw, i64 first) {
  return AT(u8, raw) + first * width_of((enum Kind)raw->kind);
}

// The same as elements of a kind or, for `FOR_KINDS`, as F32, which may need some room.
INLINE const void *in_kinds(i64 kind, const Array *raw, i64 first, i64 size, f32 *room) {
  if (raw->kind == kind || raw->kind == F32) return from_place(raw, first);
  decode_tile(raw, first, size, room);
  return room;
}

ENTRY(void, decode)(const Array *raw, Array *out) { decode_tile(raw, 0, raw->size, AT(f32, out)); }

// Return the largest magnitude's bits.
ENTRY(i64, encode)(const Array *values, Array *out) {
  Words peak = all_words(0);
  FOR_KIND(out->kind, EACH(values->size, {
    Floats value = load(AT(f32, values) + i, count);
    peak = max_words(peak, magnitude_of(value));
    store_kind(K, out->data, i, value, count);
  }));
  return largest_of(peak);
}

typedef struct {
  Words peak, over;
} Extent;  // the largest magnitude's bits, and how many are over the threshold

INLINE Floats measured(Floats difference, u32 threshold, Extent *extent) {
  Words magnitude = magnitude_of(difference);
  extent->peak = max_words(extent->peak, magnitude);
  extent->over -= is_below(all_words(threshold), magnitude);
  return difference;
}

// Two results: the largest magnitude's bits, and how many are over the threshold.
ENTRY(void, delta)(const Array *raw, const Array *base, const Array *lanes, Array *out, i64 threshold,
                   i64 *results) {
  Extent extent = {all_words(0), all_words(0)};
  FOR_KIND(raw->kind, EACH(raw->size, {
    Floats difference = load_kind(K, raw->data, i, count) - load(AT(f32, base) + i, count);
    difference = measured(difference, (u32)threshold, &extent);
    store(AT(f32, out) + i, masked(difference, load_mask(AT(u8, lanes) + i, count)), count);
  }));
  results[0] = largest_of(extent.peak);
  results[1] = sum_of(extent.over);
}

// Return how many values are left that are not zero.
ENTRY(i64, keep_lanes)(Array *values, const Array *lanes) {
  Words left = all_words(0);
  EACH(values->size, {
    Floats value = masked(load(AT(f32, values) + i, count), load_mask(AT(u8, lanes) + i, count));
    store(AT(f32, values) + i, value, count);
    left -= is_below(all_words(0), magnitude_of(value));
  });
  return sum_of(left);
}

ENTRY(i64, draw)(Array *lanes, i64 size, i64 start, i64 key0, i64 key1, i64 high, i64 low, void *room) {
  i64 kept = 0;
  for (i64 first = 0; first < size; first += TILE) {
    kept += draw_tile(AT(u8, lanes) + first, least_i64(TILE, size - first), (u64)(start + first),
                      (u32)key0, (u32)key1, (u32)high, (u32)low, (DrawRoom *)room);
  }
  return kept;
}

// ---------------------------------------------------------------- the sum with the base

// Round base + scale·merged to a kind, and the base where nothing is merged; return the largest
// magnitude's bits. Where that is NaN, `may_be_nan` must have been set.
INLINE u32 add_and_round(enum Kind kind, int may_be_nan, const f32 *base, const f32 *merged, f32 scale,
                         void *out, i64 size) {
  Words peak = all_words(0);
  EACH(size, {
    Floats origin = load(base + i, count), change = load(merged + i, count);
    Floats sum = origin + change * scale;
    Floats value = choose_floats(is_equal(change, all_floats(0)), origin, sum);
    peak = max_words(peak, magnitude_of(sum));
    if (may_be_nan) store_kind(kind, out, i, value, count);
    else store_number(kind, out, i, value, count);
  });
  return largest_of(peak);
}

// Put the base's own bytes where nothing is merged: rounding changes those of NaN, and of F64.
INLINE void keep_unchanged(i64 width, const u8 *raw, const f32 *merged, u8 *out, i64 size) {
  for (i64 i = 0; i < size; i++) {
    if (merged[i] == 0) __builtin_memcpy(out + width * i, raw + width * i, (u64)width);
  }
}

// Do it for a tile whose base was decoded. Its stored elements count if they are of the same kind.
static u32 round_tile(const f32 *base, const f32 *merged, f32 scale, enum Kind raw_kind, const void *raw,
                    enum Kind kind, void *out, i64 first, i64 size) {
  u32 peak = 0;
  FOR_KIND(kind, {
    u8 *to = (u8 *)out + first * width_of(K);
    peak = add_and_round(K, 0, base, merged, scale, to, size);
    if (peak > INFINITE) add_and_round(K, 1, base, merged, scale, to, size);
    if (raw_kind == K && (peak > INFINITE || K == F64)) {
      keep_unchanged(width_of(K), (const u8 *)raw + first * width_of(K), merged, to, size);
    }
  });
  return peak;
}

ENTRY(i64, add_to_base)(const Array *raw, const Array *merged, f32 scale, Array *out, void *room) {
  f32 *base = (f32 *)room;
  u32 peak = 0;
  EACH_TILE(raw->size, TILE) {
    decode_tile(raw, first, size, base);
    peak = most_u32(peak, round_tile(base, AT(f32, merged) + first, scale, (enum Kind)raw->kind, raw->data,
                                   (enum Kind)out->kind, out->data, first, size));
  }
  return peak;
}

// ---------------------------------------------------------------- bands

INLINE i64 clear_outside(enum Kind kind, const void *raw, i64 first, i64 size, const f32 *base,
                         u8 *lanes, u32 least, u32 most) {
  Words kept = all_words(0);
  EACH(size, {
    Floats difference = load_kind(kind, raw, first + i, count) - load(base + first + i, count);
    Words magnitude = magnitude_of(difference), lane = load_mask(lanes + first + i, count);
    lane &= ~is_below(magnitude, all_words(least)) & ~is_below(all_words(most), magnitude);
    store_8(lanes + first + i, lane & 255u, count);
    kept -= lane;
  });
  return sum_of(kept);
}

// Clear the lanes outside a band, in parts in which equals are all kept, or all dropped.
INLINE i64 keep_in_band(enum Kind kind, const void *raw, i64 offset, i64 size, const f32 *base,
                        u8 *lanes, i64 start, Band band) {
  i64 kept = 0;
  for (i64 first = 0, last; first < size; first = last) {
    i64 place = start + first, end = start + size;
    if (place < band.end && band.end < end) end = band.end;
    if (place < band.begin && band.begin < end) end = band.begin;
    last = end - start;
    i64 low = band.least + (place >= band.end), high = band.most - (place < band.begin);
    if (high < 0) low = 1, high = 0;
    const u8 *from = (const u8 *)raw + offset * width_of(kind);
    kept += clear_outside(kind, from, first, last - first, base, lanes, (u32)low, (u32)high);
  }
  return kept;
}

ENTRY(i64, keep_band)(const Array *raw, const Array *base, Array *lanes, i64 start, i64 least, i64 end,
                      i64 most, i64 begin) {
  Band band = {least, end, most, begin};
  i64 kept = 0;
  FOR_KIND(raw->kind, kept = keep_in_band(K, raw->data, 0, raw->size, AT(f32, base), AT(u8, lanes), start, band));
  return kept;
}

// ---------------------------------------------------------------- votes

INLINE Sides load_sides(const f32 *sums, i64 i, i64 row, i64 count) {
  Sides sides = {load(sums + i, count), load(sums + row + i, count), load(sums + 2 * row + i, count),
                 load(sums + 3 * row + i, count)};
  return sides;
}

INLINE void store_sides(f32 *sums, Sides sides, i64 i, i64 row, i64 count) {
  store(sums + i, sides.above, count);
  store(sums + row + i, sides.below, count);
  store(sums + 2 * row + i, sides.above_share, count);
  store(sums + 3 * row + i, sides.below_share, count);
}

ENTRY(void, vote)(Array *sums, const Array *values, f32 weight, f32 share) {
  EACH(values->size, {
    Sides sides = load_sides(AT(f32, sums), i, values->size, count);
    sides = cast(sides, load(AT(f32, values) + i, count) * weight, share);
    store_sides(AT(f32, sums), sides, i, values->size, count);
  });
}

ENTRY(void, elect)(const Array *sums, const Array *balance, Array *out) {
  EACH(out->size, {
    Sides sides = load_sides(AT(f32, sums), i, out->size, count);
    store(AT(f32, out) + i, outcome(sides, load(AT(f32, balance) + i, count)), count);
  });
}

ENTRY(void, add_scaled)(Array *total, const Array *values, f32 weight) {
  EACH(total->size, {
    Floats sum = load(AT(f32, total) + i, count) + load(AT(f32, values) + i, count) * weight;
    store(AT(f32, total) + i, sum, count);
  });
}

// ---------------------------------------------------------------- all of it, tile by tile

enum { ROW = TILE + 16 };  // not a power of two, or rows of sums would share cache sets

typedef struct {
  DrawRoom draw;
  u8 lanes[TILE];
  f32 base[TILE], total[TILE], sums[4 * ROW];
} CombineRoom;
FITS(CombineRoom);

INLINE Extent take_tile(enum Kind kind, const Operand *model, i64 first, i64 size, i64 elects,
                        u32 threshold, f32 *total, CombineRoom *room) {
  Extent extent = {all_words(0), all_words(0)};
  f32 weight = (f32)model->weight, share = (f32)model->share;
  EACH(size, {
    Floats difference = load_kind(kind, model->tuned, first + i, count) - load(room->base + i, count);
    difference = measured(difference, threshold, &extent);
    Floats term = masked(difference, load_mask(room->lanes + i, count)) * weight;
    if (elects) {
      store_sides(room->sums, cast(load_sides(room->sums, i, ROW, LANES), term, share), i, ROW, LANES);
    } else {
      store(total + i, load(total + i, count) + term, count);
    }
  });
  return extent;
}

// Add up or elect the deltas of some models, all of one kind, of a tile whose base is in the room.
// figures: for each model those of `combine` in reference.py.
static void combine_tile(const Operand *models, i64 count_of_models, i64 kind, i64 start, i64 first,
                         i64 size, i64 elects, u32 threshold, f32 *total, i64 *figures,
                         CombineRoom *room) {
  f32 *sums = room->sums;
  if (elects) EACH(4 * ROW, store(sums + i, all_floats(0), count));
  else EACH(size, store(total + i, all_floats(0), count));
  for (i64 number = 0; number < count_of_models; number++) {
    const Operand *model = models + number;
    i64 *found = figures + 4 * number;
    if (model->high < 256) {
      found[2] += draw_tile(room->lanes, size, (u64)(start + first), (u32)model->key0,
                            (u32)model->key1, (u32)model->high, (u32)model->low, &room->draw);
    } else {
      EACH(TILE, store_8(room->lanes + i, all_words(255), count));
      found[2] += size;
    }
    Extent extent = {all_words(0), all_words(0)};
    FOR_KIND(kind, {
      if (model->band.least >= 0) {
        found[3] += keep_in_band(K, model->tuned, first, size, room->base, room->lanes, start + first,
                                 model->band);
      }
      if (elects) extent = take_tile(K, model, first, size, 1, threshold, total, room);
      else extent = take_tile(K, model, first, size, 0, threshold, total, room);
    });
    found[0] = most_i64(found[0], largest_of(extent.peak));
    found[1] += sum_of(extent.over);
  }
  if (elects) EACH(size, {
    Sides sides = load_sides(sums, i, ROW, LANES);
    store(total + i, outcome(sides, sides.above + sides.below), count);
  });
}

ENTRY(void, combine)(const Array *base, const Operand *models, i64 count_of_models, i64 kind, i64 start,
                     i64 elects, i64 threshold, i64 chunk, Array *out, i64 *figures, void *given) {
  CombineRoom *room = (CombineRoom *)given;
  EACH_TILE(base->size, TILE) {
    decode_tile(base, first, size, room->base);
    combine_tile(models, count_of_models, kind, start, first, size, elects, (u32)threshold,
                 AT(f32, out) + first, figures + 4 * (first / chunk) * count_of_models, room);
  }
}
