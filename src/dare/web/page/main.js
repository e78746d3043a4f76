// Starts the page: the state from the address, the engine, and every part in its section.
/* global darePage */
import { openEngine } from "./engines.js";
import { loadModel } from "./models.js";
import { breathe } from "./pace.js";
import { publishColours } from "./pictures.js";
import { createState } from "./state.js";
import * as arc from "./parts/arc.js";
import * as breaking from "./parts/breaking.js";
import * as drop from "./parts/drop.js";
import * as live from "./parts/live.js";
import * as own from "./parts/own.js";
import * as predict from "./parts/predict.js";
import * as signs from "./parts/signs.js";
import * as top from "./parts/top.js";

const parts = { drop, top, signs, arc, live, predict, breaking, own };
const defaults = Object.assign({}, ...Object.values(parts).map((part) => part.defaults));
const page = {
  state: createState(defaults),
  engine: openEngine(document.querySelector("meta[name=dare-engine]").content),
  loadModel,
  complain,
};

/** Show in a part's own section why it does not work. */
function complain(section, error) {
  const note = document.createElement("p");
  note.className = "failed";
  note.setAttribute("role", "alert");
  note.textContent = `This part does not work: ${error.message}`;
  section.append(note);
  console.error(error);
}

async function mountOne(name, part) {
  const section = document.getElementById(name);
  try {
    await part.mount(section, page);
  } catch (error) {
    complain(section, error);
  }
}

publishColours();
darePage.onTheme(publishColours);
const { drop: first, ...others } = parts;
await mountOne("drop", first);
const mounted = Object.entries(others).map(async ([name, part]) => {
  await breathe();  // what is there is painted before the next part begins
  await mountOne(name, part);
});
await Promise.all(mounted);
document.documentElement.dataset.ready = "true";
