export function openBrowserEngine() { return { kind: "browser" }; }
