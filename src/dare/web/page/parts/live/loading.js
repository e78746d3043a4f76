// The page's tables, each loaded once, and when to begin with what takes time.
const loading = new Map();

/** A JSON file of the page: methods.json, prompts.json, measured.json, broken.json. */
export function loadJson(name) {
  if (!loading.has(name)) loading.set(name, load(name));
  return loading.get(name);
}

async function load(name) {
  const response = await fetch(new URL(`../../${name}`, import.meta.url));
  if (!response.ok) throw new Error(`${name} could not be loaded (${response.status}).`);
  return response.json();
}

/** Call back once, when an element comes near what is on the screen. */
export function whenNear(element, callback) {
  const watcher = new IntersectionObserver(
    (entries) => {
      if (!entries.some((entry) => entry.isIntersecting)) return;
      watcher.disconnect();
      callback();
    },
    { rootMargin: "300px" },
  );
  watcher.observe(element);
}

/** Mark an element as busy if that lasts longer than 0.3 s; returns what ends it. */
export function markBusy(element) {
  const timer = setTimeout(() => { element.dataset.busy = "true"; }, 300);
  return () => {
    clearTimeout(timer);
    delete element.dataset.busy;
  };
}

export const isAbort = (error) => error?.name === "AbortError";
