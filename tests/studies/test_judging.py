from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dare.errors import RecipeError
from dare.recipe.options import Search
from dare.studies.conclusions import direction_notices
from dare.studies.judging import Guard, Judge, Objective

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
    assert direction_notices(Objective({"acc": 1.0, "lossless": 1.0}), names) == []
    assert direction_notices(Objective({"acc": 1.0, "eval_loss": -1.0}), names) == []
    found = direction_notices(Objective(), names)
    assert len(found) == 3
    assert all(
        f"{name}=-1" in notice.remedy for name, notice in zip(names[1:4], found, strict=True)
    )
    (guarded,) = direction_notices(Objective(), SCORES, [Guard.parse("english:max:1.25")])
    assert (guarded.code, "english=-1" in guarded.remedy) == ("larger_is_better", True)


# ------------------------------------------------------------------------------------- guards


SINGLES = [{"add": 0.5, "sort": 0.25}, {"add": 0.25, "sort": 0.75}, {"other": 1.0}]
WHOLE = [{"add": 1.0, "sort": 1.0, "english": 1.0}]
LOW = [{"low": -1.0}]


def to_keep(share: float, best: float) -> str:
    return f"(to keep {share} of the best single model's {best})"


@pytest.mark.parametrize(
    ("text", "singles", "broken", "slack"),
    [
        ("english:max:1", [], ["english is 1.25, above 1"], 0.25),
        ("english:max:1.25", [], [], 0.0),
        ("english:max:2", [], [], -0.75),
        ("sort:min:0.75", [], ["sort is 0.5, below 0.75"], 0.25),
        ("sort:min:0.5", [], [], 0.0),
        ("sort:min:-1", [], [], -1.5),
        ("sort:max:0.49999999", [], ["sort is 0.5, above 0.49999999"], 1e-8),
        ("*:min:0.6", [], ["sort is 0.5, below 0.6"], 0.1),
        ("a:b:max:1", [], ["a:b is 2, above 1"], 1.0),
        ("sort:keep:0.8", SINGLES, [f"sort is 0.5, below 0.6 {to_keep(0.8, 0.75)}"], 0.1),
        ("sort:keep:0.5", SINGLES, [], -0.125),
        ("add:keep:1.5", SINGLES, [], 0.0),
        ("sort:keep:0.9", [], [], 0.0),  # which is not judged
        ("low:keep:0.9", LOW, [f"low is -1.2, below -1.1 {to_keep(0.9, -1)}"], 0.1),
        ("low:keep:0.8", LOW, [], 0.0),
        (
            "*:keep:0.9",
            WHOLE,
            [
                f"add is 0.75, below 0.9 {to_keep(0.9, 1)}",
                f"english is 1.25, above 1.1 {to_keep(0.9, 1)}",
            ],
            0.15,
        ),
    ],
)
def test_a_guard_says_what_breaks_it_and_by_how_much(text, singles, broken, slack):
    objective = Objective(
        {"add": 1.0, "sort": 1.0, "english": -1.0}
        if "min" in text
        else {"add": 1.0, "english": -1.0}
    )
    guard, scores = Guard.parse(text, objective), SCORES | {"a:b": 2.0, "low": -1.2}
    assert guard.broken(scores, singles) == broken
    assert guard.slack(scores, singles) == pytest.approx(slack, abs=1e-15)
    assert guard.is_judged(scores, singles) is (bool(singles) or guard.kind != "keep")


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
