// Merges models as the package does, bit for bit, by the same core.
//
// A setting is what a recipe says:
//   { base: "base", method: "dare+trim+ties", scale: 1, seed: 42,
//     models: [{ name: "add" }, { name: "say", weight: 0.5, seed: 7 }],
//     stages: { dare: { drop_rate: 0.5, rescale: true }, trim: { keep_ratio: 0.2 } } }
// Without models it is the base as it is. A tensor is { shape, data }, its data the bits of BF16.
import { addScaled, addToBase, bandOf, combine, sumProducts } from "./core.js";
import { KEEP_ALL, maskOf } from "./mask.js";

const WEIGHTS = { linear: (count) => 1 / count, sum: () => 1, ties: () => 1, slerp: () => 1 };

/** The merged tensors, like the base's; `models` has those of all models and the base by name. */
export function mergeModels(setting, models) {
  const { method, scale, seed } = setting;
  const base = models.get(setting.base);
  if (!setting.models.length) return new Map(base);
  const chain = method.split("+");
  const combining = chain.pop();
  if (!Object.hasOwn(WEIGHTS, combining) || chain.some((stage) => !DELTA_STAGES[stage])) {
    throw new Error(`method '${method}': this page has dare, trim, linear, sum, ties and slerp`);
  }
  const [isArc, { t = 0.5 }] = [combining === "slerp", setting.stages.slerp ?? {}];
  if (isArc && setting.models.length !== 2) throw new Error(`method '${method}': choose two models`);
  const stages = chain.map((stage) => [stage, setting.stages[stage] ?? {}]);
  const weights = setting.models.map(
    ({ weight }) => weight ?? WEIGHTS[combining](setting.models.length));
  if (isModel(stages, weights, scale)) return new Map(models.get(setting.models[0].name));
  return new Map([...base].map(([name, tensor]) => {
    const { data } = tensor;
    const changes = setting.models.map((model, place) => prepare(
      name, data, models.get(model.name).get(name).data, stages, model.seed ?? seed + place));
    const [one, other, ofBase] = isArc ? onArc(t, changes, data) : [];
    const terms = changes.map((change, place) => ({
      ...change,
      weight: (isArc ? [one, other] : weights)[place] * change.weight,
      share: Math.abs(weights[place]),
    }));
    // A model whose weight is 0 is left out of a sum, so that 0·NaN spreads nothing.
    const merged = combining === "ties" ? combine(data, terms, true) :
      combine(data, terms.filter(({ weight }) => weight !== 0));
    if (isArc && ofBase !== 0) addScaled(merged, data, ofBase);
    return [name, { ...tensor, data: addToBase(data, merged, scale) }];
  }));
}

/** Whether the result is, by the method's definition, the one model that is given. */
function isModel(stages, [weight, ...others], scale) {
  const dropsNothing = stages.every(([, { drop_rate: rate = 0, keep_ratio: ratio = 1 }]) =>
    rate === 0 && ratio === 1);
  return !others.length && weight === 1 && scale === 1 && dropsNothing;
}

const prepared = new WeakMap();  // by a model's tensor, what its last settings have made of it

/** A model's change of a tensor after delta stages, as `combine` in core.js takes it. */
export function prepare(name, base, tuned, stages, seed) {
  const key = JSON.stringify([seed, stages]);
  const last = prepared.get(tuned);
  if (last?.key === key && last.base === base) return last;
  const whole = { base, tuned, key, mask: KEEP_ALL, band: [-1, 0, 0, 0], weight: 1 };
  const change = stages.reduce((before, [stage, settings]) =>
    DELTA_STAGES[stage](before, settings, { name, base, seed }), whole);
  prepared.set(tuned, change);
  return change;
}

const DELTA_STAGES = {
  dare: (change, { drop_rate: rate, rescale = true }, { name, seed }) => ({
    ...change,
    mask: maskOf(name, rate, seed),
    weight: rescale ? change.weight / (1 - rate) : change.weight,
  }),
  trim: (change, { keep_ratio: ratio }, { base }) =>
    (ratio === 1 ? change : { ...change, band: bandOf(base, change, ratio) }),
};

/** SLERP's weights of two deltas and the base; on a straight line if parallel, or if one is zero. */
function onArc(t, changes, base) {
  const models = changes.map((change) => addScaled(combine(base, [change]), base, 1));
  const [aa, ab, bb] = [[0, 0], [0, 1], [1, 1]].map(([a, b]) => sumProducts(models[a], models[b]));
  const cosine = ab / (Math.sqrt(aa) * Math.sqrt(bb));
  const angle = Math.abs(cosine) <= 0.9995 ? Math.acos(cosine) : null;
  const [one, other] = [1 - t, t].map((part) =>
    (angle === null ? part : Math.sin(part * angle) / Math.sin(angle)));
  return [one, other, one + other - 1];
}
