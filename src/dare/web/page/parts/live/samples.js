// What the merged model writes: fixed prompts with their right answers, and the reader's own.
import { make } from "../../controls.js";
import { isAbort } from "./loading.js";

const EACH = 2;
const ENGLISH = "And God said unto ";
const LONGEST = 60;

/** The samples' rows; `tasks` are those of prompts.json. */
export function samplesTable(place, tasks) {
  const card = place.closest(".card");
  const asked = tasks.flatMap(({ name, examples }) =>
    examples.slice(0, EACH).map(([prompt, answer]) => ({ task: name, prompt, answer })));
  asked.push({ task: "english", prompt: ENGLISH, answer: null });
  const cells = asked.map(({ task, prompt }) => {
    const cell = make("td", { className: "written" }, "…");
    const head = make("th", { scope: "row" }, make("code", {}, prompt));
    place.append(make("tr", { className: task }, head, cell));
    return cell;
  });
  return {
    prompts: asked.map(({ prompt }) => prompt),
    show(texts) {
      texts.forEach((text, index) => showAnswer(cells[index], text, asked[index].answer));
      delete card.dataset.stale;
    },
    dim() { card.dataset.stale = "true"; },
  };
}

/** Put what was written into a cell, and whether it is right; with answer null it is neither. */
export function showAnswer(cell, text, answer) {
  const code = make("code", {}, text === "" ? "(nothing)" : printable(text));
  if (answer === null) return cell.replaceChildren(code);
  const isRight = text === answer;
  const mark = make("span", { className: isRight ? "right" : "wrong" }, isRight ? "✓" : "✗");
  mark.setAttribute("role", "img");
  mark.setAttribute("aria-label", isRight ? "right" : "wrong");
  const remark = isRight ? [] : [make("span", { className: "answer" }, `right: ${answer}`)];
  cell.replaceChildren(mark, " ", code, ...remark);
}

/** Bytes that have no picture as dots. */
const printable = (text) => text.replace(/[\u0000-\u001f\u007f-\u00a0\u00ad]/g, "·");

/** The field for the reader's own prompt; `write(prompt, signal)` gives texts, or null: not now. */
export function ownPrompt(place, state, write) {
  const field = place.querySelector("input");
  const answer = place.querySelector("[data-place=answer]");
  let controller = null;

  async function ask() {
    controller?.abort();
    controller = new AbortController();
    const { signal } = controller;
    const prompt = state.get("live.ask");
    const why = whyNotAsk(prompt);
    if (why || !prompt) return answer.replaceChildren(why ?? "");
    try {
      const texts = await write(prompt, signal);
      if (texts) showAnswer(answer, texts[0], null);
    } catch (error) {
      if (!isAbort(error)) answer.replaceChildren(error.message);
    }
  }

  const follow = () => {
    const prompt = state.get("live.ask");
    if (field.value !== prompt) field.value = prompt;
  };
  field.addEventListener("input", () => state.set({ "live.ask": field.value }));
  state.on(["live.ask"], () => {
    follow();
    ask();
  });
  follow();
  return { ask };
}

/** Why a prompt cannot be asked, or null. */
export function whyNotAsk(prompt) {
  if (prompt.length > LONGEST) return `A prompt has at most ${LONGEST} characters here.`;
  if ([...prompt].some((letter) => letter.charCodeAt(0) > 255)) {
    return "These models read bytes: letters up to ÿ.";
  }
  return null;
}
