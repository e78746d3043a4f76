// Break it: four ways to spoil a merge, in the merged model's own answers and in dare's findings.
/* global darePage */
import { coded } from "../analysis/elements.js";
import { choice, DROP_RATE, make, slider, toggle } from "../controls.js";
import { isAbort, loadJson, markBusy, whenNear } from "../loading.js";
import { mounted, whenRested } from "../pace.js";
import { points } from "../words.js";
import { samplesTable } from "./live/samples.js";
import { FULL, inPercent, QUICK, scoreTable, showKnown } from "./live/scores.js";

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
const TONES = { severe: "Severe", warning: "Warning", note: "Note" };
const REST_MS = 40;

/** The merge of all three, sound or broken in this way. */
export function settingOf(get, way) {
  const adder = { nan: "add-nan", far: "add-far" }[way] ?? "add";
  const seed = get("breaking.seed");
  return {
    base: way === "base" ? "base-permuted" : "base",
    method: get("breaking.m"),
    scale: 1,
    seed,
    models: [adder, "sort", "say"].map((name) => (way === "seed" ? { name, seed } : { name })),
    stages: { dare: { drop_rate: get("breaking.p") } },
  };
}

export async function mount(section, { state, engine }) {
  const at = (name) => section.querySelector(`[data-place=${name}]`);
  addControls(at("controls"), state);
  const table = section.querySelector("#breaking-scores");
  const scores = scoreTable(table);
  const { tasks } = await loadJson("prompts.json");
  const samples = samplesTable(section.querySelector("#breaking-samples tbody"), tasks, 1, 2);

  function change() {
    const [way, isOn] = [state.get("breaking.way"), state.get("breaking.on")];
    for (const card of section.querySelectorAll("[data-way]")) {
      card.hidden = card.dataset.way !== way;
    }
    at("verdict").textContent = isOn ? "Broken" : "Intact";
    at("reason").textContent = "";
    table.classList.toggle("failing", isOn);
    scores.dim();
    samples.dim();
    rested();
  }

  async function follow(signal) {
    const sound = settingOf(state.get, null);
    const broken = state.get("breaking.on") && settingOf(state.get, state.get("breaking.way"));
    const write = (setting) => setting && engine.write(setting, samples.prompts, signal);
    const ready = markBusy(table);
    try {
      const isKnown = !broken && (await begin(sound));
      await (isKnown ? mounted() : score(sound, broken, QUICK, signal));
      signal.throwIfAborted();
      samples.show(await write(sound), await write(broken));
      await score(sound, broken, FULL, signal);
      if (broken) darePage.say(at("measured").textContent);
    } catch (error) {
      if (!isAbort(error)) at("reason").textContent = error.message;
    } finally {
      ready();
    }
  }

  async function score(sound, broken, amount, signal) {
    const before = await engine.score(sound, amount, signal);
    show(before, broken && await engine.score(broken, amount, signal), amount);
  }

  const begin = (sound) => showKnown(sound, samples, (found, amount) => show(found, null, amount));

  function show(before, broken, amount) {
    const after = broken || before;
    scores.show(after, amount, before.bitsPerByte, "the intact merge");
    const sounds = Object.entries(inPercent(before).tasks);
    scores.mark(Object.fromEntries(sounds.map(([task, value]) => [task, { sound: value }])));
    at("measured").textContent = broken ? inWords(inPercent(before), inPercent(after)) :
      "Switch on “Break this merge” to compare.";
  }

  const rested = whenRested(REST_MS, follow);
  state.on(NAMES, change);
  whenNear(section, change);
  if (!state.get("breaking.on")) await begin(settingOf(state.get, null));
  await showFindings(section, state);
}

function addControls(place, state) {
  choice(place, state, "breaking.way", { label: "What goes wrong", options: WAYS });
  toggle(place, state, "breaking.on", { label: "Break this merge" });
  choice(place, state, "breaking.m", { label: "Method (all three models)", options: METHODS });
  slider(place, state, "breaking.p", DROP_RATE);
  slider(place, state, "breaking.seed", { label: "Seed", min: 0, max: 99, step: 1 });
}

/** What was measured, also where it is little. */
function inWords(before, after) {
  const means = `Mean of the three tasks: ${points(before.mean)} intact, `
    + `${points(after.mean)} broken.`;
  if (!Number.isFinite(after.bitsPerByte)) return `${means} Every output is NaN.`;
  if (after.mean < 3) return `${means} Nothing is left of the three skills.`;
  const falls = Object.entries(before.tasks)
    .map(([task, value]) => ({ task, from: value, to: after.tasks[task] }))
    .sort((one, other) => other.from - other.to - (one.from - one.to));
  const [{ task, from, to }] = falls;
  if (from - to <= 2) return `${means} With this seed and p it does no harm.`;
  if (from - to <= 10) return `${means} With this seed and p it does little harm.`;
  return `${means} The task ${task} loses most: ${points(from)} → ${points(to)}.`;
}

/** What `dare analyze` finds in the broken inputs, or what a plan warns of. */
async function showFindings(section, state) {
  const list = section.querySelector("#breaking-findings");
  const broken = await loadJson("broken.json");
  for (const place of section.querySelectorAll("[data-command]")) {
    place.replaceChildren(...coded(broken[place.dataset.command].command));
  }
  const show = () => {
    const { findings = [], warnings = [], seed } = broken[FOUND[state.get("breaking.way")]];
    const grave = findings.filter(({ severity }) => severity !== "note");
    const mine = state.get("breaking.seed");
    const ofMine = (text) => text.replaceAll(`${seed}`, mine);
    section.querySelector("[data-shows=seeds]").textContent = `${mine} ${mine} ${mine}`;
    list.replaceChildren(
      ...warnings.map((text) => (
        finding({ severity: "warning", text: ofMine(text), subjects: [] }))),
      ...(grave.length ? grave : findings).map((one) => finding(one)));
  };
  state.on(["breaking.way", "breaking.seed"], show);
  show();
}

function finding({ severity, subjects, text, remedy }) {
  const who = [...new Set(subjects)].join(", ");
  const title = make("h3", {}, ...(who ? [make("b", {}, who)] : []), ...coded(`${text}.`));
  const badge = make("span", { className: "badge" }, TONES[severity]);
  const item = make("li", { className: severity }, make("div", { className: "head" }, badge, title));
  if (remedy) item.append(make("p", {}, make("b", {}, "What to do: "), ...coded(`${remedy}.`)));
  return item;
}
