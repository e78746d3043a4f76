// A guessed curve: right answers in per cent at some drop rates, kept in the state as one text.
export const RATES = [0, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.99];
const START = 50;

/** The values of a text such as "100-90-…"; what it lacks is in the middle. */
export function readGuess(text) {
  const values = text.split("-").map(Number);
  return RATES.map((_, index) => {
    const value = text === "" ? START : values[index] ?? START;
    return Number.isFinite(value) ? Math.max(0, Math.min(100, value)) : START;
  });
}

/** The guess of the question of now as a state of its own: `predict.y.0` is the first value. */
export function guessState(state) {
  const name = () => `predict.${state.get("predict.q")}`;
  const indexOf = (key) => Number(key.split(".").at(-1));
  return {
    get: (key) => readGuess(state.get(name()))[indexOf(key)],
    set(changes) {
      const values = readGuess(state.get(name()));
      const before = values.join("-");
      for (const [key, value] of Object.entries(changes)) values[indexOf(key)] = value;
      if (values.join("-") !== before) state.set({ [name()]: values.join("-") });
    },
    on: (_, listener) => state.on(["predict.q", "predict.on", "predict.off"], listener),
  };
}

/** How far a guess is from the measured rows: on average, and where it is farthest. */
export function offBy(guess, rows) {
  const all = RATES.map((p, index) => {
    const { mean } = rows.find((row) => row.p === p);
    return { p, guess: guess[index], mean, off: Math.abs(guess[index] - mean) };
  });
  return {
    mean: all.reduce((sum, { off }) => sum + off, 0) / all.length,
    worst: all.reduce((worst, one) => (one.off > worst.off ? one : worst)),
  };
}
