"""The most important changes: mergekit's arcee_fusion, in float64 and without its samples."""

from __future__ import annotations

import pytest
import torch
from side_by_side import assert_within, compares, make_models, merge_ours, merge_theirs

pytestmark = compares("arcee_fusion", "mergekit")


@pytest.mark.parametrize("shape", [(), (1,), (7, 1), (101,), (37, 53), (3, 5, 7), (900, 901)])
@pytest.mark.parametrize("change", [0.1, 1, 100])
def test_the_same_elements_are_taken_over(shape, change):
    base, (model,) = make_models(1, shape)
    model = base + change * (model - base)
    ours = merge_ours(base, [model], "arcee_fusion")
    theirs = merge_theirs(base, [model], "arcee_fusion", dtype=torch.float64)
    assert_within(ours, theirs, 2, base.abs() + model.abs())
    taken = ours != base
    assert torch.equal(taken, theirs.float() != base)
    assert base.numel() < 100 or 0.02 < taken.float().mean() < 0.4


def test_an_outlier_counts_in_its_row():
    base, (model,) = make_models(1)
    model[3, 5] += 900.0  # where exp would overflow
    theirs = merge_theirs(base, [model], "arcee_fusion", dtype=torch.float64)
    ours = merge_ours(base, [model], "arcee_fusion")
    assert_within(ours, theirs, 2, base.abs() + model.abs())


def test_difference_the_roundings_of_float32_do_not_choose():
    """They find KL in the type of the merge, and take other elements in float32 than in float64."""
    base, (model,) = make_models(1)
    exact = merge_theirs(base, [model], "arcee_fusion", dtype=torch.float64).float() != base
    rounded = merge_theirs(base, [model], "arcee_fusion") != base
    assert (exact != rounded).float().mean() > 0.01
    assert torch.equal(merge_ours(base, [model], "arcee_fusion") != base, exact)


def test_difference_quartiles_are_exact_in_large_tensors():
    """Above a million elements they take them from a sample, another one each time."""
    base, (model,) = make_models(1, (1001, 1000))
    torch.manual_seed(0)
    first = merge_theirs(base, [model], "arcee_fusion", dtype=torch.float64)
    second = merge_theirs(base, [model], "arcee_fusion", dtype=torch.float64)
    assert not torch.equal(first, second)
    ours = merge_ours(base, [model], "arcee_fusion")
    assert abs((ours != base).sum() / (first.float() != base).sum() - 1) < 0.02
