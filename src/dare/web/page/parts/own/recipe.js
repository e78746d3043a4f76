// The recipe that is being written: the tables of its TOML form, kept as text in the state.
const MODELS = { base_file: "", merge_files: [] };
const START = '{"method":"linear"}';  // the plain average
const isEmpty = (value) => value === undefined || value === null || value === "";

const OF_MODELS = ["file", "weight", "seed"];
const fileOf = (entry) => (typeof entry === "string" ? entry : entry.file);

/** A model's entry with only some keys; one without settings is its file. */
function withKeys(entry, stays) {
  if (typeof entry === "string") return entry;
  const kept = Object.fromEntries(Object.entries(entry).filter(([name]) => stays(name)));
  return Object.keys(kept).length === 1 ? kept.file : kept;
}

/** A recipe that names its files at the top level, as one with a table for them. */
function inTables({ base, output, models, ...others }) {
  if (!Array.isArray(models)) return { ...others, models };
  return { ...others, models: { base_file: base, merge_files: models, output_file: output } };
}

const besideBase = (base, name) => `${base.slice(0, base.lastIndexOf("/"))}/${name}`;

/** A place beside the base for an output: a folder beside a folder, a file beside a file. */
const proposeOutput = (base) =>
  besideBase(base, base.endsWith(".safetensors") ? "merged.safetensors" : "merged");

/** The recipe in the state, and what changes it. */
export function openRecipe(state) {
  function read() {
    try {
      const recipe = JSON.parse(state.get("own.recipe") || START);
      return { ...recipe, models: { ...MODELS, ...recipe.models } };
    } catch {
      return { ...JSON.parse(START), models: MODELS };  // an address that somebody has edited
    }
  }

  const write = (recipe) => state.set({ "own.recipe": JSON.stringify(recipe) });
  const setFiles = (files) => write({ ...read(), models: { ...read().models, ...files } });

  return {
    read,
    write,
    files: () => read().models.merge_files.map(fileOf),
    /** Tell if it is still the start: models without settings, and the method that it began with. */
    isStart() {
      const { models: { merge_files: files }, ...others } = read();
      return JSON.stringify(others) === START && files.every((entry) => typeof entry === "string");
    },
    isComplete: () => Boolean(read().models.base_file && read().models.merge_files.length),
    on: (listener) => state.on(["own.recipe"], listener),

    setBase(path) {
      const { output_file: output } = read().models;
      setFiles({ base_file: path, output_file: output || (path && proposeOutput(path)) });
    },
    addModel: (path) => setFiles({ merge_files: [...read().models.merge_files, path] }),
    removeModel(place) {
      setFiles({ merge_files: read().models.merge_files.filter((_, number) => number !== place) });
    },
    /** A name alone lies beside the base. */
    setOutput(path) {
      const { base_file: base } = read().models;
      const isName = path && base && !/[/\\~]/.test(path);
      setFiles({ output_file: isName ? besideBase(base, path) : path });
    },

    /** Tables of another recipe, with the output that was chosen here if they name none. */
    take(recipe) {
      const { models: taken, ...others } = inTables(recipe);
      const output = taken.output_file ?? read().models.output_file;
      write({ ...others, models: output ? { ...taken, output_file: output } : taken });
    },

    /** A value of the whole recipe; an empty one is its default. */
    set(name, value) {
      const { [name]: _, ...others } = read();
      write(isEmpty(value) ? others : { ...others, [name]: value });
    },
    setOfStage(stage, name, value) {
      const recipe = read();
      write({ ...recipe, [stage]: { ...recipe[stage], [name]: value } });
    },
    /** Another method; the tables of stages that it does not name go. */
    setMethod(method) {
      const chain = method.split("+");
      const stays = ([name, value]) =>
        typeof value !== "object" || Array.isArray(value) || chain.includes(name);
      const { models, ...others } = read();
      const entries = chain.length > 1 ? models.merge_files : models.merge_files.map((entry) =>
        withKeys(entry, (name) => OF_MODELS.includes(name)));
      const kept = Object.fromEntries(Object.entries(others).filter(stays));
      write({ ...kept, method, models: { ...models, merge_files: entries } });
    },
    /** A value of one model: its weight, its drop rate. */
    setOfModel(place, name, value) {
      const entries = [...read().models.merge_files];
      const entry = entries[place];
      const changed = { ...(typeof entry === "string" ? { file: entry } : entry), [name]: value };
      entries[place] = withKeys(changed, (key) => !isEmpty(changed[key]));
      setFiles({ merge_files: entries });
    },
  };
}
