// Masks of elements: 255 where one is kept, 0 where it is dropped.
#ifndef MASK_H
#define MASK_H

enum { PLACES_AT_ONCE = 8, TILE = 8192 };  // elements whose lanes, values and sums fit a close cache

// Write the places of a word's set bits, the lowest of which is `first`; return how many there are,
// with room for PLACES_AT_ONCE more. So many are written before it is asked for more: a branch for
// each would often be guessed wrongly. They are volatile, or compilers would make vectors of them,
// which take longer.
INLINE i64 list_bits(u64 left, i64 first, volatile u16 *places) {
  i64 found = __builtin_popcountll(left);
  for (int i = 0; found > 32 && i < 64; i++, left >>= 1) *places = (u16)(first + i), places += left & 1;
  do {
    for (int i = 0; i < PLACES_AT_ONCE; i++, left &= left - 1) {
      *places++ = (u16)(first + __builtin_ctzll(left | 1ull << 63));
    }
  } while (left);
  return found;
}

// The 64 bytes at an address as bits, set where one is not zero.
INLINE u64 bits_of_bytes(const u8 *from) { return ~bits_at_most(from, 0); }

// Room for what is drawn of a tile.
typedef struct {
  u8 ties[TILE + GROUP];
  u64 elements[TILE + CALLS_PER_GROUP];
  u32 words[TILE + CALLS_PER_GROUP];
} DrawRoom;

// Set the first `used` lanes of a tile to 255 where kept, all others to 0; return how many are.
static i64 draw_tile(u8 *lanes, i64 used, u64 start, u32 key0, u32 key1, u32 high, u32 low,
                     DrawRoom *room) {
  i64 groups = 0, found = 0, kept = 0;
  for (i64 first = 0; first < used; first += GROUP) {
    u8 *ties = room->ties + GROUP * groups;
    u64 some = compare_group(lanes + first, ties, start + (u64)first, key0, key1, (u8)high);
    room->words[groups] = (u32)first;
    groups += some != 0;  // two of five have one, so that a branch would often be guessed wrongly
  }
  for (i64 place = 0; place < GROUP * groups; place += 64) {
    u64 left = bits_of_bytes(room->ties + place);
    u64 first = start + room->words[place / GROUP] + (u64)(place % GROUP);
    for (; left; left &= left - 1) room->elements[found++] = first + (u64)__builtin_ctzll(left);
  }
  for (i64 i = found; i < found + CALLS_PER_GROUP; i++) room->elements[i] = 0;
  for (i64 i = 0; i < found; i += CALLS_PER_GROUP) {
    break_ties(room->words + i, room->elements + i, key0, key1);
  }
  for (i64 i = 0; i < found; i++) {
    lanes[room->elements[i] - start] = room->words[i] < low ? 255 : 0;
  }
  for (i64 i = used; i < TILE; i++) lanes[i] = 0;
  for (i64 first = 0; first < used; first += 64) kept += __builtin_popcountll(bits_of_bytes(lanes + first));
  return kept;
}

// Draw the lanes of elements from number `start` on, a multiple of GROUP: bytes to hold against the
// upper eight bits of a threshold.
static void draw_lanes(u8 *lanes, i64 size, u64 start, u32 key0, u32 key1) {
  u8 last[GROUP];
  i64 rest = size % GROUP, first = 0;
  for (; first < size - rest; first += GROUP) draw_group(lanes + first, start + (u64)first, key0, key1);
  if (rest) draw_group(last, start + (u64)first, key0, key1);
  for (i64 i = 0; i < rest; i++) lanes[first + i] = last[i];
}

#endif
