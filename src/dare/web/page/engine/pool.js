// Workers that share the jobs of requests. A worker has one job at a time, so a request that is
// aborted stops within one; the latest request comes first, so that it waits for no earlier one.

export class Pool {
  #start;
  #free;  // workers that may still be started
  #idle = [];
  #requests = [];  // with jobs that no worker has yet, the latest first

  /** `start` makes a worker, when it is first needed, of which there will be at most `count`. */
  constructor(start, count) {
    this.#start = start;
    this.#free = count;
  }

  /** Post each message to some worker and call `done(message, answers)` for each that comes back. */
  run(messages, done, signal) {
    return new Promise((resolve, reject) => {
      const request = { messages: [...messages], left: messages.length, done, resolve, reject };
      const abort = () => this.#drop(request, new DOMException("Not needed any more.", "AbortError"));
      if (signal?.aborted) return abort();
      if (!messages.length) return resolve();
      signal?.addEventListener("abort", abort, { once: true });
      this.#requests.unshift(request);
      this.#work();
    });
  }

  #drop(request, error) {
    this.#requests = this.#requests.filter((other) => other !== request);
    request.reject(error);
  }

  /** Give jobs to workers, as long as there are both. */
  #work() {
    while (this.#requests.length && (this.#idle.length || this.#free)) {
      const [request] = this.#requests;
      const message = request.messages.shift();
      if (!request.messages.length) this.#requests.shift();
      this.#give(message, request);
    }
  }

  #give(message, request) {
    const worker = this.#idle.pop() ?? this.#open();
    worker.onmessage = ({ data }) => {
      this.#idle.push(worker);
      this.#take(message, request, data);
      this.#work();
    };
    worker.onerror = (event) => {
      worker.terminate();
      this.#free += 1;
      const reason = event.message ? `: ${event.message}` : "";
      this.#drop(request, new Error(`A worker of the page has failed${reason}.`));
      this.#work();
    };
    worker.postMessage(message);
  }

  #open() {
    this.#free -= 1;
    return this.#start();
  }

  #take(message, request, { answers, error }) {
    if (error !== undefined) return this.#drop(request, new Error(error));
    request.done(message, answers);
    request.left -= 1;
    if (!request.left) request.resolve();
  }
}
