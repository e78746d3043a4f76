// Scores that stand for what competes over an element.

enum { SCORED = 1024 };  // elements at a time, all of whose room is in the closest cache

typedef struct {
  u64 marks[SCORED / 64 + 1];
  u16 places[SCORED + PLACES_AT_ONCE];
  f32 values[SCORED], totals[SCORED], scores[SCORED];
} ScoreRoom;
FITS(ScoreRoom);

typedef struct {
  f64 factor, inverse_peak, models, floor;
} Competition;

// Zero all scores, and mark the elements that may have one: all that do, and few others. An upper
// bound of the score over the floor decides, as in `reference.py`, but in f32 and a thousandth above,
// which is more than all its roundings. What underflows is far below a bound of 1.
INLINE void mark_scoring(const f32 *values, const f32 *total, Competition by, f64 peak, u64 *marks,
                         f32 *scores, i64 size) {
  f64 above = 1.001 / by.floor, scale = by.factor / peak, lowest = 1e-30, highest = 1e30;
  f64 over_floor = peak * above, width = scale < 0 ? -scale : scale;
  i64 is_moderate = by.floor > lowest && by.models >= 0 && by.models <= 64 && width > lowest &&
                    width < highest && over_floor > lowest && over_floor < highest;
  f32 to_share = (f32)scale, to_bound = (f32)over_floor, limit = (f32)above;
  f32 slope = (f32)(by.models / 16), top = 1 + slope;
  marks[size / 64] = 0;
  if (is_moderate) EACH(size, {
    Floats share = load(values + i, count) * to_share;
    Floats bound = share * (load(total + i, count) * to_bound);
    Floats grown = top - min_floats(share * share, all_floats(1)) * slope;
    for (int step = 0; step < 4; step++) grown = grown * grown;
    Words low = is_less(min_floats(bound, all_floats(limit)), grown);
    store_bits(marks, i, ~low & first_lanes(count));
    store(scores + i, all_floats(0), count);
  });
  else EACH(size, {
    Words is_zero = is_equal(load(values + i, count), all_floats(0));
    store_bits(marks, i, ~is_zero & first_lanes(count));
    store(scores + i, all_floats(0), count);
  });
}

INLINE Floats score_of(Floats value, Floats total, Competition by) {
  Doubles scaled = to_doubles(value) * by.factor, ones = all_doubles(1);
  Doubles part = min_doubles(magnitudes_of_doubles(scaled) * by.inverse_peak, ones);
  Doubles together = scaled * to_doubles(total), square = part * part;
  Doubles fall = (by.models * (square - 1)) * (1.0 / 256);
  Doubles rise = min_doubles(together, all_doubles(20)) * (1.0 / 128);
  Doubles power = ones, growth = ones;
  const f64 inverses[8] = {1.0 / 9, 1.0 / 8, 1.0 / 7, 1.0 / 6, 1.0 / 5, 1.0 / 4, 1.0 / 3, 1.0 / 2};
  ROLLED
  for (int i = 0; i < 8; i++) {  // exp(x) - 1 by its series
    power = fall * power * inverses[i] + 1;
    growth = rise * growth * inverses[i] + 1;
  }
  power = fall * power + 1;
  growth = rise * growth;
  ROLLED
  for (int i = 0; i < 8; i++) {
    power = power * power;
    growth = growth * (growth + 2);
  }
  Doubles grown = by.models * (1 - square) * (1.0 / 16) + 1;
  for (int i = 0; i < 4; i++) grown = grown * grown;
  Doubles most = min_doubles(together, ones) * (1 + 1e-6);
  Words scores = is_at_most_double(by.floor * grown, most);
  scores &= is_less_double(all_doubles(0), together);
  return masked(from_doubles(power * (growth / (growth + 2))), scores);
}

ENTRY(void, balance_scores)(const Array *values, const Array *total, f64 factor, f64 peak,
                            f64 models, f64 floor, Array *out, void *given) {
  ScoreRoom *room = (ScoreRoom *)given;
  Competition by = {factor, 1 / peak, models, floor};
  EACH_TILE(values->size, SCORED) {
    const f32 *some = AT(f32, values) + first, *whole = AT(f32, total) + first;
    f32 *scores = AT(f32, out) + first;
    mark_scoring(some, whole, by, peak, room->marks, scores, size);
    i64 found = list_places(room->marks, size, room->places);
    for (i64 i = 0; i < found; i++) {
      room->values[i] = some[room->places[i]];
      room->totals[i] = whole[room->places[i]];
    }
    EACH(found, {
      Floats score = score_of(load(room->values + i, count), load(room->totals + i, count), by);
      store(room->scores + i, score, count);
    });
    for (i64 i = 0; i < found; i++) scores[room->places[i]] = room->scores[i];
  }
}

ENTRY(void, add_shares)(const Array *scores, const Array *values, f32 weight, f32 cut, f32 top,
                        Array *above, Array *below) {
  Floats none = all_floats(0), one = all_floats(1);
  EACH(scores->size, {
    Floats score = load(AT(f32, scores) + i, count), over = score - cut, share;
    if (top == cut) share = masked(one, is_equal(score, all_floats(top)) & is_less(none, score));
    else share = choose_floats(is_less(none, over), over, none) / (top - cut);
    Floats term = masked(share * (load(AT(f32, values) + i, count) * weight), is_less(none, share));
    store(AT(f32, above) + i, load(AT(f32, above) + i, count) + term, count);
    store(AT(f32, below) + i, load(AT(f32, below) + i, count) + share, count);
  });
}
