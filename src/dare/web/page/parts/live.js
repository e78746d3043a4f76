// Merge live: the demonstration's models merged as the sliders move, and what comes out of it.
/* global darePage */
import { button } from "../controls.js";
import { whenRested } from "../pace.js";
import { codeCard } from "./live/code.js";
import { curveCard } from "./live/curve.js";
import { follower } from "./live/following.js";
import { loadJson, whenNear } from "./live/loading.js";
import { measurerOf } from "./live/measuring.js";
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
  const [methods, { tasks }] = await Promise.all(["methods.json", "prompts.json"].map(loadJson));
  const measurer = measurerOf(engine);
  const at = (name) => section.querySelector(`#live-${name}`);
  const get = (name) => state.get(name);
  const shown = () => settings.settingOf(get, methods);
  const whyNot = () => settings.problemOf(shown(), methods) ?? engine.whyNot(shown().method);

  addPanel(at("panel"), state, methods, engine);
  const views = {
    scores: scoreTable(at("scores")),
    samples: samplesTable(at("samples").querySelector("tbody"), tasks),
    asked: ownPrompt(at("ask"), state, (prompt, signal) =>
      whyNot() ? null : measurer.write(shown(), [prompt], signal)),
    code: codeCard(at("code"), state, methods, shown),
    curve: curveCard(at("curve"), measurer, {
      settingAt: (p) => settings.settingOf(
        (name) => (name === "live.each" ? false : name === "live.p" ? p : get(name)), methods),
      drops: () => settings.dropsAtARate(settings.chosenChain(get, methods), methods),
      whyNot,
    }),
  };
  const pins = pinsTable(at("pins"), state, methods, measurer, engine);
  button(at("scores").querySelector("[data-place=pin]"), "Pin this run", () => {
    darePage.say(pins.add());
  });
  at("copy-link").addEventListener("click", () => { at("link").textContent = state.link(); });
  showMeasured(views);

  /** Say why there are no scores, or null: there are. */
  function complain(reason) {
    const note = at("scores").querySelector("[data-place=reason]");
    note.textContent = reason ? reason.replace(/\.?$/, ".") : "";
    note.hidden = !reason;
    at("scores").querySelector("[data-place=legend]").hidden = Boolean(reason);
  }

  const follow = follower(measurer, views, complain);
  const rested = whenRested(REST_MS, (signal) => { if (!whyNot()) follow(shown(), signal); });
  const describe = () => {
    views.code.show();
    views.curve.change();
    complain(whyNot());
  };
  const change = () => {
    for (const name of ["scores", "samples", "code"]) views[name].dim();
    describe();
    rested();
  };
  describe();
  state.on(settings.NAMES, change);
  whenNear(section, () => {
    change();
    pins.show();
  });
}

/** What was measured before: marks beside the scores, and the curves. */
async function showMeasured({ scores, curve }) {
  try {
    const found = await loadJson("measured.json");
    scores.mark(marksOf(found));
    curve.showMeasured(found);
  } catch (error) {
    curve.say(error.message);
  }
}
