// What one model writes after DARE, and how many answers were right at the rates tried so far.
import { button, make } from "../../controls.js";
import { addFigure } from "../../figures.js";
import { whenRested } from "../../pace.js";
import { examplesOf } from "../../prompts.js";

const ASKED = 8;
const RESTED_MS = 200;
const WAITING_MS = 300;
const SERIES = ["rescaled", "not rescaled"];
const RATES = [0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99];

/** Fill the table of answers, and again whenever a slider of the part has come to rest. */
export function addAnswers(section, state, engine) {
  const body = section.querySelector("tbody");
  const verdict = section.querySelector("[data-shows=verdict]");
  const itself = section.querySelector("[data-shows=itself]");
  const figure = addFigure("drop-tried", triedSpec(), "Right answers of eight over drop rates, "
    + "for the settings that were tried, with and without rescaling.");
  const tried = new Map();  // by setting: what was right

  async function write(signal) {
    const setting = settingOf(state);
    const waiting = setTimeout(() => verdict.classList.add("waiting"), WAITING_MS);
    try {
      const examples = await examplesOf(state.get("drop.model"), ASKED);
      const prompts = examples.map(([prompt]) => prompt);
      const texts = await engine.write(setting, prompts, signal);
      if (signal.aborted) return;
      const right = showAnswers(body, examples, texts.map(firstLine));
      verdict.textContent = `${right} of ${ASKED} right at p = ${state.get("drop.p").toFixed(2)}`;
      const whole = await engine.write(settingOf(state, 0), prompts, signal);
      itself.textContent = `With nothing dropped it gets ${countRight(examples, whole)} right.`;
      remember(setting, right);
    } catch (error) {
      if (error.name !== "AbortError") verdict.textContent = error.message;
    } finally {
      clearTimeout(waiting);
      if (!signal.aborted) verdict.classList.remove("waiting");
    }
  }

  function remember(setting, right) {
    const { drop_rate: p, rescale } = setting.stages.dare;
    const model = setting.models[0].name;
    const what = SERIES[rescale ? 0 : 1];
    tried.set(JSON.stringify(setting), { model, p, right, what, seed: setting.seed });
    figure.update({ tried: [...tried.values()].filter((point) => point.model === model) });
  }

  /** Dots at all rates, with and without rescaling, for the model and the seed of now. */
  async function tryAll(event) {
    const { currentTarget: pressed } = event;
    pressed.disabled = true;
    try {
      const examples = await examplesOf(state.get("drop.model"), ASKED);
      for (const p of RATES) {
        for (const rescale of [true, false]) {
          const setting = settingOf(state, p, rescale);
          const texts = await engine.write(setting, examples.map(([prompt]) => prompt));
          remember(setting, countRight(examples, texts));
        }
      }
    } catch (error) {
      verdict.textContent = error.message;
    }
    pressed.disabled = false;
  }

  button(section.querySelector("[data-place=try-all]"), "Try all rates", tryAll);
  const ask = whenRested(RESTED_MS, write);
  state.on(["drop.p", "drop.rescale", "drop.seed", "drop.model"], ask);
  ask();
}

function settingOf(state, p = state.get("drop.p"), rescale = state.get("drop.rescale")) {
  return {
    base: "base",
    method: "dare+sum",
    scale: 1,
    seed: state.get("drop.seed"),
    models: [{ name: state.get("drop.model"), weight: null, drop_rate: null, seed: null }],
    stages: { dare: { drop_rate: p, rescale } },
  };
}

const firstLine = (text) => text.split("\n")[0];
const countRight = (examples, texts) =>
  texts.filter((text, at) => firstLine(text) === examples[at][1]).length;

/** One row for each example; the number of right ones. */
function showAnswers(body, examples, texts) {
  const rows = examples.map(([prompt, answer], at) => {
    const isRight = texts[at] === answer;
    return make("tr", { className: isRight ? "right" : "wrong" },
      make("th", { scope: "row" }, make("code", {}, prompt)),
      make("td", { className: "text" }, make("code", {}, texts[at] || "(nothing)")),
      make("td", { className: "text" }, isRight ? "✓ right" : `✗ it is ${answer}`),
    );
  });
  body.replaceChildren(...rows);
  return body.querySelectorAll(".right").length;
}

function triedSpec() {
  const by = { field: "what", type: "nominal", title: null, scale: { domain: SERIES } };
  return {
    height: 200,
    datasets: { tried: [] },
    data: { name: "tried" },
    mark: { type: "point", filled: true, size: 60, opacity: 0.8 },
    encoding: {
      x: {
        field: "p", type: "quantitative", title: "drop rate p", scale: { domain: [0, 1] },
        axis: { tickCount: 5, grid: false },
      },
      y: {
        field: "right", type: "quantitative", title: `right, of ${ASKED}`,
        scale: { domain: [0, ASKED] }, axis: { tickCount: 4 },
      },
      color: by,
      shape: by,
      tooltip: [
        { field: "p", format: ".2f" }, { field: "right" }, { field: "seed" }, { field: "what" },
      ],
    },
  };
}
