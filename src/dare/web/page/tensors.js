// The matrices that pictures show: square ones of the demo's models, 128 by 128.
import { combine } from "./engine/core.js";
import { prepare } from "./engine/merge.js";
import { loadModel } from "./loading.js";

export const SIDE = 128;
export const NAMES = ["add", "sort", "say"];
export const MODELS = [
  ["add", "add: sums"],
  ["sort", "sort: letters in order"],
  ["say", "say: numbers in words"],
];

const PROJECTIONS = [["q", "query"], ["k", "key"], ["v", "value"], ["o", "output"]];

/** Names of tensors with what they are, layer by layer. */
export const TENSORS = [0, 1, 2, 3, 4].flatMap((layer) =>
  PROJECTIONS.map(([letter, word]) => [
    `model.layers.${layer}.self_attn.${letter}_proj.weight`,
    `layer ${layer}, attention ${word}`,
  ]),
);

/** The setting that adds up the changes of models after DARE. */
export const sumOf = (models, p, seed, rescale = true) => ({
  base: "base", method: "dare+sum", scale: 1, seed, models: models.map((name) => ({ name })),
  stages: { dare: { drop_rate: p, rescale } },
});

/** What gives a model's change of a tensor of the base, after delta stages. */
export async function changeOf(model, name) {
  const [tuned, base] = (await Promise.all([model, "base"].map(loadModel)))
    .map((tensors) => tensors.get(name).data);
  return (stages = {}, seed = 0) => prepare(name, base, tuned, Object.entries(stages), seed);
}

/** What is left of a change, as numbers. */
export const deltaOf = (change) => combine(change.base, [change]);
