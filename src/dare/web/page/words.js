// Numbers as the page writes them, and where they are shown.

const MINUS = "\u2212";

/** A number with so many digits after the point. */
export const decimal = (value, digits = 2) => value.toFixed(digits).replace("-", MINUS);

/** The same with its sign. */
export const signed = (value, digits = 4) => (value < 0 ? "" : "+") + decimal(value, digits);

/** A share of one in per cent. */
export const percent = (share, digits = 1) => `${decimal(100 * share, digits)}%`;

/** A score that is in per cent already. */
export const points = (value) => `${Math.round(value)}%`;

/** How large noise is, as a multiple of the change that it is in. */
export function noiseInWords(ratio) {
  if (ratio < 0.005) return "none";
  if (ratio < 0.22) return "small beside the change";
  if (ratio < 0.9) return `${percent(ratio, 0)} of the change`;
  if (ratio < 1.1) return "as big as the change itself";
  return `${decimal(ratio, ratio < 9.95 ? 1 : 0)} times as big as the change`;
}

/** Bits that a byte takes. */
export const bits = (value) => (Number.isFinite(value) ? value.toFixed(3) : "NaN");

/** A whole number with thousands set apart. */
export const whole = (value) => value.toLocaleString("en-US");

/** Write texts into the elements of a section that have `data-shows` of their names. */
export function show(section, texts) {
  for (const [name, text] of Object.entries(texts)) {
    section.querySelector(`[data-shows="${name}"]`).textContent = text;
  }
}
