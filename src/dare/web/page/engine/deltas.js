// What is done to the delta of one model: take it, drop some of it, add it to something.
// Every operation rounds once to float32. A sum or product of two float32 numbers that is computed
// in float64 and then rounded to float32 is the one that float32 arithmetic gives. Loops have no
// branches that depend on chance: a wrong guess takes as long as twenty multiplications.
import { bitsOf } from "./floats.js";

const round = Math.fround;

/** tuned − base; an infinity that both have is no change. */
export function deltaOf(tuned, base) {
  const delta = new Float32Array(base.length);
  for (let i = 0; i < base.length; i++) {
    const change = tuned[i] - base[i];
    delta[i] = change !== change && tuned[i] === base[i] ? 0 : change;
  }
  return delta;
}

/** The delta where `keep` is 1, times the factor; elsewhere zero, whatever stood there. */
export function dropped(delta, keep, factor = 1) {
  const kept = new Float32Array(delta.length);
  const bits = bitsOf(delta);
  const keptBits = bitsOf(kept);
  for (let i = 0; i < bits.length; i++) keptBits[i] = bits[i] & -keep[i];
  const scale = round(factor);
  if (scale === 1) return kept;
  for (let i = 0; i < kept.length; i++) kept[i] *= scale;
  return kept;
}

/** base + factor·values, put into `sum`. */
export function added(base, values, factor, sum = new Float32Array(base.length)) {
  const scale = round(factor);
  for (let i = 0; i < base.length; i++) sum[i] = base[i] + round(scale * values[i]);
  return sum;
}
