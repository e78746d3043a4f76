// Draws the figures in the page's colours. A page's own script, which comes next, uses `darePage`.
"use strict";
const darePage = (() => {
  const read = (name) => JSON.parse(document.getElementById(name).textContent);
  const figures = read("figures").map((figure) => ({ ...figure, updates: {} }));
  const themes = read("themes");
  const theme = document.getElementById("theme");
  const status = document.getElementById("status");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const views = new Map();
  const chosen = new Map();  // by figure: what was picked in its own lists, for the next drawing
  const shared = new Map();  // signals that all figures have
  const listeners = [];  // called with the theme's name when the colours have changed

  const shownTheme = () => {
    const picked = root.dataset.theme;
    return picked === "auto" ? (system.matches ? "dark" : "light") : picked;
  };

  // What is folded or in another tab has no width yet: it is drawn when it is opened.
  const isOpen = (figure) =>
    !document.getElementById(`chart-${figure.name}`)?.closest("[hidden], details:not([open])");

  function keepChoices(figure, view) {
    const picked = chosen.get(figure.name) ?? new Map();
    chosen.set(figure.name, picked);
    for (const [name, value] of picked) view.signal(name, value);
    for (const { name, bind } of figure.spec.params ?? []) {
      if (bind?.input) view.addSignalListener(name, (_, value) => picked.set(name, value));
    }
  }

  async function draw(figure, name) {
    figure.theme = name;
    const place = document.getElementById(`chart-${figure.name}`);
    views.get(figure.name)?.finalize();
    const { view } = await vegaEmbed(place, figure.spec, {
      mode: "vega-lite",
      renderer: "svg",
      actions: false,
      config: themes[name],
      tooltip: { theme: name },
    });
    views.set(figure.name, view);
    for (const [key, rows] of Object.entries(figure.updates)) view.data(key, rows);
    keepChoices(figure, view);
    for (const [signal, value] of shared) view.signal(signal, value);
    await view.runAsync();
    await view.resize().runAsync();  // a legend of several rows needs a second look
    place.dataset.drawn = name;
  }

  async function drawAll() {
    const name = shownTheme();
    root.dataset.drawn = "";
    for (const listener of listeners) listener(name);
    for (const figure of figures.filter(isOpen)) await draw(figure, name);
    if (name !== shownTheme()) return;
    root.dataset.drawn = name;
  }

  /** Draw what has been opened, and fit the rest to its place. */
  function fit() {
    for (const figure of figures.filter(isOpen)) {
      if (figure.theme !== shownTheme()) draw(figure, shownTheme());
      else views.get(figure.name)?.resize().runAsync();
    }
  }

  function add(name, spec) {
    const figure = { name, spec, updates: {} };
    figures.push(figure);
    return isOpen(figure) && draw(figure, shownTheme());
  }

  async function update(name, datasets) {
    const { updates } = figures.find((figure) => figure.name === name);
    Object.assign(updates, datasets);  // for the next drawing too
    const view = views.get(name);
    for (const [key, rows] of Object.entries(datasets)) view?.data(key, rows);
    await view?.runAsync();
  }

  async function setSignal(name, value) {
    shared.set(name, value);
    for (const view of views.values()) await view.signal(name, value).runAsync();
    window.dispatchEvent(new Event("resize"));
  }

  function remember(value) {
    try {
      localStorage.setItem("dare-theme", value);
    } catch {
      // The page still has the colours, until it is closed.
    }
  }

  async function save(button) {
    const { figure, format } = button.dataset;
    const address = await views.get(figure).toImageURL(format, 2);
    const link = document.createElement("a");
    link.download = `${figure}.${format}`;
    link.href = address;
    link.click();
    status.textContent = `Saved ${link.download}.`;
  }

  async function copy(button) {
    const code = document.getElementById(button.dataset.copies);
    try {
      await navigator.clipboard.writeText(code.textContent);
      status.textContent = button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(code);
      status.textContent = button.textContent = "Selected";
    }
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button?.dataset.format) save(button);
    else if (button?.dataset.copies) copy(button);
    else if (button?.dataset.resets) {
      const name = button.dataset.resets;
      draw(figures.find((figure) => figure.name === name), shownTheme());
    }
  });
  document.addEventListener(
    "toggle",
    (event) => {
      if (event.target.open) fit();
    },
    true,  // toggle does not bubble
  );
  // The contents say where one is.
  const links = new Map();
  for (const link of document.querySelectorAll("nav li a")) links.set(link.hash.slice(1), link);
  const seen = new IntersectionObserver(
    (entries) => {
      for (const entry of entries.filter((found) => found.isIntersecting)) {
        for (const [name, link] of links) {
          if (name === entry.target.id) link.setAttribute("aria-current", "true");
          else link.removeAttribute("aria-current");
        }
      }
    },
    { rootMargin: "-20% 0px -75% 0px" },
  );
  for (const name of links.keys()) seen.observe(document.getElementById(name));

  let timer;
  window.addEventListener("resize", () => {
    clearTimeout(timer);
    timer = setTimeout(fit, 150);
  });
  theme.value = root.dataset.theme;
  theme.addEventListener("change", () => {
    root.dataset.theme = theme.value;
    remember(theme.value);
    drawAll();
  });
  system.addEventListener("change", drawAll);
  return {
    read,
    drawAll,
    add,
    update,
    shownTheme,
    setSignal,
    view: (name) => views.get(name),
    onTheme: (listener) => { listeners.push(listener); },
    say: (text) => { status.textContent = text; },
  };
})();
