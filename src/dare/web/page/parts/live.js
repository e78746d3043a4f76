// Merge live: the demonstration's models merged as the sliders move, and what comes out of it.
/* global darePage */
import { isAbort, loadJson, markBusy, whenNear, writeTwice } from "../loading.js";
import { mounted, whenRested } from "../pace.js";
import { points } from "../words.js";
import { curveCard } from "./live/curve.js";
import { addPanel } from "./live/panel.js";
import { ownPrompt, samplesTable } from "./live/samples.js";
import { FULL, inPercent, QUICK, scoreTable, showKnown } from "./live/scores.js";
import * as settings from "./live/setting.js";

export const defaults = { ...settings.defaults, "live.ask": "12+34=" };
const REST_MS = 40;  // moves of a slider that come faster than this are one
const EACH = 2;  // prompts of a task

export async function mount(section, { state, engine }) {
  const [measured, { tasks }] = await Promise.all(
    ["measured.json", "prompts.json"].map(loadJson));
  const at = (name) => section.querySelector(`#live-${name}`);
  const shown = () => settings.settingOf(state.get);

  addPanel(at("panel"), state);
  const scores = scoreTable(at("scores"));
  const samples = samplesTable(at("samples").querySelector("tbody"), tasks, EACH);
  const asked = ownPrompt(at("ask"), state, (prompt, show, signal) =>
    writeTwice(engine, shown(), [prompt], show, signal));
  const curve = curveCard(at("curve"));
  const reason = at("scores").querySelector("[data-place=reason]");
  const { base } = measured.models;
  scores.mark(Object.fromEntries(Object.keys(base.right).map((task) => [
    task, { base: base.right[task], own: measured.models[task].right[task] },
  ])));
  curve.showMeasured(measured);

  function showScore(setting, found, amount) {
    const known = amount === QUICK ? undefined : base.bits_per_byte;
    scores.show(found, amount, known, "the base");
    const { tasks: right, mean } = inPercent(found);
    curve.mark(setting, mean);
    return Object.entries(right).map(([task, value]) => `${task} ${points(value)}`).join(", ");
  }

  const score = async (setting, amount, signal) =>
    showScore(setting, await engine.score(setting, amount, signal), amount);

  function showDigest(digest) {
    at("digest").textContent = digest;
    delete at("code").dataset.stale;
  }

  async function begin(setting) {
    const known = await showKnown(setting, samples, (...found) => showScore(setting, ...found));
    if (known) showDigest(known.sha256);
    return known;
  }

  /** What is known or rough scores first, then texts and digest, then full scores. */
  async function follow(signal) {
    const setting = shown();
    const ready = markBusy(at("scores"));
    try {
      await ((await begin(setting)) ? mounted() : score(setting, QUICK, signal));
      signal.throwIfAborted();
      asked.ask();
      samples.show(await engine.write(setting, samples.prompts, signal));
      showDigest(await engine.merge(setting, signal));
      darePage.say(`Right answers: ${await score(setting, FULL, signal)}.`);
    } catch (error) {
      if (!isAbort(error)) reason.textContent = error.message;
    } finally {
      ready();
    }
  }

  const rested = whenRested(REST_MS, follow);
  const describe = () => {
    const setting = shown();
    at("text").textContent = setting.models.length
      ? settings.recipeText(setting) : "# Choose at least one model.\n";
  };
  const change = () => {
    reason.textContent = "";
    scores.dim();
    samples.dim();
    at("code").dataset.stale = "true";
    describe();
    rested();
  };
  describe();
  state.on(settings.NAMES, change);
  whenNear(section, change);
  await begin(shown());
}
