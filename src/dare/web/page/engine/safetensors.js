// Reads safetensors files: eight bytes that say how long the header is, the header in JSON, data.

/** What the elements of each type are held in; BF16, F16 and float8 as the bits that are stored. */
export const ARRAYS = {
  F64: Float64Array,
  F32: Float32Array,
  F16: Uint16Array,
  BF16: Uint16Array,
  F8_E4M3: Uint8Array,
  F8_E5M2: Uint8Array,
  BOOL: Uint8Array,
  U8: Uint8Array,
  I8: Int8Array,
  U16: Uint16Array,
  I16: Int16Array,
  U32: Uint32Array,
  I32: Int32Array,
  U64: BigUint64Array,
  I64: BigInt64Array,
};

/** The tensors of a file as a Map from names to { dtype, shape, data }, in the header's order. */
export function readSafetensors(buffer) {
  const length = buffer.byteLength < 8 ? NaN : Number(new DataView(buffer).getBigUint64(0, true));
  if (!(8 + length <= buffer.byteLength)) throw new Error("This is not a safetensors file.");
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const tensors = new Map();
  for (const [name, { dtype, shape, data_offsets: offsets }] of Object.entries(header)) {
    if (name === "__metadata__") continue;
    const [start, end] = offsets.map((offset) => 8 + length + offset);
    tensors.set(name, { dtype, shape, data: elements(buffer, dtype, start, end, name) });
  }
  return tensors;
}

function elements(buffer, dtype, start, end, name) {
  const Elements = ARRAYS[dtype];
  if (!Elements) throw new Error(`${name}: the type ${dtype} is not known here.`);
  const size = (end - start) / Elements.BYTES_PER_ELEMENT;
  const isAligned = start % Elements.BYTES_PER_ELEMENT === 0;
  return isAligned ? new Elements(buffer, start, size) : new Elements(buffer.slice(start, end));
}
