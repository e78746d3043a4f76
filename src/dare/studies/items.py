"""What scores are made of: groups of items, parts of them for racing, and chosen subsets.

All choices follow from the ids and a seed, by a hash: neither the order of the items nor a version
of a package changes them.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dare.errors import InputError, RecipeError
from dare.studies.results import UNGROUPED, Scored, Subset, group_of
from dare.studies.scores import group_means

_LEAST = 10
"""A part of fewer items tells too little to stop anything."""
_PARTS = 4
"""How many parts there are at most: each costs a start of the evaluator."""
_LEVELS = 3
"""Scores other than 0 and 1 count as low, middle or high in their group."""
_DRAWN_OF_EACH = 5
"""How many items are drawn of a stratum, on average: with fewer, the least that each must have
leaves nothing to choose, and there is no telling how much a stratum varies."""
_LOWEST_SPREAD = 0.7
"""The least spread that a stratum is given, as a share of its group's: agreement of the baselines
does not mean that candidates agree with them. In simulations 0.25 lost a quarter of the gain."""


def groups_of(ids: Iterable[str]) -> dict[str, list[str]]:
    """The ids of each group, all in their order."""
    groups: dict[str, list[str]] = {}
    for item_id in ids:
        groups.setdefault(group_of(item_id), []).append(item_id)
    return groups


def scores_of(
    items: Mapping[str, float], weights: Mapping[str, float] | None = None
) -> dict[str, float]:
    """The mean of each group, or the weighted mean of those of its items that are there.

    >>> scores_of({"add/1": 1.0, "add/2": 0.0, "sort/1": 1.0})
    {'add': 0.5, 'sort': 1.0}
    """
    if weights is None:
        return group_means(items)
    return {
        group: math.fsum(weights[i] * items[i] for i in ids) / math.fsum(weights[i] for i in ids)
        for group, ids in groups_of(items).items()
    }


def groups_of_scores(scored: Scored, weights: Mapping[str, float] | None = None) -> dict[str, str]:
    """For each score that is the mean of a group of items: the group.

    One score and items without groups belong together, whatever the score is called.
    """
    means = scores_of(scored.items, weights)
    if set(means) == {UNGROUPED} and len(scored.scores) == 1:
        groups = dict.fromkeys(scored.scores, UNGROUPED)
    else:
        groups = {name: name for name in scored.scores if name in means}
    return {
        name: group
        for name, group in groups.items()
        if math.isclose(scored.scores[name], means[group], rel_tol=1e-6, abs_tol=1e-6)
    }


def _shuffled(ids: Iterable[str], seed: int) -> list[str]:
    """The ids in an order that only they and the seed decide."""
    return sorted(set(ids), key=lambda item_id: (_hash(item_id, seed), item_id))


def _hash(text: str, seed: int) -> bytes:
    seeded = f"{seed}\0{text}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(seeded, digest_size=8).digest()


# ------------------------------------------------------------------------------------- racing


def rungs(
    ids: Iterable[str], *, reduction: int = 3, least: int | None = None, seed: int
) -> list[list[str]]:
    """Parts of the items for racing: what each rung adds to those before it; the last makes all.

    Each rung has about `reduction` times as many items as all before it, and takes each group by
    its share. The first has at least `least` items and one of each group. So few items that no
    part would tell anything are one rung.

    >>> [len(rung) for rung in rungs((f"add/{n}" for n in range(270)), seed=0)]
    [10, 20, 60, 180]
    """
    if reduction < 2:
        raise RecipeError(f"racing: reduction must be 2 or more, not {reduction}")
    groups = groups_of(_shuffled(ids, seed))
    # Each group's items are spread evenly over 0 … 1, so that every beginning has its share.
    places = [
        (place / len(group), _hash(item_id, seed), item_id)
        for group in groups.values()
        for place, item_id in enumerate(group)
    ]
    order = [item_id for *_, item_id in sorted(places)]
    least = max(_LEAST if least is None else least, len(groups), 1)
    ends = [len(order)]
    while len(ends) < _PARTS and ends[0] // reduction >= least:
        ends.insert(0, ends[0] // reduction)
    return [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]


# ------------------------------------------------------------------------------------- subsets


@dataclass(frozen=True)
class _Stratum:
    """Items of one group that the baselines find alike."""

    ids: tuple[str, ...]
    spread: float
    """The standard deviation of all their scores, over items and baselines."""


def choose_subset(by_baseline: Mapping[str, Mapping[str, float]], count: int, seed: int) -> Subset:
    """Choose items that stand for all, by what the baselines make of them.

    Items of a group that all baselines score alike are a stratum; small strata are joined with
    the nearest. Strata are drawn from by Neyman's rule: the larger a stratum's share of its group
    and the less the baselines agree in it, the more. As each drawn item counts for as many as its
    stratum has for each drawn, scores are estimated without bias whatever the strata are.
    """
    ids = _common_ids(by_baseline)
    groups = groups_of(ids)
    count = min(count, len(ids))
    if count < len(groups):
        raise RecipeError(
            f"a subset of {count} items cannot have one of each of {len(groups)} groups; "
            f"choose {len(groups)} or more"
        )
    scores = np.array([[items[i] for i in ids] for items in by_baseline.values()]).T
    row = {item_id: place for place, item_id in enumerate(ids)}
    sizes = {group: len(members) for group, members in groups.items()}
    allowed = _shares(sizes, count // _DRAWN_OF_EACH)
    strata: dict[str, _Stratum] = {}
    for group, members in groups.items():
        found = _strata(members, scores[[row[i] for i in members]], allowed[group])
        strata |= {f"{group}/{number}": stratum for number, stratum in enumerate(found)}
    drawn = _allocation(strata, groups, count)
    chosen = {name: _shuffled(strata[name].ids, seed)[:number] for name, number in drawn.items()}
    stratum_of = {i: name for name, members in chosen.items() for i in members}
    return Subset(
        ids=tuple(i for i in ids if i in stratum_of),
        weights={
            i: len(strata[name].ids) / (len(groups[group_of(i)]) * drawn[name])
            for i, name in stratum_of.items()
        },
        strata=stratum_of,
        sizes={name: len(stratum.ids) for name, stratum in strata.items()},
    )


def _common_ids(by_baseline: Mapping[str, Mapping[str, float]]) -> list[str]:
    if not by_baseline:
        raise InputError(
            "a subset is chosen from the items of the baselines, and the evaluator gives none"
        )
    common = set.intersection(*(set(items) for items in by_baseline.values()))
    if not common:
        raise InputError(
            f"the baselines {', '.join(by_baseline)} have no items in common; "
            "a subset needs an evaluator that gives the same items each time"
        )
    return sorted(common)


def _shares(sizes: Mapping[str, int], total: int) -> dict[str, int]:
    """How many strata each group may have: by its size, at least one."""
    more, whole = max(0, total - len(sizes)), sum(sizes.values())
    return {name: 1 + more * size // whole for name, size in sizes.items()}


def _strata(ids: Sequence[str], scores: np.ndarray, most: int) -> list[_Stratum]:
    """Items with the same pattern of scores (items × baselines), joined until there are few."""
    patterns: dict[bytes, list[int]] = {}
    for place, pattern in enumerate(_quantised(scores)):
        patterns.setdefault(pattern.tobytes(), []).append(place)
    members = [patterns[key] for key in sorted(patterns)]
    centres = np.array([scores[places].mean(axis=0) for places in members])
    sizes = np.array([float(len(places)) for places in members])
    tiny = max(2, len(ids) // (4 * most))
    for left in range(len(members), 1, -1):
        smallest = int(np.argmin(sizes))
        if left <= most and sizes[smallest] >= tiny:
            break
        distances = np.square(centres - centres[smallest]).sum(axis=1)
        distances[np.isinf(sizes)] = distances[smallest] = np.inf
        nearest = int(np.argmin(distances))
        members[nearest] += members[smallest]
        joined = sizes[nearest] + sizes[smallest]
        centres[nearest] += (centres[smallest] - centres[nearest]) * sizes[smallest] / joined
        sizes[nearest], sizes[smallest], members[smallest] = joined, np.inf, []
    floor = _LOWEST_SPREAD * float(scores.std()) or 1.0
    return [
        _Stratum(tuple(ids[n] for n in places), max(float(scores[places].std()), floor))
        for places in members
        if places
    ]


def _quantised(scores: np.ndarray) -> np.ndarray:
    """The scores as small whole numbers: 0 and 1 as they are, others by thirds of their ranks."""
    if np.isin(scores, (0.0, 1.0)).all():
        return scores.astype(np.int8)
    cuts = np.quantile(scores, np.arange(1, _LEVELS) / _LEVELS, axis=0)
    return np.asarray((scores[:, None, :] > cuts[None]).sum(axis=1), dtype=np.int8)


def _allocation(
    strata: Mapping[str, _Stratum], groups: Mapping[str, Sequence[str]], count: int
) -> dict[str, int]:
    """How many items of each stratum make the variance of the groups' scores least.

    One item at a time goes where it lowers the variance most, which is the optimum.
    """
    sizes = {name: len(stratum.ids) for name, stratum in strata.items()}
    share = {name: sizes[name] / len(groups[_group(name)]) for name in strata}
    variance = {name: (share[name] * strata[name].spread) ** 2 for name in strata}
    two = {name: min(2, size) for name, size in sizes.items()}
    drawn = two if sum(two.values()) <= count else dict.fromkeys(strata, 1)
    heap = [(-variance[name] / (n * (n + 1)), name) for name, n in drawn.items() if n < sizes[name]]
    heapq.heapify(heap)
    for _ in range(count - sum(drawn.values())):
        _, name = heapq.heappop(heap)
        drawn[name] += 1
        if (n := drawn[name]) < sizes[name]:
            heapq.heappush(heap, (-variance[name] / (n * (n + 1)), name))
    return drawn


def _group(stratum: str) -> str:
    return stratum.rpartition("/")[0]


def estimate(
    subset: Subset, items: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, float]]:
    """The scores of the groups by a subset, and their standard errors.

    The error is the one of drawing some items of each stratum and not all: where all are drawn, it
    is zero. A stratum's variance is its own, drawn towards what the strata of its group have in
    common as if by one more item; a stratum with one drawn item has the common one.
    """
    missing = [item_id for item_id in subset.ids if item_id not in items]
    if missing:
        raise InputError(
            f"{len(missing)} of the {len(subset.ids)} items of the subset have no score, such as "
            f"{missing[0]!r}; the evaluator must score all items that it is given"
        )
    values: dict[str, list[float]] = {}
    for item_id in subset.ids:
        values.setdefault(subset.strata[item_id], []).append(items[item_id])
    scores = scores_of({i: items[i] for i in subset.ids}, subset.weights)
    groups: dict[str, list[str]] = {}
    for name in values:
        groups.setdefault(_group(name), []).append(name)
    errors = {}
    for group, names in groups.items():
        common = _common_variance([values[name] for name in names], list(values.values()))
        whole = sum(subset.sizes[name] for name in names)
        errors[group] = math.sqrt(
            math.fsum(
                (subset.sizes[name] / whole) ** 2
                * (1 - len(values[name]) / subset.sizes[name])
                * _variance(values[name], common)
                / len(values[name])
                for name in names
            )
        )
    return scores, {group: errors[group] for group in scores}


def _variance(values: Sequence[float], common: float) -> float:
    return (len(values) * float(np.var(values)) + common) / len(values)


def _common_variance(strata: Sequence[Sequence[float]], of_all: Sequence[Sequence[float]]) -> float:
    """The variance within the strata of a group, as if one more item varied like the group.

    Where no stratum has two items, the group varies between strata too, which is rather more.
    """
    freedom = sum(len(values) - 1 for values in strata)
    within = sum(len(values) * float(np.var(values)) for values in strata)
    of_group = [value for values in strata for value in values]
    between = float(np.var(of_group))
    if not freedom and not between:
        everything = [value for values in of_all for value in values]
        # One item says nothing of its variance: the largest between 0, 1 and itself is taken.
        largest = (max(1.0, *of_group) - min(0.0, *of_group)) ** 2 / 4
        between = float(np.var(everything)) or largest
    return (within + between) / (freedom + 1)
