// What a setting asks for, checked in the package's words: which stages with which parameters, and
// for each model its weight, its seed and its own values of the parameters.

const ALIASES = {
  __proto__: null,
  task_arithmetic: "sum",
  dare_linear: "dare+linear",
  dare_ties: "dare+ties",
  dare_slerp: "dare+slerp",
  dare_task_arithmetic: "dare+sum",
  average: "linear",
  dare: "dare+linear",
  trim: "trim+linear",
  darex: "darex+linear",
  breadcrumbs: "breadcrumbs+linear",
  breadcrumbs_ties: "breadcrumbs+ties",
  della: "della+ties",
  della_linear: "della+linear",
  nm: "nm+linear",
};
const ELSEWHERE = [
  "breadcrumbs", "cabs", "consensus", "darex", "della", "emr", "fourier", "iso", "karcher", "knots",
  "model_stock", "nm", "nuslerp", "pcb", "star", "tsv", "wudi",
];

const dropRate = { usual: 0.9, check: checkDropRate };
const keepRatio = { usual: 0.2, check: (name, value) => checkShare(name, value, true) };
const STAGES = {
  __proto__: null,
  dare: {
    kind: "delta",
    parameters: { drop_rate: dropRate, rescale: { usual: true, check: checkRescale } },
  },
  trim: { kind: "delta", parameters: { keep_ratio: keepRatio, scope: oneOf("tensor", "model") } },
  linear: { kind: "combine", parameters: {}, weight: (models) => 1 / models },
  sum: { kind: "combine", parameters: {}, weight: () => 1 },
  ties: {
    kind: "combine",
    parameters: {
      keep_ratio: { ...keepRatio, usual: null },
      divide_by: oneOf("weights", "count", "nothing"),
      vote: oneOf("sum", "count"),
      weighted: { usual: true, check: checkBoolean },
    },
    weight: () => 1,
  },
  slerp: {
    kind: "combine",
    parameters: {
      t: { usual: 0.5, check: (name, value) => checkShare(name, value, false) },
      on: oneOf("weights", "deltas"),
    },
    models: 2,
  },
};

/** null if this engine has all stages of a method, else why it has not. */
export function whyNot(method) {
  const missing = stageNames(method).filter((name) => ELSEWHERE.includes(name));
  if (!missing.length) return null;
  const are = missing.length > 1 ? "are" : "is";
  return `${missing.join(" and ")} ${are} not in this page's own engine: for every method run `
    + "dare playground on your machine";
}

/**
 * What a setting asks for: { combine, options, scale, models }, where `combine` is the last stage
 * and `options` its parameters. A model is { name, weight, seed, stages }, its stages pairs of a name
 * and parameters.
 */
export function readSetting(setting) {
  const { method, models } = setting;
  const tables = setting.stages ?? {};
  const scale = setting.scale ?? 1;
  const seed = setting.seed ?? 42;
  const names = parseMethod(method);
  checkTables(tables, names, method);
  checkNumber("scale", scale);
  checkSeed(seed);
  const chain = readChain(names, tables, models, method);
  const [combine, options] = chain.pop();
  checkModels(models, combine, chain);
  return {
    combine,
    options,
    scale,
    models: models.map((model, place) => ({
      name: model.name,
      weight: model.weight ?? STAGES[combine].weight?.(models.length) ?? 1,
      seed: model.seed ?? seed + place,
      stages: chain.map(([name, values]) => [name, withOwn(values, ownSettings(model))]),
    })),
  };
}

function stageNames(method) {
  return (ALIASES[method] ?? method).split("+");
}

function parseMethod(method) {
  const reason = whyNot(method);
  if (reason) throw new Error(reason);
  const names = stageNames(method);
  for (const name of names) {
    if (!STAGES[name]) {
      const known = [...Object.keys(STAGES), ...ELSEWHERE].join(", ");
      throw new Error(`method '${method}': there is no stage '${name}'; stages: ${known}`);
    }
    if (names.indexOf(name) !== names.lastIndexOf(name)) {
      throw new Error(
        `method '${method}': ${name} stands in it more than once; `
          + "the second would do the same again",
      );
    }
  }
  const kinds = names.map((name) => STAGES[name].kind);
  if (kinds.indexOf("combine") !== names.length - 1) {
    throw new Error(
      `method '${method}': a method is any delta stages and then one combine stage, as in `
        + "'dare+linear'",
    );
  }
  return names;
}

/** The stages with their parameters; `keep_ratio` of ties is a trim before it. */
function readChain(names, tables, models, method) {
  const chain = names.map((name) => [name, readTable(name, tables[name] ?? {})]);
  const [combine, options] = chain.at(-1);
  if (combine !== "ties") return chain;
  const isOwn = models.some((model) => "keep_ratio" in ownSettings(model));
  if (!names.includes("trim")) {
    if (options.keep_ratio !== null || isOwn) {
      chain.splice(-1, 0, ["trim", readTable("trim", { keep_ratio: options.keep_ratio ?? 1 })]);
    }
  } else if (options.keep_ratio !== null) {
    throw new Error(
      `[ties] keep_ratio: method '${method}' has the stage 'trim' already; set it in [trim]`,
    );
  }
  return chain;
}

function readTable(stage, given) {
  const { parameters } = STAGES[stage];
  for (const [name, value] of Object.entries(given)) {
    if (value === null) continue;
    if (!parameters[name]) {
      const known = Object.keys(parameters).join(", ") || "none";
      throw new Error(`[${stage}] ${name}: ${stage} has no such parameter; it has: ${known}`);
    }
    within(`[${stage}] `, () => parameters[name].check(name, value));
  }
  return Object.fromEntries(
    Object.entries(parameters).map(([name, { usual }]) => [name, given[name] ?? usual]),
  );
}

function withOwn(values, own) {
  return Object.fromEntries(
    Object.entries(values).map(([name, value]) => [name, own[name] ?? value]),
  );
}

/** What a model has of its own beside its weight and seed: parameters of delta stages. */
function ownSettings({ name, weight, seed, ...own }) {
  return Object.fromEntries(Object.entries(own).filter(([, value]) => value !== null));
}

// ---------------------------------------------------------------- checks

function checkTables(tables, names, method) {
  for (const [name, table] of Object.entries(tables)) {
    const isEmpty = !Object.values(table).some((value) => value !== null);
    if (!STAGES[name] && !ELSEWHERE.includes(name)) throw new Error(`[${name}]: no such stage`);
    if (!names.includes(name) && !isEmpty) {
      throw new Error(
        `[${name}] would have no effect: method '${method}' has the stages ${names.join(", ")}`,
      );
    }
  }
}

function checkModels(models, combine, chain) {
  const { models: count, weight: usualWeight, parameters } = STAGES[combine];
  const known = Object.assign({}, ...chain.map(([name]) => STAGES[name].parameters));
  for (const model of models) {
    within(`model ${model.name}: `, () => {
      if (model.weight !== null && model.weight !== undefined) {
        checkNumber("weight", model.weight);
        if (!usualWeight) {
          const names = Object.keys(parameters).join(", ");
          throw new Error(`${combine} takes no weights; its parameters are ${names}`);
        }
      }
      if (model.seed !== null && model.seed !== undefined) checkSeed(model.seed);
      for (const [name, value] of Object.entries(ownSettings(model))) {
        if (!known[name]) {
          const names = Object.keys(known).sort().join(", ") || "none";
          throw new Error(`${name} is not a parameter here; known: ${names}`);
        }
        known[name].check(name, value);
      }
    });
  }
  if (count && count !== models.length) {
    const are = models.length === 1 ? "is" : "are";
    throw new Error(`${combine} merges ${count} models, and ${models.length} ${are} given`);
  }
}

function within(where, action) {
  try {
    action();
  } catch (error) {
    throw new Error(where + error.message);
  }
}

function refuse(name, value, reason) {
  throw new Error(`${name} = ${typeof value === "string" ? `'${value}'` : value}: ${reason}`);
}

function checkNumber(name, value) {
  if (typeof value !== "number") refuse(name, value, "Input should be a valid number");
  if (!Number.isFinite(value)) refuse(name, value, "Input should be a finite number");
}

function checkSeed(value) {
  if (!Number.isSafeInteger(value)) refuse("seed", value, "Input should be a valid integer");
  if (value < 0) refuse("seed", value, "Input should be greater than or equal to 0");
}

function checkDropRate(name, value) {
  if (typeof value !== "number") refuse(name, value, "Input should be a valid number");
  if (value === 1) {
    throw new Error(
      "drop_rate = 1 would drop every change and leave nothing to rescale; use a rate below 1 "
        + "(0.9 is usual), or leave the model out",
    );
  }
  if (!(value >= 0 && value < 1)) refuse(name, value, "must be at least 0 and below 1");
}

function checkShare(name, value, isAboveZero) {
  checkNumber(name, value);
  if (isAboveZero && !(value > 0)) refuse(name, value, "Input should be greater than 0");
  if (value < 0) refuse(name, value, "Input should be greater than or equal to 0");
  if (value > 1) refuse(name, value, "Input should be less than or equal to 1");
}

function checkBoolean(name, value) {
  if (typeof value !== "boolean") refuse(name, value, "Input should be a valid boolean");
}

function checkRescale(name, value) {
  if (value !== "l1") checkBoolean(name, value);
}

function oneOf(...values) {
  const quoted = values.map((value) => `'${value}'`);
  const listed = `${quoted.slice(0, -1).join(", ")} or ${quoted.at(-1)}`;
  return {
    usual: values[0],
    check(name, value) {
      if (!values.includes(value)) refuse(name, value, `Input should be ${listed}`);
    },
  };
}
