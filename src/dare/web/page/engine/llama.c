// The arithmetic of llama.js, compiled to WebAssembly with SIMD by `make wasm`.
//
// All numbers are float32 and are added in a fixed order, so every browser computes the same.
// The caller owns the memory: all arrays are passed in, and nothing is kept here between calls.
//
// A matrix that rows are multiplied with is stored in panels of eight columns:
// [columns / 8][inputs][8]. So the innermost loop reads it from front to back, and four rows by
// eight columns of the product stay in registers. Columns are a multiple of eight.
#include <wasm_simd128.h>

#define EXPORT __attribute__((visibility("default")))
#define INLINE static inline __attribute__((always_inline))

enum { COLUMNS = 8, ROWS = 4 };
typedef v128_t floats4;

INLINE floats4 load(const float *from) { return wasm_v128_load(from); }
INLINE void store(float *to, floats4 values) { wasm_v128_store(to, values); }
INLINE floats4 all(float value) { return wasm_f32x4_splat(value); }

INLINE floats4 multiply_add(floats4 a, floats4 b, floats4 sum) {
  return wasm_f32x4_add(sum, wasm_f32x4_mul(a, b));
}

INLINE float sum_of(floats4 v) {
  return (wasm_f32x4_extract_lane(v, 0) + wasm_f32x4_extract_lane(v, 1)) +
         (wasm_f32x4_extract_lane(v, 2) + wasm_f32x4_extract_lane(v, 3));
}

// The highest number; what is not a number may be passed over.
INLINE float maximum(const float *numbers, int count) {
  floats4 most = load(numbers);
  for (int i = 4; i < count; i += 4) most = wasm_f32x4_pmax(most, load(numbers + i));
  most = wasm_f32x4_pmax(most, wasm_i32x4_shuffle(most, most, 2, 3, 0, 1));
  most = wasm_f32x4_pmax(most, wasm_i32x4_shuffle(most, most, 1, 0, 3, 2));
  return wasm_f32x4_extract_lane(most, 0);
}

// e to the power of x within 2 units in the last place, 0 for x below -87.33, infinity for x above
// 88.37. What is not a number stays so.
INLINE floats4 exponential(floats4 x) {
  const floats4 low = all(-87.33f), high = all(88.37f), shift = all(12582912);  // 1.5 · 2^23
  floats4 inside = wasm_f32x4_pmin(wasm_f32x4_pmax(x, low), high);
  // x = n ln 2 + r. Adding the shift rounds n to a whole number and leaves it in the lowest bits.
  floats4 shifted = multiply_add(inside, all(1.44269504f), shift);
  floats4 n = wasm_f32x4_sub(shifted, shift);
  floats4 r = multiply_add(n, all(-0.693359375f), inside);  // ln 2 in two parts
  r = multiply_add(n, all(2.12194440e-4f), r);
  floats4 sum = all(1.9875691500e-4f);  // e^r = 1 + r + r² · sum, by the coefficients of Cephes
  sum = multiply_add(sum, r, all(1.3981999507e-3f));
  sum = multiply_add(sum, r, all(8.3334519073e-3f));
  sum = multiply_add(sum, r, all(4.1665795894e-2f));
  sum = multiply_add(sum, r, all(1.6666665459e-1f));
  sum = multiply_add(sum, r, all(5.0000001201e-1f));
  sum = wasm_f32x4_add(multiply_add(sum, wasm_f32x4_mul(r, r), r), all(1));
  floats4 power = wasm_i32x4_add(wasm_i32x4_shl(shifted, 23), all(1));  // 2^n, by its exponent
  floats4 result = wasm_f32x4_mul(sum, power);
  result = wasm_v128_andnot(result, wasm_f32x4_lt(x, low));
  return wasm_v128_bitselect(all(__builtin_inff()), result, wasm_f32x4_gt(x, high));
}

// `rows` (a constant, so that all stays in registers) by eight numbers of a product.
INLINE void tile(int rows, const float *left, int stride, const float *panel, int inputs,
                 float *out, int out_stride, int adding) {
  floats4 sums[ROWS][2];
  for (int row = 0; row < rows; row++)
    for (int half = 0; half < 2; half++)
      sums[row][half] = adding ? load(out + row * out_stride + 4 * half) : all(0);
#pragma clang loop unroll_count(4)
  for (int input = 0; input < inputs; input++) {
    floats4 first = load(panel + COLUMNS * input), second = load(panel + COLUMNS * input + 4);
    for (int row = 0; row < rows; row++) {
      floats4 value = wasm_v128_load32_splat(left + row * stride + input);
      sums[row][0] = multiply_add(value, first, sums[row][0]);
      sums[row][1] = multiply_add(value, second, sums[row][1]);
    }
  }
  for (int row = 0; row < rows; row++)
    for (int half = 0; half < 2; half++)
      store(out + row * out_stride + 4 * half, sums[row][half]);
}

// Panels are `apart` floats apart: more than inputs · 8 where only the first inputs are meant.
INLINE void product(const float *left, int rows, int stride, const float *panels, int apart,
                    int inputs, int columns, float *out, int out_stride, int adding) {
  for (int column = 0; column < columns; column += COLUMNS, panels += apart) {
    int row = 0;
    for (; row + ROWS <= rows; row += ROWS)
      tile(ROWS, left + row * stride, stride, panels, inputs, out + row * out_stride + column,
           out_stride, adding);
    for (; row < rows; row++)
      tile(1, left + row * stride, stride, panels, inputs, out + row * out_stride + column,
           out_stride, adding);
  }
}

// Rows [outputs][inputs], as a model's file has them, to panels.
EXPORT void pack(const float *matrix, int outputs, int inputs, float *panels) {
  for (int output = 0; output < outputs; output += COLUMNS, matrix += COLUMNS * inputs)
    for (int input = 0; input < inputs; input++)
      for (int column = 0; column < COLUMNS; column++)
        *panels++ = matrix[column * inputs + input];
}

// out [rows][columns] = left [rows][stride] · panels
EXPORT void multiply(const float *left, int rows, int stride, const float *panels, int inputs,
                     int columns, float *out) {
  product(left, rows, stride, panels, COLUMNS * inputs, inputs, columns, out, columns, 0);
}

// out [rows][columns] += left [rows][stride] · panels
EXPORT void addProduct(const float *left, int rows, int stride, const float *panels, int inputs,
                       int columns, float *out) {
  product(left, rows, stride, panels, COLUMNS * inputs, inputs, columns, out, columns, 1);
}

// The embedding of each token.
EXPORT void embed(const unsigned char *tokens, int count, const float *table, int size,
                  float *out) {
  for (int at = 0; at < count; at++, out += size)
    for (int i = 0; i < size; i += 4) store(out + i, load(table + tokens[at] * size + i));
}

// Each row divided by the root of its mean square, times the weights.
EXPORT void normalize(const float *stream, int rows, int size, const float *weights,
                      float epsilon, float *out) {
  for (int row = 0; row < rows; row++, stream += size, out += size) {
    floats4 squares = all(0);
    for (int i = 0; i < size; i += 4)
      squares = multiply_add(load(stream + i), load(stream + i), squares);
    floats4 root = all(__builtin_sqrtf(sum_of(squares) / size + epsilon));
    for (int i = 0; i < size; i += 4)
      store(out + i, wasm_f32x4_mul(wasm_f32x4_div(load(stream + i), root), load(weights + i)));
  }
}

INLINE void rotate(float *head, int size, const float *cosine, const float *sine) {
  for (int i = 0, j = size / 2; i < size / 2; i++, j++) {
    float first = head[i], second = head[j];
    head[i] = -second * sine[i] + first * cosine[i];
    head[j] = first * sine[j] + second * cosine[j];
  }
}

// Turn queries and keys by their positions, and remember keys and values for attention.
// joined: [rows][positions][query, key, value][heads][size], the first at position `start`;
// keys: [rows][heads][capacity / 8][size][8]; values: [rows][heads][size / 8][capacity][8].
EXPORT void remember(float *joined, int rows, int positions, int start, int heads, int size,
                     const float *cosine, const float *sine, float *keys, float *values,
                     int capacity) {
  for (int row = 0; row < rows; row++)
    for (int at = start; at < start + positions; at++, joined += 3 * heads * size)
      for (int head = 0; head < heads; head++) {
        float *query = joined + head * size, *key = query + heads * size;
        const float *value = key + heads * size;
        int block = (row * heads + head) * size * capacity;
        rotate(query, size, cosine + at * size, sine + at * size);
        rotate(key, size, cosine + at * size, sine + at * size);
        for (int i = 0; i < size; i++) {
          keys[block + (at / COLUMNS * size + i) * COLUMNS + at % COLUMNS] = key[i];
          values[block + (i / COLUMNS * capacity + at) * COLUMNS + i % COLUMNS] = value[i];
        }
      }
}

// Scores to shares that sum to 1; those after the first `count`, up to `length`, become 0.
INLINE void softmax(float *scores, int count, int length, float scale) {
  for (int i = count; i < length; i++) scores[i] = -__builtin_inff();
  floats4 highest = all(scale * maximum(scores, length)), total = all(0);
  for (int i = 0; i < length; i += 4) {
    floats4 scaled = wasm_f32x4_mul(load(scores + i), all(scale));
    floats4 share = exponential(wasm_f32x4_sub(scaled, highest));
    store(scores + i, share);
    total = wasm_f32x4_add(total, share);
  }
  floats4 inverse = all(1 / sum_of(total));
  for (int i = 0; i < length; i += 4)
    store(scores + i, wasm_f32x4_mul(load(scores + i), inverse));
}

// Causal attention of the positions from `first` on: [rows][positions - first][heads][size].
// What `remember` has not written in keys and values is 0. scores: room for 4 · capacity.
EXPORT void attend(const float *joined, int rows, int positions, int start, int first, int heads,
                   int size, const float *keys, const float *values, int capacity, float *scores,
                   float *out) {
  int hidden = heads * size, block = size * capacity;
  float scale = 1 / __builtin_sqrtf(size);
  for (int row = 0; row < rows; row++, joined += positions * 3 * hidden)
    for (int head = 0; head < heads; head++, keys += block, values += block)
      for (int at = first; at < positions; at += ROWS) {
        int queries = positions - at < ROWS ? positions - at : ROWS;
        int length = (start + at + queries + COLUMNS - 1) / COLUMNS * COLUMNS;
        product(joined + at * 3 * hidden + head * size, queries, 3 * hidden, keys,
                COLUMNS * size, size, length, scores, capacity, 0);
        for (int i = 0; i < queries; i++)
          softmax(scores + i * capacity, start + at + i + 1, length, scale);
        product(scores, queries, capacity, values, COLUMNS * capacity, length, size,
                out + ((row * (positions - first)) + at - first) * hidden + head * size, hidden,
                0);
      }
}

// In each row [gate, up], the gate becomes silu(gate) · up.
EXPORT void gate(float *joined, int rows, int size) {
  for (int row = 0; row < rows; row++, joined += 2 * size)
    for (int i = 0; i < size; i += 4) {
      floats4 x = load(joined + i);
      floats4 open = wasm_f32x4_add(exponential(wasm_f32x4_neg(x)), all(1));
      store(joined + i, wasm_f32x4_mul(wasm_f32x4_div(x, open), load(joined + size + i)));
    }
}

// The place of the highest number in each row, or of the first that is not a number.
EXPORT void highest(const float *logits, int rows, int columns, int *out) {
  for (int row = 0; row < rows; row++, logits += columns) {
    int best = 0;
    for (int i = 1; i < columns && logits[best] == logits[best]; i++)
      if (!(logits[i] <= logits[best])) best = i;
    out[row] = best;
  }
}

// For each row its highest number, and the sum of all e^(number - highest).
EXPORT void totals(const float *logits, int rows, int columns, float *out) {
  for (int row = 0; row < rows; row++, logits += columns, out += 2) {
    out[0] = maximum(logits, columns);
    floats4 total = all(0);
    for (int i = 0; i < columns; i += 4)
      total = wasm_f32x4_add(total, exponential(wasm_f32x4_sub(load(logits + i), all(out[0]))));
    out[1] = sum_of(total);
  }
}
