"""Measure what the playground shows before it computes: answers, curves, findings in broken models.

    python bench/playground_figures.py             # all; the curves take some minutes
    python bench/playground_figures.py opening     # all but the curves

Writes measured.json and broken.json into src/dare/web/page. Both are data of the package, and tests
measure parts of them again.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

import dare
from dare.demo.llama import Llama, read_weights
from dare.demo.merges import (
    BASE,
    CONFIG,
    ENGLISH_BYTES,
    PROMPTS,
    TUNED,
    DemoMerge,
    Measurement,
    Score,
    measure,
    measure_all,
    write_models,
)
from dare.demo.tasks import TASKS
from dare.errors import DareWarning
from dare.web.assets import PAGE

SEEDS = (42, 1042, 2042, 3042, 4042)
RATES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)


class Curve(NamedTuple):
    """Right answers over drop rates: of one fine-tune on its own task, or of all on all tasks."""

    name: str
    models: tuple[str, ...]
    combine: str
    rescale: bool = True
    task: str | None = None  # None is the mean of all

    def jobs(self, rate: float) -> list[Measurement]:
        """A job for each seed; one if there is no chance in it."""
        paths = tuple(TUNED[name] for name in self.models)
        tasks = tuple(TUNED) if self.task is None else (self.task,)
        return [
            Measurement(
                DemoMerge(self.combine, rate, 1.0, seed, paths, self.rescale), PROMPTS, 0, tasks
            )
            for seed in (SEEDS if rate else SEEDS[:1])
        ]


CURVES = (
    *(Curve(f"{name} alone", (name,), "sum", True, name) for name in TUNED),
    *(Curve(f"{name} alone, not rescaled", (name,), "sum", False, name) for name in TUNED),
    Curve("all three by dare+sum", tuple(TUNED), "sum"),
    Curve("all three by dare+ties", tuple(TUNED), "ties"),
)
BROKEN_MERGES = {  # base and models, by what is broken
    "wrong-base": ("base-permuted", "add", "sort", "say"),
    "nan": ("base", "add-nan", "sort", "say"),
    "too-far": ("base", "add-far", "sort", "say"),
}
BROKEN_SEED = 40  # with which the weight of `add-nan` that is not a number is kept


def measure_curves() -> dict[str, Any]:
    """Score the models, and merges of them at every drop rate."""
    models = [Measurement(path, PROMPTS, ENGLISH_BYTES) for path in (BASE, *TUNED.values())]
    jobs = [*models, *(job for curve in CURVES for rate in RATES for job in curve.jobs(rate))]
    scores = dict(
        zip(jobs, measure_all(jobs, lambda _: print(".", end="", flush=True)), strict=True)
    )
    return {
        "prompts": PROMPTS,
        "english_bytes": ENGLISH_BYTES,
        "seeds": SEEDS,
        "models": {
            name: {"right": scores[job].correct, "bits_per_byte": scores[job].bits_per_byte}
            for name, job in zip(("base", *TUNED), models, strict=True)
        },
        "curves": [_curve(curve, scores) for curve in CURVES],
    }


def _curve(curve: Curve, scores: Mapping[Measurement, Score]) -> dict[str, Any]:
    return {
        "name": curve.name,
        "models": curve.models,
        "method": f"dare+{curve.combine}",
        "rescale": curve.rescale,
        "scale": 1.0,
        "task": curve.task,
        "points": [
            {"drop_rate": rate, "right": [round(scores[job].mean, 3) for job in curve.jobs(rate)]}
            for rate in RATES
        ],
    }


class Opening(NamedTuple):
    """A merge that the page shows when it is opened; without models it is the base."""

    models: tuple[str, ...] = ()
    rate: float = 0.0
    combine: str = "sum"
    seed: int = SEEDS[0]
    dare: Mapping[str, Any] = {"rescale": True}

    @property
    def setting(self) -> dict[str, Any]:
        """The merge as the page's engine knows it."""
        return {
            "base": "base",
            "method": f"dare+{self.combine}",
            "scale": 1,
            "seed": self.seed,
            "models": [{"name": name} for name in self.models],
            "stages": {"dare": {"drop_rate": self.rate, **self.dare}},
        }

    @property
    def weights(self) -> Path | DemoMerge:
        """The model, or a merge to make it."""
        if self.rate:
            paths = tuple(TUNED[name] for name in self.models)
            return DemoMerge(self.combine, self.rate, 1.0, self.seed, paths)
        return TUNED[self.models[0]] if self.models else BASE

    def measure(self) -> dict[str, Any]:
        """Score it, and have it answer every prompt that the page opens with."""
        found: dict[str, Any] = {"setting": self.setting}
        weights = self.weights
        with tempfile.TemporaryDirectory() as folder:
            if isinstance(weights, DemoMerge):
                weights = weights.carry_out(Path(folder, "merged.safetensors"))
                found["sha256"] = dare.verify(weights, verbose=False).sha256
            score = measure(Measurement(weights, PROMPTS, ENGLISH_BYTES))
            written = Llama(weights, CONFIG).write(ASKED)
        found |= {"right": score.correct, "bits_per_byte": score.bits_per_byte}
        return {**found, "texts": dict(zip(ASKED, written, strict=True))}


MOST_ASKED = {"add": 8, "sort": 2, "say": 2}
ASKED = [
    *(asked.prompt for task in TASKS for asked in task.examples("test", MOST_ASKED[task.name])),
    "And God said unto ",
    "12+34=",
]
OPENING = (
    Opening(),
    *(Opening((name,)) for name in TUNED),
    Opening(("add",), 0.5),
    Opening(tuple(TUNED), 0.5),
    Opening(tuple(TUNED), 0.7, "ties", 40, {}),
)
ONE_WEIGHT = ("model.layers.0.self_attn.v_proj.weight", 52)  # where the models disagree


def measure_opening() -> dict[str, Any]:
    """What the page shows at once: one weight in all models, and the answers of some merges."""
    tensor, element = ONE_WEIGHT
    found = {
        name: float(read_weights(path)[tensor].reshape(-1)[element])
        for name, path in {"base": BASE, **TUNED}.items()
    }
    weight = {"tensor": tensor, "element": element, "values": found}
    with threadpool_limits(limits=1, user_api="blas"):  # more of them wait for each other
        return {"weight": weight, "opening": [one.measure() for one in OPENING]}


def find_broken() -> dict[str, Any]:
    """What an analysis finds in broken merges, and what a plan warns of."""
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore", DareWarning)
        folder = Path(name)
        write_models(folder)
        found = {case: _analysed(folder, names) for case, names in BROKEN_MERGES.items()}
        entries = [dare.ModelEntry(file=folder / name, seed=BROKEN_SEED) for name in TUNED]
        recipe = dare.Request.of(
            base=folder / "base", models=entries, method="dare+sum", verbose=False
        )
        warned = list(map(str, dare.plan(recipe).warnings))
        return {**found, "one-seed": {"seed": BROKEN_SEED, "warnings": warned}}


def _analysed(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    base, *models = (folder / name for name in names)
    readiness, _ = dare.judge(dare.analyze(base, models, verbose=False), method="dare+sum")
    shown = ("severity", "subjects", "text", "remedy")
    findings = [{name: getattr(one, name) for name in shown} for one in readiness.findings]
    command = " ".join(["dare analyze", *(f"demo-models/{name}" for name in names)])
    return {"verdict": str(readiness.verdict), "command": command, "findings": findings}


def main(what: Sequence[str]) -> None:
    """Measure, and write what was asked for."""
    stored = json.loads((PAGE / "measured.json").read_text("utf-8"))
    measured = stored if what else measure_curves()
    made = {"broken": find_broken(), "measured": measured | measure_opening()}
    for name, document in made.items():
        text = json.dumps(document, indent=1, ensure_ascii=False)
        (PAGE / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
