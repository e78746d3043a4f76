// The top of the page: three models that learned one thing each, one that was merged from them.
/* global darePage */
import { button, make } from "../controls.js";
import { keepMask } from "../engine/mask.js";
import { dropped } from "../engine/merge.js";
import { examplesOf } from "../loading.js";
import { drawMatrix, usualSize } from "../pictures.js";
import { changeOf, NAMES, SIDE } from "../tensors.js";

export const defaults = {};

const TENSOR = "model.layers.4.self_attn.o_proj.weight";
const RATE = 0.5;
const SEED = 42;

export async function mount(section, { state, engine }) {
  addButtons(section.querySelector(".buttons"), state);
  const asked = writeAll(section, engine);
  await drawAll(section);
  asked.catch((error) => {
    section.querySelector("[data-shows=failure]").textContent = error.message;
  });
}

function addButtons(place, state) {
  const link = button(place, "Copy a link to this", async () => {
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
  button(place, "Reset everything", () => state.reset());
}

/** A picture for each model, and one of what is added to the base when they are merged. */
async function drawAll(section) {
  const deltas = await Promise.all(NAMES.map((name) => changeOf(name, TENSOR)));
  const limit = Math.max(...deltas.map(usualSize));
  const kept = deltas.map((delta, at) =>
    dropped(delta, keepMask(TENSOR, delta.length, RATE, SEED + at), 1 / (1 - RATE)));
  const merged = kept[0].map((_, at) => kept.reduce((sum, delta) => sum + delta[at], 0));
  const draw = () => {
    [...deltas, merged].forEach((values, at) => {
      drawMatrix(section.querySelectorAll("canvas")[at], values, SIDE, { limit });
    });
  };
  draw();
  darePage.onTheme(draw);
}

/** Ask every model, and the merged one, one question of each kind. */
async function writeAll(section, engine) {
  const examples = (await Promise.all(NAMES.map((name) => examplesOf(name, 1)))).flat();
  const places = section.querySelectorAll("[data-answers]");
  for (const [at, models] of [NAMES, ...NAMES.map((name) => [name])].entries()) {
    const place = places[(at + NAMES.length) % places.length];
    const texts = await engine.write(settingOf(models), examples.map(([prompt]) => prompt));
    place.replaceChildren(...examples.map(([prompt, answer], task) => {
      const text = texts[task];
      const isRight = text === answer;
      return make("li", { className: isRight ? "right" : "wrong" },
        make("span", { ariaHidden: "true" }, isRight ? "✓" : "✗"),
        make("code", {}, prompt, make("b", {}, text)),
        make("span", { className: "unseen" }, isRight ? ", right" : ", wrong"),
      );
    }));
  }
}

function settingOf(models) {
  const rate = models.length > 1 ? RATE : 0;
  return {
    base: "base",
    method: "dare+sum",
    scale: 1,
    seed: SEED,
    models: models.map((name) => ({ name })),
    stages: { dare: { drop_rate: rate, rescale: true } },
  };
}
