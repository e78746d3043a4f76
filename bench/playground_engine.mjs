// How long the playground's own engine takes to merge the demonstration's three models, in Node:
//
//     node bench/playground_engine.mjs
//
// The first merge is the first after the page was opened; later ones have another seed each, as when
// somebody moves a slider. "same masks" changes the weights only.
import { readFile } from "node:fs/promises";
import { openCore } from "../src/dare/web/page/engine/core.js";
import { sha256 } from "../src/dare/web/page/engine/digest.js";
import { mergeModels } from "../src/dare/web/page/engine/merge.js";
import { readSafetensors } from "../src/dare/web/page/engine/safetensors.js";

globalThis.fetch = async (address) => new Response(await readFile(address));
await openCore();
const RUNS = 30;
const NAMES = ["add", "sort", "say"];
const models = new Map();
for (const name of ["base", ...NAMES]) {
  const path = new URL(`../src/dare/demo/models/${name}/model.safetensors`, import.meta.url);
  const { buffer, byteOffset, length } = await readFile(path);
  models.set(name, readSafetensors(buffer.slice(byteOffset, byteOffset + length)));
}

const settingOf = (method, stages, seed, weight) => ({
  base: "base", method, stages, seed, scale: 1, models: NAMES.map((name) => ({ name, weight })),
});

async function time(action) {
  const start = performance.now();
  await action();
  return performance.now() - start;
}

function show(what, times) {
  const sorted = [...times].sort((left, right) => left - right);
  const [least, median] = [sorted[0], sorted[sorted.length >> 1]];
  const figures = [least.toFixed(0).padStart(5), median.toFixed(0).padStart(7)];
  console.log(`${what.padEnd(34)} ${figures.join(" ")} ms`);
}

console.log(`${"".padEnd(34)} least  median`);
const cases = [
  ["dare+ties", { dare: { drop_rate: 0.5 } }],
  ["dare+ties", { dare: { drop_rate: 0.9 } }],
  ["dare+sum", { dare: { drop_rate: 0.9 } }],
  ["dare+trim+ties", { dare: { drop_rate: 0.5 }, trim: { keep_ratio: 0.2 } }],
  ["trim+linear", { trim: { keep_ratio: 0.2 } }],
];
for (const [place, [method, stages]] of cases.entries()) {
  const merge = (seed, weight) => mergeModels(settingOf(method, stages, seed, weight), models);
  if (place === 0) show("the first merge", [await time(() => merge(1, 1))]);
  const what = stages.dare ? `${method} p = ${stages.dare.drop_rate}` : method;
  const times = [];
  for (let seed = 2; seed < RUNS; seed++) times.push(await time(() => merge(10 * seed, 1)));
  show(what, times);
  const again = [];
  for (let run = 1; run < RUNS; run++) again.push(await time(() => merge(0, run)));
  show(`${what}, same masks`, again);
}
const merged = mergeModels(settingOf("linear", {}, 1, 1), models);
const digests = [];
for (let run = 0; run < RUNS; run++) digests.push(await time(() => sha256(merged)));
show("SHA-256", digests);
