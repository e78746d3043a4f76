// Figures by Vega-Lite, drawn again as the numbers behind them change.
/* global darePage */
import { mounted } from "./pace.js";

let library = null;

/** The library is large: it is loaded once, after all parts. */
function loadLibrary() {
  library ??= mounted().then(() => new Promise((resolve, reject) => {
    if (window.vegaEmbed) return resolve();
    const script = document.createElement("script");
    script.src = new URL("vega.js", import.meta.url);
    script.addEventListener("load", resolve);
    script.addEventListener("error", () => reject(new Error("The drawing library did not load.")));
    document.head.append(script);
  }));
  return library;
}

let unfinished = 0;

/** Say in the page that all figures so far are drawn, and in which colours. */
function finish() {
  unfinished -= 1;
  if (!unfinished) document.documentElement.dataset.drawn = darePage.shownTheme();
}

/**
 * Draw a figure into the element `chart-NAME`. Its data have names, by which `update` gives others.
 * Of updates that come faster than they can be drawn, only the last is drawn.
 */
export function addFigure(name, spec, description) {
  const whole = {
    width: "container",
    autosize: { type: "fit-x", contains: "padding" },
    datasets: {},
    config: { mark: { aria: false } },  // the description says it all
    ...spec,
    description,
  };
  let waiting = null;
  let failed = false;
  unfinished += 1;
  let drawing = loadLibrary()
    .then(() => {
      whole.datasets = { ...whole.datasets, ...waiting };
      waiting = null;
      return darePage.add(name, whole);
    })
    .catch((error) => {
      failed = true;
      document.getElementById(`chart-${name}`).textContent = error.message;
    })
    .finally(finish);

  async function drawLast() {
    if (!waiting) return;
    const datasets = waiting;
    waiting = null;
    await darePage.update(name, datasets);
  }

  return {
    update(datasets) {
      if (failed) return;
      const idle = !waiting;
      waiting = { ...waiting, ...datasets };
      if (idle) drawing = drawing.then(drawLast);
    },
  };
}

// ---------------------------------------------------------------- what specs are made of

/** A quantity along an axis. */
export const quantity = (field, title, domain, axis = {}, scale = {}) => ({
  field, type: "quantitative", title, scale: { domain, ...scale }, axis,
});

export const RATE = quantity("p", "drop rate p", [0, 1], { tickCount: 5, grid: false });
export const RIGHT = quantity("mean", "right answers, %", [0, 100], { tickCount: 5 });

/** A colour for each of some words. */
export const colours = (field, domain, more = {}) => ({
  field, type: "nominal", title: null, scale: { domain }, ...more,
});

export const layer = (name, mark, encoding) => ({ data: { name }, mark, encoding });

/** A large dot where the reader is, in the second colour unless it has another. */
export const dot = (encoding) => layer("here",
  { type: "point", filled: true, size: 150, opacity: 1 },
  { color: { datum: "you", scale: { domain: ["all", "you"] }, legend: null }, ...encoding });

/** Rows of a measured curve: the mean over seeds, with the lowest and the highest. */
export const rowsOf = (curve, kind) => curve.points.map(({ drop_rate: p, right }) => ({
  p,
  kind,
  mean: right.reduce((sum, value) => sum + value, 0) / right.length,
  low: Math.min(...right),
  high: Math.max(...right),
}));

/** The band from the lowest seed to the highest, and the line of their means. */
export const band = (color, mark = { type: "line" }) => [
  layer("measured", { type: "area", opacity: 0.2 },
    { x: RATE, y: { ...RIGHT, field: "low" }, y2: { field: "high" }, color }),
  layer("measured", mark, { x: RATE, y: RIGHT, color }),
];
