// The SHA-256 of weights, as `dare verify` prints it.
import { byName } from "./names.js";

/** SHA-256 over the stored bytes of all tensors in order of name, as hexadecimal digits. */
export async function sha256(tensors) {
  const parts = byName(tensors.keys()).map((name) => tensors.get(name).data);
  const joined = new Uint8Array(parts.reduce((size, part) => size + part.byteLength, 0));
  let place = 0;
  for (const part of parts) {
    joined.set(new Uint8Array(part.buffer, part.byteOffset, part.byteLength), place);
    place += part.byteLength;
  }
  if (!globalThis.crypto?.subtle) {
    throw new Error("browsers compute a SHA-256 only for pages from https or from this machine");
  }
  const digest = new Uint8Array(await crypto.subtle.digest("SHA-256", joined));
  return Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
}
