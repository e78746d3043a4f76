// Runs that the reader keeps, to compare them. They are in the state, so that a link has them.
import { button, make } from "../../controls.js";
import { settingInWords } from "../../recipe.js";
import { isAbort } from "./loading.js";
import { FULL, inPercent } from "./measuring.js";
import { bits, percent } from "./numbers.js";
import { defaults, MODELS, NAMES, settingOf } from "./setting.js";

const MOST = 8;

/** The pins of a text such as "m-dare+ties p-0.7*m-sum": all that is not at its default. */
export const readPins = (text) => (text ? text.split("*").map(readPin) : []);

function readPin(text) {
  const pin = {};
  for (const field of text.split(" ")) {
    const cut = field.indexOf("-");
    const name = `live.${field.slice(0, cut)}`;
    if (cut > 0 && name in defaults) pin[name] = typed(field.slice(cut + 1), defaults[name]);
  }
  return pin;
}

const typed = (text, like) =>
  typeof like === "number" ? Number(text) || 0 : typeof like === "boolean" ? text === "true" : text;

/** A pin of the state of now. */
export function pinOf(get) {
  const changed = NAMES.filter((name) => get(name) !== defaults[name]);
  return changed.map((name) => `${name.slice(5)}-${get(name)}`).join(" ") || "p-0.5";
}

/** The table of pins; scores that are not known yet are measured one after the other. */
export function pinsTable(card, state, methods, measurer, engine) {
  const body = card.querySelector("tbody");
  const empty = card.querySelector("[data-place=empty]");
  const table = card.querySelector(".scroll");
  let measuring = null;

  const texts = () => (state.get("live.pins") ? state.get("live.pins").split("*") : []);
  const settingOfPin = (pin) => settingOf((name) => pin[name] ?? defaults[name], methods);

  function show() {
    const pins = readPins(state.get("live.pins"));
    body.replaceChildren(...pins.map((pin, index) => row(pin, index)));
    empty.hidden = pins.length > 0;
    table.hidden = !pins.length;
    measure(pins);
  }

  function row(pin, index) {
    const setting = settingOfPin(pin);
    const words = settingInWords(setting);
    const tools = make("div", { className: "pin-tools" });
    const load = button(tools, "Load", () => state.set({ ...defaults, ...pin }));
    const remove = button(tools, "Remove", () =>
      state.set({ "live.pins": texts().toSpliced(index, 1).join("*") }));
    load.setAttribute("aria-label", `Load ${words}`);
    remove.setAttribute("aria-label", `Remove ${words}`);
    const cells = ["add", "sort", "say", "mean", "english"].map(() => make("td", {}, "…"));
    cells.push(make("td", {}, make("code", {}, "…")), make("td", {}, tools));
    return make("tr", {}, make("th", { scope: "row" }, words), ...cells);
  }

  async function measure(pins) {
    measuring?.abort();
    const { signal } = (measuring = new AbortController());
    for (const [index, pin] of pins.entries()) {
      const line = body.rows[index];
      const setting = settingOfPin(pin);
      try {
        const why = engine.whyNot(setting.method);
        if (why) throw new Error(why);
        showScore(line, await measurer.score(setting, FULL, signal));
        const digest = await measurer.merge(setting, signal);
        line.querySelector("code").textContent = digest.slice(0, 8);
        line.querySelector("code").title = digest;
      } catch (error) {
        if (isAbort(error)) return;
        line.cells[1].textContent = "–";
        line.cells[0].append(make("p", { className: "hint" }, error.message));
      }
    }
  }

  state.on(["live.pins"], show);
  return {
    show,
    /** Pin the setting of now, once. */
    add() {
      const pin = pinOf(state.get);
      if (texts().includes(pin)) return "This run is pinned already.";
      if (texts().length >= MOST) return `There is room for ${MOST} pins: remove one first.`;
      state.set({ "live.pins": [...texts(), pin].join("*") });
      return "Pinned.";
    },
  };
}

function showScore(line, score) {
  const { tasks, mean, bitsPerByte } = inPercent(score);
  [...MODELS.map((task) => tasks[task]), mean].forEach((value, index) => {
    line.cells[1 + index].textContent = percent(value);
  });
  line.cells[5].textContent = bits(bitsPerByte);
}
