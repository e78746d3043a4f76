// Writes the tables of a recipe as TOML.

const isTable = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const ACTS = /[\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g;

/** Text as TOML has it: as in JSON, with everything escaped that could change how it is read. */
const quoted = (text) => JSON.stringify(text).replace(ACTS, (found) =>
  `\\u${found.charCodeAt(0).toString(16).padStart(4, "0")}`);

const key = (name) => (/^[A-Za-z0-9_-]+$/.test(name) ? name : quoted(name));

function write(value) {
  if (typeof value === "string") return quoted(value);
  if (Array.isArray(value)) return `[${value.map(write).join(", ")}]`;
  if (!isTable(value)) return String(value);
  const pairs = Object.entries(value).map(([name, held]) => `${key(name)} = ${write(held)}`);
  return `{ ${pairs.join(", ")} }`;
}

function line([name, value]) {
  if (!Array.isArray(value) || !value.length) return `${key(name)} = ${write(value)}`;
  return `${key(name)} = [\n${value.map((entry) => `    ${write(entry)},\n`).join("")}]`;
}

const table = (heading, values) => [heading, ...Object.entries(values).map(line)].join("\n");

/** A recipe's tables as TOML: plain values first, then a table each, then rules for tensors. */
export function writeToml(recipe) {
  const entries = Object.entries(recipe);
  const isRules = (value) => Array.isArray(value) && value.length > 0 && value.every(isTable);
  const plain = entries.filter(([, value]) => !isTable(value) && !isRules(value));
  const parts = plain.length ? [plain.map(line).join("\n")] : [];
  for (const [name, value] of entries) {
    if (isTable(value)) parts.push(table(`[${key(name)}]`, value));
    if (isRules(value)) parts.push(...value.map((rule) => table(`[[${key(name)}]]`, rule)));
  }
  return `${parts.join("\n\n")}\n`;
}
