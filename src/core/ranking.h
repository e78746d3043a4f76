// Ranks of elements within rows. Of equals the first is the larger.

enum {
  SHORT_ROW = 64,     // rows up to this length are ranked by comparing all pairs
  MANY = 17,          // items of a bucket from which on it is asked whether they are all equal,
  TOO_MANY = 1024,    // and from which on they are sorted if they are not
  ROWS_AT_ONCE = 16,          // short rows that are ranked side by side
  DIGITS = 256,
  FEW = 16,           // neighbours of whom it is asked whether they have the same lane
  KEYS_32 = 6         // what `core.py` calls uint32
};
#define FOUND 0x80000000u  // marks ranks among magnitudes

INLINE u32 bits_below(u64 count) { return count < 2 ? 0 : 64 - (u32)__builtin_clzll(count - 1); }

// Sort items by their upper halves; those that have equal ones stay in order.
static void sort_items(u64 *items, i64 size, u64 *others) {
  u32 digits[DIGITS];
  u64 differ = 0;
  for (i64 i = 1; i < size; i++) differ |= items[i] ^ items[i - 1];
  for (u32 shift = 32; shift < 64; shift += 8) {
    if (!(differ >> shift & 255)) continue;
    for (int digit = 0; digit < DIGITS; digit++) digits[digit] = 0;
    for (i64 i = 0; i < size; i++) digits[items[i] >> shift & 255]++;
    u32 sum = 0;
    for (int digit = 0; digit < DIGITS; digit++) {
      u32 number = digits[digit];
      digits[digit] = sum;
      sum += number;
    }
    for (i64 i = 0; i < size; i++) others[digits[items[i] >> shift & 255]++] = items[i];
    for (i64 i = 0; i < size; i++) items[i] = others[i];
  }
}

// The rank among all of a row, of an element that has one among those that are left.
INLINE u64 spread(u64 rank, f64 step) {
  f64 whole = 3.0 * (1ull << 51);  // added and taken away, it leaves the nearest integer
  return (u64)(i64)((f64)(i64)rank * step + whole - whole);
}

ENTRY(void, rank_left)(const Array *keys, Array *out, void *room) {
  i64 columns = keys->columns, rows = columns ? keys->size / columns : 0;
  u64 *items = (u64 *)room, *others = items + columns;
  for (i64 row = 0; row < rows; row++) {
    const u32 *key = AT(u32, keys) + row * columns;
    u32 *rank = AT(u32, out) + row * columns;
    i64 left = 0;
    for (i64 i = columns - 1; i >= 0; i--) {  // so of equals the last comes first
      items[left] = (u64)key[i] << 32 | (u64)i;
      left += key[i] != 0;
      rank[i] = 0;
    }
    sort_items(items, left, others);
    f64 step = (f64)(columns - 1) / (f64)most_i64(left - 1, 1);
    for (i64 i = 0; i < left; i++) rank[(u32)items[i]] = (u32)spread((u64)i, step);
  }
}

ENTRY(void, order_keys)(const Array *values, const Array *left, Array *out) {
  EACH(out->size, {
    Words magnitude = magnitude_of(load(AT(f32, values) + i, count));
    store_words(AT(u32, out) + i, magnitude | load_8(AT(u8, left) + i, count) << 31, count);
  });
}

// ---------------------------------------------------------------- numbers that order neighbours

// Mark the places whose lane is the same as that of a neighbour at a distance.
INLINE void mark_same(const u8 *lanes, u8 *__restrict marks, i64 size, i64 distance) {
  for (i64 i = 0; i < size - distance; i++) marks[i] |= lanes[i] == lanes[i + distance];
  for (i64 i = distance; i < size; i++) marks[i] |= lanes[i] == lanes[i - distance];
}

ENTRY(void, draw_order)(Array *out, i64 start, i64 key0, i64 key1, i64 among, void *room) {
  i64 size = out->size, found = 0;
  u64 *numbers = AT(u64, out), elements[CALLS_PER_GROUP] = {0};
  u8 *lanes = (u8 *)room, *ties = lanes + size;
  u32 words[CALLS_PER_GROUP];
  draw_lanes(lanes, size, (u64)start, (u32)key0, (u32)key1);
  for (i64 i = 0; i < size; i++) {
    numbers[i] = (1ull << 40) - ((u64)lanes[i] << 32);
    ties[i] = i < among || i >= size - among || among > FEW;
  }
  for (i64 distance = 1; distance < least_i64(among, FEW + 1); distance++) {
    mark_same(lanes, ties, size, distance);
  }
  for (i64 i = 0; i < size; i++) {
    elements[found] = (u64)(start + i);
    found += ties[i];
    if (found < CALLS_PER_GROUP && i < size - 1) continue;
    break_ties(words, elements, (u32)key0, (u32)key1);
    for (i64 j = 0; j < found; j++) numbers[elements[j] - (u64)start] -= words[j];
    found = 0;
  }
}

// ---------------------------------------------------------------- which ranks are taken

typedef struct {
  const i64 *leasts, *ends;
  const f32 *factors;
} Taken;  // by how many of a row are left

// Keys of either width.
INLINE u64 key_at(const void *keys, i64 width, i64 i) {
  return width == 4 ? ((const u32 *)keys)[i] : ((const u64 *)keys)[i];
}

// Take ranks in some short rows side by side, by comparing all pairs of their columns.
INLINE void select_rows(const void *keys, i64 width, i64 first, i64 rows, i64 columns, int gone,
                        Taken taken, f32 *out, void *room) {
  u32 *narrow = (u32 *)room;
  u64 *wide = (u64 *)room;
  i32 *ranks = (i32 *)(wide + ROWS_AT_ONCE * SHORT_ROW), least[ROWS_AT_ONCE], end[ROWS_AT_ONCE];
  u32 factor[ROWS_AT_ONCE];
  for (i64 row = 0; row < rows; row++) {
    for (i64 i = 0; i < columns; i++) {
      u64 key = key_at(keys, width, (first + row) * columns + i);
      if (width == 4) narrow[ROWS_AT_ONCE * i + row] = (u32)key;
      else wide[ROWS_AT_ONCE * i + row] = key;
    }
  }
  for (i64 i = 0; i < ROWS_AT_ONCE * columns; i++) ranks[i] = 0;
  for (i64 i = 0; i < columns; i++) {
    for (i64 j = i + 1; j < columns; j++) {
      for (i64 row = 0; row < ROWS_AT_ONCE; row++) {
        i32 is_larger = key_at(room, width, ROWS_AT_ONCE * j + row) <= key_at(room, width, ROWS_AT_ONCE * i + row);
        ranks[ROWS_AT_ONCE * i + row] += is_larger;
        ranks[ROWS_AT_ONCE * j + row] += 1 - is_larger;
      }
    }
  }
  for (i64 row = 0; row < ROWS_AT_ONCE; row++) {
    i64 left = columns;
    for (i64 i = 0; gone && row < rows && i < columns; i++) {
      left -= key_at(room, width, ROWS_AT_ONCE * i + row) == 0;
    }
    least[row] = (i32)taken.leasts[left];
    end[row] = (i32)taken.ends[left];
    factor[row] = bits_of_f32(taken.factors[left]);
  }
  for (i64 row = 0; row < rows; row++) {
    for (i64 i = 0; i < columns; i++) {
      i32 rank = ranks[ROWS_AT_ONCE * i + row];
      u32 mask = 0 - (u32)((rank >= least[row]) & (rank < end[row]));
      out[(first + row) * columns + i] = f32_of_bits(factor[row] & mask);
    }
  }
}

// Do the same for rows of a length that is known to the compiler, with one entry of the tables.
INLINE void select_few(const void *keys, i64 width, i64 rows, i64 columns, Taken taken, f32 *out) {
  i32 least = (i32)taken.leasts[columns], end = (i32)taken.ends[columns];
  u32 factor = bits_of_f32(taken.factors[columns]);
  for (i64 first = 0; first < rows * columns; first += columns) {
    UNROLLED for (i64 i = 0; i < columns; i++) {
      u64 own = key_at(keys, width, first + i);
      i32 rank = 0;
      UNROLLED for (i64 j = 0; j < columns; j++) {
        u64 other = key_at(keys, width, first + j);
        rank += j < i ? other < own : j > i ? other <= own : 0;
      }
      out[first + i] = f32_of_bits(factor & (0 - (u32)((rank >= least) & (rank < end))));
    }
  }
}

INLINE void select_short(const void *keys, i64 width, i64 rows, i64 columns, int is_constant,
                         Taken taken, f32 *out, void *room) {
  int gone = 0;
  for (i64 i = 0; i < rows * columns; i++) gone |= key_at(keys, width, i) == 0;
  if (is_constant && !gone) {
    select_few(keys, width, rows, columns, taken, out);
  } else for (i64 row = 0; row < rows; row += ROWS_AT_ONCE) {
    i64 some = least_i64(ROWS_AT_ONCE, rows - row);
    select_rows(keys, width, row, some, columns, gone, taken, out, room);
  }
}

// A number that orders like the keys of a row, and of equals takes the first for larger.
INLINE u64 item_of(u64 key, u32 bits, i64 columns, i64 i) {
  return key << bits | (u64)(columns - 1 - i);
}

// The item of a rank, found by counting in ever smaller ranges; all ones above the last rank.
INLINE u64 item_at(const void *keys, i64 width, i64 first, i64 columns, i64 rank, u64 *items) {
  u32 digits[DIGITS], bits = bits_below((u64)columns);
  i64 size = columns;
  if (rank >= size) return ~0ull;
  for (i64 i = 0; i < size; i++) items[i] = item_of(key_at(keys, width, first + i), bits, size, i);
  while (size > 1) {
    u64 lowest = ~0ull, highest = 0;
    for (i64 i = 0; i < size; i++) {
      lowest = items[i] < lowest ? items[i] : lowest;
      highest = items[i] > highest ? items[i] : highest;
    }
    u32 used = bits_below(highest - lowest + 1), shift = used > 8 ? used - 8 : 0;
    for (int digit = 0; digit < DIGITS; digit++) digits[digit] = 0;
    for (i64 i = 0; i < size; i++) digits[(items[i] - lowest) >> shift]++;
    u64 digit = 0;
    for (; rank >= (i64)digits[digit]; digit++) rank -= digits[digit];
    i64 found = 0;
    for (i64 i = 0; i < size; i++) {
      u64 item = items[i];
      items[found] = item;
      found += (item - lowest) >> shift == digit;
    }
    size = found;
  }
  return items[0];
}

INLINE void select_long(const void *keys, i64 width, i64 first, i64 columns, Taken taken, f32 *out,
                        u64 *items) {
  i64 left = 0;
  for (i64 i = 0; i < columns; i++) left += key_at(keys, width, first + i) != 0;
  u64 low = item_at(keys, width, first, columns, taken.leasts[left], items);
  u64 high = item_at(keys, width, first, columns, taken.ends[left], items);
  u32 bits = bits_below((u64)columns);
  f32 factor = taken.factors[left];
  for (i64 i = 0; i < columns; i++) {
    u64 item = item_of(key_at(keys, width, first + i), bits, columns, i);
    out[first + i] = item >= low && item < high ? factor : 0;
  }
}

INLINE void select_of_width(const Array *keys, i64 width, Taken taken, f32 *out, u64 *items) {
  i64 columns = keys->columns, rows = columns ? keys->size / columns : 0;
  if (columns == 4) select_short(keys->data, width, rows, 4, 1, taken, out, items);
  else if (columns == 8) select_short(keys->data, width, rows, 8, 1, taken, out, items);
  else if (columns <= SHORT_ROW) select_short(keys->data, width, rows, columns, 0, taken, out, items);
  else for (i64 row = 0; row < rows; row++) {
    select_long(keys->data, width, row * columns, columns, taken, out, items);
  }
}

ENTRY(void, select_ranks)(const Array *keys, const Array *leasts, const Array *ends,
                          const Array *factors, Array *out, void *room) {
  Taken taken = {AT(i64, leasts), AT(i64, ends), AT(f32, factors)};
  if (keys->kind == KEYS_32) select_of_width(keys, 4, taken, AT(f32, out), (u64 *)room);
  else select_of_width(keys, 8, taken, AT(f32, out), (u64 *)room);
}

// ---------------------------------------------------------------- dropping by rank

// What a row's elements are ranked with. They are put into buckets, each of magnitudes above those
// of the one before: the first has zeros, the last what is not left.
typedef struct {
  u64 *items, *others;
  u32 *spots, *arranged, *chosen, *begins;
  i64 columns, left;
  u32 gone, spot_bits;
} Row;

INLINE Row row_in(void *room, i64 columns) {
  i64 size = columns + 64;
  u64 *items = (u64 *)room;
  u32 *words = (u32 *)(items + 2 * size);
  Row row = {items, items + size, words, words + size, words + 2 * size, words + 3 * size,
             columns, 0, 0, (u32)least_i64(13, 32 - bits_below((u64)columns))};
  return row;
}

// Above its bucket, a spot has how many of that come later in the row.
INLINE u32 bucket_of(const Row *row, u32 spot) { return spot & ((1u << row->spot_bits) - 1); }

// Find the buckets of a row's elements; return how many there are, without that of those not left.
// Buckets divide the bits of magnitudes to which a part of the largest was added, so that they are
// rather evenly filled. With that part the bits span almost four powers of two, and not one bit
// more, for the shift takes whole ones.
INLINE u32 find_buckets(const Row *row, const f32 *values, const u8 *left) {
  Words peak = all_words(0), finite = all_words(INFINITE - 1);
  EACH(row->columns, peak = max_words(peak, magnitude_of(load(values + i, count))));
  f32 largest = f32_of_bits(largest_of(min_words(peak, finite))), offset = largest * 0.07f;
  u32 low = bits_of_f32(offset), high = bits_of_f32(largest + offset);
  u32 bits = (u32)least_i64(bits_below((u64)row->columns / 4), row->spot_bits - 1);
  u32 used = bits_below((u64)(high - low) + 1);
  u32 shift = used > bits ? used - bits : 0;
  EACH(row->columns, {
    Words magnitude = min_words(magnitude_of(load(values + i, count)), finite);
    Words bucket = ((bits_of(floats_of(magnitude) + offset) - low) >> shift) + 1;
    bucket &= is_below(all_words(0), magnitude);
    Words gone = are_same(load_8(left + i, count), all_words(0));
    store_words(row->spots + i, choose(gone, all_words((1u << bits) + 1), bucket), count);
  });
  return (1u << bits) + 1;
}

// Where a long bucket's magnitudes are all equal, or very many, write their ranks in their places.
INLINE void settle(const Row *row, u32 begin, u32 end) {
  u32 *found = row->arranged, last = end - LANES;  // no bucket that is asked about is shorter
  Words first = all_words(found[begin]), differ = all_words(0);
  for (u32 at = begin; at < end; at += LANES) {
    differ |= load_words(found + (at < last ? at : last), LANES) ^ first;
  }
  if (!largest_of(differ)) {
    for (u32 at = begin; at < end; at += LANES) {
      u32 place = at < last ? at : last;
      store_words(found + place, places_from(place) | FOUND, LANES);
    }
  } else if (end - begin >= TOO_MANY) {
    for (u32 at = begin; at < end; at++) row->items[at - begin] = (u64)found[at] << 32 | at;
    sort_items(row->items, end - begin, row->others);
    for (u32 at = begin; at < end; at++) found[(u32)row->items[at - begin]] = at | FOUND;
  }
}

// Put the magnitudes of a row in the order of their buckets, and in a bucket from the last to the
// first, so that the place of an element is its rank where all in its bucket are equal.
INLINE void arrange(Row *row, const f32 *values, const u8 *left) {
  u32 buckets = find_buckets(row, values, left), sum = 0, many = 0;
  u32 *begins = row->begins, *spots = row->spots, *arranged = row->arranged;
  u32 spot_bits = row->spot_bits;
  EACH(buckets + 2, store_words(begins + i, all_words(0), count));
  for (i64 i = row->columns - 1; i >= 0; i--) spots[i] |= begins[spots[i]]++ << spot_bits;
  for (u32 number = 0; number <= buckets; number++) {
    u32 size = begins[number];
    begins[number] = sum;
    row->chosen[many] = number;
    many += size >= MANY;
    sum += size;
  }
  row->left = begins[buckets];
  row->gone = buckets;
  for (i64 i = 0; i < row->columns; i++) {
    u32 place = begins[bucket_of(row, spots[i])] + (spots[i] >> spot_bits);
    arranged[place] = bits_of_f32(values[i]) & MAGNITUDE;
  }
  for (u32 i = 0; i < many && row->chosen[i] < buckets; i++) {
    settle(row, begins[row->chosen[i]], begins[row->chosen[i] + 1]);
  }
}

// Count the smaller ones of a bucket for an element whose rank is not found yet.
INLINE u32 rank_in(const Row *row, u32 begin, u32 end, u32 place) {
  u32 own = row->arranged[place], rank = begin;
  for (u32 at = begin; at < end; at += LANES) {
    Words others = load_words(row->arranged + at, LANES), places = places_from(at);
    Words before = is_below(places, all_words(place));  // of equals those are smaller
    Words smaller = is_below(others, all_words(own) - before) & is_below(places, all_words(end));
    rank += (u32)__builtin_popcount(flags_of(smaller));
  }
  return rank;
}

typedef struct {
  const u64 *thresholds;
  const f32 *factors;
  u32 key0, key1;
} Dropping;

INLINE int is_kept(u64 element, u8 lane, u64 threshold, const Dropping *how) {
  if (lane != threshold >> 32) return lane < threshold >> 32;
  u64 elements[CALLS_PER_GROUP] = {element};  // once in 256 times
  u32 words[CALLS_PER_GROUP];
  break_ties(words, elements, how->key0, how->key1);
  return words[0] < (u32)threshold;
}

// `kept` has the elements' lanes at first.
static void drop_in_row(f32 *values, const u8 *left, u8 *kept, u64 start, const Dropping *how,
                        Row *row) {
  arrange(row, values, left);
  i64 columns = row->columns, last = columns - 1, steps = most_i64(row->left - 1, 1);
  f64 step = (f64)last / (f64)steps;
  u64 least = how->thresholds[0], rise = (how->thresholds[last] - least) / (u64)steps + 1;
  u64 most = how->thresholds[last] >> 32;
  i64 listed = 0, found = 0;
  for (i64 first = 0; first < columns; first += 64) {
    u64 word = 0;
    if (first + 64 <= columns) word = bits_at_most(kept + first, (u8)least_i64((i64)most, 255));
    else for (i64 i = first; i < columns; i++) word |= (u64)(kept[i] <= most) << (i - first);
    for (; word; word &= word - 1) {
      i64 i = first + __builtin_ctzll(word);
      u32 bucket = bucket_of(row, row->spots[i]);
      u64 end = row->begins[bucket + 1];
      row->chosen[listed] = (u32)i;
      listed += (kept[i] <= (least + end * rise) >> 32) & (bucket != row->gone);
    }
  }
  f32 *products = (f32 *)row->others;
  u32 *ranks = (u32 *)row->items, *waiting = ranks + columns;
  i64 waits = 0;
  for (i64 number = 0; number < listed; number++) {
    u32 i = row->chosen[number];
    u32 spot = row->spots[i], begin = row->begins[bucket_of(row, spot)];
    u32 own = row->arranged[begin + (spot >> row->spot_bits)];
    ranks[number] = own & ~FOUND;
    waiting[waits] = (u32)number;
    waits += own < FOUND;
  }
  for (i64 wait = 0; wait < waits; wait++) {
    u32 spot = row->spots[row->chosen[waiting[wait]]];
    const u32 *begin = row->begins + bucket_of(row, spot);
    ranks[waiting[wait]] = rank_in(row, begin[0], begin[1], begin[0] + (spot >> row->spot_bits));
  }
  for (i64 number = 0; number < listed; number++) {
    u32 i = row->chosen[number];
    u64 rank = spread(ranks[number], step);
    row->chosen[found] = i;
    products[found] = values[i] * how->factors[rank];
    found += is_kept(start + i, kept[i], how->thresholds[rank], how);
  }
  EACH(columns, {
    store(values + i, all_floats(0), count);
    store_8(kept + i, all_words(0), count);
  });
  for (i64 number = 0; number < found; number++) {
    values[row->chosen[number]] = products[number];
    kept[row->chosen[number]] = 1;
  }
}

ENTRY(void, drop_by_rank)(Array *values, const Array *left, i64 columns, const Array *edges,
                          const Array *thresholds, const Array *factors, i64 start, i64 key0,
                          i64 key1, Array *kept, void *room) {
  i64 size = values->size, head = least_i64((columns - start % columns) % columns, size);
  i64 tail = (size - head) % columns;
  Dropping how = {AT(u64, thresholds), AT(f32, factors), (u32)key0, (u32)key1};
  Row row = row_in(room, columns);
  draw_lanes(AT(u8, kept), size, (u64)start, how.key0, how.key1);
  for (i64 first = head; first < size - tail; first += columns) {
    drop_in_row(AT(f32, values) + first, AT(u8, left) + first, AT(u8, kept) + first,
                (u64)(start + first), &how, &row);
  }
  for (i64 edge = 0; edge < head + tail; edge++) {
    i64 i = edge < head ? edge : size - tail + edge - head;
    u32 rank = AT(u32, edges)[edge];
    u8 *lane = AT(u8, kept) + i;
    *lane = AT(u8, left)[i] && is_kept((u64)(start + i), *lane, how.thresholds[rank], &how);
    AT(f32, values)[i] = *lane ? AT(f32, values)[i] * how.factors[rank] : 0;
  }
}
