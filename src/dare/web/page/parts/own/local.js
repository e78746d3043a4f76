// The part with the local engine: its pieces, and what they tell each other.
import { readAnalysis } from "../../analysis.js";
import { mountFolders } from "./folders.js";
import { mountJobs } from "./jobs.js";
import { mountPlan } from "./plan.js";
import { openRecipe } from "./recipe.js";
import { addressOf, ask } from "./server.js";
import { mountSettings } from "./settings.js";

/** Mounts all but the view of the analysis, which `start` is given. */
export function mountLocal(section, { state }) {
  const find = (name) => section.querySelector(`#own-${name}`);
  const recipe = openRecipe(state);
  const overwrite = find("overwrite");
  const problems = new Map();  // by what they are about

  function tell(text, about = "asked") {
    problems.set(about, text);
    const place = find("merge-problem");
    place.textContent = [...problems.values()].filter(Boolean).join(" ");
    place.hidden = !place.textContent;
  }

  const settings = mountSettings(section, recipe);

  function showPlan(plan) {
    settings.showPlan(plan);
    const problem = plan?.output_problem ?? "";
    find("output-problem").hidden = !problem;
    find("output-problem").textContent = problem;
    find("interrupted").hidden = !plan?.interrupted;
    find("interrupted").textContent = plan?.interrupted
      ? `An interrupted merge lies in ${plan.interrupted}. If it is this one, it goes on where it stopped.` : "";
    find("analyze").disabled = !plan || Boolean(plan.error);
    find("start").disabled = !plan || Boolean(plan.error || problem || !plan.output);
  }

  const plan = mountPlan(section, recipe, { onPlan: showPlan, overwrites: () => overwrite.checked });
  overwrite.addEventListener("change", plan.update);

  function takeRecipe(advised) {
    recipe.take(advised);
    find("recipe").scrollIntoView();
    find("method").focus();
  }

  function start(view) {
    async function showAnalysis(job, { focus = false } = {}) {
      const response = await fetch(addressOf(`jobs/${job.number}/analysis`));
      view.show(readAnalysis(await response.text()));
      if (focus) view.focus();
    }

    const jobs = mountJobs(section, {
      showAnalysis,
      tell,
      onEnd(job) {
        if (job.kind === "analyze" && job.state === "done") showAnalysis(job);
        if (job.kind !== "merge") return;
        plan.update();
        folders.refresh();
      },
    });
    find("analyze").addEventListener("click", () => jobs.post("jobs", { kind: "analyze", recipe: recipe.read() }));
    find("start").addEventListener("click", () => jobs.post("jobs", {
      kind: "merge", recipe: recipe.read(), overwrite: overwrite.checked,
    }));
  }

  const folders = mountFolders(section, recipe, {
    async onRecipe(path) {
      try {
        recipe.take((await ask(`recipe?path=${encodeURIComponent(path)}`)).recipe);
        folders.tell("");
      } catch (error) {
        folders.tell(error.message);
      }
    },
  });
  return { start, takeRecipe };
}
