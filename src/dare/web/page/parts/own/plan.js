// The plan of the recipe: what will be done, what does not fit, what it costs.
import { listOf, paragraph, tableOf } from "../../analysis/elements.js";
import { number } from "../../analysis/words.js";
import { make } from "../../controls.js";
import { whenRested } from "../../pace.js";
import { ask } from "./server.js";

const REST = 250;  // milliseconds without a change

const NOTHING = "Choose a base and at least one model.";

const facts = (entries) => make("dl", { className: "own-facts" },
  ...entries.flatMap(([name, text]) => [make("dt", {}, name), make("dd", {}, text)]));

const shown = (value) => (Array.isArray(value) ? value.map(number).join(" to ") : number(value));

const models = (plan) => tableOf(["model", "weight", "seed"],
  plan.models.map(({ name, weight, seed }) => [name, shown(weight), String(seed)]));

const list = (title, items, className) =>
  items.length ? [paragraph("", make("b", {}, title)), listOf(className, items)] : [];

/** Keeps the plan beside the recipe; `onPlan` gets each one, or null and why there is none. */
export function mountPlan(section, recipe, { onPlan, overwrites }) {
  const place = section.querySelector("#own-plan-text");

  function showPlan(plan) {
    if (plan.error) {
      place.replaceChildren(paragraph("own-problem", plan.error));
      return;
    }
    place.replaceChildren(
      facts([
        ["method", plan.chain.join(", then ")],
        ...Object.entries(plan.facts),
        ["time", plan.takes ?? "not known"],
      ]),
      models(plan),
      ...list("Warnings", plan.warnings, "plain own-warnings"),
      ...list("Notes", plan.notes, "plain"),
      ...list("Left out", plan.left_out, "plain"),
    );
  }

  const update = whenRested(REST, async (signal) => {
    if (!recipe.isComplete()) {
      place.replaceChildren(paragraph("own-nothing", NOTHING));
      onPlan(null);
      return;
    }
    try {
      const plan = await ask("plan", { recipe: recipe.read(), overwrite: overwrites() }, signal);
      if (signal.aborted) return;
      showPlan(plan);
      onPlan(plan.toml ? plan : null, plan.error);
    } catch (error) {
      if (error.name === "AbortError") return;
      place.replaceChildren(paragraph("own-problem", error.message));
      onPlan(null, error.message);
    }
  });

  recipe.on(update);
  update();
  return { update };
}
