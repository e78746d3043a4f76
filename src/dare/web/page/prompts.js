// What the models are asked, loaded when somebody first asks for it.
let loading;

/** { tasks: [{ name, title, examples: [[prompt, answer], …] }, …], english }. */
export function loadPrompts() {
  loading ??= load();
  return loading;
}

async function load() {
  const response = await fetch(new URL("prompts.json", import.meta.url));
  if (!response.ok) {
    loading = undefined;
    throw new Error(`The prompts could not be loaded (${response.status}).`);
  }
  return response.json();
}

/** The first examples of a task. */
export async function examplesOf(task, count) {
  const { tasks } = await loadPrompts();
  return tasks.find(({ name }) => name === task).examples.slice(0, count);
}
