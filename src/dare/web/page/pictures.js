// Matrices as pictures: one pixel for each element, in the theme's colours for opposites.
/* global darePage */
const SHADES = 255;
const tables = new Map();

/** The colours that the theme of now has for a purpose: "diverging", "category" or "ramp". */
export function themeColours(purpose) {
  return darePage.read("themes")[darePage.shownTheme()].range[purpose];
}

/** A colour of the page, such as "ink" or "line". */
export function pageColour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

const channels = (colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));

/** Red, green and blue of every shade from -1 to 1, three bytes each. */
function shades() {
  const theme = darePage.shownTheme();
  if (!tables.has(theme)) {
    const stops = themeColours("diverging").map(channels);
    const table = new Uint8ClampedArray(3 * (SHADES + 1));
    for (let shade = 0; shade <= SHADES; shade += 1) {
      const place = (shade / SHADES) * (stops.length - 1);
      const first = Math.min(Math.floor(place), stops.length - 2);
      for (let channel = 0; channel < 3; channel += 1) {
        const [from, to] = [stops[first][channel], stops[first + 1][channel]];
        table[3 * shade + channel] = Math.round(from + (place - first) * (to - from));
      }
    }
    tables.set(theme, table);
  }
  return tables.get(theme);
}

/**
 * Draw signed values row by row. `limit` and beyond has the full colour; `alpha`, if given, has for
 * each element how much it covers what is below, from 0 to 255.
 */
export function drawMatrix(canvas, values, columns, { limit, alpha = null }) {
  const rows = Math.ceil(values.length / columns);
  if (canvas.width !== columns || canvas.height !== rows) {
    canvas.width = columns;
    canvas.height = rows;
  }
  const context = canvas.getContext("2d", { willReadFrequently: true });  // so it stays in memory
  const image = context.createImageData(columns, rows);
  const pixels = image.data;
  const table = shades();
  const scale = SHADES / (2 * limit);
  for (let at = 0; at < values.length; at += 1) {
    const shade = Math.max(0, Math.min(SHADES, Math.round((values[at] + limit) * scale))) * 3;
    pixels[4 * at] = table[shade];
    pixels[4 * at + 1] = table[shade + 1];
    pixels[4 * at + 2] = table[shade + 2];
    pixels[4 * at + 3] = alpha ? alpha[at] : 255;
  }
  context.putImageData(image, 0, 0);
}

/** Give the style sheet the theme's colours of models, and of opposites from -1 to 1. */
export function publishColours() {
  const { style } = document.documentElement;
  themeColours("category").forEach((colour, at) => style.setProperty(`--model-${at}`, colour));
  style.setProperty("--opposites", themeColours("diverging").join(", "));
}

/** How far from zero all but a hundredth of the values are; never zero. */
export function usualSize(values) {
  const sizes = Float32Array.from(values, Math.abs).sort();
  return sizes[Math.floor(0.99 * (sizes.length - 1))] || sizes.at(-1) || 1;
}

const STEPS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };

/**
 * One mark on several pictures of the same shape, on one element or on `span` by `span` of them,
 * which are `framed` then.
 * The arrow keys move it (ten elements with shift), and the pointer: where it is, or with `press`
 * where it is pressed. `moved(row, column, byKeyboard)` is called then; the result sets the mark.
 */
export function addCursor(canvases, rows, columns, moved, options = {}) {
  const { span = 1, press = false, framed = span > 1 } = options;
  let place = [0, 0];
  const inside = (at, count) => Math.max(0, Math.min(count - span, Math.floor(at)));
  const marks = canvases.map((canvas) => {
    const mark = document.createElement("span");
    mark.className = framed ? "cursor around" : "cursor";
    canvas.parentElement.append(mark);
    return mark;
  });

  function set(row, column) {
    place = [inside(row, rows), inside(column, columns)];
    for (const { style } of marks) {
      style.left = `${(100 * (place[1] + span / 2)) / columns}%`;
      style.top = `${(100 * (place[0] + span / 2)) / rows}%`;
      if (framed) style.width = `${(100 * span) / columns}%`;
    }
  }

  function go(row, column, byKeyboard) {
    set(row, column);
    moved(...place, byKeyboard);
  }

  function point(event) {
    if (press && !event.buttons) return;
    const box = event.currentTarget.getBoundingClientRect();
    const row = (rows * (event.clientY - box.top)) / box.height;
    const column = (columns * (event.clientX - box.left)) / box.width;
    go(row - (span - 1) / 2, column - (span - 1) / 2, false);
  }

  for (const canvas of canvases) {
    canvas.addEventListener("pointermove", point);
    canvas.addEventListener("pointerdown", point);
    canvas.addEventListener("keydown", (event) => {
      const step = STEPS[event.key];
      if (!step) return;
      event.preventDefault();
      const far = event.shiftKey ? 10 : 1;
      go(place[0] + far * step[0], place[1] + far * step[1], true);
    });
  }
  return set;
}
