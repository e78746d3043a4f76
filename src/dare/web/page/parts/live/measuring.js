// Asks an engine and keeps its answers, so that settings already seen come at once.
export const QUICK = { prompts: 25, englishBytes: 1024 };
export const FULL = { prompts: 100, englishBytes: 4096 };
export const BASE_ALONE = {
  base: "base", method: "sum", scale: 1, seed: 42, models: [], stages: {},
};

const measurers = new WeakMap();

/** The one of an engine: all parts of the page share what it has seen. */
export function measurerOf(engine) {
  if (!measurers.has(engine)) measurers.set(engine, createMeasurer(engine));
  return measurers.get(engine);
}

function createMeasurer(engine) {
  const kept = new Map();

  async function once(key, ask, signal) {
    if (!kept.has(key)) kept.set(key, await ask());
    signal?.throwIfAborted();  // what was kept is as old as what was asked for
    return kept.get(key);
  }
  const keyOf = (...parts) => JSON.stringify(parts);

  return {
    /** A score if it was measured before. */
    seen: (setting, amount) => kept.get(keyOf(setting, amount)),

    score: (setting, amount, signal) =>
      once(keyOf(setting, amount), () => engine.score(setting, amount, signal), signal),

    merge: (setting, signal) =>
      once(keyOf(setting, "merge"), () => engine.merge(setting, signal), signal),

    /** What a plan of the merge warns of, where the engine makes one. */
    warnings: async (setting, signal) =>
      (engine.warnings && setting.models.length ? engine.warnings(setting, signal) : []),

    /** What the merged model writes after each prompt; only new prompts are asked. */
    async write(setting, prompts, signal) {
      const keys = prompts.map((prompt) => keyOf(setting, "write", prompt));
      const fresh = prompts.filter((_, index) => !kept.has(keys[index]));
      if (fresh.length) {
        const texts = await engine.write(setting, fresh, signal);
        fresh.forEach((prompt, index) => kept.set(keyOf(setting, "write", prompt), texts[index]));
      }
      signal?.throwIfAborted();
      return keys.map((key) => kept.get(key));
    },
  };
}

/** Right answers in per cent by task, their mean, and bits per byte of English. */
export function inPercent({ right, asked, bitsPerByte }) {
  const tasks = Object.fromEntries(
    Object.keys(right).map((task) => [task, (100 * right[task]) / asked[task]]));
  const values = Object.values(tasks);
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  return { tasks, mean, bitsPerByte };
}
