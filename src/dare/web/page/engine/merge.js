// Merges models as the package does, bit for bit: docs/numbers.md of the repository says in which
// order and with which roundings, src/dare/kernels/reference.py is the definition.
//
// A setting is what a recipe says:
//   { base: "base", method: "dare+trim+ties", scale: 1, seed: 42,
//     models: [{ name: "add" }, { name: "say", weight: 0.5, seed: 7 }],
//     stages: { dare: { drop_rate: 0.5, rescale: true }, trim: { keep_ratio: 0.2 } } }
// Without models it is the base as it is. A tensor is { shape, data }, its data the bits of BF16.
import { keptFloats, toBfloats } from "./floats.js";
import { keepMask } from "./mask.js";
import { trimmed } from "./trim.js";

const round = Math.fround;
const WEIGHTS = { linear: (count) => 1 / count, sum: () => 1, ties: () => 1, slerp: () => 1 };

/** The merged tensors, like the base's; `models` has those of the base and of all models by name. */
export function mergeModels(setting, models) {
  const { method, scale, seed } = setting;
  const base = models.get(setting.base);
  if (!setting.models.length) return new Map(base);
  const chain = method.split("+");
  const combine = chain.pop();
  if (!Object.hasOwn(WEIGHTS, combine) || chain.some((stage) => !DELTA_STAGES[stage])) {
    throw new Error(`method '${method}': this page has dare, trim, linear, sum, ties and slerp`);
  }
  const [isArc, { t = 0.5 }] = [combine === "slerp", setting.stages.slerp ?? {}];
  if (isArc && setting.models.length !== 2) throw new Error(`method '${method}': choose two models`);
  const stages = chain.map((stage) => [stage, setting.stages[stage] ?? {}]);
  const weights = setting.models.map(
    ({ weight }) => weight ?? WEIGHTS[combine](setting.models.length));
  if (isModel(stages, weights, scale)) return new Map(models.get(setting.models[0].name));
  const byModel = setting.models.map(({ name, seed: own }, place) =>
    prepare(base, models.get(name), stages, own ?? seed + place));
  return new Map([...base].map(([name, tensor]) => {
    const deltas = byModel.map((deltasOfModel) => deltasOfModel.get(name));
    const values = deltas.map((delta) => delta.values);
    const own = isArc ? onArc(t, deltas, keptFloats(tensor)) : weights;
    const scaled = own.map((weight, place) => weight * (deltas[place]?.factor ?? 1));
    const merged = combine === "ties" ? elect(values, scaled, weights.map(Math.abs)).merged :
      weightedSum([...values, keptFloats(tensor)], scaled);
    return [name, { ...tensor, data: added(tensor, merged, scale) }];
  }));
}

/** Whether the result is, by the method's definition, the one model that is given. */
function isModel(stages, [weight, ...others], scale) {
  const dropsNothing = stages.every(([, { drop_rate: rate = 0, keep_ratio: ratio = 1 }]) =>
    rate === 0 && ratio === 1);
  return !others.length && weight === 1 && scale === 1 && dropsNothing;
}

/** base + scale·merged as BF16; where nothing is changed the base's bits are kept. */
function added(base, merged, scale) {
  const factor = round(scale);
  const sum = Float32Array.from(keptFloats(base));
  for (let i = 0; i < sum.length; i++) sum[i] += round(factor * merged[i]);
  const data = toBfloats(sum);
  for (let i = 0; i < data.length; i++) if (merged[i] === 0) data[i] = base.data[i];
  return data;
}

// ---------------------------------------------------------------- delta stages

const prepared = new WeakMap();  // by a model's tensors, what its last settings have made of them

/** A model's deltas after all its stages: by name { values, factor, keep }. */
function prepare(base, tuned, stages, seed) {
  const key = JSON.stringify([seed, stages]);
  const last = prepared.get(tuned);
  if (last?.key === key && last.base === base) return last.deltas;
  const deltas = new Map([...base].map(([name, tensor]) => {
    const values = deltaOf(keptFloats(tuned.get(name)), keptFloats(tensor));
    const start = { values, factor: 1, keep: null };
    return [name, stages.reduce(
      (delta, [stage, settings]) => DELTA_STAGES[stage](delta, settings, seed, name), start)];
  }));
  prepared.set(tuned, { key, base, deltas });
  return deltas;
}

const DELTA_STAGES = {
  dare(delta, { drop_rate: rate, rescale = true }, seed, name) {
    if (rate === 0) return delta;
    const keep = keepMask(name, delta.values.length, rate, seed);
    const factor = rescale ? delta.factor / (1 - rate) : delta.factor;
    return { values: dropped(delta.values, keep), factor, keep };
  },

  trim(delta, { keep_ratio: ratio }) {
    if (ratio === 1) return delta;
    const { values, keep } = delta;
    const survivors = keep ? keep.reduce((count, kept) => count + kept, 0) : values.length;
    return { ...delta, values: trimmed(values, ratio, survivors) };
  },
};

/** tuned − base. */
export function deltaOf(tuned, base) {
  const delta = new Float32Array(base.length);
  for (let i = 0; i < delta.length; i++) delta[i] = tuned[i] - base[i];
  return delta;
}

/** The delta where `keep` is 1, times the factor; elsewhere zero, whatever stood there. */
export function dropped(delta, keep, factor = 1) {
  const scale = round(factor);
  const kept = new Float32Array(delta.length);
  for (let i = 0; i < kept.length; i++) if (keep[i]) kept[i] = delta[i] * scale;
  return kept;
}

// ---------------------------------------------------------------- combine stages

// Weights are rounded to float32 before they are used, and sums go in the order of the models.

/** Σ weight·delta; a model whose weight is 0 is left out, so that 0·NaN spreads nothing. */
function weightedSum(deltas, weights) {
  const total = new Float32Array(deltas[0].length);
  weights.forEach((exact, model) => {
    const [weight, delta] = [round(exact), deltas[model]];
    if (exact === 0) return;
    for (let i = 0; i < total.length; i++) total[i] += round(weight * delta[i]);
  });
  return total;
}

/** SLERP's weights of two deltas and the base; on a straight line if parallel, or if one is zero. */
function onArc(t, deltas, base) {
  const models = deltas.map(({ values, factor }) =>
    values.map((value, i) => round(value * round(factor)) + base[i]));
  const [aa, ab, bb] = [[0, 0], [0, 1], [1, 1]].map(([a, b]) => product(models[a], models[b]));
  const cosine = ab / (Math.sqrt(aa) * Math.sqrt(bb));
  const angle = Math.abs(cosine) <= 0.9995 ? Math.acos(cosine) : null;
  const [one, other] = [1 - t, t].map((part) =>
    (angle === null ? part : Math.sin(part * angle) / Math.sin(angle)));
  return [one, other, one + other - 1];
}

/** Σ left·right in 64 interleaved sums, like the package's for tensors of one chunk. */
function product(left, right) {
  const lanes = new Float64Array(64);
  for (let i = 0; i < left.length; i++) lanes[i % 64] += left[i] * right[i];
  return lanes.reduce((total, lane) => total + lane, 0);
}

/**
 * The sign that outweighs the other in each element, and the sum of the terms that have it, divided
 * by the shares of their models.
 */
export function elect(deltas, weights, shares = weights.map(Math.abs)) {
  const size = deltas[0].length;
  const merged = new Float32Array(size);
  const sign = new Int8Array(size);
  const factors = weights.map(round);
  const parts = shares.map(round);
  for (let i = 0; i < size; i++) {
    let [above, below, aboveShare, belowShare] = [0, 0, 0, 0];
    for (let model = 0; model < deltas.length; model++) {
      const value = round(factors[model] * deltas[model][i]);
      if (!(value < 0)) above = round(above + value);
      if (!(value > 0)) below = round(below + value);
      if (value > 0) aboveShare = round(aboveShare + parts[model]);
      if (value < 0) belowShare = round(belowShare + parts[model]);
    }
    const total = round(above + below);
    sign[i] = Math.sign(total);
    merged[i] = total > 0 ? above / (aboveShare || 1)
      : total < 0 ? below / (belowShare || 1)
      : total;
  }
  return { merged, sign };
}
