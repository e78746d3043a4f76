// Controls for the parameters of stages, made from what methods.json says of them.
import { choice, make, slider, toggle } from "../../controls.js";
import { findStage, readParameters, readValue, writeParameters } from "./setting.js";

const SHARES = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1];
const LISTED = {
  m: [2, 4, 8, 16, 32],
  rate: [1e-6, 3e-6, 1e-5, 3e-5, 1e-4],
  max_variance: [1, 2, 4, 8, 16],
};
const UNSET = "unset";

/** Show the parameters of a chain's stages; the drop rate has a slider of its own. */
export function parameterControls(place, state, methods) {
  const made = new Map();
  return (chain) => {
    for (const name of chain) {
      if (made.has(name) || !findStage(name, methods)) continue;
      made.set(name, stageControls(state, findStage(name, methods)));
    }
    const shown = chain.map((name) => made.get(name)).filter((group) => group?.hasChildNodes());
    place.replaceChildren(...shown);
  };
}

function stageControls(state, stage) {
  const parameters = stage.parameters.filter(({ name }) => name !== "drop_rate");
  if (!parameters.length) return make("fieldset");
  const group = make("fieldset", {}, make("legend", {}, `Parameters of ${stage.name}`));
  for (const parameter of parameters) {
    const input = addParameter(group, state, stage.name, parameter);
    const hint = make("p", { className: "hint", id: `${input.id}-hint` }, parameter.description);
    input.setAttribute("aria-describedby", hint.id);
    group.append(hint);
  }
  return group;
}

function addParameter(place, state, stage, parameter) {
  const name = `${stage}.${parameter.name}`;
  const label = parameter.name.replaceAll("_", " ");
  const listed = LISTED[parameter.name] ?? (parameter.optional ? SHARES : parameter.options);
  if (parameter.type === "boolean") {
    const booleans = stateOf(state, name, parameter.default, Boolean);
    return toggle(place, booleans, name, { label });
  }
  if (listed) {
    const options = listed.map((value) => [String(value), String(value)]);
    if (parameter.optional) options.unshift([UNSET, "not given"]);
    const texts = stateOf(state, name, parameter.default ?? UNSET, String, readValue);
    return choice(place, texts, name, { label, options });
  }
  const numbers = stateOf(state, name, parameter.default, Number);
  return slider(place, numbers, name, { label, ...limitsOf(parameter) });
}

/** From where to where a slider goes; open ends are near the default. */
function limitsOf(parameter) {
  const { default: usual, type, minimum, exclusiveMinimum, maximum, exclusiveMaximum } = parameter;
  const step = type === "integer" ? (usual >= 100 ? 50 : 1) : 0.01;
  const far = type === "integer" ? Math.max(16, 4 * usual) : Math.max(1, 5 * usual);
  const highest = maximum ?? (exclusiveMaximum === undefined ? far : exclusiveMaximum - step);
  return { min: minimum ?? exclusiveMinimum + step, max: Math.min(highest, far), step };
}

/** One parameter as a state of its own, kept among the others in `live.s` unless at its default. */
function stateOf(state, name, usual, show, read = (value) => value) {
  return {
    get: () => show(readParameters(state.get("live.s")).get(name) ?? usual),
    set(changes) {
      const parameters = readParameters(state.get("live.s"));
      const value = read(changes[name]);
      if (value === usual) parameters.delete(name);
      else parameters.set(name, value);
      state.set({ "live.s": writeParameters(parameters) });
    },
    on: (_, listener) => state.on(["live.s"], listener),
  };
}
