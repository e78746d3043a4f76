// The order of names: that of their UTF-8 bytes, which JavaScript's own is not.

/** Names in order. */
export function byName(names) {
  const encoder = new TextEncoder();
  const pairs = Array.from(names, (name) => [name, encoder.encode(name)]);
  return pairs.sort(([, left], [, right]) => compare(left, right)).map(([name]) => name);
}

function compare(left, right) {
  const end = Math.min(left.length, right.length);
  for (let i = 0; i < end; i++) {
    if (left[i] !== right[i]) return left[i] - right[i];
  }
  return left.length - right.length;
}
