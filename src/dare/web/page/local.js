// The local engine: the package on this machine, behind the server that this page came from.
// `engines.js` says what an engine has.

export function openLocalEngine() {
  return {
    kind: "local",
    whyNot: () => null,

    async merge(setting, signal) {
      return (await ask("merge", { setting }, signal)).sha256;
    },

    /** What `dare plan` warns of, as texts; only this engine has it. */
    async warnings(setting, signal) {
      return (await ask("merge", { setting }, signal)).warnings;
    },

    async score(setting, amount, signal) {
      const score = await ask("score", { setting, amount }, signal);
      if (amount.englishBytes) score.bitsPerByte ??= NaN;  // which JSON does not have
      return score;
    },

    async write(setting, prompts, signal) {
      return (await ask("write", { setting, prompts }, signal)).texts;
    },
  };
}

async function ask(name, question, signal) {
  const response = await fetch(new URL(`api/${name}`, import.meta.url), {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(question),
    signal,
  }).catch((error) => {
    if (error.name === "AbortError") throw error;
    throw new Error("The server does not answer. Is `dare playground` still running?");
  });
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}
