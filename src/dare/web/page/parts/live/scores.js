// A table of scores: a bar for each task with marks to compare it with, and English below.
import { make } from "../../controls.js";
import { inPercent } from "./measuring.js";
import { bits, percent } from "./numbers.js";

/**
 * The table in its place, whose rows are in the page already: `[data-task]` with a `.gauge`, `.value`.
 * `marks` has right answers in per cent: by task { base, own }.
 */
export function scoreTable(place) {
  const rows = new Map();
  for (const row of place.querySelectorAll("[data-task]")) rows.set(row.dataset.task, row);
  const status = place.querySelector(".asked");
  const english = place.querySelector("[data-english]");

  return {
    /** Show a score that was measured with this amount; the base's bits are for the same English. */
    show(score, amount, baseBits) {
      const { tasks, bitsPerByte } = inPercent(score);
      for (const [task, value] of Object.entries(tasks)) {
        const row = rows.get(task);
        row.querySelector(".gauge").style.setProperty("--value", `${value}%`);
        row.querySelector(".value").textContent = percent(value);
      }
      english.querySelector(".value").textContent = bits(bitsPerByte);
      this.compare(bitsPerByte, baseBits);
      status.textContent = `${amount.prompts} prompts of each task`;
      status.dataset.prompts = amount.prompts;
      delete place.dataset.stale;
    },

    /** Say how the English is beside the base's. */
    compare(bitsPerByte, baseBits) {
      if (baseBits === undefined) return;
      const more = bitsPerByte - baseBits;
      const words = !Number.isFinite(more) ? "" :
        Math.abs(more) < 0.0005 ? ", the same" :
        `, ${Math.abs(more).toFixed(3)} ${more > 0 ? "more" : "fewer"}`;
      english.querySelector(".beside").textContent = `the base: ${bits(baseBits)}${words}`;
    },

    /** Numbers of another setting stay, dimmed, until there are new ones. */
    dim() { place.dataset.stale = "true"; },

    mark(marks) {
      for (const [task, { base, own }] of Object.entries(marks)) {
        const row = rows.get(task);
        row.querySelector(".gauge").append(
          make("i", { className: "mark base", title: `the base: ${percent(base)}` }),
          make("i", { className: "mark own", title: `the model trained for it: ${percent(own)}` }),
        );
        row.querySelector(".gauge").style.setProperty("--base", `${base}%`);
        row.querySelector(".gauge").style.setProperty("--own", `${own}%`);
        row.querySelector(".marks").textContent =
          `base ${percent(base)}, trained for it ${percent(own)}`;
      }
    },
  };
}

/** Marks from measured.json: what the base and the model of each task have. */
export const marksOf = ({ models }) =>
  Object.fromEntries(Object.keys(models.base.right).map((task) => [
    task, { base: models.base.right[task], own: models[task].right[task] },
  ]));
