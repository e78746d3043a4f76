// BLAKE2b (RFC 7693), unkeyed, for the short texts that masks are keyed with.

const IV = [
  0x6a09e667f3bcc908n, 0xbb67ae8584caa73bn, 0x3c6ef372fe94f82bn, 0xa54ff53a5f1d36f1n,
  0x510e527fade682d1n, 0x9b05688c2b3e6c1fn, 0x1f83d9abfb41bd6bn, 0x5be0cd19137e2179n,
];
const ORDERS = [
  [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
  [14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3],
  [11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4],
  [7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8],
  [9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13],
  [2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9],
  [12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11],
  [13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10],
  [6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5],
  [10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0],
];
const ROUNDS = 12;
const BLOCK_BYTES = 128;
const LANES = [
  [0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15],
  [0, 5, 10, 15], [1, 6, 11, 12], [2, 7, 8, 13], [3, 4, 9, 14],
];

/** The digest of some bytes, `size` bytes long. */
export function blake2b(bytes, size) {
  const state = BigUint64Array.from(IV);
  state[0] ^= 0x01010000n ^ BigInt(size);
  const blocks = Math.max(1, Math.ceil(bytes.length / BLOCK_BYTES));
  const padded = new Uint8Array(blocks * BLOCK_BYTES);
  padded.set(bytes);
  for (let block = 0; block < blocks; block++) {
    const message = new BigUint64Array(padded.buffer, block * BLOCK_BYTES, 16);
    const isLast = block === blocks - 1;
    compress(state, message, isLast ? bytes.length : (block + 1) * BLOCK_BYTES, isLast);
  }
  return new Uint8Array(state.buffer, 0, size);
}

function compress(state, message, count, isLast) {
  const v = BigUint64Array.of(...state, ...IV);
  v[12] ^= BigInt(count);
  if (isLast) v[14] = ~v[14];
  for (let round = 0; round < ROUNDS; round++) {
    const order = ORDERS[round % ORDERS.length];
    LANES.forEach((lane, i) => mix(v, lane, message[order[2 * i]], message[order[2 * i + 1]]));
  }
  for (let i = 0; i < 8; i++) state[i] ^= v[i] ^ v[i + 8];
}

function mix(v, [a, b, c, d], first, second) {
  v[a] += v[b] + first;
  v[d] = turned(v[d] ^ v[a], 32n);
  v[c] += v[d];
  v[b] = turned(v[b] ^ v[c], 24n);
  v[a] += v[b] + second;
  v[d] = turned(v[d] ^ v[a], 16n);
  v[c] += v[d];
  v[b] = turned(v[b] ^ v[c], 63n);
}

/** The word turned right by some bits; what is too high falls away where it is stored. */
function turned(word, bits) {
  return (word >> bits) | (word << (64n - bits));
}
