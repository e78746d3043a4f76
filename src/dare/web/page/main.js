// Starts the page: the state from the address, the engine, and every part in its section.
import { openEngine } from "./engines.js";
import { loadModel } from "./models.js";
import { createState } from "./state.js";
import * as arc from "./parts/arc.js";
import * as breaking from "./parts/breaking.js";
import * as drop from "./parts/drop.js";
import * as live from "./parts/live.js";
import * as own from "./parts/own.js";
import * as predict from "./parts/predict.js";
import * as signs from "./parts/signs.js";

const parts = { drop, signs, arc, live, predict, breaking, own };
const defaults = Object.assign({}, ...Object.values(parts).map((part) => part.defaults));
const page = {
  state: createState(defaults),
  engine: openEngine(document.querySelector("meta[name=dare-engine]").content),
  loadModel,
};
for (const [name, part] of Object.entries(parts)) {
  await part.mount(document.getElementById(name), page);
}
document.documentElement.dataset.ready = "true";
