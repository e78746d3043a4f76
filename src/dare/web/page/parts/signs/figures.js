// The figures of votes: who is silenced, and how often signs conflict over drop rates.
import { addFigure } from "../../figures.js";

export const NAMES = ["add", "sort", "say"];
export const [BEFORE, NOW] = ["as they are", "with these settings"];

export function addFigures() {
  const silenced = {
    height: 190,
    datasets: { rows: [] },
    data: { name: "rows" },
    mark: { type: "bar" },
    encoding: {
      x: {
        field: "share", type: "quantitative", title: "share of its |δ| that is silenced",
        scale: { domain: [0, 0.5] }, axis: { format: "%", tickCount: 5 },
      },
      y: { field: "model", type: "nominal", title: null, scale: { domain: NAMES } },
      yOffset: { field: "when", scale: { domain: [BEFORE, NOW] } },
      color: { field: "when", type: "nominal", title: null, scale: { domain: [BEFORE, NOW] } },
      tooltip: [{ field: "model" }, { field: "when" }, { field: "share", format: ".1%" }],
    },
  };
  const x = {
    field: "p", type: "quantitative", title: "drop rate p", scale: { domain: [0, 1] },
    axis: { tickCount: 5, grid: false },
  };
  const y = {
    field: "conflicting", type: "quantitative", title: "elements where signs conflict",
    scale: { domain: [0, 0.8] }, axis: { format: "%", tickCount: 4 },
  };
  const color = { datum: "you", scale: { domain: ["all", "you"] }, legend: null };
  const rates = {
    height: 190,
    datasets: { rates: [], here: [] },
    layer: [
      { data: { name: "rates" }, mark: { type: "line", point: { size: 20 } }, encoding: { x, y } },
      {
        data: { name: "here" },
        mark: { type: "point", filled: true, size: 150, opacity: 1 },
        encoding: {
          x, y, color,
          tooltip: [{ field: "p", format: ".2f" }, { field: "conflicting", format: ".1%" }],
        },
      },
    ],
  };
  return {
    silenced: addFigure("signs-silenced", silenced, "For each model the share of its change that "
      + "the vote silences, as the deltas are and with these settings."),
    rates: addFigure("signs-rates", rates, "The share of elements where signs conflict, over drop "
      + "rates. It falls to nothing as fewer models meet in an element."),
  };
}
