// The entries that the playground's page calls, compiled to WebAssembly by `make wasm`. Its models
// are BF16, and each tensor is one chunk that begins at element 0. engine/core.js calls them.
#define ENTRY(result, name) static inline result core_##name
#define FOR_KIND(kind, ...) do { const enum Kind K = BF16; (void)(kind); __VA_ARGS__; } while (0)
#include "lanes.h"
#include "memory.h"
#include "elements.h"
#include "mask.h"
#include "merging.h"
#include "products.h"

#define PAGE(result) __attribute__((visibility("default"))) result
#define ARRAY(data, kind) ((Array){(void *)(data), size, size, kind})

static CombineRoom room;
_Static_assert(sizeof(Operand) == 11 * sizeof(i64), "engine/core.js writes it field by field");

PAGE(void) decode(const u16 *raw, i32 size, f32 *out) {
  core_decode(&ARRAY(raw, BF16), &ARRAY(out, F32));
}

// There is room for whole tiles of lanes.
PAGE(void) draw(i32 size, u32 key0, u32 key1, u32 high, u32 low, u8 *lanes) {
  core_draw(&ARRAY(lanes, F8_E5M2), size, 0, key0, key1, high, low, &room);
}

// `tuned` are the elements of all models, one after the other; there are four figures of each.
PAGE(void) combine(const u16 *base, const u16 *tuned, Operand *models, i32 count, i64 *figures,
                   i32 elects, i32 size, f32 *out) {
  for (i32 number = 0; number < count; number++) models[number].tuned = tuned + number * size;
  Array from = ARRAY(base, BF16), to = ARRAY(out, F32);
  core_combine(&from, models, count, BF16, 0, elects, 0, size, &to, figures, &room);
}

INLINE i64 count_above(const f32 *values, i64 size, u32 limit) {
  Words above = all_words(0);
  EACH(size, above -= is_below(all_words(limit), magnitude_of(load(values + i, count))));
  return sum_of(above);
}

// Narrow a model's band to the largest of what is left: to a share of what its mask keeps. `values`
// gets what was left before, for which the weight must be 1.
PAGE(void) trim(const u16 *base, const u16 *tuned, f64 ratio, i64 *figures, f32 *values, i32 size,
                Operand *model) {
  combine(base, tuned, model, 1, figures, 0, size, values);
  i64 wanted = most_i64(1, (i64)(ratio * (f64)figures[2]));
  u32 cut = 0;  // the least magnitude that is kept, found bit by bit
  for (u32 bit = 1u << 30; bit; bit >>= 1) {
    if (count_above(values, size, (cut | bit) - 1) >= wanted) cut |= bit;
  }
  if (cut == 0) return;  // fewer are left
  i64 equals = wanted - count_above(values, size, cut), end = 0;
  for (; equals > 0; end++) equals -= (((const u32 *)values)[end] & MAGNITUDE) == cut;
  model->band = (Band){cut, end, MAGNITUDE, 0};
}

// total += weight·raw
PAGE(void) add_scaled(const u16 *raw, f32 weight, i32 size, f32 *total) {
  EACH(size, {
    Floats sum = load(total + i, count) + load_kind(BF16, raw, i, count) * weight;
    store(total + i, sum, count);
  });
}

PAGE(void) add_to_base(const u16 *raw, const f32 *merged, f32 scale, i32 size, u16 *out) {
  core_add_to_base(&ARRAY(raw, BF16), &ARRAY(merged, F32), scale, &ARRAY(out, BF16), &room);
}

PAGE(void) sum_products(const f32 *left, const f32 *right, i32 size, f64 *out) {
  *out = core_sum_products(&ARRAY(left, F32), &ARRAY(right, F32));
}
