"""Stored results, and what can be said of them: differences, shares of a gain, intervals.

Differences are in points of right answers. Intervals are 95% ones, by bootstrap over bases, since
models of one base are alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

Record = dict[str, Any]
Values = Sequence[tuple[str, float]]
"""Each with the base it comes from."""

LEAST_GAIN_POINTS = 5.0
"""What a model must gain over its base before shares of its gain mean anything."""
FREE_POINTS = 1.0
"""An effect counts as none if its whole interval is smaller."""
VERDICTS = ("helps", "free", "hurts", "not certain")
IN_DECIBELS = "cugan"
"""Worlds whose names begin so are scored by PSNR, and stand apart."""
LEAST_BASES = 4
"""With fewer, a bootstrap over bases gives no more than their range, and no interval is given."""
RESAMPLES = 4000
RATES = ("0.5", "0.7", "0.9", "0.95", "0.99")
USUAL_RATES = ("0.5", "0.9")
SCALES = (0.05, *(n / 10 for n in range(1, 13)), 1.4, 1.6, 1.8, 2.0, 2.5, 3.0, 4.0)
"""The scales at which methods are tried on validation items; the order of `tried`."""
DROPPED = {
    f"dare+{name} {rate}": name for name in ("linear", "sum", "ties") for rate in USUAL_RATES
}
"""Methods after DARE, each with the same method without it."""
NEWEST = (
    *("swudi", "aswudi", "resmerge", "dc_merge", "dc_merge-0.01", "iso-cts", "tsv-all"),
    *("linear+svc", "ties+svc", "tsv+svc"),
)
"""Methods that came last, and must earn their place beside the tuned average and tuned `tsv`."""
SMALL_CHANGE = 0.05
"""Of a model, relative to the norm of its base."""
WAYS = {"full": "full", "lora": "LoRA"}


@dataclass(frozen=True)
class Evidence:
    """All stored results."""

    sets: list[Record]
    images: list[Record]
    """Sets that are scored in dB."""
    questions: list[Record]

    @property
    def models(self) -> list[Record]:
        """The single models that were asked about, each with its world and the kind of data."""
        return [
            {"world": asked["world"], "about": asked["about"], **model}
            for asked in self.questions
            for model in asked["singles"]
        ]

    @property
    def gainers(self) -> list[Record]:
        """Those of them that gained enough."""
        return [m for m in self.models if m["full"] - m["base"] >= LEAST_GAIN_POINTS]

    @property
    def advised(self) -> list[Record]:
        """The sets of which it is known what advice sees."""
        return [entry for entry in self.sets if "seen" in entry]


def read(folder: Path) -> Evidence:
    """Read all results; a set's best single model is the best one on validation items."""
    file = folder / "advice.json"
    seen = json.loads(file.read_text("utf-8")) if file.exists() else {}
    sets = []
    for document in _documents(folder / "sets"):
        for name, entry in document.items():
            full_name, scores = f"{entry['world']}, {name}", entry["scores"]
            singles = [score for name, score in scores.items() if name.startswith("single ")]
            scores["best single"] = max(
                singles, key=lambda score: score.get("validation", score["score"])
            )
            known = {"seen": seen[full_name]} if full_name in seen else {}
            sets.append({**entry, "name": full_name, **known})
    images = [entry for entry in sets if entry["world"].startswith(IN_DECIBELS)]
    points = [entry for entry in sets if entry not in images]
    return Evidence(points, images, _documents(folder / "questions"))


def _documents(folder: Path) -> list[Record]:
    return [json.loads(file.read_text("utf-8")) for file in sorted(folder.glob("*.json"))]


def group(records: Iterable[Record], key: Callable[[Record], str]) -> dict[str, list[Record]]:
    """Records by what they have in common, in the order in which they come."""
    found: dict[str, list[Record]] = {}
    for record in records:
        found.setdefault(key(record), []).append(record)
    return found


def way_and_size(model: Record) -> str:
    """How a model was trained, and whether its change is small beside the base."""
    relation = "under" if model["relative_norm"] < SMALL_CHANGE else "from"
    return f"{WAYS[model['way']]}, {relation} {100 * SMALL_CHANGE:g}%"


# ---------------------------------------------------------------- values


def differences(records: Iterable[Record], name: str, other: str = "linear") -> Values:
    """How much better one candidate is than another, where both were scored."""
    return [
        (record["world"], _score(scores[name]) - _score(scores[other]))
        for record in records
        if {name, other} <= (scores := record.get("scores", record)).keys()
    ]


def _score(found: Mapping[str, float] | Sequence[float] | float) -> float:
    """A candidate's score, whether it stands alone, by seed or with more that is known."""
    return float(np.mean(found["score"] if isinstance(found, Mapping) else found))


def against_base(entry: Record, name: str) -> dict[str, float]:
    """How many points a candidate is above the base, by task."""
    scores = (entry["scores"][which]["by_task"] for which in (name, "base"))
    return {t: one - base for t, one, base in zip(entry["tasks"], *scores, strict=True)}


def own_task(model: str) -> str:
    """The task that a model was trained on: `full-usual-upside_down-0` has `upside down`."""
    return model.split("-", 2)[2].rpartition("-")[0].replace("_", " ")


def kept(model: Record, scores: float | Sequence[float]) -> float:
    """The share of a model's gain over the base that is left; 1 is all of it."""
    return float((_score(scores) - model["base"]) / (model["full"] - model["base"]))


def shares(models: Iterable[Record], part: str, key: str) -> Values:
    """The shares that models keep after something that was tried with them."""
    return [(m["world"], kept(m, m[part][key])) for m in models if part in m]


def tally(sets: Iterable[Record], name: str) -> str:
    """In how many sets a candidate beats the average, ties with it and loses to it."""
    found = [(s["scores"][name], s["scores"]["linear"]) for s in sets if name in s["scores"]]
    return balance((one["score"] - other["score"], one["half_width"]) for one, other in found)


def balance(found: Iterable[tuple[float, float]]) -> str:
    """How many differences are above their half-width, within it and below it."""
    signs = [beyond(difference, half_width) for difference, half_width in found]
    return " / ".join(str(signs.count(sign)) for sign in (1, 0, -1)) if signs else "–"


def beyond(difference: float, half_width: float) -> int:
    """The sign of a difference that exceeds its half-width, and 0 for others."""
    return int(np.sign(difference)) if round(abs(difference), 2) > half_width else 0


def beside(entry: Record, name: str, other: str) -> tuple[float, float]:
    """Return how much better one candidate of a set is than another, with the half-width.

    Half-widths are stored against the average only. For other pairs both are combined, as if they
    were independent.
    """
    one, two = entry["scores"][name], entry["scores"][other]
    return one["score"] - two["score"], float(np.hypot(one["half_width"], two["half_width"]))


# ---------------------------------------------------------------- statistics


def with_minus(text: str) -> str:
    """Numbers as they are printed, not typed."""
    return re.sub(r"-(?=\d)", "−", text)


@dataclass(frozen=True)
class Estimate:
    """A mean with its interval, which is not a number if there are too few bases."""

    mean: float
    low: float
    high: float
    bases: int

    @property
    def points(self) -> str:
        """The difference in words."""
        return self._text("{:+.1f}", 1)

    @property
    def percent(self) -> str:
        """The share in words."""
        return self._text("{:z.0f}%", 100)

    def _text(self, form: str, factor: float) -> str:
        if not self.bases:
            return "–"
        mean, low, high = (form.format(factor * v) for v in (self.mean, self.low, self.high))
        interval = f" ({low} … {high})".replace("%", "") if self.bases >= LEAST_BASES else ""
        return with_minus(mean + interval)

    @property
    def verdict(self) -> str:
        """What an effect in points amounts to, one of `VERDICTS`."""
        if self.low > -FREE_POINTS and self.high < FREE_POINTS:
            return "free"
        return "helps" if self.low > 0 else "hurts" if self.high < 0 else "not certain"


def estimate(values: Values) -> Estimate:
    """The mean over all values, and its interval by bootstrap over bases."""
    bases = sorted({base for base, _ in values})
    if not bases:
        return Estimate(np.nan, np.nan, np.nan, 0)
    groups = [[value for base, value in values if base == name] for name in bases]
    sums, counts = np.array(list(map(sum, groups))), np.array(list(map(len, groups)))
    mean = float(sums.sum() / counts.sum())
    if len(bases) < LEAST_BASES:
        return Estimate(mean, np.nan, np.nan, len(bases))
    drawn = np.random.default_rng(0).integers(len(bases), size=(RESAMPLES, len(bases)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.percentile(means, (2.5, 97.5))
    return Estimate(mean, float(low), float(high), len(bases))


def rank_correlation(
    models: Iterable[Record], size: Callable[[Record], float], *, same_base: bool
) -> float:
    """Kendall's, of a size and the gain lost at 0.9, over pairs of models of one base or of two."""
    signs = [
        np.sign(size(one) - size(other))
        * np.sign(kept(other, other["rescaled"]["0.9"]) - kept(one, one["rescaled"]["0.9"]))
        for one, other in combinations(models, 2)
        if (one["world"] == other["world"]) == same_base
    ]
    return float(np.mean(signs)) if signs else np.nan


# ---------------------------------------------------------------- for tables and figures


@dataclass(frozen=True)
class Cell:
    """An estimate with its place: a column of a table or an x of a figure, and a series."""

    x: str
    series: str
    estimate: Estimate
    panel: str = ""


def methods(sets: Sequence[Record]) -> list[str]:
    """Every method without DARE, the best first."""
    names = dict.fromkeys(name for entry in sets for name in entry["scores"])
    plain = [name for name in names if " " not in name and name not in ("base", "joint")]
    return sorted(plain, key=lambda name: -estimate(differences(sets, name)).mean)


def shares_by_rate(evidence: Evidence) -> list[Cell]:
    """The share of its gain that a single model keeps, by drop rate."""
    return [
        Cell(rate, part, estimate(shares(models, part, rate)), WAYS[way])
        for way, models in group(evidence.gainers, lambda model: str(model["way"])).items()
        for part in ("rescaled", "not rescaled")
        for rate in RATES
    ]


def effects_by_count(evidence: Evidence) -> list[Cell]:
    """The effect of DARE in points, by the number of models."""
    records = [{"world": q["world"], **found} for q in evidence.questions for found in q["counts"]]
    by_count = sorted(group(records, lambda found: str(found["models"])).items())
    return [
        Cell(count, dropped.split()[-1], estimate(differences(found, dropped, plain)), plain)
        for dropped, plain in DROPPED.items()
        for count, found in by_count
    ]


# ---------------------------------------------------------------- delta files


@dataclass(frozen=True)
class Storing:
    """What a scheme of `dare compress` keeps of a group of models."""

    scheme: str
    models: str
    bits: float
    """For each parameter, on average."""
    shares: Values

    @property
    def title(self) -> str:
        """The scheme with its size."""
        return f"{self.scheme} ({self.bits:.2f})"

    @property
    def kept(self) -> Estimate:
        """The mean share of the gain."""
        return estimate(self.shares)

    @property
    def worst(self) -> float:
        """The share of the model that keeps least."""
        return min(share for _, share in self.shares)

    @property
    def is_random(self) -> bool:
        """Whether elements were dropped at random, or not at all."""
        return self.scheme.startswith("random")

    def best_rival(self, others: Iterable[Storing]) -> Storing | None:
        """The random scheme that keeps most of the same models, of those that are no larger."""
        rivals = [
            other
            for other in others
            if other.is_random and other.models == self.models and other.bits <= self.bits
        ]
        return max(rivals, key=lambda other: other.kept.mean, default=None)

    def minus(self, other: Storing) -> Estimate:
        """How much more it keeps than another scheme, model by model."""
        pairs = zip(self.shares, other.shares, strict=True)
        return estimate([(base, ours - theirs) for (base, ours), (_, theirs) in pairs])


def storings(evidence: Evidence) -> list[Storing]:
    """Every scheme with every group of models."""
    models = [model for model in evidence.gainers if "stored" in model]
    tries = [{**model, **tried} for model in models for tried in model["stored"]]
    found = []
    for label, part in sorted(group(tries, way_and_size).items()):
        for scheme, tried in group(part, _scheme).items():
            values = [(entry["world"], kept(entry, entry["scores"])) for entry in tried]
            bits = float(np.mean([entry["bits_per_parameter"] for entry in tried]))
            found.append(Storing(scheme, label, bits, values))
    return found


def _scheme(tried: Record) -> str:
    width = tried["bits"] if tried["bits"] == "native" else f"{tried['bits']} bits"
    return f"{tried.get('keep', 'random')} {tried['drop_rate']:g}, {width}"
