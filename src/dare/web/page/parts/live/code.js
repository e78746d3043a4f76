// The setting to take along: as a recipe, a command or Python, with the SHA-256 that it gives.
import { choice, make } from "../../controls.js";
import { commandText, needsRecipe, pythonText, recipeText } from "../../recipe.js";

const FORMS = [["command", "Command"], ["recipe", "Recipe (TOML)"], ["python", "Python"]];

/** The card's parts; `shown()` is the setting of now. */
export function codeCard(card, state, methods, shown) {
  const text = card.querySelector("#live-text");
  const digest = card.querySelector("#live-digest");
  const remark = card.querySelector("[data-place=remark]");
  const warnings = card.querySelector("[data-place=warnings]");
  const copy = card.querySelector("[data-copies=live-text]");
  const form = card.querySelector("[data-place=form]");
  choice(form, state, "live.as", { label: "Show it as", options: FORMS });

  function show() {
    const setting = shown();
    copy.textContent = "Copy";
    if (!setting.models.length) {
      text.textContent = "Without models there is nothing to merge.";
      remark.textContent = "";
      return;
    }
    const asked = state.get("live.as");
    const isLeft = asked === "command" && needsRecipe(setting, methods);
    text.textContent =
      asked === "recipe" ? recipeText(setting) :
      asked === "python" ? pythonText(setting) : commandText(setting, methods);
    remark.textContent = isLeft ? "There are no flags for all of this: save the recipe as recipe.toml." : "";
  }

  state.on(["live.as"], show);
  return {
    show,
    showDigest(value) {
      digest.textContent = value;
      delete card.dataset.stale;
    },
    /** What a plan warns of; the browser's engine makes none. */
    showWarnings(texts) {
      warnings.replaceChildren(...texts.map((text) => make("li", {}, text)));
    },
    dim() { card.dataset.stale = "true"; },
  };
}
