"""DARE with our masks in the peers' hands: the same elements drop out, and the rest must agree."""

from __future__ import annotations

import pytest
import torch
from mergekit import sparsify
from peft.utils import merge_utils as peft
from side_by_side import (
    NAME,
    SEED,
    assert_same,
    assert_within,
    compares,
    make_dyadic_deltas,
    make_models,
    merge_ours,
    merge_theirs,
    our_masks,
)

import dare

RATES = [0.1, 0.5, 0.9, 0.99]
EXACT_RATES = [0.5, 0.75]
"""Rates whose keep probability is a power of two: to rescale by it rounds nothing."""

IN_PEFT = [
    pytest.param("dare+sum", peft.dare_linear, marks=compares("dare_linear", "PEFT")),
    pytest.param("dare+ties", peft.dare_ties, marks=compares("dare_ties", "PEFT")),
]


def dare_stage(drop_rate, rescale=True):
    return {"dare": {"drop_rate": drop_rate, "rescale": rescale}}


def zeros_like_first(deltas):
    return torch.zeros_like(deltas[0])


class TestMergekit:
    """mergekit scales what is left to the L1 norm of the whole delta: our rescale = "l1"."""

    @pytest.mark.parametrize("drop_rate", RATES)
    @compares("dare_linear", "mergekit")
    def test_linear_is_exact_where_norms_are(self, drop_rate):
        base, deltas = make_models(1)[0], make_dyadic_deltas(3)
        base = torch.round(base * 1024) / 1024
        models = [base + delta for delta in deltas]
        ours = merge_ours(base, models, "dare+sum", stages=dare_stage(drop_rate, "l1"))
        with our_masks(drop_rate):
            theirs = merge_theirs(base, models, "dare_linear", density=1 - drop_rate, weight=1.0)
        assert_same(ours, theirs)

    @pytest.mark.parametrize("drop_rate", RATES)
    @compares("dare_linear", "mergekit")
    def test_linear(self, drop_rate):
        # The norms are sums of 1961 magnitudes, ours in float64, torch's in float32 by partial
        # sums of a few dozen: 64 roundings bound what it can lose in the two, 4 the rest.
        base, models = make_models(3)
        ours = merge_ours(base, models, "dare+linear", stages=dare_stage(drop_rate, "l1"))
        with our_masks(drop_rate):
            theirs = merge_theirs(base, models, "dare_linear", density=1 - drop_rate, weight=1 / 3)
        magnitude = base.abs() + (theirs - base).abs()
        assert_within(ours, theirs, 68, magnitude)

    @pytest.mark.parametrize("drop_rate", RATES)
    @compares("dare_ties", "mergekit")
    def test_ties_is_exact_where_norms_are(self, drop_rate):
        deltas = make_dyadic_deltas(3)
        base = zeros_like_first(deltas)
        weights = (1.0, 0.5, 2.0)
        ours = merge_ours(
            base, deltas, "dare+ties", stages=dare_stage(drop_rate, "l1"), weights=weights
        )
        with our_masks(drop_rate):
            theirs = merge_theirs(
                base,
                deltas,
                "dare_ties",
                density=1 - drop_rate,
                weight=list(weights),
                normalize=True,
            )
        assert_same(ours, theirs)

    @pytest.mark.parametrize("drop_rate", RATES)
    @pytest.mark.parametrize(
        ("method", "peer", "parameters"),
        [
            pytest.param("dare+sum", "dare_linear", {}, marks=compares("dare_linear", "mergekit")),
            pytest.param(
                "dare+ties",
                "dare_ties",
                {"normalize": True},
                marks=compares("dare_ties", "mergekit"),
            ),
        ],
    )
    def test_without_rescaling(self, drop_rate, method, peer, parameters):
        base, models = make_models(3)
        ours = merge_ours(base, models, method, stages=dare_stage(drop_rate, rescale=False))
        with our_masks(drop_rate):
            theirs = merge_theirs(
                base, models, peer, density=1 - drop_rate, weight=1.0, rescale=False, **parameters
            )
        assert_same(ours, theirs)


class TestPeft:
    """PEFT divides by the keep probability, as the paper and we do."""

    @pytest.mark.parametrize("drop_rate", EXACT_RATES)
    @pytest.mark.parametrize(("method", "peer"), IN_PEFT)
    def test_exact_rates(self, drop_rate, method, peer):
        _, deltas = make_models(3)
        ours = merge_ours(zeros_like_first(deltas), deltas, method, stages=dare_stage(drop_rate))
        with our_masks(drop_rate):
            theirs = peer(deltas, torch.ones(3), 1 - drop_rate)
        assert_same(ours, theirs)

    @pytest.mark.parametrize("drop_rate", RATES)
    @pytest.mark.parametrize(("method", "peer"), IN_PEFT)
    def test_any_rate(self, drop_rate, method, peer):
        # For each model we round 1/(1-p) and multiply, PEFT rounds 1-p and divides: 4 roundings.
        # Then come two more additions on either side, and ties has one division on either.
        _, deltas = make_models(3)
        ours = merge_ours(zeros_like_first(deltas), deltas, method, stages=dare_stage(drop_rate))
        with our_masks(drop_rate):
            theirs = peer(deltas, torch.ones(3), 1 - drop_rate)
        magnitude = sum(delta.abs() for delta in deltas) / (1 - drop_rate)
        assert_within(ours, theirs, 4 + 2 * 2 + 2, magnitude)
        assert torch.equal(ours == 0, theirs == 0)


def test_the_peers_masks_really_are_ours():
    """So that agreement above cannot come from both sides dropping nothing."""
    (delta,) = make_dyadic_deltas(1)
    kept = torch.from_numpy(dare.keep_mask(NAME, delta.numel(), 0.9, SEED)).reshape(delta.shape)
    assert 0.05 < kept.float().mean() < 0.15
    with our_masks(0.9):
        assert_same(peft.random_pruning(delta, 1 - 0.9, rescale=False), delta * kept)
    with our_masks(0.9):
        assert_same(sparsify.bernoulli(delta, 1 - 0.9), delta * kept)


@compares("dare_linear", "mergekit")
def test_difference_mergekits_factor_depends_on_the_mask():
    """1/(1-p) makes the expectation right; a norm's factor is only near it, and is its default."""
    delta = torch.tensor([1.0, 2.0, 3.0, 4.0] * 4)
    kept = torch.from_numpy(dare.keep_mask(NAME, 16, 0.5, SEED))
    assert kept.any()
    factor = (delta.sum() / delta[kept].sum()).item()
    assert factor != 2.0

    with our_masks(0.5):
        theirs = merge_theirs(torch.zeros(16), [delta], "dare_linear", density=0.5, weight=1.0)
    assert_same(theirs, torch.where(kept, delta * factor, 0))
    ours = merge_ours(torch.zeros(16), [delta], "dare_linear", stages=dare_stage(0.5))
    assert_same(ours, torch.where(kept, delta * 2, 0))


@compares("dare_ties", "mergekit")
def test_difference_mergekits_dare_ties_adds_where_ours_takes_the_mean():
    """Its `normalize` is off by default in dare_ties, and on in ties."""
    base, models = torch.tensor([1.0]), [torch.tensor([1.5]), torch.tensor([1.25])]
    keep_all = dare_stage(0.0)
    theirs = merge_theirs(base, models, "dare_ties", density=1.0, weight=1.0)
    assert theirs.item() == 1.75
    assert merge_ours(base, models, "dare_ties", stages=keep_all).item() == 1.375


@compares("dare_linear", "mergekit")
def test_difference_mergekit_does_not_rescale_tiny_deltas():
    """Below an L1 norm of 10⁻⁷ it leaves the kept elements as they are."""
    delta = torch.full((16,), 2.0**-30)
    kept = torch.from_numpy(dare.keep_mask(NAME, 16, 0.5, SEED))
    with our_masks(0.5):
        theirs = merge_theirs(torch.zeros(16), [delta], "dare_linear", density=0.5, weight=1.0)
    assert_same(theirs, delta * kept)
    ours = merge_ours(torch.zeros(16), [delta], "dare+sum", stages=dare_stage(0.5, "l1"))
    assert_same(ours, delta * kept * (16 / kept.sum()))


@compares("dare_linear", "mergekit")
def test_difference_in_bfloat16_mergekit_rounds_the_rate_away():
    base = torch.zeros(100_000, dtype=torch.bfloat16)
    model = torch.ones_like(base)
    theirs = merge_theirs(base, [model], "dare_linear", density=0.999, weight=1.0)
    assert (theirs == 0).sum() == 0
    ours = merge_ours(base, [model], "dare+sum", stages=dare_stage(0.001))
    # 100 are expected to be dropped; five standard deviations are 50.
    assert 50 <= (ours == 0).sum() <= 150


@compares("dare_linear", "PEFT")
def test_difference_what_is_dropped_cannot_do_harm():
    """The peers multiply by zero, and 0·∞ and 0·NaN are NaN."""
    kept = torch.from_numpy(dare.keep_mask(NAME, 16, 0.5, SEED))
    delta = torch.where(kept, 0.25, torch.tensor([torch.inf, torch.nan]).repeat(8))
    settings = {"stages": dare_stage(0.5), "allow_not_finite": True}
    ours = merge_ours(torch.zeros(16), [delta], "dare+sum", **settings)
    assert_same(ours, torch.where(kept, 0.5, 0.0))
    with our_masks(0.5):
        theirs = peft.dare_linear([delta], torch.ones(1), 0.5)
    assert torch.equal(theirs.isnan(), ~kept)


@compares("dare_linear", "PEFT")
def test_difference_to_drop_everything_is_an_error():
    """PEFT divides zero by zero."""
    delta = torch.ones(4)
    assert peft.dare_linear([delta], torch.ones(1), 0.0).isnan().all()
    with pytest.raises(dare.RecipeError, match="nothing to rescale"):
        merge_ours(torch.zeros(4), [delta], "dare+sum", stages=dare_stage(1.0))
