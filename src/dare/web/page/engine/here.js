// A stand-in for a worker where none can be started: in a page that is one file.
import { loadModel } from "../models.js";
import { createHandler, openKernels } from "./worker.js";

export function startHere() {
  const handle = createHandler(openKernels, loadModel);
  const worker = {
    postMessage(message) {
      setTimeout(() => handle(message, (data) => worker.onmessage({ data })));
    },
    terminate() {},
  };
  return worker;
}
