"""Three ways of merging on sets of models that were used for no choice.

    python experiments/unseen.py --device cuda --jobs 8      # unseen.json and unseen.md in results
    python experiments/unseen.py --set tokens --quick        # one of them, tiny, to try the code

The ways are the advice (by weights alone), the average at five scales and the default search (both
on validation items). They are held against the average, the sum, the base and the best single
model (on validation items). All of these are scored once on test items that nobody saw.

The results have eight sets more, of models of transformers; README.md says where these are made.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from evidence import balance, with_minus
from tables import table
from torch import Tensor
from tuning import Tune, Weights, Workshop
from worlds import UNSEEN

import dare
from dare.analysis.readiness import body_of
from dare.api import make_request
from dare.recipe.recipe import Recipe
from dare.recipe.settings import with_settings
from dare.studies.results import ALONE, Role
from dare.studies.space import baseline_recipes, recipe_of
from run import write

HERE = Path(__file__).parent
SCALES = (0.5, 0.7, 1.0, 1.5, 2.2)
WAYS = "advice", "five scales", "search"
RIVALS = "average", "sum", "base", "best single"
COUNTS = {"validation": 400, "test": 1000}
"""Items of a task."""
MINUTES = 1.0
"""Of a search."""
RESAMPLES = 2000
HELD_OUT_OF = 3
"""Of the validation items: a search may look at one in so many at its end only."""
QUICK = 0.02
"""The part of all steps and minutes that is enough to try the code."""
Items = dict[str, np.ndarray]
"""The scores of each task's items, in points."""

PLANS = {
    "computers": [Tune(task) for task in UNSEEN["computers"].tasks],
    "movies": [Tune(task, "faint") for task in UNSEEN["movies"].tasks],
    "tokens": [Tune(task, "light") for task in UNSEEN["tokens"].tasks[:4]],
    "graphs": [
        *(Tune(task, "light") for task in UNSEEN["graphs"].tasks[:3]),
        Tune("triangles", "light", way="opposed"),
    ],
}
"""By world; what a merge of these models should be able to do are their tasks."""


class Scorer:
    """The models of a plan, and candidates as arrays, scored by a function."""

    def __init__(self, name: str, folder: Path, device: str, part: float) -> None:
        world = UNSEEN[name]
        steps = {n: max(20, round(part * getattr(world, n))) for n in ("base_steps", "steps")}
        self.shop = Workshop(replace(world, **steps), folder, device)
        self.shop.base()
        for tune in PLANS[name]:
            self.shop.make(tune)
        self.files = [str(self.shop.file(n)) for n in ("base-0", *(t.name for t in PLANS[name]))]
        tasks = dict.fromkeys(tune.task for tune in PLANS[name])
        self.items = {
            side: {task: self.shop.items(task, side, count) for task in tasks}
            for side, count in COUNTS.items()
        }
        chosen, held = (partial(self._named, is_held=is_held) for is_held in (False, True))
        self.asked: dict[str, Any] = {
            "evaluate": lambda tensors, items=None: chosen(tensors, items),
            "holdout": lambda tensors, items=None: held(tensors, items),
        }
        """What a search is given."""

    def score(self, arrays: Mapping[str, Any], side: str) -> Items:
        """The scores of a candidate, by task."""
        weights = {k: torch.from_numpy(np.array(v)).to(self.shop.device) for k, v in arrays.items()}
        return {task: self._of(weights, *batch) for task, batch in self.items[side].items()}

    @torch.inference_mode()
    def _of(self, weights: Weights, inputs: Tensor, answers: Tensor) -> np.ndarray:
        if not answers.is_floating_point():
            return self.shop.right(weights, inputs, answers)
        errors = (self.shop.answers(weights, inputs) - answers)[:, 0] ** 2
        return 100 * (1 - errors / answers.var()).cpu().numpy()  # their mean is R²

    def _named(self, arrays: Any, items: Sequence[str] | None, *, is_held: bool) -> dict[str, Any]:
        found = {
            f"{task}/{number}": float(value)
            for task, values in self.score(arrays, "validation").items()
            for number, value in enumerate(values)
            if (number % HELD_OUT_OF == 0) == is_held
        }
        return {"items": found if items is None else {item: found[item] for item in items}}


# ---------------------------------------------------------------- the comparison


def compare(name: str, folder: Path, device: str, part: float) -> dict[str, Any]:
    """Choose on validation items, then score on test items."""
    seconds, began = {}, time.perf_counter()

    def lap(name: str) -> None:
        seconds[name] = round(time.perf_counter() - began - sum(seconds.values()), 1)

    scorer = Scorer(name, folder, device, part)
    base, *models = scorer.files
    plain = make_request(None, base=base, models=models).recipe
    held = dare.Candidates(plain)
    lap("models")
    analysis = dare.analyze(base, models, verbose=False)
    advice = dare.advise(analysis)
    lap("advice")
    recipes = dict(baseline_recipes(plain))
    for scale in SCALES:
        recipes[f"{scale:g}"] = with_settings(recipes[Role.AVERAGE], {"scale": scale})
    chosen: dict[str, Recipe] = {n: recipes[n] for n in (Role.AVERAGE, Role.SUM, Role.BASE)}
    scored: dict[str, Items] = {}
    for way, among in (
        ("best single", [name for name in recipes if name.endswith(ALONE)]),
        ("five scales", [f"{scale:g}" for scale in SCALES]),
    ):
        scored |= {n: scorer.score(held.make(recipes[n]).arrays, "validation") for n in among}
        chosen[way] = recipes[max(among, key=lambda n: mean(scored[n]))]
        lap(way)
    advised = make_request(advice.recipe).recipe if advice.recipe else recipes[Role.BASE]
    found = dare.search(
        base=base,
        models=models,
        study=folder / "study.db",
        minutes=MINUTES * part,
        verbose=False,
        **scorer.asked,
    )
    lap("search")
    best = found.conclusion.best
    assert best is not None, found.conclusion.failure
    chosen |= {"advice": advised, "search": recipe_of(found.data, best)}
    tested = {n: scorer.score(held.make(recipe).arrays, "test") for n, recipe in chosen.items()}
    lap("test")
    return {
        "family": "network",
        "tasks": list(tested["search"]),
        "models": [tune.name for tune in PLANS[name]],
        "changes": [round(body_of(model).ratio, 5) for model in analysis.models],
        "cosines": [round(pair.total.cosine, 3) for pair in analysis.pairs],
        "left_out": list(advice.left_out),
        "validation": {n: rounded(items) for n, items in scored.items()},
        "chosen": {n: told(recipe) for n, recipe in chosen.items()},
        "answer": str(found),
        "trials": len(found.data.trials),
        "test": {n: rounded(items) for n, items in tested.items()},
        "examples": {task: len(items) for task, items in tested["search"].items()},
        "against": {
            way: {
                rival: difference(tested[way], tested[rival])
                for rival in (*RIVALS, *WAYS)
                if rival != way
            }
            for way in WAYS
        },
        "seconds": seconds,
    }


def mean(items: Items) -> float:
    """The mean over tasks."""
    return float(np.mean([values.mean() for values in items.values()]))


def rounded(items: Items) -> dict[str, float]:
    """The score of each task, and their mean."""
    scores = {task: round(float(values.mean()), 2) for task, values in items.items()}
    return {**scores, "mean": round(mean(items), 2)}


def told(recipe: Recipe) -> str:
    """What a recipe does, in a line."""
    names = ", ".join(recipe.names)
    stages = "; ".join(f"{stage.name} {dict(settings)}" for stage, settings in recipe.all_stages)
    return f"{recipe.method} at {recipe.scale:g} of {names} ({stages})"


def difference(one: Items, other: Items) -> tuple[float, float]:
    """How much better one is in points, and the half-width of the interval over items."""
    rng = np.random.default_rng(0)
    gaps = [one[task] - other[task] for task in one]
    means = [gap[rng.integers(len(gap), size=(RESAMPLES, len(gap)))].mean(1) for gap in gaps]
    low, high = np.percentile(np.mean(means, 0), (2.5, 97.5))
    return round(float(np.mean([gap.mean() for gap in gaps])), 2), round((high - low) / 2, 2)


# ---------------------------------------------------------------- all sets


def summary(document: Mapping[str, Any]) -> str:
    """The scores of all sets, the differences, and how often a way wins, ties and loses."""
    columns, others = (*WAYS, *RIVALS), (*RIVALS, *WAYS)
    scores, gaps, counts = [], [], []
    for name, found in document.items():
        means = (f"{found['test'][column]['mean']:.1f}" for column in columns)
        scores.append((name, f"{100 * max(found['changes']):.2g}%", *means))
    for way in WAYS:
        against = {name: found["against"][way] for name, found in document.items()}
        for name, own in against.items():
            cells = (f"{own[o][0]:+.1f} ± {own[o][1]:.1f}" if o in own else "" for o in others)
            gaps.append((way, name, *cells))
        each = [[own[other] for own in against.values() if other in own] for other in others]
        means = [f", {np.mean([gap for gap, _ in some]):+.1f}" if some else "" for some in each]
        counts.append((way, *map("".join, zip(map(balance, each), means, strict=True))))
    tables = (
        table(("set", "largest change", *columns), scores),
        table(("way", "set", *others), gaps),
        f"Wins / ties / losses, and the mean difference:\n\n{table(('way', *others), counts)}",
    )
    return with_minus("\n\n".join(tables)) + "\n"


def main() -> None:
    """Compare on all sets, each in a process of its own, and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--set", choices=list(PLANS), help="this set alone, in this process")
    parser.add_argument("--models", type=Path, default=HERE / "models" / "unseen")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="a fiftieth of it, to try the code")
    asked = parser.parse_args()
    if asked.set:
        folder = asked.models / asked.set
        folder.mkdir(parents=True, exist_ok=True)
        found = compare(asked.set, folder, asked.device, QUICK if asked.quick else 1.0)
        write(folder / "found.json", found)
        return
    asked.models.mkdir(parents=True, exist_ok=True)
    stored = asked.results / "unseen.json"
    for line in run_all(asked.models, asked.jobs):
        print(line, flush=True)
        files = {name: asked.models / name / "found.json" for name in PLANS}
        done = {name: json.loads(file.read_text()) for name, file in files.items() if file.exists()}
        document = {**(json.loads(stored.read_text()) if stored.exists() else {}), **done}
        write(stored, document)
        (asked.results / "unseen.md").write_text(summary(document))


def run_all(folder: Path, jobs: int) -> Iterator[str]:
    """Run the sets that are not there, so many at once."""
    began = time.perf_counter()

    def run(name: str) -> str:
        with (folder / f"{name}.log").open("wb") as log:
            command = [sys.executable, *sys.argv, "--set", name]
            code = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
        how = "failed" if code else "done"
        return f"{time.perf_counter() - began:5.0f} s  {name} {how}: {folder / name}.log"

    waiting = [name for name in PLANS if not (folder / name / "found.json").exists()]
    yield f"{len(waiting)} sets to be compared"
    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(run, name) for name in waiting]):
            yield done.result()


if __name__ == "__main__":
    main()
