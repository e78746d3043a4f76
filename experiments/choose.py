"""Choose the outcomes that advice rests on, and score what `dare advise` says about every set.

    python experiments/choose.py --models experiments/models    # after run.py: writes advice.json
    python experiments/choose.py                                # prints it, from what is stored

The outcomes are chosen without one base at a time, and scored on that base. Then what is in
`advice.toml` is scored end to end: analysis, advice, recipe; and the search that the advice ends
with is concluded by dare itself, on validation items.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from evidence import NEWEST, read
from late import LATE
from tables import advice_instead

from dare.analysis.document import Analysis
from dare.analysis.judge.advice import OUTCOMES, advise
from dare.analysis.judge.readiness import assess, body_of
from dare.studies.conclusions import conclude
from dare.studies.results import Role, Scored, State, StudyData, Trial

HERE = Path(__file__).parent
SEARCHED = ("linear", "ties", "tsv", "iso", "trim+ties", "model_stock")
"""What a search would try, twenty scales of each; the best on validation items is its answer."""
SMALL_GAP = 5.0
"""Points from the base to the best single model, below which relative scores say nothing."""
NOT_WORSE = -2.0
"""Points of the relative score that advice may lose to the average on a kind of set."""
CHANGES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3)
COSINES = (0.3, 0.5, 0.7)
CHOICES = "linear", "tsv", "ties", "iso", *NEWEST
ACTIONS = tuple(itertools.product(CHOICES, (0.5, 0.7, 0.8, 1.0, 1.2, 1.4)))
AVERAGE = ("linear", 1.0)


@dataclass(frozen=True)
class Features:
    """What an adviser sees of a set."""

    models: int
    cosine: float
    change: float
    left_out: tuple[int, ...]
    """Those that no recipe takes."""
    method: str
    scale: float
    outcome: str
    """What `dare advise` says."""
    rules: tuple[str, ...]
    """What readiness finds."""


@dataclass(frozen=True)
class Tree:
    """A candidate for the outcomes: alike, small changes, large changes."""

    cosine: float
    change: float
    small: tuple[str, float]
    large: tuple[str, float]

    def decide(self, seen: Features) -> tuple[str, float]:
        """The method and its scale."""
        if seen.models == 1 or seen.cosine >= self.cosine:
            return AVERAGE
        return self.small if seen.change <= self.change else self.large


TREES = [
    Tree(*parts)
    for parts in itertools.product(COSINES, CHANGES, ACTIONS, (AVERAGE, ("linear", 1.2)))
]


@dataclass(frozen=True)
class Case:
    """A set with its scores."""

    world: str
    name: str
    kind: str
    scores: dict[str, Any]
    strangers: tuple[int, ...]
    validation_items: int
    seen: Features

    def of(self, name: str) -> float:
        """The score of a candidate on test items."""
        return float(self.scores[name]["score"])

    def candidate(self, method: str, scale: float) -> str:
        """The name of a merge without the models that are left out."""
        left_out = self.seen.left_out
        part = ""
        if left_out:
            is_all = left_out == self.strangers
            part = " without strangers" if is_all else f" without {left_out[0]}"
        return f"{method}{part}" + ("" if scale == 1 else f" at {scale:g}")

    @property
    def has_all(self) -> bool:
        """Whether every choice was scored."""
        return all(self.candidate(method, 1.0) in self.scores for method in CHOICES)

    @cached_property
    def best_single(self) -> float:
        """What the best of the models can do."""
        return max(self.of(name) for name in self.scores if name.startswith("single "))

    @property
    def gap(self) -> float:
        """From the base to the best of the models."""
        return self.best_single - self.of("base")

    @property
    def search(self) -> str:
        """What a search would answer."""
        tried = {
            name: max(known.get("tried", [known.get("validation", -1.0)]))
            for name, known in self.scores.items()
            for method in SEARCHED
            if name in (f"{method} tuned", f"{method} without strangers")
        }
        return max(tried, key=tried.__getitem__)

    def gain(self, name: str) -> float:
        """How much better than the average, of the way from the base to the best single model."""
        return 100 * (self.of(name) - self.of("linear")) / max(self.gap, SMALL_GAP)


def read_cases(results: Path, stored: dict[str, Any], models: Path) -> list[Case]:
    """Every set that is scored; features from the analyses, or as stored where there is none."""
    cases = []
    for file in sorted((results / "sets").glob("*.json")):
        if file.stem.startswith("cugan"):
            continue  # scored in dB; beside the others
        for name, found in json.loads(file.read_text()).items():
            world = found["world"]
            analysis = models / world / f"{file_name(name)}.analysis.json.gz"
            if analysis.exists():
                seen = look(analysis)
            else:
                seen = Features(**stored[f"{world}, {name}"]["seen"])
                tuples = {"left_out": tuple(seen.left_out), "rules": tuple(seen.rules)}
                seen = replace(seen, **tuples)
            about = found["kind"], found["scores"], tuple(found["strangers"]), found["items"][0]
            cases.append(Case(world, name, *about, seen))
    return cases


def file_name(name: str) -> str:
    """As run.py calls what it keeps of a set."""
    return name.replace(", ", "-").replace(" ", "_")


def look(file: Path) -> Features:
    """What `dare advise` sees and says, by an analysis that was written before."""
    analysis = Analysis.from_json(gzip.decompress(file.read_bytes()).decode())
    readiness = assess(analysis)
    advice = advise(analysis, readiness)
    out = tuple(analysis.names.index(name) for name in advice.left_out)
    kept = {name for name in analysis.names if name not in advice.left_out}
    cosines = [p.total.cosine for p in analysis.pairs if {p.first, p.second} <= kept]
    return Features(
        len(kept),
        round(float(np.mean(cosines)) if cosines else 0.0, 4),
        round(max(body_of(m).ratio for m in analysis.models if m.name in kept), 5),
        tuple(sorted(out)),
        advice.recipe["method"],
        advice.recipe.get("scale", 1.0),
        advice.suggestions[0].source.rpartition(", ")[2],
        tuple(sorted({finding.code for finding in readiness.findings})),
    )


# ---------------------------------------------------------------- choosing


def gains(tree: Tree, cases: Sequence[Case]) -> list[float]:
    """What a tree gains over the average on each set."""
    return [case.gain(case.candidate(*tree.decide(case.seen))) for case in cases]


def by_kind(cases: Sequence[Case], values: Iterable[float]) -> dict[str, list[float]]:
    """Values by kind of set."""
    found = defaultdict(list)
    for case, value in zip(cases, values, strict=True):
        found[case.kind].append(value)
    return found


def best_tree(cases: Sequence[Case]) -> Tree:
    """The tree that gains most, of those that lose on no kind of set."""

    def worth(tree: Tree) -> tuple[bool, float]:
        found = gains(tree, cases)
        worst = min(float(np.mean(v)) for v in by_kind(cases, found).values())
        return worst >= NOT_WORSE, float(np.mean(found))

    return max(TREES, key=worth)


# ---------------------------------------------------------------- the search that advice ends with


def conclude_search(case: Case, items: dict[str, np.ndarray]) -> dict[str, Any]:
    """What dare concludes from validation items, and which candidates beat it on test items."""
    own = case.candidate(case.seen.method, case.seen.scale)
    own, count = own if own in items else own.partition(" at ")[0], case.validation_items
    named = {"base": Role.BASE.value, "linear": "average", "sum": "sum", own: "advice"}
    named |= {n: f"{n} alone" for n in items if n.startswith("single ")}
    if case.strangers == case.seen.left_out and case.strangers:
        named["linear without strangers"] = "average without strangers"
    trials = tuple(
        Trial(n, {}, 0, State.DONE, Scored({"right": float(part.mean())}, _by_id(part)), name=label)
        for n, (candidate, label) in enumerate(named.items())
        for part in [items[candidate][:count].astype(float)]
    )
    recipe = {"base": "base", "models": ["tuned"], "output": "merged"}
    kept = {"baselines": trials, "trials": ()}
    study = StudyData(recipe, {}, "grid", len(trials), (0,), "", {}, (), **kept)
    answer = conclude(study).chosen
    chosen = next(c for c, label in named.items() if label == (answer and answer.baseline))
    tested = {c: items[c][count:].astype(float) for c in named}
    others = len(named) - 1
    beaten_by = [c for c in named if _is_better(tested[c], tested[chosen], others)]
    return {"answer": chosen, "beaten_by": beaten_by}


def _by_id(part: np.ndarray) -> dict[str, float]:
    return {str(place): float(value) for place, value in enumerate(part)}


def _is_better(one: np.ndarray, other: np.ndarray, count: int) -> bool:
    """Whether it has more right, beyond chance; one of so many that are held against the other."""
    gap = one - other
    width = NormalDist().inv_cdf(1 - 0.025 / count)
    return bool(gap.mean() > width * gap.std() / math.sqrt(len(gap)))


# ---------------------------------------------------------------- what comes of it


def summarise(case: Case) -> dict[str, Any]:
    """What is kept of a set: what was seen and said, and the scores that it is held against."""
    own = case.candidate(case.seen.method, case.seen.scale)
    compared = {
        "advice": own,
        "average": "linear",
        "average without strangers": case.candidate(*AVERAGE),
        "sum": "sum",
        "base": "base",
        "search": case.search,
    }
    return {
        "kind": case.kind,
        "seen": asdict(case.seen),
        "candidate": own,
        "half_width": case.scores[own]["half_width"],
        "best single": case.best_single,
        **{label: case.of(name) for label, name in compared.items()},
        "gain": round(case.gain(own), 2),
        "search gain": round(case.gain(case.search), 2),
    }


def make(results: Path, models: Path) -> dict[str, Any]:
    """Choose without each base, score the advice on every set, and conclude the searches."""
    stored = json.loads((results / "advice.json").read_text())["sets"]
    cases = read_cases(results, stored, models)
    early = [case for case in cases if case.world not in LATE and case.has_all]
    folds = {}
    for world in sorted({case.world for case in early}):
        tree = best_tree([case for case in early if case.world != world])
        left = [case for case in early if case.world == world]
        folds[world] = {**asdict(tree), "gain": round(float(np.mean(gains(tree, left))), 2)}
    sets = {}
    for case in cases:
        found = sets[f"{case.world}, {case.name}"] = summarise(case)
        file = models / case.world / f"{file_name(case.name)}.items.npz"
        if file.exists():
            with np.load(file) as items:
                if found["candidate"].partition(" at ")[0] in items:
                    found["compared"] = conclude_search(case, dict(items))
        elif "compared" in (before := stored.get(f"{case.world}, {case.name}", {})):
            found["compared"] = before["compared"]
    return {"chosen": asdict(best_tree(early)), "folds": folds, "sets": sets}


def record_of(outcome: str, sets: Iterable[dict[str, Any]]) -> str:
    """How an outcome did against the plain average of all models, in words."""
    found = [each for each in sets if each["seen"]["outcome"] == outcome]
    gaps = [(each["advice"] - each["average"], each["half_width"]) for each in found]
    better, worse = (sum(sign * gap > width for gap, width in gaps) for sign in (1, -1))
    tried = f"Tried on {len(found)} sets of models"
    if all(each["seen"]["method"] == "linear" for each in found):
        fewer = sum(bool(each["seen"]["left_out"]) for each in found)
        return (
            f"{tried}: it is the plain average, except in {fewer} sets where it left a model out; "
            f"it was better in {better} of these and worse in {worse}"
        )
    return (
        f"{tried}. This advice was better than the plain average of all models in {better} and "
        f"worse in {worse}; in {len(found) - better - worse} there was no clear difference"
    )


def tell(document: dict[str, Any]) -> None:
    """Print what was found."""
    print("chosen on all bases:", document["chosen"])
    for world, fold in document["folds"].items():
        print(f"  without {world}: {fold}")
    for outcome in OUTCOMES:
        print(f"{outcome.name}: {record_of(outcome.name, document['sets'].values())}")
    lost = [
        f"{name} ({each['advice'] - each['average']:+.1f})"
        for name, each in document["sets"].items()
        if each["advice"] - each["average"] < -each["half_width"]
    ]
    print("lost to the average:", "; ".join(lost) or "none")
    answers = [each["compared"] for each in document["sets"].values() if "compared" in each]
    beaten = sum(bool(each["beaten_by"]) for each in answers)
    print(f"searches: {len(answers)}, answers that lose to a candidate: {beaten}")


def main() -> None:
    """Write or print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--models", type=Path, help="where run.py keeps analyses and items")
    asked = parser.parse_args()
    file = asked.results / "advice.json"
    if asked.models is not None:
        file.write_text(json.dumps(make(asked.results, asked.models), indent=1) + "\n")
    tell(json.loads(file.read_text()))
    print(advice_instead(read(asked.results)))


if __name__ == "__main__":
    main()
