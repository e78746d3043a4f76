// Magnitudes of a delta, counted and collected, so that the k-th is found in a pass.

enum { MEASURED = 2048, INDEX_BITS = 33 };

// List the places of bits that are set; return how many there are.
static i64 list_places(const u64 *bits, i64 size, u16 *places) {
  i64 found = 0;
  for (i64 first = 0; first < size; first += 64) {
    found += list_bits(bits[first / 64], first, places + found);
  }
  return found;
}

typedef struct {
  u64 inside[MEASURED / 64 + 1];
  u32 magnitudes[MEASURED];
  u16 places[MEASURED + PLACES_AT_ONCE];
  f32 base[MEASURED];
} MeasureRoom;
FITS(MeasureRoom);

typedef struct {
  i64 above, inside;
  u32 peak;
} Measures;

INLINE Measures measure_kinds(enum Kind kind, enum Kind base_kind, const void *raw,
                              const void *base, const u8 *lanes, i64 size, u32 low, u32 high,
                              MeasureRoom *room) {
  Words peak = all_words(0), over = all_words(0), some = all_words(0);
  room->inside[size / 64] = 0;
  EACH(size, {
    Floats difference = load_kind(kind, raw, i, count) - load_kind(base_kind, base, i, count);
    Words magnitude = magnitude_of(difference) & load_mask(lanes + i, count);
    Words above = is_lower(all_words(high), magnitude);
    Words inside = ~is_below(all_words(high - low), magnitude - low) & first_lanes(count);
    peak = max_words(peak, magnitude);
    over -= above;
    some |= inside;
    store_words(room->magnitudes + i, magnitude, count);
    store_bits(room->inside, i, inside);
  });
  i64 found = largest_of(some) ? list_places(room->inside, size, room->places) : 0;
  Measures measures = {sum_of(over), found, largest_of(peak)};
  return measures;
}

// Measure some elements from the place `first` on, and list those from `low` to `high`.
static Measures measure(const Array *raw, const Array *base, const Array *lanes, i64 first,
                        i64 size, i64 low, i64 high, MeasureRoom *room) {
  Measures found = {0, 0, 0};
  const void *from = AT(u8, base) + first * width_of((enum Kind)base->kind);
  if (raw->kind != base->kind) {
    decode_tile(base, first, size, room->base);
    from = room->base;
  }
  FOR_KINDS(raw->kind, base->kind, {
    const u8 *data = AT(u8, raw) + first * width_of(K), *lane = AT(u8, lanes) + first;
    found = measure_kinds(K, L, data, from, lane, size, (u32)low, (u32)high, room);
  });
  if (low > high) found.inside = 0;
  return found;
}

ENTRY(i64, collect_keys)(const Array *raw, const Array *base, const Array *lanes, i64 low, i64 high,
                         i64 start, Array *keys, Array *figures, void *given) {
  MeasureRoom *room = (MeasureRoom *)given;
  i64 *totals = AT(i64, figures);
  u32 peak = 0;
  for (i64 first = 0; first < raw->size; first += MEASURED) {
    i64 size = least_i64(MEASURED, raw->size - first);
    Measures found = measure(raw, base, lanes, first, size, low, high, room);
    i64 fitting = least_i64(found.inside, keys->size - totals[1]);
    u64 *next = AT(u64, keys) + totals[1], last = (1ull << INDEX_BITS) - 1 - (u64)(start + first);
    for (i64 i = 0; i < fitting; i++) {
      next[i] = (u64)room->magnitudes[room->places[i]] << INDEX_BITS | (last - room->places[i]);
    }
    totals[0] += found.above;
    totals[1] += found.inside;
    peak = most_u32(peak, found.peak);
  }
  return peak;
}

ENTRY(i64, count_bins)(const Array *raw, const Array *base, const Array *lanes, i64 low, i64 shift,
                       Array *counts, Array *seen, Array *figures, void *given) {
  MeasureRoom *room = (MeasureRoom *)given;
  i64 *totals = AT(i64, figures), least = most_i64(low, 1);
  i64 most = most_i64(least_i64(low + (counts->size << shift), 1ll << 31) - 1, 0);
  u32 peak = 0;
  for (i64 first = 0; first < raw->size; first += MEASURED) {
    i64 size = least_i64(MEASURED, raw->size - first);
    Measures found = measure(raw, base, lanes, first, size, least, most, room);
    for (i64 i = 0; i < found.inside; i++) {
      u32 place = room->magnitudes[room->places[i]] - (u32)low, bin = place >> shift;
      u32 rest = place & ((1u << shift) - 1);
      AT(i64, counts)[bin]++;
      AT(u32, seen)[bin] |= rest | ~rest << 16;
    }
    totals[0] += found.above;
    totals[1] += found.inside;
    peak = most_u32(peak, found.peak);
  }
  return peak;
}
