"""Scores models and merges, several at a time."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from dare.demo.llama import Llama
from dare.demo.merges import CONFIG, Merge
from dare.demo.results import Score
from dare.demo.tasks import TASKS, held_out_english

MOST_WORKERS = 8
JOBS_FOR_A_WORKER = 8
"""A process takes a second to start: it must have enough to do."""


@dataclass(frozen=True)
class Job:
    """Weights, or a merge to make them, and what to measure."""

    weights: Path | Merge
    prompts: int
    english_bytes: int
    tasks: tuple[str, ...] = tuple(task.name for task in TASKS)


def measure(job: Job) -> Score:
    """Carry out a job."""
    with tempfile.TemporaryDirectory() as folder:
        weights = job.weights
        if isinstance(weights, Merge):
            weights = weights.carry_out(Path(folder) / "merged.safetensors")
        model = Llama(weights, CONFIG)
    correct = {
        task.name: 100 * model.share_right(task.examples("test", job.prompts))
        for task in TASKS
        if task.name in job.tasks
    }
    english = held_out_english()[: job.english_bytes]
    return Score(correct, model.bits_per_byte(english) if english else float("nan"))


def measure_all(jobs: Sequence[Job], advance: Callable[[], None]) -> list[Score]:
    """Carry out jobs in processes of their own, whose matrix products use one thread each.

    Threads that share a product wait for each other, which takes many times longer where other
    programs keep the cores busy.
    """
    scores = []
    workers = min(MOST_WORKERS, os.cpu_count() or 1, 1 + len(jobs) // JOBS_FOR_A_WORKER)
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_begin) as pool:
        try:
            for score in pool.map(measure, jobs):
                scores.append(score)
                advance()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return scores


def _begin() -> None:
    """In a process of its own: leave Ctrl-C to the one that started it, and take one thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threadpool_limits(limits=1, user_api="blas")
