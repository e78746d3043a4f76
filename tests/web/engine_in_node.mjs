// The browser's engine without a browser: the same modules, with files instead of requests, and
// workers that are functions. For tests/web/test_engine_llama.py.
import { readFile } from "node:fs/promises";

globalThis.fetch = async (address) => new Response(await readFile(address));
const source = new URL("../../src/dare/", import.meta.url);
const page = (name) => import(new URL(`web/page/${name}`, source));
const { readSafetensors } = await page("engine/safetensors.js");
const { openCore } = await page("engine/core.js");
await openCore();
export const { CONFIG, Llama } = await page("engine/llama.js");
export const { createHandler } = await page("engine/worker.js");
export const { openEngine } = await page("engine/browser.js");
export const scoring = new URL("web/page/engine/scoring.js", source);

const loaded = new Map();

export async function loadModel(name) {
  if (!loaded.has(name)) {
    const { buffer, byteOffset, length } = await readFile(
      new URL(`demo/models/${name}/model.safetensors`, source));
    loaded.set(name, readSafetensors(buffer.slice(byteOffset, byteOffset + length)));
  }
  return loaded.get(name);
}

export async function openKernels() {
  const binary = await readFile(new URL("web/page/engine/llama.wasm", source));
  return (await WebAssembly.instantiate(binary)).instance.exports;
}

/** A worker in this thread; `posted` gets what it is sent. */
export function startWorker(posted = [], load = loadModel) {
  const handle = createHandler(openKernels, load);
  return {
    postMessage(message) {
      posted.push(message);
      setImmediate(() => handle(message, (data) => this.onmessage({ data })));
    },
    terminate() {},
  };
}

/** JSON, where numbers that are none are texts: "NaN". */
export function print(result) {
  const plain = (_, value) =>
    typeof value === "number" && !Number.isFinite(value) ? String(value) : value;
  console.log(JSON.stringify(result, plain));
}
