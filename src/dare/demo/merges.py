"""The demonstration's merges: which models, which methods, at which scale; and how they score.

A search can score them too, by prompts to choose by, and by others to test:

    dare search recipe.toml --eval dare.demo.merges:validation --holdout dare.demo.merges:holdout

The scores are shares of right answers on each task, and `english`, the bits needed for a byte of
English (lower is better); an item is a prompt. The objective is `add sort say`.

To show what spoils a merge, and what is found then, there are broken models too:

- `base-permuted` computes what the base computes, but its inner units stand in another order: what
  any other training run would have given. A fine-tune of the base is none of this one.
- `add-nan` is the fine-tune `add` with one weight that is not a number.
- `add-far` is `add` with 30 times its change, as after training that went on and on.
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from dare.api import merge
from dare.demo.llama import Floats, Llama, read_weights
from dare.demo.tasks import TASKS, Split, held_out_english
from dare.errors import OutputError
from dare.inputs.sources import open_source
from dare.output.targets import write_file

MODELS = Path(__file__).parent / "models"
BASE = MODELS / "base"
CONFIG = BASE / "config.json"
WEIGHTS = "model.safetensors"
TUNED = {task.name: MODELS / task.name for task in TASKS}

# λ by method and drop rate, found on validation prompts (training/README.md). A `linear`
# merge is the plain average; with another scale it would be a `sum`.
SCALES: dict[str, dict[float, float]] = {
    "linear": {0.0: 1.0},
    "sum": {0.0: 1.0, 0.1: 1.0, 0.3: 1.0, 0.5: 1.0, 0.7: 1.0, 0.8: 1.0, 0.9: 0.8, 0.95: 0.6},
    "ties": {0.0: 2.5, 0.1: 2.0, 0.3: 2.0, 0.5: 1.5, 0.7: 1.0, 0.8: 1.0, 0.9: 0.8, 0.95: 0.6},
    "trim+ties": {0.0: 1.5},
}


@dataclass(frozen=True)
class DemoMerge:
    """One way to merge models: DARE at a rate (0 for none), other stages, a scale, a seed."""

    combine: str  # the stages after DARE
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
        """Its name in tables."""
        return self.method + (f" p={self.drop_rate:g}" if self.drop_rate else "")

    def carry_out(self, output: Path) -> Path:
        """Write the merged model."""
        given: dict[str, Any] = {"method": self.method, "scale": self.scale, "seed": self.seed}
        if self.drop_rate:
            given |= {"drop_rate": self.drop_rate, "rescale": self.rescale}
        merge(base=BASE, models=self.models, output=output, overwrite=True, verbose=False, **given)
        return output

    def load(self) -> Llama:
        """Return the merged model."""
        with tempfile.TemporaryDirectory() as folder:
            return Llama(self.carry_out(Path(folder) / WEIGHTS), CONFIG)


def scale_for(combine: str, drop_rate: float) -> float:
    """Return the scale found for the nearest drop rate."""
    found = SCALES[combine]
    return found[min(found, key=lambda rate: abs(rate - drop_rate))]


# ---------------------------------------------------------------- scores


@dataclass(frozen=True)
class MeanScore:
    """A mean, and the standard deviation over seeds where there are several.

    >>> MeanScore.of([90.0, 94.0])
    MeanScore(mean=92.0, spread=2.8284271247461903)
    """

    mean: float
    spread: float | None

    @classmethod
    def of(cls, values: list[float]) -> MeanScore:
        """Sum up the values of several seeds."""
        return cls(fmean(values), stdev(values) if len(values) > 1 else None)


@dataclass(frozen=True)
class Score:
    """The scores of one set of weights."""

    # The percentage of held-out prompts that are answered exactly right, by task.
    correct: Mapping[str, float]
    # Bits for a byte of held-out English; less is better. NaN where it was not measured.
    bits_per_byte: float


@dataclass(frozen=True)
class Row:
    """A model, or a merge with one setting under several seeds."""

    name: str
    scores: tuple[Score, ...]
    method: str | None = None
    drop_rate: float = 0.0
    scale: float | None = None

    def correct(self, task: str) -> MeanScore:
        """Return the percentage right on one task."""
        return MeanScore.of([score.correct[task] for score in self.scores])

    @property
    def mean(self) -> MeanScore:
        """The percentage right over all tasks."""
        return MeanScore.of([fmean(score.correct.values()) for score in self.scores])

    @property
    def bits_per_byte(self) -> MeanScore:
        """Bits for a byte of held-out English."""
        return MeanScore.of([score.bits_per_byte for score in self.scores])


@dataclass(frozen=True)
class Curve:
    """Percentage right over drop rates."""

    name: str
    points: tuple[tuple[float, MeanScore], ...]


@dataclass(frozen=True)
class Texts:
    """The texts that one set of weights writes after the same few prompts."""

    name: str
    texts: tuple[str, ...]


@dataclass(frozen=True)
class DemoResult:
    """All numbers of a demonstration."""

    parameters: int
    prompts: Mapping[str, int]  # the number of held-out prompts that were scored, by task
    seeds: tuple[int, ...]
    rows: tuple[Row, ...]
    curves: tuple[Curve, ...]
    writings: tuple[Texts, ...]
    picture: str | None
    output: str | None
    seconds: float


PROMPTS = 100  # prompts of each task for a search, and on the page
ENGLISH_BYTES = 4096

Tensors = Mapping[str, NDArray[Any]]


def validation(tensors: Tensors, items: Sequence[str] | None = None) -> dict[str, Any]:
    """Score weights on the prompts to choose by."""
    return score(tensors, "validation", items, slice(0, ENGLISH_BYTES))


def holdout(tensors: Tensors, items: Sequence[str] | None = None) -> dict[str, Any]:
    """Score weights on other prompts, which choose nothing."""
    return score(tensors, "test", items, slice(ENGLISH_BYTES, 2 * ENGLISH_BYTES))


def score(
    tensors: Tensors, split: Split, items: Sequence[str] | None, english: slice
) -> dict[str, Any]:
    """Return the share of right answers on each task, each prompt's result, and English."""
    model = Llama(tensors, CONFIG)
    right: dict[str, float] = {}
    scores: dict[str, float] = {}
    for task in TASKS:
        named = {f"{task.name}/{asked.prompt}": asked for asked in task.examples(split, PROMPTS)}
        chosen = {name: asked for name, asked in named.items() if items is None or name in items}
        found = list(map(float, model.are_right(list(chosen.values()))))
        right |= zip(chosen, found, strict=True)
        scores[task.name] = fmean(found) if found else 0.0
    scores["english"] = model.bits_per_byte(held_out_english()[english])
    return {**scores, "items": right}


# ---------------------------------------------------------------- many at once

MOST_PROCESSES = 8
MEASUREMENTS_PER_PROCESS = 8  # a process takes a second to start: it must have enough to do


@dataclass(frozen=True)
class Measurement:
    """Weights, or a merge to make them, and the prompts to score them by."""

    weights: Path | DemoMerge
    prompts: int
    english_bytes: int
    tasks: tuple[str, ...] = tuple(task.name for task in TASKS)


def measure(measurement: Measurement) -> Score:
    """Score weights, after making them by a merge if need be."""
    weights = measurement.weights
    model = weights.load() if isinstance(weights, DemoMerge) else Llama(weights, CONFIG)
    correct = {
        task.name: 100 * model.share_right(task.examples("test", measurement.prompts))
        for task in TASKS
        if task.name in measurement.tasks
    }
    english = held_out_english()[: measurement.english_bytes]
    return Score(correct, model.bits_per_byte(english) if english else float("nan"))


def measure_all(
    measurements: Sequence[Measurement], advance: Callable[[list[Score]], None]
) -> list[Score]:
    """Measure in processes of their own, whose matrix products use one thread each.

    Threads that share a product wait for each other, which takes many times longer where other
    programs keep the cores busy.
    """
    scores: list[Score] = []
    wanted = 1 + len(measurements) // MEASUREMENTS_PER_PROCESS
    processes = min(MOST_PROCESSES, os.cpu_count() or 1, wanted)
    with ProcessPoolExecutor(processes, get_context("spawn"), initializer=_begin) as pool:
        try:
            for score in pool.map(measure, measurements):
                scores.append(score)
                advance(scores)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return scores


def _begin() -> None:
    """Prepare a process: leave Ctrl-C to the one that started it, and take one thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threadpool_limits(limits=1, user_api="blas")


# ---------------------------------------------------------------- models that spoil a merge

TIMES_TOO_FAR = 30
PERMUTATION_SEED = 1
NAN_AT = ("model.layers.2.mlp.up_proj.weight", 5000)

Weights = dict[str, Floats]


def permuted_base() -> Weights:
    """Return the base with the inner units of every layer in another order: the same function."""
    weights = read_weights(BASE)
    order = np.random.default_rng(PERMUTATION_SEED)
    for name, rows in weights.items():
        if name.endswith("mlp.gate_proj.weight"):
            layer = name.removesuffix("gate_proj.weight")
            units = order.permutation(len(rows))
            weights[name] = rows[units]
            weights[f"{layer}up_proj.weight"] = weights[f"{layer}up_proj.weight"][units]
            weights[f"{layer}down_proj.weight"] = weights[f"{layer}down_proj.weight"][:, units]
    return weights


def add_with_nan() -> Weights:
    """Return the fine-tune with one weight that is not a number."""
    weights = read_weights(TUNED["add"])
    name, element = NAN_AT
    weights[name].reshape(-1)[element] = np.nan
    return weights


def add_too_far() -> Weights:
    """Return the fine-tune with many times its change."""
    base, tuned = read_weights(BASE), read_weights(TUNED["add"])
    return {name: base[name] + TIMES_TOO_FAR * (tuned[name] - base[name]) for name in base}


BROKEN: Mapping[str, Callable[[], Weights]] = {
    "base-permuted": permuted_base,
    "add-nan": add_with_nan,
    "add-far": add_too_far,
}


def broken_model(name: str) -> bytes:
    """Return a broken model as a safetensors file, laid out as the base's."""
    file = bytearray((BASE / WEIGHTS).read_bytes())
    with open_source(BASE) as source:
        for tensor, values in BROKEN[name]().items():
            info = source.tensors[tensor]
            start = info.position(0)
            file[start : start + info.nbytes] = values.astype(info.dtype.numpy_type).tobytes()
    return bytes(file)


def write_models(folder: Path) -> list[str]:
    """Write the demonstration's models into a folder, each in its own, the broken ones too.

    Files that are there already must be the same.
    """
    homes = {"base": BASE, **TUNED, **dict.fromkeys(BROKEN, BASE)}
    for name, home in homes.items():
        for file in home.iterdir():
            is_broken = name in BROKEN and file.name == WEIGHTS
            content = broken_model(name) if is_broken else file.read_bytes()
            write_once(folder / name / file.name, content)
    return list(homes)


def write_once(path: Path, content: bytes) -> None:
    """Write a file that is not there yet, or is the same."""
    if not path.exists():
        write_file(path, content, kind=None)
    elif not path.is_file() or path.read_bytes() != content:
        remedy = "write the models into an empty folder"
        raise OutputError(f"{path}: exists already with other contents; {remedy}")
