// The view of an analysis: verdict, findings, models, pairs, what dropping costs, advice. The same
// for a file that was dropped on the page and for an analysis that the server made.
//
// Every name in an analysis comes from outside: it is only ever put into the page as text.
import * as figures from "./analysis/figures.js";
import { writeToml } from "./analysis/toml.js";
import {
  amount, bytes, cosine, duration, listed, number, origin, share, shortName, times,
} from "./analysis/words.js";
import { make } from "./controls.js";
import { addFigure } from "./figures.js";

export { readAnalysis, readFile } from "./analysis/reading.js";

const HEADLINES = {
  ready: "Ready to merge",
  "ready with changes": "Ready with changes",
  "not ready": "Not ready to merge",
};
const TONES = {
  ready: "ready", "ready with changes": "change", "not ready": "stop",
  strong: "ready", fair: "change", weak: "note",
};
const COUNTED = {
  stop: ["reason to stop", "reasons to stop"],
  change: ["change to make", "changes to make"],
  note: ["note", "notes"],
};
const OUTPUT = "merged.safetensors";
const MOST_NAMED = 4;

const titled = (title, ...content) => make("div", { className: "card" }, make("h4", {}, title), ...content);

/** A table that scrolls in its own frame; the first cell of a row is its heading. */
function tableOf(label, columns, rows) {
  const cells = (row, [first, ...others] = row) => [
    make("th", { scope: "row" }, first),
    ...others.map((cell) => make("td", {}, cell)),
  ];
  const head = make("tr", {}, ...columns.map((column) => make("th", { scope: "col" }, column)));
  const body = rows.map((row) => make("tr", {}, ...cells(row)));
  const whole = make("table", { className: "compact" }, make("thead", {}, head), make("tbody", {}, ...body));
  const frame = make("div", { className: "scroll tall", tabIndex: 0, role: "region" }, whole);
  frame.setAttribute("aria-label", label);
  return frame;
}

// ---------------------------------------------------------------- what is said

function verdict({ base, models, readiness }) {
  const counts = Object.entries(COUNTED)
    .map(([severity, words]) => [readiness.findings.filter((f) => f.severity === severity).length, words])
    .filter(([count]) => count)
    .map(([count, words]) => times(count, ...words));
  const names = models.length > MOST_NAMED ? times(models.length, "model") : listed(models.map((m) => m.name));
  const each = [...readiness.by_model].map(([name, word]) =>
    make("li", { className: TONES[word] }, make("b", {}, name), " ", make("span", {}, word)));
  const list = make("ul", { className: "each" }, ...each);
  list.setAttribute("aria-label", "Verdict on each model");
  return make("div", { className: `verdict ${TONES[readiness.verdict]}` },
    make("h3", { tabIndex: -1 }, HEADLINES[readiness.verdict]),
    make("p", { className: "lead" }, make("b", {}, names), " onto ", make("b", {}, shortName(base)),
      `: ${counts.length ? listed(counts) : "nothing was found that speaks against it"}.`),
    list);
}

function tiles(analysis) {
  const { models, pairs, together, advice } = analysis;
  const change = (model) => figures.relativeNorm(model.total);
  const largest = models.reduce((most, model) => (change(model) > change(most) ? model : most));
  const types = [...analysis.base_dtypes.keys()].join(", ");
  const shown = [
    ["Parameters", amount(largest.total.elements), `${types} base`],
    ["Largest change", share(change(largest)), `${largest.name}, beside the base`],
  ];
  if (pairs.length) shown.push(["Cancelled", share(together.cancelled), "if all were added up as they are"]);
  const method = advice.suggestions.find(({ setting }) => setting === "method");
  if (method) shown.push(["Advised method", String(method.value), `evidence: ${method.evidence}`]);
  return make("dl", { className: "tiles", dataset: { count: shown.length } }, ...shown.map(
    ([label, value, remark]) =>
      make("div", {}, make("dt", {}, label), make("dd", {}, value), make("dd", {}, remark))));
}

function finding({ rule, severity, models, seen, matters, remedy, figures: numbers }) {
  const measured = [...numbers].map(([name, value]) => `${name} ${number(value)}`).join(", ");
  const title = make("h4", {}, ...(models.length ? [make("b", {}, listed(models)), " "] : []), seen);
  const badge = make("span", { className: "badge" }, severity[0].toUpperCase() + severity.slice(1));
  return make("li", { className: severity },
    make("div", { className: "head" }, badge, title),
    make("p", { className: "matters" }, matters),
    make("p", {}, make("b", {}, "What to do:"), " ", remedy),
    make("p", { className: "figures" }, [rule, measured].filter(Boolean).join(" · ")));
}

const findings = ({ readiness }) => readiness.findings.length
  ? make("ul", { className: "findings" }, ...readiness.findings.map(finding))
  : make("p", { className: "lead" }, "Nothing was found that speaks against merging these models.");

const models = (analysis) => titled("The models",
  tableOf("Models", ["model", "change", "mean |δ|", "99% below", "largest |δ|", "not changed", "origin"],
    analysis.models.map((model) => [
      model.name,
      share(figures.relativeNorm(model.total)),
      number(model.total.mean_magnitude),
      number(model.total.quantiles.p99),
      number(model.total.largest),
      share(model.total.elements ? model.total.zeros / model.total.elements : 0),
      origin(model),
    ])),
  make("p", { className: "hint" }, "Change is ‖δ‖ / ‖base‖, where δ is a model's weights less the base's."));

function pairs(analysis) {
  const rows = analysis.pairs.map(({ first, second, total }) => [
    `${first} · ${second}`,
    cosine(total.cosine),
    share(total.both ? 1 - total.agreeing : 0),
    amount(total.both),
  ]);
  return titled("How they stand to each other",
    tableOf("Pairs", ["models", "cosine", "in opposite directions", "elements both change"], rows),
    make("p", { className: "hint" },
      "A cosine near 0: they do not touch each other. Above, they share what they learned. Below, they ",
      "work against each other. Of the elements that both change, chance alone makes half opposite. ",
      `Added up as they are, ${share(analysis.together.cancelled)} of all changes cancel out.`));
}

function advice({ advice: { suggestions, doubts } }) {
  const shown = ({ setting, value, model, reason, source, evidence }) =>
    make("li", { className: TONES[evidence] },
      make("div", { className: "head" },
        make("h4", {}, make("code", {}, `${setting} = ${value}`), model === null ? "" : ` for ${model}`),
        make("span", { className: "badge" }, `${evidence} evidence`)),
      make("p", {}, reason),
      make("p", { className: "figures" }, source));
  const parts = [make("h3", {}, "Advice"), make("ul", { className: "advice" }, ...suggestions.map(shown))];
  if (doubts.length) {
    const list = make("ul", { className: "plain" }, ...doubts.map((doubt) => make("li", {}, doubt)));
    parts.push(titled("What this cannot know", list));
  }
  return parts;
}

const withOutput = (recipe) => ({ ...recipe, models: { ...recipe.models, output_file: OUTPUT } });

/** The advice as a recipe to copy, or to take over with `onTake`. */
function recipe(analysis, onTake) {
  const advised = analysis.advice.recipe;
  if (!Object.keys(advised).length) {
    return make("p", { className: "lead" }, "None of these models should be merged, so there is no recipe.");
  }
  const code = make("code", { id: "analysis-recipe" }, writeToml(withOutput(advised)));
  const copy = make("button", { type: "button", dataset: { copies: code.id } }, "Copy");
  const tools = make("div", { className: "tools" }, copy);
  if (onTake) {
    const take = make("button", { type: "button", className: "take" }, "Use this recipe");
    take.addEventListener("click", () => onTake(advised));
    tools.prepend(take);
  }
  return titled("The advice as a recipe", make("pre", { tabIndex: 0 }, code), tools);
}

function remarks(analysis) {
  const list = (title, items) => make("details", {},
    make("summary", {}, `${title} (${items.length})`),
    make("ul", { className: "plain" }, ...items.map((item) => make("li", {}, item))));
  const read = `${bytes(analysis.bytes_read)} read in ${duration(analysis.seconds)}.`;
  return make("div", {}, make("p", { className: "hint" }, read),
    ...(analysis.notes.length ? [list("What was done so that they fit", analysis.notes)] : []),
    ...(analysis.left_out.length ? [list("Left out", analysis.left_out)] : []));
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
    "The error that DARE is expected to bring to the outputs of a layer. The dashed line is what a " +
      "merge is taken to bear. The marks are the rates that are advised.", 380);
  const change = chartCard("analysis-change", "Where a model changed",
    "The size of its change beside that of the weights, by layer and kind. “out” stands for tensors " +
      "of no layer.", 200, labelled);
  const numbers = make("details", {}, make("summary", {}, "Numbers"));
  error.append(numbers);
  const place = make("div", { className: "pair" }, error, change);
  const drawn = new Map();

  /** Draw a figure, or give the one that is drawn other rows; without any it is hidden. */
  function draw(name, card, spec, description, datasets) {
    card.hidden = !Object.values(datasets)[0].length;
    if (card.hidden) return;
    if (drawn.has(name)) drawn.get(name).update(datasets);
    else drawn.set(name, addFigure(name, { ...spec, datasets }, description));
  }

  function showErrors(analysis) {
    draw("analysis-error", error, figures.ERROR,
      "Line chart of the expected error over drop rates, a line for each model. Its numbers follow.",
      { rows: figures.errorRows(analysis), bound: figures.BOUND_ROWS });
    const names = analysis.models.map(({ name }) => name);
    const byRate = new Map();
    for (const { drop_rate: rate, model, output_error: cost } of analysis.predictions) {
      byRate.set(rate, (byRate.get(rate) ?? new Map()).set(model, cost));
    }
    const rows = [...byRate].map(([rate, costs]) =>
      [String(rate), ...names.map((name) => share(costs.get(name) ?? NaN))]);
    const label = "Expected error by drop rate";
    numbers.replaceChildren(numbers.firstElementChild, tableOf(label, ["drop rate", ...names], rows));
  }

  function showChanges(analysis) {
    const showModel = () => draw("analysis-change", change, figures.CHANGE,
      "Heat map of the relative change of one model, layers by kinds.",
      { cells: figures.changeRows(analysis.models[picker.value]) });
    const names = analysis.models.map(({ name }, number) => make("option", { value: number }, name));
    picker.replaceChildren(...names);
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
      if (!analysis.models.length) throw new Error("The analysis has no models: there is nothing to show.");
      place.hidden = false;
      top.replaceChildren(
        verdict(analysis), tiles(analysis), findings(analysis), models(analysis),
        ...(analysis.pairs.length ? [pairs(analysis)] : []),
      );
      drawing.show(analysis);
      bottom.replaceChildren(...advice(analysis), recipe(analysis, onTake), remarks(analysis));
    },
    /** Bring the verdict into sight and the keyboard to it. */
    focus: () => top.querySelector("h3").focus(),
    clear: () => { place.hidden = true; },
  };
}
