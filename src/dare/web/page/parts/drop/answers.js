// What one model writes after DARE, and how many answers were right at the rates tried so far.
import { button, make } from "../../controls.js";
import { addFigure, colours, layer, quantity, RATE } from "../../figures.js";
import { examplesOf, isAbort, markBusy, writeTwice } from "../../loading.js";
import { whenRested } from "../../pace.js";
import { sumOf } from "../../tensors.js";

const ASKED = 8;
const RESTED_MS = 200;
const SERIES = ["rescaled", "not rescaled"];
const RATES = [0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99];

/** Fill the table of answers, and again whenever a slider of the part has come to rest. */
export function addAnswers(section, state, engine) {
  const body = section.querySelector("tbody");
  const verdict = section.querySelector("[data-shows=verdict]");
  const itself = section.querySelector("[data-shows=itself]");
  const figure = addFigure("drop-tried", triedSpec(), "Right answers, of eight, over drop rates, "
    + "for the settings that you tried, with and without rescaling.");
  const tried = new Map();  // by setting: what was right

  /** What a setting has right, among the dots from now on: `show(examples, texts, right)`. */
  async function ask(setting, signal, show = () => {}) {
    const [{ name: model }] = setting.models;
    const examples = await examplesOf(model, ASKED);
    const { drop_rate: p, rescale } = setting.stages.dare;
    await writeTwice(engine, setting, examples.map(([prompt]) => prompt), (texts) => {
      const right = texts.filter((text, at) => text === examples[at][1]).length;
      const what = SERIES[rescale ? 0 : 1];
      tried.set(JSON.stringify(setting), { model, p, right, what, seed: setting.seed });
      figure.update({ tried: [...tried.values()].filter((point) => point.model === model) });
      show(examples, texts, right);
    }, signal);
  }

  async function write(signal) {
    const ready = markBusy(verdict);
    try {
      await ask(settingOf(state), signal, (examples, texts, right) => {
        body.replaceChildren(...examples.map((example, at) => row(example, texts[at])));
        verdict.textContent = `${right} of ${ASKED} right at p = ${state.get("drop.p").toFixed(2)}`;
      });
      await ask(settingOf(state, 0), signal, (_examples, _texts, right) => {
        itself.textContent = `With nothing dropped: ${right}.`;
      });
    } catch (error) {
      if (!isAbort(error)) verdict.textContent = error.message;
    } finally {
      ready();
    }
  }

  /** Dots at all rates, with and without rescaling, for the model and the seed of now. */
  async function tryAll({ currentTarget: pressed }) {
    pressed.disabled = true;
    try {
      for (const p of RATES) {
        for (const rescale of [true, false]) await ask(settingOf(state, p, rescale));
      }
    } catch (error) {
      verdict.textContent = error.message;
    }
    pressed.disabled = false;
  }

  button(section.querySelector("[data-place=try-all]"), "Try all rates", tryAll);
  const rested = whenRested(RESTED_MS, write);
  state.on(["drop.p", "drop.rescale", "drop.seed", "drop.model"], rested);
  rested();
}

const settingOf = (state, p = state.get("drop.p"), rescale = state.get("drop.rescale")) =>
  sumOf([state.get("drop.model")], p, state.get("drop.seed"), rescale);

function row([prompt, answer], text) {
  const isRight = text === answer;
  return make("tr", { className: isRight ? "right" : "wrong" },
    make("th", { scope: "row" }, make("code", {}, prompt)),
    make("td", { className: "text" }, make("code", {}, text || "(nothing)")),
    make("td", { className: "text" }, isRight ? "✓" : `✗ not ${answer}`),
  );
}

function triedSpec() {
  const by = colours("what", SERIES);
  const fields = [{ field: "p", format: ".2f" }, ...["right", "seed", "what"].map((field) => ({ field }))];
  return {
    height: 200,
    datasets: { tried: [] },
    ...layer("tried", { type: "point", filled: true, size: 60, opacity: 0.8 }, {
      x: RATE,
      y: quantity("right", `right, of ${ASKED}`, [0, ASKED], { tickCount: 4 }),
      color: by,
      shape: by,
      tooltip: fields,
    }),
  };
}
