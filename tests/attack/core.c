// Calls every entry of the library, with one lane, under gcc's sanitizers: odd and empty sizes,
// weights at odd addresses, buffers that end where they must, results in place of arguments.
//
//     core ROUNDS SEED      call all of them
//     core                  print their names
//     core overflow|shift   commit a fault that the sanitizers must find, or silence means nothing
//
// A new entry is one line of `ENTRIES`. `n` is a size, `a` an array of so many floats, `w` of
// weights; there are some `models`, `pairs` of them, and `columns` of rows.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../src/core/core.c"

enum { MOST = 64, CHUNK = 1 << 13 };

static void *taken[MOST];  // of one call
static int count_of_taken;
static unsigned long long state;
static enum Kind kind;  // of most weights of one call
static i64 columns, models, pairs;
static void *room;

static u32 any(void) {
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return (u32)(state >> 32);
}
static i64 below(i64 end) { return ((i64)any() << 20 ^ any()) % end; }
static i64 magnitude(void) { return below(4) ? below(0x80000000ll) : 0; }
static f32 scale(void) { return (f32)below(9) / 2 - 2; }
static i64 odd_size(void) {
  return below(3) ? below(200) : below(3) ? CHUNK - 3 + below(7) : below(4 * CHUNK);
}

// Memory with nothing behind it, full of all kinds of numbers, or of few.
static u8 *take(i64 bytes, i64 offset) {
  u8 *found = (u8 *)malloc((size_t)(bytes + offset)) + offset;
  if (count_of_taken == MOST) abort();
  taken[count_of_taken++] = found - offset;
  u32 few = below(2) ? 0x01010101u : ~0u;
  for (i64 i = 0; i < bytes; i++) found[i] = (u8)((any() & few) >> (i % 4 * 8));
  return found;
}
static Array *array(i64 size, i64 width, i64 code, i64 offset) {
  Array *found = (Array *)take(sizeof(Array), 0);
  Array made = {take(size * width, offset), size, size, code};
  *found = made;
  return found;
}
static Array *of_kind(i64 size, enum Kind which) {
  i64 offset = below(2) ? 0 : below(8);  // as in a file
  return array(size, width_of(which), which, offset);
}
static Array *weights(i64 size) { return of_kind(size, kind); }
static Array *others(i64 size) { return of_kind(size, (enum Kind)below(6)); }
static Array *floats(i64 size) { return array(size, 4, F32, 0); }
static Array *lanes(i64 size) {
  Array *found = array(size, 1, -1, 0);
  for (i64 i = 0; i < size; i++) AT(u8, found)[i] = below(2) ? 255 : 0;
  return found;
}
static Array *numbers(i64 size, i64 width, i64 end) {
  Array *found = array(size, width, width == 4 ? 6 : 7, 0);
  for (i64 i = 0; i < size; i++) {
    if (width == 4) AT(u32, found)[i] = (u32)below(end);
    else AT(i64, found)[i] = below(end);
  }
  return found;
}
static Array *zeros(i64 size, i64 width) { return numbers(size, width, 1); }
static Array *in_rows(Array *found, i64 length) {
  found->columns = length;
  return found;
}
static i64 whole_rows(i64 n) { return n / columns * columns; }
static i64 *integers(i64 size) { return (i64 *)memset(take(8 * size, 0), 0, (size_t)(8 * size)); }
static i64 tiles(i64 size) { return (size + TILE - 1) / TILE * TILE; }

static Operand *operands(i64 count, i64 size) {
  Operand *found = (Operand *)take(count * (i64)sizeof(Operand), 0);
  for (i64 i = 0; i < count; i++) {
    Band band = {below(2) ? -1 : magnitude(), below(300), magnitude(), below(300)};
    Operand made = {weights(size)->data, any(), any(), below(257), any(), band, scale(), scale()};
    found[i] = made;
  }
  return found;
}

static Array *raws(i64 size) {
  Array *found = (Array *)take(models * (i64)sizeof(Array), 0);
  for (i64 i = 0; i < models; i++) found[i] = *others(size);
  return found;
}
static Array *pieces(i64 count) {
  Array *found = array(2 * count, 8, -1, 0);
  for (i64 i = 0; i < count; i++) {
    i64 size = 241 + below(3000);
    Piece made = {take(size, below(8)), size};
    AT(Piece, found)[i] = made;
  }
  return found;
}
static Array *codes(i64 n, i64 bits) { return array((n * bits + 7) / 8, 1, -1, 0); }
static Array *scales(i64 n) { return array((n + SCALE_GROUP - 1) / SCALE_GROUP, 2, BF16, 0); }
static Array *matrix(i64 n, i64 rank, i64 by_row) {
  i64 rows = (n + columns - 1) / columns + 1;
  return by_row ? in_rows(floats(rows * rank), rank) : in_rows(floats(rank * columns), columns);
}

static void *bytes(i64 size) { return take(size, 0); }

static Job job(i64 size) {
  Array *base = others(size), *out = others(size);
  i64 chunks = tiles(size) / CHUNK;
  u8 *are_known = (u8 *)take(models + 1, 0);
  for (i64 i = 0; i <= models; i++) are_known[i] = (u8)below(2);
  Job made = {base->data, base->kind, 128 * below(99), size, operands(models, size), models, kind,
              below(2), scale(), out->data, out->kind, are_known, integers(4 * models * chunks),
              (Digest *)take(16 * (models + 2) * chunks, 0), 0};
  return made;
}
static Job *jobs(i64 size) {
  Job *found = (Job *)take(2 * (i64)sizeof(Job), 0), one = job(size), other = job(odd_size());
  found[0] = one, found[1] = other;
  return found;
}

// The entry, a name for this way to call it, and the arguments.
#define ENTRIES                                                                                    \
  CALL(decode, decode, (weights(n), a))                                                            \
  CALL(encode, encode, (a, weights(n)))                                                            \
  CALL(delta, delta, (weights(n), floats(n), lanes(n), a, magnitude(), integers(2)))               \
  CALL(delta, delta_in_place, (weights(n), a, lanes(n), a, magnitude(), integers(2)))              \
  CALL(add_to_base, add_to_base, (weights(n), a, scale(), weights(n), room))                       \
  CALL(add_to_base, add_to_others, (weights(n), a, scale(), others(n), room))                      \
  CALL(draw, draw, (lanes(tiles(n)), n, 128 * below(99), any(), any(), below(256), any(), room))   \
  CALL(keep_lanes, keep_lanes, (a, lanes(n)))                                                      \
  CALL(keep_band, keep_band,                                                                       \
       (weights(n), a, lanes(n), below(9), magnitude(), below(300), magnitude(), below(300)))      \
  CALL(add_scaled, add_scaled, (a, floats(n), scale()))                                            \
  CALL(add_scaled, add_to_itself, (a, a, scale()))                                                 \
  CALL(vote, vote, (floats(4 * n), a, scale(), scale()))                                           \
  CALL(elect, elect, (floats(4 * n), floats(n), a))                                                \
  CALL(elect, elect_in_place, (floats(4 * n), a, a))                                               \
  CALL(combine, combine,                                                                           \
       (weights(n), operands(3, n), 3, kind, 128 * below(99), below(2), magnitude(), CHUNK, a,     \
        integers(12 * (tiles(n) / CHUNK)), room))                                                  \
  CALL(merge, merge,                                                                               \
       (jobs(n), 2, magnitude(), CHUNK, bytes(ROOM_BYTES + (models + 2) * (i64)sizeof(Hash))))     \
  CALL(collect_keys, collect_keys,                                                                 \
       (w, others(n + below(9)), lanes(n + below(9)), magnitude(), magnitude(), below(99),         \
        array(below(n + 1), 8, 7, 0), numbers(2, 8, 99), room))                                    \
  CALL(count_bins, count_bins,                                                                     \
       (w, weights(n), lanes(n), magnitude(), 0, zeros(1, 8), zeros(1, 4), zeros(2, 8), room))     \
  CALL(count_bins, count_others,                                                                   \
       (weights(n), others(n), lanes(n), magnitude(), 15, zeros(columns, 8), zeros(columns, 4),    \
        zeros(2, 8), room))                                                                        \
  CALL(add_extremes, add_extremes, (floats(n), scale(), a, floats(n), floats(n)))                  \
  CALL(elect_extremes, elect_extremes, (a, floats(n), floats(n)))                                  \
  CALL(count_needing, count_needing, (a, scale(), floats(n), scale(), numbers(n, 4, 9)))           \
  CALL(count_needing, count_itself, (a, scale(), a, scale(), numbers(n, 4, 9)))                    \
  CALL(keep_needed, keep_needed, (a, numbers(n, 4, 9), below(5)))                                  \
  CALL(multiply_kept, multiply_kept, (a, floats(n)))                                               \
  CALL(sum_products, sum_products, (a, floats(n)))                                                 \
  CALL(sum_products, sum_squares, (a, a))                                                          \
  CALL(add_products, add_by_column,                                                                \
       (a, floats(n), below(99), columns, 1, zeros(columns, 8), room))                             \
  CALL(add_products, add_by_row,                                                                   \
       (a, floats(n), below(columns), columns, 0, zeros(n / columns + 2, 8), room))                \
  CALL(low_rank, low_rank,                                                                         \
       (matrix(n, models, 1), matrix(n, models, 0), below(columns), scale(), a))                   \
  CALL(balance_scores, balance_scores,                                                             \
       (floats(n), floats(n), scale(), 1, (f64)models, scale() / 9, a, room))                      \
  CALL(add_shares, add_shares, (a, floats(n), scale(), scale(), scale(), floats(n), floats(n)))    \
  CALL(select, select, (w, lanes(n), weights(below(n + 1)), width_of(kind), room))                 \
  CALL(expand, expand, (weights(below(n + 9)), lanes(n), w, width_of(kind), room))                 \
  CALL(quantise, quantise_to_4, (a, 4, codes(n, 4), scales(n)))                                    \
  CALL(quantise, quantise_to_2, (a, 2, codes(n, 2), scales(n)))                                    \
  CALL(dequantise, dequantise_8, (codes(n, 8), scales(n), 8, a))                                   \
  CALL(dequantise, dequantise_4, (codes(n, 4), scales(n), 4, a))                                   \
  CALL(dequantise, dequantise_2, (codes(n, 2), scales(n), 2, a))                                   \
  CALL(dequantise, dequantise_1, (codes(n, 1), scales(n), 1, a))                                   \
  CALL(apply_packed, apply_packed,                                                                 \
       (w, others(below(n + 9)), below(2), lanes(n), scale(), weights(n), weights(n), room))       \
  CALL(apply_packed, apply_in_place,                                                               \
       (w, weights(below(n + 9)), below(2), lanes(n), scale(), w, weights(below(n + 1)), room))    \
  CALL(digest_pieces, digest_pieces, (pieces(models), array(2 * models, 8, 7, 0)))                 \
  CALL(order_keys, order_keys, (a, lanes(n), array(n, 4, 6, 0)))                                   \
  CALL(rank_left, rank_left,                                                                       \
       (in_rows(numbers(whole_rows(n), 4, 1ll << below(33)), columns),                             \
        array(n, 4, 6, 0), bytes(16 * columns)))                                                   \
  CALL(select_ranks, select_ranks,                                                                 \
       (in_rows(numbers(whole_rows(n), 4 << below(2), 1ll << below(33)), columns),                 \
        numbers(columns + 1, 8, columns), numbers(columns + 1, 8, columns + 1),                    \
        floats(columns + 1), a, bytes(most_i64(16 << 10, 8 * columns))))                           \
  CALL(drop_by_rank, drop_by_rank,                                                                 \
       (a, lanes(n), columns, numbers(2 * columns, 4, columns), numbers(columns, 8, 1ll << 40),    \
        floats(columns), 128 * below(99), any(), any(), lanes(n), bytes(40 * (columns + 64))))     \
  CALL(draw_order, draw_order,                                                                     \
       (array(n, 8, 7, 0), 128 * below(99), any(), any(), below(2) ? columns : 1 + below(20),      \
        bytes(2 * n)))                                                                             \
  CALL(measure, measure,                                                                           \
       (others(n), raws(n), lanes(models), zeros(6 * models, 8), zeros(4 * models, 8),             \
        zeros(pairs, 8), zeros(2 * pairs, 8), zeros(2, 8), zeros(2, 8),                            \
        in_rows(zeros(2 * models * MAGNITUDE_BINS, 4), MAGNITUDE_BINS),                            \
        bytes(sizeof(Measuring) * (1 + models) + 8 * INTERLEAVED * (pairs + 1))))                  \
  CALL(sample, sample,                                                                             \
       (weights(n), others(n), below(2), SAMPLED * columns * below(99), columns,                   \
        floats((n + SAMPLED * columns - 1) / (SAMPLED * columns) * SAMPLED), room))                \
  CALL(compare_tops, compare_tops,                                                                 \
       (in_rows(floats(models * n), n), numbers(models, 4, INFINITE), zeros(models, 8),            \
        zeros(2 * pairs, 8), bytes(sizeof(Measuring) * models)))

#define CALL(entry, label, arguments)      \
  static void call_##label(i64 n) {        \
    Array *a = floats(n), *w = weights(n); \
    (void)a, (void)w;                      \
    JOIN(entry, LEVEL) arguments;          \
  }
ENTRIES
#undef CALL

static const struct {
  const char *entry;
  void (*call)(i64);
} CALLED[] = {
#define CALL(entry, label, arguments) {#entry, call_##label},
    ENTRIES};

// Faults, in the form that they would have.
static void overflow(Array *into) { EACH(into->size + 1, store(AT(f32, into) + i, 0, count)); }
static i32 shift(i32 value, i64 places) { return value << places; }

int main(int count, char **words) {
  int among = sizeof(CALLED) / sizeof(*CALLED);
  for (int i = 0; count == 1 && i < among; i++) puts(CALLED[i].entry);
  if (count == 2 && !strcmp(words[1], "overflow")) overflow(floats(count));
  if (count == 2 && !strcmp(words[1], "shift")) return shift(1, 31 + count);
  state = count == 3 ? strtoull(words[2], NULL, 10) : 0;
  for (long round = count == 3 ? atol(words[1]) : 0; round > 0; round--) {
    for (int i = 0; i < among; i++) {
      kind = (enum Kind)below(6);
      columns = 1 + below(below(4) ? below(2) ? 9 : 300 : 3000);
      models = 1 + below(4);
      pairs = models * (models - 1) / 2;
      room = bytes(ROOM_BYTES);
      CALLED[i].call(odd_size());
      while (count_of_taken) free(taken[--count_of_taken]);
    }
  }
  return 0;
}
