// The figures of the first part: sizes before and after, and DARE's two laws over drop rates.
import { addFigure } from "../../figures.js";

export const SMALLEST = 2 ** -15;
export const LARGEST = 2;  // of the sizes that are shown

const RESCALED = {
  "after-title": "Kept and rescaled",
  "drop-average-title": "On average nothing changes",
  "drop-average-words": "The mean of δ̂ over all seeds is δ: the line. Small dots are eight "
    + "other seeds, the large dot is yours.",
  "drop-noise-title": "But it gets noisy",
  "drop-noise-words": "The variance of δ̂ is δ² · p / (1 − p): the line. From p = 0.9 to 0.99 it "
    + "grows eleven times.",
};
const NOT_RESCALED = {
  "after-title": "Kept as it is",
  "drop-average-title": "On average a share p is lost",
  "drop-average-words": "The mean of δ̂ over all seeds is (1 − p) · δ: the whole change shrinks, "
    + "in every layer.",
  "drop-noise-title": "The error is the loss",
  "drop-noise-words": "It is p · δ²: what was dropped. That is less than with rescaling, but it "
    + "goes one way.",
};

/** What the pictures and figures are called, with and without rescaling. */
export const captionsOf = (rescale) => (rescale ? RESCALED : NOT_RESCALED);

export function addFigures() {
  return {
    sizes: addFigure("drop-sizes", sizesSpec(), "Histogram of the sizes of the changes, before "
      + "and after. After it, the same shape is lower by 1 − p and further right by 1/(1 − p)."),
    average: addFigure("drop-average", lawSpec("average", "share of δ that is left", {
      domain: [0, 2],
    }), "The average over drop rates for eight seeds, around the law's line, and yours."),
    noise: addFigure("drop-noise", lawSpec("noise", "error, in δ²", {
      type: "log", domain: [0.01, 200],
    }), "The noise over drop rates for eight seeds, around the law's line, and yours."),
  };
}

function sizesSpec() {
  const bars = (name, words, opacity) => ({
    data: { name },
    transform: [{ calculate: `'${words}'`, as: "what" }],
    mark: { type: "rect", opacity },
    encoding: {
      x: {
        field: "from", type: "quantitative", title: "size of the change, |δ|",
        scale: { type: "log", domain: [SMALLEST, LARGEST] },
        axis: { values: [0.0001, 0.001, 0.01, 0.1, 1], format: "~g", grid: false },
      },
      x2: { field: "to" },
      y: {
        field: "share", type: "quantitative", title: "elements",
        scale: { domain: [0, 0.4], clamp: true }, axis: { format: "%", tickCount: 4 },
      },
      y2: { datum: 0 },
      color: {
        field: "what", type: "nominal", title: null, scale: { domain: ["before", "after"] },
        legend: { symbolOpacity: 1 },
      },
      tooltip: [
        { field: "from", title: "from", format: ".2~g" },
        { field: "to", title: "to", format: ".2~g" },
        { field: "share", title: words, format: ".2%" },
      ],
    },
  });
  return {
    height: 190,
    datasets: { before: [], after: [] },
    layer: [bars("before", "before", 0.45), bars("after", "after", 0.85)],
  };
}

function lawSpec(field, title, scale) {
  const x = {
    field: "p", type: "quantitative", title: "drop rate p", scale: { domain: [0, 1] },
    axis: { tickCount: 5, grid: false },
  };
  const axis = scale.type ? { values: [0.01, 0.1, 1, 10, 100], format: "~g" } : { tickCount: 4 };
  const y = { field, type: "quantitative", title, scale: { ...scale, clamp: true }, axis };
  return {
    height: 190,
    datasets: { theory: [], seeds: [], here: [] },
    layer: [
      {
        data: { name: "seeds" },
        mark: { type: "circle", size: 14, opacity: 0.35, aria: false },
        encoding: { x, y },
      },
      { data: { name: "theory" }, mark: { type: "line", strokeWidth: 2 }, encoding: { x, y } },
      {
        data: { name: "here" },
        mark: { type: "point", filled: true, size: 150, opacity: 1 },
        encoding: {
          x, y, color: { datum: "you", scale: { domain: ["seeds", "you"] }, legend: null },
          tooltip: [{ field: "p", format: ".2f" }, { field, format: ".3f" }],
        },
      },
    ],
  };
}
