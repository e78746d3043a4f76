// What is made of the deltas of all models: a weighted sum, or the mean of those whose sign wins.
// Weights are rounded to float32 before they are used, and sums go in the order of the models.

const round = Math.fround;

/** Σ weight·delta; a model whose weight is 0 is left out, so that 0·∞ spreads no NaN. */
export function weightedSum(deltas, weights) {
  const total = new Float32Array(deltas[0].length);
  deltas.forEach((delta, model) => {
    if (weights[model] !== 0) addScaled(total, delta, round(weights[model]));
  });
  return total;
}

/** total += weight·values. */
export function addScaled(total, values, weight) {
  for (let i = 0; i < total.length; i++) total[i] += round(weight * values[i]);
}

/**
 * The sign that outweighs the other in each element, and the sum of the terms that have it, divided
 * by the shares of their models, which are the weights unless given. Where there is a `balance`,
 * its sign is elected.
 */
export function elect(deltas, weights, shares = weights.map(Math.abs), balance = null) {
  if (deltas.length > MOST_VOTERS) {
    throw new Error(`ties takes up to ${MOST_VOTERS} models here, and ${deltas.length} are given`);
  }
  const size = deltas[0].length;
  const merged = new Float32Array(size);
  const sign = new Int8Array(size);
  const divisors = divisorsOf(shares);
  for (let start = 0; start < size; start += BLOCK) {
    const count = Math.min(BLOCK, size - start);
    above.fill(0);
    below.fill(0);
    sides.fill(0);
    deltas.forEach((delta, model) => vote(delta, start, count, round(weights[model]), model));
    const hasNaN = weigh(start, count, balance);
    takeWinners(merged, sign, start, count, divisors);
    for (let j = 0; hasNaN && j < count; j++) {
      if (!Number.isNaN(above[j] + below[j])) continue;
      electOne(start + j, deltas, weights, shares, balance, merged, sign);
    }
  }
  return { merged, sign };
}

const MOST_VOTERS = 16;
const BLOCK = 2048;  // elements whose sums stay in the processor's nearest memory
const above = new Float32Array(BLOCK);  // the positive terms' sum, and the negative ones'
const below = new Float32Array(BLOCK);
const totals = new Float32Array(BLOCK);
const sides = new Int32Array(BLOCK);  // a bit for each model that is above, 16 higher: below
const [aboveBits, belowBits, totalBits] = [above, below, totals].map(
  (floats) => new Int32Array(floats.buffer),
);

/** What the sum of each set of models is divided by; the shares are added in the models' order. */
function divisorsOf(shares) {
  const divisors = new Float32Array(1 << shares.length);
  for (let set = 0; set < divisors.length; set++) {
    shares.forEach((share, model) => (divisors[set] += (set >> model) & 1 ? round(share) : 0));
    if (divisors[set] === 0) divisors[set] = 1;
  }
  return divisors;
}

/** Add the terms of a model to the sum of their sign. An infinite one makes the other sum NaN. */
function vote(delta, start, count, weight, model) {
  for (let j = 0; j < count; j++) {
    const value = round(weight * delta[start + j]);
    const magnitude = Math.abs(value);
    above[j] += (value + magnitude) * 0.5;
    below[j] += (value - magnitude) * 0.5;
    sides[j] |= ((value > 0) | ((value < 0) << MOST_VOTERS)) << model;
  }
}

/** Find what decides in each element; say whether some sum is NaN. */
function weigh(start, count, balance) {
  let hasNaN = false;
  for (let j = 0; j < count; j++) {
    const total = above[j] + below[j];
    totals[j] = balance === null ? total : signed(balance[start + j]);
    if (total !== total) hasNaN = true;
  }
  return hasNaN;
}

/** A balance that is NaN, as ∞ − ∞ is, elects what is negative. */
function signed(balance) {
  return balance === balance ? balance : -1;
}

/** Of each element the sum of the side that the total is on, divided; zero if it is on neither. */
function takeWinners(merged, sign, start, count, divisors) {
  for (let j = 0; j < count; j++) {
    const magnitude = totalBits[j] << 1;
    const isNonzero = (magnitude | -magnitude) >> 31;  // all bits or none
    const isNegative = totalBits[j] >> 31;
    const isAbove = isNonzero & ~isNegative;
    const isBelow = isNonzero & isNegative;
    sign[start + j] = isBelow - isAbove;
    sides[j] = (sides[j] & 0xffff & isAbove) | ((sides[j] >>> MOST_VOTERS) & isBelow);
    totalBits[j] = (aboveBits[j] & isAbove) | (belowBits[j] & isBelow);
  }
  for (let j = 0; j < count; j++) merged[start + j] = totals[j] / divisors[sides[j]];
}

/** One element in the plain way: where infinities or NaN are. */
function electOne(i, deltas, weights, shares, balance, merged, sign) {
  let [positive, negative, positiveShare, negativeShare] = [0, 0, 0, 0];
  deltas.forEach((delta, model) => {
    const value = round(round(weights[model]) * delta[i]);
    if (!(value < 0)) positive = round(positive + value);
    if (!(value > 0)) negative = round(negative + value);
    if (value > 0) positiveShare = round(positiveShare + round(shares[model]));
    if (value < 0) negativeShare = round(negativeShare + round(shares[model]));
  });
  const total = round(positive + negative);
  const elected = balance === null || total !== total ? total : signed(balance[i]);
  sign[i] = elected > 0 ? 1 : elected < 0 ? -1 : 0;
  merged[i] = elected > 0 ? positive / (positiveShare || 1)
    : elected < 0 ? negative / (negativeShare || 1)
    : elected;
}

/** The votes of the models whose term is positive, less those of the models whose is negative. */
export function countVotes(deltas, weights, votes) {
  const above = new Float32Array(deltas[0].length);
  const below = new Float32Array(deltas[0].length);
  deltas.forEach((delta, model) => {
    const weight = round(weights[model]);
    const vote = round(votes[model]);
    for (let i = 0; i < delta.length; i++) {
      const value = round(weight * delta[i]);
      if (value > 0) above[i] += vote;
      else if (value < 0) below[i] += vote;
    }
  });
  return above.map((votesAbove, i) => votesAbove - below[i]);
}
