// Mask v1: which elements of a delta are kept. docs/mask.md of the repository defines it.
import { blake2b } from "./blake2b.js";
import { draw } from "./core.js";

const WORD = 2 ** 32;
export const KEEP_ALL = [0, 0, 256, 0];

/** For each of the elements of a tensor 255 if it is kept, and 0 if not. */
export function keepMask(name, size, dropRate, seed) {
  const mask = maskOf(name, dropRate, seed);
  return mask[2] < 256 ? draw(size, mask) : new Uint8Array(size).fill(255);
}

/** The two words of the key, and the threshold: its part for an element's byte, and for ties. */
export function maskOf(name, dropRate, seed) {
  const text = new TextEncoder().encode(`dare mask v1\n${seed}\n${name}`);
  const threshold = keepThreshold(dropRate);
  const key = new Uint32Array(blake2b(text, 8).buffer, 0, 2);
  return [...key, Math.floor(threshold / WORD), threshold % WORD];
}

/** The share that is kept, as a whole number of 2⁻⁴⁰: the nearest, the even one of two as near. */
export function keepThreshold(dropRate) {
  const share = (1 - dropRate) * 2 ** 40;
  const below = Math.floor(share);
  const rest = share - below;
  return rest > 0.5 || (rest === 0.5 && below % 2 !== 0) ? below + 1 : below;
}
