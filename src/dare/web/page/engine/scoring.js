// What scores and texts ask of a model, in jobs, and what the answers to them come to.
//
// A job is { kind, items }, with one answer for each item. The kinds, their items and answers:
//   right    [prompt, answer]    whether the model writes this answer
//   bits     text                the mean bits that it needs for a byte
//   texts    prompt              what it writes
// In all of them a character is a byte.
import { CONFIG } from "./llama.js";

const POSITIONS_AT_ONCE = 256;  // some 30 ms: few enough to stop soon, enough to be fast
const WRITTEN_BYTES = 40;

/** Items of one kind as jobs, each of items that are equally long, the longest job first. */
export function inJobs(kind, items) {
  const groups = new Map();
  for (const item of items) {
    const lengths = String([item].flat().map((text) => text.length));
    groups.set(lengths, [...(groups.get(lengths) ?? []), item]);
  }
  const jobs = [...groups.values()].flatMap((group) => {
    const atOnce = Math.max(1, Math.floor(POSITIONS_AT_ONCE / positionsOf(kind, group[0])));
    const count = Math.ceil(group.length / atOnce);
    return Array.from({ length: count }, (_, part) => ({
      kind,
      items: group.slice(part * atOnce, (part + 1) * atOnce),
    }));
  });
  const sizeOf = (job) => job.items.length * positionsOf(kind, job.items[0]);
  return jobs.sort((a, b) => sizeOf(b) - sizeOf(a));
}

function positionsOf(kind, item) {
  return [item].flat().join("").length + (kind === "texts" ? WRITTEN_BYTES : 0);
}

/** The answers that a model gives to a job. */
export function answersTo({ kind, items }, model) {
  if (kind === "right") return model.areRight(items);
  if (kind === "bits") return model.bitsPerByte(items);
  return model.write(items, WRITTEN_BYTES);
}

/** What an amount asks: examples by task, and windows of English as long as the context. */
export function itemsFor(prompts, amount) {
  const tasks = prompts.tasks.map(({ name, examples }) =>
    [name, examples.slice(0, amount.prompts)]);
  const count = Math.floor(Math.min(amount.englishBytes, prompts.english.length) / CONFIG.context);
  const windows = Array.from({ length: count }, (_, at) =>
    prompts.english.slice(at * CONFIG.context, (at + 1) * CONFIG.context));
  return { tasks, windows };
}

/** A score, from a function that gives the answer to an item. Without English its bits are null. */
export function sumUp({ tasks, windows }, answerTo) {
  const countRight = (examples) => examples.filter((item) => answerTo("right", item)).length;
  const bits = windows.reduce((sum, item) => sum + answerTo("bits", item), 0);
  return {
    right: Object.fromEntries(tasks.map(([name, examples]) => [name, countRight(examples)])),
    asked: Object.fromEntries(tasks.map(([name, examples]) => [name, examples.length])),
    bitsPerByte: windows.length ? bits / windows.length : null,
  };
}

/** A text that a reader typed as the bytes that models read: UTF-8, each byte a character. */
export function promptOf(text) {
  const bytes = new TextEncoder().encode(text);
  const most = CONFIG.context - WRITTEN_BYTES;
  if (!bytes.length || bytes.length > most) {
    throw new Error(`A prompt must have 1 to ${most} bytes; this one has ${bytes.length}.`);
  }
  return Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");
}

/** What a model wrote as text; bytes that are none become �. */
export function textOf(written) {
  const bytes = Uint8Array.from(written, (character) => character.charCodeAt(0));
  return new TextDecoder("utf-8", { ignoreBOM: true }).decode(bytes);
}
