// Scores in words.
export const percent = (value) => `${Math.round(value)} %`;
export const bits = (value) => (Number.isFinite(value) ? value.toFixed(3) : "NaN");
