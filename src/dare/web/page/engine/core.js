// The package's own arithmetic, by src/core/page.c: a call copies arrays into the core's memory, and
// what was written out of it. Weights are the bits of BF16.
import { instantiate } from "../loading.js";

const TILE = 8192;  // elements; masks fill whole ones
const FIELDS = 11;  // of an `Operand`
const WEIGHT = 9;  // the first of them that is not an integer
const PAGE_BYTES = 65536;

let core;

/** Load the core; nothing else here works before. */
export async function openCore() {
  core ??= await instantiate("engine/core.wasm");
}

/** Call a function of the core with the addresses of arrays; return the last, which it writes. */
function call(name, ...given) {
  let end = core.__heap_base.value;
  const places = given.map((value) => {
    if (!ArrayBuffer.isView(value)) return value;
    const at = Math.ceil(end / 64) * 64;
    end = at + value.byteLength;
    return at;
  });
  const missing = end - core.memory.buffer.byteLength;
  if (missing > 0) core.memory.grow(Math.ceil(missing / PAGE_BYTES));
  const views = given.map((value, at) => ArrayBuffer.isView(value) &&
    new value.constructor(core.memory.buffer, places[at], value.length));
  views.forEach((view, at) => { if (view) view.set(given[at]); });
  core[name](...places);
  const out = given.at(-1);
  out.set(views.at(-1));
  return out;
}

/** The elements of a tensor as float32. */
export const toFloats = ({ data }) =>
  call("decode", data, data.length, new Float32Array(data.length));

/** For each of the elements from the first on 255 if it is kept, and 0 if not. */
export function draw(size, mask) {
  const lanes = new Uint8Array(Math.ceil(size / TILE) * TILE);
  return call("draw", size, ...mask, lanes).subarray(0, size);
}

/**
 * The sum of models' changes, or what they elect. A model is { tuned, mask, band, weight, share }:
 * `Operand` and `Band` in src/core/merging.h say what the numbers mean.
 */
export function combine(base, models, elects = false) {
  const out = new Float32Array(base.length);
  return call("combine", base, ...packed(models, base.length), elects, base.length, out);
}

/** The band of a model's largest changes: those that are a share of what its mask keeps. */
export function bandOf(base, model, ratio) {
  const [tuned, operand, , figures] = packed([{ ...model, weight: 1 }], base.length);
  const values = new Float32Array(base.length);
  call("trim", base, tuned, ratio, figures, values, base.length, operand);
  return Array.from(operand.subarray(5, WEIGHT), Number);
}

function packed(models, size) {
  const tuned = new Uint16Array(models.length * size);
  const operands = new BigInt64Array(models.length * FIELDS);
  models.forEach(({ tuned: data, mask, band, weight, share = 1 }, row) => {
    tuned.set(data, row * size);
    operands.set([0, ...mask, ...band].map(BigInt), row * FIELDS);
    new Float64Array(operands.buffer).set([weight, share], row * FIELDS + WEIGHT);
  });
  return [tuned, operands, models.length, new BigInt64Array(4 * models.length)];
}

/** The total with weight·raw added. */
export const addScaled = (total, raw, weight) =>
  call("add_scaled", raw, weight, raw.length, total);

/** base + scale·merged as BF16; where nothing is changed the base's bits are kept. */
export const addToBase = (base, merged, scale) =>
  call("add_to_base", base, merged, scale, base.length, new Uint16Array(base.length));

/** Σ left·right, in the package's order for tensors of one chunk. */
export const sumProducts = (left, right) =>
  call("sum_products", left, right, left.length, new Float64Array(1))[0];
