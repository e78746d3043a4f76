// Signs and conflict: three deltas of one matrix, the vote on each element, and what TIES leaves.
/* global darePage */
import { choice, DROP_RATE, seedButton, slider, toggle } from "../controls.js";
import { combine } from "../engine/core.js";
import { conflictsOf } from "../measures.js";
import { breathe, oncePerFrame } from "../pace.js";
import { addCursor, drawMatrix, usualSize } from "../pictures.js";
import { changeOf, deltaOf, NAMES, SIDE, TENSORS } from "../tensors.js";
import { percent, show } from "../words.js";
import { addFigures, BEFORE, NOW } from "./signs/figures.js";
import { drawPatch, PATCH, writeVote } from "./signs/patch.js";

export const defaults = {
  "signs.dare": false,
  "signs.p": 0.8,
  "signs.keep": 1,
  "signs.seed": 42,
  "signs.tensor": "model.layers.0.self_attn.v_proj.weight",
  "signs.row": 48,
  "signs.column": 48,
  "signs.element": 65,
};

const RATES = [...Array.from({ length: 20 }, (_, at) => at / 20), 0.97, 0.99];
const PALE = 0.3;

export function mount(section, { state, complain }) {
  putInside(state);
  addControls(section.querySelector(".panel"), state);
  const pictures = [...section.querySelectorAll("canvas[data-picture]")];
  const patch = section.querySelector("canvas[data-patch]");
  const figures = addFigures();
  const moveFrame = addCursor(
    pictures, SIDE, SIDE,
    (row, column) => state.set({ "signs.row": row, "signs.column": column }),
    { span: PATCH, press: true },
  );
  const moveCell = addCursor([patch], PATCH, PATCH, (row, column, byKeyboard) => {
    isSpoken = byKeyboard;
    state.set({ "signs.element": row * PATCH + column });
  }, { framed: true });
  let isSpoken = false;
  let changes = null;
  let deltas = null;
  let limits = [];
  let before = null;  // conflicts of the deltas as they are
  let voted = null;  // the deltas that vote now, and what was elected

  async function load() {
    const tensor = state.get("signs.tensor");
    const loaded = await Promise.all(NAMES.map((name) => changeOf(name, tensor)));
    if (tensor !== state.get("signs.tensor")) return;
    changes = loaded;
    deltas = changes.map((change) => deltaOf(change()));
    limits = deltas.map(usualSize);
    before = conflictsOf(deltas, voteOn(changes, state, 0, 1).sign);
    redraw();
    measureRates();
  }

  const rate = () => (state.get("signs.dare") ? state.get("signs.p") : 0);

  function redraw() {
    if (!deltas) return;
    voted = voteOn(changes, state, rate());
    drawPictures();
    showNumbers();
    showPatch();
  }

  function drawPictures() {
    if (!voted) return;
    const limit = Math.max(...limits);
    const [vote, merged] = pictures.slice(NAMES.length);
    voted.terms.forEach((term, at) => drawMatrix(pictures[at], term, SIDE, { limit }));
    drawMatrix(vote, votesOf(voted), SIDE, { limit: 1 });
    drawMatrix(merged, voted.merged, SIDE, { limit });
  }

  function showNumbers() {
    const now = conflictsOf(voted.terms, voted.sign);
    show(section, {
      meeting: percent(now.meeting),
      conflicting: percent(now.conflicting),
      "conflicting-remark": `expected by chance: ${percent(now.chance)}`,
      empty: percent(voted.sign.filter((sign) => sign === 0).length / voted.sign.length),
    });
    figures.silenced.update({
      rows: [[BEFORE, before], [NOW, now]].flatMap(([when, { silenced }]) =>
        silenced.map((share, at) => ({ model: NAMES[at], when, share })),
      ),
    });
    figures.rates.update({ here: [{ p: rate(), conflicting: now.conflicting }] });
  }

  function showPatch() {
    if (!voted) return;
    const [row, column] = [state.get("signs.row"), state.get("signs.column")];
    const element = state.get("signs.element");
    const [down, right] = [Math.floor(element / PATCH), element % PATCH];
    moveFrame(row, column);
    moveCell(down, right);
    drawPatch(patch, voted, row, column, SIDE, 0.7 * Math.max(...limits) * grown());
    const line = section.querySelector("[data-shows=written-vote]");
    line.setAttribute("aria-live", isSpoken ? "polite" : "off");
    const at = (row + down) * SIDE + column + right;
    writeVote(line, NAMES, deltas, voted, at, `Row ${row + down}, column ${column + right}`);
  }

  const grown = () => 1 / (1 - rate());

  /** How often signs conflict at other drop rates, all else as it is. */
  async function measureRates() {
    const mine = [deltas, state.get("signs.seed"), state.get("signs.keep")];
    const rows = [];
    for (const p of RATES) {
      const { terms, sign } = voteOn(changes, state, p);
      rows.push({ p, conflicting: conflictsOf(terms, sign).conflicting });
      await breathe();
      const now = [deltas, state.get("signs.seed"), state.get("signs.keep")];
      if (now.some((value, at) => value !== mine[at])) return;
    }
    figures.rates.update({ rates: rows });
  }

  state.on(["signs.tensor"], () => load().catch((error) => complain(section, error)));
  state.on(["signs.dare", "signs.p", "signs.keep", "signs.seed"], oncePerFrame(redraw));
  state.on(["signs.keep", "signs.seed"], () => { if (deltas) measureRates(); });
  state.on(["signs.row", "signs.column", "signs.element"], oncePerFrame(showPatch));
  darePage.onTheme(() => {
    drawPictures();
    showPatch();
  });
  new ResizeObserver(showPatch).observe(patch);
  return load();
}

/** An address may name a place that is not in the picture. */
function putInside(state) {
  const clamp = (name, last) => Math.max(0, Math.min(last, Math.floor(state.get(name))));
  state.set({
    "signs.row": clamp("signs.row", SIDE - PATCH),
    "signs.column": clamp("signs.column", SIDE - PATCH),
    "signs.element": clamp("signs.element", PATCH * PATCH - 1),
  });
}

function addControls(place, state) {
  toggle(place, state, "signs.dare", { label: "DARE before the vote" });
  const rate = slider(place, state, "signs.p", DROP_RATE);
  const follow = () => { rate.disabled = !state.get("signs.dare"); };
  state.on(["signs.dare"], follow);
  follow();
  slider(place, state, "signs.keep", {
    label: "Keep the largest", min: 0.05, max: 1, step: 0.05,
    format: (share) => (share === 1 ? "all" : percent(share, 0)),
  });
  seedButton(place, state, "signs.seed", NAMES.length);
  choice(place, state, "signs.tensor", { label: "Matrix", options: TENSORS });
}

/** What votes, and the outcome: each delta with its own mask, rescaled, trimmed to its largest. */
function voteOn(changes, state, p, keepRatio = state.get("signs.keep")) {
  const stages = { dare: { drop_rate: p }, trim: { keep_ratio: keepRatio } };
  const voters = changes.map((change, at) => change(stages, state.get("signs.seed") + at));
  const merged = combine(voters[0].base, voters, true);
  return { terms: voters.map(deltaOf), merged, sign: merged.map(Math.sign) };
}

/** The elected sign of each element: full where models disagree, pale where they do not. */
function votesOf({ terms, sign }) {
  return Float32Array.from(sign, (elected, at) => {
    const isDisputed = terms.some((term) => term[at] * elected < 0);
    return isDisputed ? elected : PALE * elected;
  });
}
