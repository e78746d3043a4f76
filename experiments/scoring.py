"""What merges of a set of models can do: every method, with and without DARE, tuned and not.

A score is the mean over the set's tasks of the percentage of held-out items that are right. Scales
and drop rates are tuned on validation items, twenty trials for each method, and scored on test
items.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from evidence import NEWEST, SCALES
from sets import ModelSet
from tuning import Weights, Workshop

import dare

Trial = TypeVar("Trial")
TEST_ITEMS, VALIDATION_ITEMS = 2400, 600
"""Of a set; shared out among its tasks."""
SEEDS = (1, 2, 3)
RATES = (0.5, 0.9)
TRIED_RATES = (0.2, 0.5, 0.8, 0.9)
TRIED_SCALES = (0.25, 0.5, 0.75, 1.0, 1.5)
"""With each tried rate: relative to the best scale without dropping."""
CURVE_SCALES = (0.2, 0.3, 0.5, 0.7, 0.8, 1.2, 1.4, 1.6, 2.0, 2.5, 3.0)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "iso-cts": ("iso", {"variant": "cts"}),
    "dc_merge-0.01": ("dc_merge", {"keep_ratio": 0.01}),
    "tsv-all": ("tsv", {"embeddings": "matrices"}),
}
"""Methods that are another one with settings; `tsv-all` takes embeddings and heads apart, too."""
NEW = tuple(name for name in NEWEST if name not in ("aswudi", "resmerge"))
"""Those that dare still has."""
CURVES = ("linear", "balanced", "ties", "tsv", "iso", "trim+ties", "model_stock", *NEW)
"""Methods that are scored on test items at each of those scales, too; `balanced` is the average of
changes that were made equally large."""
COMBINES = (
    *("linear", "balanced", "sum", "ties", "tsv", "iso", "karcher", "model_stock"),
    *("consensus", "pcb", "cabs", "emr", "knots"),
)
CHAINS = ("trim+ties", "trim+sum", "breadcrumbs+sum", "star+sum", "fourier+sum", "nm+sum")
RANDOM_CHAINS = ("della+sum", "della+ties")
OF_TWO = ("slerp", "nuslerp")
FEW = ("linear", "balanced", "sum", "ties", "tsv", "iso", "model_stock", "consensus", "trim+ties")
"""For worlds whose models take long to score."""
DROPPED = {"linear", "sum", "ties"}
"""The methods that DARE goes before in every world."""
ADVISED = ("linear", "tsv")
"""Methods that may be advised at any scale, so that the scores of their items are kept."""
SAME_DIRECTION = {"sum"}
"""Only the scale differs from `linear`, so tuning it would be the same twenty trials."""


@dataclass
class Scorer:
    """The models of one set, and the items they are tried on."""

    shop: Workshop
    models: list[Weights]
    tasks: Sequence[str]
    counts: tuple[int, int] = (TEST_ITEMS, VALIDATION_ITEMS)

    def __post_init__(self) -> None:
        self.base = self.shop.base()
        test, validation = (math.ceil(count / len(self.tasks)) for count in self.counts)
        self.test = [self.shop.items(task, "test", test) for task in self.tasks]
        self.validation = [self.shop.items(task, "validation", validation) for task in self.tasks]

    @cached_property
    def arrays(self) -> list[dict[str, np.ndarray]]:
        """The base and the models, for a merge."""
        return [{k: v.cpu().numpy() for k, v in m.items()} for m in (self.base, *self.models)]

    @cached_property
    def norms(self) -> list[float]:
        """How far each model is from the base."""
        return [_distance(model, self.base) for model in self.models]

    def right(self, weights: Weights, items: str = "test") -> list[np.ndarray]:
        """The scores of each task's items."""
        return [self.shop.right(weights, *batch) for batch in getattr(self, items)]

    def merge(self, method: str, members: Sequence[int] | None = None, **settings: Any) -> Weights:
        """A merge of all models, or of some."""
        chosen = range(len(self.models)) if members is None else members
        arrays = [self.arrays[1 + i] for i in chosen]
        method, more = VARIANTS.get(method, (method, {}))
        if method.endswith("balanced"):
            method = method.replace("balanced", "linear")
            settings["weights"] = _balance([self.norms[i] for i in chosen])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            merged, _ = dare.merge_arrays(
                self.arrays[0],
                arrays,
                method=method,
                threads=torch.get_num_threads(),
                verbose=False,
                **more,
                **settings,
            )
        return {k: torch.from_numpy(v).to(self.shop.device) for k, v in merged.items()}

    def scaled(self, weights: Weights, scale: float) -> Weights:
        """The same change of the base, so many times as large."""
        return {k: base + scale * (weights[k] - base) for k, base in self.base.items()}


def _distance(one: Weights, other: Weights) -> float:
    return math.sqrt(sum(float(((one[k] - v).double() ** 2).sum()) for k, v in other.items()))


def _balance(norms: Sequence[float]) -> list[float]:
    """Weights that make changes equally large, and their mean as large as the plain one."""
    return [float(np.mean(norms)) / norm / len(norms) for norm in norms]


def mean_score(right: Iterable[np.ndarray]) -> float:
    """The mean over tasks of the mean over items."""
    return float(np.mean([items.mean() for items in right]))


def half_width(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> float:
    """Of a 95% interval for the difference of two scores on the same items."""
    spreads = [(a - b).var() / len(a) for a, b in zip(one, other, strict=True)]
    return 1.96 * math.sqrt(sum(spreads)) / len(spreads)


@dataclass
class Book:
    """Scores of candidates, each with the half-width of its difference from the average."""

    scorer: Scorer
    scores: dict[str, dict[str, Any]] = field(default_factory=dict)
    items: dict[str, np.ndarray] = field(default_factory=dict)
    """The scores of a candidate's items, those for validation first; one task after the other."""

    @cached_property
    def average(self) -> list[np.ndarray]:
        """The scores of the items with the average of all models."""
        return self.scorer.right(self.scorer.merge("linear"))

    def add(self, name: str, made: Sequence[Weights], *, keep: bool = False, **known: Any) -> None:
        """Score a candidate: the mean over its seeds."""
        found = [self.scorer.right(weights) for weights in made]
        scores = [mean_score(right) for right in found]
        mean = [np.mean(seeds, axis=0) for seeds in zip(*found, strict=True)]
        self.scores[name] = {
            "score": round(float(np.mean(scores)), 2),
            "half_width": round(half_width(mean, self.average), 2),
            **({"seeds": [round(score, 2) for score in scores]} if len(scores) > 1 else {}),
            **known,
        }
        if keep:
            tried = self.scorer.right(made[0], "validation")
            self.scores[name]["validation"] = round(mean_score(tried), 2)
            self.scores[name]["by_task"] = [round(float(r.mean()), 2) for r in mean]
            self.items[name] = np.concatenate([*tried, *found[0]]).astype(np.float16)


BRIEFLY = ("linear", "sum", "ties", "tsv")
BRIEF_ITEMS = 600, 100
ADVISED_SCALE = 0.7


def score_briefly(shop: Workshop, members: ModelSet) -> dict[str, dict[str, Any]]:
    """A few scores of a set on few items, to see whether they come out again."""
    models = [shop.make(tune) for tune in members.tunes]
    scorer = Scorer(shop, models, members.tasks, BRIEF_ITEMS)
    book = Book(scorer)
    book.add("base", [scorer.base])
    for number, model in enumerate(models):
        book.add(f"single {number}", [model])
    for method in BRIEFLY:
        merged = scorer.merge(method)
        book.add(method, [merged])
        if method == "tsv":
            book.add(f"tsv at {ADVISED_SCALE:g}", [scorer.scaled(merged, ADVISED_SCALE)])
    for rate in RATES:
        merged = scorer.merge("dare+linear", drop_rate=rate, seed=SEEDS[0])
        book.add(f"dare+linear {rate:g}", [merged])
    return book.scores


def score_set(shop: Workshop, members: ModelSet) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Every score of a set, by candidate; and those of the items, for candidates of a search."""
    models = [shop.make(tune) for tune in members.tunes]
    scorer = Scorer(shop, models, members.tasks)
    book = Book(scorer)
    book.add("base", [scorer.base], keep=True)
    for number, model in enumerate(models):
        book.add(f"single {number}", [model], keep=True)
    if members.joint:
        book.add("joint", [shop.make(members.joint)], keep=True)
    few = shop.world.few_methods
    _without_some(book, members)
    methods = FEW if few else (*COMBINES, *CHAINS, *(OF_TWO if len(models) == 2 else ()))
    dropped = DROPPED if shop.world.few_drops else {*COMBINES, *OF_TWO}
    for method in (*methods, *NEW):
        _score_method(book, method, drops=method in dropped)
    for method in () if few else RANDOM_CHAINS:
        book.add(method, [scorer.merge(method, drop_rate=0.5, seed=seed) for seed in SEEDS])
    found = {
        "world": shop.world.name,
        "about": shop.world.about,
        "relation": shop.world.relation,
        "kind": members.kind,
        "parameters": sum(value.numel() for value in scorer.base.values()),
        "models": [tune.name for tune in members.tunes],
        "strangers": list(members.strangers),
        "tasks": list(members.tasks),
        "items": [sum(len(b[1]) for b in part) for part in (scorer.validation, scorer.test)],
        "scores": book.scores,
    }
    return found, book.items


def _without_some(book: Book, members: ModelSet) -> None:
    """The average and the sum without each model, and more without all that do not belong."""
    count, scorer = len(members.tunes), book.scorer
    for left_out in range(count) if count > 2 else ():
        kept = [i for i in range(count) if i != left_out]
        for method in ("linear", "sum"):
            book.add(f"{method} without {left_out}", [scorer.merge(method, kept)])
    if members.strangers:
        kept = [i for i in range(count) if i not in members.strangers]
        for method in ("sum", *CURVES):
            name, merged = f"{method} without strangers", scorer.merge(method, kept)
            book.add(name, [merged], keep=True)
            for scale in CURVE_SCALES if method in CURVES else ():
                scaled = scorer.scaled(merged, scale)
                book.add(f"{name} at {scale:g}", [scaled], keep=method in ADVISED)


def _score_method(book: Book, method: str, *, drops: bool) -> None:
    """A method as it is and tuned, with and without DARE before it."""
    scorer = book.scorer
    plain = scorer.merge(method)
    is_kept = method in ("sum", *CURVES)
    book.add(method, [plain], keep=is_kept)
    scale = 1.0
    if method not in SAME_DIRECTION:
        scale, known = _best(scorer, SCALES, lambda tried: scorer.scaled(plain, tried))
        book.add(f"{method} tuned", [scorer.scaled(plain, scale)], scale=scale, tried=known)
    for tried in CURVE_SCALES if method in CURVES else ():
        book.add(f"{method} at {tried:g}", [scorer.scaled(plain, tried)], keep=method in ADVISED)
    if drops:
        _score_dropped(book, method, scale)


def _score_dropped(book: Book, method: str, scale: float) -> None:
    """A method after DARE, at usual rates and tuned around a scale."""
    scorer, dropped = book.scorer, f"dare+{method}"
    made = {
        (rate, seed): scorer.merge(dropped, drop_rate=rate, seed=seed)
        for rate in sorted({*RATES, *TRIED_RATES})
        for seed in (SEEDS if rate in RATES else SEEDS[:1])
    }
    for rate in RATES:
        book.add(f"{dropped} {rate:g}", [made[rate, seed] for seed in SEEDS])
    if method in SAME_DIRECTION:
        return
    trials = [(rate, part * scale) for rate in TRIED_RATES for part in TRIED_SCALES]
    (rate, best), known = _best(
        scorer, trials, lambda tried: scorer.scaled(made[tried[0], SEEDS[0]], tried[1])
    )
    tuned = [
        scorer.scaled(made.get((rate, s)) or scorer.merge(dropped, drop_rate=rate, seed=s), best)
        for s in SEEDS
    ]
    book.add(f"{dropped} tuned", tuned, scale=best, drop_rate=rate, tried=[max(known)])


def _best(
    scorer: Scorer, trials: Sequence[Trial], make: Callable[[Trial], Weights]
) -> tuple[Trial, list[float]]:
    """The trial that does best on validation items, and what each got."""
    scores = {trial: mean_score(scorer.right(make(trial), "validation")) for trial in trials}
    return max(scores, key=scores.__getitem__), [round(score, 2) for score in scores.values()]
