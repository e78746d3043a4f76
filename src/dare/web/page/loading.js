// The page's data, each loaded once, and when to begin with what takes time.
import { readSafetensors } from "./engine/safetensors.js";
import { mounted } from "./pace.js";

const loading = new Map();

/** What a file of the page is answered with. */
async function load(name) {
  const response = await fetch(new URL(name, import.meta.url));
  if (!response.ok) throw new Error(`${name} could not be loaded (${response.status}).`);
  return response;
}

function once(name, read) {
  if (!loading.has(name)) {
    const loaded = load(name).then(read);
    loaded.catch(() => loading.delete(name));  // the next who asks tries again
    loading.set(name, loaded);
  }
  return loading.get(name);
}

/** A JSON file of the page: prompts.json, measured.json, broken.json. */
export const loadJson = (name) => once(name, (response) => response.json());

/** The tensors of a model: a Map from names to { shape, data }. */
export const loadModel = (name) => once(`models/${name}.safetensors`,
  async (response) => readSafetensors(await response.arrayBuffer()));

/** The exports of a new instance of engine/core.wasm or engine/llama.wasm. */
export async function instantiate(name) {
  const code = await once(name,
    async (response) => WebAssembly.compile(await response.arrayBuffer()));
  return (await WebAssembly.instantiate(code)).exports;
}

/** The first prompts of a task with their answers. */
export async function examplesOf(task, count) {
  const { tasks } = await loadJson("prompts.json");
  return tasks.find(({ name }) => name === task).examples.slice(0, count);
}

/** What was measured of a setting when the page was made; undefined for most settings. */
export async function measuredOf(setting) {
  const { opening, prompts } = await loadJson("measured.json");
  const key = JSON.stringify(setting);
  const found = opening.find((one) => JSON.stringify(one.setting) === key);
  if (!found) return undefined;
  const { right, bits_per_byte: bitsPerByte, texts, sha256 } = found;
  const asked = Object.fromEntries(Object.keys(right).map((task) => [task, prompts]));
  return { texts, sha256, score: { right, asked, bitsPerByte } };
}

/** Show the texts that were measured before, if they were, and then those of the engine. */
export async function writeTwice(engine, setting, prompts, show, signal) {
  const known = await measuredOf(setting);
  const before = prompts.map((prompt) => known?.texts[prompt]);
  if (before.every((text) => text !== undefined)) {
    show(before);
    await mounted();
  }
  const now = await engine.write(setting, prompts, signal);
  if (now.some((text, at) => text !== before[at])) show(now);
}

/** Call back once, when an element comes near what is on the screen. */
export function whenNear(element, callback) {
  const watcher = new IntersectionObserver(
    (entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      watcher.disconnect();
      callback();
    },
    { rootMargin: "300px" },
  );
  watcher.observe(element);
}

/** Mark an element as busy if that lasts longer than 0.3 s; returns what ends it. */
export function markBusy(element) {
  const timer = setTimeout(() => { element.dataset.busy = "true"; }, 300);
  return () => {
    clearTimeout(timer);
    delete element.dataset.busy;
  };
}

export const isAbort = (error) => error?.name === "AbortError";
