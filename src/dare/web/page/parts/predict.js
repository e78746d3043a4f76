// Predict first: the reader draws the curve of right answers over p, then sees the measured one.
/* global darePage */
import { button, choice, slider } from "../controls.js";
import { addFigure, band, colours, layer, RATE, RIGHT, rowsOf } from "../figures.js";
import { loadJson } from "../loading.js";
import { points } from "../words.js";
import { guessState, offBy, RATES, readGuess } from "./predict/guess.js";

export const defaults = {
  "predict.who": "sort",
  "predict.q": "on",  // the question: with rescaling or without it
  "predict.on": "",  // the guesses, in per cent: "100-90-…"
  "predict.off": "",
  "predict.seen": "",  // the questions that were revealed: "sort.on,sort.off"
};
const NAMES = Object.keys(defaults);
const MODELS = [["add", "add: 64+19="], ["sort", "sort garden:"], ["say", "say 128:"]];
const QUESTIONS = [["on", "1. With rescaling"], ["off", "2. Without rescaling"]];
const CLOSE = 0.015;  // to a rate, so that its point moves with the pointer
const [GUESS, MEASURED] = ["your guess", "measured"];
const WHY = {
  on: "Rescaling keeps every change right on average. The noise grows: it is as big as the change "
    + "at p = 0.5, 3 times as big at 0.9, 10 times at 0.99. The layers average it out, up to a point.",
  off: "Without rescaling, only 1 − p of each change is left on average, so the model falls back "
    + "to its base. It fails far sooner, although there is less noise.",
};

export async function mount(section, { state }) {
  const measured = await loadJson("measured.json");
  const at = (name) => section.querySelector(`[data-place=${name}]`);
  choice(at("controls"), state, "predict.q", { label: "Question", options: QUESTIONS });
  choice(at("controls"), state, "predict.who", { label: "Model", options: MODELS });
  for (const [index, rate] of RATES.entries()) {
    slider(at("sliders"), guessState(state), `predict.y.${index}`, {
      label: `Right at p = ${rate}`, min: 0, max: 100, step: 1, format: points,
    });
  }
  const reveal = button(at("buttons"), "Show what happens", () => {
    state.set({ "predict.seen": [...seen(), key()].join() });
    darePage.say(`${at("verdict").textContent}. ${at("why").textContent}`);
  });
  button(at("buttons"), "Guess again", () => {
    const others = seen().filter((name) => name !== key());
    state.set({ "predict.seen": others.join(), [guessName()]: "" });
  });
  const figure = addFigure("predict", spec(), "Right answers over drop rates: your guess, and once "
    + "it is revealed the measured curve with its spread over five seeds.");
  const chart = document.getElementById("chart-predict");
  drawOn(chart, (rate, value) => guessState(state).set({ [`predict.y.${rate}`]: value }));

  const key = () => `${state.get("predict.who")}.${state.get("predict.q")}`;
  const seen = () => state.get("predict.seen").split(",").filter(Boolean);
  const guessName = () => `predict.${state.get("predict.q")}`;
  const rows = () => {
    const [who, rescale] = [state.get("predict.who"), state.get("predict.q") === "on"];
    const found = measured.curves.find(
      ({ models, rescale: is }) => models.join() === who && is === rescale);
    return rowsOf(found, MEASURED);
  };

  function show() {
    const guess = readGuess(state.get(guessName()));
    const isShown = seen().includes(key());
    const isDrawn = state.get(guessName()) !== "";
    const found = rows();
    figure.update({
      guess: RATES.map((p, index) => ({ p, mean: guess[index], kind: GUESS })),
      measured: isShown ? found : [],
    });
    reveal.disabled = isShown || !isDrawn;
    at("question").textContent = state.get("predict.q") === "on"
      ? "Drop a share p, rescale the rest: how many answers stay right?"
      : "Drop a share p, and do not rescale: how many answers stay right?";
    at("how").textContent = isShown
      ? "The band reaches from the worst of five seeds to the best. You can still move your guess."
      : isDrawn ? "Now press “Show what happens”."
      : "Drag across the chart. By keyboard: “Set it with sliders”.";
    section.querySelector("#predict-outcome").hidden = !isShown;
    at("verdict").textContent = inWords(offBy(guess, found));
    at("why").textContent = WHY[state.get("predict.q")];
    at("next").hidden = state.get("predict.q") !== "on";
    section.querySelector("#predict-larger").hidden = !seen().length;
  }

  state.on(NAMES, show);
  show();
}

function inWords({ mean, worst }) {
  if (worst.off < 5) return `Good guess: you were off by ${mean.toFixed(0)} points on average`;
  return `You were off by ${mean.toFixed(0)} points on average, most at p = ${worst.p}: `
    + `you said ${points(worst.guess)}, it was ${points(worst.mean)}`;
}

/** Let a pointer draw: `put(index, value)` is called for each rate that it takes or passes. */
function drawOn(chart, put) {
  let last = null;

  function placeOf(event) {
    const plot = chart.querySelector(".role-frame .background")?.getBoundingClientRect();
    if (!plot) return null;
    const within = (share) => Math.max(0, Math.min(1, share));
    return {
      p: within((event.clientX - plot.left) / plot.width),
      value: 100 * within(1 - (event.clientY - plot.top) / plot.height),
    };
  }

  function pass(from, to) {
    for (const [index, rate] of RATES.entries()) {
      if (Math.abs(rate - to.p) <= CLOSE) put(index, Math.round(to.value));
      else if (rate > Math.min(from.p, to.p) && rate < Math.max(from.p, to.p)) {
        const share = (rate - from.p) / (to.p - from.p);
        put(index, Math.round(from.value + share * (to.value - from.value)));
      }
    }
  }

  chart.addEventListener("pointerdown", (event) => {
    last = placeOf(event);
    if (!last || event.button !== 0) return;
    event.preventDefault();
    chart.setPointerCapture(event.pointerId);
    put(nearest(last.p), Math.round(last.value));
  });
  chart.addEventListener("pointermove", (event) => {
    if (!chart.hasPointerCapture(event.pointerId)) return;
    const here = placeOf(event);
    pass(last, here);
    last = here;
  });
}

const nearest = (p) =>
  RATES.reduce((best, rate, index) =>
    Math.abs(rate - p) < Math.abs(RATES[best] - p) ? index : best, 0);

function spec() {
  const color = colours("kind", [GUESS, MEASURED], { legend: { symbolOpacity: 1 } });
  const guess = { type: "line", strokeDash: [6, 4], point: { filled: true, size: 110 } };
  return {
    height: 265,
    datasets: { guess: [], measured: [] },
    layer: [
      ...band(color, { type: "line", point: { filled: true, size: 30 } }),
      layer("guess", guess, { x: RATE, y: RIGHT, color }),
    ],
  };
}
