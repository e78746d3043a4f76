// Starts the page: the state from the address, the engine, and every part in its section.
/* global darePage */
import { openEngine } from "./engine/browser.js";
import { openCore } from "./engine/core.js";
import { breathe } from "./pace.js";
import { publishColours } from "./pictures.js";
import { createState } from "./state.js";

const page = {
  state: createState(),
  engine: openEngine(),
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

async function mountOne(section) {
  try {
    const [part] = await Promise.all([import(`./parts/${section.id}.js`), openCore()]);
    page.state.add(part.defaults);
    await part.mount(section, page);
  } catch (error) {
    complain(section, error);
  }
}

/** A link to other settings of this page changes them, and does not load the page again. */
document.addEventListener("click", (event) => {
  const link = event.target.closest('a[href^="?"]');
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  page.state.take(link.search);
});

publishColours();
darePage.onTheme(publishColours);
const parts = [...document.querySelectorAll("main > section")];
for (const section of parts.sort((one, other) => one.hidden - other.hidden)) {  // the one shown first
  await mountOne(section);
  await breathe();  // what is there is painted before the next part begins
}
document.documentElement.dataset.ready = "true";
