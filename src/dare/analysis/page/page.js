// Draws the figures in the page's colours and brings out the model that is picked.
"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const themes = JSON.parse(document.getElementById("themes").textContent);
  const picker = document.getElementById("model");
  const theme = document.getElementById("theme");
  const status = document.getElementById("status");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const views = new Map();
  const kinds = new Map();

  const shownTheme = () => {
    const chosen = root.dataset.theme;
    return chosen === "auto" ? (system.matches ? "dark" : "light") : chosen;
  };

  async function draw(figure, name) {
    const place = document.getElementById(`chart-${figure.name}`);
    views.get(figure.name)?.finalize();
    const shown = await vegaEmbed(place, figure.spec, {
      mode: "vega-lite",
      renderer: "svg",
      actions: false,
      config: themes[name],
      tooltip: { theme: name },
    });
    views.set(figure.name, shown.view);
    const kind = kinds.get(figure.name);
    if (kind) shown.view.signal("kind", kind);
    if (figure.spec.params.some((param) => param.name === "kind")) {
      shown.view.addSignalListener("kind", (_, value) => kinds.set(figure.name, value));
    }
    await shown.view.signal("model", picker.value).runAsync();
    await shown.view.resize().runAsync();  // a legend of several rows needs a second look
    place.dataset.drawn = name;
  }

  async function drawAll() {
    const name = shownTheme();
    root.dataset.drawn = "";
    for (const figure of figures) await draw(figure, name);
    if (name !== shownTheme()) return;
    root.dataset.drawn = name;
  }

  async function pick() {
    for (const element of document.querySelectorAll("[data-models]")) {
      const names = JSON.parse(element.dataset.models);
      element.hidden = Boolean(picker.value) && !names.includes(picker.value);
    }
    for (const row of document.querySelectorAll("tr[data-model]")) {
      row.classList.toggle("chosen", row.dataset.model === picker.value);
    }
    for (const view of views.values()) await view.signal("model", picker.value).runAsync();
    window.dispatchEvent(new Event("resize"));
    status.textContent = picker.value
      ? `The figures show ${picker.value}.`
      : "The figures show all models.";
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
  // The contents say where one is.
  const links = new Map();
  for (const link of document.querySelectorAll("nav a")) links.set(link.hash.slice(1), link);
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
    timer = setTimeout(() => {
      for (const view of views.values()) view.resize().runAsync();
    }, 150);
  });
  picker.addEventListener("change", pick);
  theme.value = root.dataset.theme;
  theme.addEventListener("change", () => {
    root.dataset.theme = theme.value;
    remember(theme.value);
    drawAll();
  });
  system.addEventListener("change", drawAll);
  drawAll().then(pick);
})();
