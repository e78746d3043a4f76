from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dare.errors import RecipeError
from dare.studies.objective import Guard, Objective, doubts

SCORES = {"add": 0.75, "sort": 0.5, "english": 1.25}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("mean", 2.5 / 3),
        ("min", 0.5),
        ("max", 1.25),
        ("add", 0.75),
        ("-english", -1.25),
        ("+sort", 0.5),
        ("mean(add, sort)", 0.625),
        ("min(add, sort)", 0.5),
        ("max(add, -english)", 0.75),
        ("add + 0.5*sort - english", -0.25),
        ("(add + sort) / 2", 0.625),
        ("2 * (add - 1)", -0.5),
        ("-(add - sort)", -0.25),
        ("min(2*add, mean(sort, english)) - 0.25", 0.625),
        ("mean - english", 2.5 / 3 - 1.25),
        ("'add'", 0.75),
        ("  add  ", 0.75),
        ("3 * 2 * add / 2", 2.25),
    ],
)
def test_a_formula_has_the_value_it_says(text, value):
    assert Objective.parse(text).value(SCORES) == value


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("mean", None),
        ("add - min", None),
        ("add + 2*sort - add/2", ("add", "sort")),
        ("mean(sort, min(add, 1))", ("sort", "add")),
        ("'arc-easy' + a.b", ("arc-easy", "a.b")),
        ("'mean'", ("mean",)),
    ],
)
def test_a_formula_knows_its_scores(text, names):
    assert Objective.parse(text).names == names


def test_names_that_are_no_identifiers_stand_in_quotes():
    scores = {"arc-easy": 0.5, "code/pass@1": 0.25, "mean": 3.0}
    assert Objective.parse("'arc-easy' + \"code/pass@1\" - 'mean'").value(scores) == -2.25


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "it is empty"),
        ("   ", "it is empty"),
        ("add +", "it is not a formula"),
        ("add sort", "it is not a formula"),
        ("pass@1", "it is not a formula"),
        ("hits@1", "hits @ 1 is not a score"),
        ("add * sort", "multiplied by a number only"),
        ("add / sort", "divided by a number only"),
        ("1 / add", "divided by a number only"),
        ("add / 0", "divides by zero"),
        ("add / (1 - 1)", "divides by zero"),
        ("add ** 2", "add ** 2 is not a score"),
        ("3", "it uses no score"),
        ("add - add", "it uses no score"),
        ("0 * mean", "it uses no score"),
        ("True", "True is not a score"),
        ("add if sort else 1", "is not a score"),
        ("add[0]", "is not a score"),
        ("(add + sort).x", "is not a score"),
        ("mean()", "mean is written with scores"),
        ("mean(*add)", "*add is not a score"),
        ("mean(add, key=sort)", "mean is written with scores"),
        ("median(add)", "there is no function median"),
        ("mena(add)", "there is no function mena (did you mean 'mean'?)"),
        ("__import__('os').system('true')", "there is no function __import__('os').system"),
        ("1e999 * add", "too large"),
        (f"{10**400} * add", "too large"),
        ("1e200 * 1e200 * add", "too large"),
        ("1j * add", "1j is not a score"),
        ("''", "'' is not a score"),
        ("-" * 3000 + "add", ""),
        ("(" * 3000, "not a formula"),
        ("a+" * 500 + "a", "nested more than 200 deep"),
        ("a" * 5000, "5000 characters"),
        ("add\0", "not a formula"),
    ],
)
def test_what_is_no_formula_is_refused_with_its_reason(text, reason):
    with pytest.raises(RecipeError) as refusal:
        Objective.parse(text)
    assert reason in str(refusal.value)
    assert "examples: mean, min(add, sort)" in str(refusal.value)
    assert len(str(refusal.value)) < 4000


def test_unknown_scores_are_named_with_what_was_meant():
    with pytest.raises(RecipeError, match=r"no score 'ad' \(did you mean 'add'\?\); the evaluator"):
        Objective.parse("ad").check(SCORES)
    with pytest.raises(RecipeError, match=r"no score 'arc' \(write 'arc-easy' in quotes\)"):
        Objective.parse("arc-easy").check(["arc-easy", "other"])
    with pytest.raises(RecipeError, match="gives no scores"):
        Objective.parse("mean").value({})
    with pytest.raises(RecipeError, match="no score 'x'"):
        Objective.parse("mean + x").value(SCORES)
    Objective.parse("mean").check(SCORES)


@given(
    st.sampled_from(["mean", "min", "max(a, b) - 2*c", "a - b/3", "min(a, mean(b, c))", "b"]),
    st.lists(st.tuples(*[st.floats(-1e6, 1e6)] * 3), min_size=1, max_size=8),
)
def test_many_at_once_have_the_values_that_each_has_alone(text, rows):
    objective = Objective.parse(text)
    columns = {
        name: np.array(column) for name, column in zip("abc", zip(*rows, strict=True), strict=True)
    }
    alone = [objective.value(dict(zip("abc", row, strict=True))) for row in rows]
    assert objective.values(columns).tolist() == alone


def test_directions_follow_the_signs_through_brackets():
    names = ["a", "b", "c", "d"]
    assert Objective.parse("mean").directions(names) == dict.fromkeys(names, 1)
    assert Objective.parse("-max").directions(names) == dict.fromkeys(names, -1)
    assert Objective.parse("a - min(b, -c)").directions(names) == {"a": 1, "b": -1, "c": 1}
    assert Objective.parse("a + b - mean(b, c)").directions(names) == {"a": 1, "c": -1}
    assert Objective.parse("0*a + b").directions(names) == {"b": 1}


def test_errors_that_count_as_good_are_doubted():
    names = ["acc", "eval_loss", "word-perplexity", "bits_per_byte", "lossless"]
    assert doubts(Objective.parse("mean(acc, lossless)"), names) == []
    assert doubts(Objective.parse("acc - eval_loss - 'word-perplexity'"), names) == []
    found = doubts(Objective.parse("mean"), names)
    assert found[:2] == [
        (
            "In the objective 'mean' a larger eval_loss is better, but its name is "
            "that of an error; if smaller is better, write -eval_loss."
        ),
        "In the objective 'mean' a larger word-perplexity is better, but its "
        "name is that of an error; if smaller is better, write "
        "-'word-perplexity'.",
    ]
    assert len(found) == 3
    guarded = doubts(Objective.parse("mean"), SCORES, [Guard.parse("english:max:1.25")])
    assert [("english" in text, "a guard sets its maximum" in text) for text in guarded] == [
        (True, True)
    ]


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
    guard = Guard.parse("*:keep:0.9", Objective.parse("add - english"))
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
    ("text", "reason"),
    [
        ("", "write NAME:max:X"),
        ("english", "write NAME:max:X"),
        ("english:max", "write NAME:max:X"),
        ("english:max:", "write NAME:max:X"),
        (":max:1", "write NAME:max:X"),
        ("english:mex:1", r"'mex' is not a kind of guard \(did you mean 'max'\?\)"),
        ("english:max:much", "'much' is not a number"),
        ("english:max:nan", "finite"),
        ("english:min:-inf", "finite"),
        ("english:max:1e999", "finite"),
        ("english:keep:-0.1", "must not be negative"),
    ],
)
def test_what_is_no_guard_is_refused(text, reason):
    with pytest.raises(RecipeError, match=reason):
        Guard.parse(text)


def test_guards_on_unknown_scores_are_refused():
    with pytest.raises(RecipeError, match=r"no score 'englsh' \(did you mean 'english'\?\)"):
        Guard.parse("englsh:max:1").broken(SCORES)


def test_a_name_may_have_colons():
    guard = Guard.parse("a:b:max:1")
    assert (guard.name, guard.kind, guard.bound) == ("a:b", "max", 1.0)


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6), st.sampled_from(["max", "min"]))
def test_a_guard_is_broken_exactly_where_its_slack_is_positive(value, bound, kind):
    guard = Guard.parse(f"x:{kind}:{bound!r}")
    scores = {"x": value}
    assert bool(guard.broken(scores)) == (guard.slack(scores) > 0)
    assert math.isfinite(guard.slack(scores))
