// The figures of votes: who is silenced, and how often signs conflict over drop rates.
import { addFigure, colours, dot, layer, quantity, RATE } from "../../figures.js";
import { NAMES } from "../../tensors.js";

export const [BEFORE, NOW] = ["as they are", "with these settings"];

export function addFigures() {
  const silenced = {
    height: 190,
    datasets: { rows: [] },
    ...layer("rows", { type: "bar" }, {
      x: quantity("share", "share of its |δ| that is silenced", [0, 0.5],
        { format: "%", tickCount: 5 }),
      y: colours("model", NAMES),
      yOffset: { field: "when", scale: { domain: [BEFORE, NOW] } },
      color: colours("when", [BEFORE, NOW]),
      tooltip: [{ field: "model" }, { field: "when" }, { field: "share", format: ".1%" }],
    }),
  };
  const y = quantity("conflicting", "elements where signs conflict", [0, 0.8],
    { format: "%", tickCount: 4 });
  const tooltip = [{ field: "p", format: ".2f" }, { field: "conflicting", format: ".1%" }];
  const rates = {
    height: 190,
    datasets: { rates: [], here: [] },
    layer: [
      layer("rates", { type: "line", point: { size: 20 } }, { x: RATE, y }),
      dot({ x: RATE, y, tooltip }),
    ],
  };
  return {
    silenced: addFigure("signs-silenced", silenced, "For each model the share of its change that "
      + "the vote silences, as the deltas are and with these settings."),
    rates: addFigure("signs-rates", rates, "The share of elements where signs conflict, over drop "
      + "rates. It falls to nothing as fewer models meet in an element."),
  };
}
