// Right answers over drop rates: measured before, where the reader is, and the reader's own curve.
import { button } from "../../controls.js";
import { addFigure } from "../../figures.js";
import { isAbort } from "./loading.js";
import { FULL, inPercent } from "./measuring.js";

const RATES = [0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.99];
export const MINE = "this setting";
const KINDS = ["dare+sum", "dare+ties", MINE];

/** Measured points as rows: the mean over seeds, with the lowest and the highest. */
export function rowsOf(curve, kind) {
  return curve.points.map(({ drop_rate: p, right }) => ({
    p,
    kind,
    mean: right.reduce((sum, value) => sum + value, 0) / right.length,
    low: Math.min(...right),
    high: Math.max(...right),
  }));
}

function curveSpec() {
  const x = {
    field: "p", type: "quantitative", title: "drop rate p", scale: { domain: [0, 1] },
    axis: { tickCount: 5 },
  };
  const y = (field) => ({
    field, type: "quantitative", title: "right answers, %", scale: { domain: [0, 100] },
    axis: { tickCount: 5 },
  });
  const color = {
    field: "kind", type: "nominal", title: null, scale: { domain: KINDS }, 
    legend: { columns: 2, symbolOpacity: 1 },
  };
  const tooltip = [
    { field: "kind", title: "what" },
    { field: "p" },
    { field: "mean", title: "right, %", format: ".1f" },
  ];
  return {
    height: 240,
    datasets: { measured: [], mine: [], here: [] },
    layer: [
      {
        data: { name: "measured" },
        mark: { type: "area", opacity: 0.2 },
        encoding: { x, y: y("low"), y2: { field: "high" }, color },
      },
      { data: { name: "measured" }, mark: { type: "line" }, encoding: { x, y: y("mean"), color } },
      {
        data: { name: "mine" },
        mark: { type: "line", point: { filled: true, size: 40 }, strokeDash: [5, 3] },
        encoding: { x, y: y("mean"), color, tooltip },
      },
      {
        data: { name: "measured" },
        mark: { type: "point", size: 200, opacity: 0 },
        encoding: {
          x, y: y("mean"), color,
          tooltip: [...tooltip, { field: "low", format: ".1f" }, { field: "high", format: ".1f" }],
        },
      },
      {
        data: { name: "here" },
        mark: { type: "point", filled: true, size: 170, opacity: 1 },
        encoding: { x, y: y("mean"), color, tooltip },
      },
    ],
  };
}

/** What the measured curves show. */
function findingOf(measured) {
  const of = (method) => measured.filter(({ kind }) => kind === method);
  const best = of("dare+ties").reduce((one, other) => (other.mean > one.mean ? other : one));
  const [ties, sum] = ["dare+ties", "dare+sum"].map((method) => `${of(method)[0].mean.toFixed(0)} %`);
  return `TIES alone gets ${ties} right, with DARE before it ${best.mean.toFixed(0)} % at `
    + `p = ${best.p}. The plain sum needs neither here: ${sum}.`;
}

/** The figure with its button; `settingAt(p)` is the setting of now at one rate for all models. */
export function curveCard(card, measurer, { settingAt, drops, whyNot }) {
  const figure = addFigure("live-curve", curveSpec(), "Right answers, the mean of the "
    + "three tasks, over drop rates: dare+sum and dare+ties of all three models at scale 1, where "
    + "you are, and your curve once it is measured.");
  const progress = card.querySelector("[data-place=progress]");
  let controller = null;
  let drawn = "";
  const start = button(card.querySelector("[data-place=buttons]"), "", () =>
    controller ? controller.abort() : measure());
  const name = () => { start.textContent = controller ? "Cancel" : "Measure it for this setting"; };
  name();

  async function measure() {
    const { signal } = (controller = new AbortController());
    const rows = [];
    name();
    try {
      for (const [index, p] of RATES.entries()) {
        progress.textContent = `p = ${p}: ${index + 1} of ${RATES.length} rates …`;
        const { mean } = inPercent(await measurer.score(settingAt(p), FULL, signal));
        rows.push({ p, mean, kind: MINE });
        figure.update({ mine: [...rows] });
      }
      progress.textContent = "Measured, one seed, 100 prompts of each task.";
    } catch (error) {
      progress.textContent = isAbort(error) ? "Cancelled." : error.message;
    }
    controller = null;
    name();
  }

  return {
    say: (text) => { progress.textContent = text; },

    showMeasured({ curves }) {
      const measured = curves
        .filter(({ task }) => task === null)
        .flatMap((curve) => rowsOf(curve, curve.method));
      figure.update({ measured });
      card.querySelector("[data-place=finding]").textContent = findingOf(measured);
    },

    /** The setting has changed: a curve that is under way or drawn is of another one. */
    change() {
      start.disabled = !drops() || whyNot() !== null;
      const whole = JSON.stringify(settingAt(0));
      if (whole === drawn) return;
      drawn = whole;
      controller?.abort();
      progress.textContent = drops() ? "" : "This method has no drop rate.";
      figure.update({ mine: [] });
    },

    /** A dot where the reader is; none where the models' rates differ. */
    mark(setting, score) {
      const rates = ratesOf(setting);
      const one = rates.length && rates.every((rate) => rate === rates[0]);
      const { mean } = inPercent(score);
      figure.update({ here: one ? [{ p: rates[0], mean, kind: MINE }] : [] });
    },
  };
}

const ratesOf = (setting) => {
  const table = Object.values(setting.stages).find((stage) => "drop_rate" in stage);
  return setting.models
    .map((model) => model.drop_rate ?? table?.drop_rate)
    .filter((rate) => rate !== undefined);
};
