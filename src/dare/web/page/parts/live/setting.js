// What the controls of "Merge live" say, as a setting for an engine. Pure: no page is needed.
import { chainOf } from "../../recipe.js";

export const MODELS = ["add", "sort", "say"];
export const OWN_CHAIN = "own";

export const defaults = {
  "live.m": "dare+sum",  // a usual chain, or "own"
  "live.c": "dare+trim+ties",  // the reader's own
  "live.add": true,
  "live.sort": true,
  "live.say": true,
  "live.w": false,  // weights of their own
  "live.wadd": 1,
  "live.wsort": 1,
  "live.wsay": 1,
  "live.p": 0.5,
  "live.each": false,  // drop rates of their own
  "live.padd": 0.5,
  "live.psort": 0.5,
  "live.psay": 0.5,
  "live.scale": 1,
  "live.seed": 42,
  "live.s": "",  // parameters of stages: "dare.rescale-false,ties.vote-count"
};
export const NAMES = Object.keys(defaults);

/** The chain that is chosen: the names of its stages. */
export function chosenChain(get, methods) {
  return chainOf(get("live.m") === OWN_CHAIN ? get("live.c") : get("live.m"), methods);
}

export const findStage = (name, methods) => methods.stages.find((stage) => stage.name === name);

const hasRate = (stage) => stage.parameters.some(({ name }) => name === "drop_rate");

/** Whether the chain drops at a rate. */
export const dropsAtARate = (chain, methods) =>
  chain.some((name) => hasRate(findStage(name, methods) ?? { parameters: [] }));

/** Whether the models of a chain have weights: SLERP has a place on the arc instead. */
export function takesWeights(chain, methods) {
  return findStage(chain.at(-1), methods)?.default_weight !== null;
}

/** The setting that `get` (names of the state to values) describes. */
export function settingOf(get, methods) {
  const chain = chosenChain(get, methods);
  const drops = dropsAtARate(chain, methods);
  const isWeighted = get("live.w") && takesWeights(chain, methods);
  const models = MODELS.filter((name) => get(`live.${name}`)).map((name) => ({
    name,
    weight: isWeighted ? get(`live.w${name}`) : null,
    drop_rate: drops && get("live.each") ? get(`live.p${name}`) : null,
    seed: null,
  }));
  return {
    base: "base",
    method: chain.join("+"),
    scale: get("live.scale"),
    seed: get("live.seed"),
    models,
    stages: stagesOf(get, chain, methods),
  };
}

function stagesOf(get, chain, methods) {
  const given = readParameters(get("live.s"));
  const stages = {};
  for (const name of chain) {
    const stage = findStage(name, methods);
    if (!stage) continue;
    const table = {};
    if (hasRate(stage) && !get("live.each")) table.drop_rate = get("live.p");
    for (const parameter of stage.parameters) {
      const value = given.get(`${name}.${parameter.name}`);
      if (value !== undefined && parameter.name !== "drop_rate") table[parameter.name] = value;
    }
    if (Object.keys(table).length) stages[name] = table;
  }
  return stages;
}

/** Why a setting cannot be merged by any engine, in a sentence; else null. */
export function problemOf(setting, methods) {
  const chain = setting.method.split("+");
  const stages = chain.map((name) => findStage(name, methods));
  const unknown = chain.find((_, index) => !stages[index]);
  if (unknown !== undefined) return `There is no stage “${unknown}”.`;
  if (stages.some(({ kind }, index) => (kind === "combine") !== (index === stages.length - 1))) {
    return "A method is any delta stages and then one combine stage.";
  }
  const { name, models: count } = stages.at(-1);
  if (count && setting.models.length && setting.models.length !== count) {
    const given = setting.models.length;
    return `${name} merges ${count} models, and ${given} ${given === 1 ? "is" : "are"} in. ` +
      `Take ${given > count ? "one out" : "another one in"}.`;
  }
  return null;
}

/** Parameters of stages from their text: a Map from "dare.rescale" to its value. */
export function readParameters(text) {
  const pairs = text.split(",").map((pair) => /^([a-z0-9_]+\.[a-z0-9_]+)-(.+)$/.exec(pair));
  return new Map(pairs.filter(Boolean).map(([, name, value]) => [name, readValue(value)]));
}

/** The text of such a Map. */
export const writeParameters = (parameters) =>
  [...parameters].map(([name, value]) => `${name}-${value}`).join(",");

export function readValue(text) {
  if (text === "true" || text === "false") return text === "true";
  return text.trim() !== "" && Number.isFinite(Number(text)) ? Number(text) : text;
}
