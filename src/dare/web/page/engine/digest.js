// The SHA-256 of weights, as `dare verify` prints it.

/** SHA-256 over the stored bytes of all tensors in order of name, as hexadecimal digits. */
export async function sha256(tensors) {
  if (!globalThis.crypto?.subtle) {
    throw new Error("browsers compute a SHA-256 only for pages from https or from this machine");
  }
  const parts = [...tensors.keys()].sort().map((name) => tensors.get(name).data);
  const bytes = await new Blob(parts).arrayBuffer();
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", bytes));
  return Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
