// Right answers over drop rates: measured before, and where the reader is.
import { addFigure, band, colours, dot, RATE, RIGHT, rowsOf } from "../../figures.js";
import { points } from "../../words.js";

const MINE = "this setting";
const KINDS = ["dare+sum", "dare+ties", MINE];

/** What the measured curves show. */
function findingOf(measured) {
  const of = (method) => measured.filter(({ kind }) => kind === method);
  const best = of("dare+ties").reduce((one, other) => (other.mean > one.mean ? other : one));
  const [ties, sum] = ["dare+ties", "dare+sum"].map((method) => points(of(method)[0].mean));
  return `At λ = 1, TIES alone gets ${ties} right; with DARE before it, ${points(best.mean)} at `
    + `p = ${best.p}. The plain sum needs neither here: it gets ${sum}.`;
}

export function curveCard(card) {
  const color = colours("kind", KINDS, { legend: { columns: 2, symbolOpacity: 1 } });
  const tooltip = [{ field: "kind", title: "what" }, { field: "p" }, { field: "mean", format: ".1f" }];
  const spec = {
    height: 240,
    datasets: { measured: [], here: [] },
    layer: [...band(color), dot({ x: RATE, y: RIGHT, color, tooltip })],
  };
  const figure = addFigure("live-curve", spec, "Right answers, the mean of the three tasks, over "
    + "drop rates: dare+sum and dare+ties of all three models at scale 1, and your setting.");

  return {
    showMeasured({ curves }) {
      const measured = curves
        .filter(({ task }) => task === null)
        .flatMap((curve) => rowsOf(curve, curve.method));
      figure.update({ measured });
      card.querySelector("[data-place=finding]").textContent = findingOf(measured);
    },

    /** A dot where the reader is; none for a method that drops nothing. */
    mark({ stages }, mean) {
      figure.update({ here: stages.dare ? [{ p: stages.dare.drop_rate, mean, kind: MINE }] : [] });
    },
  };
}
