// A setting as what people keep of it: a recipe, a command, Python, and a line of words.
//
// All three texts make the same merge, of models in the folder that `dare demo --models` writes.
// `methods` is what methods.json has: the stages with their parameters, and other names for chains.

const FOLDER = "demo-models";
export const MAKE_MODELS = `dare demo --models ${FOLDER}`;
export const OUTPUT = "merged.safetensors";
export const CHECK = `dare verify ${OUTPUT}`;

/** What a model may have of its own, and the flag for it. */
const OWN = { weight: "weight", drop_rate: "drop_rate", seed: "model_seed" };

const place = (name) => `${FOLDER}/${name}`;
const isGiven = (value) => value !== null && value !== undefined;

/** The stages of a method by name, an alias being the chain that it stands for. */
export function chainOf(method, methods) {
  return (methods.aliases[method] ?? method).split("+");
}

/** What is different for a model: its weight, its drop rate, its seed. */
const ownOf = (model) =>
  Object.keys(OWN).map((key) => [key, model[key]]).filter(([, value]) => isGiven(value));

/** The stages that have something set, each with its parameters. */
const tablesOf = (setting) =>
  Object.entries(setting.stages)
    .map(([stage, table]) => [stage, Object.entries(table).filter(([, v]) => isGiven(v))])
    .filter(([, table]) => table.length);

/** The setting as a recipe in TOML. */
export function recipeText(setting) {
  const tables = tablesOf(setting).map(([stage, table]) =>
    [`[${stage}]`, ...table.map(([name, value]) => `${name} = ${JSON.stringify(value)}`), ""]);
  return [
    `# The models: ${MAKE_MODELS}`,
    `base = "${place(setting.base)}"`,
    "models = [",
    ...setting.models.map((model) => `  ${entry(model)},`),
    "]",
    `output = "${OUTPUT}"`,
    `method = ${JSON.stringify(setting.method)}`,
    `seed = ${setting.seed}`,
    `scale = ${setting.scale}`,
    "",
    ...tables.flat(),
  ].join("\n");
}

function entry(model) {
  const own = ownOf(model);
  const file = JSON.stringify(place(model.name));
  if (!own.length) return file;
  return `{ file = ${file}, ${own.map(([key, value]) => `${key} = ${value}`).join(", ")} }`;
}

/** The setting as commands; one that flags cannot say is left to the recipe. */
export function commandText(setting, methods) {
  const flags = flagsOf(setting, methods);
  const merge = flags
    ? [
        `dare merge ${place(setting.base)}`,
        setting.models.map((model) => place(model.name)).join(" "),
        ...flags,
        `--output ${OUTPUT}`,
      ].join(" \\\n  ")
    : "dare recipe.toml";
  return [MAKE_MODELS, merge, CHECK, ""].join("\n");
}

/** Whether only a recipe can say it. */
export const needsRecipe = (setting, methods) => flagsOf(setting, methods) === null;

/** The flags, or null where there are none for this. */
function flagsOf(setting, methods) {
  const chain = chainOf(setting.method, methods);
  const flags = new Map();
  for (const [stage, table] of tablesOf(setting)) {
    for (const [name, value] of table) {
      if (ownersOf(name, chain, methods).join() !== stage) return null;
      flags.set(name, [value]);
    }
  }
  for (const [key, flag] of Object.entries(OWN)) {
    const values = setting.models.map((model) => model[key]);
    if (!values.some(isGiven)) continue;
    const isShared = key === "drop_rate" && ownersOf(key, chain, methods).length > 1;
    if (isShared || !values.every(isGiven)) return null;
    flags.set(flag, values);
  }
  const parameters = [...flags].map(
    ([name, values]) => `--${name.replaceAll("_", "-")} ${values.join(" ")}`);
  return [
    `--method ${setting.method} --seed ${setting.seed} --scale ${setting.scale}`,
    ...(parameters.length ? [parameters.join(" ")] : []),
  ];
}

/** The stages that a flag of this name is for; `trim` has what `ties` would only pass on to it. */
function ownersOf(parameter, chain, methods) {
  return methods.stages
    .filter(({ name, parameters }) =>
      chain.includes(name) &&
      parameters.some((known) => known.name === parameter) &&
      !(name === "ties" && parameter === "keep_ratio" && chain.includes("trim")))
    .map(({ name }) => name);
}

/** The setting as Python. */
export function pythonText(setting) {
  const tables = tablesOf(setting).map(([stage, table]) => `"${stage}": ${pythonDict(table)}`);
  return [
    `# The models: ${MAKE_MODELS}`,
    "import dare",
    "",
    "recipe = dare.Recipe(",
    `    base="${place(setting.base)}",`,
    "    models=[",
    ...setting.models.map((model) => `        ${pythonEntry(model)},`),
    "    ],",
    `    output="${OUTPUT}",`,
    `    method=${JSON.stringify(setting.method)},`,
    ...(tables.length ? [`    stages={${tables.join(", ")}},`] : []),
    `    seed=${setting.seed},`,
    `    scale=${setting.scale},`,
    ")",
    "dare.merge(recipe)",
    `print(dare.verify("${OUTPUT}"))`,
    "",
  ].join("\n");
}

const pythonValue = (value) =>
  typeof value === "boolean" ? (value ? "True" : "False") : JSON.stringify(value);

const pythonDict = (entries) =>
  `{${entries.map(([name, value]) => `"${name}": ${pythonValue(value)}`).join(", ")}}`;

function pythonEntry(model) {
  const own = ownOf(model);
  if (!own.length) return `"${place(model.name)}"`;
  const fields = own.map(([key, value]) =>
    key === "drop_rate" ? `settings=${pythonDict([[key, value]])}` : `${key}=${value}`);
  return `dare.ModelEntry(file="${place(model.name)}", ${fields.join(", ")})`;
}

/** The setting in a few words: "dare+ties of add and say, p 0.5, λ 1, seed 42". */
export function settingInWords(setting) {
  if (!setting.models.length) return "the base as it is";
  const short = (name, value, stage = "") =>
    name === "drop_rate" ? `p ${value}` : `${stage}${name.replaceAll("_", " ")} ${value}`;
  const models = setting.models.map((model) => {
    const own = ownOf(model).map(([name, value]) => short(name, value));
    return own.length ? `${model.name} (${own.join(", ")})` : model.name;
  });
  const parameters = tablesOf(setting).flatMap(([stage, table]) =>
    table.map(([name, value]) => short(name, value, `${stage} `)));
  const base = setting.base === "base" ? [] : [`base ${setting.base}`];
  const rest = [...base, ...parameters, `λ ${setting.scale}`, `seed ${setting.seed}`];
  return `${setting.method} of ${models.join(", ")}; ${rest.join(", ")}`;
}
