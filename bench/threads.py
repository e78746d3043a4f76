"""How a merge profits from threads: seconds inside `execute`, by method and number of threads.

    python bench/models.py /dev/shm/models --parameters 0.95e9 --models 3
    python bench/threads.py /dev/shm/models/llama-950m /dev/shm/merged --threads 1 2 4 8 16

Every merge is repeated in one process and the best counts, so that files are in memory. Beside
it stand the processor time, and how often one thread's time goes into it.
"""

from __future__ import annotations

import argparse
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dare
from dare import api

METHODS = ("dare+linear", "dare+ties", "trim+ties", "della+linear")


@dataclass(frozen=True)
class Run:
    """One merge."""

    execute_seconds: float
    processor_seconds: float
    merge_seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=Path, help="a folder with base and tuned-1, tuned-2, …")
    parser.add_argument("output", type=Path, help="where the merged model goes; it is replaced")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--repeat", type=int, default=2)
    options = parser.parse_args()
    print("| method | threads | execute s | processor s | merge s | times one thread |")
    print("|---|---|---|---|---|---|")
    for method in options.methods:
        alone = 0.0
        for threads in options.threads:
            runs = [merge(options, method, threads) for _ in range(options.repeat)]
            best = min(runs, key=lambda run: run.execute_seconds)
            alone = alone or best.execute_seconds
            figures = best.execute_seconds, best.processor_seconds, best.merge_seconds
            shown = " | ".join(f"{figure:.2f}" for figure in figures)
            print(f"| `{method}` | {threads} | {shown} | {alone / figures[0]:.1f} |", flush=True)


def merge(options: argparse.Namespace, method: str, threads: int) -> Run:
    """Merge all models there are, and time what `execute` takes of it."""
    shutil.rmtree(options.output, ignore_errors=True)
    recipe = dare.Request.of(
        base=options.models / "base",
        models=sorted(options.models.glob("tuned-*")),
        output=options.output,
        method=method,
        threads=threads,
        max_memory="16GB",
        verbose=False,
    )
    spent: list[float] = []

    def timed(execute: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **options: Any) -> Any:
            clocks = time.perf_counter, time.process_time
            before = [clock() for clock in clocks]
            records = execute(*given, **options)
            spent.extend(clock() - then for clock, then in zip(clocks, before, strict=True))
            return records

        return run

    with patch("dare.api.execute", timed(api.execute)):
        started = time.perf_counter()
        dare.merge(recipe)
        whole = time.perf_counter() - started
    return Run(*spent, whole)


if __name__ == "__main__":
    main()
