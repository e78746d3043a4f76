// What is drawn of an analysis: Vega-Lite, and the rows for it.
import { layerName } from "./words.js";

export const KINDS = ["attention", "mlp", "norm", "embedding", "head", "other"];
const DASHES = [[1, 0], [7, 3], [2, 2], [9, 3, 2, 3], [4, 2], [12, 4], [5, 3, 1, 3, 1, 3]];

const MANTISSA = "datum.value / pow(10, floor(log(datum.value * 1.0001) / LN10))";
const legend = { columns: { expr: "max(1, floor(width / 190))" } };  // labels are cut at 150
const color = { field: "model", type: "nominal", title: null, sort: null, legend };
const place = {
  x: {
    field: "rate",
    type: "quantitative",
    title: "drop rate",
    scale: { domain: [0, 1] },
    axis: { tickCount: 10, grid: true },
  },
  y: {
    field: "error",
    type: "quantitative",
    title: "error of a layer's outputs, at most",
    scale: { type: "log", nice: false },
    axis: {
      labelExpr: `indexof([1, 2, 5], round(${MANTISSA})) >= 0 ? format(datum.value, '~%') : ''`,
      labelOverlap: true,
      ticks: false,
    },
  },
  tooltip: [
    { field: "model", type: "nominal" },
    { field: "rate", type: "quantitative", title: "drop rate" },
    { field: "error", type: "quantitative", title: "error of outputs", format: ".3~%" },
  ],
};

/** Lines over drop rates. */
export const ERROR = {
  height: 300,
  data: { name: "rows" },
  mark: { type: "line", interpolate: "monotone", aria: false },
  encoding: {
    ...place,
    color,
    strokeDash: {
      field: "dash",
      type: "ordinal",
      scale: { domain: DASHES.map((_, number) => number), range: DASHES },
      legend: null,
    },
  },
};

/** Layers by kinds. */
export const CHANGE = {
  height: 240,
  data: { name: "cells" },
  mark: { type: "rect", cornerRadius: 2, aria: false },
  encoding: {
    x: {
      field: "layer",
      type: "nominal",
      title: "layer",
      sort: null,
      axis: {
        labelAngle: 0,
        labelOverlap: "greedy",
        labelExpr: "datum.label === 'outside' ? 'out' : datum.label",
      },
    },
    y: { field: "kind", type: "nominal", title: null, sort: KINDS },
    color: {
      field: "change",
      type: "quantitative",
      title: "‖δ‖ / ‖base‖",
      scale: { type: "sqrt", domainMin: 0, nice: false },
      legend: { format: ".2~%", gradientLength: 180, gradientThickness: 10, tickCount: 3 },
    },
    tooltip: [
      { field: "layer", type: "nominal" },
      { field: "kind", type: "nominal" },
      { field: "change", type: "quantitative", title: "‖δ‖ / ‖base‖", format: ".3~%" },
      { field: "largest", type: "quantitative", title: "largest |δ|", format: ".3~g" },
      { field: "elements", type: "quantitative", format: "," },
    ],
  },
};

/** A name that Vega can group by: in its tables of groups `constructor` would be there already. */
const shownName = (name) => `\u2060${name}`;  // a character without width

/** ‖δ‖ / ‖base‖ without outliers; infinite for a change of a base that is zero. */
export function relativeNorm({ inliers, base_norm }) {
  if (base_norm) return inliers.norm / base_norm;
  return inliers.norm ? Infinity : 0;
}

/** The change that advice goes by: of the layers without norms, or of all weights. */
export function changeOf({ cells, total }) {
  const parts = cells.filter(({ kind }) => ["attention", "mlp", "other"].includes(kind));
  const size = (of) => Math.hypot(...parts.map(({ statistics }) => of(statistics)));
  return size(({ inliers }) => inliers.norm) / size((part) => part.base_norm) || relativeNorm(total);
}

/** What independent changes of the models' sizes would lose when they are added up. */
export function chanceCancelled(models) {
  const sizes = models.map(({ total }) => total.inliers.mean_magnitude);
  const sum = sizes.reduce((one, other) => one + other, 0);
  return sum ? 1 - Math.hypot(...sizes) / sum : 0;
}

/** The curves of all models, as far as there is an error to draw. */
export function errorRows(analysis) {
  const numbers = new Map(analysis.models.map((model, number) => [model.name, number]));
  return analysis.predictions
    .filter(({ model, bounded_error: error }) =>
      numbers.has(model) && error > 0 && Number.isFinite(error))
    .map(({ model, drop_rate: rate, bounded_error: error }) => {
      const dash = numbers.get(model) % DASHES.length;
      return { model: shownName(model), rate, error, dash };
    });
}

/** How far each kind in each layer of a model is from the base. */
export function changeRows(model) {
  return [...model.cells]
    .sort((first, second) => first.layer - second.layer)
    .map(({ layer, kind, statistics }) => {
      const change = relativeNorm(statistics);
      const { largest, elements } = statistics;
      const drawn = Number.isFinite(change) ? change : null;
      return { layer: layerName(layer), kind, change: drawn, largest, elements };
    });
}
