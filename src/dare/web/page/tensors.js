// The matrices that pictures show: square ones of the demo's models, 128 by 128.
import { toFloats } from "./engine/floats.js";
import { deltaOf } from "./engine/merge.js";
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

/** What a model changed in one tensor of the base. */
export async function changeOf(model, name) {
  const [tuned, base] = await Promise.all([model, "base"].map(loadModel));
  return deltaOf(toFloats(tuned.get(name)), toFloats(base.get(name)));
}
