// Merges models as the package does, bit for bit: docs/numbers.md of the repository says in which
// order and with which roundings, src/dare/kernels/reference.py is the definition.
import { arc, cosineOf } from "./arcs.js";
import { addScaled, countVotes, elect, weightedSum } from "./combine.js";
import { added, deltaOf, dropped } from "./deltas.js";
import {
  MERGED_TYPES, OTHER_WEIGHT_TYPES, bitsOf, fromFloats, keptFloats, toFloats,
} from "./floats.js";
import { keepMask } from "./mask.js";
import { byName } from "./names.js";
import { readSetting, whyNot } from "./setting.js";
import { sumMagnitudes } from "./sums.js";
import { trimmed, trimmedTogether } from "./trim.js";

export { arc, cosineOf, deltaOf, dropped, elect, trimmed, whyNot };

/**
 * The merged tensors, like the base's: a Map from names to { dtype, shape, data }.
 *
 * `models` has the tensors of the base and of all models by name; `engines.js` says what a setting
 * is. Tensors that are not changed are the base's own.
 */
export function mergeModels(setting, models) {
  const base = tensorsOf(models, setting.base ?? "base");
  if (!setting.models.length) return new Map(base);
  const recipe = readSetting(setting);
  for (const { name } of recipe.models) checkFit(base, tensorsOf(models, name), name);
  const alone = isModel(recipe) ? models.get(recipe.models[0].name) : base;
  const byModel = recipe.models.map((model) => prepare(base, models.get(model.name), model));
  const merged = new Map();
  for (const [name, tensor] of base) {
    const deltas = byModel.map((deltasOfModel) => deltasOfModel.get(name));
    const isCopied = alone !== base && alone.get(name).dtype === tensor.dtype;
    if (!isMerged(tensor) || isCopied) merged.set(name, alone.get(name));
    else merged.set(name, mergeTensor(tensor, deltas, recipe));
  }
  return merged;
}

/** Whether the result is, by the method's definition, the one model that is given. */
function isModel({ combine, models, scale }) {
  const [{ stages, weight }, ...others] = models;
  const dropsNothing = stages.every(([, { drop_rate: rate = 0, keep_ratio: ratio = 1 }]) =>
    rate === 0 && ratio === 1);
  return !others.length && combine !== "slerp" && weight === 1 && scale === 1 && dropsNothing;
}

function tensorsOf(models, name) {
  const tensors = models.get(name);
  if (tensors) return tensors;
  throw new Error(`there is no model '${name}'; there are ${[...models.keys()].join(", ")}`);
}

function isMerged(tensor) {
  return MERGED_TYPES.includes(tensor.dtype);
}

function checkFit(base, tuned, model) {
  for (const [name, tensor] of base) {
    const other = tuned.get(name);
    if (!other) throw new Error(`${name}: not in ${model}`);
    const { dtype, shape, data } = tensor;
    const isType = other.dtype === dtype || (isMerged(other) && isMerged(tensor));
    if (!isType || `${other.shape}` !== `${shape}`) {
      throw new Error(
        `${name}: base is ${dtype} [${shape.join(", ")}], `
          + `${model} is ${other.dtype} [${other.shape.join(", ")}]`,
      );
    }
    if (OTHER_WEIGHT_TYPES.includes(dtype)) {
      throw new Error(`${name}: weights of type ${dtype} need the local engine, dare playground`);
    }
    if (!isMerged(tensor) && data.some((value, i) => value !== other.data[i])) {
      throw new Error(
        `${name}: the ${dtype} values of ${model} differ from the base's and cannot be merged`,
      );
    }
  }
  const extra = [...tuned.keys()].find((name) => !base.has(name));
  if (extra !== undefined) throw new Error(`${extra}: in ${model}, not in the base`);
}

// ---------------------------------------------------------------- delta stages

const taken = new WeakMap();  // by a model's tensors, its deltas from the base that was last used
const prepared = new WeakMap();  // and what its last settings have made of them

/** A model's deltas after all its stages: by name { values, factor }. */
function prepare(base, tuned, { stages, seed }) {
  const key = JSON.stringify([seed, stages]);
  const last = prepared.get(tuned);
  if (last?.key === key && last.base === base) return last.deltas;
  let deltas = takeDeltas(base, tuned);
  for (const [stage, settings] of stages) deltas = DELTA_STAGES[stage](deltas, settings, seed);
  const found = new Map(deltas.map((delta) => [delta.name, delta]));
  prepared.set(tuned, { key, base, deltas: found });
  return found;
}

/** A model's deltas in the order of names. */
function takeDeltas(base, tuned) {
  const last = taken.get(tuned);
  if (last?.base === base) return last.deltas;
  const names = byName(base.keys()).filter((name) => isMerged(base.get(name)));
  const deltas = names.map((name) => {
    const values = deltaOf(toFloats(tuned.get(name)), keptFloats(base.get(name)));
    return { name, values, factor: 1, keep: null };
  });
  taken.set(tuned, { base, deltas });
  return deltas;
}

// A chain has each of them once. So every mask is a first draw, and a trim comes upon deltas that
// are whole or were dropped from by one mask.
const DELTA_STAGES = {
  dare(deltas, { drop_rate: rate, rescale }, seed) {
    if (rate === 0) return deltas;
    return deltas.map(({ name, values, factor }) => {
      const keep = keepMask(name, values.length, rate, seed);
      const kept = dropped(values, keep);
      const grown = rescale === "l1" ? l1Factor(values, kept) : rescale ? 1 / (1 - rate) : 1;
      return { name, values: kept, factor: factor * grown, keep };
    });
  },

  trim(deltas, { keep_ratio: ratio, scope }) {
    if (ratio === 1) return deltas;
    const all = deltas.map((delta) => delta.values);
    const counts = deltas.map(countSurvivors);
    const kept = scope === "model"
      ? trimmedTogether(all, ratio, counts.reduce((total, count) => total + count, 0))
      : all.map((values, place) => trimmed(values, ratio, counts[place]));
    return deltas.map((delta, place) => ({ ...delta, values: kept[place] }));
  },
};

/** How many elements no earlier stage has dropped, be they zero or not. */
function countSurvivors({ values, keep }) {
  if (keep === null) return values.length;
  let count = 0;
  for (let i = 0; i < keep.length; i++) count += keep[i];
  return count;
}

function l1Factor(values, kept) {
  const after = sumMagnitudes(kept);
  return after === 0 ? 1 : sumMagnitudes(values) / after;
}

// ---------------------------------------------------------------- combine stages

let sums = new Float32Array(0);  // what is only there until it is rounded

function mergeTensor(base, deltas, { combine, options, models, scale }) {
  const floats = keptFloats(base);
  const weights = models.map((model) => model.weight);
  const merged = COMBINE_STAGES[combine](deltas, weights, options, floats);
  if (sums.length < floats.length) sums = new Float32Array(floats.length);
  const sum = added(floats, merged, scale, sums.subarray(0, floats.length));
  const data = fromFloats(sum, base.dtype);
  putBack(data, base.data, merged);
  return { ...base, data };
}

/** Where the merged delta is zero the base's bits are kept. */
function putBack(data, stored, merged) {
  const [to, from] = data.BYTES_PER_ELEMENT === 4 ? [bitsOf(data), bitsOf(stored)] : [data, stored];
  for (let i = 0; i < merged.length; i++) {
    const isChanged = -((merged[i] !== 0) | 0);
    to[i] = (to[i] & isChanged) | (from[i] & ~isChanged);
  }
}

const COMBINE_STAGES = { linear: sumDeltas, sum: sumDeltas, ties: electDeltas, slerp: turnDeltas };

/** A weight times the factor of its model's stages is rounded once. */
function sumDeltas(deltas, weights) {
  const all = weights.map((weight, model) => (weight === 0 ? 0 : weight * deltas[model].factor));
  return weightedSum(deltas.map((delta) => delta.values), all);
}

function electDeltas(deltas, weights, { divide_by: divisor, vote, weighted }) {
  const isPlain = vote === "sum" && weighted;
  const used = deltas.flatMap((delta, model) =>
    isPlain || weights[model] !== 0 ? [{ ...delta, weight: weights[model] }] : [],
  );
  if (!used.length) return new Float32Array(deltas[0].values.length);
  const values = used.map((delta) => delta.values);
  const all = used.map(({ weight, factor }) => weight * factor);
  const sizes = used.map(({ weight }) => Math.abs(weight));
  const ones = sizes.map(() => 1);
  const shares = { weights: sizes, count: ones, nothing: sizes.map(() => 0) }[divisor];
  if (isPlain) return elect(values, all, shares).merged;
  const balance = vote === "count"
    ? countVotes(values, all, weighted ? sizes : ones)
    : weightedSum(values, used.map(({ weight, factor }) => Math.sign(weight) * factor));
  return elect(values, all, shares, balance).merged;
}

function turnDeltas(deltas, _weights, { t, on }, base) {
  const origin = on === "weights" ? withoutInfinities(base) : new Float32Array(base.length);
  const [a, b] = deltas.map(({ values, factor }) => added(origin, values, factor));
  const coefficients = arc(cosineOf(a, b), t);
  const total = sumDeltas(deltas, coefficients);
  const excess = coefficients[0] + coefficients[1] - 1;
  if (on === "weights" && excess !== 0) addScaled(total, origin, Math.fround(excess));
  return total;
}

function withoutInfinities(values) {
  return values.map((value) => (Math.abs(value) === Infinity ? 0 : value));
}
