// Other ways to combine than sums and elections.

ENTRY(void, add_extremes)(const Array *values, f32 weight, Array *total, Array *most,
                          Array *least) {
  EACH(values->size, {
    Floats term = load(AT(f32, values) + i, count) * weight;
    Floats highest = load(AT(f32, most) + i, count), lowest = load(AT(f32, least) + i, count);
    Words nan = is_nan(term), above = is_less(highest, term) | nan;
    Words below = is_less(term, lowest) | nan;
    store(AT(f32, total) + i, load(AT(f32, total) + i, count) + term, count);
    store(AT(f32, most) + i, choose_floats(above, term, highest), count);
    store(AT(f32, least) + i, choose_floats(below, term, lowest), count);
  });
}

ENTRY(void, elect_extremes)(Array *total, const Array *most, const Array *least) {
  EACH(total->size, {
    Floats value = load(AT(f32, total) + i, count), none = all_floats(0);
    Floats above = load(AT(f32, most) + i, count), below = load(AT(f32, least) + i, count);
    Floats elected = choose_floats(is_less(none, value), above, value);
    store(AT(f32, total) + i, choose_floats(is_less(value, none), below, elected), count);
  });
}

ENTRY(void, count_needing)(const Array *values, f32 factor, const Array *total, f32 selectivity,
                           Array *counts) {
  EACH(values->size, {
    Floats own = load(AT(f32, values) + i, count) * factor;
    Floats others = magnitudes(load(AT(f32, total) + i, count) - own) * selectivity;
    Words sum = load_words(AT(u32, counts) + i, count) - is_at_most(others, magnitudes(own));
    store_words(AT(u32, counts) + i, sum, count);
  });
}

ENTRY(void, keep_needed)(Array *total, const Array *counts, i64 least) {
  EACH(total->size, {
    Floats value = load(AT(f32, total) + i, count);
    Words few = is_below(load_words(AT(u32, counts) + i, count), all_words((u32)least));
    store(AT(f32, total) + i, masked(value, ~few | is_nan(value)), count);
  });
}

ENTRY(void, multiply_kept)(Array *values, const Array *factors) {
  EACH(values->size, {
    Floats factor = load(AT(f32, factors) + i, count);
    Floats product = load(AT(f32, values) + i, count) * factor;
    store(AT(f32, values) + i, masked(product, ~is_equal(factor, all_floats(0))), count);
  });
}
