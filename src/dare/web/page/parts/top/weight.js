// One weight in three models: what DARE makes of their changes, and where a merge of them can end.
import { DROP_RATE, make, seedButton, slider } from "../../controls.js";
import { keepMask } from "../../engine/mask.js";
import { oncePerFrame } from "../../pace.js";
import { NAMES } from "../../tensors.js";
import { decimal, noiseInWords, percent, show, signed } from "../../words.js";

const RATE = { ...DROP_RATE, label: "Drop rate p (0 to 0.8)", max: 0.8 };
export const defaults = { "top.p": 0.5, "top.seed": 42 };

const [LEFT, RIGHT] = [-0.01, 0.035];  // the ends of the axis
const place = (value) => `${(100 * (value - LEFT)) / (RIGHT - LEFT)}%`;

/** All that can become of the weight, with how likely it is. */
function outcomesOf(base, changes, p) {
  return changes.reduce((sums, change) => sums.flatMap(({ value, chance }) => [
    { value, chance: chance * p },
    { value: value + change / (1 - p), chance: chance * (1 - p) },
  ]), [{ value: base, chance: 1 }]);
}

export function addWeight(card, state, { tensor, element, values }) {
  const { base } = values;
  const changes = NAMES.map((name) => values[name] - base);
  const plain = changes.reduce((sum, change) => sum + change, base);
  const rows = NAMES.map((name) => card.querySelector(`[data-model=${name}]`));
  const chances = card.querySelector(".chances");
  const bars = outcomesOf(base, changes, 0).map(() => chances.appendChild(make("i")));
  const panel = card.querySelector(".panel");
  slider(panel, state, "top.p", RATE);
  seedButton(panel, state, "top.seed", NAMES.length);
  card.style.setProperty("--base", place(base));
  card.style.setProperty("--plain", place(plain));

  function follow() {
    const [p, seed] = [state.get("top.p"), state.get("top.seed")];
    let sum = base;
    rows.forEach((row, at) => {
      const isKept = keepMask(tensor, element + 1, p, seed + at)[element] > 0;
      const change = changes[at] / (isKept ? 1 - p : 1);
      const { style } = row.querySelector("i");
      style.left = place(Math.min(sum, sum + change));
      style.right = `calc(100% - ${place(Math.max(sum, sum + change))})`;
      row.classList.toggle("dropped", !isKept);
      row.querySelector("td").textContent = signed(changes[at], 5);
      row.querySelector("td:last-child").textContent = isKept ? signed(change, 5) : "dropped";
      if (isKept) sum += change;
    });
    const outcomes = outcomesOf(base, changes, p);
    const most = Math.max(...outcomes.map(({ chance }) => chance));
    outcomes.forEach(({ value, chance }, at) => {
      bars[at].style.left = place(value);
      bars[at].style.height = `${(85 * chance) / most}%`;
    });
    card.style.setProperty("--sum", place(sum));
    show(card, {
      rate: percent(p, 0),
      base: signed(base, 5),
      sum: signed(sum, 5),
      plain: signed(plain, 5),
      "plain-again": signed(plain, 5),
      factor: decimal(1 / (1 - p), 2),
      noise: noiseInWords(Math.sqrt(p / (1 - p))),
    });
  }

  state.on(Object.keys(defaults), oncePerFrame(follow));
  follow();
}
