// The part with the server: its pieces, and what they tell each other.
import { tellIn } from "../../analysis/elements.js";
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
    tellIn(find("merge-problem"), [...problems.values()].filter(Boolean).join(" "));
  }

  const settings = mountSettings(section, recipe);
  let written = null;  // the output that this recipe has just been merged to
  recipe.on(() => { written = null; });

  function showPlan(plan, error) {
    settings.showPlan(plan);
    const problem = error ?? plan?.output_problem ?? "";
    const partial = plan?.interrupted;
    tellIn(find("output-problem"), plan && plan.output === written ? "" : problem);
    tellIn(find("interrupted"), partial
      ? `There is an interrupted merge in ${partial}. If the recipe is the same, “Merge” resumes it.`
      : "");
    find("analyze").disabled = !plan || Boolean(plan.error);
    find("start").disabled = !plan || Boolean(plan.error || problem || !plan.output);
  }

  const overwrites = () => overwrite.checked;
  const plan = mountPlan(section, recipe, { onPlan: showPlan, overwrites });
  overwrite.addEventListener("change", plan.update);

  const take = (advised) => recipe.take({ ...advised, output: undefined });  // which is chosen here

  function takeRecipe(advised) {
    take(advised);
    find("recipe").scrollIntoView();
    find("method").focus();
  }

  function start(view) {
    async function showAnalysis(job, { focus = false, isNew = false } = {}) {
      try {
        const response = await fetch(addressOf(`jobs/${job.number}/analysis`));
        const analysis = readAnalysis(await response.text());
        const { recipe: advised } = analysis.advice;
        view.show(analysis);
        if (isNew && recipe.isStart() && advised.models) take(advised);
        if (focus) view.focus();
      } catch (error) {
        tellIn(find("file-problem"), error.message);
      }
    }

    const jobs = mountJobs(section, {
      showAnalysis,
      takeRecipe,
      tell,
      onEnd(job) {
        if (job.kind === "analyze" && job.state === "done") showAnalysis(job, { isNew: true });
        if (job.kind !== "merge") return;
        if (job.state === "done") written = job.result.output;
        plan.update();
        folders.refresh();
      },
    });
    const add = (kind) => () =>
      jobs.post("jobs", { kind, recipe: recipe.read(), overwrite: overwrites() });
    find("analyze").addEventListener("click", add("analyze"));
    find("start").addEventListener("click", add("merge"));
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
