"""Few elements that are far larger than the others, and what a delta is without them.

One element of a million can hold half of a delta's squares. It decides one output of its layer and
says nothing about the others, so what is judged by squares is judged without it. Elements count as
outliers from the octave five above that of the median magnitude on, which is 16 times the median or
more, and only as many as could lie in 5 % of a tensor's outputs. Gaussian, Laplace and sparse
deltas have none, or none that count.

Octaves are all that statistics hold. Inside one, magnitudes count as spread evenly on a logarithmic
scale, but for the largest element, which is known. So what a single outlier leaves of Σδ² is right
to 5 %, and of Σδ⁴ to 15 %, however large it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate

from dare.analysis.judge.limits import limit
from dare.analysis.results import Statistics

OCTAVES = 5
"""How far above the median's octave outliers begin."""


@dataclass(frozen=True)
class Inliers:
    """What a tensor's delta is without its outliers."""

    outliers: int
    """How many elements are left out."""
    squares: float
    """The share of Σδ² that is left."""
    fourths: float
    """The share of Σδ⁴ that is left."""
    largest: float
    """What no magnitude that is left exceeds."""


def without_outliers(statistics: Statistics, shape: tuple[int, ...]) -> Inliers:
    """Leave out what is far larger than the rest, and so little that few outputs feel it."""
    counts = statistics.histogram.counts
    allowed = int(limit("outlier_outputs") * shape[0]) if shape else 0
    first = len(counts)
    if counts:
        half = sum(counts) / 2
        median = next(place for place, below in enumerate(accumulate(counts)) if below >= half)
        while first > median + OCTAVES and sum(counts[first - 1 :]) <= allowed:
            first -= 1
    outliers = sum(counts[first:])
    if not outliers:
        return Inliers(0, 1.0, 1.0, statistics.largest)
    last = max(place for place in range(first) if counts[place])
    return Inliers(
        outliers,
        _share_left(statistics, first, 2),
        _share_left(statistics, first, 4),
        2.0 ** (statistics.histogram.lowest + last + 1),
    )


def _share_left(statistics: Statistics, first: int, power: int) -> float:
    """The share of Σ|δ|ᵏ in the octaves before the first that is left out."""
    counts, lowest = statistics.histogram.counts, statistics.histogram.lowest

    def mean(low: float, high: float) -> float:
        """Of |δ|ᵏ, from the one magnitude to the other."""
        return (
            (high**power - low**power) / (power * math.log(high / low))
            if high > low
            else (low**power)
        )

    sums = [
        count * mean(2.0 ** (lowest + place), 2.0 ** (lowest + place + 1))
        for place, count in enumerate(counts[:-1])
    ]
    top = statistics.largest**power
    others = counts[-1] - 1
    sums.append(top + others * mean(2.0 ** (lowest + len(counts) - 1), statistics.largest))
    return sum(sums[:first]) / sum(sums)


def share_under(statistics: Statistics, threshold: float) -> float:
    """The share of finite elements under a magnitude, to the precision of octaves."""
    finite = statistics.elements - statistics.not_finite
    if not finite:
        return 0.0
    place = math.log2(threshold) - statistics.histogram.lowest if threshold else 0.0
    below = sum(
        count * min(max(place - octave, 0.0), 1.0)
        for octave, count in enumerate(statistics.histogram.counts)
    )
    return (statistics.zeros + below) / finite
