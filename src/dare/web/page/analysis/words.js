// Numbers and names of an analysis in words, as the report writes them.

const NOTHING = "–";
const UNITS = ["", "k", "M", "B", "T"];
const SIZES = ["bytes", "kB", "MB", "GB", "TB"];
const ORIGINS = {
  unchanged: "unchanged",
  lora: "LoRA",
  full: "full fine-tune",
  unknown: "not known",
};

/** Three digits that count, without an exponent where it can be helped. */
function plain(value, trailing) {
  if (value === 0) return "0";
  const rounded = Number(value.toPrecision(3));
  if (Math.abs(rounded) < 1e-5) {
    const [mantissa, exponent] = value.toExponential(2).split("e");
    return `${Number(mantissa)}e${Number(exponent)}`;
  }
  const digits = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(rounded))));
  return rounded.toLocaleString("en-US", {
    minimumFractionDigits: trailing ? digits : 0,
    maximumFractionDigits: digits,
  });
}

const infinite = (value) => (value > 0 ? "∞" : "-∞");

/** A number with three digits that count. */
export function number(value) {
  if (Number.isNaN(value)) return NOTHING;
  return Number.isFinite(value) ? plain(value, false) : infinite(value);
}

/** A share or a ratio in per cent. */
export function share(value) {
  if (Number.isNaN(value)) return NOTHING;
  return Number.isFinite(value) ? `${plain(100 * value, true)}%` : infinite(value);
}

function inUnits(value, units) {
  let size = value;
  let place = 0;
  while (size >= 999.5 && place < units.length - 1) {
    size /= 1000;
    place += 1;
  }
  return [place ? String(Number(size.toPrecision(3))) : String(value), units[place]];
}

/** A large count in a few characters. */
export const amount = (value) => inUnits(value, UNITS).join("");

/** So many bytes. */
export const bytes = (value) => inUnits(value, SIZES).join(" ");

/** A time, in the unit that fits. */
export function duration(seconds) {
  if (seconds < 100) return `${Math.max(1, Math.round(seconds))} s`;
  return seconds < 6000 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

/** A cosine, always with its sign. */
export const cosine = (value) => (value < 0 ? "" : "+") + value.toFixed(3);

/** Names in a sentence. */
export function listed(names) {
  const last = names.at(-1) ?? "";
  return names.length > 1 ? `${names.slice(0, -1).join(", ")} and ${last}` : last;
}

/** So many things. */
export const times = (count, one, many = `${one}s`) => `${count} ${count === 1 ? one : many}`;

/** The last part of a path; a folder stands for the `model.safetensors` in it. */
export const shortName = (path) =>
  path.replace(/\/+$/, "").replace(/\/model\.safetensors$/, "").split("/").at(-1);

/** A layer's number, or a word for what stands in none. */
export const layerName = (layer) => (layer === -1 ? "outside" : String(layer));

/** How a model's delta was made, with its rank if that tells. */
export function origin(model) {
  const rank = model.likely_rank === null ? "" : `, rank ${model.likely_rank}`;
  return `${ORIGINS[model.origin] ?? model.origin}${rank}${model.is_adapter ? " (adapter)" : ""}`;
}

/** A notice in a line: subjects, text and remedy. */
export const told = ({ subjects, text, remedy }) => (subjects.length ? `${subjects.join(", ")}: ` : "")
  + [text, remedy].filter(Boolean).map((part) => `${part}.`).join(" ");
