"""DELLA with our random numbers in mergekit's hands; its epsilon is half our window."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch
from mergekit import sparsify
from side_by_side import (
    NAME,
    ROUNDING,
    SEED,
    assert_same,
    assert_within,
    compares,
    make_dyadic_deltas,
    make_models,
    merge_ours,
    merge_theirs,
)
from torch import Tensor

from dare.kernels import reference
from dare.tensors.mask import mask_key

CASES = [(0.5, 0.2), (0.9, 0.07), (0.3, 0.25)]
"""Drop rate and mergekit's epsilon."""


def by_rank(drop_rate, epsilon, rescale):
    return {"della": {"drop_rate": drop_rate, "window": 2 * epsilon, "rescale": rescale}}


@contextmanager
def our_numbers(asked: list[Tensor] | None = None) -> Iterator[None]:
    """Let the peer hold its probabilities, of one model after the other, against our numbers."""
    seeds = iter(range(SEED, SEED + 1000))

    def bernoulli(probabilities: Tensor) -> Tensor:
        if asked is not None:
            asked.append(probabilities)
        numbers = np.empty(probabilities.numel(), np.uint64)
        reference.draw_uniform(numbers, 0, *mask_key(next(seeds), NAME))
        uniform = torch.from_numpy(numbers.astype(np.float64) / 2.0**40)
        return (uniform.reshape(probabilities.shape) < probabilities.double()).float()

    with mock.patch("torch.bernoulli", bernoulli):
        yield


@pytest.mark.parametrize("shape", [(37, 53), (300, 301), (64,)])
@pytest.mark.parametrize(("drop_rate", "epsilon"), CASES)
@compares("della_linear", "mergekit")
def test_the_same_elements_are_kept(shape, drop_rate, epsilon):
    """Theirs are float32 probabilities, a few 2⁻²⁴ off: no number lies that close to one here."""
    base, models = make_models(2, shape)
    stages = by_rank(drop_rate, epsilon, rescale=False)
    ours = merge_ours(base, models, "della+sum", stages=stages)
    with our_numbers():
        theirs = merge_theirs(
            base,
            models,
            "della_linear",
            density=1 - drop_rate,
            epsilon=epsilon,
            weight=1.0,
            rescale=False,
        )
    assert_same(ours, theirs)


@pytest.mark.parametrize(("drop_rate", "epsilon"), CASES)
@compares("della_linear", "mergekit")
def test_linear_to_the_l1_norm(drop_rate, epsilon):
    base, models = make_models(3)
    ours = merge_ours(
        base, models, "della+linear", stages=by_rank(drop_rate, epsilon, rescale="l1")
    )
    with our_numbers():
        theirs = merge_theirs(
            base,
            models,
            "della_linear",
            density=1 - drop_rate,
            epsilon=epsilon,
            weight=1 / 3,
        )
    # As for dare: 64 roundings for torch's norms in float32, 4 for the rest.
    assert_within(ours, theirs, 68, base.abs() + (theirs - base).abs())


@pytest.mark.parametrize(("drop_rate", "epsilon"), CASES)
@compares("della", "mergekit")
def test_ties(drop_rate, epsilon):
    base, models = make_models(3)
    weights = (1.0, 0.5, 2.0)
    ours = merge_ours(
        base,
        models,
        "della+ties",
        stages=by_rank(drop_rate, epsilon, rescale=False),
        weights=weights,
    )
    with our_numbers():
        theirs = merge_theirs(
            base,
            models,
            "della",
            density=1 - drop_rate,
            epsilon=epsilon,
            weight=list(weights),
            rescale=False,
            normalize=True,
        )
    assert_same(ours, theirs)


@compares("della", "mergekit")
@pytest.mark.parametrize(("drop_rate", "epsilon"), CASES)
def test_ties_to_the_l1_norm_as_is_its_default(drop_rate, epsilon):
    base, models = make_models(3)
    ours = merge_ours(base, models, "della+ties", stages=by_rank(drop_rate, epsilon, "l1"))
    with our_numbers():
        theirs = merge_theirs(
            base, models, "della", density=1 - drop_rate, epsilon=epsilon, weight=1.0
        )
    assert_within(ours, theirs, 68, base.abs() + (theirs - base).abs())


def test_probabilities():
    _, (delta,) = make_models(1)
    asked: list[Tensor] = []
    with our_numbers(asked):
        sparsify.della_magprune(delta, density=0.4, epsilon=0.2)
    ours = merge_ours(
        torch.zeros_like(delta), [delta], "della+sum", stages=by_rank(0.6, 0.2, rescale=True)
    )
    kept = ours != 0
    rates = (delta / ours)[kept]
    assert (rates - asked[0][kept]).abs().max() <= 8 * ROUNDING


@compares("della_linear", "mergekit")
def test_difference_we_divide_by_each_elements_own_probability():
    """The paper does; mergekit scales the whole to its L1 norm, which favours large elements."""
    (delta,) = make_dyadic_deltas(1, (400, 64))
    stages = by_rank(0.5, 0.3, rescale=True)
    small = (delta.abs() < delta.abs().median()) & (delta != 0)
    sums = {}
    for rescale in (True, "l1"):
        stages = by_rank(0.5, 0.3, rescale)
        ours = merge_ours(torch.zeros_like(delta), [delta], "della+sum", stages=stages)
        sums[rescale] = (ours[small].abs().sum() / delta[small].abs().sum()).item()
    assert sums[True] == pytest.approx(1, abs=0.05)
    assert sums["l1"] < 0.8


@compares("della_linear", "mergekit")
def test_difference_a_row_of_one_element():
    """Its rank is divided by zero in mergekit."""
    delta = torch.ones(8, 1)
    ours = merge_ours(torch.zeros(8, 1), [delta], "della+sum", stages=by_rank(0.5, 0.2, True))
    assert set(ours.flatten().tolist()) <= {0.0, 2.0}
    with our_numbers(asked := []):
        sparsify.della_magprune(delta, density=0.5, epsilon=0.2)
    assert asked[0].isnan().all()
