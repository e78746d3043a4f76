// What happens after a change: rough scores first, then texts and digest, then full scores.
/* global darePage */
import { isAbort, markBusy } from "./loading.js";
import { BASE_ALONE, FULL, inPercent, QUICK } from "./measuring.js";
import { percent } from "./numbers.js";

/** A function that fills in what a setting gives; `views` are the cards that show it. */
export function follower(measurer, views, complain) {
  const { scores, samples, asked, code, curve } = views;

  async function showScore(setting, amount, signal) {
    const score = await measurer.score(setting, amount, signal);
    const english = { prompts: 1, englishBytes: amount.englishBytes };
    const base = measurer.seen(BASE_ALONE, english);
    scores.show(score, amount, base?.bitsPerByte);
    curve.mark(setting, score);
    if (!base) measureBase(english);
  }

  /** The base's English is measured once, and not waited for. */
  async function measureBase(english) {
    const base = await measurer.score(BASE_ALONE, english).catch(() => null);
    if (base) scores.compareWithBase(base.bitsPerByte, english.englishBytes);
  }

  return async (setting, signal) => {
    const ready = markBusy(scores.place);
    try {
      await showScore(setting, measurer.seen(setting, FULL) ? FULL : QUICK, signal);
      samples.show(await measurer.write(setting, samples.prompts, signal));
      asked.ask();
      code.showDigest(setting.models.length ? await measurer.merge(setting, signal) : "–");
      code.showWarnings(await measurer.warnings(setting, signal));
      await showScore(setting, FULL, signal);
      announce(measurer.seen(setting, FULL));
    } catch (error) {
      if (!isAbort(error)) complain(error.message);
    } finally {
      ready();
    }
  };
}

function announce(score) {
  const { tasks } = inPercent(score);
  const words = Object.entries(tasks).map(([task, value]) => `${task} ${percent(value)}`);
  darePage.say(`Right answers: ${words.join(", ")}.`);
}
