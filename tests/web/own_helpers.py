"""What tests of own models share: models to merge, a merge that stands still, a page."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from dare.demo.merges import BASE, TUNED
from dare.output.journal import read_journal
from dare.recipe.document import request_from_document
from dare.recipe.recipe import Request
from dare.web.jobs import QueuedJob
from helpers import PATIENCE_SECONDS, save, wait_until

# ---------------------------------------------------------------- models and merges


def make_models(folder: Path) -> Path:
    """Fill a folder with the demonstration's models, and three of 16 chunks each."""
    for name, path in {"base": BASE, **TUNED}.items():
        shutil.copytree(path, folder / name)
    noise = np.random.default_rng(0)
    weights, *changes = (noise.normal(0, 0.02, (1024, 1024)).astype(np.float32) for _ in range(3))
    for name, change in zip(("base", "one", "two"), (0 * weights, *changes), strict=True):
        moved = {f"layers.{n}.weight": weights + change / (50 + n) for n in range(8)}
        save(folder / f"large-{name}.safetensors", moved)
    return folder


def large(models: Path, output: Path) -> dict[str, Any]:
    """A merge of several chunks."""
    return {
        "method": "dare+ties",
        "threads": 1,
        "verbose": False,
        "models": {
            "base_file": str(models / "large-base.safetensors"),
            "merge_files": [str(models / f"large-{name}.safetensors") for name in ("one", "two")],
            "output_file": str(output),
        },
    }


def small(models: Path, output: Path | None = None, **settings: object) -> dict[str, Any]:
    """A merge of two of the demonstration's models."""
    files = {
        "base_file": str(models / "base"),
        "merge_files": [str(models / "add"), str(models / "say")],
    }
    if output is not None:
        files["output_file"] = str(output)
    return {"method": "dare+sum", "dare": {"drop_rate": 0.5}, **settings, "models": files}


def recipe_of(document: Mapping[str, Any]) -> Request:
    return request_from_document(document, "test")


def run_a_little(job: QueuedJob) -> int:
    """Let the process of a merge journal some of its work and stand still; return its id."""
    output = Path(job.request["recipe"]["models"]["output_file"])
    journal = output.with_name(f"{output.name}.partial") / "journal.jsonl"
    wait_until(lambda: job.state != "waiting", "the start")
    pid = job.pid
    assert pid is not None, job.problem
    while not (journal.exists() and read_journal(journal.read_bytes()).records):
        works = bool(job.total_bytes)
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.01 if works else 0.03)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.03 if works else 0.005)  # in which the server hears of it
    assert job.done_bytes < job.total_bytes
    return pid


# ---------------------------------------------------------------- the page

MAIN = """
import * as own from "./parts/own.js";
import { createState } from "./state.js";
window.ownState = createState();
window.ownState.add(own.defaults);
own.mount(document.getElementById("own"), { state: ownState });
document.documentElement.dataset.ready = "true";
"""


@contextmanager
def own_alone(browser: Any, address: str, **settings: Any) -> Iterator[tuple[Any, list[str]]]:
    """The page in a new tab with its last part alone, and what it says on the console.

    The other parts compute for seconds, and are tested elsewhere.
    """
    context = browser.new_context(**settings)
    context.set_default_timeout(PATIENCE_SECONDS * 1000)
    context.route(
        "**/main.js", lambda route: route.fulfill(body=MAIN, content_type="text/javascript")
    )
    page = context.new_page()
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.goto(f"{address.partition('#')[0]}#own")
    page.wait_for_selector("html[data-ready=true]", state="attached")
    yield page, said
    context.close()
