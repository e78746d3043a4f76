// The arc: two models' tensors in the plane that they span, SLERP and the straight line between.
import { choice, slider } from "../controls.js";
import { arc, cosineOf } from "../engine/merge.js";
import { addFigure } from "../figures.js";
import { lengthOf } from "../measures.js";
import { oncePerFrame } from "../pace.js";
import { changeOf, MODELS, TENSORS, weightsOf } from "../tensors.js";
import { decimal, percent, show } from "../words.js";
import { drawPlane } from "./arc/plane.js";

export const defaults = {
  "arc.first": "add",
  "arc.second": "sort",
  "arc.on": "deltas",
  "arc.t": 0.5,
  "arc.tensor": "model.layers.4.self_attn.o_proj.weight",
};

const PLACES = Array.from({ length: 41 }, (_, at) => at / 40);
const [ARC, LINE] = ["on the arc", "on the straight line"];
const SPACES = [["deltas", "what the models changed"], ["weights", "the whole weights"]];
const STRAIGHT = "Their cosine is above 0.9995: here the package takes the straight line too.";

export function mount(section, { state, loadModel, complain }) {
  addControls(section.querySelector(".panel"), state);
  const lengths = addFigure("arc-lengths", lengthsSpec(), "Length over t, on the arc and on the "
    + "straight line. The straight line sags in the middle.");
  const plane = section.querySelector("svg");
  let pair = null;  // two lengths and the cosine between them

  async function load() {
    const names = ["arc.first", "arc.second", "arc.on", "arc.tensor"];
    const [first, second, on, tensor] = names.map(state.get);
    const read = on === "weights" ? weightsOf : changeOf;
    const [a, b] = await Promise.all([first, second].map((name) => read(loadModel, name, tensor)));
    if ([first, second, on, tensor].some((value, at) => value !== state.get(names[at]))) return;
    pair = { lengths: [lengthOf(a), lengthOf(b)], cosine: cosineOf(a, b), names: [first, second] };
    drawLengths();
    redraw();
  }

  function drawLengths() {
    const rows = PLACES.flatMap((t) => [
      { t, what: ARC, length: lengthAt(pair, arc(pair.cosine, t)) / longer() },
      { t, what: LINE, length: lengthAt(pair, [1 - t, t]) / longer() },
    ]);
    lengths.update({ rows });
  }

  const longer = () => Math.max(...pair.lengths);

  function redraw() {
    if (!pair) return;
    const t = state.get("arc.t");
    const [curved, straight] = [arc(pair.cosine, t), [1 - t, t]];
    const [onArc, onLine] = [lengthAt(pair, curved), lengthAt(pair, straight)];
    drawPlane(plane, pair, t);
    lengths.update({
      here: [
        { t, what: ARC, length: onArc / longer() },
        { t, what: LINE, length: onLine / longer() },
      ],
    });
    const angle = (Math.acos(Math.min(1, Math.max(-1, pair.cosine))) * 180) / Math.PI;
    show(section, {
      angle: `${decimal(angle, 1)}°`,
      "angle-remark": `cosine ${decimal(pair.cosine, 4)}`,
      arc: decimal(onArc, 3),
      "arc-remark": `${decimal(curved[0], 3)} a + ${decimal(curved[1], 3)} b`,
      line: decimal(onLine, 3),
      "line-remark": `${decimal(straight[0], 2)} a + ${decimal(straight[1], 2)} b`,
      short: percent(1 - onLine / onArc, 2),
      note: Math.abs(pair.cosine) > 0.9995 ? STRAIGHT : "",
    });
  }

  state.on(["arc.first", "arc.second", "arc.on", "arc.tensor"], () => {
    load().catch((error) => complain(section, error));
  });
  state.on(["arc.t"], oncePerFrame(redraw));
  return load();
}

function addControls(place, state) {
  slider(place, state, "arc.t", {
    label: "t, from the first to the second", min: 0, max: 1, step: 0.01,
    format: (t) => decimal(t, 2),
  });
  choice(place, state, "arc.on", { label: "Between", options: SPACES });
  choice(place, state, "arc.first", { label: "First model, a", options: MODELS });
  choice(place, state, "arc.second", { label: "Second model, b", options: MODELS });
  choice(place, state, "arc.tensor", { label: "Matrix", options: TENSORS });
}

/** The length of x·a + y·b. */
function lengthAt({ lengths: [a, b], cosine }, [x, y]) {
  return Math.sqrt((x * a) ** 2 + (y * b) ** 2 + 2 * x * y * a * b * cosine);
}

function lengthsSpec() {
  const color = { field: "what", type: "nominal", title: null, scale: { domain: [ARC, LINE] } };
  const x = {
    field: "t", type: "quantitative", title: "t", scale: { domain: [0, 1] },
    axis: { tickCount: 5, grid: false },
  };
  const y = {
    field: "length", type: "quantitative", title: "length, in % of the longer",
    scale: { domain: [0, 1.05] }, axis: { format: "%", tickCount: 4 },
  };
  return {
    height: 220,
    datasets: { rows: [], here: [] },
    layer: [
      { data: { name: "rows" }, mark: "line", encoding: { x, y, color } },
      {
        data: { name: "here" },
        mark: { type: "point", filled: true, size: 120, opacity: 1 },
        encoding: {
          x, y, color,
          tooltip: [{ field: "what" }, { field: "t" }, { field: "length", format: ".2%" }],
        },
      },
    ],
  };
}
