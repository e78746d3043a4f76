// Elements that the view of an analysis and its neighbours are made of; all content is text.
import { make } from "../controls.js";

/** A paragraph, of a class if one is given. */
export const paragraph = (className, ...content) => make("p", { className }, ...content);

/** A list of texts. */
export const listOf = (className, items) =>
  make("ul", { className }, ...items.map((item) => make("li", {}, item)));

/** A table; the first cell of a row is its heading. */
export function tableOf(columns, rows, className = "") {
  const row = ([first, ...others]) => make("tr", {},
    make("th", { scope: "row" }, first),
    ...others.map((cell) => make("td", {}, cell)));
  const head = columns.map((column) => make("th", { scope: "col" }, column));
  return make("table", { className },
    make("thead", {}, make("tr", {}, ...head)),
    make("tbody", {}, ...rows.map(row)));
}

/** A table that scrolls in a frame of its own, which the keyboard reaches. */
export function wideTable(label, columns, rows) {
  const table = tableOf(columns, rows, "compact");
  const frame = make("div", { className: "scroll tall", tabIndex: 0 }, table);
  frame.setAttribute("role", "region");
  frame.setAttribute("aria-label", label);
  return frame;
}

/** Show a text in a place that is hidden without one. */
export function tellIn(place, text) {
  place.hidden = !text;
  place.textContent = text;
}
