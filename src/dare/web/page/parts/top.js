// The top of the page: one weight in three models, then what the models and a merge of them write.
/* global darePage */
import { make } from "../controls.js";
import { examplesOf, loadJson, writeTwice } from "../loading.js";
import { NAMES, sumOf } from "../tensors.js";
import { addWeight } from "./top/weight.js";

export { defaults } from "./top/weight.js";

export async function mount(section, { state, engine }) {
  mountButtons(state);
  addWeight(section.querySelector("#one-weight"), state, (await loadJson("measured.json")).weight);
  writeAll(section, engine).catch((error) => {
    section.querySelector("[data-shows=failure]").textContent = error.message;
  });
}

function mountButtons(state) {
  const [link, reset] = document.querySelectorAll(".controls button");
  link.addEventListener("click", async () => {
    const address = state.link();
    try {
      await navigator.clipboard.writeText(address);
      darePage.say("The link is copied.");
      link.textContent = "Copied";
    } catch {
      darePage.say("Copy the address of this page: it is the link.");
      link.textContent = "Copy the address above";
    }
  });
  reset.addEventListener("click", () => state.reset());
}

/** Ask the base, every model and the merged one a question of each kind. */
async function writeAll(section, engine) {
  const examples = (await Promise.all(NAMES.map((name) => examplesOf(name, 1)))).flat();
  const prompts = examples.map(([prompt]) => prompt);
  const settingOf = (names) => sumOf(names, names.length > 1 ? 0.5 : 0, 42);
  const asked = [...section.querySelectorAll("[data-answers]")].map((place) =>
    writeTwice(engine, settingOf(place.dataset.answers.split(" ").filter(Boolean)), prompts, (texts) =>
      place.replaceChildren(...texts.map((text, at) => answer(examples[at], text)))));
  await Promise.all(asked);
}

function answer([prompt, right], text) {
  const isRight = text === right;
  return make("li", { className: isRight ? "right" : "wrong" },
    make("span", { ariaHidden: "true" }, isRight ? "✓" : "✗"),
    make("code", {}, prompt, make("b", {}, text)),
    make("span", { className: "unseen" }, isRight ? ", right" : ", wrong"),
  );
}
