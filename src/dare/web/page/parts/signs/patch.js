// Twelve by twelve elements so large that every model's part in each of them can be seen.
import { make } from "../../controls.js";
import { pageColour, themeColours } from "../../pictures.js";
import { signed } from "../../words.js";

export const PATCH = 12;
const FAINT = 0.25;

/** In each cell a bar for each model, up or down; those that the vote silences are faint. */
export function drawPatch(canvas, { terms, sign }, row, column, columns, limit) {
  const side = Math.round(canvas.clientWidth * devicePixelRatio);
  if (!side) return;
  if (canvas.width !== side) canvas.width = canvas.height = side;
  const context = canvas.getContext("2d");
  const cell = side / PATCH;
  const colours = themeColours("category");
  context.clearRect(0, 0, side, side);
  drawGrid(context, cell);
  for (let down = 0; down < PATCH; down += 1) {
    for (let right = 0; right < PATCH; right += 1) {
      const at = (row + down) * columns + column + right;
      const values = terms.map((term) => term[at]);
      drawCell(context, right * cell, down * cell, cell, values, sign[at], colours, limit);
    }
  }
  context.globalAlpha = 1;
}

function drawGrid(context, cell) {
  context.fillStyle = pageColour("line");
  for (let line = 1; line < PATCH; line += 1) {
    context.fillRect(Math.round(line * cell), 0, 1, PATCH * cell);
    context.fillRect(0, Math.round(line * cell), PATCH * cell, 1);
  }
}

function drawCell(context, left, top, cell, values, sign, colours, limit) {
  const wide = (cell * 0.7) / values.length;
  values.forEach((value, at) => {
    const high = Math.min(1, Math.abs(value) / limit) * 0.44 * cell;
    const from = top + cell / 2 - (value > 0 ? high : 0);
    context.globalAlpha = value * sign > 0 ? 1 : FAINT;
    context.fillStyle = colours[at];
    context.fillRect(left + 0.15 * cell + at * wide, from, wide * 0.85, high);
  });
}

function fateOf(delta, value, sign) {
  if (value === 0) return delta === 0 ? "no change" : `left out (${signed(delta, 5)})`;
  return value * sign > 0 ? "counts" : "silenced";
}

/** One vote written out: who votes how, which sign wins, and the mean of those who have it. */
export function writeVote(place, names, deltas, { terms, sign, merged }, at, where) {
  const values = terms.map((term) => term[at]);
  const winners = names.filter((_, model) => values[model] * sign[at] > 0);
  const rows = names.map((name, model) => {
    const value = values[model];
    const fate = fateOf(deltas[model][at], value, sign[at]);
    return make("tr", { className: fate === "silenced" ? "silenced" : "" },
      make("th", { scope: "row" }, make("i", { className: "swatch", dataset: { model: name } }), name),
      make("td", {}, signed(value, 5)),
      make("td", {}, fate),
    );
  });
  const total = values.reduce((sum, value) => sum + value, 0);
  const outcome = winners.length
    ? `The sum is ${signed(total, 5)}, so ${sign[at] > 0 ? "+" : "−"} wins. `
      + `The mean of ${winners.join(" and ")} is ${signed(merged[at], 5)}.`
    : "No model changes this element: it stays as in the base.";
  place.replaceChildren(
    make("p", { className: "where" }, where),
    make("table", {}, make("tbody", {}, ...rows)),
    make("p", {}, outcome),
  );
}
