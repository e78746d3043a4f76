// What the controls of "Merge live" say, as a setting for the engine, and that as a recipe.
import { NAMES as MODELS } from "../../tensors.js";
import { writeToml } from "../../toml.js";

export const METHODS = [
  "dare+sum", "dare+linear", "dare+ties", "dare+trim+ties", "sum", "linear", "ties", "trim+ties",
  "slerp", "dare+slerp",
];
const ofEach = (start, value) => Object.fromEntries(MODELS.map((name) => [start + name, value]));
export const defaults = {
  "live.m": "dare+sum",
  ...ofEach("live.", true),
  "live.w": false,  // weights of their own
  ...ofEach("live.w", 1),
  "live.p": 0.5,
  "live.rescale": true,
  "live.keep": 0.2,
  "live.t": 0.5,
  "live.scale": 1,
  "live.seed": 42,
};
export const NAMES = Object.keys(defaults);

/** The setting that `get` (names of the state to values) describes. */
export function settingOf(get) {
  const chain = get("live.m").split("+");
  const tables = {
    dare: { drop_rate: get("live.p"), rescale: get("live.rescale") },
    trim: { keep_ratio: get("live.keep") },
    slerp: { t: get("live.t") },
  };
  const used = Object.entries(tables).filter(([name]) => chain.includes(name));
  return {
    base: "base",
    method: get("live.m"),
    scale: get("live.scale"),
    seed: get("live.seed"),
    models: MODELS.filter((name) => get(`live.${name}`)).map((name) =>
      (get("live.w") && !chain.includes("slerp") ? { name, weight: get(`live.w${name}`) } : { name })),
    stages: Object.fromEntries(used),
  };
}

/** A recipe for the models that `dare demo --models demo-models` writes. */
export function recipeText({ base, models, stages, ...others }) {
  const fileOf = (name) => `demo-models/${name}`;
  return writeToml({
    base: fileOf(base),
    models: models.map(({ name, ...own }) =>
      (Object.keys(own).length ? { file: fileOf(name), ...own } : fileOf(name))),
    output: "merged.safetensors",
    ...others,
    ...stages,
  });
}
