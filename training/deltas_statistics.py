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


@dataclass(frozen=True)
class Scores:
    """What a scheme, the base and the fine-tune did on the same items; the scheme for each seed."""

    runs: Numbers
    """[seeds, items]"""
    base: Numbers
    tuned: Numbers


def gain_kept(all_scores: Sequence[Scores]) -> Estimate:
    """(score - base) / (tuned - base), each a mean over fine-tunes.

    The items of all three are resampled together, those of each fine-tune by themselves. What few
    seeds leave open is added by Student's t.
    """
    kept, gained = np.zeros(DRAWS), np.zeros(DRAWS)
    kept_mean, gained_mean = 0.0, 0.0
    for place, scores in enumerate(all_scores):
        random = np.random.default_rng([SEED, place])
        items = scores.base.size
        counts = random.multinomial(items, np.full(items, 1 / items), DRAWS) / items
        by_seed = (scores.runs - scores.base).mean(axis=1)
        kept += counts @ (scores.runs.mean(axis=0) - scores.base)
        gained += counts @ (scores.tuned - scores.base)
        kept_mean += float(by_seed.mean())
        gained_mean += float((scores.tuned - scores.base).mean())
        if (seeds := by_seed.size) > 1:
            error = by_seed.std(ddof=1) / np.sqrt(seeds)
            kept += error * random.standard_t(seeds - 1, DRAWS)
    return Estimate(kept_mean / gained_mean, kept / gained)
