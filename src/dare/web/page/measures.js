// What the page measures of a matrix: pure functions over arrays of numbers.

/**
 * DARE's two laws on one matrix: what is left of δ on average (1 with rescaling), and the size of
 * the noise as a multiple of that of δ (√(p/(1−p)) with rescaling).
 */
export function lawsOf(delta, after) {
  let [product, error, square] = [0, 0, 0];
  for (let at = 0; at < delta.length; at += 1) {
    product += after[at] * delta[at];
    error += (after[at] - delta[at]) ** 2;
    square += delta[at] ** 2;
  }
  return { average: product / square, noise: Math.sqrt(error / square) };
}

/** What the laws say at a drop rate. */
export function lawsAt(p, rescale) {
  return { average: rescale ? 1 : 1 - p, noise: Math.sqrt(rescale ? p / (1 - p) : p) };
}

/** How many elements a mask drops. */
export const droppedBy = (keep) => keep.filter((kept) => !kept).length;

/** Which share of the elements has each size, in bins that go from one power of two to the next. */
export function sizesOf(values, smallest, largest) {
  const first = Math.floor(Math.log2(smallest));
  const counts = new Array(Math.ceil(Math.log2(largest)) - first).fill(0);
  for (const value of values) {
    const bin = Math.floor(Math.log2(Math.abs(value))) - first;
    if (bin >= 0 && bin < counts.length) counts[bin] += 1;
  }
  return counts.map((count, bin) => ({
    from: 2 ** (first + bin),
    to: 2 ** (first + bin + 1),
    share: count / values.length,
  }));
}

/**
 * Where deltas meet and disagree: shares of all elements, the share of disagreements that coins
 * would give, and for each delta how much of its size the elected sign silences.
 */
export function conflictsOf(deltas, sign) {
  const size = sign.length;
  let [meeting, conflicting, chance] = [0, 0, 0];
  const all = deltas.map(() => 0);
  const silenced = deltas.map(() => 0);
  for (let at = 0; at < size; at += 1) {
    let [positive, negative] = [0, 0];
    for (let model = 0; model < deltas.length; model += 1) {
      const value = deltas[model][at];
      if (value > 0) positive += 1;
      if (value < 0) negative += 1;
      all[model] += Math.abs(value);
      if (value * sign[at] <= 0) silenced[model] += Math.abs(value);
    }
    const voters = positive + negative;
    if (voters > 1) {
      meeting += 1;
      chance += 1 - 2 ** (1 - voters);
    }
    if (positive && negative) conflicting += 1;
  }
  return {
    meeting: meeting / size,
    conflicting: conflicting / size,
    chance: chance / size,
    silenced: silenced.map((part, model) => (all[model] ? part / all[model] : 0)),
  };
}
