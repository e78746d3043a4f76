"""Intervals of scores and of their differences, by chance in items and seeds; parts for racing.

Scores differ for two reasons when nothing is better: the choice of items, and the seed of a random
merge. For a contender by itself, items are resampled with replacement, within each group. Seeds are
too few for that: the mean over S seeds varies as Student's t with S - 1 degrees of freedom, scaled
by the spread of the seeds, for each contender by itself. As far as draws are above the observed
value, the truth may be below it (the basic bootstrap).

Differences are paired, so that what is hard for all cancels. If nothing is better, an item might
just as well have favoured the other contender: the signs of all its differences are drawn at
random, many times. For two contenders whose items are right or wrong this is the sign test, which
also holds for few items; a bootstrap would call four items out of four a difference. Contenders are
compared because of their scores, so the interval of a difference holds for all pairs at once: each
pair has its standard error under no difference, and all intervals extend by as many standard errors
as the farthest pair reaches in 95% of the draws (as in Tukey's range test).

Items that belong together by their ids, a *cluster*, are drawn together and count as one.

A score counts as a *share* if all its items (its values, if it has none) are in 0 … 1 for all
contenders, and its name is not that of an error. An objective of shares has bounds, and so do its
intervals: the error of the mean is assumed to shrink towards the bounds like that of a share, which
gives Wilson's interval if items are right or wrong. Items that are all 0 or all 1 show no spread:
the share of other items that they may have missed is drawn as for Clopper and Pearson's interval.

All numbers come from PCG64 with fixed seeds: the same study gives the same intervals.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from dare.errors import InputError, RecipeError
from dare.studies.judging import Objective
from dare.studies.results import (
    Contender,
    Estimate,
    Scored,
    cluster_of,
    groups_of,
    groups_of_scores,
)

BETTER, WORSE, NO_DIFFERENCE, NOT_KNOWN = "better", "worse", "no clear difference", "not known"
LEAST_ITEMS = 10  # with fewer items, a part says too little to give up a candidate
MOST_RUNGS = 4  # the most parts: each costs a start of the evaluator
REDUCTION = 3  # each part triples the number of items
_ERRORS_BEHIND = 2.0  # standard errors behind the best at which a candidate is given up
_TAILS = (0.025, 0.975)
_MOST_NUMBERS = 8_000_000  # the most numbers that a step of the resampling holds at once
_MOST_PAIRS = 200_000_000  # the most draws of pairs; more contenders have fewer draws
_ROUNDING = 1e-12
_SMALLER_IS_BETTER = {"loss", "perplexity", "ppl", "bits", "bpb", "error", "err", "nll", "wer"}
# With this exponent, 95% of two-sided draws reach as far as 97.5% of one-sided draws.
_TWO_SIDED_EXPONENT = math.log(0.05) / math.log(0.025)


@dataclass(frozen=True)
class Resampled:
    """The objectives of contenders, as observed and as chance might have made them."""

    values: np.ndarray  # by contender: the mean over its seeds of the objective
    paired: np.ndarray  # the same, on the items that all have
    draws: np.ndarray  # contenders × resamples, each by itself
    flips: np.ndarray  # contenders × resamples: deviations if no contender is better than another
    errors: np.ndarray  # contenders × contenders: standard errors if there is no difference
    seeds: tuple[int, ...]
    is_random: tuple[bool, ...]
    items: int  # items that all have, in the groups that count; 0: chance in items is not known
    left_out: int  # items that some have and others lack
    without_items: tuple[str, ...]  # scores that are not made of items, and do not vary
    bounds: tuple[float, float]  # of the objective; infinite where there are none
    freedom: int  # degrees of freedom that the items leave
    is_extreme: np.ndarray  # by contender: if all items of a group are right, or all are wrong

    def estimate(self, place: int) -> Estimate:
        """Return a contender's objective, with the interval that holds for it alone."""
        value = float(self.values[place])
        if not self.items and self.seeds[place] < 2:
            return Estimate(value)
        deviations = self.draws[place] - self.paired[place]
        if all(map(math.isfinite, self.bounds)):
            return self._within_bounds(value, deviations, is_exact=bool(self.is_extreme[place]))
        low, high = np.quantile(deviations, _TAILS)
        return Estimate(value, *np.clip((value - high, value - low), *self.bounds).tolist())

    def _within_bounds(self, value: float, deviations: np.ndarray, *, is_exact: bool) -> Estimate:
        """Return Wilson's interval for the spread of the draws; as drawn if `is_exact`."""
        least, span = self.bounds[0], self.bounds[1] - self.bounds[0]
        part = min(1.0, max(0.0, (value - least) / span))
        shift = float(deviations.mean()) / span
        half = float(np.quantile(np.abs(deviations / span - shift), _TAILS[1] - _TAILS[0]))
        if is_exact or min(part, 1 - part) <= _ROUNDING:
            low, high = max(0.0, part - half), min(1.0, part + half)
        else:
            if self.freedom:
                half *= _student_factor(self.freedom)
            middle = min(1.0, max(0.0, part - shift))
            ratio = half * half / (part * (1 - part))
            root = math.sqrt(ratio * (ratio + 4 * middle * (1 - middle)))
            low, high = ((2 * middle + ratio + sign * root) / (2 * (1 + ratio)) for sign in (-1, 1))
            low, high = max(0.0, min(low, part)), min(1.0, max(high, part))
        return Estimate(value, least + low * span, least + high * span)

    def difference(self, place: int, other: int) -> Estimate:
        """Return a contender's objective minus another's, on the same items.

        The interval holds for all pairs of contenders at once, so also for pairs that were chosen.
        """
        span = self.bounds[1] - self.bounds[0]
        value = max(-span, min(span, float(self.paired[place] - self.paired[other])))
        if not self._has_interval(place, other):
            return Estimate(value)
        half = self._reach * float(self.errors[place, other])
        # The same weights scored twice must not differ by rounding errors.
        rounding = _ROUNDING * max(1e-300, *np.abs(self.paired[[place, other]]))
        ends = (value, max(-span, value - half), min(span, value + half))
        return Estimate(*(0.0 if abs(end) <= rounding else end for end in ends))

    @functools.cached_property
    def _reach(self) -> float:
        """The standard errors that the farthest of all pairs reaches in 95% of the draws."""
        count, resamples = self.flips.shape
        flips = self.flips[:, : min(resamples, max(200, _MOST_PAIRS // count**2))]
        largest = np.zeros(flips.shape[1])
        for place in range(count - 1):
            moves = place + 1 + np.flatnonzero(self.errors[place, place + 1 :])
            reaches = np.abs(flips[moves] - flips[place]) / self.errors[place, moves, None]
            np.maximum(largest, reaches.max(axis=0, initial=0), out=largest)
        # Draws that reach as far as what was seen may round to less.
        return float(np.quantile(largest, _TAILS[1] - _TAILS[0])) * (1 + 1e-9)

    def _has_interval(self, *places: int) -> bool:
        if self.items:
            return True
        unknown = any(self.is_random[place] and self.seeds[place] < 2 for place in places)
        return not unknown and any(self.seeds[place] > 1 for place in places)


def verdict(difference: Estimate, sign: int = 1) -> str:
    """Return the verdict on a difference; `sign` is -1 if less is better.

    If 0 is in its interval, there is no clear difference.
    """
    if difference.low is None or difference.high is None:
        return NOT_KNOWN
    if difference.low <= 0 <= difference.high:
        return NO_DIFFERENCE
    return BETTER if sign * difference.low > 0 else WORSE


def resample(
    contenders: Sequence[Contender], objective: Objective, *, resamples: int = 2000
) -> Resampled:
    """Resample items and seeds, many times."""
    trials = [scored for contender in contenders for scored in contender.scored]
    if not trials or not all(contender.scored for contender in contenders):
        raise InputError("nothing to compare: each contender needs a scored trial")
    names = [n for n in trials[0].scores if all(n in scored.scores for scored in trials)]
    weights = objective.shares(names)
    used = list(weights)
    scores = {name: np.array([scored.scores[name] for scored in trials]) for name in names}
    groups, left_out = _in_common(trials, used)
    columns = {name: _Group.of(trials, ids, name) for name, ids in groups.items()}
    sizes = [len(contender.scored) for contender in contenders]
    starts = np.cumsum([0, *sizes[:-1]])
    of_trials = _resample_items(objective, scores, columns, resamples)
    paired = objective.values(scores | {name: group.means for name, group in columns.items()})
    draws, by_seeds = _vary_by_seeds(of_trials, paired, starts, sizes)
    of_groups = [weights[n] * group.sums / group.sizes.sum() for n, group in columns.items()]
    parts = np.concatenate([np.zeros((1, len(trials))), *of_groups])
    of_contenders = np.add.reduceat(parts, starts, axis=1) / sizes
    flips, errors = _flip_signs(of_contenders, by_seeds, sizes, resamples)
    shares = {
        name: columns[name].is_share if name in columns else _is_share(name, column)
        for name, column in scores.items()
    }
    extremes = [np.zeros(len(trials), bool), *(group.is_extreme for group in columns.values())]
    return Resampled(
        values=np.add.reduceat(objective.values(scores), starts) / sizes,
        paired=np.add.reduceat(paired, starts) / sizes,
        draws=draws,
        flips=flips,
        errors=errors,
        seeds=tuple(sizes),
        is_random=tuple(contender.is_random for contender in contenders),
        items=sum(int(group.sizes.sum()) for group in columns.values()),
        left_out=left_out,
        without_items=tuple(name for name in used if name not in columns),
        bounds=objective.bounds(
            {n: (0.0, 1.0) if known else (-math.inf, math.inf) for n, known in shares.items()}
        ),
        freedom=sum(len(group.sizes) - 1 for group in columns.values()),
        is_extreme=np.logical_or.reduceat(np.any(extremes, axis=0), starts),
    )


def sounds_like_an_error(name: str) -> bool:
    """Tell if a score's name says that it has no upper bound and should be small."""
    return not _SMALLER_IS_BETTER.isdisjoint(re.split(r"[^a-z]+", name.lower()))


def _is_share(name: str, values: np.ndarray) -> bool:
    """Tell if a score, or its items, may count as shares."""
    return not sounds_like_an_error(name) and bool((values >= 0).all() and (values <= 1).all())


def _in_common(trials: Sequence[Scored], used: Sequence[str]) -> tuple[dict[str, list[str]], int]:
    """Return the items that all trials have, for each score made of at least two clusters."""
    made = [groups_of_scores(scored) for scored in trials]
    if not all(made):
        return {}, 0
    ids = [set(scored.items) for scored in trials]
    common = set.intersection(*ids)
    members = groups_of(sorted(common))
    groups = {
        name: members[group]
        for name, group in made[0].items()
        if name in used
        and all(other.get(name) == group for other in made)
        and len(set(map(cluster_of, members.get(group, ())))) > 1
    }
    return groups, len(set.union(*ids)) - len(common)


@dataclass(frozen=True)
class _Group:
    sums: np.ndarray  # clusters × trials: of the items of each cluster
    sizes: np.ndarray  # items by cluster
    means: np.ndarray  # by trial
    is_share: bool

    @classmethod
    def of(cls, trials: Sequence[Scored], ids: Sequence[str], name: str) -> _Group:
        values = np.array([[scored.items[i] for scored in trials] for i in ids])
        clusters: dict[str, int] = {}
        places = [clusters.setdefault(cluster_of(i), len(clusters)) for i in ids]
        sums = np.zeros((len(clusters), len(trials)))
        np.add.at(sums, places, values)
        means = np.full(len(ids), 1 / len(ids)) @ values
        return cls(sums, np.bincount(places), means, _is_share(name, values))

    def drawn(self, streams: Sequence[np.random.Generator], resamples: int) -> np.ndarray:
        """Return the means of trials on resampled clusters: trials × resamples."""
        random, other = streams
        count = len(self.sizes)
        places = random.integers(count, size=(resamples, count))
        places += np.arange(resamples)[:, None] * count
        counts = np.bincount(places.ravel(), minlength=resamples * count)
        counts = counts.reshape(resamples, count)
        means = (counts / (counts @ self.sizes)[:, None]) @ self.sums
        seen = self.means[:, None]
        # Drawing from n clusters has (n - 1) / n of the variance of n new ones.
        drawn = np.asarray(seen + (means.T - seen) * math.sqrt(count / (count - 1)))
        if self.is_share and self.is_extreme.any():
            chance = other.uniform(-1, 1, resamples)
            missed = np.sign(chance) * (1 - np.abs(chance) ** (1 / (_TWO_SIDED_EXPONENT * count)))
            sign = np.where(self.means < 0.5, 1, -1)[self.is_extreme, None]
            drawn[self.is_extreme] = seen[self.is_extreme] + sign * missed
        return drawn

    @functools.cached_property
    def is_extreme(self) -> np.ndarray:
        """True for each trial whose items are all 0, or all 1."""
        wrong = self.sizes[:, None] - self.sums
        ends = (self.sums == 0).all(axis=0) | (wrong == 0).all(axis=0)
        return np.asarray(ends & self.is_share)


def _resample_items(
    objective: Objective,
    scores: Mapping[str, np.ndarray],
    columns: Mapping[str, _Group],
    resamples: int,
) -> np.ndarray:
    """Return the objectives of the trials on resampled items: trials × resamples."""
    # Each group has its own streams, which do not depend on the number of draws in a step.
    random = {k: (_stream(0, 0, n), _stream(0, 3, n)) for n, k in enumerate(columns)}
    trials = len(next(iter(scores.values())))
    widest = max([len(scores) * trials, *(len(group.sizes) for group in columns.values())])
    step = max(1, _MOST_NUMBERS // widest)
    parts = []
    for start in range(0, resamples, step):
        number = min(step, resamples - start)
        fixed = {n: np.broadcast_to(scores[n][:, None], (trials, number)) for n in scores}
        drawn = {name: group.drawn(random[name], number) for name, group in columns.items()}
        parts.append(objective.values(fixed | drawn))
    return np.concatenate(parts, axis=1)


def _vary_by_seeds(
    of_trials: np.ndarray, paired: np.ndarray, starts: np.ndarray, sizes: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return means over seeds as they might be with other seeds, and their standard errors."""
    draws, errors = np.empty((len(sizes), of_trials.shape[1])), np.zeros(len(sizes))
    for place, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        trials = slice(start, start + size)
        draws[place] = of_trials[trials].mean(axis=0)
        if size > 1:
            # The draws of items already contain the variation of which items a seed gets right.
            by_items = (of_trials[trials] - draws[place]).var(axis=1).sum() / (size - 1)
            variance = max(0.0, paired[trials].var(ddof=1) - by_items)
            student = _stream(0, 1, place).permutation(_student(size - 1, of_trials.shape[1]))
            errors[place] = math.sqrt(variance / size)
            draws[place] += student * errors[place]
    return draws, errors


def _flip_signs(
    parts: np.ndarray, by_seeds: np.ndarray, sizes: Sequence[int], resamples: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return how contenders deviate if none is better, and the standard errors of differences.

    `parts` are what clusters add to contenders' objectives: clusters × contenders.
    """
    parts = parts - parts.mean(axis=1, keepdims=True)  # how hard each cluster is for all
    random, step = _stream(0, 4), max(1, _MOST_NUMBERS // len(parts))
    steps = (min(step, resamples - start) for start in range(0, resamples, step))
    signs = (np.copysign(1, random.random((number, len(parts))) - 0.5) for number in steps)
    flips = np.concatenate([(some @ parts).T for some in signs], axis=1)
    # Normal draws are scaled so that the farthest mean over seeds reaches as far as with Student's
    # t: with the tails of t itself, one contender of two seeds would widen all other differences.
    places = np.flatnonzero(by_seeds).tolist()
    level = 1 - _TAILS[0] / max(1, len(places))
    normal = NormalDist().inv_cdf(level)
    for place in places:
        by_seeds[place] *= np.quantile(_student(sizes[place] - 1, resamples), level) / normal
        flips[place] += by_seeds[place] * _stream(0, 5, place).standard_normal(resamples)
    product = parts.T @ parts
    norms = np.diag(product)
    squares = norms[:, None] + norms - 2 * product
    squares[squares <= _ROUNDING * (norms[:, None] + norms)] = 0
    return flips, np.sqrt(squares + np.add.outer(by_seeds**2, by_seeds**2))


@functools.lru_cache(maxsize=16)
def _student(freedom: int, count: int) -> np.ndarray:
    """Return evenly spaced quantiles of Student's t: a few plain draws could miss its tails."""
    draws = np.sort(_stream(2, freedom).standard_t(freedom, size=count * 100 + 50))
    quantiles = draws[50::100][:count]
    return np.asarray((quantiles - quantiles[::-1]) / 2)


def _student_factor(freedom: int) -> float:
    """Return how much farther Student's t reaches than normal draws (Cornish and Fisher)."""
    z, n = 1.96, freedom
    terms = ((z**2 + 1) / 4, (5 * z**4 + 16 * z**2 + 3) / 96)
    third = (3 * z**6 + 19 * z**4 + 17 * z**2 - 15) / 384
    return 1 + terms[0] / n + terms[1] / n**2 + third / n**3


def _stream(*key: int) -> np.random.Generator:
    """Return a separate generator for each use and place."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))


# ------------------------------------------------------------------------------------- planning


def visible_difference(
    items: int, contenders: int, *, tasks: int = 1, agreement: float = 0.8
) -> float:
    """Return the true difference in the objective that a search shows in 80% of cases.

    Each task has `items` items, right or wrong, and two contenders agree on the share `agreement`
    of them. By the normal approximation, with as many tests as there are pairs.

    >>> round(visible_difference(200, 8, tasks=2), 3), items_needed(0.05, 8, tasks=2)
    (0.089, 629)
    """
    reach, count = _reach_needed(contenders), items * tasks
    # At least as many items differ as the difference requires.
    return min(1.0, max(reach * math.sqrt((1 - agreement) / count), reach**2 / count))


def items_needed(
    difference: float, contenders: int, *, tasks: int = 1, agreement: float = 0.8
) -> int:
    """Return how many items of each task are needed to show a difference."""
    differing = max(1 - agreement, difference)
    return math.ceil(differing * (_reach_needed(contenders) / difference) ** 2 / tasks)


def _reach_needed(contenders: int) -> float:
    """Return how many standard errors a difference needs to be shown in 80% of cases."""
    tails = 2 * _TAILS[0] / (contenders * (contenders - 1))
    return NormalDist().inv_cdf(1 - tails) + NormalDist().inv_cdf(0.8)


# ------------------------------------------------------------------------------------- racing


def rungs(ids: Iterable[str], *, seed: int) -> list[list[str]]:
    """Return the parts of the items for racing: the items that each adds to those before it.

    Each rung triples the number of clusters, about; it takes each group by its share, and at least
    one cluster of it. Too few items for useful parts are one rung.

    >>> [len(rung) for rung in rungs((f"add/{n}" for n in range(270)), seed=0)]
    [10, 20, 60, 180]
    """

    def place(cluster: str) -> tuple[bytes, str]:
        seeded = f"{seed}\0{cluster}".encode("utf-8", "surrogatepass")
        return hashlib.blake2b(seeded, digest_size=8).digest(), cluster

    clusters: dict[str, list[str]] = {}
    for item_id in sorted(set(ids)):
        clusters.setdefault(cluster_of(item_id), []).append(item_id)
    groups = groups_of(sorted(clusters, key=place))
    # Each group's clusters are spread evenly over 0 … 1, so that every first part has its share.
    spread = [
        (number / len(group), *place(cluster))
        for group in groups.values()
        for number, cluster in enumerate(group)
    ]
    order = [clusters[cluster] for *_, cluster in sorted(spread)]
    least = max(LEAST_ITEMS, len(groups))
    ends = [len(order)]
    while len(ends) < MOST_RUNGS and ends[0] // REDUCTION >= least:
        ends.insert(0, ends[0] // REDUCTION)
    parts = (order[start:end] for start, end in zip([0, *ends], ends, strict=False))
    return [[item_id for cluster in part for item_id in cluster] for part in parts]


def is_behind(items: Mapping[str, float], best: Mapping[str, float], objective: Objective) -> bool:
    """Tell if a candidate is clearly behind the best, by the items that were scored so far.

    It is if the objectives differ by more than two standard errors, computed for no difference.
    """
    groups = groups_of(item_id for item_id in items if item_id in best)
    try:
        shares = objective.shares(groups)
    except RecipeError:  # it asks for scores that are not made of items
        return False
    losses: defaultdict[str, float] = defaultdict(float)
    for name, share in shares.items():
        for item_id in groups[name]:
            loss = share * (best[item_id] - items[item_id]) / len(groups[name])
            losses[cluster_of(item_id)] += loss
    error = math.sqrt(math.fsum(loss**2 for loss in losses.values()))
    return bool(shares) and math.fsum(losses.values()) > _ERRORS_BEHIND * error
