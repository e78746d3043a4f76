// What merged models write: fixed prompts with their right answers, and the reader's own.
import { make } from "../../controls.js";
import { isAbort } from "../../loading.js";

const ENGLISH = "And God said unto ";

/**
 * Rows of `each` prompts of every task and a line of English, with a cell for each of `columns`
 * models; `tasks` are those of prompts.json.
 */
export function samplesTable(place, tasks, each, columns = 1) {
  const card = place.closest(".card");
  const asked = tasks.flatMap(({ name, examples }) =>
    examples.slice(0, each).map(([prompt, answer]) => ({ task: name, prompt, answer })));
  asked.push({ task: "english", prompt: ENGLISH, answer: null });
  const rows = asked.map(({ task, prompt }) => {
    const cells = Array.from({ length: columns }, () => make("td", { className: "written" }, "…"));
    const head = make("th", { scope: "row" }, make("code", {}, prompt));
    place.append(make("tr", { className: task }, head, ...cells));
    return cells;
  });
  return {
    prompts: asked.map(({ prompt }) => prompt),
    /** The texts of each model; null for one that is not asked. */
    show(...written) {
      rows.forEach((cells, index) => cells.forEach((cell, column) => {
        if (written[column]) showAnswer(cell, written[column][index], asked[index].answer);
        else cell.textContent = "–";
      }));
      delete card.dataset.stale;
    },
    dim() { card.dataset.stale = "true"; },
  };
}

/** Put what was written into a cell, and whether it is right; with answer null it is neither. */
function showAnswer(cell, text, answer) {
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

/** The field for the reader's own prompt; `write(prompt, show, signal)` shows texts. */
export function ownPrompt(place, state, write) {
  const field = place.querySelector("input");
  const answer = place.querySelector("[data-place=answer]");
  let controller = null;

  async function ask() {
    controller?.abort();
    controller = new AbortController();
    const { signal } = controller;
    const prompt = state.get("live.ask");
    if (!prompt) return answer.replaceChildren();
    try {
      await write(prompt, ([text]) => showAnswer(answer, text, null), signal);
    } catch (error) {
      if (!isAbort(error)) answer.replaceChildren(error.message);
    }
  }

  const follow = () => {
    if (field.value !== state.get("live.ask")) field.value = state.get("live.ask");
  };
  field.addEventListener("input", () => state.set({ "live.ask": field.value }));
  state.on(["live.ask"], () => {
    follow();
    ask();
  });
  follow();
  return { ask };
}
