// Sums of products in a fixed order, and products of low rank.

enum { SUM_LANES = 64 };

INLINE Doubles product_at(const f32 *left, const f32 *right, i64 i, i64 count) {
  return to_doubles(load(left + i, count)) * to_doubles(load(right + i, count));
}

ENTRY(f64, sum_products)(const Array *left, const Array *right) {
  Doubles sums[SUM_LANES / LANES];
  f64 lanes[SUM_LANES], total = 0;
  i64 end = left->size % SUM_LANES, whole = left->size - end;
  for (i64 j = 0; j < SUM_LANES / LANES; j++) sums[j] = all_doubles(0);
  for (i64 first = 0; first < whole; first += SUM_LANES) {
    for (i64 j = 0; j < SUM_LANES / LANES; j++) {
      sums[j] += product_at(AT(f32, left), AT(f32, right), first + LANES * j, LANES);
    }
  }
  EACH(end, sums[i / LANES] += product_at(AT(f32, left), AT(f32, right), whole + i, count));
  for (i64 j = 0; j < SUM_LANES / LANES; j++) store_doubles(lanes + LANES * j, sums[j], LANES);
  for (i64 lane = 0; lane < SUM_LANES; lane++) total += lanes[lane];
  return total;
}

enum { ROWS = 8, COLUMNS = 256, PITCH = COLUMNS + 8 };  // rows are added up side by side

// Add the products in some rows to the rows' sums, each in order.
INLINE void add_rows(const f32 *left, const f32 *right, i64 rows, i64 columns, i64 size, f64 *sums,
                     f64 *products) {
  f64 totals[ROWS];
  for (i64 row = 0; row < rows; row++) totals[row] = sums[row];
  for (i64 first = 0; first < size; first += COLUMNS) {
    i64 width = least_i64(COLUMNS, size - first);
    for (i64 row = 0; row < rows; row++) {
      i64 at = row * columns + first;
      EACH(width, {
        Doubles product = product_at(left + at, right + at, i, count);
        store_doubles(products + PITCH * row + i, product, count);
      });
    }
    for (i64 i = 0; i < width; i++) {
      // `volatile`, or compilers would gather the rows' elements.
      const volatile f64 *terms = products + i;
      for (i64 row = 0; row < rows; row++) totals[row] += terms[PITCH * row];
    }
  }
  for (i64 row = 0; row < rows; row++) sums[row] = totals[row];
}

ENTRY(void, add_products)(const Array *left, const Array *right, i64 first, i64 columns,
                          i64 by_column, Array *sums, void *room) {
  i64 row = first / columns, column = first % columns;
  for (i64 done = 0, size; done < left->size; done += size, column = 0) {
    const f32 *one = AT(f32, left) + done, *other = AT(f32, right) + done;
    size = least_i64(columns - column, left->size - done);
    if (by_column) {
      f64 *to = AT(f64, sums) + column;
      EACH(size, {
        Doubles sum = load_doubles(to + i, count) + product_at(one, other, i, count);
        store_doubles(to + i, sum, count);
      });
    } else if (size == columns && left->size - done >= ROWS * columns) {
      size = ROWS * columns;
      add_rows(one, other, ROWS, columns, columns, AT(f64, sums) + row, (f64 *)room);
      row += ROWS;
    } else {
      add_rows(one, other, 1, columns, size, AT(f64, sums) + row++, (f64 *)room);
    }
  }
}

// Some columns, `count` at a time, of some rows of a product, summed in the order of the rank.
INLINE void multiply_rows(const f32 *left, const f32 *right, i64 rank, i64 columns, i64 rows,
                          f32 scale, f32 *out, i64 size) {
  EACH(size, {
    Floats sums[4] = {};
    for (i64 number = 0; number < rank; number++) {
      Floats factors = load(right + number * columns + i, count);
      for (i64 row = 0; row < rows; row++) sums[row] += factors * left[row * rank + number];
    }
    for (i64 row = 0; row < rows; row++) store(out + row * columns + i, sums[row] * scale, count);
  });
}

ENTRY(void, low_rank)(const Array *left, const Array *right, i64 first, f32 scale, Array *out) {
  i64 rank = left->columns, columns = right->columns;
  for (i64 done = 0, size; done < out->size; done += size) {
    i64 row = (first + done) / columns, column = (first + done) % columns;
    const f32 *factors = AT(f32, left) + row * rank, *others = AT(f32, right) + column;
    f32 *to = AT(f32, out) + done;
    if (column == 0 && out->size - done >= 4 * columns) {
      size = 4 * columns;
      multiply_rows(factors, others, rank, columns, 4, scale, to, columns);
    } else {
      size = least_i64(columns - column, out->size - done);
      multiply_rows(factors, others, rank, columns, 1, scale, to, size);
    }
  }
}
