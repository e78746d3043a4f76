// What is done to the delta of one model: take it, drop some of it, add it to something.
// Every operation rounds once to float32. A sum or product of two float32 numbers that is computed
// in float64 and then rounded to float32 is the one that float32 arithmetic gives.

const round = Math.fround;

/** tuned − base; an infinity that both have is no change. */
export function deltaOf(tuned, base) {
  const delta = new Float32Array(base.length);
  for (let i = 0; i < base.length; i++) {
    const isSame = tuned[i] === base[i];
    delta[i] = isSame ? 0 : tuned[i] - base[i];
  }
  return delta;
}

/** The delta where `keep` is 1, times the factor; elsewhere zero, whatever stood there. */
export function dropped(delta, keep, factor = 1) {
  const scale = round(factor);
  const kept = new Float32Array(delta.length);
  for (let i = 0; i < delta.length; i++) {
    if (keep[i] !== 0) kept[i] = round(delta[i] * scale);
  }
  return kept;
}

/** base + factor·values. */
export function added(base, values, factor) {
  const scale = round(factor);
  const sum = new Float32Array(base.length);
  for (let i = 0; i < base.length; i++) sum[i] = base[i] + round(scale * values[i]);
  return sum;
}
