"""The mean on the sphere: mergekit's karcher, which takes whole tensors and equal weights.

The peer is run in float64, to a tolerance and for as many steps as it takes, so that both have
converged and the tolerance is for our roundings alone.
"""

from __future__ import annotations

import pytest
import torch
from mergekit.merge_methods import merge_tensors
from side_by_side import assert_near, assert_within, compares, far_models, make_models, merge_ours

pytestmark = compares("karcher", "mergekit")


def merge_theirs(models, **parameters):
    given = {"max_iter": 200, "tol": 1e-12, **parameters}
    return merge_tensors(models, "karcher", parameters=given, dtype=torch.float64)


@pytest.mark.parametrize("count", [2, 3, 6])
def test_fine_tunes(count):
    base, models = make_models(count)
    ours = merge_ours(base, models, "karcher")
    # Deltas, coefficients, products and sums are rounded, and the base twice.
    magnitude = base.abs() + sum(model.abs() for model in models)
    assert_within(ours, merge_theirs(models), 4, magnitude)


@pytest.mark.parametrize("count", [2, 3, 6])
def test_tensors_that_are_far_apart(count):
    models = far_models(count)
    ours = merge_ours(torch.zeros_like(models[0]), models, "karcher")
    straight = sum(models) / count
    assert (ours - straight).norm() > 0.05 * straight.norm(), "or a mean would do as well"
    assert_within(ours, merge_theirs(models), 4, sum(model.abs() for model in models))


@pytest.mark.parametrize("count", [2, 3])
def test_as_its_users_run_it(count):
    """Ten steps, a tolerance of 10⁻⁵ and float32."""
    models = far_models(count)
    ours = merge_ours(torch.zeros_like(models[0]), models, "karcher")
    theirs = merge_tensors(models, "karcher", parameters={})
    assert_near(ours, theirs, 2e-5)


def test_one_model_is_itself():
    (model,) = far_models(1)
    assert torch.equal(merge_ours(torch.zeros_like(model), [model], "karcher"), model)
    assert torch.equal(merge_theirs([model]), model.double())


def test_a_zero_counts_for_the_length_alone():
    first, second = far_models(2)
    models = [first, second, torch.zeros_like(first)]
    ours = merge_ours(torch.zeros_like(first), models, "karcher")
    assert_within(ours, merge_theirs(models), 4, first.abs() + second.abs())


def test_difference_what_is_short_has_a_direction():
    """They leave out a tensor that is no longer than tol, 10⁻⁵; we only leave out zeros."""
    models = [1e-6 * model / model.norm() for model in far_models(2)]
    ours = merge_ours(torch.zeros_like(models[0]), models, "karcher")
    assert ours.norm() > 0.9e-6
    assert merge_tensors(models, "karcher", parameters={}).norm() == 0


def test_difference_opposite_tensors_are_averaged_straight():
    """There they start from the first and stay, since every way is as short."""
    first = torch.tensor([2.0, 0.0])
    models = [first, -first / 2]
    assert merge_ours(torch.zeros(2), models, "karcher").tolist() == [0.5, 0.0]
    assert merge_theirs(models).tolist() == [1.5, 0.0]
