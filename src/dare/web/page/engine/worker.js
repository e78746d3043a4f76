// A worker of the browser's engine. It has one message at a time and answers it with one:
//   { kind: "merge", setting }        the merged tensors
//   { kind, items, key, tensors }     the answers to a job of scoring.js about the model `key`
// As { answers, holds } or { error, holds }: `holds` are the keys of models that it still has,
// whose tensors need not be sent again.
import { instantiate, loadModel } from "../loading.js";
import { openCore } from "./core.js";
import { Llama } from "./llama.js";
import { mergeModels } from "./merge.js";
import { answersTo } from "./scoring.js";

const KEPT_MODELS = 3;

/**
 * What handles a message and posts its answer.
 *
 * `openKernels` gives the exports of a new instance of llama.wasm, `load` the tensors of a model.
 */
export function createHandler(openKernels, load) {
  const held = new Map();  // { model, kernels } by key, the one that was used last at the end

  async function merge(setting) {
    const names = [setting.base, ...setting.models.map(({ name }) => name)];
    const loaded = await Promise.all(names.map(load));
    return mergeModels(setting, new Map(names.map((name, at) => [name, loaded[at]])));
  }

  async function modelOf(key, tensors) {
    const found = held.get(key) ?? (await open(tensors));
    held.delete(key);
    held.set(key, found);
    return found.model;
  }

  async function open(tensors) {
    const kernels = held.size < KEPT_MODELS ? await openKernels() : dropOldest();
    return { kernels, model: new Llama(kernels, tensors) };
  }

  /** The memory of the oldest model serves the next. */
  function dropOldest() {
    const [key, { kernels }] = held.entries().next().value;
    held.delete(key);
    return kernels;
  }

  async function answer({ setting, key, tensors, ...job }) {
    if (job.kind === "merge") return merge(setting);
    return answersTo(job, await modelOf(key, tensors));
  }

  return async function handle(message, post) {
    try {
      await openCore();
      const answers = await answer(message);
      post({ answers, holds: [...held.keys()] });
    } catch (error) {
      post({ error: error.message, holds: [...held.keys()] });
    }
  };
}

if (globalThis.WorkerGlobalScope) {
  const handle = createHandler(() => instantiate("engine/llama.wasm"), loadModel);
  globalThis.onmessage = ({ data }) => handle(data, (answer) => globalThis.postMessage(answer));
}
