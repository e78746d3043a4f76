// Stored numbers as float32 and back, as docs/numbers.md says: exact on the way in, on the way out
// one rounding to nearest even, and every NaN becomes the type's positive quiet one.

/** The types that are merged here. All others that are weights need the local engine. */
export const MERGED_TYPES = ["BF16", "F16", "F32"];
export const OTHER_WEIGHT_TYPES = ["F64", "F8_E4M3", "F8_E5M2"];

/** The elements of a tensor as float32. */
export function toFloats({ dtype, data }) {
  if (dtype === "F32") return data;
  if (dtype === "BF16") return fromBfloats(data);
  if (dtype === "F16") return fromHalves(data);
  throw new Error(`The type ${dtype} has no floats here.`);
}

const known = new WeakMap();  // by tensor, what is asked for again at every merge

/** The same, kept for the next time. */
export function keptFloats(tensor) {
  if (!known.has(tensor)) known.set(tensor, toFloats(tensor));
  return known.get(tensor);
}

/** Float32 numbers as elements of a type. */
export function fromFloats(values, dtype) {
  if (dtype === "F32") return values.map((value) => (value === value ? value : NaN));
  return dtype === "BF16" ? toBfloats(values) : toHalves(values);
}

function fromBfloats(data) {
  const floats = new Float32Array(data.length);
  const bits = new Uint32Array(floats.buffer);
  for (let i = 0; i < data.length; i++) bits[i] = data[i] << 16;
  return floats;
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

function fromHalves(data) {
  const floats = new Float32Array(data.length);
  for (let i = 0; i < data.length; i++) {
    const exponent = (data[i] >> 10) & 31;
    const fraction = data[i] & 1023;
    const magnitude =
      exponent === 0 ? fraction * 2 ** -24
      : exponent < 31 ? (1024 + fraction) * 2 ** (exponent - 25)
      : fraction ? NaN : Infinity;
    floats[i] = data[i] & 0x8000 ? -magnitude : magnitude;
  }
  return floats;
}

function toHalves(values) {
  const bits = bitsOf(values);
  const stored = new Uint16Array(values.length);
  for (let i = 0; i < values.length; i++) {
    const sign = (bits[i] >>> 16) & 0x8000;
    const magnitude = Math.abs(values[i]);
    if (!(magnitude < 65520)) stored[i] = magnitude >= 65520 ? sign | 0x7c00 : 0x7e00;
    else if (magnitude < 2 ** -14) stored[i] = sign | roundEven(magnitude * 2 ** 24);
    else {
      const word = bits[i] & 0x7fffffff;
      stored[i] = sign | ((word - 0x38000000 + 0xfff + ((word >>> 13) & 1)) >>> 13);
    }
  }
  return stored;
}

/** The nearest whole number, the even one of two that are as near. */
export function roundEven(value) {
  const below = Math.floor(value);
  const rest = value - below;
  return rest > 0.5 || (rest === 0.5 && below % 2 !== 0) ? below + 1 : below;
}
