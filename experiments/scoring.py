"""What merges of a set of models can do: every method, with and without DARE, tuned and not.

A score is the mean over the set's tasks of the share of held-out items that are right. Scales and
drop rates are tuned on validation items, twenty trials for each method, and scored on test items.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sets import ModelSet
from tuning import Tune, Weights, Workshop

import dare

TEST_ITEMS, VALIDATION_ITEMS = 3000, 900
"""Of a set; shared out among its tasks."""
SEEDS = (1, 2, 3)
RATES = (0.5, 0.9)
TRIED_RATES = (0.2, 0.5, 0.8, 0.9)
TRIED_SCALES = (0.25, 0.5, 0.75, 1.0, 1.5)
"""With each tried rate: relative to the best scale without dropping."""
COMBINES = (
    "linear",
    "sum",
    "ties",
    "tsv",
    "iso",
    "wudi",
    "karcher",
    "model_stock",
    "consensus",
    "pcb",
    "cabs",
    "emr",
    "knots",
)
CHAINS = (
    "trim+ties",
    "trim+sum",
    "breadcrumbs+sum",
    "star+sum",
    "fourier+sum",
    "nm+sum",
)
RANDOM_CHAINS = ("della+sum", "della+ties")
OF_TWO = ("slerp", "nuslerp")
SAME_DIRECTION = {"sum"}
"""Only the scale differs from `linear`, so tuning it would be the same twenty trials."""
SCALES = tuple(round(float(s), 3) for s in np.geomspace(0.2, 4, 20))
CURVES = ("linear", "ties", "tsv", "iso", "wudi", "trim+ties", "karcher")
"""Methods that are also scored at every second scale on test items."""


@dataclass
class Scorer:
    """The models of one set, and the items they are tried on."""

    shop: Workshop
    models: list[Weights]
    tasks: Sequence[str]

    def __post_init__(self) -> None:
        count = len(self.tasks)
        self.base = self.shop.base()
        self.test = [self.shop.items(t, "test", math.ceil(TEST_ITEMS / count)) for t in self.tasks]
        self.validation = [
            self.shop.items(t, "validation", math.ceil(VALIDATION_ITEMS / count))
            for t in self.tasks
        ]

    def right(self, weights: Weights, items: str = "test") -> list[np.ndarray]:
        """Which items of each task are right."""
        return [self.shop.right(weights, *batch) for batch in getattr(self, items)]

    def merge(self, method: str, members: Sequence[int] | None = None, **settings: Any) -> Weights:
        """A merge of all models, or of some."""
        chosen = self.models if members is None else [self.models[i] for i in members]
        arrays = [{k: v.cpu().numpy() for k, v in m.items()} for m in (self.base, *chosen)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            merged, _ = dare.merge_arrays(
                arrays[0], arrays[1:], method=method, verbose=False, **settings
            )
        return {k: torch.from_numpy(v).to(self.shop.device) for k, v in merged.items()}

    def scaled(self, weights: Weights, scale: float) -> Weights:
        """The same change of the base, so many times as large."""
        return {k: base + scale * (weights[k] - base) for k, base in self.base.items()}


def mean_score(right: Iterable[np.ndarray]) -> float:
    """The mean over tasks of the share that is right, in percent."""
    return 100 * float(np.mean([items.mean() for items in right]))


def half_width(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
    """Of a 95 % interval for the difference of two scores on the same items, in points."""
    spreads = [(a.astype(float) - b).var() / len(a) for a, b in zip(one, other, strict=True)]
    return 196 * math.sqrt(sum(spreads)) / len(spreads)


def score_set(shop: Workshop, members: ModelSet, *, joint: bool = True) -> dict[str, Any]:
    """Every score of a set, by candidate."""
    models = [shop.make(tune) for tune in members.tunes]
    scorer = Scorer(shop, models, members.tasks)
    book = Book(scorer)
    book.add("base", [scorer.base])
    for number, model in enumerate(models):
        book.add(f"single {number}", [model])
    if joint:
        tasks = "+".join(members.tasks)
        strength = members.tunes[0].strength
        book.add("joint", [shop.make(Tune(tasks, strength, way="joint"))])
    _without_some(book, members)
    methods = [*COMBINES, *CHAINS, *(OF_TWO if len(models) == 2 else ())]
    for method in methods:
        _score_method(book, method)
    for method in RANDOM_CHAINS:
        book.add(method, [scorer.merge(method, drop_rate=0.5, seed=seed) for seed in SEEDS])
    return {
        "world": shop.world.name,
        "kind": members.kind,
        "models": [tune.name for tune in members.tunes],
        "strangers": list(members.strangers),
        "tasks": list(members.tasks),
        "items": sum(len(batch[1]) for batch in scorer.test),
        "scores": book.scores,
    }


class Book:
    """Scores of candidates, each with the half-width of its difference from the average."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer = scorer
        self.average = scorer.right(scorer.merge("linear"))
        self.scores: dict[str, dict[str, Any]] = {}

    def add(self, name: str, made: Sequence[Weights], **known: Any) -> None:
        """Score a candidate: the mean over its seeds."""
        found = [self.scorer.right(weights) for weights in made]
        scores = [mean_score(right) for right in found]
        mean = [np.mean(seeds, axis=0) for seeds in zip(*found, strict=True)]
        self.scores[name] = {
            "score": round(float(np.mean(scores)), 3),
            "half_width": round(half_width(mean, self.average), 3),
            "by_task": [round(100 * float(items.mean()), 2) for items in mean],
            **({"seeds": [round(score, 3) for score in scores]} if len(scores) > 1 else {}),
            **known,
        }


def _without_some(book: Book, members: ModelSet) -> None:
    """The average and the sum without each model, and without all that do not belong."""
    count = len(members.tunes)
    parts = {f"without {i}": [j for j in range(count) if j != i] for i in range(count)}
    if members.strangers:
        parts["without strangers"] = [j for j in range(count) if j not in members.strangers]
    for name, kept in parts.items() if count > 2 else ():
        for method in ("linear", "sum"):
            book.add(f"{method} {name}", [book.scorer.merge(method, kept)])


def _score_method(book: Book, method: str) -> None:
    """A method as it is and tuned, with and without DARE before it."""
    scorer = book.scorer
    plain = scorer.merge(method)
    book.add(method, [plain])
    scale = 1.0
    if method not in SAME_DIRECTION:
        scale, known = _best(scorer, {s: scorer.scaled(plain, s) for s in SCALES})
        book.add(f"{method} tuned", [scorer.scaled(plain, scale)], scale=scale, tried=known)
    if method in CURVES:
        for tried in SCALES[::2]:
            book.add(f"{method} at {tried:g}", [scorer.scaled(plain, tried)])
    if "+" in method:
        return
    dropped = f"dare+{method}"
    made = {
        (rate, seed): scorer.merge(dropped, drop_rate=rate, seed=seed)
        for rate in sorted({*RATES, *TRIED_RATES})
        for seed in (SEEDS if rate in RATES else SEEDS[:1])
    }
    for rate in RATES:
        book.add(f"{dropped} {rate:g}", [made[rate, seed] for seed in SEEDS])
    if method in SAME_DIRECTION:
        return
    trials = {
        (rate, part * scale): scorer.scaled(made[rate, SEEDS[0]], part * scale)
        for rate, part in itertools.product(TRIED_RATES, TRIED_SCALES)
    }
    (rate, best), _ = _best(scorer, trials)
    tuned = [
        scorer.scaled(made.get((rate, s)) or scorer.merge(dropped, drop_rate=rate, seed=s), best)
        for s in SEEDS
    ]
    book.add(f"{dropped} tuned", tuned, scale=best, drop_rate=rate)


def _best(scorer: Scorer, trials: Mapping[Any, Weights]) -> tuple[Any, list[float]]:
    """The trial that gets most right on validation items, and what each got."""
    scores = {key: mean_score(scorer.right(made, "validation")) for key, made in trials.items()}
    return max(scores, key=scores.__getitem__), [round(score, 2) for score in scores.values()]
