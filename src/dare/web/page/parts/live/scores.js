// A table of scores: a bar for each task with marks to compare it with, and English below.
import { make } from "../../controls.js";
import { inPercent } from "./measuring.js";
import { bits, percent } from "./numbers.js";

/**
 * The table in its place, whose rows are in the page already: `[data-task]` with a bar, marks, and
 * a value.
 */
export function scoreTable(place) {
  const rows = new Map();
  for (const row of place.querySelectorAll("[data-task]")) rows.set(row.dataset.task, row);
  const status = place.querySelector(".asked");
  const english = place.querySelector("[data-english]");
  let shown = null;  // the score and its amount

  /** Say how the English is beside another's; nothing where that is not known yet. */
  function compare(otherBits, whose) {
    const { bitsPerByte } = shown.score;
    const more = bitsPerByte - otherBits;
    const words = !Number.isFinite(bitsPerByte) ? "" :
      Math.abs(more) < 0.0005 ? ", the same" :
      `, ${Math.abs(more).toFixed(3)} ${more > 0 ? "more" : "fewer"}`;
    const text = otherBits === undefined ? "" : `${whose}: ${bits(otherBits)}${words}`;
    english.querySelector(".beside").textContent = text;
  }

  return {
    place,

    /** Show a score that was measured with this amount, the English beside another's. */
    show(score, amount, otherBits, whose = "the base") {
      shown = { score, amount };
      for (const [task, value] of Object.entries(inPercent(score).tasks)) {
        const row = rows.get(task);
        row.querySelector(".gauge").style.setProperty("--value", `${value}%`);
        row.querySelector(".value").textContent = percent(value);
      }
      english.querySelector(".value").textContent = bits(score.bitsPerByte);
      compare(otherBits, whose);
      status.textContent = `${amount.prompts} prompts each`;
      status.dataset.prompts = amount.prompts;
      delete place.dataset.stale;
    },

    /** The base's bits for so much English are known now: say them if that is what is shown. */
    compareWithBase(baseBits, englishBytes) {
      if (shown.amount.englishBytes === englishBytes) compare(baseBits, "the base");
    },

    /** Numbers of another setting stay, dimmed, until there are new ones. */
    dim() { place.dataset.stale = "true"; },

    /** Marks to compare with, in per cent: by task { base, own } or { sound }. */
    mark(marks) {
      for (const [task, values] of Object.entries(marks)) setMarks(rows.get(task), values);
    },
  };
}

const WORDS = { base: "the base", own: "the model trained for it", sound: "the sound merge" };

function setMarks(row, values) {
  const gauge = row.querySelector(".gauge");
  for (const [kind, value] of Object.entries(values)) {
    if (!gauge.querySelector(`.${kind}`)) gauge.append(make("i", { className: `mark ${kind}` }));
    gauge.querySelector(`.${kind}`).style.left = `${value}%`;
  }
  row.querySelector(".marks").textContent =
    Object.entries(values).map(([kind, value]) => `${WORDS[kind]} ${percent(value)}`).join(", ");
}

/** Marks from measured.json: what the base and the model of each task have. */
export const marksOf = ({ models }) =>
  Object.fromEntries(Object.keys(models.base.right).map((task) => [
    task, { base: models.base.right[task], own: models[task].right[task] },
  ]));
