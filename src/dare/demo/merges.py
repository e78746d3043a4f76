"""The demonstration's merges: which models, which methods, at which scale; and how they score."""

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
from dare.demo.results import Score
from dare.demo.tasks import TASKS, held_out_english

MODELS = Path(__file__).parent / "models"
BASE = MODELS / "base"
CONFIG = BASE / "config.json"
TUNED = {task.name: MODELS / task.name for task in TASKS}

SCALES: dict[str, dict[float, float]] = {
    "linear": {0.0: 1.0},
    "sum": {0.0: 1.0, 0.1: 1.0, 0.3: 1.0, 0.5: 1.0, 0.7: 1.0, 0.8: 1.0, 0.9: 0.8, 0.95: 0.6},
    "ties": {0.0: 2.5, 0.1: 2.0, 0.3: 2.0, 0.5: 1.5, 0.7: 1.0, 0.8: 1.0, 0.9: 0.8, 0.95: 0.6},
    "trim+ties": {0.0: 1.5},
}
"""λ by method and drop rate, found on validation prompts by training/choose_scales.py.

A `linear` merge is the plain average; with another scale it would be a `sum`.
"""


@dataclass(frozen=True)
class Merge:
    """One way to merge models: DARE at a rate (0 for none), other stages, a scale, a seed."""

    combine: str
    """The stages after DARE."""
    drop_rate: float = 0.0
    scale: float = 1.0
    seed: int = 42
    models: tuple[Path, ...] = tuple(TUNED.values())
    rescale: bool = True

    @property
    def method(self) -> str:
        """The recipe's method."""
        return f"dare+{self.combine}" if self.drop_rate else self.combine

    @property
    def label(self) -> str:
        """What it is called in tables."""
        return self.method + (f" p={self.drop_rate:g}" if self.drop_rate else "")

    def carry_out(self, output: Path) -> Path:
        """Write the merged model."""
        import dare

        stages = {"dare": {"drop_rate": self.drop_rate, "rescale": self.rescale}}
        recipe = dare.Recipe(
            base=BASE,
            models=list(self.models),
            output=output,
            method=self.method,
            stages=stages if self.drop_rate else {},
            scale=self.scale,
            seed=self.seed,
            verbose=False,
        )
        dare.merge(recipe, overwrite=True)
        return output


def scale_for(combine: str, drop_rate: float) -> float:
    """The scale found for the nearest drop rate.

    >>> scale_for("ties", 0.52) == SCALES["ties"][0.5]
    True
    """
    found = SCALES[combine]
    return found[min(found, key=lambda rate: abs(rate - drop_rate))]


# ---------------------------------------------------------------- scores

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
