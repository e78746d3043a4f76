// Elements that the view of an analysis and its neighbours are made of; all content is text.
import { make } from "../controls.js";

/** A paragraph, of a class if one is given. */
export const paragraph = (className, ...content) => make("p", { className }, ...content);

/** A text whose commands, in backticks, are code, and whose flags stay on one line. */
export const coded = (text) => text.split("`").flatMap((part, place) => {
  const pieces = part.split(/((?<![\w-])--[\w-]+)/)
    .map((piece, n) => (n % 2 ? make("span", { className: "flag" }, piece) : piece));
  return place % 2 ? make("code", {}, ...pieces) : pieces;
});

/** A list of texts. */
export const listOf = (className, items) =>
  make("ul", { className }, ...items.map((item) => make("li", {}, ...coded(item))));

/** A table; the first cell of a row is its heading. It has its roles where rows become cards too. */
export function tableOf(columns, rows, className = "") {
  const cellOf = (cell, n) => make("td", { role: "cell", dataset: { column: columns[n + 1] } }, cell);
  const row = ([first, ...others]) => make("tr", { role: "row" },
    make("th", { scope: "row", role: "rowheader" }, first), ...others.map(cellOf));
  const head = columns.map((column) => make("th", { scope: "col", role: "columnheader" }, column));
  return make("table", { className, role: "table" },
    make("thead", { role: "rowgroup" }, make("tr", { role: "row" }, ...head)),
    make("tbody", { role: "rowgroup" }, ...rows.map(row)));
}

/** A table that scrolls in a frame of its own, which the keyboard reaches. */
export function wideTable(label, columns, rows) {
  const frame = make("div", { className: "scroll tall", tabIndex: 0 }, tableOf(columns, rows, "compact"));
  frame.setAttribute("role", "region");
  frame.setAttribute("aria-label", label);
  return frame;
}

/** Show a text in a place that is hidden without one. */
export function tellIn(place, text) {
  place.hidden = !text;
  place.textContent = text;
}
