"""Means over seeds and items, with 95 % intervals that hold both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

DRAWS = 2000
"""Bootstrap samples of the items."""
SEED = 14


@dataclass(frozen=True)
class Estimate:
    """A mean, and what it would be on other items and with other masks."""

    mean: float
    draws: Numbers
    """[DRAWS]"""

    @property
    def interval(self) -> tuple[float, float]:
        """Where 95 % of the draws lie."""
        low, high = np.quantile(self.draws, (0.025, 0.975))
        return float(low), float(high)


def resample(items: int) -> Numbers:
    """How often each item is in each bootstrap sample: [DRAWS, items], the same at each call.

    So all schemes are compared on the same samples.
    """
    chances = np.full(items, 1 / items)
    return np.random.default_rng(SEED).multinomial(items, chances, DRAWS).astype(np.float64)


def gain_kept(runs: Sequence[Numbers], base: Numbers, tuned: Numbers) -> Estimate:
    """(score - base) / (tuned - base): the items of all three are resampled together."""
    values = np.stack(runs)
    counts = resample(base.size)
    whole = (values.mean(axis=1) - base.mean()) / (tuned.mean() - base.mean())
    samples = (counts @ (values - base).T) / (counts @ (tuned - base))[:, None]
    return _over_seeds(whole, samples)


def mean_of(estimates: Sequence[Estimate]) -> Estimate:
    """The mean of estimates that were made on different items."""
    shuffled = [
        np.random.default_rng([SEED, place]).permutation(estimate.draws)
        for place, estimate in enumerate(estimates)
    ]
    return Estimate(float(np.mean([e.mean for e in estimates])), np.mean(shuffled, axis=0))


def _over_seeds(values: Numbers, samples: Numbers) -> Estimate:
    """Mean over seeds: to what items do, add what few seeds leave open, by Student's t.

    `values` is [seeds], `samples` [DRAWS, seeds].
    """
    draws, seeds = samples.mean(axis=1), values.size
    if seeds > 1:
        error = values.std(ddof=1) / np.sqrt(seeds)
        draws = draws + error * np.random.default_rng(SEED).standard_t(seeds - 1, draws.size)
    return Estimate(float(values.mean()), draws)
