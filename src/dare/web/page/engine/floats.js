// BF16 as float32 and back, as docs/numbers.md says: exact on the way in, on the way out one
// rounding to nearest even, and every NaN becomes the positive quiet one.

const known = new WeakMap();  // by tensor, what is asked for again at every merge

/** The elements of a tensor as float32. */
export function toFloats({ data }) {
  const floats = new Float32Array(data.length);
  const bits = bitsOf(floats);
  for (let i = 0; i < data.length; i++) bits[i] = data[i] << 16;
  return floats;
}

/** The same, kept for the next time. */
export function keptFloats(tensor) {
  if (!known.has(tensor)) known.set(tensor, toFloats(tensor));
  return known.get(tensor);
}

/** Float32 numbers as the bits of BF16. */
export function toBfloats(values) {
  const bits = bitsOf(values);
  const stored = new Uint16Array(values.length);
  for (let i = 0; i < bits.length; i++) {
    const word = bits[i];
    const isNaN = (word & 0x7fffffff) > 0x7f800000;
    stored[i] = isNaN ? 0x7fc0 : (word + 0x7fff + ((word >>> 16) & 1)) >>> 16;
  }
  return stored;
}

/** The bits of float32 numbers. */
export function bitsOf(values) {
  return new Uint32Array(values.buffer, values.byteOffset, values.length);
}
