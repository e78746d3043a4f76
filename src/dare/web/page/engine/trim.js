// Keeping the elements of largest magnitude. A magnitude's bits order like the magnitude, so the
// k-th largest is found by counting: by the upper 16 of its 31 bits, then by the lower 15.
import { bitsOf } from "./floats.js";

const highCounts = new Int32Array(1 << 16);
const lowCounts = new Int32Array(1 << 15);

/**
 * The values with all but the largest set to zero: k = max(1, ⌊keepRatio·survivors⌋) are kept, of
 * equals those with the lowest index; `survivors` counts what no earlier stage has dropped.
 */
export function trimmed(values, keepRatio, survivors = values.length) {
  const bits = bitsOf(values);
  const kept = new Float32Array(values.length);
  const cut = findCut(bits, Math.max(1, Math.floor(keepRatio * survivors)));
  for (let i = 0; i < bits.length; i++) {
    const magnitude = bits[i] & 0x7fffffff;
    if (magnitude > cut.bits || (magnitude === cut.bits && cut.equals-- > 0)) kept[i] = values[i];
  }
  return kept;
}

/** The bits of the k-th largest magnitude, and how many that equal it are kept; zeros never are. */
function findCut(bits, wanted) {
  let nonzero = 0;
  highCounts.fill(0);
  for (let i = 0; i < bits.length; i++) {
    const magnitude = bits[i] & 0x7fffffff;
    if (magnitude === 0) continue;
    highCounts[magnitude >>> 15]++;
    nonzero++;
  }
  if (nonzero <= wanted) return { bits: 0, equals: 0 };
  const high = countDown(highCounts, wanted);
  lowCounts.fill(0);
  for (let i = 0; i < bits.length; i++) {
    const magnitude = bits[i] & 0x7fffffff;
    if (magnitude !== 0 && magnitude >>> 15 === high.place) lowCounts[magnitude & 0x7fff]++;
  }
  const low = countDown(lowCounts, high.rank);
  return { bits: (high.place << 15) | low.place, equals: low.rank };
}

/** Where the k-th largest was counted, and its rank among those that were counted there. */
function countDown(counts, wanted) {
  let place = counts.length - 1;
  for (; counts[place] < wanted; place--) wanted -= counts[place];
  return { place, rank: wanted };
}
