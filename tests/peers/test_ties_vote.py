"""The elections of ties: PEFT's, by total or by frequency, without the weights."""

from __future__ import annotations

import pytest
import torch
from peft.utils import merge_utils as peft
from side_by_side import assert_same, compares, make_dyadic_deltas, merge_ours

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
    cancelling = sum(ballots) == 0  # which they count as positive: see test_ties
    assert_same(ours[~cancelling], theirs[~cancelling])
    assert (ours[cancelling] == 0).all()
    assert 0 < cancelling.float().mean() < 0.5
