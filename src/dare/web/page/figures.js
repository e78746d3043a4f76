// Figures by Vega-Lite, drawn again as the numbers behind them change.
/* global darePage */

let library = null;

/** The library is large, and loaded when the first figure is drawn. */
function loadLibrary() {
  library ??= new Promise((resolve, reject) => {
    if (window.vegaEmbed) return resolve();
    const script = document.createElement("script");
    script.src = new URL("vega.js", import.meta.url);
    script.addEventListener("load", resolve);
    script.addEventListener("error", () => reject(new Error("The drawing library did not load.")));
    document.head.append(script);
  });
  return library;
}

let unfinished = 0;

/** Say in the page that all figures so far are drawn, and in which colours. */
function finish() {
  unfinished -= 1;
  if (!unfinished) document.documentElement.dataset.drawn = darePage.shownTheme();
}

/**
 * Draw a figure into the element `chart-NAME`. Its data have names, by which `update` gives others.
 * Of updates that come faster than they can be drawn, only the last is drawn.
 */
export function addFigure(name, spec, description) {
  const whole = {
    width: "container",
    autosize: { type: "fit-x", contains: "padding" },
    datasets: {},
    config: { mark: { aria: false } },  // the description says it all
    ...spec,
    description,
  };
  let waiting = null;
  let failed = false;
  unfinished += 1;
  let drawing = loadLibrary()
    .then(() => {
      whole.datasets = { ...whole.datasets, ...waiting };
      waiting = null;
      return darePage.add(name, whole);
    })
    .catch((error) => {
      failed = true;
      document.getElementById(`chart-${name}`).textContent = error.message;
    })
    .finally(finish);

  async function drawLast() {
    if (!waiting) return;
    const datasets = waiting;
    waiting = null;
    await darePage.update(name, datasets);
  }

  return {
    update(datasets) {
      if (failed) return;
      const idle = !waiting;
      waiting = { ...waiting, ...datasets };
      if (idle) drawing = drawing.then(drawLast);
    },
    /** When everything that was asked for so far is drawn. */
    drawn: () => drawing,
  };
}
