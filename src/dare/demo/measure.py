"""Scores models and merges, several at a time."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

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
    with (
        _single_threaded_products(),
        ProcessPoolExecutor(workers, get_context("spawn"), initializer=_leave_interrupts) as pool,
    ):
        try:
            for score in pool.map(measure, jobs):
                scores.append(score)
                advance()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return scores


@contextmanager
def _single_threaded_products() -> Iterator[None]:
    """Keep the matrix products of processes started now from competing for cores."""
    names = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _leave_interrupts() -> None:
    """Leave Ctrl-C to the process that started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
