// What the reader has set, as values by name. All that is not at its default stands in the address,
// so that a link keeps it: `?drop.p=0.5&live.m=dare%2Bties`.

const read = (text, like) =>
  typeof like === "number" ? Number(text) : typeof like === "boolean" ? text === "true" : text;

/** Values by name, of the types that their defaults have: numbers, booleans and texts. */
export function createState() {
  const defaults = {};
  const values = {};
  const listeners = [];
  const given = new Map(new URLSearchParams(location.search));  // what nobody has asked for yet
  let writing = 0;

  function write() {
    writing = 0;
    const kept = new URLSearchParams([...given]);
    for (const [name, value] of Object.entries(values)) {
      if (value !== defaults[name]) kept.set(name, value);
    }
    const query = kept.toString();
    history.replaceState(null, "", `${location.pathname}${query && `?${query}`}${location.hash}`);
  }

  return {
    get: (name) => values[name],

    /** Values that there are from now on: as the address has them, or their defaults. */
    add(others) {
      for (const [name, like] of Object.entries(others)) {
        const value = given.has(name) ? read(given.get(name), like) : like;
        defaults[name] = like;
        values[name] = Number.isNaN(value) ? like : value;
        given.delete(name);
      }
    },

    /** Change values, and call everybody who listens to one of them once. */
    set(changes) {
      const changed = Object.keys(changes).filter((name) => values[name] !== changes[name]);
      if (!changed.length) return;
      Object.assign(values, changes);
      writing ||= setTimeout(write, 150);  // browsers refuse some hundred in half a minute
      for (const { names, listener } of listeners) {
        if (names.some((name) => changed.includes(name))) listener();
      }
    },

    /** Call back when one of these changes. */
    on(names, listener) { listeners.push({ names, listener }); },

    /** Set everything back to what it was. */
    reset() { this.set(defaults); },

    /** Set what the query of a link says. */
    take(query) {
      const known = [...new URLSearchParams(query)].filter(([name]) => name in defaults);
      this.set(Object.fromEntries(known.map(([name, text]) => [name, read(text, defaults[name])])));
    },

    /** The address that keeps everything as it is now. */
    link() {
      write();
      return location.href;
    },
  };
}
