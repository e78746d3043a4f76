from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dare.errors import InputError, RecipeError
from dare.studies.items import (
    choose_subset,
    estimate,
    groups_of,
    groups_of_scores,
    rungs,
    scores_of,
)
from dare.studies.results import Scored, Subset, group_of


def test_the_group_is_what_stands_before_the_first_slash():
    assert [group_of(i) for i in ("add/1", "a/b/c", "/x", "17", "")] == [
        "add",
        "a",
        "score",
        "score",
        "score",
    ]


def test_scores_are_means_of_groups():
    items = {"add/1": 1.0, "sort/1": 0.25, "add/2": 0.5, "3": 7.0}
    assert scores_of(items) == {"add": 0.75, "sort": 0.25, "score": 7.0}
    assert scores_of({}) == {}


def test_weighted_scores_are_of_the_items_that_are_there():
    weights = {"a/1": 0.75, "a/2": 0.25, "a/3": 0.5}
    assert scores_of({"a/1": 1.0, "a/2": 0.0}, weights) == {"a": 0.75}


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


def test_a_subsets_scores_are_made_of_its_weighted_items():
    scored = Scored({"a": 0.75}, {"a/1": 1.0, "a/2": 0.0})
    assert set(groups_of_scores(scored)) == set()
    assert set(groups_of_scores(scored, {"a/1": 0.75, "a/2": 0.25})) == {"a"}


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


def test_rungs_may_start_smaller_and_grow_otherwise():
    ids = [str(n) for n in range(16)]
    assert [len(rung) for rung in rungs(ids, reduction=2, least=4, seed=0)] == [4, 4, 8]
    with pytest.raises(RecipeError, match="reduction must be 2 or more, not 1"):
        rungs(ids, reduction=1, seed=0)


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


@given(
    st.lists(st.text("ab/1", max_size=4), max_size=80),
    st.integers(2, 4),
    st.integers(1, 5),
    st.integers(0, 5),
    st.randoms(),
)
def test_rungs_are_a_partition_that_the_order_does_not_change(ids, reduction, least, seed, random):
    found = rungs(ids, reduction=reduction, least=least, seed=seed)
    assert sorted(i for rung in found for i in rung) == sorted(set(ids))
    random.shuffle(ids)
    assert rungs(ids, reduction=reduction, least=least, seed=seed) == found


def test_another_seed_draws_other_items():
    ids = [str(n) for n in range(300)]
    assert set(rungs(ids, seed=0)[0]) != set(rungs(ids, seed=1)[0])
    assert rungs(["c", "a", "b"], seed=0) == [["c", "a", "b"]]  # as it is on any machine


# ------------------------------------------------------------------------------------- subsets


def models(count: int, items: int, seed: int) -> list[dict[str, float]]:
    """Right or wrong on items of two groups: by the item's difficulty, and by chance."""
    random = np.random.default_rng(seed)
    difficulty = random.normal(size=items)
    ids = [f"{'ab'[n % 3 == 0]}/{n}" for n in range(items)]
    skills = np.linspace(-0.5, 0.5, count)[:, None]
    right = random.random((count, items)) < 1 / (1 + np.exp(-3 * (skills - difficulty)))
    return [dict(zip(ids, map(float, row), strict=True)) for row in right]


def test_a_subset_of_a_hand_made_case():
    # 8 easy items, 8 hard ones, 4 on which the baselines disagree: one group.
    easy, open_ = range(8), range(16, 20)
    one = {f"x/{n:02}": float(n in easy or n in open_) for n in range(20)}
    two = {f"x/{n:02}": float(n in easy) for n in range(20)}
    subset = choose_subset({"one": one, "two": two}, 15, seed=0)
    assert sorted(subset.sizes.values()) == [4, 8, 8]
    drawn = Counter(subset.strata.values())
    by_size = {name: (size, drawn[name]) for name, size in subset.sizes.items()}
    assert sorted(by_size.values()) == [(4, 4), (8, 5), (8, 6)]  # all of those in doubt
    scores, errors = estimate(subset, one)
    assert scores == {"x": pytest.approx(12 / 20)}
    assert 0 < errors["x"] < 0.01  # each stratum is of one kind, as far as was seen


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 45),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_a_subset_fits_together(items, groups, baselines, count, binary, seed):
    random = np.random.default_rng(seed)
    ids = [f"g{n % groups}/{n}" for n in range(items)]
    draw = (lambda: float(random.integers(2))) if binary else (lambda: float(random.normal()))
    by_baseline = {f"b{k}": {i: draw() for i in ids} for k in range(baselines)}
    kinds = len(groups_of(ids))
    if count < kinds:
        with pytest.raises(RecipeError, match=f"choose {kinds} or more"):
            choose_subset(by_baseline, count, seed)
        return
    subset = choose_subset(by_baseline, count, seed)
    assert len(subset.ids) == len(set(subset.ids)) == min(count, items)
    assert set(subset.weights) == set(subset.strata) == set(subset.ids) <= set(ids)
    assert sum(subset.sizes.values()) == items
    assert set(subset.sizes) == set(subset.strata.values())
    for members in groups_of(subset.ids).values():
        assert math.fsum(subset.weights[i] for i in members) == pytest.approx(1.0)
    scores, errors = estimate(subset, by_baseline["b0"])
    assert set(scores) == set(errors) == set(groups_of(ids))
    assert all(math.isfinite(error) and error >= 0 for error in errors.values())
    if count >= items:
        assert scores == pytest.approx(scores_of(by_baseline["b0"]))
        assert set(errors.values()) == {0.0}


def test_a_subset_does_not_depend_on_the_order_of_items_and_has_only_common_ones():
    one, two = models(2, 60, seed=0)
    del two["a/0" if "a/0" in two else "b/0"]
    subset = choose_subset({"one": one, "two": two}, 20, seed=4)
    turned = {"one": dict(reversed(one.items())), "two": dict(reversed(two.items()))}
    assert choose_subset(turned, 20, seed=4) == subset
    assert sum(subset.sizes.values()) == 59
    assert choose_subset(turned, 20, seed=5).ids != subset.ids


def test_estimates_are_unbiased_their_errors_hold_and_beat_simple_sampling():
    *baselines, candidate = models(6, 450, seed=1)
    by_baseline = {str(n): items for n, items in enumerate(baselines)}
    truth = scores_of(candidate)
    estimates, errors = [], []
    for seed in range(200):
        subset = choose_subset(by_baseline, 60, seed)
        scores, error = estimate(subset, candidate)
        estimates.append([scores[g] for g in "ab"])
        errors.append([error[g] for g in "ab"])
    off = np.array(estimates) - [truth[g] for g in "ab"]
    assert np.abs(off.mean(axis=0)).max() < 3 * off.std(axis=0).max() / math.sqrt(200)
    covered = np.abs(off) <= 1.96 * np.array(errors)
    assert 0.91 <= covered.mean() <= 0.99
    drawn = Counter(map(group_of, subset.ids))
    sizes = Counter(map(group_of, candidate))
    for place, group in enumerate("ab"):
        right = truth[group]
        simple = right * (1 - right) * (1 - drawn[group] / sizes[group]) / drawn[group]
        assert off[:, place].var() < 0.8 * simple


def test_strata_with_one_item_have_an_error():
    one = Subset(("x/1",), {"x/1": 1.0}, {"x/1": "x/0"}, {"x/0": 5})
    assert estimate(one, {"x/1": 1.0}) == ({"x": 1.0}, {"x": math.sqrt(0.8 * 0.25)})
    two = Subset(
        ("x/1", "x/2"),
        {"x/1": 0.5, "x/2": 0.5},
        {"x/1": "x/0", "x/2": "x/1"},
        {"x/0": 2, "x/1": 2},
    )
    for items in ({"x/1": 1.0, "x/2": 1.0}, {"x/1": 1.0, "x/2": 0.0}):
        _, errors = estimate(two, items)
        assert errors == {"x": math.sqrt(2 * 0.25 * 0.5 * 0.25)}


def test_an_estimate_by_hand():
    # Two strata of 6 and 4; three and two drawn.
    strata = dict.fromkeys(["x/1", "x/2", "x/3"], "x/0") | dict.fromkeys(["x/4", "x/5"], "x/1")
    weights = dict.fromkeys(strata, 0.2)
    subset = Subset(tuple(strata), weights, strata, {"x/0": 6, "x/1": 4})
    items = {"x/1": 1.0, "x/2": 1.0, "x/3": 0.0, "x/4": 0.0, "x/5": 0.0, "y/9": 3.0}
    scores, errors = estimate(subset, items)
    assert scores == {"x": pytest.approx(0.4)}
    within, of_group = 2 / 3, 0.4 * 0.6
    common = (within + of_group) / (3 + 1)
    variance = 0.36 * 0.5 * (within + common) / 3 / 3 + 0.16 * 0.5 * (0 + common) / 2 / 2
    assert errors == {"x": pytest.approx(math.sqrt(variance), rel=1e-12)}


def test_what_a_subset_cannot_be_made_of_is_refused():
    with pytest.raises(InputError, match="gives none"):
        choose_subset({}, 5, seed=0)
    with pytest.raises(InputError, match="one, two have no items in common"):
        choose_subset({"one": {"a/1": 1.0}, "two": {"a/2": 1.0}}, 5, seed=0)
    subset = choose_subset({"one": {"a/1": 1.0, "a/2": 0.0}}, 2, seed=0)
    with pytest.raises(InputError, match="1 of the 2 items of the subset have no score, such as"):
        estimate(subset, {"a/1": 1.0})
