// The plane through two tensors and zero, drawn true to their lengths and the angle between them.
import { arc } from "../../engine/merge.js";
import { decimal } from "../../words.js";

const RADIUS = 150;
const STEPS = 60;

function shape(tag, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}

const pathThrough = (points) =>
  `M${points.map((point) => point.map((at) => at.toFixed(2)).join()).join("L")}`;

const turn = (radius, angle) => [radius * Math.sin(angle), -radius * Math.cos(angle)];

/** Draw zero, the two tensors, the two ways between them, and where `t` is on each. */
export function drawPlane(svg, { lengths, cosine, names }, t) {
  const angle = Math.acos(Math.min(1, Math.max(-1, cosine)));
  const unit = RADIUS / Math.max(...lengths);
  const tensors = lengths.map((length, at) => turn(unit * length, (at - 0.5) * angle));
  const mixed = ([x, y]) => [0, 1].map((axis) => x * tensors[0][axis] + y * tensors[1][axis]);
  const along = (way) => Array.from({ length: STEPS + 1 }, (_, at) => mixed(way(at / STEPS)));
  const curved = (place) => arc(cosine, place);
  const straight = (place) => [1 - place, place];
  svg.replaceChildren(
    ...lengths.map((length) => shape("path", {
      class: "circle", d: pathThrough(between(unit * length, Math.max(angle, 1.2))),
    })),
    ...tensors.map((tensor) => shape("path", { class: "ray", d: pathThrough([[0, 0], tensor]) })),
    shape("path", { class: "angle", d: pathThrough(between(34, angle)) }),
    shape("text", { x: 0, y: 22, class: "label" }, `${decimal((angle * 180) / Math.PI, 1)}°`),
    shape("path", { class: "line", d: pathThrough(along(straight)) }),
    shape("path", { class: "arc", d: pathThrough(along(curved)) }),
    ...tensors.flatMap((tensor, at) => endOf(tensor, names[at], at, angle)),
    dot("line", mixed(straight(t))),
    dot("arc", mixed(curved(t))),
  );
}

const between = (radius, angle) =>
  Array.from({ length: STEPS + 1 }, (_, at) => turn(radius, (at / STEPS - 0.5) * angle));

function endOf([x, y], name, at, angle) {
  const far = 12 + 4 * Math.cos(angle / 2);
  const anchor = at ? "start" : "end";
  const place = { x: x + (at ? far : -far), y: y - 6, "text-anchor": anchor, class: "label" };
  return [shape("circle", { cx: x, cy: y, r: 4, class: "end" }), shape("text", place, name)];
}

function dot(kind, [x, y]) {
  return shape("circle", { cx: x, cy: y, r: kind === "arc" ? 8 : 7, class: `dot ${kind}` });
}
