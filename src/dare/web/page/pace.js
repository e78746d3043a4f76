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

/** Wait until all parts are in the page, and what takes time may begin. */
export async function mounted() {
  while (!document.documentElement.dataset.ready) await breathe(50);
}

/** Let the browser paint and listen, then go on. */
export const breathe = (milliseconds = 0) =>
  new Promise((resolve) => { setTimeout(resolve, milliseconds); });
