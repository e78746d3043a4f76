// Merge live: the demonstration's models merged as the sliders move, and what comes out of it.
/* global darePage */
import { button } from "../controls.js";
import { whenRested } from "../pace.js";
import { codeCard } from "./live/code.js";
import { curveCard } from "./live/curve.js";
import { isAbort, loadJson, markBusy, whenNear } from "./live/loading.js";
import { BASE_ALONE, FULL, inPercent, measurerOf, QUICK } from "./live/measuring.js";
import { percent } from "./live/numbers.js";
import { addPanel } from "./live/panel.js";
import { pinsTable } from "./live/pins.js";
import { ownPrompt, samplesTable } from "./live/samples.js";
import { marksOf, scoreTable } from "./live/scores.js";
import * as settings from "./live/setting.js";

export const defaults = {
  ...settings.defaults,
  "live.as": "command",
  "live.ask": "12+34=",
  "live.pins": "",
};
const REST_MS = 40;  // moves of a slider that come faster than this are one

export async function mount(section, { state, engine }) {
  const [methods, { tasks }] = await Promise.all([loadJson("methods.json"), loadJson("prompts.json")]);
  const measurer = measurerOf(engine);
  const at = (name) => section.querySelector(`#live-${name}`);
  const get = (name) => state.get(name);
  const shown = () => settings.settingOf(get, methods);
  const problem = () => settings.problemOf(shown(), methods);
  const whyNot = () => problem() ?? engine.whyNot(shown().method);

  addPanel(at("panel"), state, methods, engine);
  const scores = scoreTable(at("scores"));
  const samples = samplesTable(at("samples").querySelector("tbody"), tasks);
  const code = codeCard(at("code"), state, methods, shown);
  const pins = pinsTable(at("pins"), state, methods, measurer, engine);
  const curve = curveCard(at("curve"), measurer, {
    settingAt: (p) => settings.settingOf(
      (name) => (name === "live.each" ? false : name === "live.p" ? p : get(name)), methods),
    drops: () => settings.dropsAtARate(settings.chosenChain(get, methods), methods),
    whyNot,
  });
  const asked = ownPrompt(at("ask"), state, (prompt, signal) =>
    whyNot() ? null : measurer.write(shown(), [prompt], signal));
  button(at("scores").querySelector("[data-place=pin]"), "Pin this run", () => {
    darePage.say(pins.add());
  });
  at("copy-link").addEventListener("click", () => { at("link").textContent = state.link(); });
  const measured = loadJson("measured.json").catch((error) => {
    at("curve").querySelector("[data-place=progress]").textContent = error.message;
  });
  measured.then((found) => {
    if (!found) return;
    scores.mark(marksOf(found));
    curve.showMeasured(found);
  });

  function change() {
    for (const part of [scores, samples, code]) part.dim();
    code.show();
    curve.change();
    complain(whyNot(), !problem());
    rested();
  }

  /** Fill in what a setting gives: rough scores first, then texts and digest, then full scores. */
  async function follow(signal) {
    if (whyNot()) return;
    const setting = shown();
    const ready = markBusy(at("scores"));
    try {
      if (!measurer.seen(setting, FULL)) await showScore(setting, QUICK, signal);
      samples.show(await measurer.write(setting, samples.prompts, signal));
      asked.ask();
      code.showDigest(setting.models.length ? await measurer.merge(setting, signal) : "–");
      await showScore(setting, FULL, signal);
      announce(measurer.seen(setting, FULL));
    } catch (error) {
      if (!isAbort(error)) complain(error.message, false);
    } finally {
      ready();
    }
  }

  async function showScore(setting, amount, signal) {
    const score = await measurer.score(setting, amount, signal);
    scores.show(score, amount);
    curve.mark(setting, score);
    compareEnglish(score, amount, signal);
  }

  /** The base's English is measured once, and not waited for. */
  async function compareEnglish(score, amount, signal) {
    const base = await measurer.score(BASE_ALONE, amount).catch(() => null);
    if (base && !signal.aborted) scores.compare(score.bitsPerByte, base.bitsPerByte);
  }

  /** Say why there are no scores; `isEngine`: the local engine would have them. */
  function complain(reason, isEngine) {
    const note = at("scores").querySelector("[data-place=reason]");
    note.querySelector("span").textContent = reason ?? "";
    note.querySelector("code").hidden = !reason || !isEngine;
    note.hidden = !reason;
    at("scores").querySelector("[data-place=legend]").hidden = Boolean(reason);
  }

  const rested = whenRested(REST_MS, follow);
  state.on(settings.NAMES, change);
  code.show();
  curve.change();
  complain(whyNot(), !problem());
  whenNear(section, () => {
    change();
    pins.show();
  });
}

function announce(score) {
  const { tasks } = inPercent(score);
  const words = Object.entries(tasks).map(([task, value]) => `${task} ${percent(value)}`);
  darePage.say(`Right answers: ${words.join(", ")}.`);
}
