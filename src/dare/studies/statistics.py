"""The reach of chance: intervals over items and seeds, parts for racing, fronts of scores.

Two things make a score differ when nothing is better: which items there are, and the seed of a
random merge. Items are drawn anew with replacement, within each group and for all contenders
alike, so that what is hard for all cancels in differences (a paired bootstrap). Few seeds cannot be
drawn from like that: the mean over S seeds varies as Student's t with S - 1 degrees of freedom,
scaled by the seeds' own spread, for each contender by itself. As far as draws lie above what was
seen, the truth may lie below it (the basic bootstrap).

A score is taken for a *share* if all its items (its values, where it has none) lie in 0 … 1 for all
contenders, and its name is not that of an error. An objective of shares has bounds, and so have its
intervals: the error of the mean is taken to shrink towards the bounds as that of a share, which
is Wilson's interval where items are right or wrong. Items that are all 0 or all 1 show no spread:
the share of others that they may have missed is drawn as Clopper and Pearson have it.

All numbers come from PCG64 with fixed seeds: the same study gives the same intervals.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dare.errors import InputError
from dare.recipe.search import Objective
from dare.studies.results import Entry, Estimate, Scored, groups_of, groups_of_scores

BETTER, WORSE, NO_DIFFERENCE, NOT_KNOWN = "better", "worse", "no clear difference", "not known"
LEAST_ITEMS = 10  # a part of fewer items tells too little to stop anything
MOST_RUNGS = 4  # the most parts: each costs a start of the evaluator
REDUCTION = 3  # each part makes three times as many items, and one in three candidates goes on
_TAILS = (0.025, 0.975)
_MOST_NUMBERS = 8_000_000  # the most numbers that a step of the resampling holds at once
_ROUNDING = 1e-12
_SMALLER_IS_BETTER = {"loss", "perplexity", "ppl", "bits", "bpb", "error", "err", "nll", "wer"}
# Makes 95 % of draws of both signs reach as far as 97.5 % of draws of one.
_BOTH_SIDES = math.log(0.05) / math.log(0.025)


@dataclass(frozen=True)
class Resampled:
    """The objectives of contenders, as they are and as chance might have made them."""

    values: np.ndarray  # by contender: the mean over its seeds of the objective
    paired: np.ndarray  # the same, on the items that all have
    draws: np.ndarray  # contenders × resamples
    seeds: tuple[int, ...]
    is_random: tuple[bool, ...]
    items: int  # items that all have, in the groups that count; 0: chance in items is not known
    left_out: int  # items that some have and others lack
    without_items: tuple[str, ...]  # scores that are not made of items, and held as they are
    bounds: tuple[float, float]  # of the objective; infinite where there are none
    freedom: int  # degrees of freedom that the items leave

    def estimate(self, place: int) -> Estimate:
        """A contender's objective, with the interval that holds for it alone."""
        value = float(self.values[place])
        if not self.items and self.seeds[place] < 2:
            return Estimate(value)
        deviations = self.draws[place] - self.paired[place]
        if all(map(math.isfinite, self.bounds)):
            return self._within_bounds(value, deviations)
        low, high = np.quantile(deviations, _TAILS)
        return Estimate(value, *np.clip((value - high, value - low), *self.bounds).tolist())

    def _within_bounds(self, value: float, deviations: np.ndarray) -> Estimate:
        """Wilson's interval, for whatever spread the draws have."""
        least, span = self.bounds[0], self.bounds[1] - self.bounds[0]
        part = min(1.0, max(0.0, (value - least) / span))
        shift = float(deviations.mean()) / span
        half = float(np.quantile(np.abs(deviations / span - shift), _TAILS[1] - _TAILS[0]))
        if min(part, 1 - part) <= _ROUNDING:
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

    def difference(self, place: int, other: int, among: Sequence[int] = ()) -> Estimate:
        """A contender's objective minus another's, on the same items.

        If it was chosen as the best `among` some, the interval is wide enough to hold for the
        differences of all of them from the other at once; hence also for the one that was chosen.
        """
        span = self.bounds[1] - self.bounds[0]
        value = max(-span, min(span, float(self.paired[place] - self.paired[other])))
        if not self._tells_chance(place, other):
            return Estimate(value)
        rivals = [place, *(rival for rival in among if rival not in (place, other))]
        deviations = self.draws[rivals] - self.draws[other]
        deviations -= (self.paired[rivals] - self.paired[other])[:, None]
        lows, highs = np.quantile(deviations, _TAILS, axis=1)
        low, high = float(lows[0]), float(highs[0])
        halves = np.maximum(-lows, highs)
        # The same weights twice must not differ by what rounding leaves.
        rounding = _ROUNDING * max(1e-300, *np.abs(self.paired[[place, other]]))
        moves = halves > rounding
        if len(rivals) > 1 and moves[0]:
            largest = np.max(np.abs(deviations[moves]) / halves[moves, None], axis=0)
            high = float(halves[0] * max(1.0, np.quantile(largest, _TAILS[1] - _TAILS[0])))
            low = -high
        ends = (value, max(-span, value - high), min(span, value - low))
        return Estimate(*(0.0 if abs(end) <= rounding else end for end in ends))

    def _tells_chance(self, *places: int) -> bool:
        if self.items:
            return True
        unknown = any(self.is_random[place] and self.seeds[place] < 2 for place in places)
        return not unknown and any(self.seeds[place] > 1 for place in places)


def verdict(difference: Estimate) -> str:
    """Return what a difference shows: 0 in its interval shows nothing."""
    if difference.low is None or difference.high is None:
        return NOT_KNOWN
    if difference.low > 0:
        return BETTER
    return WORSE if difference.high < 0 else NO_DIFFERENCE


def resample(
    contenders: Sequence[Entry], objective: Objective, *, resamples: int = 2000, seed: int = 0
) -> Resampled:
    """Draw items and seeds anew, many times."""
    trials = [scored for contender in contenders for scored in contender.scored]
    if not trials or not all(contender.scored for contender in contenders):
        raise InputError("nothing to compare: each contender needs a scored trial")
    names = [n for n in trials[0].scores if all(n in scored.scores for scored in trials)]
    used = list(objective.shares(names))
    own = {name: np.array([scored.scores[name] for scored in trials]) for name in names}
    groups, left_out = _in_common(trials, used)
    columns = {name: _Group.of(trials, ids, name) for name, ids in groups.items()}
    sizes = [len(contender.scored) for contender in contenders]
    starts = np.cumsum([0, *sizes[:-1]])
    of_trials = _drawn(objective, own, columns, resamples, seed)
    paired = objective.values(own | {name: group.means for name, group in columns.items()})
    shares = {
        name: columns[name].is_share if name in columns else _is_share(name, column)
        for name, column in own.items()
    }
    return Resampled(
        values=np.add.reduceat(objective.values(own), starts) / sizes,
        paired=np.add.reduceat(paired, starts) / sizes,
        draws=_over_seeds(of_trials, paired, starts, sizes, seed),
        seeds=tuple(sizes),
        is_random=tuple(contender.is_random for contender in contenders),
        items=sum(len(group.values) for group in columns.values()),
        left_out=left_out,
        without_items=tuple(name for name in used if name not in columns),
        bounds=objective.bounds(
            {n: (0.0, 1.0) if known else (-math.inf, math.inf) for n, known in shares.items()}
        ),
        freedom=sum(len(group.values) - 1 for group in columns.values()),
    )


def sounds_like_an_error(name: str) -> bool:
    """Tell if a score is called like something that has no upper end, and should be small."""
    return not _SMALLER_IS_BETTER.isdisjoint(re.split(r"[^a-z]+", name.lower()))


def _is_share(name: str, values: np.ndarray) -> bool:
    """Tell if a score, or its items, may be taken for shares of something."""
    return not sounds_like_an_error(name) and bool((values >= 0).all() and (values <= 1).all())


def _in_common(trials: Sequence[Scored], used: Sequence[str]) -> tuple[dict[str, list[str]], int]:
    """For each score that is made of items in all trials: those that all have, two or more."""
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
        and len(members.get(group, ())) > 1
    }
    return groups, len(set.union(*ids)) - len(common)


@dataclass(frozen=True)
class _Group:
    values: np.ndarray  # items × trials
    means: np.ndarray  # by trial
    is_share: bool

    @classmethod
    def of(cls, trials: Sequence[Scored], ids: Sequence[str], name: str) -> _Group:
        values = np.array([[scored.items[i] for scored in trials] for i in ids])
        return cls(values, np.full(len(ids), 1 / len(ids)) @ values, _is_share(name, values))

    def drawn(self, streams: Sequence[np.random.Generator], resamples: int) -> np.ndarray:
        """The means of trials on items drawn anew: trials × resamples."""
        random, other = streams
        count = len(self.values)
        places = random.integers(count, size=(resamples, count))
        places += np.arange(resamples)[:, None] * count
        counts = np.bincount(places.ravel(), minlength=resamples * count)
        means = (counts.reshape(resamples, count) / count) @ self.values
        own = self.means[:, None]
        # Drawing from n items varies by n - 1 parts in n of what n new items would.
        drawn = np.asarray(own + (means.T - own) * math.sqrt(count / (count - 1)))
        extremes = [((self.values == end).all(axis=0), sign) for end, sign in ((0, 1), (1, -1))]
        if self.is_share and any(trials.any() for trials, _ in extremes):
            chance = other.uniform(-1, 1, resamples)
            missed = np.sign(chance) * (1 - np.abs(chance) ** (1 / (_BOTH_SIDES * count)))
            for trials, sign in extremes:
                drawn[trials] = own[trials] + sign * missed
        return drawn


def _drawn(
    objective: Objective,
    own: Mapping[str, np.ndarray],
    columns: Mapping[str, _Group],
    resamples: int,
    seed: int,
) -> np.ndarray:
    """The objectives of the trials on items drawn anew: trials × resamples."""
    # Each group has streams of its own, which do not depend on how many draws make a step.
    random = {k: (_stream(seed, 0, n), _stream(seed, 3, n)) for n, k in enumerate(columns)}
    trials = len(next(iter(own.values())))
    widest = max([len(own) * trials, *(len(group.values) for group in columns.values())])
    step = max(1, _MOST_NUMBERS // widest)
    parts = []
    for start in range(0, resamples, step):
        number = min(step, resamples - start)
        scores = {n: np.broadcast_to(own[n][:, None], (trials, number)) for n in own}
        drawn = {name: group.drawn(random[name], number) for name, group in columns.items()}
        parts.append(objective.values(scores | drawn))
    return np.concatenate(parts, axis=1)


def _over_seeds(
    of_trials: np.ndarray, paired: np.ndarray, starts: np.ndarray, sizes: Sequence[int], seed: int
) -> np.ndarray:
    """Means over contenders' seeds, as other seeds might have given: contenders × resamples."""
    draws = np.empty((len(sizes), of_trials.shape[1]))
    for place, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        trials = slice(start, start + size)
        draws[place] = of_trials[trials].mean(axis=0)
        if size > 1:
            # That seeds differ in which items they get right is in the draws of items already.
            by_items = (of_trials[trials] - draws[place]).var(axis=1).sum() / (size - 1)
            variance = max(0.0, paired[trials].var(ddof=1) - by_items)
            student = _stream(seed, 1, place).permutation(_student(size - 1, of_trials.shape[1]))
            draws[place] += student * math.sqrt(variance / size)
    return draws


@functools.lru_cache(maxsize=16)
def _student(freedom: int, count: int) -> np.ndarray:
    """Evenly spaced quantiles of Student's t: few plain draws would miss its tails by chance."""
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
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))


# ------------------------------------------------------------------------------------- racing


def rungs(ids: Iterable[str], *, seed: int) -> list[list[str]]:
    """Parts of the items for racing: what each rung adds to those before it; the last makes all.

    Each rung makes about three times as many items, takes each group by its share, and has one of
    each group at least. So few items that no part would tell anything are one rung.

    >>> [len(rung) for rung in rungs((f"add/{n}" for n in range(270)), seed=0)]
    [10, 20, 60, 180]
    """

    def place(item_id: str) -> tuple[bytes, str]:
        seeded = f"{seed}\0{item_id}".encode("utf-8", "surrogatepass")
        return hashlib.blake2b(seeded, digest_size=8).digest(), item_id

    groups = groups_of(sorted(set(ids), key=place))
    # Each group's items are spread evenly over 0 … 1, so that every beginning has its share.
    spread = [
        (number / len(group), *place(item_id))
        for group in groups.values()
        for number, item_id in enumerate(group)
    ]
    order = [item_id for *_, item_id in sorted(spread)]
    least = max(LEAST_ITEMS, len(groups))
    ends = [len(order)]
    while len(ends) < MOST_RUNGS and ends[0] // REDUCTION >= least:
        ends.insert(0, ends[0] // REDUCTION)
    return [order[start:end] for start, end in zip([0, *ends], ends, strict=False)]


# ------------------------------------------------------------------------------------- fronts


def pareto_front(points: Sequence[Mapping[str, float]], directions: Mapping[str, int]) -> list[int]:
    """The places of points that no other beats: as good in every score, and better in one.

    >>> points = [{"a": 1, "loss": 2}, {"a": 2, "loss": 3}, {"a": 1, "loss": 3}]
    >>> pareto_front(points, {"a": 1, "loss": -1})
    [0, 1]
    """
    if not points or not directions:
        return []
    table = np.array([[sign * p[name] for name, sign in directions.items()] for p in points])
    front = []
    for place, row in enumerate(table):
        beaten = (table >= row).all(axis=1) & (table > row).any(axis=1)
        if not beaten.any():
            front.append(place)
    return front
