// The server's jobs as cards: how far each is, what came of it, and what can be done with it.
/* global darePage */
import { bytes, duration, listed, number, share, shortName, times } from "../../analysis/words.js";
import { button, make } from "../../controls.js";
import { addressOf, ask } from "./server.js";

const BUSY_PAUSE = 400;  // milliseconds between two looks while a job is under way
const AWAY_PAUSE = 3000;
const STATES = {
  waiting: "waits for the job before it",
  running: "runs",
  done: "done",
  failed: "failed",
  stopped: "stopped",
};
const TONES = { done: "ready", failed: "stop", stopped: "change" };
const VERDICTS = { ready: "ready", "ready with changes": "change", "not ready": "stop" };
const isBusy = ({ state }) => state === "waiting" || state === "running";

const namesOf = ({ request: { recipe } }) =>
  listed(recipe.models.merge_files.map((entry) => shortName(entry.file ?? entry)));

const TITLES = {
  analyze: (job) => `Analysis of ${namesOf(job)}`,
  merge: (job) => `Merge of ${namesOf(job)} to ${shortName(job.request.recipe.models.output_file)}`,
  verify: (job) => `Check of ${shortName(job.request.path)}`,
};
const titleOf = (job) => TITLES[job.kind](job);
const stateOf = ({ state, result }) => result?.verdict ?? STATES[state];
const toneOf = ({ state, result }) => VERDICTS[result?.verdict] ?? TONES[state] ?? "note";

function progressText(job) {
  if (job.note) return job.note;
  if (!job.total_bytes) return "reading headers";
  const left = job.seconds_left === null ? "" : `, about ${duration(job.seconds_left)} left`;
  return `${job.verb}: ${bytes(job.done_bytes)} of ${bytes(job.total_bytes)}${left}`;
}

// ---------------------------------------------------------------- what came of a job

function sha(code) {
  return code ? [make("p", { className: "own-sha" }, "SHA-256 of the weights ", make("code", {}, code))] : [];
}

function reportOf({ result, seconds }) {
  const rows = result.models.map((model) => make("tr", {},
    make("th", { scope: "row" }, model.name),
    make("td", {}, model.drop_rate_asked === null ? "nothing" : share(model.drop_rate_realised)),
    make("td", {}, model.drop_rate_asked === null ? "–" : share(model.drop_rate_asked)),
    make("td", {}, number(model.largest_delta))));
  const head = ["model", "dropped", "asked", "largest |δ|"].map((name) => make("th", { scope: "col" }, name));
  const resumed = result.resumed_chunks
    ? `, ${times(result.resumed_chunks, "piece")} taken over from the interrupted run` : "";
  return [
    make("p", {}, `${times(result.tensors, "tensor")}, ${bytes(result.bytes_written)} written to `,
      make("code", {}, result.output), ` in ${duration(result.seconds)}${resumed}.`),
    make("div", { className: "scroll" }, make("table", {},
      make("thead", {}, make("tr", {}, ...head)), make("tbody", {}, ...rows))),
    ...result.warnings.map((warning) => make("p", { className: "own-warning" }, warning)),
    ...sha(result.sha256),
  ];
}

function checkOf({ result }) {
  const intact = `${times(result.tensors, "tensor")}, ${bytes(result.bytes_checked)}: as they were written.`;
  return [
    make("p", {}, result.ok ? intact : "This is not what was written:"),
    ...[...result.problems, ...result.changed].map((problem) => make("p", { className: "own-warning" }, problem)),
    ...sha(result.sha256),
  ];
}

const RESULTS = {
  merge: reportOf,
  verify: checkOf,
  analyze: () => [],
};

function outcomeOf(job) {
  const parts = job.result ? RESULTS[job.kind](job) : [];
  if (job.problem) parts.push(make("p", { className: "own-problem" }, job.problem));
  if (job.state === "stopped" && job.kind === "merge") {
    parts.push(make("p", {}, "What is done is kept. “Resume” goes on from there; so does the command ",
      make("code", {}, "dare recipe.toml"), " with this recipe."));
  }
  return parts;
}

// ---------------------------------------------------------------- cards

/** A card that stays the same element while its job goes on, so that the keyboard is not lost. */
function openCard(act) {
  const title = make("b", { className: "own-name" });
  const state = make("span", { className: "badge" });
  const bar = make("progress", { max: 1 });
  const text = make("span", { className: "own-progress" });
  const outcome = make("div", { className: "own-outcome" });
  const buttons = make("div", { className: "buttons" });
  const line = make("div", { className: "own-bar" }, bar, text);
  const element = make("li", {}, make("div", { className: "own-head" }, title, state), line, outcome, buttons);
  let shown = "";

  function show(job) {
    bar.setAttribute("aria-label", titleOf(job));
    if (job.total_bytes) bar.value = job.done_bytes / job.total_bytes;
    else bar.removeAttribute("value");
    text.textContent = progressText(job);
    const now = JSON.stringify([job.state, job.result, job.problem]);
    if (now === shown) return;
    shown = now;
    element.dataset.job = job.number;
    element.dataset.state = job.state;
    title.textContent = titleOf(job);
    state.textContent = stateOf(job);
    element.className = toneOf(job);
    line.hidden = job.state !== "running";
    outcome.replaceChildren(...outcomeOf(job));
    const had = buttons.contains(document.activeElement);
    buttons.replaceChildren(...actionsOf(job, act));
    if (had) buttons.firstElementChild?.focus();
  }

  return { element, show };
}

function actionsOf(job, act) {
  const made = [];
  const add = (text, work) => {
    const element = button(make("span"), text, work);
    element.setAttribute("aria-label", `${text}: ${titleOf(job)}`);
    made.push(element);
  };
  const link = (text, path, properties) =>
    made.push(make("a", { href: addressOf(`jobs/${job.number}/${path}`), ...properties }, text));
  if (isBusy(job)) add("Cancel", () => act.post(`jobs/${job.number}/cancel`));
  if (job.state === "stopped" || job.state === "failed") {
    const text = job.kind === "merge" && job.state === "stopped" ? "Resume" : "Try again";
    add(text, () => act.post(`jobs/${job.number}/again`));
  }
  if (job.state === "done" && job.kind === "merge") {
    add("Verify", () => act.post("jobs", { kind: "verify", path: job.result.output }));
  }
  if (job.state === "done" && job.kind === "analyze") {
    add("Show", () => act.showAnalysis(job, { focus: true }));
    link("Full report", "report", { target: "_blank" });
    link("Save as JSON", "analysis", { download: "analysis.json" });
  }
  return made;
}

// ---------------------------------------------------------------- all jobs

/** Shows all jobs and looks after them; `onEnd` is called with each that ends while we look. */
export function mountJobs(section, { onEnd, showAnalysis, tell }) {
  const cards = new Map();
  const known = new Map();
  let timer = 0;
  let isFirst = true;

  async function post(path, body = {}) {
    try {
      await ask(path, body);
      tell("");
    } catch (error) {
      tell(error.message);
    }
    return look();
  }

  function show(job) {
    if (!cards.has(job.number)) {
      const card = openCard({ post, showAnalysis });
      cards.set(job.number, card);
      section.querySelector(job.kind === "analyze" ? "#own-analyses" : "#own-merges").prepend(card.element);
    }
    cards.get(job.number).show(job);
    const before = known.get(job.number);
    known.set(job.number, job);
    if (isFirst || isBusy(job) || (before && !isBusy(before))) return;
    darePage.say(`${titleOf(job)}: ${stateOf(job)}.`);
    onEnd(job);
  }

  async function look() {
    clearTimeout(timer);
    try {
      const jobs = await ask("jobs");
      if (jobs.length < cards.size) forget();  // another server
      jobs.forEach(show);
      if (isFirst) jobs.filter(({ kind, state }) => kind === "analyze" && state === "done").slice(-1).forEach((job) => showAnalysis(job));
      isFirst = false;
      tell("", "away");
      if (jobs.some(isBusy)) timer = setTimeout(look, BUSY_PAUSE);
    } catch (error) {
      tell(`${error.message} Start it again with \`dare playground\`. A merge that was interrupted goes on where it stopped.`, "away");
      timer = setTimeout(look, AWAY_PAUSE);
    }
  }

  function forget() {
    for (const { element } of cards.values()) element.remove();
    cards.clear();
    known.clear();
  }

  document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
  look();
  return { post };
}
