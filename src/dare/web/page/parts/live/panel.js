// The controls of "Merge live": the method, the models, and the numbers of the merge.
import { button, choice, make, slider, toggle } from "../../controls.js";
import { parameterControls } from "./parameters.js";
import {
  chosenChain, defaults, dropsAtARate, findStage, MODELS, NAMES, OWN_CHAIN, takesWeights,
} from "./setting.js";

const USUAL = [
  "dare+sum", "dare+linear", "dare+ties", "dare+trim+ties", "dare+slerp",
  "sum", "linear", "ties", "trim+ties", "slerp",
];
const DELTA_PLACES = 3;
const two = (value) => value.toFixed(2);

/** Fill the panel, and keep what it shows in line with the state. */
export function addPanel(panel, state, methods, engine) {
  const at = (name) => panel.querySelector(`[data-place=${name}]`);
  const method = addMethod(at("method"), state, chains(methods, engine));
  addOwnChain(at("own"), state, methods);
  const showParameters = parameterControls(at("parameters"), state, methods);
  for (const name of MODELS) addModel(at(name), state, name);
  const rates = toggle(at("switches"), state, "live.each", { label: "A drop rate for each" });
  const weights = toggle(at("switches"), state, "live.w", { label: "A weight for each" });
  addNumbers(at("rate"), at("numbers"), state);
  button(at("reset"), "Start again", () => state.set(defaults));
  let shown = null;
  let usual = defaults["live.m"];

  function follow() {
    const chain = chosenChain(state.get, methods);
    if (chain.join("+") !== shown) showChain(chain);
    if (state.get("live.m") !== OWN_CHAIN) usual = state.get("live.m");
    const drops = dropsAtARate(chain, methods);
    const weighs = takesWeights(chain, methods);
    at("own").hidden = state.get("live.m") !== OWN_CHAIN;
    at("rate").hidden = !drops || state.get("live.each");
    rates.disabled = !drops;
    weights.disabled = !weighs;
    for (const name of MODELS) {
      at(name).querySelector("[data-own=rate]").hidden = !drops || !state.get("live.each");
      at(name).querySelector("[data-own=weight]").hidden = !weighs || !state.get("live.w");
    }
  }

  function showChain(chain) {
    shown = chain.join("+");
    at("words").replaceChildren(...inWords(chain, methods));
    showParameters(chain);
  }

  // What the reader does by hand begins where it was: an own chain as the one chosen before,
  // weights as the method has them. A link or a pin says all by itself.
  method.addEventListener("change", () => {
    if (method.value === OWN_CHAIN) state.set({ "live.c": usual });
  });
  weights.addEventListener("change", () => startFromUsualWeights(state, methods));
  state.on(NAMES, follow);
  state.on(["live.m", "live.c"], () => fitModels(state, methods));
  follow();
}

/** The choice of a method; a chain that is not in the list is the reader's own. */
function addMethod(place, state, options) {
  const isListed = options.some(([chain]) => chain === state.get("live.m"));
  if (!isListed) state.set({ "live.c": state.get("live.m"), "live.m": OWN_CHAIN });
  return choice(place, state, "live.m", { label: "Method", options });
}

function addNumbers(rate, others, state) {
  addRate(rate, state, "live.p", "Drop rate p");
  slider(others, state, "live.scale", {
    label: "Scale λ", min: 0, max: 3, step: 0.05, format: two,
  });
  slider(others, state, "live.seed", { label: "Seed", min: 0, max: 99, step: 1 });
}

/** Every method: the usual chains, each other combine stage, each other delta stage with a sum. */
function chains(methods, engine) {
  const used = new Set(USUAL.flatMap((chain) => chain.split("+")));
  const others = methods.stages
    .filter(({ name }) => !used.has(name))
    .map(({ name, kind }) => (kind === "combine" ? name : `${name}+sum`));
  const named = [...USUAL, ...others].map((chain) => [
    chain, engine.whyNot(chain) ? `${chain} (needs the installed package)` : chain,
  ]);
  return [...named, [OWN_CHAIN, "your chain …"]];
}

/** Up to three delta stages and a combine stage, together the text `live.c`. */
function addOwnChain(place, state, methods) {
  const stagesOf = (kind) => methods.stages.filter((stage) => stage.kind === kind);
  const named = (stages) => stages.map(({ name }) => [name, name]);
  const read = () => {
    const stages = state.get("live.c").split("+");
    return { deltas: stages.slice(0, -1), combine: stages.at(-1) };
  };
  const bind = (get, put) => ({
    get,
    set: (changes) => {
      const { deltas, combine } = put(read(), Object.values(changes)[0]);
      state.set({ "live.c": [...deltas.filter(Boolean), combine].join("+") });
    },
    on: (_, listener) => state.on(["live.c"], listener),
  });
  for (let index = 0; index < DELTA_PLACES; index += 1) {
    const bound = bind(() => read().deltas[index] ?? "", ({ deltas, combine }, value) => {
      deltas[index] = value;
      return { deltas, combine };
    });
    const label = ["First, to each delta", "then", "then"][index];
    const options = [["", "nothing"], ...named(stagesOf("delta"))];
    choice(place, bound, `live.c.${index}`, { label, options });
  }
  const bound = bind(() => read().combine, ({ deltas }, value) => ({ deltas, combine: value }));
  choice(place, bound, "live.c.combine", {
    label: "Then make one of all", options: named(stagesOf("combine")),
  });
}

function addModel(place, state, name) {
  toggle(place, state, `live.${name}`, { label: place.dataset.title });
  const rate = make("div", { dataset: { own: "rate" } });
  const weight = make("div", { dataset: { own: "weight" } });
  place.append(rate, weight);
  addRate(rate, state, `live.p${name}`, `Drop rate of ${name}`);
  slider(weight, state, `live.w${name}`, {
    label: `Weight of ${name}`, min: -1, max: 2, step: 0.01, format: two,
  });
}

const addRate = (place, state, name, label) =>
  slider(place, state, name, { label, min: 0, max: 0.99, step: 0.01, format: two });

/** What each stage of the chain does, a line each. */
function inWords(chain, methods) {
  return chain.map((name) => {
    const summary = findStage(name, methods)?.summary ?? "There is no such stage.";
    return make("p", {}, make("b", {}, name), ` ${summary}`);
  });
}

/** A stage that merges two models gets two: the last is taken out. */
function fitModels(state, methods) {
  const count = findStage(chosenChain(state.get, methods).at(-1), methods)?.models;
  const inside = MODELS.filter((name) => state.get(`live.${name}`));
  if (count && inside.length > count) {
    state.set(Object.fromEntries(inside.slice(count).map((name) => [`live.${name}`, false])));
  }
}

/** Weights that were not moved yet begin where the method has them. */
function startFromUsualWeights(state, methods) {
  const usual = findStage(chosenChain(state.get, methods).at(-1), methods)?.default_weight;
  const inside = MODELS.filter((name) => state.get(`live.${name}`)).length;
  const isUntouched = MODELS.every((name) => state.get(`live.w${name}`) === 1);
  if (!state.get("live.w") || !usual || !inside || !isUntouched) return;
  const weight = Math.round(100 * usual[inside - 1]) / 100;
  state.set(Object.fromEntries(MODELS.map((name) => [`live.w${name}`, weight])));
}
