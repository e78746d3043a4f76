// Form controls that change a value of the state, and follow it when something else changes it.

/** The element that was made, with its properties and what is in it. */
export function make(tag, properties = {}, ...children) {
  const { dataset = {}, ...others } = properties;
  const element = Object.assign(document.createElement(tag), others);
  Object.assign(element.dataset, dataset);
  element.append(...children);
  return element;
}

/** The slider of a drop rate. */
export const DROP_RATE = {
  label: "Drop rate p", min: 0, max: 0.99, step: 0.01, format: (p) => p.toFixed(2),
};

const idOf = (name) => `control-${name.replaceAll(".", "-")}`;

function follow(state, name, show) {
  state.on([name], show);
  show();
}

/** A range with its label and its value in words. What the address has is put into the range. */
export function slider(place, state, name, { label, min, max, step, format = String }) {
  const id = idOf(name);
  const input = make("input", { type: "range", id, min, max, step });
  const output = make("output", { htmlFor: id });
  const words = make("label", { htmlFor: id }, label);
  place.append(make("div", { className: "control slider" }, words, output, input));
  state.set({ [name]: Math.min(max, Math.max(min, state.get(name))) });
  follow(state, name, () => {
    input.value = state.get(name);
    output.textContent = format(state.get(name));
    input.setAttribute("aria-valuetext", output.textContent);
    input.style.setProperty("--filled", (state.get(name) - min) / (max - min));
  });
  input.addEventListener("input", () => state.set({ [name]: Number(input.value) }));
  return input;
}

/** On or off. */
export function toggle(place, state, name, { label }) {
  const input = make("input", { type: "checkbox", id: idOf(name) });
  place.append(make("div", { className: "control toggle" }, make("label", {}, input, label)));
  follow(state, name, () => { input.checked = state.get(name); });
  input.addEventListener("change", () => state.set({ [name]: input.checked }));
  return input;
}

/** One of several texts. One from the address that is not among them becomes the first. */
export function choice(place, state, name, { label, options }) {
  const id = idOf(name);
  const select = make("select", { id });
  for (const [value, text] of options) select.append(make("option", { value }, text));
  const words = make("label", { htmlFor: id }, label);
  place.append(make("div", { className: "control choice" }, words, select));
  if (!options.some(([value]) => value === state.get(name))) state.set({ [name]: options[0][0] });
  follow(state, name, () => { select.value = state.get(name); });
  select.addEventListener("change", () => state.set({ [name]: select.value }));
  return select;
}

/** A button that does something. */
export function button(place, text, onClick) {
  const element = make("button", { type: "button" }, text);
  element.addEventListener("click", onClick);
  place.append(element);
  return element;
}

/** A button that goes on to another seed, `step` further. */
export function seedButton(place, state, name, step = 1) {
  const seed = Math.floor(state.get(name));
  state.set({ [name]: Number.isSafeInteger(seed) && seed >= 0 ? seed : 0 });
  const element = button(place, "", () => state.set({ [name]: state.get(name) + step }));
  follow(state, name, () => { element.textContent = `Another seed (now ${state.get(name)})`; });
  return element;
}
