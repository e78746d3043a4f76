// Writes the tables of a recipe as TOML.

const isTable = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** Text as TOML has it: JSON's, but that the last control character and line ends are escaped too. */
const quoted = (text) =>
  JSON.stringify(text).replace(/[\u007f-\u009f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff]/g, (found) =>
    `\\u${found.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );

const key = (name) => (/^[A-Za-z0-9_-]+$/.test(name) ? name : quoted(name));

function write(value) {
  if (typeof value === "string") return quoted(value);
  if (Array.isArray(value)) return `[${value.map(write).join(", ")}]`;
  if (!isTable(value)) return String(value);
  return `{ ${Object.entries(value).map(([name, held]) => `${key(name)} = ${write(held)}`).join(", ")} }`;
}

const lines = (table) => Object.entries(table).map(([name, value]) =>
  Array.isArray(value) && value.length
    ? `${key(name)} = [\n${value.map((entry) => `    ${write(entry)},\n`).join("")}]`
    : `${key(name)} = ${write(value)}`,
);

/** A recipe's tables as TOML: plain values first, then a table each, then rules for tensors. */
export function writeToml(recipe) {
  const entries = Object.entries(recipe);
  const isRules = (value) => Array.isArray(value) && value.length > 0 && value.every(isTable);
  const plain = entries.filter(([, value]) => !isTable(value) && !isRules(value));
  const parts = plain.length ? [lines(Object.fromEntries(plain)).join("\n")] : [];
  for (const [name, value] of entries) {
    if (isTable(value)) parts.push([`[${key(name)}]`, ...lines(value)].join("\n"));
    if (isRules(value)) {
      parts.push(...value.map((rule) => [`[[${key(name)}]]`, ...lines(rule)].join("\n")));
    }
  }
  return `${parts.join("\n\n")}\n`;
}
