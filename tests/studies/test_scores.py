from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dare.studies.results import Scored, group_means, group_of, groups_of, groups_of_scores
from dare.studies.statistics import rungs


def test_scores_are_means_of_groups():
    items = {"add/1": 1.0, "sort/1": 0.25, "add/2": 0.5, "3": 7.0}
    assert group_means(items) == {"add": 0.75, "sort": 0.25, "score": 7.0}
    assert group_means({}) == {}


def test_only_scores_that_are_means_of_their_items_are_made_of_items():
    items = {"add/1": 1.0, "add/2": 0.0, "sort/1": 1.0}
    scored = Scored({"add": 0.5000004, "sort": 0.9, "english": 1.2}, items)
    assert set(groups_of_scores(scored)) == {"add"}
    assert set(groups_of_scores(Scored({"add": 0.5}))) == set()
    assert set(groups_of_scores(Scored({"x": 1e9 + 1}, {"x/1": 1e9}))) == {"x"}


def test_one_score_and_items_without_groups_belong_together():
    items = {"1": 1.0, "2": 0.0}
    assert groups_of_scores(Scored({"accuracy": 0.5}, items)) == {"accuracy": "score"}
    assert groups_of_scores(Scored({"accuracy": 0.6}, items)) == {}
    assert groups_of_scores(Scored({"accuracy": 0.5, "score": 0.5}, items)) == {"score": "score"}
    assert groups_of_scores(Scored({"accuracy": 0.5}, {"a/1": 0.5})) == {}


# ------------------------------------------------------------------------------------- racing


@pytest.mark.parametrize(
    ("count", "sizes"),
    [
        (0, [0]),
        (1, [1]),
        (29, [29]),
        (30, [10, 20]),
        (100, [11, 22, 67]),
        (1000, [37, 74, 222, 667]),
        (10000, [370, 741, 2222, 6667]),
    ],
)
def test_rungs_grow_threefold_and_few_items_are_one(count, sizes):
    found = rungs([str(n) for n in range(count)], seed=1)
    assert [len(rung) for rung in found] == sizes


def test_every_rung_has_each_group_by_its_share():
    ids = [f"a/{n}" for n in range(300)] + [f"b/{n}" for n in range(90)] + ["c/1"]
    so_far = Counter()
    for rung in rungs(ids, seed=3):
        so_far += Counter(map(group_of, rung))
        total = sum(so_far.values())
        assert so_far["c"] == 1
        assert abs(so_far["a"] - total * 300 / 391) <= 2
        assert abs(so_far["b"] - total * 90 / 391) <= 2


def test_many_small_groups_are_all_in_the_first_rung():
    ids = [f"g{n % 57}/{n}" for n in range(570)]
    assert len(groups_of(rungs(ids, seed=0)[0])) == 57


@given(st.lists(st.text("ab/1", max_size=4), max_size=80), st.integers(0, 5), st.randoms())
def test_rungs_are_a_partition_that_the_order_does_not_change(ids, seed, random):
    found = rungs(ids, seed=seed)
    assert sorted(i for rung in found for i in rung) == sorted(set(ids))
    random.shuffle(ids)
    assert rungs(ids, seed=seed) == found


def test_another_seed_draws_other_items():
    ids = [str(n) for n in range(300)]
    assert set(rungs(ids, seed=0)[0]) != set(rungs(ids, seed=1)[0])
    assert rungs(["c", "a", "b"], seed=0) == [["c", "a", "b"]]  # as it is on any machine
