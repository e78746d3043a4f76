// Drop and rescale: one real matrix, what DARE leaves of it, its two laws, and the model's answers.
/* global darePage */
import { choice, DROP_RATE, seedButton, slider, toggle } from "../controls.js";
import { keepMask } from "../engine/mask.js";
import { droppedBy, lawsAt, lawsOf, sizesOf } from "../measures.js";
import { breathe, oncePerFrame } from "../pace.js";
import { addCursor, drawMatrix, usualSize } from "../pictures.js";
import { changeOf, deltaOf, MODELS, SIDE, TENSORS } from "../tensors.js";
import { decimal, noiseInWords, percent, show, signed, whole } from "../words.js";
import { addAnswers } from "./drop/answers.js";
import { addFigures, captionsIn, LARGEST, SMALLEST } from "./drop/figures.js";

export const defaults = {
  "drop.p": 0.5,
  "drop.rescale": true,
  "drop.seed": 42,
  "drop.model": "add",
  "drop.tensor": "model.layers.4.self_attn.o_proj.weight",
};

const SEEDS = 8;
const RATES = [0.02, 0.05, ...Array.from({ length: 17 }, (_, at) => (at + 2) / 20), 0.97, 0.99];

export function mount(section, { state, engine, complain }) {
  addControls(section.querySelector(".panel"), state);
  addAnswers(section, state, engine);
  const canvases = [...section.querySelectorAll("canvas")];
  const moveCursor = addCursor(canvases, SIDE, SIDE, showElement);
  let change = null;
  let delta = null;
  let keep = null;
  let after = null;
  let limit = 1;
  let focus = [40, 64];
  const figures = addFigures();
  const captionsOf = captionsIn(section);

  async function load() {
    const [model, tensor] = [state.get("drop.model"), state.get("drop.tensor")];
    const loaded = await changeOf(model, tensor);
    if (model !== state.get("drop.model") || tensor !== state.get("drop.tensor")) return;
    change = loaded;
    delta = deltaOf(change());
    limit = usualSize(delta);
    redraw();
    measureSeeds();
  }

  function redraw() {
    if (!delta) return;
    const [p, rescale] = [state.get("drop.p"), state.get("drop.rescale")];
    keep = keepMask(state.get("drop.tensor"), delta.length, p, state.get("drop.seed"));
    after = deltaOf(change({ dare: { drop_rate: p, rescale } }, state.get("drop.seed")));
    const laws = lawsOf(delta, after);
    drawPictures();
    showNumbers(p, rescale, laws);
    showElement(...focus);
    drawFigures(p, laws);
  }

  function drawFigures(p, laws) {
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
    drawMatrix(before, delta, SIDE, { limit });
    drawMatrix(mask, delta, SIDE, { limit, alpha: keep });
    drawMatrix(result, after, SIDE, { limit, alpha: keep });
  }

  function showNumbers(p, rescale, laws) {
    const law = lawsAt(p, rescale);
    const lost = droppedBy(keep);
    const factor = rescale ? 1 / (1 - p) : 1;
    show(section, {
      dropped: percent(lost / delta.length),
      "dropped-remark": `${whole(lost)} of ${whole(delta.length)} elements`,
      factor: `× ${decimal(factor, factor < 10 ? 2 : 1)}`,
      "factor-remark": rescale ? "divided by 1 − p" : "not rescaled",
      average: percent(laws.average),
      "average-remark": `expected: ${percent(law.average, 0)}`,
      noise: `× ${decimal(laws.noise)}`,
      "noise-remark": noiseInWords(law.noise),
      limit: signed(limit, 3),
      "minus-limit": signed(-limit, 3),
      ...captionsOf(rescale),
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
    const [mine, rescale] = [delta, state.get("drop.rescale")];
    const seed = state.get("drop.seed");
    const rows = [];
    for (const p of RATES) {
      for (let next = 1; next <= SEEDS; next += 1) {
        const left = deltaOf(change({ dare: { drop_rate: p, rescale } }, seed + next));
        rows.push({ p, ...lawsOf(mine, left) });
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
  state.on(["drop.rescale", "drop.seed"], () => { if (delta) measureSeeds(); });
  darePage.onTheme(drawPictures);
  return load();
}

function addControls(place, state) {
  slider(place, state, "drop.p", DROP_RATE);
  toggle(place, state, "drop.rescale", { label: "Rescale what is kept" });
  seedButton(place, state, "drop.seed");
  choice(place, state, "drop.model", { label: "Model", options: MODELS });
  choice(place, state, "drop.tensor", { label: "Matrix", options: TENSORS });
}
