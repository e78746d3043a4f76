// The playground's models, each loaded when somebody first asks for it.
import { readSafetensors } from "./engine/safetensors.js";

const loading = new Map();

/** The tensors of a model: a Map from names to { dtype, shape, data }. */
export function loadModel(name) {
  if (!loading.has(name)) {
    const model = load(name);
    model.catch(() => loading.delete(name));  // the next who asks tries again
    loading.set(name, model);
  }
  return loading.get(name);
}

async function load(name) {
  const response = await fetch(new URL(`models/${name}.safetensors`, import.meta.url));
  if (!response.ok) {
    throw new Error(`The model ${name} could not be loaded (${response.status}).`);
  }
  return readSafetensors(await response.arrayBuffer());
}
