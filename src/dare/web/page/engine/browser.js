// The engine of the page: workers merge, score and write.
//
// One worker merges, and all of them share the jobs about what comes out. Every answer is kept,
// also those to a request that is aborted later: the next one asks only what is not known yet.
import { loadJson } from "../loading.js";
import { sha256 } from "./digest.js";
import { Kept } from "./kept.js";
import { Pool } from "./pool.js";
import { inJobs, itemsFor, promptOf, sumUp, textOf } from "./scoring.js";

const KEPT_MERGES = 4;
const KEPT_SETTINGS = 200;  // with the answers about them
const MOST_WORKERS = 4;

/**
 * The engine; what is given here is other only in tests. merge.js says what a setting is, and an
 * amount is { prompts: 25, englishBytes: 1024 }: prompts of each task, the first of prompts.json.
 * Promises are rejected with an AbortError when the signal is given.
 */
export function openEngine(
  start = startWorker, count = workerCount(), load = () => loadJson("prompts.json"),
) {
  const pool = new Pool(start, count);
  const merges = new Kept(KEPT_MERGES);
  const known = new Kept(KEPT_SETTINGS);

  function startMerge(key, setting, signal) {
    let tensors;
    const merging = pool
      .run([{ kind: "merge", setting }], (_, merged) => { tensors = merged; }, signal)
      .then(() => tensors);
    merging.catch(() => merges.forget(key));
    return merging;
  }

  /** The merged tensors; all who wait for the same ones share a merge. */
  async function merge(setting, signal) {
    const key = JSON.stringify(setting);
    for (;;) {
      signal?.throwIfAborted();
      try {
        return await merges.get(key, () => startMerge(key, setting, signal));
      } catch (error) {
        if (error.name !== "AbortError" || signal?.aborted) throw error;  // else another's abort
      }
    }
  }

  /** Have items of several kinds answered that were not before; a function gives the answers. */
  async function ask(setting, itemsByKind, signal) {
    const key = JSON.stringify(setting);
    const answers = known.get(key, () => new Map());
    const keyOf = (kind, item) => JSON.stringify([kind, item]);
    const jobs = Object.entries(itemsByKind).flatMap(([kind, items]) =>
      inJobs(kind, items.filter((item) => !answers.has(keyOf(kind, item)))));
    const tensors = jobs.length ? await merge(setting, signal) : null;
    const keep = ({ kind, items }, given) =>
      items.forEach((item, at) => answers.set(keyOf(kind, item), given[at]));
    await pool.run(jobs.map((job) => ({ ...job, key, tensors })), keep, signal);
    signal?.throwIfAborted();  // what was known is as old as what was asked for
    return (kind, item) => answers.get(keyOf(kind, item));
  }

  return {
    /** The SHA-256 of the merged weights, as `dare verify` prints it. */
    merge: async (setting, signal) => sha256(await merge(setting, signal)),

    /** { right: {add, sort, say}, asked: {add, sort, say}, bitsPerByte }. */
    async score(setting, amount, signal) {
      const wanted = itemsFor(await load(), amount);
      const examples = wanted.tasks.flatMap(([, ofTask]) => ofTask);
      return sumUp(wanted, await ask(setting, { bits: wanted.windows, right: examples }, signal));
    },

    /** What the merged model writes after each prompt. */
    async write(setting, prompts, signal) {
      const items = prompts.map(promptOf);
      const answerTo = await ask(setting, { texts: [...new Set(items)] }, signal);
      return items.map((item) => textOf(answerTo("texts", item)));
    },
  };
}

const startWorker = () => new Worker(new URL("./worker.js", import.meta.url), { type: "module" });

/** One for each core: on two, a full score takes 1.3 s with two workers and 1.8 s with one. */
const workerCount = () => Math.min(MOST_WORKERS, Math.max(1, navigator.hardwareConcurrency));
