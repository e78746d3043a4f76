// Your own models. With the server: choose models, see plan and analysis, write the recipe, merge.
// Without: what to do for that, and an analysis file can be dropped on the page.
import { tellIn } from "../analysis/elements.js";
import { openAnalysisView, readFile } from "../analysis.js";
import { mountLocal } from "./own/local.js";

export const defaults = { "own.recipe": "" };

/** Have files that are chosen or dropped shown as an analysis. */
function acceptFiles(section, view) {
  const tell = (text) => tellIn(section.querySelector("#own-file-problem"), text);

  async function open(file) {
    try {
      view.show(await readFile(file));
      tell("");
      view.focus();
    } catch (error) {
      view.clear();
      tell(error.message);
    }
  }

  const input = section.querySelector("#own-file");
  input.addEventListener("change", () => {
    if (input.files.length) open(input.files[0]);
    input.value = "";  // so that the same file can be chosen again
  });
  const isFile = (event) => event.dataTransfer?.types.includes("Files");
  section.addEventListener("dragover", (event) => {
    if (!isFile(event)) return;
    event.preventDefault();
    section.dataset.over = "true";
  });
  section.addEventListener("dragleave", () => { delete section.dataset.over; });
  section.addEventListener("drop", (event) => {
    delete section.dataset.over;
    if (!isFile(event)) return;
    event.preventDefault();
    open(event.dataTransfer.files[0]);
  });
}

export function mount(section, page) {
  const local = section.querySelector("#own-choose") ? mountLocal(section, page) : null;
  const place = section.querySelector("#own-analysis");
  const view = openAnalysisView(place, { onTake: local?.takeRecipe });
  acceptFiles(section, view);
  local?.start(view);
}
