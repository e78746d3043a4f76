// Elements made from data: text stays text.

/** An element with properties and children: `make("td", { className: "text" }, "28 %")`. */
export function make(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

export const percent = (value) => `${Math.round(value)} %`;
export const bits = (value) => (Number.isFinite(value) ? value.toFixed(3) : "not a number");
