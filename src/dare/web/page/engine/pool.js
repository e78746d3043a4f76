// Workers that share the jobs of requests. A worker has one job at a time, so a request that is
// aborted stops within one; the latest request comes first, so that it waits for no earlier one.

export class Pool {
  #start;
  #free;  // how many workers may still be started
  #idle = [];
  #requests = [];  // with jobs that no worker has yet, the latest first

  /** `start` makes a worker when one is needed; there are at most `count`. */
  constructor(start, count) {
    this.#start = start;
    this.#free = count;
  }

  /** Post each message to some worker, and call `done(message, answers)` when its answer comes. */
  run(messages, done, signal) {
    return new Promise((resolve, reject) => {
      const request = { messages: [...messages], left: messages.length, done, resolve, reject };
      if (signal?.aborted) return reject(signal.reason);
      if (!messages.length) return resolve();
      signal?.addEventListener("abort", () => this.#drop(request, signal.reason), { once: true });
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
      this.#give(this.#idle.pop() ?? this.#open(), message, request);
    }
  }

  #open() {
    this.#free -= 1;
    return { worker: this.#start(), holds: [] };
  }

  #give(place, message, request) {
    const { worker, holds } = place;
    worker.onmessage = ({ data }) => {
      this.#idle.push({ worker, holds: data.holds });
      this.#take(message, request, data);
      this.#work();
    };
    worker.onerror = (event) => {
      worker.terminate();
      this.#free += 1;
      const reason = event.message ? `: ${event.message}` : "";
      this.#drop(request, new Error(`A background worker failed${reason}.`));
      this.#work();
    };
    const { tensors, ...rest } = message;
    worker.postMessage(holds.includes(message.key) ? rest : message);
  }

  #take(message, request, { answers, error }) {
    if (error !== undefined) return this.#drop(request, new Error(error));
    request.done(message, answers);
    request.left -= 1;
    if (!request.left) request.resolve();
  }
}
