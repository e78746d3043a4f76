// What was used last is kept, so that going back to it is instant.

/** Values by key. Beyond `most` of them, the one that was not used for longest is forgotten. */
export class Kept {
  #most;
  #values = new Map();  // the last used at the end

  constructor(most) {
    this.#most = most;
  }

  /** The value of a key; it is made if there is none. */
  get(key, make) {
    const value = this.#values.get(key) ?? make();
    this.#values.delete(key);
    this.#values.set(key, value);
    if (this.#values.size > this.#most) this.#values.delete(this.#values.keys().next().value);
    return value;
  }

  forget(key) {
    this.#values.delete(key);
  }
}
