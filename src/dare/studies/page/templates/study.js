// Sorts and filters the table of trials, and shows two of them side by side.
"use strict";
(() => {
  const { columns, rows, items } = darePage.read("study-data");
  const table = document.getElementById("trial-table");
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
    darePage.say(`Sorted by ${columns[column].name}, ${order}.`);
  }

  // ---- filtering

  const holds = {
    "=": (a, b) => (typeof a === "number" ? a === Number(b) : String(a).toLowerCase() === b),
    "<": (a, b) => a < Number(b),
    ">": (a, b) => a > Number(b),
    "<=": (a, b) => a <= Number(b),
    ">=": (a, b) => a >= Number(b),
  };

  function condition(word) {
    const [, name, sign, value] = word.match(/^(.+?)(<=|>=|<|>|=)(.+)$/) ?? [];
    const column = columns.findIndex((known) => known.name.toLowerCase() === name);
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
    value === null ? "–" : typeof value === "number" ? String(+value.toPrecision(4)) : value;
  const signed = (value) => (value > 0 ? "+" : "") + shown(value);
  const nameOf = (place) => (typeof rows[place][0] === "number" ? `trial ${rows[place][0]}` : rows[place][0]);

  function comparedValues([a, b]) {
    return columns.slice(1).map((column, place) => {
      const [one, other] = [rows[a][place + 1], rows[b][place + 1]];
      const numbers = typeof one === "number" && typeof other === "number";
      const gap = numbers && one !== other ? signed(one - other) : "";
      return { cells: [column.name, shown(one), shown(other), gap], differs: one !== other };
    });
  }

  function scoreOf(packed, place) {
    if (typeof packed === "string") return packed[place] === "-" ? null : Number(packed[place]);
    return packed[place] ?? null;
  }

  function countItems([a, b]) {
    const groups = new Map();
    let binary = true;
    items.ids.forEach((id, place) => {
      const [one, other] = [scoreOf(items.of[a], place), scoreOf(items.of[b], place)];
      if (one === null || other === null) return;
      binary &&= [0, 1].includes(one) && [0, 1].includes(other);
      const name = id.includes("/") ? id.slice(0, id.indexOf("/")) : "all";
      const group = groups.get(name) ?? { first: [], second: [], both: 0, neither: 0 };
      groups.set(name, group);
      if (one > other) group.first.push(id);
      else if (other > one) group.second.push(id);
      else if (one === 1) group.both += 1;
      else group.neither += 1;
    });
    return { groups, binary };
  }

  function itemTables(pair) {
    if (!pair.every((place) => place in items.of)) return [];
    const { groups, binary } = countItems(pair);
    const [one, other] = pair.map(nameOf);
    const head = binary
      ? ["items", `only ${one} right`, `only ${other} right`, "both right", "both wrong"]
      : ["items", `${one} higher`, `${other} higher`, "equal"];
    const counted = [...groups].map(([name, group]) => {
      const equal = binary ? [group.both, group.neither] : [group.both + group.neither];
      return { cells: [name, group.first.length, group.second.length, ...equal].map(String) };
    });
    if (!counted.length) return [];
    const details = make("details");
    details.append(make("summary", "Items on which they differ"));
    for (const [title, side] of [[head[1], "first"], [head[2], "second"]]) {
      const ids = [...groups.values()].flatMap((group) => group[side]);
      const more = ids.length > 60 ? ` … and ${ids.length - 60} more` : "";
      details.append(make("p", `${title}: ${ids.slice(0, 60).join(", ") || "none"}${more}`));
    }
    return [makeTable("Items", head, counted), details];
  }

  function showPair() {
    for (const line of lines) {
      const place = Number(line.dataset.row);
      const box = line.querySelector("input");
      if (box) box.checked = picked.includes(place);
      line.classList.toggle("chosen", picked.includes(place));
    }
    tables.replaceChildren();
    if (picked.length < 2) {
      const one = picked.map((place) => `${nameOf(place)} is ticked; tick another row.`);
      hint.textContent = one[0] ?? "Tick two rows to compare them.";
      return;
    }
    const [one, other] = picked.map(nameOf);
    const withItems = itemTables(picked);
    hint.textContent = `${one} and ${other}.${withItems.length ? "" : " There are no items to compare."}`;
    const head = ["", one, other, "difference"];
    tables.append(makeTable("Scores and settings", head, comparedValues(picked)), ...withItems);
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
  darePage.drawAll();
})();
