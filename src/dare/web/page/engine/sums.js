// Sums over whole tensors, in float64 and in the order that docs/numbers.md fixes: in each chunk 64
// interleaved sums, which are added from the first to the last, then chunk after chunk.

const CHUNK = 524288;
const LANES = 64;
const lanes = new Float64Array(LANES);

/** Σ|values|. */
export function sumMagnitudes(values) {
  let total = 0;
  for (let start = 0; start < values.length; start += CHUNK) {
    const end = Math.min(start + CHUNK, values.length);
    lanes.fill(0);
    for (let i = start; i < end; i++) lanes[i % LANES] += Math.abs(values[i]);
    total += sumOfLanes();
  }
  return total;
}

/** Σ left·right. */
export function sumProducts(left, right) {
  let total = 0;
  for (let start = 0; start < left.length; start += CHUNK) {
    const end = Math.min(start + CHUNK, left.length);
    lanes.fill(0);
    for (let i = start; i < end; i++) lanes[i % LANES] += left[i] * right[i];
    total += sumOfLanes();
  }
  return total;
}

function sumOfLanes() {
  let total = 0;
  for (let i = 0; i < LANES; i++) total += lanes[i];
  return total;
}
