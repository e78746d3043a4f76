"""Model Stock: mergekit's model_stock, for whole tensors and row by row."""

from __future__ import annotations

import pytest
import torch
from side_by_side import assert_within, compares, make_models, merge_ours, merge_theirs

pytestmark = compares("model_stock", "mergekit")


def agreeing_models(count, shape=(37, 53)):
    """A base, and fine-tunes whose deltas share a part."""
    base, models = make_models(count + 1, shape)
    shared = models.pop() - base
    return base, [model + shared for model in models]


@pytest.mark.parametrize("count", [2, 3, 6])
def test_models_that_agree(count):
    base, models = agreeing_models(count)
    theirs = merge_theirs(base, models, "model_stock", dtype=torch.float64)
    ours = merge_ours(base, models, "model_stock")
    mean = sum(models) / count
    share = ((ours - base).norm() / (mean - base).norm()).item()
    assert 0.5 < share < 0.95, "or this compares the mean or the base"
    magnitude = base.abs() + sum((model - base).abs() for model in models)
    assert_within(ours, theirs, 4, magnitude)


def test_in_float32_as_its_users_run_it():
    base, models = agreeing_models(3)
    theirs = merge_theirs(base, models, "model_stock")
    ours = merge_ours(base, models, "model_stock")
    assert_within(ours, theirs, 8, base.abs() + sum(model.abs() for model in models))


def test_parallel_models_are_averaged_by_both():
    base, (model,) = make_models(1)
    models = [model, base + 3 * (model - base)]
    theirs = merge_theirs(base, models, "model_stock", dtype=torch.float64)
    ours = merge_ours(base, models, "model_stock")
    assert_within(ours, theirs, 4, base.abs() + sum(model.abs() for model in models))


@pytest.mark.parametrize("shape", [(101,), (37, 53), (3, 5, 70)])
@pytest.mark.parametrize("count", [2, 4])
def test_every_row_may_have_an_angle_of_its_own(count, shape):
    base, models = agreeing_models(count, shape)
    theirs = merge_theirs(base, models, "model_stock", dtype=torch.float64, filter_wise=True)
    ours = merge_ours(base, models, "model_stock", stages={"model_stock": {"each": "row"}})
    whole = merge_ours(base, models, "model_stock")
    assert len(shape) == 1 or (ours - whole).norm() > 0.02 * (whole - base).norm()
    assert_within(ours, theirs, 4, base.abs() + sum((model - base).abs() for model in models))


def test_difference_opposing_models_leave_the_base():
    """At cos θ < 0 their t is negative, and leads away from every model."""
    base = torch.zeros(2)
    models = [torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 1.0])]  # cos θ = -√½
    assert merge_ours(base, models, "model_stock").tolist() == [0.0, 0.0]
    theirs = merge_theirs(base, models, "model_stock", dtype=torch.float64)
    assert theirs[1] < -2


def test_difference_short_deltas_have_angles_too():
    """They take no norm product below 10⁻⁶, so that short deltas seem to be orthogonal."""
    base, models = agreeing_models(2)
    base, models = 0 * base, [1e-4 * (model - base) for model in models]
    assert merge_ours(base, models, "model_stock").norm() > 1e-6
    theirs = merge_theirs(base, models, "model_stock", dtype=torch.float64)
    assert theirs.norm() < 0.1 * merge_ours(base, models, "model_stock").norm()
