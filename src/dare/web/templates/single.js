// Starts a page that is one file: makes a blob of each module, and of data when it is asked for.
"use strict";
(() => {
  const { modules, data } = darePage.read("embedded");
  const addresses = new Map();
  const addressOf = (part, type) => URL.createObjectURL(new Blob([part], { type }));

  /** The address of a file that would lie beside a module. */
  globalThis.dareFile = (path) => {
    const name = path.replace(/^(\.{1,2}\/)+/, "");
    if (!addresses.has(name)) {
      const bytes = Uint8Array.from(atob(data[name]), (character) => character.charCodeAt(0));
      addresses.set(name, addressOf(bytes, "application/octet-stream"));
    }
    return addresses.get(name);
  };

  for (const [name, text] of modules) {
    const whole = text.replace(/@@(.+?)@@/g, (_, other) => addresses.get(other));
    addresses.set(name, addressOf(whole, "text/javascript"));
  }
  import(addresses.get("main.js"));
})();
