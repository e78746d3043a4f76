// What one model writes after DARE, and how many answers were right at the rates tried so far.
import { make } from "../../controls.js";
import { addFigure, colours, layer, RATE, RIGHT, rowsOf } from "../../figures.js";
import { examplesOf, isAbort, loadJson, markBusy, writeTwice } from "../../loading.js";
import { whenRested } from "../../pace.js";
import { sumOf } from "../../tensors.js";

const ASKED = 8;
const RESTED_MS = 200;
const SERIES = ["rescaled", "not rescaled"];

/** Fill the table of answers, and again whenever a slider of the part has come to rest. */
export function addAnswers(section, state, engine) {
  const body = section.querySelector("tbody");
  const verdict = section.querySelector("[data-shows=verdict]");
  const itself = section.querySelector("[data-shows=itself]");
  const figure = addFigure("drop-tried", triedSpec(), "Right answers over drop rates, with "
    + "and without rescaling: as measured before, and for the settings that you tried.");
  const tried = new Map();  // by setting: what was right

  /** What a setting has right, among the dots from now on: `show(examples, texts, right)`. */
  async function ask(setting, signal, show = () => {}) {
    const [{ name: model }] = setting.models;
    const examples = await examplesOf(model, ASKED);
    const { drop_rate: p, rescale } = setting.stages.dare;
    await writeTwice(engine, setting, examples.map(([prompt]) => prompt), (texts) => {
      const right = texts.filter((text, at) => text === examples[at][1]).length;
      const what = SERIES[rescale ? 0 : 1];
      tried.set(JSON.stringify(setting), { model, p, mean: 100 * right / ASKED, what, seed: setting.seed });
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

  async function showMeasured() {
    const { curves } = await loadJson("measured.json");
    const mine = curves.filter(({ models }) => models.join() === state.get("drop.model"));
    figure.update({
      measured: mine.flatMap((curve) => rowsOf(curve).map((one) =>
        ({ ...one, what: SERIES[curve.rescale ? 0 : 1] }))),
    });
  }

  const rested = whenRested(RESTED_MS, write);
  state.on(["drop.p", "drop.rescale", "drop.seed", "drop.model"], rested);
  state.on(["drop.model"], showMeasured);
  rested();
  showMeasured();
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
  const fields = [{ field: "p", format: ".2f" }, { field: "mean", title: "right, %", format: ".0f" },
    { field: "seed" }, { field: "what" }];
  const place = { x: RATE, y: RIGHT, color: by };
  return {
    height: 200,
    datasets: { measured: [], tried: [] },
    layer: [
      layer("measured", { type: "line" }, place),
      layer("tried", { type: "point", filled: true, size: 60, opacity: 0.8 },
        { ...place, shape: by, tooltip: fields }),
    ],
  };
}
