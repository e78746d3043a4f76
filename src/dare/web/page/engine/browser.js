// The engine that needs no server: workers merge, score and write.
//
// One worker merges, and all of them share the jobs about what comes out. Every answer is kept,
// also those to a request that is aborted later: the next one asks only what is not known yet.
import { sha256 } from "./digest.js";
import { startHere } from "./here.js";
import { Kept } from "./kept.js";
import { whyNot } from "./merge.js";
import { Pool, aborted, share } from "./pool.js";
import { inJobs, itemsFor, promptOf, sumUp, textOf } from "./scoring.js";

const KEPT_MERGES = 4;
const KEPT_SETTINGS = 200;  // with the answers about them
const MOST_WORKERS = 4;
const isOneFile = "dareFile" in globalThis;  // see single.js

/** The engine as engines.js tells; what is given here is other only in tests. */
export function openBrowserEngine(start = startWorker, count = workerCount(), load = loadPrompts) {
  const pool = new Pool(start, count);
  const merges = new Kept(KEPT_MERGES);
  const known = new Kept(KEPT_SETTINGS);
  const prompts = new Kept(1);

  /** The merged tensors; all who wait for the same ones share a merge. */
  async function merge(setting, signal) {
    if (signal?.aborted) throw aborted();
    const key = JSON.stringify(setting);
    const work = async (signal) => {
      let tensors;
      await pool.run([{ kind: "merge", setting }], (_, given) => (tensors = given), signal);
      return tensors;
    };
    return merges.get(key, () => share(work, () => merges.forget(key)))(signal);
  }

  /** Have items of several kinds answered that were not before; a function gives the answers. */
  async function ask(setting, itemsByKind, signal) {
    const key = JSON.stringify(setting);
    const answers = known.get(key, () => new Map());
    const keyOf = (kind, item) => JSON.stringify([kind, item]);
    const jobs = Object.entries(itemsByKind).flatMap(([kind, items]) =>
      inJobs(kind, items.filter((item) => !answers.has(keyOf(kind, item)))));
    const tensors = jobs.length ? await merge(setting, signal) : null;
    const messages = jobs.map((job) => ({ ...job, key, tensors }));
    await pool.run(messages, ({ kind, items }, given) => {
      items.forEach((item, at) => answers.set(keyOf(kind, item), given[at]));
    }, signal);
    return (kind, item) => answers.get(keyOf(kind, item));
  }

  return {
    kind: "browser",
    whyNot,

    async merge(setting, signal) {
      return sha256(await merge(setting, signal));
    },

    async score(setting, amount, signal) {
      const all = await prompts.get("all", () => share(load, () => prompts.forget("all")))(signal);
      const wanted = itemsFor(all, amount);
      const examples = wanted.tasks.flatMap(([, ofTask]) => ofTask);
      return sumUp(wanted, await ask(setting, { bits: wanted.windows, right: examples }, signal));
    },

    async write(setting, prompts, signal) {
      const items = prompts.map(promptOf);
      const answerTo = await ask(setting, { texts: [...new Set(items)] }, signal);
      return items.map((item) => textOf(answerTo("texts", item)));
    },
  };
}

function startWorker() {
  if (isOneFile) return startHere();
  return new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
}

/** One for each core: on two, a full score takes 1.3 s with two workers and 1.8 s with one. */
function workerCount() {
  return isOneFile ? 1 : Math.min(MOST_WORKERS, Math.max(1, navigator.hardwareConcurrency));
}

async function loadPrompts(signal) {
  const response = await fetch(new URL("../prompts.json", import.meta.url), { signal });
  if (!response.ok) throw new Error(`prompts.json could not be loaded (${response.status}).`);
  return response.json();
}
