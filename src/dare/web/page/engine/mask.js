// Mask v1: which elements of a delta are kept. docs/mask.md of the repository defines it.
import { blake2b } from "./blake2b.js";

const ROUNDS = 7;
const GROUP = 128;  // elements whose lanes come from the same calls
const CALLS = 8;
const TIE_BREAK = 1;  // third counter word of the calls that break ties
const WORD = 2 ** 32;

const laneWords = new Uint32Array(GROUP / 4);
const lanes = new Uint8Array(laneWords.buffer);
const tieWords = new Uint32Array(4);

/** For each of the elements of a tensor 1 if it is kept, and 0 if not. */
export function keepMask(name, size, dropRate, seed) {
  const text = new TextEncoder().encode(`dare mask v1\n${seed}\n${name}`);
  const [k0, k1] = new Uint32Array(blake2b(text, 8).buffer, 0, 2);
  const threshold = keepThreshold(dropRate);
  const high = Math.floor(threshold / WORD);
  const low = threshold % WORD;
  const keep = new Uint8Array(size);
  for (let group = 0; group < size; group += GROUP) {
    const call = (group / GROUP) * CALLS;
    for (let i = 0; i < CALLS; i++) philox(call + i, 0, k0, k1, laneWords, i, CALLS);
    const end = Math.min(GROUP, size - group);
    for (let i = 0; i < end; i++) keep[group + i] = (lanes[i] - high) >>> 31;  // without a branch
    for (let i = lanes.indexOf(high); 0 <= i && i < end; i = lanes.indexOf(high, i + 1)) {
      philox(group + i, TIE_BREAK, k0, k1, tieWords, 0, 1);
      keep[group + i] = tieWords[0] < low ? 1 : 0;
    }
  }
  return keep;
}

/** The share that is kept, as a whole number of 2⁻⁴⁰: the nearest, the even one of two as near. */
export function keepThreshold(dropRate) {
  const share = (1 - dropRate) * 2 ** 40;
  const below = Math.floor(share);
  const rest = share - below;
  return rest > 0.5 || (rest === 0.5 && below % 2 !== 0) ? below + 1 : below;
}

/** Philox4x32 with seven rounds; its words go to `out` from `place` on, `stride` apart. */
function philox(c0, c2, k0, k1, out, place, stride) {
  let a = c0 | 0;
  let b = 0;
  let c = c2 | 0;
  let d = 0;
  let key0 = k0 | 0;
  let key1 = k1 | 0;
  for (let round = 0; round < ROUNDS; round++) {
    const high0 = upperProduct(a, 0xd251, 0x1f53);
    const high1 = upperProduct(c, 0xcd9e, 0x8d57);
    const low0 = Math.imul(a, 0xd2511f53);
    const low1 = Math.imul(c, 0xcd9e8d57);
    a = high1 ^ b ^ key0;
    b = low1;
    c = high0 ^ d ^ key1;
    d = low0;
    key0 = (key0 + 0x9e3779b9) | 0;
    key1 = (key1 + 0xbb67ae85) | 0;
  }
  out[place] = a;
  out[place + stride] = b;
  out[place + 2 * stride] = c;
  out[place + 3 * stride] = d;
}

/** The upper 32 bits of a product, of which one factor is given by its two halves. */
function upperProduct(word, high, low) {
  const upper = word >>> 16;
  const lower = word & 0xffff;
  const middle = (Math.imul(upper, low) + (Math.imul(lower, low) >>> 16)) | 0;
  const other = (Math.imul(lower, high) + (middle & 0xffff)) | 0;
  return (Math.imul(upper, high) + (middle >>> 16) + (other >>> 16)) | 0;
}
