// The controls of "Merge live": the method, the models, and the numbers of the merge.
import { button, choice, DROP_RATE, make, slider, toggle } from "../../controls.js";
import { NAMES as MODELS } from "../../tensors.js";
import { percent } from "../../words.js";
import { defaults, METHODS, NAMES } from "./setting.js";

const STAGES = {
  dare: "drops each change at random with probability p, and divides the rest by 1 − p.",
  trim: "keeps the largest changes of each model.",
  sum: "adds up the deltas of all models.",
  linear: "takes the mean of the deltas.",
  ties: "elects a sign for each element, and takes the mean of the deltas that have it.",
  slerp: "goes from one model to another on an arc, so choose two: t = 0 is the first, 1 the second.",
};
const two = (value) => value.toFixed(2);

/** Fill the panel, and keep what it shows in line with the state. */
export function addPanel(panel, state) {
  const at = (name) => panel.querySelector(`[data-place=${name}]`);
  const bind = (place, name, label, min, max, step, format = two) =>
    slider(at(place), state, `live.${name}`, { label, min, max, step, format });
  choice(at("method"), state, "live.m", {
    label: "Method", options: METHODS.map((method) => [method, method]),
  });
  slider(at("dare"), state, "live.p", DROP_RATE);
  toggle(at("dare"), state, "live.rescale", { label: "Rescale what is kept" });
  bind("trim", "keep", "Keep the largest", 0.05, 1, 0.05, (share) => percent(share, 0));
  bind("slerp", "t", "Place on the arc t", 0, 1, 0.01);
  bind("numbers", "scale", "Scale λ", 0, 3, 0.05);
  bind("numbers", "seed", "Seed", 0, 99, 1, String);
  const boxes = MODELS.map((name) => {
    bind("weights", `w${name}`, `Weight of ${name}`, -1, 2, 0.01);
    return toggle(at("models"), state, `live.${name}`, { label: at("models").dataset[name] });
  });
  toggle(at("switches"), state, "live.w", { label: "Set a weight for each model" });
  button(at("reset"), "Start again", () => state.set(defaults));

  function follow() {
    const chain = state.get("live.m").split("+");
    at("words").replaceChildren(
      ...chain.map((name) => make("p", {}, make("b", {}, name), ` ${STAGES[name]}`)));
    const has = (stage) => chain.includes(stage);
    for (const stage of ["dare", "trim", "slerp"]) at(stage).hidden = !has(stage);
    at("weighing").hidden = has("slerp");
    at("weights").hidden = !state.get("live.w");
    if (has("slerp") && boxes.every(({ checked }) => checked)) state.set({ "live.say": false });
    const isFull = has("slerp") && boxes.filter(({ checked }) => checked).length > 1;
    for (const box of boxes) box.disabled = isFull && !box.checked;
  }

  state.on(NAMES, follow);
  follow();
}
