// The view of an analysis: verdict, findings, models, pairs, what dropping costs, advice. The same
// for a file that was dropped on the page and for an analysis that the server made.
//
// Every name in an analysis comes from outside: it is only ever put into the page as text.
import { coded, listOf, paragraph, wideTable } from "./analysis/elements.js";
import * as figures from "./analysis/figures.js";
import {
  amount, bytes, cosine, duration, listed, number, origin, share, shortName, times, told,
} from "./analysis/words.js";
import { make } from "./controls.js";
import { addFigure } from "./figures.js";
import { writeToml } from "./toml.js";
import { percent } from "./words.js";

export { readAnalysis, readFile } from "./analysis/reading.js";

const HEADLINES = {
  "no defect found": "No defects found",
  "needs changes": "Problems to fix before merging",
  "cannot be merged": "Cannot be merged as given",
};
const TONES = {
  "no defect found": "ready", "needs changes": "change", "cannot be merged": "stop",
  strong: "ready", fair: "change", weak: "note",
};
const COUNTED = {
  severe: ["severe problem", "severe problems"],
  warning: ["warning", "warnings"],
  note: ["note", "notes"],
};
const MOST_NAMED = 4;

const card = (title, ...content) =>
  make("div", { className: "card" }, make("h4", {}, title), ...content);

// ---------------------------------------------------------------- what is said

function counted(found) {
  const counts = Object.entries(COUNTED).map(([severity, words]) =>
    [found.filter((finding) => finding.severity === severity).length, words]);
  const parts = counts.filter(([count]) => count).map(([count, words]) => times(count, ...words));
  return parts.length ? listed(parts) : "no problems found";
}

function verdict({ base, models, readiness }) {
  const many = models.length > MOST_NAMED;
  const names = many ? times(models.length, "model") : listed(models.map(({ name }) => name));
  const each = [...readiness.by_model].map(([name, word]) =>
    make("li", { className: TONES[word] }, make("b", {}, name), " ", make("span", {}, word)));
  const list = make("ul", { className: "each" }, ...each);
  list.setAttribute("aria-label", "Verdict on each model");
  return make("div", { className: `verdict ${TONES[readiness.verdict]}` },
    make("h3", { tabIndex: -1 }, HEADLINES[readiness.verdict]),
    paragraph("lead", "Merging ", make("b", {}, names), " into ", make("b", {}, shortName(base)),
      `: ${counted(readiness.findings)}.`),
    list);
}

function tiles({ base_dtypes: types, models, pairs, together, advice }) {
  const change = figures.changeOf;
  const largest = models.reduce((most, model) => (change(model) > change(most) ? model : most));
  const shown = [
    ["Parameters", amount(largest.total.elements), `${[...types.keys()].join(", ")} base`],
    ["Largest change", share(change(largest)), `${largest.name}, relative to the base`],
  ];
  const normal = `${percent(figures.chanceCancelled(models), 0)} if the models are independent`;
  if (pairs.length) shown.push(["Cancel in a sum", percent(together.cancelled, 0), normal]);
  const method = advice.suggestions.find(({ setting }) => setting === "method");
  if (method) shown.push(["Advised method", String(method.value), `evidence: ${method.evidence}`]);
  const tile = ([label, value, remark]) =>
    make("div", {}, make("dt", {}, label), make("dd", {}, value), make("dd", {}, remark));
  return make("dl", { className: "tiles", dataset: { count: shown.length } }, ...shown.map(tile));
}

function finding({ code, severity, subjects, text, remedy, figures: numbers }) {
  const measured = [...numbers].map(([name, value]) => `${name} ${number(value)}`).join(", ");
  const whose = subjects.length ? [make("b", {}, listed(subjects)), " "] : [];
  const badge = make("span", { className: "badge" }, severity[0].toUpperCase() + severity.slice(1));
  return make("li", { className: severity },
    make("div", { className: "head" }, badge, make("h4", {}, ...whose, ...coded(`${text}.`))),
    ...(remedy ? [paragraph("", make("b", {}, "What to do:"), " ", ...coded(`${remedy}.`))] : []),
    make("details", {}, make("summary", {}, "Code and numbers"),
      paragraph("figures", [code, measured].filter(Boolean).join(" · "))));
}

const findings = ({ readiness }) => readiness.findings.length
  ? make("ul", { className: "findings" }, ...readiness.findings.map(finding))
  : paragraph("lead", "No problems found in these models.");

function models(analysis) {
  const columns = [
    "model", "change", "mean |δ|", "99% below", "largest |δ|", "not changed", "origin",
  ];
  const row = ({ total, ...model }) => [
    model.name,
    share(figures.changeOf({ total, ...model })),
    number(total.mean_magnitude),
    number(total.quantiles.p99),
    number(total.largest),
    share(total.elements ? total.zeros / total.elements : 0),
    origin(model),
  ];
  return card("The models", wideTable("Models", columns, analysis.models.map(row)),
    paragraph("hint", "Change is ‖δ‖ / ‖base‖ of the layers; δ is the model's weights minus the base's."));
}

function pairs(analysis) {
  const columns = ["models", "cosine", "in opposite directions", "elements both change"];
  const rows = analysis.pairs.map(({ first, second, total }) => [
    `${first} · ${second}`,
    cosine(total.cosine),
    share(total.both ? 1 - total.agreeing : 0),
    amount(total.both),
  ]);
  return card("How the models compare", wideTable("Pairs", columns, rows), paragraph("hint",
    "Near a cosine of 0 the changes are independent. Above 0 the models share part of their ",
    "change; below 0 their changes are partly opposite. By chance, half of the elements that both ",
    "change go in opposite directions."));
}

function suggestion({ setting, value, model, reason, source, evidence }) {
  const whose = model === null ? "" : ` for ${model}`;
  return make("li", { className: TONES[evidence] },
    make("div", { className: "head" },
      make("h4", {}, make("code", {}, `${setting} = ${value}`), whose),
      make("span", { className: "badge" }, `${evidence} evidence`)),
    paragraph("", ...coded(`${reason}.`)), paragraph("figures", source));
}

const advice = ({ advice: { suggestions, doubts } }) => [
  make("h3", {}, "Why these settings"),
  make("ul", { className: "advice" }, ...suggestions.map(suggestion)),
  ...(doubts.length ? [card("Caveats", listOf("plain", doubts.map(told)))] : []),
];

/** The advice as a recipe to copy, or to take over with `onTake`. */
function recipe({ advice: { recipe: advised } }, onTake) {
  if (!Object.keys(advised).length) {
    return paragraph("lead", "None of these models should be merged, so there is no recipe.");
  }
  const code = make("code", { id: "analysis-recipe" }, writeToml(advised));
  const copy = make("button", { type: "button", dataset: { copies: code.id } }, "Copy");
  const tools = make("div", { className: "tools" }, copy);
  if (onTake) {
    const take = make("button", { type: "button", className: "take" }, "Use this recipe");
    take.addEventListener("click", () => onTake(advised));
    tools.prepend(take);
  }
  return card("The recipe", make("pre", { tabIndex: 0 }, code), tools);
}

function remarks({ notes, left_out: leftOut, bytes_read: read, seconds }) {
  const folded = (title, items) => make("details", {},
    make("summary", {}, `${title} (${items.length})`), listOf("plain", items));
  return make("div", {},
    paragraph("hint", `${bytes(read)} read in ${duration(seconds)}.`),
    ...(notes.length ? [folded("How inputs were adjusted", notes.map(told))] : []),
    ...(leftOut.length ? [folded("Left out", leftOut.map(misfit))] : []));
}

const stored = ({ shape, dtype }) => `${shape.join("×") || "a scalar"} ${dtype}`;

/** A tensor that could not be compared, and the reason. */
function misfit({ tensor, reason, models, base, found }) {
  if (reason === "not in base") return `${tensor}: in ${models.join(", ")}, not in the base`;
  if (reason === "not weights") return `${tensor}: ${base?.dtype} cannot hold weights`;
  return `${tensor}: base is ${base && stored(base)}, ${models} is ${found && stored(found)}`;
}

// ---------------------------------------------------------------- what is drawn

function chartCard(name, title, caption, height, ...controls) {
  const chart = make("div", { className: "chart", id: `chart-${name}` });
  chart.style.minHeight = `${height}px`;
  const figcaption = make("figcaption", {}, make("h4", {}, title), make("p", {}, caption));
  return make("figure", { className: "card" }, figcaption, ...controls, chart);
}

function drawings() {
  const picker = make("select", { id: "analysis-model" });
  const labelled = make("div", { className: "control choice" },
    make("label", { htmlFor: picker.id }, "Model"), picker);
  const error = chartCard("analysis-error", "What a drop rate costs",
    "The predicted error that DARE adds to a layer's outputs. It shows which model tolerates " +
      "more dropping; what an error does to answers differs from model to model.", 380);
  const change = chartCard("analysis-change", "Where a model changed",
    "The size of the change relative to the base's weights, by layer and kind of tensor. “out” " +
      "stands for tensors outside the layers.", 320, labelled);
  const numbers = make("details", {}, make("summary", {}, "Numbers"));
  error.append(numbers);
  const place = make("div", { className: "pair" }, error, change);
  const drawn = new Map();

  /** Draw a figure, or give the one that is drawn other rows; without any it is hidden. */
  function draw(name, figure, spec, description, datasets) {
    figure.hidden = !Object.values(datasets)[0].length;
    if (figure.hidden) return;
    if (drawn.has(name)) drawn.get(name).update(datasets);
    else drawn.set(name, addFigure(name, { ...spec, datasets }, description));
  }

  function showErrors(analysis) {
    draw("analysis-error", error, figures.ERROR,
      "Line chart of the error over drop rates, one line for each model. The numbers follow.",
      { rows: figures.errorRows(analysis) });
    const names = analysis.models.map(({ name }) => name);
    const byRate = new Map();
    for (const { drop_rate: rate, model, bounded_error: cost } of analysis.predictions) {
      byRate.set(rate, (byRate.get(rate) ?? new Map()).set(model, cost));
    }
    const rows = [...byRate].map(([rate, costs]) =>
      [String(rate), ...names.map((name) => share(costs.get(name) ?? NaN))]);
    const table = wideTable("Error by drop rate", ["drop rate", ...names], rows);
    numbers.replaceChildren(numbers.firstElementChild, table);
  }

  function showChanges(analysis) {
    const showModel = () => draw("analysis-change", change, figures.CHANGE,
      "Heat map of the relative change of one model, layers by kinds of tensor.",
      { cells: figures.changeRows(analysis.models[picker.value]) });
    picker.replaceChildren(...analysis.models.map(({ name }, value) =>
      make("option", { value }, name)));
    picker.onchange = showModel;
    showModel();
  }

  function show(analysis) {
    showErrors(analysis);
    showChanges(analysis);
  }

  return { place, show };
}

// ---------------------------------------------------------------- the view

/**
 * A view in a place that is hidden until there is something to show. There is one in a page, as the
 * figures have names. `onTake` gets the tables of the advised recipe, if the reader wants it.
 */
export function openAnalysisView(place, { onTake } = {}) {
  const top = make("div", { className: "analysis-part" });
  const bottom = make("div", { className: "analysis-part" });
  const drawing = drawings();
  place.classList.add("analysis");
  place.hidden = true;
  place.append(top, drawing.place, bottom);

  return {
    /** Show what `readAnalysis` read. */
    show(analysis) {
      place.hidden = false;
      top.replaceChildren(
        verdict(analysis), recipe(analysis, onTake), tiles(analysis), findings(analysis),
        models(analysis),
        ...(analysis.pairs.length ? [pairs(analysis)] : []),
      );
      drawing.show(analysis);
      bottom.replaceChildren(...advice(analysis), remarks(analysis));
    },
    /** Bring the verdict into sight and the keyboard to it. */
    focus: () => top.querySelector("h3").focus(),
    clear: () => { place.hidden = true; },
  };
}
