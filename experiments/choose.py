"""Choose when advice departs from the plain average, and count what comes of it.

    python experiments/choose.py                                # prints what advice.toml should say
    python experiments/choose.py --models experiments/models    # first reads analyses of new sets

Limits and scale are chosen on validation items of full fine-tunes, by the mean gain of bases. Then
that is done without one base at a time, and counted on the test items of that base. Sets that
`advice.json` calls new have no part in the choice.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from evidence import SCALES, Record, balance, group, read

from dare.analysis.advice import SMALL, advise
from dare.analysis.document import Analysis
from dare.analysis.readiness import body_of

HERE = Path(__file__).parent
AVERAGE = ("linear", 1.0)
TRIED = (0.5, 0.7, 0.8, 1.0, 1.2, 1.4, 1.6, 2.0)
"""The scales that are chosen from."""


@dataclass(frozen=True)
class Rule:
    """The limits within which a method at a scale takes the place of the plain average."""

    change: float
    cosine: float
    method: str
    scale: float

    def __str__(self) -> str:
        """The rule in words."""
        limits = f"change up to {100 * self.change:g}%, cosine under {self.cosine:g}"
        return f"`{self.method}` at {self.scale:g}: {limits}"

    def applies(self, entry: Record) -> bool:
        """Tell if a set is within the limits."""
        seen, is_full = entry["seen"], not entry["models"][0].startswith("lora")
        return is_full and seen["change"] <= self.change and seen["cosine"] < self.cosine


ADVISED = Rule(SMALL.change, SMALL.cosine, SMALL.method, SMALL.scale)
"""The rule that `dare advise` follows."""


@cache
def rules(kind: str) -> list[Rule]:
    """The rules that are chosen from; the narrowest first, which wins if there is a tie."""
    wide, free = kind == "wide", kind == "any method"
    changes = (0.005, 0.01, 0.02, 0.05, *((0.1, 0.25) if wide else ()))
    cosines = (0.05, 0.1, 0.2, *((0.3, 0.5) if wide else ()))
    methods = ("tsv", *(("linear", "ties", "iso") if free else ()))
    return [Rule(*parts) for parts in product(changes, cosines, methods, TRIED)]


KINDS = {
    "narrow": "`tsv`, change up to 5%, cosine under 0.2",
    "any method": "the same, or `linear`, `ties`, `iso`",
    "wide": "`tsv`, change up to 25%, cosine under 0.5",
}


def gain(entry: Record, method: str, scale: float) -> tuple[float, float]:
    """Return how much better a merge is than the average of all models, and the half-width."""
    scores = entry["scores"]
    found = scores[candidate(entry, method, scale)]
    return found["score"] - scores["linear"]["score"], found["half_width"]


def candidate(entry: Record, method: str, scale: float) -> str:
    """Return the name of a merge without the models that advice leaves out."""
    left_out = entry["seen"]["left_out"]
    is_all = left_out == entry["strangers"]
    part = "" if not left_out else " without " + ("strangers" if is_all else str(left_out[0]))
    return method + part + ("" if scale == 1 else f" at {scale:g}")


def advised(entry: Record) -> str:
    """Return the name of the merge that is advised."""
    rule = ADVISED if ADVISED.applies(entry) else None
    return candidate(entry, *((rule.method, rule.scale) if rule else AVERAGE))


# ---------------------------------------------------------------- choosing


def choosable(sets: Iterable[Record]) -> list[Record]:
    """The sets that the choice rests on: full fine-tunes, of which advice leaves none out."""
    anything = Rule(np.inf, np.inf, *AVERAGE)
    return [s for s in sets if anything.applies(s) and not (s["seen"]["left_out"] or is_new(s))]


def is_new(entry: Record) -> bool:
    """Tell if a set came after the choice."""
    return bool(entry["seen"].get("is_new"))


def choose(some: Sequence[Rule], sets: Sequence[Record]) -> Rule:
    """Return the rule with the largest mean gain on validation items, each base counted once."""
    gains = {
        (method, scale): [_validation(entry, method, scale) for entry in sets]
        for method, scale in {(rule.method, rule.scale) for rule in some}
    }
    bases = [[sets.index(entry) for entry in own] for own in group(sets, _world).values()]

    def worth(rule: Rule) -> float:
        own = gains[rule.method, rule.scale]
        found = [own[i] if rule.applies(entry) else 0.0 for i, entry in enumerate(sets)]
        return round(float(np.mean([np.mean([found[i] for i in base]) for base in bases])), 6)

    return max(some, key=worth)


def _world(entry: Record) -> str:
    return str(entry["world"])


def _validation(entry: Record, method: str, scale: float) -> float:
    """Return the gain over the average on validation items."""
    tried, average = (entry["scores"][f"{name} tuned"]["tried"] for name in (method, "linear"))
    return float(tried[SCALES.index(scale)] - average[SCALES.index(1.0)])


def folds(kind: str, sets: Iterable[Record]) -> Iterator[tuple[str, Rule, list[Record]]]:
    """Yield each base, what is chosen without it, and the sets of it that this applies to."""
    by_base = group(choosable(sets), _world)
    for base, own in by_base.items():
        others = [entry for name, some in by_base.items() if name != base for entry in some]
        rule = choose(rules(kind), others)
        yield base, rule, [entry for entry in own if rule.applies(entry)]


def gains_of_folds(kind: str, sets: Iterable[Record]) -> list[tuple[str, float, float]]:
    """Return base, gain on test items and half-width of the sets that the folds' rules apply to."""
    return [
        (base, *gain(entry, rule.method, rule.scale))
        for base, rule, own in folds(kind, sets)
        for entry in own
    ]


def gains_elsewhere(sets: Iterable[Record]) -> list[tuple[float, float]]:
    """Return what the advised method gains on sets that it is not advised for."""
    return [
        gain(entry, ADVISED.method, ADVISED.scale)
        for entry in sets
        if not (ADVISED.applies(entry) or entry["seen"]["left_out"] or is_new(entry))
    ]


# ---------------------------------------------------------------- what advice sees


def look(file: Path) -> dict[str, Any]:
    """Return what advice sees of a set, by an analysis that was written before."""
    analysis = Analysis.from_json(gzip.decompress(file.read_bytes()).decode())
    out = advise(analysis).left_out
    kept = [model for model in analysis.models if model.name not in out]
    names = {model.name for model in kept}
    cosines = [p.total.cosine for p in analysis.pairs if {p.first, p.second} <= names]
    return {
        "change": round(max(body_of(model).ratio for model in kept), 5),
        "cosine": round(float(np.mean(cosines)) if cosines else 0.0, 4),
        "left_out": sorted(analysis.names.index(name) for name in out),
        "is_new": True,
    }


def look_at_new(results: Path, models: Path) -> None:
    """Add the sets to advice.json that are not in it yet, and have an analysis."""
    file = results / "advice.json"
    known = json.loads(file.read_text("utf-8"))
    for entry in read(results).sets:
        world, name = entry["name"].split(", ", 1)
        kept = models / world / f"{name.replace(', ', '-').replace(' ', '_')}.analysis.json.gz"
        if entry["name"] not in known and kept.exists():
            known[entry["name"]] = look(kept)
    lines = (f"{json.dumps(name)}:{json.dumps(seen)}" for name, seen in known.items())
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def main() -> None:
    """Print what is chosen, with its figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--models", type=Path, help="where run.py keeps analyses")
    asked = parser.parse_args()
    if asked.models is not None:
        look_at_new(asked.results, asked.models)
    sets = read(asked.results).advised
    print("chosen on all bases:", choose(rules("narrow"), choosable(sets)))
    for base, rule, own in folds("narrow", sets):
        print(f"without {base}: {rule}; applies to {len(own)} of its sets")
    found = gains_of_folds("narrow", sets)
    mean = np.mean([points for _, points, _ in found])
    print(f"on the bases left out: {balance(each[1:] for each in found)}, {mean:+.1f} points")
    elsewhere = gains_elsewhere(sets)
    print(f"{ADVISED.method} on the other {len(elsewhere)} sets: {balance(elsewhere)}")


if __name__ == "__main__":
    main()
