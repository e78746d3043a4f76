// The server's jobs as cards: how far each is, what came of it, and what can be done with it.
/* global darePage */
import { button, make } from "../../controls.js";
import { outcomeOf, progressOf, stateOf, titleOf, toneOf } from "./outcomes.js";
import { addressOf, ask } from "./server.js";

const BUSY_PAUSE = 400;  // milliseconds between two looks while a job is under way
const AWAY_PAUSE = 3000;
const AWAY = "Start it again with `dare playground`. An interrupted merge can be resumed.";

const keyOf = ({ number, made_at: madeAt }) => `${number} ${madeAt}`;
const isBusy = ({ state }) => state === "waiting" || state === "running";

/** What can be done with a job in its state: buttons and links. */
function actionsOf(job, act) {
  const made = [];
  const add = (text, work) => {
    const element = button(make("span"), text, work);
    element.setAttribute("aria-label", `${text}: ${titleOf(job)}`);
    made.push(element);
  };
  if (isBusy(job)) add("Cancel", () => act.post(`jobs/${job.number}/cancel`));
  if (job.state === "stopped" || job.state === "failed") {
    const goesOn = job.kind === "merge" && job.state === "stopped";
    add(goesOn ? "Resume" : "Try again", () => act.post(`jobs/${job.number}/again`));
  }
  if (job.state === "done" && job.kind === "merge") {
    add("Verify", () => act.post("jobs", { kind: "verify", path: job.result.output }));
  }
  if (job.state === "done" && job.kind === "analyze") {
    add("Show", () => act.showAnalysis(job, { focus: true }));
    const href = addressOf(`jobs/${job.number}/analysis`);
    made.push(make("a", { href, download: "analysis.json" }, "Save as JSON"));
  }
  if (!isBusy(job) && job.request.recipe) {
    add("Use these models", () => act.takeRecipe(job.request.recipe));
  }
  return made;
}

/** A card that stays the same element while its job goes on, so that the keyboard is not lost. */
function openCard(act) {
  const title = make("b", { className: "own-name" });
  const state = make("span", { className: "badge" });
  const bar = make("progress", { max: 1 });
  const text = make("span", { className: "own-progress" });
  const outcome = make("div", { className: "own-outcome" });
  const buttons = make("div", { className: "buttons" });
  const head = make("div", { className: "own-head" }, title, state);
  const line = make("div", { className: "own-bar" }, bar, text);
  const element = make("li", {}, head, line, outcome, buttons);
  let shown = "";

  function showProgress(job) {
    if (job.total_bytes) bar.value = job.done_bytes / job.total_bytes;
    else bar.removeAttribute("value");
    text.textContent = progressOf(job);
  }

  function showState(job) {
    Object.assign(element.dataset, { job: job.number, state: job.state });
    element.className = toneOf(job);
    bar.setAttribute("aria-label", titleOf(job));
    title.textContent = titleOf(job);
    state.textContent = stateOf(job);
    line.hidden = job.state !== "running";
    outcome.replaceChildren(...outcomeOf(job));
    const hadFocus = buttons.contains(document.activeElement);
    buttons.replaceChildren(...actionsOf(job, act));
    if (hadFocus) buttons.firstElementChild?.focus();
  }

  function show(job) {
    showProgress(job);
    const now = JSON.stringify([job.state, job.result, job.problem]);
    if (now !== shown) showState(job);
    shown = now;
  }

  return { element, show };
}

/** Shows all jobs and looks after them; `onEnd` is called with each that ends while we look. */
export function mountJobs(section, { onEnd, showAnalysis, takeRecipe, tell }) {
  const cards = new Map();
  const busy = new Set();  // keys of those that were so when we last looked
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
    const key = keyOf(job);
    if (!cards.has(key)) {
      const card = openCard({ post, showAnalysis, takeRecipe });
      cards.set(key, card);
      const list = job.kind === "analyze" ? "#own-analyses" : "#own-merges";
      section.querySelector(list).prepend(card.element);
      if (!isFirst) busy.add(key);  // it may have ended since it was asked for
    }
    cards.get(key).show(job);
    if (isBusy(job)) {
      busy.add(key);
    } else if (busy.delete(key)) {
      darePage.say(`${titleOf(job)}: ${stateOf(job)}.`);
      onEnd(job);
    }
  }

  /** Remove the cards of jobs that the server does not keep, or that were another server's. */
  function forgetOthers(jobs) {
    const kept = new Set(jobs.map(keyOf));
    for (const [key, { element }] of cards) {
      if (kept.has(key)) continue;
      element.remove();
      cards.delete(key);
      busy.delete(key);
    }
  }

  async function look() {
    clearTimeout(timer);
    try {
      const jobs = await ask("jobs");
      forgetOthers(jobs);
      jobs.forEach(show);
      const last = jobs.findLast(({ kind, state }) => kind === "analyze" && state === "done");
      if (isFirst && last) showAnalysis(last);
      isFirst = false;
      tell("", "away");
      if (busy.size) timer = setTimeout(look, BUSY_PAUSE);
    } catch (error) {
      tell(`${error.message} ${AWAY}`, "away");
      timer = setTimeout(look, AWAY_PAUSE);
    }
  }

  document.addEventListener("visibilitychange", () => { if (!document.hidden) look(); });
  look();
  return { post };
}
