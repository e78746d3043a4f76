// A worker of the browser's engine: it merges by a setting, and answers jobs of scoring.js about the
// merged model. One job at a time; the next one is sent when the answers to the last have come.
import { loadModel } from "../models.js";
import { sha256 } from "./digest.js";
import { Llama } from "./llama.js";
import { mergeModels } from "./merge.js";
import { answersTo } from "./scoring.js";

const KEPT_MERGES = 3;

/**
 * What handles a message { setting, kind, items } and posts { answers } or { error }.
 *
 * `openKernels` gives the exports of a new instance of llama.wasm, `load` the tensors of a model.
 */
export function createHandler(openKernels, load) {
  const merges = new Map();  // by setting, the one that was used last at the end

  async function mergeOf(setting) {
    const key = JSON.stringify(setting);
    const kept = merges.get(key) ?? (await merge(setting));
    merges.delete(key);
    merges.set(key, kept);
    return kept;
  }

  async function merge(setting) {
    const names = [setting.base, ...setting.models.map(({ name }) => name)];
    const loaded = await Promise.all(names.map(load));
    const tensors = mergeModels(setting, new Map(names.map((name, at) => [name, loaded[at]])));
    const kernels = merges.size < KEPT_MERGES ? await openKernels() : dropOldest();
    let model;
    return {
      kernels,
      model: () => (model ??= new Llama(kernels, tensors)),
      sha256: () => sha256(tensors),
    };
  }

  /** The memory of the oldest merge serves the next. */
  function dropOldest() {
    const [key, { kernels }] = merges.entries().next().value;
    merges.delete(key);
    return kernels;
  }

  return async function handle({ setting, kind, items }, post) {
    try {
      post({ answers: await answersTo({ kind, items }, await mergeOf(setting)) });
    } catch (error) {
      post({ error: error.message });
    }
  };
}

async function fetchKernels() {
  const response = await fetch(new URL("llama.wasm", import.meta.url));
  if (!response.ok) throw new Error(`llama.wasm could not be loaded (${response.status}).`);
  return WebAssembly.compile(await response.arrayBuffer());
}

if (globalThis.WorkerGlobalScope) {
  let compiling;
  const openKernels = async () =>
    (await WebAssembly.instantiate(await (compiling ??= fetchKernels()))).exports;
  const handle = createHandler(openKernels, loadModel);
  globalThis.onmessage = ({ data }) => handle(data, (answer) => globalThis.postMessage(answer));
}
