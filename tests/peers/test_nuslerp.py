"""NuSLERP: mergekit's nuslerp, whole, row by row and column by column, with a base and without."""

from __future__ import annotations

import math

import pytest
import torch
from mergekit.merge_methods import merge_tensors
from side_by_side import assert_within, compares, make_models, merge_ours, merge_theirs

pytestmark = compares("nuslerp", "mergekit")

FLAGS = {
    "tensor": {},
    "row": {"nuslerp_flatten": False},
    "column": {"nuslerp_flatten": False, "nuslerp_row_wise": True},
}
"""What mergekit calls row-wise runs along the first dimension: each vector is a column."""
WEIGHTS = [[1.0, 1.0], [3.0, 1.0], [0.2, 0.6]]


def merge_nuslerp(base, models, each, weights, on="deltas"):
    stages = {"nuslerp": {"each": each, "on": on}}
    return merge_ours(base, models, "nuslerp", weights=weights, stages=stages)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("each", FLAGS)
def test_with_a_base(each, weights):
    base, models = make_models(2)
    theirs = merge_theirs(
        base, models, "nuslerp", dtype=torch.float64, weight=weights, **FLAGS[each]
    )
    ours = merge_nuslerp(base, models, each, weights)
    magnitude = base.abs() + 2 * sum((model - base).abs() for model in models)
    assert_within(ours, theirs, 5, magnitude)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("each", FLAGS)
def test_without_a_base(each, weights):
    generator = torch.Generator().manual_seed(2)
    models = list(torch.randn((2, 37, 53), generator=generator))
    theirs = merge_tensors(
        models,
        "nuslerp",
        parameters={"weight": weights, **FLAGS[each]},
        dtype=torch.float64,
    )
    ours = merge_nuslerp(torch.zeros(37, 53), models, each, weights, on="weights")
    assert_within(ours, theirs, 5, 2 * sum(model.abs() for model in models))


@pytest.mark.parametrize("each", FLAGS)
def test_vectors_are_taken_as_a_whole(each):
    base, models = make_models(2, shape=(101,))
    theirs = merge_theirs(
        base, models, "nuslerp", dtype=torch.float64, weight=[1.0, 2.0], **FLAGS[each]
    )
    ours = merge_nuslerp(base, models, each, [1.0, 2.0])
    magnitude = base.abs() + 2 * sum((model - base).abs() for model in models)
    assert_within(ours, theirs, 5, magnitude)


def test_difference_rows_of_more_than_two_dimensions():
    """Theirs run along the last dimension alone, ours over all but the first."""
    base, models = make_models(2, shape=(5, 4, 3))
    theirs = merge_theirs(
        base, models, "nuslerp", dtype=torch.float64, weight=[1.0, 1.0], **FLAGS["row"]
    )
    ours = merge_nuslerp(base, models, "row", [1.0, 1.0])
    flat = [model.reshape(5, 12) for model in (base, *models)]
    assert torch.equal(ours.reshape(5, 12), merge_nuslerp(flat[0], flat[1:], "row", [1.0, 1.0]))
    assert (ours - theirs).abs().max() > 1e-4


def test_difference_nearly_parallel_rows_are_interpolated_straight():
    """Ours has the limit of slerp, |cos Ω| > 0.9995, also for rows."""
    angle = math.acos(0.99951)
    models = [torch.tensor([[1.0, 0.0]]), torch.tensor([[math.cos(angle), math.sin(angle)]])]
    base = torch.zeros(1, 2)
    theirs = merge_theirs(
        base, models, "nuslerp", dtype=torch.float64, weight=[1.0, 1.0], **FLAGS["row"]
    )
    ours = merge_nuslerp(base, models, "row", [1.0, 1.0])
    assert theirs.norm().item() == pytest.approx(1.0, abs=1e-7)
    assert ours.norm().item() == pytest.approx(math.cos(angle / 2), abs=1e-6)


def test_difference_the_angle_to_zero_is_zero():
    """They count zero as orthogonal to everything: sin(t·π/2) where we have t."""
    base, still, moved = torch.zeros(1, 2), torch.zeros(1, 2), torch.ones(1, 2)
    ours = merge_nuslerp(base, [still, moved], "row", [1.0, 1.0])
    assert ours.tolist() == [[0.5, 0.5]]
    theirs = merge_theirs(base, [still, moved], "nuslerp", weight=[1.0, 1.0], **FLAGS["row"])
    torch.testing.assert_close(theirs, torch.full((1, 2), math.sin(math.pi / 4)))
