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
  const options = chains(methods, engine);
  const isListed = options.some(([chain]) => chain === state.get("live.m"));
  if (!isListed) state.set({ "live.c": state.get("live.m"), "live.m": OWN_CHAIN });
  choice(at("method"), state, "live.m", { label: "Method", options });
  addOwnChain(at("own"), state, methods);
  const showParameters = parameterControls(at("parameters"), state, methods);
  for (const name of MODELS) addModel(at(name), state, name);
  toggle(at("switches"), state, "live.each", { label: "A drop rate for each" });
  toggle(at("switches"), state, "live.w", { label: "A weight for each" });
  addRate(at("rate"), state, "live.p", "Drop rate p");
  slider(at("numbers"), state, "live.scale", {
    label: "Scale λ", min: 0, max: 3, step: 0.05, format: two,
  });
  slider(at("numbers"), state, "live.seed", { label: "Seed", min: 0, max: 99, step: 1 });
  button(at("reset"), "Start again", () => state.set(defaults));
  let shown = null;
  let before = state.get("live.m");

  function follow() {
    const chain = chosenChain(state.get, methods);
    if (chain.join("+") !== shown) showChain(chain);
    const drops = dropsAtARate(chain, methods);
    const weighs = takesWeights(chain, methods);
    at("own").hidden = state.get("live.m") !== OWN_CHAIN;
    at("rate").hidden = !drops || state.get("live.each");
    panel.querySelector("#control-live-each").disabled = !drops;
    panel.querySelector("#control-live-w").disabled = !weighs;
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

  /** An own chain begins as the chain that was chosen before. */
  function startOwnChain() {
    const chosen = state.get("live.m");
    if (chosen === OWN_CHAIN && before !== OWN_CHAIN) state.set({ "live.c": before });
    before = chosen;
  }
  state.on(["live.m"], startOwnChain);
  state.on(NAMES, follow);
  state.on(["live.m", "live.c"], () => fitModels(state, methods));
  state.on(["live.w"], () => startFromUsualWeights(state, methods));
  follow();
}

/** Every method: the usual chains, each other combine stage, each other delta stage with a sum. */
function chains(methods, engine) {
  const used = new Set(USUAL.flatMap((chain) => chain.split("+")));
  const others = methods.stages
    .filter(({ name }) => !used.has(name))
    .map(({ name, kind }) => (kind === "combine" ? name : `${name}+sum`));
  const named = [...USUAL, ...others].map((chain) => [
    chain, engine.whyNot(chain) ? `${chain} (local engine)` : chain,
  ]);
  return [...named, [OWN_CHAIN, "your own chain …"]];
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
