// The recipe that is being written: the tables of its TOML form, kept as text in the state.

const MODELS = { base_file: "", merge_files: [] };
const isEmpty = (value) => value === undefined || value === null || value === "";

const fileOf = (entry) => (typeof entry === "string" ? entry : entry.file);

/** A place beside the base for an output: a folder beside a folder, a file beside a file. */
function proposeOutput(base) {
  const folder = base.slice(0, base.lastIndexOf("/"));
  return `${folder}/merged${base.endsWith(".safetensors") ? ".safetensors" : ""}`;
}

/** The recipe in the state, and what changes it. */
export function openRecipe(state) {
  function read() {
    try {
      const recipe = JSON.parse(state.get("own.recipe") || "{}");
      return { ...recipe, models: { ...MODELS, ...recipe.models } };
    } catch {
      return { models: MODELS };  // an address that somebody has edited
    }
  }

  const write = (recipe) => state.set({ "own.recipe": JSON.stringify(recipe) });
  const setFiles = (files) => write({ ...read(), models: { ...read().models, ...files } });

  return {
    read,
    write,
    files: () => read().models.merge_files.map(fileOf),
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
    setOutput: (path) => setFiles({ output_file: path }),

    /** Tables of another recipe, with the output that was chosen here if they name none. */
    take(recipe) {
      const output = recipe.models.output_file ?? read().models.output_file;
      write({ ...recipe, models: { ...recipe.models, ...(output ? { output_file: output } : {}) } });
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
    /** Another method; the parameters of stages that it does not have go. */
    setMethod(method) {
      const tables = ([name, value]) => name === "models" || Array.isArray(value) || typeof value !== "object"
        || method.split("+").includes(name);
      write({ ...Object.fromEntries(Object.entries(read()).filter(tables)), method });
    },
    /** A value of one model: its weight, its drop rate. */
    setOfModel(place, name, value) {
      const entries = read().models.merge_files.map((entry, number) => {
        if (number !== place) return entry;
        const { [name]: _, ...others } = typeof entry === "string" ? { file: entry } : entry;
        const changed = isEmpty(value) ? others : { ...others, [name]: value };
        return Object.keys(changed).length === 1 ? changed.file : changed;
      });
      setFiles({ merge_files: entries });
    },
  };
}
