"""Models whose changes are related: copies, multiples, models that are alike or opposed.

A relation holds for two models. A finding is about all models that it links, directly or by way of
others: three copies are one group, not three pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dare.analysis.results import PairAnalysis
from dare.documents.notices import LIMIT
from dare.tensors.names import some_of

# The values of a subject: what it is `about`, whom it `concerns`, and what texts fill in.
Values = dict[str, Any]


class Link:
    """Two models and their relation; `size` is the smaller ‖δ‖/‖base‖ of their layers."""

    def __init__(self, pair: PairAnalysis, size: float) -> None:
        self.pair, self.ends, self.cosine = pair, (pair.first, pair.second), pair.total.cosine
        # Much may be common to models that are not the same, such as a base rounded to 4 bits.
        own = size * math.sqrt(max(0.0, 1 - self.cosine**2))
        is_near = abs(self.cosine) >= LIMIT.same_cosine
        self.is_one_direction = is_near and own <= LIMIT.same_distance
        self.is_same = self.is_one_direction and abs(pair.ratio - 1) <= LIMIT.same_size


RELATIONS: dict[str, Callable[[Link], bool]] = {
    "same_model": lambda link: link.is_same,
    "multiple": lambda link: link.is_one_direction,
    "alike": lambda link: link.cosine >= LIMIT.alike_cosine and not link.is_one_direction,
    "opposed": lambda link: link.cosine <= -LIMIT.alike_cosine and not link.is_one_direction,
}


def find_groups(order: Sequence[str], links: Sequence[Link]) -> Iterator[Values]:
    """Yield the values of every group of models, by the rule that it falls under."""
    for rule, holds in RELATIONS.items():
        for names in connect(order, filter(holds, links)):
            inside = [link for link in links if set(link.ends) <= set(names)]
            if rule != "multiple" or not all(link.is_same for link in inside):
                yield _group(rule, names, inside)


def connect(order: Sequence[str], links: Iterable[Link]) -> list[tuple[str, ...]]:
    """Return the sets of models that links hold together, in the order of the models."""
    sets: list[set[str]] = []
    for link in links:
        ends = set(link.ends)
        apart = [names for names in sets if not names & ends]
        sets = [*apart, ends.union(*(names for names in sets if names & ends))]
    groups = [tuple(name for name in order if name in names) for names in sets]
    return sorted(groups, key=lambda names: order.index(names[0]))


def _group(rule: str, names: tuple[str, ...], inside: Sequence[Link]) -> Values:
    """Return the values of a group, by the links that the rule is about."""
    held = [link for link in inside if RELATIONS[rule](link)]
    whole = all(RELATIONS[rule](link) or link.is_one_direction for link in inside)
    cosines = [link.cosine for link in held]
    return {
        "about": rule,
        "concerns": names,
        "who": "They" if whole else some_of([" and ".join(link.ends) for link in held], 3),
        "how": f" or differ only by rounding ({cosines_text(cosines)})",
        "twice": "twice" if len(names) == 2 else f"{'' if whole else 'up to '}{len(names)} times",
        "cosine": min(cosines),
        "largest_cosine": max(cosines),
        "cosines": cosines_text(cosines),
        **_multiples(names[0], inside),
    }


def _multiples(first: str, links: Sequence[Link]) -> Values:
    """Return how many times the change of a group's first model the others are."""
    ratios = {link.pair.second: link.pair.ratio for link in links if link.pair.first == first}
    others = {name: r for name, r in ratios.items() if abs(r - 1) > LIMIT.same_size}
    is_opposite = min(ratios.values(), default=0) < 0
    return {
        "ratios": {f"ratio.{name}": ratio for name, ratio in ratios.items()},
        "multiples": some_of([f"{name} is {r:.3g} times {first}" for name, r in others.items()], 3),
        "direction": "opposite directions" if is_opposite else "the same direction",
        "effect": "they cancel each other out" if is_opposite else "it counts more than once",
    }


def is_against(figures: Mapping[str, float], one: str, other: str) -> bool:
    """Tell if one of some multiples goes against another, by the ratios in a finding's figures."""
    return figures.get(f"ratio.{one}", 1.0) * figures.get(f"ratio.{other}", 1.0) < 0


# ---------------------------------------------------------------- words


@dataclass(frozen=True)
class ValueRange:
    """The least and the largest of some values, or the one value that they are as written.

    >>> f"{ValueRange([0.5, 0.2, 0.3]):.0%}, {ValueRange([0.501, 0.499]):.2f}"
    '20% to 50%, 0.50'
    """

    values: Sequence[float]

    def __format__(self, form: str) -> str:
        ends = dict.fromkeys(format(value, form) for value in (min(self.values), max(self.values)))
        return " to ".join(ends)


def cosines_text(values: Sequence[float]) -> str:
    """Return some cosines for a sentence, each with its sign.

    >>> cosines_text([-0.99999, 1.0]), cosines_text([0.0121, 0.0119])
    ('cosines -1.000 to +1.000', 'cosine +0.012')
    """
    ends = f"{ValueRange(values):+.3f}"
    return f"cosines {ends}" if " to " in ends else f"cosine {ends}"
