export function openLocalEngine() { return { kind: "local" }; }
