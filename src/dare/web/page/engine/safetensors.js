// Reads safetensors files: eight bytes that say how long the header is, the header in JSON, data.
// The playground's models are BF16 throughout, which is held as the bits that are stored.

/** The tensors of a file as a Map from names to { shape, data }, in the header's order. */
export function readSafetensors(buffer) {
  const length = buffer.byteLength < 8 ? NaN : Number(new DataView(buffer).getBigUint64(0, true));
  if (!(8 + length <= buffer.byteLength)) throw new Error("This is not a safetensors file.");
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const tensors = new Map();
  for (const [name, { dtype, shape, data_offsets: offsets }] of Object.entries(header)) {
    if (name === "__metadata__") continue;
    if (dtype !== "BF16") throw new Error(`${name}: the type ${dtype} is not known here.`);
    const [start, end] = offsets.map((offset) => 8 + length + offset);
    tensors.set(name, { shape, data: new Uint16Array(buffer.slice(start, end)) });
  }
  return tensors;
}
