// Tensors as directions: the angle between two, and where on the arc between them something lies.
import { sumProducts } from "./sums.js";

const PARALLEL = 0.9995;  // cosine beyond which the arc counts as straight

/** The cosine of the angle between two tensors; that to a tensor of zeros counts as 1. */
export function cosineOf(a, b) {
  const norms = Math.sqrt(sumProducts(a, a)) * Math.sqrt(sumProducts(b, b));
  return norms === 0 ? 1 : sumProducts(a, b) / norms;
}

/**
 * The coefficients of two tensors at `t` on the arc between them; straight if (anti)parallel.
 *
 * The last bit of a sine or an arc cosine is the browser's own, as it is the C library's for the
 * package. At 600,000 random angles and places a tenth of the coefficients differed from the
 * package's, by 10⁻¹⁴ of themselves at most; rounded to float32, which is how they are used, none
 * did. A difference is left only where a coefficient lies that near to the border between two
 * float32 numbers, once in some millions. A merged weight then changes only where it lies as near
 * to the border between two stored numbers.
 */
export function arc(cosine, t) {
  if (!(Math.abs(cosine) <= PARALLEL)) return [1 - t, t];
  const angle = Math.acos(cosine);
  return [Math.sin((1 - t) * angle) / Math.sin(angle), Math.sin(t * angle) / Math.sin(angle)];
}
