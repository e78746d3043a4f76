// A table of scores: a bar for each task with marks to compare it with, and English below.
import { make } from "../../controls.js";
import { measuredOf } from "../../loading.js";
import { bits, points } from "../../words.js";

export const QUICK = { prompts: 25, englishBytes: 1024 };
export const FULL = { prompts: 100, englishBytes: 4096 };
const BEFORE = { ...FULL, remark: ", computed in advance" };
const WORDS = { base: "the base", own: "the model trained for it", sound: "the intact merge" };

/** Right answers in per cent by task, their mean, and bits per byte of English. */
export function inPercent({ right, asked, bitsPerByte }) {
  const tasks = Object.fromEntries(
    Object.keys(right).map((task) => [task, (100 * right[task]) / asked[task]]));
  const values = Object.values(tasks);
  const mean = values.reduce((sum, value) => sum + value, 0) / values.length;
  return { tasks, mean, bitsPerByte };
}

/** Show texts and score of a setting if they were computed in advance; then they are returned. */
export async function showKnown(setting, samples, showScore) {
  const known = await measuredOf(setting);
  if (!known) return null;
  showScore(known.score, BEFORE);
  samples.show(samples.prompts.map((prompt) => known.texts[prompt]), null);
  return known;
}

/**
 * The table in its place, whose rows are in the page already: `[data-task]` with a bar, marks, and
 * a value.
 */
export function scoreTable(place) {
  const rowOf = (task) => place.querySelector(`[data-task=${task}]`);
  const status = place.querySelector(".asked");
  const english = place.querySelector("[data-english]");

  /** How the English is beside another's, which may not be known. */
  function compare(bitsPerByte, other, whose) {
    if (other === undefined) return "";
    const more = bitsPerByte - other;
    if (!Number.isFinite(bitsPerByte)) return `${whose}: ${bits(other)}`;
    const words = Math.abs(more) < 0.0005 ? "the same as" :
      `${Math.abs(more).toFixed(3)} ${more > 0 ? "more" : "fewer"} than`;
    return `${words} ${whose} (${bits(other)})`;
  }

  return {
    /** Show a score that was measured with this amount, the English beside another's. */
    show(score, amount, otherBits, whose) {
      for (const [task, value] of Object.entries(inPercent(score).tasks)) {
        rowOf(task).querySelector(".gauge").style.setProperty("--value", `${value}%`);
        rowOf(task).querySelector(".value").textContent = points(value);
      }
      english.querySelector(".value").textContent = bits(score.bitsPerByte);
      english.querySelector(".beside").textContent = compare(score.bitsPerByte, otherBits, whose);
      status.textContent = `${amount.prompts} prompts each${amount.remark ?? ""}`;
      status.dataset.prompts = amount.prompts;
      delete place.dataset.stale;
    },

    /** Numbers of another setting stay, dimmed, until there are new ones. */
    dim() { place.dataset.stale = "true"; },

    /** Marks to compare with, in per cent: by task { base, own } or { sound }. */
    mark(marks) {
      for (const [task, values] of Object.entries(marks)) setMarks(rowOf(task), values);
    },
  };
}

function setMarks(row, values) {
  const gauge = row.querySelector(".gauge");
  for (const [kind, value] of Object.entries(values)) {
    if (!gauge.querySelector(`.${kind}`)) gauge.append(make("i", { className: `mark ${kind}` }));
    gauge.querySelector(`.${kind}`).style.left = `${value}%`;
  }
  row.querySelector(".marks").textContent =
    Object.entries(values).map(([kind, value]) => `${WORDS[kind]} ${points(value)}`).join(", ");
}
