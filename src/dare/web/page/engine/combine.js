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
 * by the shares of their models, which are the weights unless given. Where there is a `balance`, its
 * sign is elected.
 */
export function elect(deltas, weights, shares = weights.map(Math.abs), balance = null) {
  const size = deltas[0].length;
  const merged = new Float32Array(size);
  const sign = new Int8Array(size);
  const factors = Float32Array.from(weights);
  const parts = Float32Array.from(shares);
  for (let i = 0; i < size; i++) {
    let above = round(0);
    let below = round(0);
    let aboveShare = round(0);
    let belowShare = round(0);
    for (let model = 0; model < deltas.length; model++) {
      const value = round(factors[model] * deltas[model][i]);
      if (value > 0) {
        above = round(above + value);
        aboveShare = round(aboveShare + parts[model]);
      } else if (value < 0) {
        below = round(below + value);
        belowShare = round(belowShare + parts[model]);
      } else if (value !== 0) {
        above = below = round(NaN);
      }
    }
    const total = round(above + below);
    const elected = balance === null || total !== total ? total : balance[i];
    if (elected > 0) {
      sign[i] = 1;
      merged[i] = above / (aboveShare === 0 ? 1 : aboveShare);
    } else if (elected < 0) {
      sign[i] = -1;
      merged[i] = below / (belowShare === 0 ? 1 : belowShare);
    } else {
      merged[i] = elected;  // zero, or not a number
    }
  }
  return { merged, sign };
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
