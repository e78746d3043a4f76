"""TIES: mergekit's ties and PEFT's, and where the definitions part."""

from __future__ import annotations

import pytest
import torch
from mergekit import sparsify
from peft.utils import merge_utils as peft
from side_by_side import (
    NAME,
    SEED,
    assert_same,
    compares,
    make_dyadic_deltas,
    make_models,
    merge_ours,
    merge_theirs,
)

import dare

SHAPES = [(1,), (37, 53), (300, 301)]


def merge_trimmed(base, models, keep_ratio, **settings):
    return merge_ours(base, models, "ties", stages={"ties": {"keep_ratio": keep_ratio}}, **settings)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("keep_ratio", [0.2, 0.5, 1.0])
@compares("ties", "mergekit")
def test_mergekit(count, shape, keep_ratio):
    base, models = make_models(count, shape)
    ours = merge_trimmed(base, models, keep_ratio)
    assert_same(ours, merge_theirs(base, models, "ties", density=keep_ratio, weight=1.0))


@pytest.mark.parametrize("weights", [(0.5, 0.25, 0.7), (1.0, 1e-3, 2.0)])
@pytest.mark.parametrize("scale", [1.0, 0.7])
@compares("ties", "mergekit")
def test_mergekit_with_weights(weights, scale):
    base, models = make_models(3)
    ours = merge_trimmed(base, models, 0.3, weights=weights, scale=scale)
    theirs = merge_theirs(
        base, models, "ties", density=0.3, weight=list(weights), **{"lambda": scale}
    )
    assert_same(ours, theirs)


@pytest.mark.parametrize("shape", SHAPES[1:])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("keep_ratio", [0.2, 0.5])
@compares("ties", "PEFT")
def test_peft_with_weights_of_one(count, shape, keep_ratio):
    _, deltas = make_models(count, shape)
    ours = merge_trimmed(torch.zeros(shape), deltas, keep_ratio)
    assert_same(ours, peft.ties(deltas, torch.ones(count), keep_ratio))


@compares("ties", "PEFT")
def test_peft_with_equal_weights_divides_by_the_count():
    _, deltas = make_models(3)
    stages = {"ties": {"keep_ratio": 0.3, "divide_by": "count"}}
    ours = merge_ours(
        torch.zeros_like(deltas[0]), deltas, "ties", stages=stages, weights=(0.7, 0.7, 0.7)
    )
    assert_same(ours, peft.ties(deltas, torch.full((3,), 0.7), 0.3))


@pytest.mark.parametrize("keep_ratio", [0.2, 0.5])
@compares("ties", "mergekit")
def test_trim_after_dare_ranks_the_survivors_only(keep_ratio):
    """The peers cannot chain the two: theirs is given the survivors alone to rank."""
    _, (delta,) = make_models(1)
    keep = torch.from_numpy(dare.keep_mask(NAME, delta.numel(), 0.9, SEED)).reshape(delta.shape)
    theirs = torch.zeros_like(delta)
    theirs[keep] = sparsify.magnitude(delta[keep], density=keep_ratio)

    stages = {"dare": {"drop_rate": 0.9, "rescale": False}, "ties": {"keep_ratio": keep_ratio}}
    ours = merge_ours(torch.zeros_like(delta), [delta], "dare+ties", stages=stages)
    assert_same(ours, theirs)


class TestEqualMagnitudesAtTheCut:
    """We keep those of the lowest index; mergekit's sort is not stable and PEFT's topk neither."""

    def test_by_hand(self):
        delta = torch.tensor([0.5, -0.25, 0.25, 1.0, -0.25, 0.25])
        ours = merge_trimmed(torch.zeros(6), [delta], 0.5)
        assert ours.tolist() == [0.5, -0.25, 0.0, 1.0, 0.0, 0.0]

    def test_all_else_agrees(self):
        (delta,) = make_dyadic_deltas(1)  # 65 magnitudes for 1961 elements
        ours = merge_trimmed(torch.zeros_like(delta), [delta], 0.3)
        cut = ours[ours != 0].abs().min()
        for theirs in (sparsify.magnitude(delta, 0.3), peft.magnitude_based_pruning(delta, 0.3)):
            assert_same(ours[delta.abs() != cut], theirs[delta.abs() != cut])
            assert (ours != 0).sum() == (theirs != 0).sum()

        at_cut = (delta.abs() == cut).flatten()
        kept_at_cut = (ours.flatten() != 0)[at_cut]
        assert 0 < kept_at_cut.sum() < kept_at_cut.numel()
        assert kept_at_cut.tolist() == sorted(kept_at_cut.tolist(), reverse=True)


@compares("ties", "mergekit")
def test_mergekit_on_bfloat16_differs_only_where_the_sum_is_zero():
    """Deltas of bfloat16 weights are coarse, so that some do cancel: see the next test."""
    base, models = make_models(3, shape=(300, 301), dtype=torch.bfloat16)
    ours = merge_ours(base, models, "ties")
    theirs = merge_theirs(
        base,
        models,
        "ties",
        dtype=torch.float32,
        out_dtype=torch.bfloat16,
        density=1.0,
        weight=1.0,
    )
    cancelling = sum(model.double() - base.double() for model in models) == 0
    assert torch.equal(ours[cancelling], base[cancelling])
    assert (theirs[cancelling] > base[cancelling]).any()
    assert_same(ours[~cancelling], theirs[~cancelling])


@compares("ties", "mergekit")
def test_difference_a_zero_sum_elects_nothing():
    """The peers count a sum of zero as positive, which favours one sign for no reason."""
    deltas = [torch.tensor([0.5]), torch.tensor([-0.5])]
    base = torch.tensor([1.0])
    models = [base + delta for delta in deltas]
    assert merge_ours(base, models, "ties").item() == 1.0
    assert merge_theirs(base, models, "ties", density=1.0, weight=1.0).item() == 1.5
    assert peft.ties(deltas, torch.ones(2), 1.0).item() == 0.5


@compares("ties", "mergekit")
def test_difference_the_sum_is_rounded_in_another_order():
    """We add up each sign by itself, so P + N = fl(1 + 2⁻²⁴) - 1 = 0 elects nothing.

    A running sum in this order, 1 - 1 + 2⁻²⁴, sees the small one; in the order 1, 2⁻²⁴, -1 it
    would be zero too. Only sums that cancel to a few parts in 2²⁴ can come out differently.
    """
    deltas = [torch.tensor([value]) for value in (1.0, -1.0, 2.0**-24)]
    assert merge_ours(torch.zeros(1), deltas, "ties").item() == 0.0
    theirs = merge_theirs(torch.zeros(1), deltas, "ties", density=1.0, weight=1.0)
    assert theirs.item() == 0.5


@pytest.mark.parametrize("weights", [(0.5, -0.25, 0.7), (-1.0, 1.0, 2.0), (-1.0, -0.5, -0.1)])
@compares("ties", "mergekit")
def test_mergekit_divides_by_weights_with_their_signs(weights):
    base, models = make_models(3)
    stages = {"ties": {"keep_ratio": 0.5, "divide_by": "signed"}}
    ours = merge_ours(base, models, "ties", stages=stages, weights=weights)
    assert_same(ours, merge_theirs(base, models, "ties", density=0.5, weight=list(weights)))


@compares("ties", "mergekit")
def test_difference_a_negative_weight_turns_a_delta_around():
    """mergekit divides by the sum of the weights, sign and all, so that the minus cancels.

    So does `divide_by = "signed"`.
    """
    base, models = torch.tensor([1.0]), [torch.tensor([1.5])]
    assert merge_ours(base, models, "ties", weights=[-1.0]).item() == 0.5
    assert merge_theirs(base, models, "ties", density=1.0, weight=[-1.0]).item() == 1.5


@compares("ties", "PEFT")
def test_difference_peft_elects_without_the_weights():
    deltas = [torch.tensor([0.5]), torch.tensor([-0.25])]
    weights = (0.25, 1.0)  # weighted sum -0.125, unweighted sum +0.25
    stages = {"ties": {"divide_by": "count"}}
    ours = merge_ours(torch.zeros(1), deltas, "ties", stages=stages, weights=weights)
    assert ours.item() == -0.25
    assert peft.ties(deltas, torch.tensor(weights), 1.0).item() == 0.125
    theirs = merge_theirs(torch.zeros(1), deltas, "ties", density=1.0, weight=list(weights))
    assert theirs.item() == -0.25  # mergekit elects as we do


@compares("ties", "PEFT")
def test_difference_peft_may_keep_nothing_of_a_small_tensor():
    delta = torch.tensor([0.5, 1.0, -0.25])
    ours = merge_trimmed(torch.zeros(3), [delta], 0.2)
    assert ours.tolist() == [0.0, 1.0, 0.0]
    assert_same(ours, merge_theirs(torch.zeros(3), [delta], "ties", density=0.2, weight=1.0))
    assert peft.ties([delta], torch.ones(1), 0.2).tolist() == [0.0, 0.0, 0.0]


# ---------------------------------------------------------------- elections

VOTES = {"sum": "total", "count": "frequency"}


@pytest.mark.parametrize("vote", VOTES)
@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (0.5, 2.0, 4.0)])
@compares("ties", "PEFT")
def test_peft_elects_as_we_do_without_weights(vote, weights):
    deltas = make_dyadic_deltas(3)
    stages = {"ties": {"vote": vote, "weighted": False, "divide_by": "count"}}
    ours = merge_ours(
        torch.zeros_like(deltas[0]), deltas, "ties", stages=stages, weights=list(weights)
    )
    method = VOTES[vote]
    theirs = peft.ties(deltas, torch.tensor(weights), 1.0, majority_sign_method=method)
    ballots = [delta.sign() if vote == "count" else delta for delta in deltas]
    cancelling = sum(ballots) == 0  # which they count as positive: see above
    assert_same(ours[~cancelling], theirs[~cancelling])
    assert (ours[cancelling] == 0).all()
    assert 0 < cancelling.float().mean() < 0.5
