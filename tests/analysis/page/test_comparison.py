from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import sample

from dare.analysis.judge.prediction import exposures_of, mean_bounded_error
from dare.analysis.page import comparison
from dare.analysis.page.comparison import Side, compare
from dare.errors import InputError
from dare.output.page.words import share
from dare.recipe.schema import Recipe


@pytest.fixture(scope="module")
def side(subject):
    return Side("one", subject.analysis, subject.readiness, subject.advice)


def recipe_of(**given):
    models = [Path(f"models/{name}.safetensors") for name in sample.NAMES]
    return Recipe(base=Path("models/base.safetensors"), models=models, **given)


def rows_of(groups):
    return {row.quantity: row for rows in groups.values() for row in rows}


def test_a_side_does_not_differ_from_itself(side):
    rows = rows_of(compare(side, replace(side, name="same")))
    assert {row.difference for row in rows.values()} == {""}
    assert rows["math: change"].first == share(side.analysis.models[0].total.relative_norm)
    assert rows["chat: drop rate"].first == "0.8"
    assert rows["predicted error"].first == "4.10%"


def test_recipes_are_compared_by_their_own_settings(side):
    low = replace(side, recipe=recipe_of(method="dare+sum", stages={"dare": {"drop_rate": 0.5}}))
    rule = {"match": ["layers.*"], "settings": {"drop_rate": 0.9}}
    high = replace(
        low,
        recipe=recipe_of(
            method="dare+linear", stages={"dare": {"drop_rate": 0.5}}, tensors=[rule], scale=2.0
        ),
    )
    rows = rows_of(compare(low, high))
    assert rows["method"].difference == "differs"
    assert (rows["math: drop rate"].first, rows["math: drop rate"].second) == ("0.5", "0.9")
    assert rows["math: drop rate"].difference == "+0.4"
    errors = {
        rate: [mean_bounded_error(exposures_of(model), rate) for model in side.analysis.models]
        for rate in (0.5, 0.9)
    }
    predicted = rows["predicted error"]
    assert predicted.first == share(math.hypot(*errors[0.5]))
    assert predicted.second == share(2 / 3 * math.hypot(*errors[0.9]))
    assert predicted.difference.endswith(" points")


def test_a_model_of_one_side_has_an_error_there(side):
    fewer = replace(side.analysis, models=side.analysis.models[:2], pairs=side.analysis.pairs[:1])
    row = rows_of(compare(side, replace(side, analysis=fewer)))["chat: error, at most"]
    assert (row.first.endswith("%"), row.second, row.difference) == (True, "–", "differs")


def test_what_is_not_dropped_has_no_error(side):
    plain = replace(side, recipe=recipe_of(method="ties"))
    rows = rows_of(compare(side, plain))
    assert (rows["predicted error"].second, rows["predicted error"].difference) == ("–", "differs")
    assert rows["math: drop rate"].second == "–"


def test_merges_are_compared_by_what_they_kept(side, subject):
    one = replace(side, outcome=subject.outcome)
    weaker = [replace(pair, ratio=pair.ratio / 2) for pair in subject.outcome.survival]
    other = replace(one, outcome=replace(subject.outcome, survival=tuple(weaker)))
    rows = rows_of(compare(one, other))
    assert (rows["math: survived"].first, rows["math: survived"].second) == ("30.0%", "15.0%")
    assert rows["math: survived"].difference == "-15 points"
    assert rows["math: kept"].difference == ""
    drawn = comparison.drawn_values((one, replace(other, name="other")))
    assert drawn["compared-survival"][0] == ("one", "math", 0.3)


def test_models_that_only_one_has_are_named(side):
    analysis = sample.make_analysis(("math", "code"))
    rows = rows_of(compare(side, replace(side, name="two", analysis=analysis)))
    assert (rows["chat: change"].second, rows["chat: change"].difference) == ("–", "differs")
    assert rows["models"].second == "2"
    assert "math and chat: cosine" not in rows


def test_sides_without_a_common_model_are_refused(side):
    strangers = sample.make_analysis(("x", "y"))
    with pytest.raises(InputError, match="a model in common"):
        compare(side, replace(side, name="others", analysis=strangers))
