// The engine that needs no server: workers merge, score and write, each with the models in its memory.
import { whyNot } from "./merge.js";
import { Pool } from "./pool.js";
import { checkPrompt, inJobs, itemsFor, sumUp } from "./scoring.js";

const KEPT_SETTINGS = 200;
const MOST_WORKERS = 4;

/** The engine as engines.js tells; what is given here is other only in tests. */
export function openBrowserEngine(start = startWorker, count = workerCount(), load = loadPrompts) {
  const pool = new Pool(start, count);
  const known = new Map();  // by setting, answers by kind and item; the last used at the end
  let loading;

  function prompts() {
    loading ??= load().catch((error) => {
      loading = undefined;  // so that the next request tries again
      throw error;
    });
    return loading;
  }

  /** Keep what is known about a setting, and forget the one that was not used for longest. */
  function answersAbout(setting) {
    const key = JSON.stringify(setting);
    const answers = known.get(key) ?? new Map();
    known.delete(key);
    known.set(key, answers);
    if (known.size > KEPT_SETTINGS) known.delete(known.keys().next().value);
    return answers;
  }

  /** Have items of several kinds answered, but for those that were before: a function of both. */
  async function ask(setting, itemsByKind, signal) {
    const answers = answersAbout(setting);
    const keyOf = (kind, item) => JSON.stringify([kind, item]);
    const jobs = Object.entries(itemsByKind).flatMap(([kind, items]) =>
      inJobs(kind, items.filter((item) => !answers.has(keyOf(kind, item)))));
    const messages = jobs.map((job) => ({ setting, ...job }));
    await pool.run(messages, ({ kind, items }, given) => {
      items.forEach((item, at) => answers.set(keyOf(kind, item), given[at]));
    }, signal);
    return (kind, item) => answers.get(keyOf(kind, item));
  }

  return {
    kind: "browser",
    whyNot,

    async merge(setting, signal) {
      return (await ask(setting, { sha256: [""] }, signal))("sha256", "");
    },

    async score(setting, amount, signal) {
      const wanted = itemsFor(await prompts(), amount);
      const examples = wanted.tasks.flatMap(([, ofTask]) => ofTask);
      return sumUp(wanted, await ask(setting, { bits: wanted.windows, right: examples }, signal));
    },

    async write(setting, prompts, signal) {
      prompts.forEach(checkPrompt);
      const answerTo = await ask(setting, { texts: [...new Set(prompts)] }, signal);
      return prompts.map((prompt) => answerTo("texts", prompt));
    },
  };
}

function startWorker() {
  return new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
}

function workerCount() {
  return Math.min(MOST_WORKERS, Math.max(1, navigator.hardwareConcurrency - 1));
}

async function loadPrompts() {
  const response = await fetch(new URL("../prompts.json", import.meta.url));
  if (!response.ok) throw new Error(`prompts.json could not be loaded (${response.status}).`);
  return response.json();
}
