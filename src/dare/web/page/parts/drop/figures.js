// The figures of the first part: sizes before and after, and DARE's two laws over drop rates.
import { addFigure, colours, dot, layer, quantity, RATE } from "../../figures.js";

export const SMALLEST = 2 ** -15;
export const LARGEST = 2;  // of the sizes that are shown

const NOT_RESCALED = {
  "after-title": "Kept as it is",
  "drop-average-title": "On average, a share p is lost",
  "drop-average-words": "The line is the mean over all seeds, 1 − p. The whole change shrinks, in "
    + "every layer.",
  "drop-noise-title": "The error is what was dropped",
  "drop-noise-words": "The line is √p. The error is smaller than with rescaling, but it always goes "
    + "in one direction: back to the base.",
};

/** What pictures and figures are called: as the page has it, or other words without rescaling. */
export function captionsIn(section) {
  const textOf = (name) => section.querySelector(`[data-shows="${name}"]`).textContent;
  const own = Object.fromEntries(Object.keys(NOT_RESCALED).map((name) => [name, textOf(name)]));
  return (rescale) => (rescale ? own : NOT_RESCALED);
}

export function addFigures() {
  const share = quantity("average", "change remaining", [0, 2], { tickCount: 4 });
  const error = quantity("noise", "noise / change", [0.1, 15],
    { values: [0.1, 0.3, 1, 3, 10], format: "~g" }, { type: "log", clamp: true });
  return {
    sizes: addFigure("drop-sizes", sizesSpec(), "Histogram of the sizes of the changes, before "
      + "and after. The shape stays, 1 − p times as high and 1/(1 − p) times further right."),
    average: addFigure("drop-average", lawSpec(share),
      "The average over drop rates for eight seeds and yours, around the line of the formula."),
    noise: addFigure("drop-noise", lawSpec(error),
      "The noise over drop rates for eight seeds and yours, around the line of the formula."),
  };
}

function sizesSpec() {
  const bars = (name, opacity) => ({
    ...layer(name, { type: "rect", opacity }, {
      x: quantity("from", "size of the change, |δ|", [SMALLEST, LARGEST],
        { values: [0.0001, 0.001, 0.01, 0.1, 1], format: "~g", grid: false }, { type: "log" }),
      x2: { field: "to" },
      y: quantity("share", "elements", [0, 0.4], { format: "%", tickCount: 4 }, { clamp: true }),
      y2: { datum: 0 },
      color: colours("what", ["before", "after"], { legend: { symbolOpacity: 1 } }),
    }),
    transform: [{ calculate: `'${name}'`, as: "what" }],
  });
  return {
    height: 190,
    datasets: { before: [], after: [] },
    layer: [bars("before", 0.45), bars("after", 0.85)],
  };
}

function lawSpec(y) {
  const place = { x: RATE, y: { ...y, scale: { ...y.scale, clamp: true } } };
  const tooltip = [{ field: "p", format: ".2f" }, { field: y.field, format: ".3f" }];
  return {
    height: 190,
    datasets: { theory: [], seeds: [], here: [] },
    layer: [
      layer("seeds", { type: "circle", size: 14, opacity: 0.35, aria: false }, place),
      layer("theory", { type: "line", strokeWidth: 2 }, place),
      dot({ ...place, tooltip }),
    ],
  };
}
