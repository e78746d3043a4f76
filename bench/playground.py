"""Measure the time from a new setting to its scores in the playground.

Chromium opens the page's modules from `dare playground` and asks them as the page does: three
models merged by dare+ties, a new drop rate each time. The first score of an engine is told apart:
its workers start, the models are loaded and, in the browser, code is compiled.

    python bench/playground.py
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Page, sync_playwright

AMOUNTS = {
    "25 prompts, 1,024 bytes": {"prompts": 25, "englishBytes": 1024},
    "100 prompts, 4,096 bytes": {"prompts": 100, "englishBytes": 4096},
}
OPEN = {
    f"{count} worker{'s' * (count > 1)}": (
        f"(await import('/engine/browser.js')).openEngine(undefined, {count})"
    )
    for count in (1, 2, 4)
}
MEASURE = """
async ({ method, rates, amount }) => {
  const models = ["add", "sort", "say"].map((name) => ({ name }));
  const times = [];
  for (const rate of rates) {
    const stages = { dare: { drop_rate: rate, rescale: true } };
    const setting = { base: "base", method, scale: 1, seed: 42, models, stages };
    const started = performance.now();
    if (amount) await window.engine.score(setting, amount);
    else await window.engine.merge(setting);
    times.push(performance.now() - started);
  }
  return times;
}
"""


@contextmanager
def playground() -> Iterator[str]:
    """The address of a running playground."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "dare", "playground", folder]
        command += ["--no-browser", "--port", "0", "--json"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["address"]
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


def measure(page: Page, name: str, method: str, rounds: int) -> None:
    """Print the times of one engine."""
    used = iter(range(1, 1000))

    def times(amount: Any, count: int) -> list[float]:
        rates = [next(used) / 1000 for _ in range(count)]
        given = {"method": method, "rates": rates, "amount": amount}
        found: list[float] = page.evaluate(MEASURE, given)
        return found

    def show(what: str, taken: list[float]) -> None:
        middle = statistics.median(taken)
        print(f"  {what:<32} {middle:6.0f} ms ({min(taken):.0f} to {max(taken):.0f})", flush=True)

    print(f"{name}, {method}")
    page.evaluate(f"async () => {{ window.engine = {OPEN[name]}; }}")
    small, *_ = AMOUNTS.values()
    show("the first score", times(small, 1))
    show("a merge and its SHA-256", times(None, rounds))
    for what, amount in AMOUNTS.items():
        show(what, times(amount, rounds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--method", default="dare+ties")
    parser.add_argument("--chromium", default=shutil.which("chromium"))
    parser.add_argument("--only", choices=[*OPEN])
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with playground() as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=options.chromium)
        for name in [options.only] if options.only else OPEN:
            page = browser.new_page()
            page.goto(address)  # exchanges the token for a cookie
            page.goto(f"http://{urlsplit(address).netloc}/prompts.json")  # where nothing else runs
            measure(page, name, options.method, options.rounds)
            page.close()
        browser.close()


if __name__ == "__main__":
    main()
