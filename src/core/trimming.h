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
  u32 peak;  // of all that was measured
} MeasureRoom;
FITS(MeasureRoom);

INLINE i64 measure_kinds(enum Kind kind, enum Kind base_kind, const void *raw, const void *base,
                         const u8 *lanes, i64 size, u32 low, u32 high, i64 *above,
                         MeasureRoom *room) {
  Words peak = all_words(0), over = all_words(0), some = all_words(0);
  room->inside[size / 64] = 0;
  EACH(size, {
    Floats difference = load_kind(kind, raw, i, count) - load_kind(base_kind, base, i, count);
    Words magnitude = magnitude_of(difference) & load_mask(lanes + i, count);
    Words inside = ~is_below(all_words(high - low), magnitude - low) & first_lanes(count);
    peak = max_words(peak, magnitude);
    over -= is_lower(all_words(high), magnitude);
    some |= inside;
    store_words(room->magnitudes + i, magnitude, count);
    store_bits(room->inside, i, inside);
  });
  room->peak = most_u32(room->peak, largest_of(peak));
  *above += sum_of(over);
  return largest_of(some) ? list_places(room->inside, size, room->places) : 0;
}

// Measure some elements from the place `first` on; list those from `low` to `high`, and return how
// many they are. The totals are of those above, and of those that are listed.
static i64 measure(const Array *raw, const Array *base, const Array *lanes, i64 first, i64 size,
                   i64 low, i64 high, i64 *totals, MeasureRoom *room) {
  i64 found = 0;
  const void *data = from_place(raw, first);
  const void *from = in_kinds(raw->kind, base, first, size, room->base);
  const u8 *lane = AT(u8, lanes) + first;
  FOR_KINDS(raw->kind, base->kind, {
    found = measure_kinds(K, L, data, from, lane, size, (u32)low, (u32)high, totals, room);
  });
  if (low > high) found = 0;
  totals[1] += found;
  return found;
}

ENTRY(i64, collect_keys)(const Array *raw, const Array *base, const Array *lanes, i64 low, i64 high,
                         i64 start, Array *keys, Array *figures, void *given) {
  MeasureRoom *room = (MeasureRoom *)given;
  i64 *totals = AT(i64, figures);
  room->peak = 0;
  EACH_TILE(raw->size, MEASURED) {
    i64 taken = least_i64(totals[1], keys->size);
    i64 found = measure(raw, base, lanes, first, size, low, high, totals, room);
    i64 fitting = least_i64(found, keys->size - taken);
    u64 *next = AT(u64, keys) + taken, last = (1ull << INDEX_BITS) - 1 - (u64)(start + first);
    for (i64 i = 0; i < fitting; i++) {
      next[i] = (u64)room->magnitudes[room->places[i]] << INDEX_BITS | (last - room->places[i]);
    }
  }
  return room->peak;
}

ENTRY(i64, count_bins)(const Array *raw, const Array *base, const Array *lanes, i64 low, i64 shift,
                       Array *counts, Array *seen, Array *figures, void *given) {
  MeasureRoom *room = (MeasureRoom *)given;
  i64 least = most_i64(low, 1);
  i64 most = most_i64(least_i64(low + (counts->size << shift), 1ll << 31) - 1, 0);
  room->peak = 0;
  EACH_TILE(raw->size, MEASURED) {
    i64 found = measure(raw, base, lanes, first, size, least, most, AT(i64, figures), room);
    for (i64 i = 0; i < found; i++) {
      u32 place = room->magnitudes[room->places[i]] - (u32)low, bin = place >> shift;
      u32 rest = place & ((1u << shift) - 1);
      AT(i64, counts)[bin]++;
      AT(u32, seen)[bin] |= rest | ~rest << 16;
    }
  }
  return room->peak;
}
