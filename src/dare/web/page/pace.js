// When work is done that many small moves ask for.

/** Ask as often as you like: the work is done once, before the next picture is painted. */
export function oncePerFrame(work) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      work();
    });
  };
}

/**
 * Ask as often as you like: the work begins when nobody has asked for so long. It is called with a
 * signal, which is given when somebody asks again.
 */
export function whenRested(milliseconds, work) {
  let timer;
  let running = new AbortController();
  return () => {
    clearTimeout(timer);
    running.abort();
    timer = setTimeout(() => {
      running = new AbortController();
      work(running.signal);
    }, milliseconds);
  };
}

let finish;
/** Kept when all parts are in the page, and what takes time may begin. */
export const mounted = new Promise((resolve) => { finish = resolve; });
export const sayMounted = () => finish();

/** Let the browser paint and listen, then go on. */
export const breathe = () => new Promise((resolve) => { setTimeout(resolve); });
