// Reads an analysis file (docs/analysis-schema.md): what the view shows of it, checked.
import { KINDS } from "./figures.js";

const SCHEMA = "dare-analysis/4";
const MOST_BYTES = 256e6;
const NOT_FINITE = { inf: Infinity, "-inf": -Infinity, nan: NaN };

class Fault extends Error {}

function fail(value, where, fault) {
  throw new Fault(`${where.join(".")} ${value === undefined ? "is missing" : fault}`);
}

const text = (value, where) =>
  typeof value === "string" ? value : fail(value, where, "is not text");

function real(value, where) {
  if (typeof value === "number") return value;
  const known = Object.hasOwn(NOT_FINITE, value);
  return known ? NOT_FINITE[value] : fail(value, where, "is not a number");
}

const flag = (value, where) =>
  typeof value === "boolean" ? value : fail(value, where, "is not true or false");

const oneOf = (...words) => (value, where) =>
  words.includes(value) ? value : fail(value, where, `is not one of ${words.join(", ")}`);

const orNull = (read) => (value, where) => (value === null ? null : read(value, where));

/** What older files do not have. */
const orMissing = (read, usual) => (value, where) =>
  (value === undefined ? usual : read(value, where));

const realOrText = (value, where) => (typeof value === "string" ? value : real(value, where));

const list = (read) => (value, where) =>
  Array.isArray(value)
    ? value.map((entry, place) => read(entry, [...where, place]))
    : fail(value, where, "is not a list");

const isTable = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** A table whose keys are names: a Map, for which no name is special. */
const byName = (read) => (value, where) =>
  isTable(value)
    ? new Map(Object.entries(value).map(([key, entry]) => [key, read(entry, [...where, key])]))
    : fail(value, where, "is not a table");

const table = (fields) => (value, where) => {
  if (!isTable(value)) fail(value, where, "is not a table");
  return Object.fromEntries(
    Object.entries(fields).map(([key, read]) => [key, read(value[key], [...where, key])]),
  );
};

/** A recipe's tables as they are; they are only written as TOML. */
const tables = (value, where) => (isTable(value) ? value : fail(value, where, "is not a table"));

const statistics = table({
  elements: real,
  zeros: real,
  mean_magnitude: real,
  largest: real,
  quantiles: table({ p99: real }),
  norm: real,
  base_norm: real,
  excess_kurtosis: real,
  inliers: table({ norm: real, mean_magnitude: real }),
});

const verdict = oneOf("no defect found", "needs changes", "cannot be merged");

const notice = {
  code: text,
  severity: oneOf("note", "warning", "severe"),
  subjects: list(text),
  text,
  remedy: text,
};

const form = table({ shape: list(real), dtype: text });

const analysis = table({
  base: text,
  base_dtypes: byName(real),
  models: list(table({
    name: text,
    file: text,
    total: statistics,
    cells: list(table({ layer: real, kind: oneOf(...KINDS), statistics })),
    origin: text,
    likely_rank: orNull(real),
    is_adapter: flag,
  })),
  pairs: list(table({
    first: text,
    second: text,
    total: table({ cosine: real, agreeing: real, both: real }),
  })),
  together: table({ cancelled: real }),
  notes: list(table(notice)),
  left_out: list(table({
    tensor: text,
    reason: oneOf("not weights", "unlike base", "not in base"),
    models: list(text),
    base: orNull(form),
    found: orNull(form),
  })),
  bytes_read: real,
  seconds: real,
  predictions: list(table({ model: text, drop_rate: real, bounded_error: real })),
  readiness: table({
    verdict,
    method: orMissing(text, ""),
    by_model: byName(verdict),
    findings: list(table({
      ...notice,
      figures: byName(real),
    })),
  }),
  advice: table({
    suggestions: list(table({
      setting: text,
      value: realOrText,
      model: orNull(text),
      reason: text,
      source: text,
      evidence: oneOf("strong", "fair", "weak"),
    })),
    recipe: tables,
    doubts: list(table(notice)),
  }),
});

const REMEDY = "Choose a file written by `dare analyze … --output analysis.json`.";

function parse(content) {
  try {
    return JSON.parse(content);
  } catch {
    throw new Error(`This file is not JSON. ${REMEDY}`);
  }
}

/** The analysis in a text; an Error says what is wrong with it. */
export function readAnalysis(content) {
  const document = parse(content);
  const schema = document?.schema;
  if (typeof schema !== "string" || !schema.startsWith("dare-analysis/")) {
    throw new Error(`This is JSON, but not an analysis. ${REMEDY}`);
  }
  if (schema !== SCHEMA) {
    throw new Error(
      `This analysis has format ${schema.slice(0, 40)}, and this page reads ${SCHEMA}. ` +
        "Run `dare analyze` again, or open the file with the version of dare that wrote it.",
    );
  }
  try {
    const read = analysis(document, []);
    return read.models.length ? read : fail(undefined, ["models", 0]);
  } catch (error) {
    if (!(error instanceof Fault)) throw error;
    const lack = error.message.slice(0, 200);
    throw new Error(`This analysis is incomplete: ${lack}. Run \`dare analyze\` again.`);
  }
}

/** The analysis in a file that somebody chose; it stays in this browser. */
export async function readFile(file) {
  if (file.size > MOST_BYTES) {
    throw new Error(`This file is larger than ${MOST_BYTES / 1e6} MB, the most this page shows.`);
  }
  return readAnalysis(await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(new Error("This file cannot be read.")));
    reader.readAsText(file);
  }));
}
