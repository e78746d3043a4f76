// The recipe's settings as form controls, and the recipe as text.
import { tableOf } from "../../analysis/elements.js";
import { shortName } from "../../analysis/words.js";
import { make, slider } from "../../controls.js";

const METHODS = [
  "linear", "sum", "ties", "slerp", "dare+linear", "dare+sum", "dare+ties", "dare+slerp",
  "darex+sum", "della+ties",
];
const USUAL = { method: "dare+linear", rate: 0.9 };  // of a recipe that names none
const NUMERIC = { type: "number", step: "any", inputMode: "decimal" };
const EMPTY = "# There is no recipe yet.\n";

const numberIn = (input) => (input.value === "" ? null : Number(input.value));
const whenValid = (input, work) =>
  input.addEventListener("change", () => { if (input.reportValidity()) work(); });

/** Show a value, unless somebody is writing another. */
function setValue(input, value) {
  if (document.activeElement !== input) input.value = value;
}

/** A labelled input, whose value is set when it is changed. */
function field(place, id, label, properties, onChange) {
  const input = make("input", { id, autocomplete: "off", spellcheck: false, ...properties });
  const words = make("label", { htmlFor: id }, label);
  place.append(make("div", { className: "control own-field" }, words, input));
  whenValid(input, () => onChange(input));
  return input;
}

/** Inputs for the weight and the drop rate of each model. */
function mountModels(place, recipe) {
  let rows = [];

  function cell(number, name, label, properties) {
    const input = make("input", { ...NUMERIC, ...properties, className: "own-number" });
    input.setAttribute("aria-label", label);
    whenValid(input, () => recipe.setOfModel(number, name, numberIn(input)));
    return input;
  }

  /** Rows are made anew only when the models change, so that the keyboard stays where it is. */
  function makeRows(files) {
    rows = files.map((file, number) => ({
      file,
      weight: cell(number, "weight", `Weight of ${shortName(file)}`, {}),
      drop: cell(number, "drop_rate", `Drop rate of ${shortName(file)}`, { min: 0, max: 0.999 }),
    }));
    const cells = rows.map(({ file, weight, drop }) => [shortName(file), weight, drop]);
    const table = tableOf(["Model", "Weight", "Drop rate"], cells);
    place.replaceChildren(...(files.length ? [table] : []));
  }

  return function show(plan, commonRate) {
    const files = recipe.files();
    if (files.join("\n") !== rows.map(({ file }) => file).join("\n")) makeRows(files);
    recipe.read().models.merge_files.forEach((entry, number) => {
      const { weight, drop } = rows[number];
      const usual = plan?.models?.[number]?.weight;
      setValue(weight, entry.weight ?? "");
      weight.placeholder = typeof usual === "number" ? String(Number(usual.toPrecision(4))) : "";
      weight.disabled = plan !== null && !plan.weighs;
      setValue(drop, entry.drop_rate ?? "");
      drop.placeholder = plan?.drops ? String(commonRate) : "";
      drop.disabled = plan !== null && !plan.drops;
    });
  };
}

/** The recipe as text, to be copied and, if it can be run, saved. */
function mountText(section) {
  const code = section.querySelector("#own-toml");
  const save = section.querySelector("#own-save");
  return function show(text, isRefused) {
    code.textContent = text ?? EMPTY;
    URL.revokeObjectURL(save.href);
    save.hidden = !text || isRefused;
    if (text) save.href = URL.createObjectURL(new Blob([text], { type: "application/toml" }));
  };
}

export function mountSettings(section, recipe) {
  const place = section.querySelector("#own-settings");
  const showText = mountText(section);
  const listeners = [];
  let plan = null;

  const known = METHODS.map((value) => make("option", { value }));
  place.append(make("datalist", { id: "own-methods" }, ...known));
  const method = field(place, "own-method", "Method", { type: "text" },
    (input) => recipe.setMethod(input.value.trim()));
  method.setAttribute("list", "own-methods");

  const stage = () => plan?.drops ?? "dare";
  const rateNow = () => recipe.read()[stage()]?.drop_rate ?? plan?.drop_rate ?? USUAL.rate;
  const ofSlider = {  // what a slider needs of a state
    get: () => (typeof rateNow() === "number" ? rateNow() : USUAL.rate),
    set({ "own.rate": value }) {
      if (plan?.drops && value !== rateNow()) recipe.setOfStage(stage(), "drop_rate", value);
    },
    on: (_names, listener) => listeners.push(listener),
  };
  const rate = slider(place, ofSlider, "own.rate", {
    label: "Drop rate", min: 0, max: 0.99, step: 0.01, format: (value) => value.toFixed(2),
  });

  const perModel = make("div", { className: "own-per-model" });
  place.append(perModel);
  const showModels = mountModels(perModel, recipe);
  const scale = field(place, "own-scale", "Scale", { ...NUMERIC, placeholder: "1" },
    (input) => recipe.set("scale", numberIn(input)));
  const seed = field(place, "own-seed", "Seed", { ...NUMERIC, step: 1, min: 0, placeholder: "42" },
    (input) => recipe.set("seed", numberIn(input)));
  const output = field(place, "own-output", "Output", { type: "text" },
    (input) => recipe.setOutput(input.value.trim()));

  function show() {
    setValue(method, recipe.read().method ?? USUAL.method);
    setValue(scale, recipe.read().scale ?? "");
    setValue(seed, recipe.read().seed ?? "");
    setValue(output, recipe.read().models.output_file ?? "");
    rate.parentElement.hidden = !plan?.drops;
    rate.disabled = Array.isArray(rateNow());
    showModels(plan, rateNow());
    for (const listener of listeners) listener();
  }

  recipe.on(show);
  show();
  return {
    /** The plan of the recipe, which has `toml` even where models do not fit; null: no recipe. */
    showPlan(next) {
      plan = next;
      show();
      showText(plan?.toml, Boolean(plan?.error));
    },
  };
}
