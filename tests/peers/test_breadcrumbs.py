"""Model Breadcrumbs: mergekit's breadcrumbs and breadcrumbs_ties."""

from __future__ import annotations

import pytest
import torch
from mergekit import sparsify
from side_by_side import (
    assert_same,
    assert_within,
    compares,
    make_dyadic_deltas,
    make_models,
    merge_ours,
    merge_theirs,
)

CASES = [(0.9, 0.01), (0.5, 0.25), (0.2, 0.9), (0.05, 0.0), (1.0, 0.1)]


def middle(keep_middle, drop_largest):
    return {"breadcrumbs": {"keep_middle": keep_middle, "drop_largest": drop_largest}}


@pytest.mark.parametrize("shape", [(37, 53), (300, 301), (64,)])
@pytest.mark.parametrize(("density", "gamma"), CASES)
@compares("breadcrumbs", "mergekit")
def test_breadcrumbs(shape, density, gamma):
    base, models = make_models(3, shape)
    ours = merge_ours(base, models, "breadcrumbs+sum", stages=middle(density, gamma))
    theirs = merge_theirs(base, models, "breadcrumbs", density=density, gamma=gamma, weight=1.0)
    assert_same(ours, theirs)


@pytest.mark.parametrize(("density", "gamma"), CASES)
@compares("breadcrumbs_ties", "mergekit")
def test_breadcrumbs_ties(density, gamma):
    base, models = make_models(3)
    weights = (0.5, 0.25, 0.7)
    ours = merge_ours(
        base, models, "breadcrumbs+ties", stages=middle(density, gamma), weights=weights
    )
    theirs = merge_theirs(
        base,
        models,
        "breadcrumbs_ties",
        density=density,
        gamma=gamma,
        weight=list(weights),
        normalize=True,
    )
    assert_same(ours, theirs)


@compares("breadcrumbs", "mergekit")
def test_what_is_kept_can_be_scaled_to_the_norm():
    base, models = make_models(3)
    given = {**middle(0.5, 0.25)["breadcrumbs"], "rescale": "l1"}
    ours = merge_ours(base, models, "breadcrumbs+sum", stages={"breadcrumbs": given})
    shares = {"density": 0.5, "gamma": 0.25, "weight": 1.0}
    plain = merge_theirs(base, models, "breadcrumbs", **shares)
    theirs = merge_theirs(base, models, "breadcrumbs", rescale=True, dtype=torch.float64, **shares)
    assert (theirs - base).norm() > 1.2 * (plain - base).norm()
    # Their norms are sums of 1961 float64 numbers; of ours deltas, factors and sums are rounded.
    assert_within(ours, theirs, 8, base.abs() + 2 * sum((model - base).abs() for model in models))


@compares("breadcrumbs", "mergekit")
def test_difference_which_of_equals_are_kept():
    """Theirs is a sort that is not stable; ours counts the first of equals as larger."""
    (delta,) = make_dyadic_deltas(1)  # 65 magnitudes for 1961 elements
    ours = merge_ours(torch.zeros_like(delta), [delta], "breadcrumbs+sum", stages=middle(0.5, 0.2))
    theirs = sparsify.magnitude_outliers(delta, 0.5, gamma=0.2)
    kept = ours[ours != 0].abs()
    inside = (delta.abs() > kept.min()) & (delta.abs() < kept.max())
    outside = (delta.abs() < kept.min()) | (delta.abs() > kept.max())
    assert_same(ours[inside], theirs[inside])
    assert_same(ours[outside], theirs[outside])
    assert (ours != 0).sum() == (theirs != 0).sum()


@compares("breadcrumbs", "mergekit")
def test_difference_a_small_tensor_keeps_an_element():
    delta = torch.tensor([1.0, 3.0, 2.0])
    ours = merge_ours(torch.zeros(3), [delta], "breadcrumbs+sum", stages=middle(0.2, 0.0))
    assert ours.tolist() == [0.0, 3.0, 0.0]
    assert sparsify.magnitude_outliers(delta, 0.2, gamma=0.0).tolist() == [0.0, 0.0, 0.0]
