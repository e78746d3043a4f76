"""Finding q, the divisor of the elements that DAREx keeps (arXiv:2410.09344).

Three ways, by the means of judging:

- `find_q_by_score`: a number to be made large, such as accuracy on a validation set;
- `find_q_by_outputs`: the model's outputs on any texts, without labels;
- `analytic_q`: one layer's delta and the mean of its inputs, without running a merged model.

The first two try values of q upwards from 1 - p and take a merge for each, which `dare.Candidates`
makes in memory. `dare search --over q=…` finds q by a score too.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dare.errors import InputError, RecipeError
from dare.inputs.arrays import as_float64
from dare.recipe.recipe import TensorRule
from dare.tensors.header import show_shape
from dare.tensors.mask import check_drop_rate

# The largest q that `analytic_q` gives: 1 would leave a share p of the delta out for good.
LARGEST_Q = 0.999
FINE_STEPS = 10  # parts into which a step is cut around the best of the coarse grid


@dataclass(frozen=True)
class TriedQ:
    """A value of q that was tried, and its score."""

    q: float
    score: float


@dataclass(frozen=True)
class FoundQ:
    """The best value of q, its score, and everything that was tried, in order."""

    q: float
    score: float
    trials: tuple[TriedQ, ...]


@dataclass(frozen=True)
class LayerQ:
    """The mean of q over a layer's output rows, and the lowest and highest of them."""

    q: float
    lowest: float
    highest: float


# ---------------------------------------------------------------- by trying


def find_q_by_score(
    score: Callable[[float], float],
    drop_rate: float,
    *,
    step: float | None = None,
    patience: int = 3,
) -> FoundQ:
    """Find the q whose score is largest.

    First q = 1 - p, 1 - p + step, … up to 1, until more than `patience` values in a row are no
    better than the best; then a tenth of the step to both sides of the best. Of equal scores the
    first counts. The step is (1 - p)/2 if not given.

    >>> found = find_q_by_score(lambda q: -abs(q - 0.172), 0.9)
    >>> round(found.q, 9), len(found.trials)
    (0.17, 24)
    """
    lowest = 1.0 - check_drop_rate(drop_rate)
    step = lowest / 2 if step is None else step
    if not step > 0:
        raise RecipeError(f"step = {step}: must be above 0")
    if patience < 0:
        raise RecipeError(f"patience = {patience}: must be at least 0")

    trials: list[TriedQ] = []

    def attempt(q: float) -> TriedQ:
        found = float(score(q))
        if math.isnan(found):
            raise InputError(f"the score at q = {q:.6g} is not a number (NaN)")
        trials.append(TriedQ(q, found))
        return trials[-1]

    places = int((1.0 - lowest) / step * (1 + 1e-12))  # of the coarse grid, beyond its first
    best, best_place, worse = attempt(lowest), 0, 0
    for place in range(1, places + 1):
        trial = attempt(min(lowest + place * step, 1.0))
        if trial.score > best.score:
            best, best_place, worse = trial, place, 0
        else:
            worse += 1
            if worse > patience:
                break

    for part in range(1 - FINE_STEPS, FINE_STEPS):
        q = lowest + (best_place + part / FINE_STEPS) * step
        if part and lowest <= q <= 1.0 and (trial := attempt(q)).score > best.score:
            best = trial
    return FoundQ(best.q, best.score, tuple(trials))


def find_q_by_outputs(
    outputs: Callable[[float, int], Any],
    expected: Any,
    drop_rate: float,
    *,
    seeds: Sequence[int] = (42, 43, 44),
    top: int | None = 5,
    step: float | None = None,
    patience: int = 3,
) -> FoundQ:
    """Find the q with which the outputs change least; no labels are needed.

    `outputs(q, seed)` are those of the model whose delta was dropped with that seed and divided by
    q, `expected` those of the model whose delta is whole: logits of a decoder, of which only the
    `top` largest expected ones are compared, or with `top=None` anything else, such as the last
    hidden states of an encoder. What is made small is the mean squared difference over all seeds.
    The paper takes 50 to 100 texts. NumPy arrays and torch tensors are taken.

    >>> delta = np.ones((3, 100))
    >>> def outputs(q, seed):
    ...     return delta * (np.random.default_rng(seed).random(delta.shape) < 0.1) / q
    >>> find_q_by_outputs(outputs, delta, 0.9, top=None).q > 0.5
    True
    """
    if not seeds:
        raise RecipeError("seeds = []: give at least one")
    wanted = as_float64(expected, "expected")
    shape = show_shape(wanted.shape)
    if top is not None:
        top = min(top, wanted.shape[-1])
        places = np.argsort(-wanted, axis=-1, kind="stable")[..., :top]
        wanted = np.take_along_axis(wanted, places, axis=-1)

    def distance(q: float, seed: int) -> float:
        values = as_float64(outputs(q, seed), f"outputs at q = {q}")
        if (found := show_shape(values.shape)) != shape:
            raise InputError(f"outputs at q = {q} are {found}, expected {shape}")
        if top is not None:
            values = np.take_along_axis(values, places, axis=-1)
        return float(np.mean((values - wanted) ** 2))

    def closeness(q: float) -> float:
        return -sum(distance(q, seed) for seed in seeds) / len(seeds)

    return find_q_by_score(closeness, drop_rate, step=step, patience=patience)


# ---------------------------------------------------------------- by formula


def analytic_q(delta: Any, mean_inputs: Any, drop_rate: float, *, eta: float = 0.45) -> LayerQ:
    """Find a layer's q from its delta (outputs × inputs) and the mean of its inputs.

    With c = δ_ij·mean(x_j), S = |Σ c| and C = Σ c² of an output row, the change of that output is
    with probability 0.95 no more than

        (η·(1 - (1 - p)/q)·S + η²·Φ(p)·C/(4·q²) + ln(2/0.05)) / η,

    where Φ(p) = (1 - 2p)/ln((1 - p)/p) bounds the spread of a coin with rate p (Kearns and Saul).
    As a function of 1/q that is a parabola, least at q = η·Φ(p)·C/(2·(1 - p)·S), which is taken
    as far as it lies between 1 - p and 0.999. Rows without any change do not count. η weighs the
    spread against the mean and is measured in inverse units of the output; 0.45 is the authors'.
    (Their program takes Σ c with its sign, so that a row and its negative get different values.)
    NumPy arrays and torch tensors are taken.

    >>> analytic_q(np.ones((2, 3)), np.array([0.5, 0.25, 0.25]), 0.9).q
    0.307205...
    """
    p = check_drop_rate(drop_rate)
    if not p > 0:
        raise RecipeError("drop_rate = 0: nothing is dropped, and q is 1")
    if not eta > 0:
        raise RecipeError(f"eta = {eta}: must be above 0")
    changes = as_float64(delta, "delta")
    inputs = as_float64(mean_inputs, "mean_inputs")
    if changes.ndim != 2 or inputs.shape != changes.shape[1:]:
        found = f"{show_shape(changes.shape)} and {show_shape(inputs.shape)}"
        raise InputError(f"expected outputs × inputs and a mean for each input, found {found}")
    sums = np.abs(changes @ inputs)
    squares = (changes**2) @ (inputs**2)
    changed = squares > 0
    if not changed.any():
        return LayerQ(1.0 - p, 1.0 - p, 1.0 - p)
    with np.errstate(divide="ignore"):
        best = eta * spread(p) * squares[changed] / (2.0 * (1.0 - p) * sums[changed])
    rows = np.clip(best, min(1.0 - p, LARGEST_Q), LARGEST_Q)
    lowest, highest = float(rows.min()), float(rows.max())
    return LayerQ(min(max(float(rows.mean()), lowest), highest), lowest, highest)


def spread(drop_rate: float) -> float:
    """Return Φ(p) = (1 - 2p)/ln((1 - p)/p), and ½ at p = ½.

    >>> spread(0.5), spread(0.9)
    (0.5, 0.364095...)
    """
    odds = math.log1p(-drop_rate) - math.log(drop_rate)
    return 0.5 if abs(odds) < 1e-6 else (1.0 - 2.0 * drop_rate) / odds


def rules_for_q(by_tensor: Mapping[str, float]) -> tuple[TensorRule, ...]:
    """Make rules for a recipe that give each tensor its own q.

    >>> rules_for_q({"model.layers.0.mlp.up_proj.weight": 0.2})[0].settings
    {'q': 0.2}
    """
    return tuple(
        TensorRule(match=(glob.escape(name),), settings={"q": q}) for name, q in by_tensor.items()
    )
