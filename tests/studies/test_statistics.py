from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from study_sample import of_items

from dare.errors import InputError, RecipeError
from dare.studies.judging import Objective
from dare.studies.results import (
    Contender,
    Estimate,
    Scored,
    State,
    Trial,
    group_means,
    group_of,
    groups_of,
    groups_of_scores,
)
from dare.studies.statistics import (
    is_behind,
    items_needed,
    resample,
    rungs,
    verdict,
    visible_difference,
)

MEAN = Objective()


def right_or_wrong(random, count: int, chance=0.5, groups: str = "ab") -> dict[str, float]:
    right = random.random(count) < chance
    return {f"{groups[n % len(groups)]}/{n}": float(v) for n, v in enumerate(right)}


def contender(*scored: Scored, is_random: bool = True) -> Contender:
    trials = tuple(Trial(0, {}, 0, State.DONE, scored=one) for one in scored)
    return Contender(trials, is_random=is_random)


def alone(*scored: Scored) -> list[Contender]:
    return [contender(one) for one in scored]


# ------------------------------------------------------------------------------------- intervals


def test_the_interval_of_a_mean_is_the_one_of_the_textbook():
    random = np.random.default_rng(0)
    items = {f"a/{n}": float(v) for n, v in enumerate(random.normal(size=400))}
    found = resample(alone(of_items(items)), MEAN, resamples=20_000).estimate(0)
    values = np.array([*items.values()])
    half = 1.96 * values.std(ddof=1) / 20
    assert found.value == pytest.approx(values.mean())
    assert found.low == pytest.approx(values.mean() - half, abs=0.03 * half)
    assert found.high == pytest.approx(values.mean() + half, abs=0.03 * half)


def test_each_group_keeps_its_size_and_its_say():
    # Group a never varies; group b alone makes the interval, with half a say.
    items = {f"a/{n}": 1.0 for n in range(500)} | {f"b/{n}": float(n % 2) for n in range(100)}
    found = resample(alone(of_items(items)), MEAN, resamples=20_000).estimate(0)
    half = 1.96 * 0.5 / math.sqrt(99) / 2
    assert found.value == 0.75
    assert found.high - found.low == pytest.approx(2 * half, rel=0.04)


def test_differences_are_paired():
    random = np.random.default_rng(1)
    easy = {f"a/{n}": float(v) for n, v in enumerate(random.normal(scale=10, size=200))}
    better = {i: v + 0.25 for i, v in easy.items()}
    table = resample(alone(of_items(better), of_items(easy)), MEAN)
    found = table.difference(0, 1)
    half = 1.96 * 0.25 / math.sqrt(200)  # if the sign of each difference were chance
    ends = (found.low, found.value, found.high)
    assert ends == pytest.approx((0.25 - half, 0.25, 0.25 + half), abs=0.1 * half)
    assert table.estimate(0).high - table.estimate(0).low > 2
    assert verdict(found) == "better"
    assert verdict(table.difference(1, 0)) == "worse"


def test_without_items_seeds_give_students_interval():
    values = [1.5, 1.6, 1.9]
    seeds = contender(*(Scored({"x": v}) for v in values))
    fixed = contender(Scored({"x": 0.1}), is_random=False)
    table = resample([seeds, fixed], MEAN)
    low, high = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    found = table.estimate(0)
    assert found.value == pytest.approx(np.mean(values))
    assert found.low == pytest.approx(low, rel=0.02, abs=0.01)
    assert found.high == pytest.approx(high, rel=0.02)
    assert table.estimate(1) == Estimate(0.1)
    assert table.difference(0, 1).low == pytest.approx(low - 0.1, abs=0.02)
    assert table.items == 0


def test_one_seed_of_something_random_and_no_items_is_not_known():
    several = contender(Scored({"x": 0.5}), Scored({"x": 0.6}))
    one = contender(Scored({"x": 0.1}))
    sure, sure_too = (contender(Scored({"x": v}), is_random=False) for v in (0.1, 0.2))
    table = resample([several, one, sure, sure_too], MEAN)
    assert verdict(table.difference(0, 1)) == "not known"
    assert verdict(table.difference(2, 3)) == "not known"
    assert table.difference(0, 2).low is not None


def test_seeds_that_make_no_difference_do_not_widen_the_interval():
    items = right_or_wrong(np.random.default_rng(3), 200)
    one, five = (contender(*[of_items(items)] * count) for count in (1, 5))
    table = resample([one, five], MEAN)
    one_seed, five_seeds = (table.estimate(n) for n in (0, 1))
    assert (one_seed.low, one_seed.high) == pytest.approx(
        (five_seeds.low, five_seeds.high), rel=1e-12
    )
    assert table.difference(0, 1) == Estimate(0.0, 0.0, 0.0)


def test_seeds_widen_it_as_they_differ_but_hardly_by_which_items_are_right():
    random = np.random.default_rng(4)
    items = {f"a/{n}": float(v) for n, v in enumerate(random.normal(size=400))}
    shifts = (-0.4, -0.2, 0.0, 0.2, 0.4)
    trials = [of_items({i: v + shift for i, v in items.items()}) for shift in shifts]
    found = resample([contender(*trials)], MEAN).estimate(0)
    by_seeds = np.std(shifts, ddof=1) / math.sqrt(5)
    assert found.high - found.low > 2 * stats.t.ppf(0.975, 4) * by_seeds
    widths = []
    for _ in range(20):
        trials = tuple(of_items(right_or_wrong(random, 200)) for _ in range(5))
        found = resample([contender(*trials)], MEAN, resamples=500).estimate(0)
        widths.append(found.high - found.low)
    textbook = 2 * 1.96 * math.sqrt(0.25 / 1000)
    assert textbook < np.mean(widths) < 1.5 * textbook


def test_scores_without_items_are_held_as_they_are():
    items = {f"a/{n}": float(n % 2) for n in range(50)}
    with_other, without = of_items(items, english=1.5), of_items(items)
    table = resample(alone(with_other), Objective({"a": 1.0, "english": -1.0}))
    plain = resample(alone(without), MEAN)
    assert table.without_items == ("english",)
    np.testing.assert_allclose(table.draws, (plain.draws - 1.5) / 2, rtol=0, atol=1e-12)
    only = resample(alone(with_other), Objective({"english": 1.0}))
    assert (only.items, only.estimate(0)) == (0, Estimate(1.5))


def test_other_items_each_time_are_compared_on_those_that_all_have():
    random = np.random.default_rng(5)
    items = {i: 2 * v for i, v in right_or_wrong(random, 60, groups="a").items()}
    less = {i: 2.0 - items[i] for i in list(items)[:40]}
    table = resample(alone(of_items(items), of_items(less)), MEAN)
    assert (table.items, table.left_out) == (40, 20)
    common = group_means({i: items[i] for i in less})["a"]
    assert table.difference(0, 1).value == pytest.approx(common - (2 - common))
    of_common = resample(alone(of_items({i: items[i] for i in less})), MEAN).estimate(0)
    own = table.estimate(0)
    assert own.value == group_means(items)["a"] != common
    assert own.low - own.value == pytest.approx(of_common.low - common)
    assert own.high - own.value == pytest.approx(of_common.high - common)
    apart = resample(alone(of_items(items), of_items({"a/x": 1.0, "a/y": 0.0})), MEAN)
    assert (apart.items, apart.left_out) == (0, 62)
    assert verdict(apart.difference(0, 1)) == "not known"


def test_nothing_to_compare_is_refused_and_one_item_tells_nothing():
    table = resample(alone(of_items({"a/1": 1.0})), MEAN)
    assert (table.items, table.estimate(0)) == (0, Estimate(1.0))
    for nothing in ([], [contender()]):
        with pytest.raises(InputError, match="nothing to compare"):
            resample(nothing, MEAN)
    with pytest.raises(RecipeError, match="'x'"):
        resample(alone(Scored({"a": 1.0}), Scored({"x": 1.0, "a": 0.0})), Objective({"x": 1.0}))


def test_the_same_study_gives_the_same_numbers_in_any_steps(monkeypatch):
    random = np.random.default_rng(6)
    trials = [of_items(right_or_wrong(random, 90)) for _ in range(6)]
    contenders = [contender(*trials[:3]), contender(*trials[3:])]
    first = resample(contenders, MEAN, resamples=300)
    assert np.array_equal(resample(contenders, MEAN, resamples=300).draws, first.draws)
    monkeypatch.setattr("dare.studies.statistics._MOST_NUMBERS", 700)
    again = resample(contenders, MEAN, resamples=300)
    np.testing.assert_allclose(again.draws, first.draws, rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------- shares


def drawn_items(random, kind: str, count: int) -> tuple[Scored, float]:
    """Items of a kind, and the mean of all that there might be."""
    values, mean = {
        "half right": lambda: (random.random(count) < 0.5, 0.5),
        "nearly all right": lambda: (random.random(count) < 0.95, 0.95),
        "even": lambda: (random.random(count), 0.5),
        "high": lambda: (random.beta(5, 1, count), 5 / 6),
    }[kind]()
    return of_items({f"a/{n}": float(v) for n, v in enumerate(values)}), mean


@pytest.mark.parametrize("count", [5, 20, 60])
@pytest.mark.parametrize("kind", ["half right", "nearly all right", "even", "high"])
def test_the_interval_of_a_share_holds_and_stays_within_0_and_1(kind: str, count: int):
    held, runs = 0, 150
    for run in range(runs):
        scored, mean = drawn_items(np.random.default_rng([7, run]), kind, count)
        found = resample(alone(scored), MEAN, resamples=300).estimate(0)
        assert 0 <= found.low <= found.value <= found.high <= 1
        held += found.low <= mean <= found.high
    assert held >= 0.91 * runs  # 95% less two standard errors


def test_a_share_is_wilsons_or_for_all_or_nothing_clopper_and_pearsons():
    for right in (0, 3, 20, 39, 40):
        scored = of_items({f"a/{n}": float(n < right) for n in range(40)})
        found = resample(alone(scored), MEAN, resamples=20_000).estimate(0)
        way, room = ("exact", 0.01) if right in (0, 40) else ("wilson", 0.02)
        known = stats.binomtest(right, 40).proportion_ci(method=way)
        assert (found.low, found.high) == pytest.approx((known.low, known.high), abs=room)


def test_with_a_task_that_is_all_right_or_all_wrong_the_interval_is_as_drawn():
    """Wilson's would stop at 0.727 and 0.99 for the first, though 1 is well possible."""
    for counts, low, high in (((20, 18), 0.845, 1.0), ((0, 2), 0.0, 0.155)):
        items = {
            f"{name}/{n}": float(n < right)
            for name, right in zip("ab", counts, strict=True)
            for n in range(20)
        }
        found = resample(alone(of_items(items)), MEAN, resamples=20_000).estimate(0)
        assert found.value == sum(counts) / 40
        assert (found.low, found.high) == pytest.approx((low, high), abs=0.01)


@pytest.mark.parametrize(("count", "shown"), [(2, False), (5, False), (6, True), (40, True)])
def test_differences_of_shares_stay_within_1_and_few_items_show_none(count: int, shown: bool):
    right, wrong = (of_items({f"a/{n}": value for n in range(count)}) for value in (1.0, 0.0))
    table = resample(alone(right, wrong, right), MEAN, resamples=20_000)
    found = table.difference(0, 1)
    assert found.value == pytest.approx(1.0)
    assert -1 <= found.low < found.value <= found.high <= 1
    assert (verdict(found) == "better") == shown  # as a sign test has it
    assert table.difference(0, 2) == Estimate(0.0, 0.0, 0.0)


def test_what_is_no_share_has_no_bounds():
    small = {f"loss/{n}": float(v) for n, v in enumerate((0.0, 0.0, 0.0, 1.0))}
    found = resample(alone(of_items(small)), Objective({"loss": -1.0})).estimate(0)
    assert found.high > 0
    seeds = contender(*(Scored({"right": v}) for v in (0.8, 0.9, 1.0)))
    assert resample([seeds], MEAN).estimate(0).high <= 1
    large = contender(*(Scored({"right": v}) for v in (0.8, 0.9, 1.01)))
    assert resample([large], MEAN).estimate(0).high > 1.01


# ------------------------------------------------------------------------------------- simulations


def of_nothing(seed: int, contenders: int, items: int) -> list[Scored]:
    """Contenders of which none is better: items that are equal for all by chance, or fair coins."""
    random = np.random.default_rng([20, seed])
    same, own = random.random(items) < 0.5, random.random((contenders, items)) < 0.5
    right = np.where(random.random((contenders, items)) < 0.8, same, own)
    return [of_items({f"a/{n}": float(v) for n, v in enumerate(row)}) for row in right]


def test_a_search_of_nothing_rarely_finds_a_difference_between_any_two():
    found, runs = 0, 300
    for run in range(runs):
        table = resample(alone(*of_nothing(run, 12, 80)), MEAN, resamples=400)
        best, worst = int(table.values.argmax()), int(table.values.argmin())
        found += verdict(table.difference(best, worst)) == "better"
    assert 0.02 * runs < found < 0.09 * runs  # 5%, within three standard errors


def test_copies_in_a_cluster_leave_the_interval_as_it_is():
    items = right_or_wrong(np.random.default_rng(3), 60, groups="a")
    worse = {i: v * (n % 4 > 0) for n, (i, v) in enumerate(items.items())}
    found = []
    for copies in (1, 5):
        given = [
            {f"{i}/{n}": v for i, v in own.items() for n in range(copies)} for own in (items, worse)
        ]
        table = resample(alone(*map(of_items, given)), MEAN)
        assert table.items == 60 * copies
        found.append((table.difference(0, 1), table.estimate(0)))
    for one, five in zip(*found, strict=True):
        ends = (five.low, five.value, five.high)
        assert ends == pytest.approx((one.low, one.value, one.high), abs=1e-9)


@pytest.mark.parametrize(("items", "contenders", "agreement"), [(200, 6, 0.8), (80, 12, 0.5)])
def test_the_visible_difference_is_seen_in_four_of_five_searches(items, contenders, agreement):
    size = visible_difference(items, contenders, agreement=agreement)
    seen, runs = 0, 120
    for run in range(runs):
        random = np.random.default_rng([21, run])
        same = random.random(items) < 0.5
        flips = random.random((contenders, items)) < (1 - agreement) / 2  # two differ at twice that
        right = same ^ flips
        # As many items differ between the first two; those where only the first is right are more.
        differ = random.random(items) < 1 - agreement
        first = random.random(items) < 0.5 * (1 + size / (1 - agreement))
        right[0], right[1] = np.where(differ, first, same), np.where(differ, ~first, same)
        scored = [of_items({f"a/{n}": float(v) for n, v in enumerate(row)}) for row in right]
        table = resample(alone(*scored), MEAN, resamples=300)
        seen += verdict(table.difference(0, 1)) == "better"
    assert 0.65 * runs < seen < 0.93 * runs


def test_more_items_agreement_and_tasks_show_smaller_differences():
    size = visible_difference(200, 8)
    assert items_needed(size, 8) == pytest.approx(200, abs=1)
    assert visible_difference(100, 8, tasks=2) == pytest.approx(size)
    assert visible_difference(800, 8) == pytest.approx(size / 2)
    by_agreement = [visible_difference(200, 8, agreement=share) for share in (0.9, 0.8, 0.3)]
    assert by_agreement == sorted(by_agreement)
    assert size in by_agreement
    assert visible_difference(200, 30) > size
    assert visible_difference(2, 8) == 1
    # All that differ differ one way, as a sign test of so many items needs.
    assert visible_difference(40, 2, agreement=1.0) == pytest.approx(
        (1.96 + 0.8416) ** 2 / 40, 1e-3
    )


# ------------------------------------------------------------------------------------- racing


@pytest.mark.parametrize(
    ("losses", "cluster", "is_clear"),
    [
        (4, "{}", False),  # 4/20 lost: as much as two errors of √4/20
        (5, "{}", True),  # 5/20 is more than 2 √5/20
        (5, "0/{}", False),  # one cluster is one loss
        (0, "{}", False),
    ],
)
def test_behind_is_what_lost_two_standard_errors(losses, cluster, is_clear):
    best = {f"a/{cluster.format(n)}": 1.0 for n in range(20)}
    items = {i: float(n >= losses) for n, i in enumerate(best)}
    assert is_behind(items, best, MEAN) is is_clear
    assert is_behind(best, items, Objective({"a": -1.0})) is is_clear
    assert not is_behind(best, items, MEAN)
    assert not is_behind(items, best, Objective({"english": 1.0}))  # which is no mean of items


@pytest.mark.parametrize(
    ("scores", "items", "groups"),
    [
        ({"a": 0.5000004, "b": 0.9, "c": 1}, {"a/1": 1.0, "a/2": 0.0, "b/1": 1.0}, {"a": "a"}),
        ({"a": 0.5}, {}, {}),
        ({"x": 1e9 + 1}, {"x/1": 1e9}, {"x": "x"}),
        # One score and items without groups belong together.
        ({"accuracy": 0.5}, {"1": 1.0, "2": 0.0}, {"accuracy": "score"}),
        ({"accuracy": 0.6}, {"1": 1.0, "2": 0.0}, {}),
        ({"accuracy": 0.5, "score": 0.5}, {"1": 1.0, "2": 0.0}, {"score": "score"}),
        ({"accuracy": 0.5}, {"a/1": 0.5}, {}),
    ],
)
def test_only_scores_that_are_means_of_their_items_are_made_of_items(scores, items, groups):
    assert groups_of_scores(Scored(scores, items)) == groups


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


def test_every_rung_has_each_group_by_its_share_and_the_first_has_all():
    ids = [f"a/{n}" for n in range(300)] + [f"b/{n}" for n in range(90)] + ["c/1"]
    so_far = Counter()
    for rung in rungs(ids, seed=3):
        so_far += Counter(map(group_of, rung))
        total = sum(so_far.values())
        assert so_far["c"] == 1
        assert abs(so_far["a"] - total * 300 / 391) <= 2
        assert abs(so_far["b"] - total * 90 / 391) <= 2
    many = [f"g{n % 57}/{n}" for n in range(570)]
    assert len(groups_of(rungs(many, seed=0)[0])) == 57


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
