// The package's own arithmetic, src/core: a call copies arrays into its memory, and what was written
// out of it. `reference.py` says what each function computes. Weights are the bits of BF16.
import { instantiate } from "../loading.js";

const TILE = 8192;  // elements; masks fill whole ones
const FIELDS = 11;  // of an `Operand`
const WEIGHT = 9;  // the first of them that is not an integer
const ROOM_BYTES = 512 * 1024;  // scratch memory
const KINDS = new Map([[Float32Array, 1n], [Uint16Array, 3n]]);  // as `Kind` in types.h
const BIN_BITS = 15;
const BINS = 1 << 16;
const INDEX_BITS = 33n;  // of keys, below a magnitude; of equals the first has the largest key
const LAST_INDEX = (1n << INDEX_BITS) - 1n;
const LARGEST = 0x7FFFFFFF;  // the bits of a magnitude
const PAGE_BYTES = 65536;

let core;
let end;  // of what is in the core's memory for the call that is being made

/** Load the core; nothing else here works before. */
export async function openCore() {
  core ??= await instantiate("engine/core.wasm");
}

function reserve(bytes) {
  const at = Math.ceil(end / 64) * 64;
  end = at + bytes;
  const missing = end - core.memory.buffer.byteLength;
  if (missing > 0) core.memory.grow(Math.ceil(missing / PAGE_BYTES));
  return at;
}

const inMemory = (view, at) => new view.constructor(core.memory.buffer, at, view.length);

function copyIn(view) {
  const at = reserve(view.byteLength);
  inMemory(view, at).set(view);
  return at;
}

const ROOM = () => reserve(ROOM_BYTES);

/**
 * Call a function of the core. Of an array it is given the description, of a function here what that
 * returns for the one which knows the addresses of arrays. What it wrote is copied back.
 */
function call(name, given, ...written) {
  end = core.__heap_base.value;
  const places = new Map();
  const addressOf = (view) => {
    if (!places.has(view)) places.set(view, copyIn(view));
    return places.get(view);
  };
  const described = (view) => copyIn(BigInt64Array.from([
    BigInt(addressOf(view)), BigInt(view.length), BigInt(view.length),
    KINDS.get(view.constructor) ?? -1n,
  ]));
  const found = core[`dare_${name}_any`](...given.map((value) => {
    if (typeof value === "function") return value(addressOf);
    return ArrayBuffer.isView(value) ? described(value) : value;
  }));
  written.forEach((view) => view.set(inMemory(view, places.get(view))));
  return found;
}

/** The elements of a tensor as float32. */
export function toFloats({ data }) {
  const out = new Float32Array(data.length);
  call("decode", [data, out], out);
  return out;
}

/** For each of the elements from the first on 255 if it is kept, and 0 if not. */
export function draw(size, mask) {
  const lanes = new Uint8Array(Math.ceil(size / TILE) * TILE);
  call("draw", [lanes, ...[size, 0, ...mask].map(BigInt), ROOM], lanes);
  return lanes.subarray(0, size);
}

/**
 * The sum of models' changes, or what they elect. A model is { tuned, mask, band, weight, share }:
 * `Operand` and `Band` in src/core/merging.h say what the numbers mean.
 */
export function combine(base, models, elects = false) {
  const out = new Float32Array(base.length);
  const operands = (addressOf) => {
    const rows = new BigInt64Array(models.length * FIELDS);
    models.forEach(({ tuned, mask, band, weight, share = 1 }, row) => {
      rows.set([addressOf(tuned), ...mask, ...band].map(BigInt), row * FIELDS);
      new Float64Array(rows.buffer).set([weight, share], row * FIELDS + WEIGHT);
    });
    return addressOf(rows);
  };
  const figures = (addressOf) => addressOf(new BigInt64Array(4 * models.length));
  const oneChunk = Math.max(base.length, 1);
  const numbers = [models.length, KINDS.get(Uint16Array), 0, elects, 0, oneChunk].map(BigInt);
  call("combine", [base, operands, ...numbers, out, figures, ROOM], out);
  return out;
}

/** The band of a model's largest changes: those that are a share of what its mask keeps. */
export function bandOf(base, { tuned, mask, band }, ratio) {
  const lanes = mask[2] < 256 ? draw(base.length, mask) : new Uint8Array(base.length).fill(255);
  const kept = lanes.reduce((sum, lane) => sum + (lane !== 0), 0);
  const [counts, seen] = [new BigInt64Array(BINS), new Uint32Array(BINS)];
  const some = () => new BigInt64Array(2);
  call("count_bins", [tuned, base, lanes, 0n, BigInt(BIN_BITS), counts, seen, some(), ROOM], counts);
  let wanted = Math.max(1, Math.floor(ratio * kept));
  let bin = BINS - 1;
  for (; bin >= 0 && wanted > counts[bin]; bin--) wanted -= Number(counts[bin]);
  if (bin < 0) return band;  // fewer are left
  const keys = new BigUint64Array(Number(counts[bin]));
  const [low, high] = [bin, bin + 1].map((edge) => BigInt(edge) << BigInt(BIN_BITS));
  call("collect_keys", [tuned, base, lanes, low || 1n, high - 1n, 0n, keys, some(), ROOM], keys);
  const last = keys.sort().at(-wanted);
  return [Number(last >> INDEX_BITS), Number(LAST_INDEX - (last & LAST_INDEX)) + 1, LARGEST, 0];
}

/** The total with weight·raw added. */
export function addScaled(total, raw, weight) {
  call("add_scaled", [total, toFloats({ data: raw }), weight], total);
  return total;
}

/** base + scale·merged as BF16; where nothing is changed the base's bits are kept. */
export function addToBase(base, merged, scale) {
  const out = new Uint16Array(base.length);
  call("add_to_base", [base, merged, scale, out, ROOM], out);
  return out;
}

/** Σ left·right, in the package's order for tensors of one chunk. */
export const sumProducts = (left, right) => call("sum_products", [left, right]);
