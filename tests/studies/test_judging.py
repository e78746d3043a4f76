from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dare.errors import RecipeError
from dare.recipe.options import Search
from dare.studies.conclusions import Judge, doubts
from dare.studies.judging import Guard, Objective

SCORES = {"add": 0.75, "sort": 0.5, "english": 1.25}


# ------------------------------------------------------------------------------------- objectives


@pytest.mark.parametrize(
    ("given", "weights", "value"),
    [
        ({}, {}, 2.5 / 3),
        ("add", {"add": 1.0}, 0.75),
        (["add", "sort"], {"add": 1.0, "sort": 1.0}, 0.625),
        (["add", "english=-0.5"], {"add": 1.0, "english": -0.5}, (0.75 - 0.625) / 1.5),
        ({"add": 3, "sort": 1.0}, {"add": 3.0, "sort": 1.0}, 2.75 / 4),
        ({"english": -2.0}, {"english": -2.0}, -1.25),
        (["arc-easy", "a/b", "x=y=2"], {"arc-easy": 1.0, "a/b": 1.0, "x=y": 2.0}, None),
    ],
)
def test_an_objective_is_the_weighted_mean_of_scores(given, weights, value):
    read = Search(objective=given).objective
    assert read == weights
    if value is not None:
        assert Objective(read).value(SCORES) == pytest.approx(value, rel=1e-15)


@pytest.mark.parametrize(
    "text", ["mean", "", "-loss", "mean(add, sort)", "a + b", "2*a", ["a", "b+c"]]
)
def test_formulas_of_earlier_versions_are_refused_with_what_to_write(text):
    with pytest.raises(RecipeError, match=r"objective .*\{ math = 1.0, loss = -0.5 \}"):
        Search(objective=text)


@pytest.mark.parametrize("weights", [{"a": 0.0}, {"a": math.inf}, {"a": math.nan}, {"": 1.0}])
def test_what_is_no_weight_is_refused(weights):
    with pytest.raises(RecipeError, match="objective"):
        Objective(weights)
    with pytest.raises(RecipeError, match=r"objective.*much"):
        Search(objective=["add=much"])


def test_unknown_scores_are_named_with_what_was_meant():
    with pytest.raises(RecipeError, match=r"'ad'.*'add'"):
        Objective({"ad": 1.0}).value(SCORES)
    with pytest.raises(RecipeError, match=r"englsh.*'english'"):
        Judge.by({}, ["englsh:max:1"]).check_names(SCORES)
    Judge.by({"add": 1.0}, ["*:keep:0.9"]).check_names(SCORES)


@given(
    st.sampled_from([{}, {"a": 1.0}, {"a": 2.0, "c": -0.5}]),
    st.lists(st.tuples(*[st.floats(-1e6, 1e6)] * 3), min_size=1, max_size=8),
)
def test_many_at_once_have_the_values_that_each_has_alone(weights, rows):
    objective = Objective(weights)
    columns = {
        name: np.array(column) for name, column in zip("abc", zip(*rows, strict=True), strict=True)
    }
    alone = [objective.value(dict(zip("abc", row, strict=True))) for row in rows]
    assert objective.values(columns).tolist() == alone
    low, high = objective.bounds({name: (min(c), max(c)) for name, c in columns.items()})
    room = 1e-9 * max(1.0, *map(abs, alone))
    assert all(low - room <= value <= high + room for value in alone)


def test_directions_follow_the_weights_and_the_guards():
    names = ["a", "b", "c"]
    assert Objective().directions(names) == dict.fromkeys(names, 1)
    assert Objective({"b": -0.5, "x": 1.0}).directions(names) == {"b": -1}
    judge = Judge.by({"a": 1.0}, ["b:max:1", "a:max:9"])
    assert judge.directions(names) == {"a": 1, "b": -1}


def test_errors_that_count_as_good_are_doubted():
    names = ["acc", "eval_loss", "word-perplexity", "bits_per_byte", "lossless"]
    assert doubts(Objective({"acc": 1.0, "lossless": 1.0}), names) == []
    assert doubts(Objective({"acc": 1.0, "eval_loss": -1.0}), names) == []
    found = doubts(Objective(), names)
    assert len(found) == 3
    assert all(
        f"{name}=-1" in notice.remedy for name, notice in zip(names[1:4], found, strict=True)
    )
    (guarded,) = doubts(Objective(), SCORES, [Guard.parse("english:max:1.25")])
    assert (guarded.code, "english=-1" in guarded.remedy) == ("larger_is_better", True)


# ------------------------------------------------------------------------------------- guards


@pytest.mark.parametrize(
    ("text", "broken", "slack"),
    [
        ("english:max:1", ["english is 1.25, above 1"], 0.25),
        ("english:max:1.25", [], 0.0),
        ("english:max:2", [], -0.75),
        ("sort:min:0.75", ["sort is 0.5, below 0.75"], 0.25),
        ("sort:min:0.5", [], 0.0),
        ("sort:min:-1", [], -1.5),
        ("sort:max:0.49999999", ["sort is 0.5, above 0.49999999"], 0.5 - 0.49999999),
        ("*:min:0.6", ["sort is 0.5, below 0.6"], 0.6 - 0.5),
    ],
)
def test_a_guard_says_what_breaks_it_and_by_how_much(text, broken, slack):
    guard = Guard.parse(text)
    assert guard.broken(SCORES) == broken
    assert guard.slack(SCORES) == slack


def test_a_share_is_of_the_best_single_model():
    singles = [{"add": 0.5, "sort": 0.25}, {"add": 0.25, "sort": 0.75}, {"other": 1.0}]
    guard = Guard.parse("sort:keep:0.8")
    assert guard.broken(SCORES, singles) == [
        "sort is 0.5, below 0.6 (to keep 0.8 of the best single model's 0.75)"
    ]
    assert guard.slack(SCORES, singles) == pytest.approx(0.1, abs=1e-15)
    assert Guard.parse("sort:keep:0.5").broken(SCORES, singles) == []
    assert Guard.parse("add:keep:1.5").broken(SCORES, singles) == []
    assert Guard.parse("add:keep:1.6").slack(SCORES, singles) == pytest.approx(0.05)


def test_a_star_stands_for_the_scores_of_the_objective():
    singles = [{"add": 1.0, "sort": 1.0, "english": 1.0}]
    guard = Guard.parse("*:keep:0.9", Objective({"add": 1.0, "english": -1.0}))
    assert guard.broken(SCORES, singles) == [
        "add is 0.75, below 0.9 (to keep 0.9 of the best single model's 1)",
        "english is 1.25, above 1.1 (to keep 0.9 of the best single model's 1)",
    ]
    assert guard.slack(SCORES, singles) == pytest.approx(0.15)
    assert len(Guard.parse("*:keep:0.9").broken(SCORES, singles)) == 2  # english grows with it


def test_a_share_of_a_negative_score_can_be_kept():
    guard = Guard.parse("x:keep:0.9")
    assert guard.broken({"x": -1.05}, [{"x": -1.0}]) == []
    assert guard.slack({"x": -1.2}, [{"x": -1.0}]) == pytest.approx(0.1)


def test_without_single_models_a_share_is_not_judged():
    guard = Guard.parse("sort:keep:0.9")
    assert guard.broken(SCORES, []) == []
    assert guard.slack(SCORES, []) == 0.0
    assert not guard.is_judged(SCORES, [])
    assert guard.is_judged(SCORES, [{"sort": 1.0}])
    assert Guard.parse("sort:min:0.9").is_judged(SCORES, [])


@pytest.mark.parametrize(
    "text",
    [
        *("", "english", "english:max", "english:max:", ":max:1", "english:mex:1"),
        *("english:max:much", "english:max:nan", "english:min:-inf", "english:max:1e999"),
        "english:keep:-0.1",
    ],
)
def test_what_is_no_guard_is_refused(text):
    with pytest.raises(RecipeError, match=f"guard '{text}'.*NAME:max:X"):
        Guard.parse(text)


def test_a_name_may_have_colons():
    guard = Guard.parse("a:b:max:1")
    assert (guard.name, guard.kind, guard.bound) == ("a:b", "max", 1.0)


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.sampled_from(["max", "min"]))
def test_a_guard_is_broken_exactly_where_its_slack_is_positive(value, bound, kind):
    guard = Guard.parse(f"x:{kind}:{bound!r}")
    scores = {"x": value}
    assert bool(guard.broken(scores)) == (guard.slack(scores) > 0)
    assert math.isfinite(guard.slack(scores))
