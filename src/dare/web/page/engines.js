// The two engines: merges are made in this browser, or by the package on this machine.
//
// An engine has
//   kind                              "browser" or "local"
//   whyNot(method)                    null, or why it cannot do a method
//   merge(setting, signal)            the SHA-256 of the merged weights, as `dare verify` prints it
//   score(setting, amount, signal)    { right: {add, sort, say}, asked: {add, sort, say}, bitsPerByte }
//   write(setting, prompts, signal)   what the merged model writes after each prompt
// The last three return promises, which are rejected with an AbortError when the signal is given, and
// with an Error that has a message for the reader when the setting makes no sense.
//
// A setting is what a recipe says:
//   { base: "base", method: "dare+ties", scale: 1, seed: 42,
//     models: [{ name: "add", weight: null, drop_rate: null, seed: null }, …],
//     stages: { dare: { drop_rate: 0.5, rescale: true } } }
// null is what the method takes by itself. Without models it is the base as it is.
// An amount is { prompts: 25, englishBytes: 1024 }: prompts of each task, the first of prompts.json.
import { openBrowserEngine } from "./engine/browser.js";
import { openLocalEngine } from "./local.js";

export function openEngine(kind) {
  return kind === "local" ? openLocalEngine() : openBrowserEngine();
}
