// The matrices that pictures show: square ones of the demo's models, 128 by 128.
import { toFloats } from "./engine/floats.js";
import { deltaOf } from "./engine/merge.js";

export const SIDE = 128;
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

/** One tensor of a model as numbers. */
export async function weightsOf(loadModel, model, name) {
  return toFloats((await loadModel(model)).get(name));
}

/** What a model changed in one tensor of the base. */
export async function changeOf(loadModel, model, name) {
  const [tuned, base] = await Promise.all([
    weightsOf(loadModel, model, name),
    weightsOf(loadModel, "base", name),
  ]);
  return deltaOf(tuned, base);
}
