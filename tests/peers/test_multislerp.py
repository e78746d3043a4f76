"""The mean direction: mergekit's multislerp, of whole tensors or with a base."""

from __future__ import annotations

import pytest
import torch
from mergekit.merge_methods import merge_tensors
from side_by_side import (
    assert_same,
    assert_within,
    compares,
    far_models,
    make_models,
    merge_ours,
    merge_theirs,
)

pytestmark = compares("multislerp", "mergekit")

WEIGHTS = [(1.0, 1.0), (0.2, 0.7), (1.0, 2.0, 0.5), (0.3, -0.1, 0.9, 0.4)]


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_whole_tensors(weights, normalize):
    models = far_models(len(weights))
    given = {"weight": list(weights), "normalize_weights": normalize}
    theirs = merge_tensors(models, "multislerp", parameters=given, dtype=torch.float64)
    stages = {"multislerp": {"normalize": normalize}}
    base = torch.zeros_like(models[0])
    ours = merge_ours(base, models, "multislerp", weights=weights, stages=stages)
    straight = sum(w * model for w, model in zip(weights, models, strict=True))
    straight = straight / (sum(weights) if normalize else 1)
    assert (ours - straight).norm() > 0.02 * straight.norm(), "or a mean would do as well"
    largest = max(1, *weights)
    assert_within(ours, theirs, 4, largest * sum(model.abs() for model in models))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_with_a_base_it_is_of_deltas(weights, dtype):
    base, models = make_models(len(weights))
    theirs = merge_theirs(base, models, "multislerp", dtype=dtype, weight=list(weights))
    stages = {"multislerp": {"on": "deltas"}}
    ours = merge_ours(base, models, "multislerp", weights=weights, stages=stages)
    assert_within(ours, theirs, 8, base.abs() + 2 * sum((model - base).abs() for model in models))


def test_one_model_and_opposite_ones():
    base, (model,) = make_models(1)
    stages = {"multislerp": {"on": "deltas"}}
    assert_same(merge_ours(base, [model], "multislerp", weights=[0.5], stages=stages), model)
    assert_same(merge_theirs(base, [model], "multislerp", weight=0.5), model)
    zero, one = torch.zeros(2), torch.tensor([3.0, 4.0])
    opposite = [one, -2 * one]
    theirs = merge_theirs(zero, opposite, "multislerp", weight=0.5)
    assert_same(merge_ours(zero, opposite, "multislerp", stages=stages), theirs)


def test_difference_more_than_two_that_cancel_are_averaged():
    """They stop there, also where no model has changed a tensor."""
    base = torch.ones(3)
    with pytest.raises(ValueError, match="zero"):
        merge_theirs(base, [base] * 3, "multislerp", weight=1.0)
    stages = {"multislerp": {"on": "deltas"}}
    assert torch.equal(merge_ours(base, [base] * 3, "multislerp", stages=stages), base)
