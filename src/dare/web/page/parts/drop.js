// Drop and rescale: one real matrix, what DARE leaves of it, its two laws, and the model's answers.
/* global darePage */
import { button, choice, slider, toggle } from "../controls.js";
import { keepMask } from "../engine/mask.js";
import { dropped } from "../engine/merge.js";
import { addFigure } from "../figures.js";
import { droppedBy, lawsAt, lawsOf, sizesOf } from "../measures.js";
import { breathe, oncePerFrame } from "../pace.js";
import { addCursor, drawMatrix, usualSize } from "../pictures.js";
import { changeOf, MODELS, SIDE, TENSORS } from "../tensors.js";
import { decimal, percent, show, signed, whole } from "../words.js";
import { addAnswers } from "./answers.js";

export const defaults = {
  "drop.p": 0.5,
  "drop.rescale": true,
  "drop.seed": 42,
  "drop.model": "add",
  "drop.tensor": "model.layers.4.self_attn.o_proj.weight",
};

const SEEDS = 8;
const RATES = [0.02, 0.05, ...Array.from({ length: 17 }, (_, at) => (at + 2) / 20), 0.97, 0.99];
const SMALLEST = 2 ** -15;
const LARGEST = 2;

/** The picture comes first, so that there is something to see; the figures when it is there. */
export async function mount(section, { state, engine, loadModel, complain }) {
  addControls(section.querySelector(".panel"), state);
  const canvases = [...section.querySelectorAll("canvas")];
  const moveCursor = addCursor(canvases, SIDE, SIDE, showElement);
  let delta = null;
  let keep = null;
  let after = null;
  let limit = 1;
  let focus = [40, 64];
  let figures = null;

  async function load() {
    const [model, tensor] = [state.get("drop.model"), state.get("drop.tensor")];
    const loaded = await changeOf(loadModel, model, tensor);
    if (model !== state.get("drop.model") || tensor !== state.get("drop.tensor")) return;
    delta = loaded;
    limit = usualSize(delta);
    redraw();
    if (figures) measureSeeds();
  }

  function redraw() {
    if (!delta) return;
    const [p, rescale] = [state.get("drop.p"), state.get("drop.rescale")];
    keep = keepMask(state.get("drop.tensor"), delta.length, p, state.get("drop.seed"));
    after = dropped(delta, keep, rescale ? 1 / (1 - p) : 1);
    drawPictures();
    showNumbers(p, rescale);
    showElement(...focus);
    drawFigures(p);
  }

  function drawFigures(p) {
    if (!figures) return;
    const laws = lawsOf(delta, after);
    figures.sizes.update({
      before: sizesOf(delta, SMALLEST, LARGEST),
      after: sizesOf(after, SMALLEST, LARGEST),
    });
    figures.average.update({ here: [{ p, ...laws }] });
    figures.noise.update({ here: [{ p, ...laws }] });
  }

  function drawPictures() {
    if (!delta) return;
    const [before, mask, result] = canvases;
    const alpha = keep.map((kept) => 255 * kept);
    drawMatrix(before, delta, SIDE, { limit });
    drawMatrix(mask, delta, SIDE, { limit, alpha });
    drawMatrix(result, after, SIDE, { limit, alpha });
  }

  function showNumbers(p, rescale) {
    const laws = lawsOf(delta, after);
    const law = lawsAt(p, rescale);
    const lost = droppedBy(keep);
    const factor = rescale ? 1 / (1 - p) : 1;
    show(section, {
      dropped: percent(lost / delta.length, 2),
      "dropped-remark": `${whole(lost)} of ${whole(delta.length)}; p is ${percent(p, 0)}`,
      factor: `× ${decimal(factor, factor < 10 ? 2 : 1)}`,
      "factor-remark": rescale ? "each that is kept: 1/(1 − p)" : "no rescaling",
      average: decimal(laws.average, 3),
      "average-remark": `the law says ${decimal(law.average, rescale ? 0 : 2)}`,
      noise: decimal(laws.noise, 3),
      "noise-remark": `the law says ${rescale ? "p/(1 − p)" : "p"} = ${decimal(law.noise, 3)}`,
      limit: signed(limit, 3),
      "minus-limit": signed(-limit, 3),
    });
  }

  function showElement(row, column, byKeyboard = false) {
    focus = [row, column];
    if (!after) return;
    moveCursor(row, column);
    const at = row * SIDE + column;
    const line = section.querySelector("[data-shows=element]");
    line.setAttribute("aria-live", byKeyboard ? "polite" : "off");
    const fate = keep[at] ? `kept: ${signed(after[at], 5)}` : "dropped: 0";
    line.textContent = `Row ${row}, column ${column}: δ = ${signed(delta[at], 5)} → ${fate}`;
  }

  /** The same law for the next seeds, so that one sees how much is chance. */
  async function measureSeeds() {
    const [mine, tensor, rescale] = [delta, state.get("drop.tensor"), state.get("drop.rescale")];
    const seed = state.get("drop.seed");
    const rows = [];
    for (const p of RATES) {
      for (let next = 1; next <= SEEDS; next += 1) {
        const mask = keepMask(tensor, mine.length, p, seed + next);
        rows.push({ p, ...lawsOf(mine, dropped(mine, mask, rescale ? 1 / (1 - p) : 1)) });
      }
      await breathe();
      if (mine !== delta || seed !== state.get("drop.seed")) return;
      if (rescale !== state.get("drop.rescale")) return;
    }
    const theory = RATES.map((p) => ({ p, ...lawsAt(p, rescale) }));
    figures.average.update({ seeds: rows, theory });
    figures.noise.update({ seeds: rows, theory });
  }

  state.on(["drop.model", "drop.tensor"], () => load().catch((error) => complain(section, error)));
  state.on(["drop.p", "drop.rescale", "drop.seed"], oncePerFrame(redraw));
  state.on(["drop.rescale", "drop.seed"], () => { if (figures) measureSeeds(); });
  darePage.onTheme(drawPictures);
  await load();
  figures = addFigures();
  redraw();
  measureSeeds();
  addAnswers(section, state, engine);
}

function addControls(place, state) {
  slider(place, state, "drop.p", {
    label: "Drop rate p", min: 0, max: 0.99, step: 0.01, format: (p) => decimal(p, 2),
  });
  toggle(place, state, "drop.rescale", { label: "Rescale what is kept" });
  const another = () => state.set({ "drop.seed": state.get("drop.seed") + 1 });
  const seed = button(place, "", another);
  const name = () => { seed.textContent = `Another seed (now ${state.get("drop.seed")})`; };
  state.on(["drop.seed"], name);
  name();
  choice(place, state, "drop.model", { label: "Model", options: MODELS });
  choice(place, state, "drop.tensor", { label: "Matrix", options: TENSORS });
}

function addFigures() {
  return {
    sizes: addFigure("drop-sizes", sizesSpec(), "Histogram of the sizes of the changes, before "
      + "and after. After it, the same shape is lower by 1 − p and further right by 1/(1 − p)."),
    average: addFigure("drop-average", lawSpec("average", "share of δ that is left", {
      domain: [0, 2],
    }), "The average over drop rates for eight seeds, around the law's line, and yours."),
    noise: addFigure("drop-noise", lawSpec("noise", "noise, in δ²", {
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
        field: "share", type: "quantitative", title: "elements", axis: { format: "%", tickCount: 4 },
        scale: { domain: [0, 0.4], clamp: true },
      },
      y2: { datum: 0 },
      color: { field: "what", type: "nominal", title: null, scale: { domain: ["before", "after"] } },
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
