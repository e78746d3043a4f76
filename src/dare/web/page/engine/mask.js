// Mask v1: which elements of a delta are kept. docs/mask.md of the repository defines it.
import { blake2b } from "./blake2b.js";
import { roundEven } from "./floats.js";

const ROUNDS = 7;
const GROUP = 128;  // elements whose lanes come from the same calls
const CALLS = 8;
const TIE_BREAK = 1;  // third counter word of the calls that break ties
const WORD = 2 ** 32;

const laneWords = new Uint32Array(GROUP / 4);
const lanes = new Uint8Array(laneWords.buffer);
const tieWords = new Uint32Array(4);

/** For each of the elements start … start + size of a tensor 1 if it is kept, and 0 if not. */
export function keepMask(name, size, dropRate, seed, start = 0, draw = 0) {
  const [k0, k1] = maskKey(seed, name, draw);
  const threshold = keepThreshold(dropRate);
  const high = Math.floor(threshold / WORD);
  const low = threshold % WORD;
  const keep = new Uint8Array(size);
  for (let group = start - (start % GROUP); group < start + size; group += GROUP) {
    fillLanes((group / GROUP) * CALLS, k0, k1);
    const first = Math.max(0, start - group);
    const end = Math.min(GROUP, start + size - group);
    keepLow(keep, (group - start) | 0, first | 0, end | 0, high | 0);
    for (let i = lanes.indexOf(high, first); 0 <= i && i < end; i = lanes.indexOf(high, i + 1)) {
      keep[group - start + i] = tieWord(group + i, k0, k1) < low ? 1 : 0;
    }
  }
  return keep;
}

/** Keep what is below the threshold's first byte; without a branch, which nothing could foresee. */
function keepLow(keep, place, first, end, high) {
  for (let i = first; i < end; i++) keep[place + i] = (lanes[i] - high) >>> 31;
}

/** The two words that the masks of a tensor are drawn by. */
export function maskKey(seed, name, draw = 0) {
  const later = draw ? ` draw ${draw}` : "";
  const text = new TextEncoder().encode(`dare mask v1${later}\n${seed}\n${name}`);
  const digest = blake2b(text, 8);
  return new Uint32Array(digest.buffer, 0, 2);
}

/** The share that is kept, as a whole number of 2⁻⁴⁰. */
export function keepThreshold(dropRate) {
  return roundEven((1 - dropRate) * 2 ** 40);
}

/** One byte for each element of a group: all first words of its calls, then all second ones, … */
function fillLanes(call, k0, k1) {
  const above = Math.floor(call / WORD);
  for (let i = 0; i < CALLS; i++) philox(call + i, above, 0, 0, k0, k1, laneWords, i, CALLS);
}

function tieWord(element, k0, k1) {
  philox(element, Math.floor(element / WORD), TIE_BREAK, 0, k0, k1, tieWords, 0, 1);
  return tieWords[0];
}

/** Philox4x32 with seven rounds; its words go to `out` from `place` on, `stride` apart. */
export function philox(c0, c1, c2, c3, k0, k1, out, place, stride) {
  let a = c0 | 0;
  let b = c1 | 0;
  let c = c2 | 0;
  let d = c3 | 0;
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
