// The recipe's settings as form controls, and the recipe as text.
import { shortName } from "../../analysis/words.js";
import { make, slider } from "../../controls.js";

const METHODS = [
  "dare+linear", "dare+sum", "dare+ties", "dare+slerp", "linear", "sum", "ties", "slerp", "darex+sum", "della+ties",
];
const DROP_RATE = 0.9;  // what the page shows until there is a plan

const numberIn = (input) => (input.value === "" ? null : Number(input.value));

/** A labelled input whose value is read from the recipe, and set when it is changed. */
function field(place, id, label, properties, onChange) {
  const input = make("input", { id, autocomplete: "off", spellcheck: false, ...properties });
  place.append(make("div", { className: "control own-field" }, make("label", { htmlFor: id }, label), input));
  input.addEventListener("change", () => { if (input.reportValidity()) onChange(input); });
  return input;
}

export function mountSettings(section, recipe) {
  const place = section.querySelector("#own-settings");
  const toml = section.querySelector("#own-toml");
  const save = section.querySelector("#own-save");
  const listeners = [];
  let plan = null;

  const known = make("datalist", { id: "own-methods" }, ...METHODS.map((value) => make("option", { value })));
  const method = field(place, "own-method", "Method", { type: "text" }, () => recipe.setMethod(method.value.trim()));
  method.setAttribute("list", known.id);
  place.append(known);

  const stage = () => plan?.drops ?? "dare";
  const commonRate = () => recipe.read()[stage()]?.drop_rate ?? plan?.drop_rate ?? DROP_RATE;
  const rate = slider(place, {  // the part of the state that the slider needs
    get: () => (typeof commonRate() === "number" ? commonRate() : DROP_RATE),
    set(changes) {
      const value = changes["own.rate"];
      if (plan?.drops && value !== commonRate()) recipe.setOfStage(stage(), "drop_rate", value);
    },
    on: (_names, listener) => listeners.push(listener),
  }, "own.rate", { label: "Drop rate", min: 0, max: 0.99, step: 0.01, format: (value) => value.toFixed(2) });

  const perModel = make("div", { className: "own-per-model" });
  place.append(perModel);
  const numeric = { type: "number", step: "any", inputMode: "decimal" };
  const scale = field(place, "own-scale", "Scale", { ...numeric, placeholder: "1" }, () => {
    recipe.set("scale", numberIn(scale));
  });
  const seed = field(place, "own-seed", "Seed", { ...numeric, step: "1", min: "0", placeholder: "42" }, () => {
    recipe.set("seed", numberIn(seed));
  });
  const output = field(place, "own-output", "Output", { type: "text" }, () => {
    recipe.setOutput(output.value.trim());
  });

  /** A row of inputs for each model; made anew only when the models change. */
  let rows = [];
  function makeRows(files) {
    const head = make("tr", {}, ...["Model", "Weight", "Drop rate"].map((name) => make("th", { scope: "col" }, name)));
    rows = files.map((file, number) => {
      const cell = (name, label) => {
        const input = make("input", { ...numeric, className: "own-number" });
        input.setAttribute("aria-label", `${label} of ${shortName(file)}`);
        input.addEventListener("change", () => recipe.setOfModel(number, name, numberIn(input)));
        return input;
      };
      return { file, weight: cell("weight", "Weight"), drop: cell("drop_rate", "Drop rate") };
    });
    const body = rows.map(({ file, weight, drop }) => make("tr", {},
      make("th", { scope: "row" }, shortName(file)), make("td", {}, weight), make("td", {}, drop)));
    const whole = make("table", {}, make("thead", {}, head), make("tbody", {}, ...body));
    perModel.replaceChildren(...(files.length ? [whole] : []));
  }

  function showRows({ models: { merge_files: entries } }) {
    entries.forEach((entry, number) => {
      const { weight, drop } = rows[number];
      weight.value = entry.weight ?? "";
      weight.placeholder = typeof plan?.models?.[number]?.weight === "number"
        ? String(Number(plan.models[number].weight.toPrecision(4))) : "";
      weight.disabled = plan !== null && !plan.weighs;
      drop.value = entry.drop_rate ?? "";
      drop.placeholder = plan?.drops ? String(commonRate()) : "";
      drop.disabled = plan !== null && !plan.drops;
    });
  }

  function showText(text) {
    toml.textContent = text ?? "# Choose models first.\n";
    URL.revokeObjectURL(save.href);
    save.hidden = !text;
    if (text) save.href = URL.createObjectURL(new Blob([text], { type: "application/toml" }));
  }

  function show() {
    const document = recipe.read();
    const files = recipe.files();
    if (files.join("\n") !== rows.map(({ file }) => file).join("\n")) makeRows(files);
    method.value = document.method ?? "dare+linear";
    scale.value = document.scale ?? "";
    seed.value = document.seed ?? "";
    output.value = document.models.output_file ?? "";
    rate.disabled = !plan?.drops || Array.isArray(commonRate());
    showRows(document);
    for (const listener of listeners) listener();
  }

  recipe.on(show);
  show();
  return {
    showPlan(next) {
      plan = next;
      show();
      showText(plan?.toml);
    },
  };
}
