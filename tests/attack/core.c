// Calls every entry of the library, with one lane, under gcc's sanitizers: odd and empty sizes, weights
// at odd addresses, buffers that end where they must, results in place of arguments.
//
//     core ROUNDS SEED      call all of them
//     core                  print their names
//     core overflow|shift   commit a fault that the sanitizers must find, or their silence means nothing
//
// A new entry is one line of `ENTRIES`. `n` is a size, `a` an array of so many floats.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../src/core/core.c"

enum { MOST = 64, CHUNK = 1 << 13 };

static void *taken[MOST];  // of one call
static int count_of_taken;
static unsigned long long state;
static enum Kind kind;  // of most weights of one call
static void *room;

static u32 any(void) {
  state = state * 6364136223846793005ull + 1442695040888963407ull;
  return (u32)(state >> 32);
}
static i64 below(i64 end) { return (i64)any() % end; }
static i64 magnitude(void) { return below(4) ? below(0x80000000ll) : 0; }
static f32 scale(void) { return (f32)below(9) / 2 - 2; }
static i64 odd_size(void) { return below(3) ? below(200) : below(3) ? CHUNK - 3 + below(7) : below(4 * CHUNK); }

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
        integers(12 * (tiles(n) / CHUNK)), room))

#define CALL(entry, label, arguments)  \
  static void call_##label(i64 n) {    \
    Array *a = floats(n);              \
    (void)a;                           \
    JOIN(entry, LEVEL) arguments;      \
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
      room = take(ROOM_BYTES, 0);
      CALLED[i].call(odd_size());
      while (count_of_taken) free(taken[--count_of_taken]);
    }
  }
  return 0;
}
