// The folders that the user pointed to: what lies there, and what of it is chosen.
import { tellIn } from "../../analysis/elements.js";
import { bytes } from "../../analysis/words.js";
import { button, make } from "../../controls.js";
import { ask } from "./server.js";

const SAYS = { folder: "folder", recipe: "recipe", interrupted: "interrupted merge" };

const described = ({ kind, holds, nbytes }) =>
  kind === "model" ? `${holds}, ${bytes(nbytes)}` : SAYS[kind];

function labelled(element, label) {
  element.setAttribute("aria-label", label);
  return element;
}

export function mountFolders(section, recipe, { onRecipe }) {
  const find = (name) => section.querySelector(`#own-${name}`);
  let shown = "";  // the folder
  let turns = 0;
  let several = true;  // folders that the user pointed to
  const [path, up, list, problem] = ["path", "up", "entries", "open-problem"].map(find);

  const tell = (text) => tellIn(problem, text);

  /** What can be done with an entry, as buttons. */
  function actions(entry) {
    const place = make("span", { className: "buttons" });
    const act = (text, label, work) =>
      labelled(button(place, text, work), `${label} ${entry.name}`);
    if (entry.kind === "model") {
      act("Use as base", "Use as base:", () => choose(entry, recipe.setBase));
      act("Add", "Add model", () => choose(entry, recipe.addModel));
    }
    if (entry.kind === "recipe") act("Use", "Use recipe", () => onRecipe(entry.path));
    if (entry.opens) act("Open", "Open", () => open(entry.path, { focus: true }));
    return place;
  }

  /** A model is in a merge once: as the base or as a fine-tune. */
  function choose({ name, path: file }, take) {
    const isBase = recipe.read().models.base_file === file;
    if (isBase || recipe.files().includes(file)) {
      tell(`${name} is already chosen as ${isBase ? "the base" : "a model"}.`);
    } else {
      take(file);
    }
  }

  const row = (entry) => make("li", { dataset: { name: entry.name } },
    make("span", { className: "own-name" }, entry.name),
    make("span", { className: "own-kind" }, described(entry)),
    actions(entry));

  async function open(folder, { focus = false } = {}) {
    const turn = ++turns;
    try {
      const answer = await ask(folder ? `folders?path=${encodeURIComponent(folder)}` : "folders");
      if (turn !== turns) return;  // something else was opened since
      tell("");
      if (answer.path === null && answer.entries.length === 1) {
        several = false;
        await open(answer.entries[0].path, { focus });
        return;
      }
      show(answer);
      if (focus) (list.querySelector("button") ?? path).focus();
    } catch (error) {
      tell(error.message);
    }
  }

  function show({ path: folder, above, entries, more, found }) {
    find("folder").textContent = folder ?? "Your folders";
    if (document.activeElement !== path) path.value = found?.path ?? folder ?? "";
    shown = folder ?? "";
    up.hidden = folder === null || (above === null && !several);
    up.onclick = () => open(above, { focus: true });
    const rest = entries.filter((entry) => entry.path !== found?.path);
    const rows = [...(found ? [found] : []), ...rest].map(row);
    if (more) rows.push(make("li", {}, `and ${more} more; type the path to open one of them`));
    if (!rows.length) rows.push(make("li", { className: "own-nothing" }, "No models here."));
    list.replaceChildren(...rows);
  }

  function showChosen() {
    const { base_file: base, merge_files: entries } = recipe.read().models;
    find("base").textContent = base || "none yet";
    find("base").classList.toggle("own-nothing", !base);
    find("none").hidden = entries.length > 0;
    find("models").replaceChildren(...recipe.files().map((file, place) => {
      const remove = make("span", { className: "buttons" });
      labelled(button(remove, "Remove", () => {
        recipe.removeModel(place);
        (find("models").querySelector("button") ?? path).focus();
      }), `Remove ${file}`);
      return make("li", {}, make("span", { className: "own-name" }, file), remove);
    }));
  }

  find("go").addEventListener("submit", (event) => {
    event.preventDefault();
    open(path.value.trim(), { focus: true });
  });
  recipe.on(() => {
    tell("");
    showChosen();
  });
  showChosen();
  open("");
  return { tell, refresh: () => open(shown) };
}
