// Break it: four ways to spoil a merge, in the merged model's own answers and in dare's findings.
/* global darePage */
import { choice, make, slider, toggle } from "../controls.js";
import { whenRested } from "../pace.js";
import { isAbort, loadJson, markBusy, whenNear } from "./live/loading.js";
import { FULL, inPercent, measurerOf, QUICK } from "./live/measuring.js";
import { percent } from "./live/numbers.js";
import { showAnswer } from "./live/samples.js";
import { scoreTable } from "./live/scores.js";

export const defaults = {
  "breaking.way": "seed",
  "breaking.on": false,
  "breaking.m": "dare+ties",
  "breaking.p": 0.7,
  "breaking.seed": 40,
};
const NAMES = Object.keys(defaults);
const WAYS = [
  ["seed", "One seed for all"],
  ["base", "The wrong base"],
  ["nan", "A NaN"],
  ["far", "Trained too far"],
];
const METHODS = ["dare+ties", "dare+sum", "dare+linear"].map((method) => [method, method]);
const FOUND = { seed: "one-seed", base: "wrong-base", nan: "nan", far: "too-far" };
const ENGLISH = "And God said unto ";
const TONES = { stop: "Stop", change: "Change", note: "Note" };
const REST_MS = 40;
const LONGEST = 30;  // longer than any answer

/** The merge of all three, sound or broken in this way. */
export function settingOf(get, way) {
  const adder = { nan: "add-nan", far: "add-far" }[way] ?? "add";
  const seed = way === "seed" ? get("breaking.seed") : null;
  const models = [adder, "sort", "say"].map((name) => (
    { name, weight: null, drop_rate: null, seed }));
  return {
    base: way === "base" ? "base-permuted" : "base",
    method: get("breaking.m"),
    scale: 1,
    seed: get("breaking.seed"),
    models,
    stages: { dare: { drop_rate: get("breaking.p") } },
  };
}

export async function mount(section, { state, engine }) {
  const measurer = measurerOf(engine);
  const at = (name) => section.querySelector(`[data-place=${name}]`);
  addControls(at("controls"), state);
  const table = section.querySelector("#breaking-scores");
  const scores = scoreTable(table);
  const { tasks } = await loadJson("prompts.json");
  const samples = sampleRows(section.querySelector("#breaking-samples tbody"), tasks);

  function change() {
    const [way, isOn] = [state.get("breaking.way"), state.get("breaking.on")];
    for (const card of section.querySelectorAll("[data-way]")) {
      card.hidden = card.dataset.way !== way;
    }
    at("verdict").textContent = isOn ? "Broken" : "Sound";
    at("reason").textContent = "";
    table.classList.toggle("failing", isOn);
    scores.dim();
    samples.dim();
    rested();
  }

  async function follow(signal) {
    const isOn = state.get("breaking.on");
    const sound = settingOf(state.get, null);
    const broken = settingOf(state.get, state.get("breaking.way"));
    const ready = markBusy(table);
    try {
      const isSeen = measurer.seen(isOn ? broken : sound, FULL);
      await score(sound, isOn && broken, isSeen ? FULL : QUICK, signal);
      samples.show(
        await measurer.write(sound, samples.prompts, signal),
        isOn && await measurer.write(broken, samples.prompts, signal));
      await score(sound, isOn && broken, FULL, signal);
      if (isOn) darePage.say(at("measured").textContent);
    } catch (error) {
      if (!isAbort(error)) at("reason").textContent = error.message;
    } finally {
      ready();
    }
  }

  async function score(sound, broken, amount, signal) {
    const before = await measurer.score(sound, amount, signal);
    const after = broken ? await measurer.score(broken, amount, signal) : before;
    scores.show(after, amount, before.bitsPerByte, "the sound merge");
    const sounds = Object.entries(inPercent(before).tasks);
    scores.mark(Object.fromEntries(sounds.map(([task, value]) => [task, { sound: value }])));
    at("measured").textContent = broken ? inWords(inPercent(before), inPercent(after)) :
      "Switch it on, and compare.";
  }

  const rested = whenRested(REST_MS, follow);
  showFindings(section, state);
  state.on(NAMES, change);
  whenNear(section, change);
}

function addControls(place, state) {
  choice(place, state, "breaking.way", { label: "What goes wrong", options: WAYS });
  toggle(place, state, "breaking.on", { label: "Break this merge" });
  choice(place, state, "breaking.m", { label: "Method, of all three models", options: METHODS });
  slider(place, state, "breaking.p", {
    label: "Drop rate p", min: 0, max: 0.99, step: 0.01, format: (p) => p.toFixed(2),
  });
  slider(place, state, "breaking.seed", { label: "Seed", min: 0, max: 99, step: 1 });
}

/** What was measured, also where it is little. */
function inWords(before, after) {
  const means = `Mean of the three tasks: ${percent(before.mean)} sound, `
    + `${percent(after.mean)} broken.`;
  if (!Number.isFinite(after.bitsPerByte)) return `${means} Every output is NaN.`;
  if (after.mean < 3) return `${means} Nothing is left of the three skills.`;
  const falls = Object.entries(before.tasks)
    .map(([task, value]) => ({ task, from: value, to: after.tasks[task] }))
    .sort((one, other) => other.from - other.to - (one.from - one.to));
  const [{ task, from, to }] = falls;
  if (from - to <= 2) return `${means} At this seed and p it does no harm.`;
  if (from - to <= 10) return `${means} At this seed and p it does little.`;
  return `${means} Most is lost in ${task}: ${percent(from)} → ${percent(to)}.`;
}

const short = (text) => (text.length > LONGEST ? `${text.slice(0, LONGEST)}…` : text);

/** Rows of prompts with what both merges write. */
function sampleRows(body, tasks) {
  const asked = tasks.map(({ examples: [[prompt, answer]] }) => ({ prompt, answer }));
  asked.push({ prompt: ENGLISH, answer: null });
  const rows = asked.map(({ prompt }) => {
    const cells = [0, 1].map(() => make("td", { className: "written" }, "…"));
    body.append(make("tr", {}, make("th", { scope: "row" }, make("code", {}, prompt)), ...cells));
    return cells;
  });
  const card = body.closest(".card");
  return {
    prompts: asked.map(({ prompt }) => prompt),
    show(sound, broken) {
      for (const [index, { answer }] of asked.entries()) {
        showAnswer(rows[index][0], short(sound[index]), answer);
        if (broken) showAnswer(rows[index][1], short(broken[index]), answer);
        else rows[index][1].textContent = "–";
      }
      delete card.dataset.stale;
    },
    dim() { card.dataset.stale = "true"; },
  };
}

/** What `dare analyze` finds in the broken inputs, or what a plan warns of. */
async function showFindings(section, state) {
  const list = section.querySelector("#breaking-findings");
  let broken;
  try {
    broken = await loadJson("broken.json");
  } catch (error) {
    list.replaceChildren(make("li", { className: "note" }, error.message));
    return;
  }
  for (const place of section.querySelectorAll("[data-command]")) {
    place.textContent = broken[place.dataset.command].command;
  }
  const show = () => {
    const { findings = [], warnings = [], seed } = broken[FOUND[state.get("breaking.way")]];
    const mine = state.get("breaking.seed");
    const ofMine = (text) => text.replaceAll(`${seed}`, mine);
    section.querySelector("[data-shows=seeds]").textContent = `${mine} ${mine} ${mine}`;
    list.replaceChildren(
      ...warnings.map((text) => (
        finding({ severity: "change", seen: ofMine(text), models: [] }, "Warning"))),
      ...findings.filter(({ severity }) => severity === "stop").map((one) => finding(one)));
  };
  state.on(["breaking.way", "breaking.seed"], show);
  show();
}

function finding({ severity, models, seen, matters, remedy }, word = TONES[severity]) {
  const who = [...new Set(models)].join(", ");
  const title = make("h3", {}, ...(who ? [make("b", {}, who)] : []), seen);
  const badge = make("span", { className: "badge" }, word);
  const head = make("div", { className: "head" }, badge, title);
  const item = make("li", { className: severity }, head);
  if (matters) item.append(make("p", { className: "matters" }, `${matters}.`));
  if (remedy) item.append(make("p", {}, make("b", {}, "Remedy: "), `${remedy}.`));
  return item;
}
