// Brings out the model that is picked; sorts, filters and compares the rows of a large table.
"use strict";
if (document.getElementById("sortable")) (() => {
  const { columns, rows } = darePage.read("sortable-data");
  const table = document.getElementById("sortable");
  const body = table.tBodies[0];
  const lines = [...body.rows];
  const texts = lines.map((line) => line.textContent.toLowerCase());
  const filter = document.getElementById("filter");
  const matches = document.getElementById("matches");
  const hint = document.getElementById("comparison-hint");
  const tables = document.getElementById("comparison-tables");
  let picked = [];  // numbers of rows, the one picked first in front

  // ---- sorting

  function compareValues(a, b) {
    if (typeof a === typeof b) return typeof a === "number" ? a - b : a.localeCompare(b);
    return typeof a === "number" ? -1 : 1;
  }

  function sortBy(column) {
    const head = table.tHead.rows[0].cells[column + 1];
    const descending = head.getAttribute("aria-sort") !== "descending";
    for (const cell of [...table.tHead.rows[0].cells].slice(1)) {
      cell.setAttribute("aria-sort", "none");
    }
    head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const value = (line) => rows[line.dataset.row][column];
    const sorted = [...lines].sort((one, other) => {
      const [a, b] = [value(one), value(other)];
      if (a === null || b === null) return (a === null) - (b === null);  // the unknown always last
      return descending ? compareValues(b, a) : compareValues(a, b);
    });
    body.append(...sorted);
    const order = descending ? "descending" : "ascending";
    darePage.say(`Sorted by ${columns[column]}, ${order}.`);
  }

  // ---- filtering

  const oneWord = (text) => String(text).toLowerCase().replace(/\s+/g, "_");
  const equals = (a, b) => (typeof a === "number" ? a === Number(b) : oneWord(a) === b);
  const holds = {
    "=": (a, b) => b.split("|").some((each) => equals(a, each)),
    "<": (a, b) => a < Number(b),
    ">": (a, b) => a > Number(b),
    "<=": (a, b) => a <= Number(b),
    ">=": (a, b) => a >= Number(b),
  };

  function condition(word) {
    const [, name, sign, value] = word.match(/^(.+?)(<=|>=|<|>|=)(.+)$/) ?? [];
    const column = columns.findIndex((known) => oneWord(known) === name);
    if (column < 0) return (place) => texts[place].includes(word);
    return (place) => rows[place][column] !== null && holds[sign](rows[place][column], value);
  }

  function applyFilter() {
    const conditions = filter.value.toLowerCase().split(/\s+/).filter(Boolean).map(condition);
    let count = 0;
    lines.forEach((line, place) => {
      line.hidden = !conditions.every((test) => test(place));
      count += !line.hidden;
    });
    matches.textContent = `${count} of ${lines.length} rows`;
  }

  // ---- two side by side

  const make = (tag, text = "", settings = {}) =>
    Object.assign(document.createElement(tag), { textContent: text, ...settings });

  function makeTable(label, head, bodyRows) {
    const made = make("table");
    made.append(make("caption", label));
    const top = made.createTHead().insertRow();
    for (const text of head) top.append(make("th", text, { scope: "col" }));
    const part = made.createTBody();
    for (const { cells, differs } of bodyRows) {
      const row = part.insertRow();
      row.classList.toggle("differs", Boolean(differs));
      cells.forEach((text, place) => {
        row.append(place ? make("td", text) : make("th", text, { scope: "row" }));
      });
    }
    const scroll = make("div", "", { className: "scroll tall", tabIndex: 0 });
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", label);
    scroll.append(made);
    return scroll;
  }

  const shown = (value) =>
    value === null ? "–" : String(typeof value === "number" && value % 1 ? +value.toPrecision(4) : value);
  const signed = (value) => (value > 0 ? "+" : "") + shown(value);
  const nameOf = (place) => (typeof rows[place][0] === "number" ? `${columns[0]} ${rows[place][0]}` : rows[place][0]);

  function comparedValues([a, b]) {
    return columns.slice(1).map((column, place) => {
      const [one, other] = [rows[a][place + 1], rows[b][place + 1]];
      const numbers = typeof one === "number" && typeof other === "number";
      const gap = numbers && one !== other ? signed(one - other) : "";
      return { cells: [column, shown(one), shown(other), gap], differs: one !== other };
    });
  }

  function showPair() {
    for (const line of lines) {
      const place = Number(line.dataset.row);
      const box = line.querySelector("input");
      if (box) box.checked = picked.includes(place);
      line.classList.toggle("chosen", picked.includes(place));
    }
    tables.replaceChildren();
    tables.parentElement.hidden = !picked.length;
    if (picked.length < 2) {
      hint.textContent = picked.map((place) => `${nameOf(place)} is ticked; tick another row.`).join();
      return;
    }
    const [one, other] = picked.map(nameOf);
    hint.textContent = `${one} and ${other}.`;
    const head = ["", one, other, "difference"];
    tables.append(makeTable("Scores and settings", head, comparedValues(picked)));
  }

  table.addEventListener("click", (event) => {
    const column = event.target.closest("button")?.dataset.column;
    if (column !== undefined) sortBy(Number(column));
  });
  body.addEventListener("change", (event) => {
    const place = Number(event.target.closest("tr").dataset.row);
    picked = picked.filter((other) => other !== place);
    if (event.target.checked) picked = [...picked.slice(-1), place];
    showPair();
  });
  filter.addEventListener("input", applyFilter);
  showPair();
  applyFilter();
})();

// By keyboard, arrows go from mark to mark of a figure and show the details of each.
function pointAt(mark) {
  document.getElementById("vg-tooltip-element")?.classList.remove("visible");
  const { left, top, width, height } = mark.getBoundingClientRect();
  const place = { clientX: left + width / 2, clientY: top + height / 2, bubbles: true };
  for (const kind of ["pointermove", "mousemove"]) mark.dispatchEvent(new PointerEvent(kind, place));
  return document.querySelector("#vg-tooltip-element.visible")?.innerText;
}

document.addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step || !event.target.matches(".chart")) return;
  event.preventDefault();
  const marks = [...event.target.querySelectorAll("path, line, text")];
  if (step < 0) marks.reverse();
  const from = marks.findIndex((mark) => mark.matches(".pointed")) + 1;
  marks[from - 1]?.classList.remove("pointed");
  const mark = [...marks.slice(from), ...marks.slice(0, from)].find(pointAt);  // axes have no details
  mark?.classList.add("pointed");
  mark?.scrollIntoView({ behavior: "instant", block: "nearest" });
  darePage.say((mark && pointAt(mark)) ?? "");
});
document.addEventListener("focusout", ({ target }) => {
  for (const kind of ["pointerout", "mouseout"]) {
    target.querySelector?.(".pointed")?.dispatchEvent(new PointerEvent(kind, { bubbles: true }));
  }
});

(() => {
  const picker = document.getElementById("model");

  async function pick() {
    for (const element of document.querySelectorAll("[data-models]")) {
      const names = JSON.parse(element.dataset.models);
      element.hidden = Boolean(picker.value) && !names.includes(picker.value);
    }
    for (const row of document.querySelectorAll("tr[data-model]")) {
      row.classList.toggle("chosen", row.dataset.model === picker.value);
    }
    await darePage.setSignal("model", picker.value);
    darePage.say(
      picker.value ? `The figures show ${picker.value}.` : "The figures show all models.",
    );
  }

  picker?.addEventListener("change", pick);
  darePage.drawAll().then(() => picker && pick());
})();
