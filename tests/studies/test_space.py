from __future__ import annotations

from pathlib import Path

import pytest

from dare.api import load_recipe
from dare.cli.search import parse_over
from dare.errors import RecipeError
from dare.recipe.document import request_from_document
from dare.recipe.options import Range
from dare.recipe.recipe import Recipe
from dare.recipe.settings import with_settings
from dare.studies.space import Space, UsualMerges, is_random
from dare.studies.study import _sampler


def recipe(**settings) -> Recipe:
    return Recipe(base="base", models=["math", "code"], **settings)


def space(*over: str, **settings) -> Space:
    return Space(recipe(**settings), dict(map(parse_over, over)))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("drop_rate=0.8,0.9", ("drop_rate", (0.8, 0.9))),
        ("method=dare+ties,sum", ("method", ("dare+ties", "sum"))),
        ("rescale=true,l1", ("rescale", (True, "l1"))),
        ("scale=0.5:2", ("scale", Range(start=0.5, to=2.0))),
        ("scale=0.5:2:log", ("scale", Range(start=0.5, to=2.0, log=True))),
        ("p.math=0:1:step=0.5:layers=3", ("p.math", Range(start=0, to=1, step=0.5, layers=3))),
    ],
)
def test_over_is_read_from_a_line(text, expected):
    assert parse_over(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("drop_rate", "write NAME=VALUE"),
        ("=0.5", "write NAME=VALUE"),
        ("scale=2:1", "the range is empty"),
        ("scale=0:1:log", "log needs a range above zero"),
        ("scale=1:2:lgo", "'lgo' is not log, step=X or layers=N"),
        ("scale=1:2:layers=1", "layers = 1"),
    ],
)
def test_over_that_makes_no_sense_is_refused(text, message):
    with pytest.raises(RecipeError, match=message):
        parse_over(text)


@pytest.mark.parametrize(
    ("over", "message"),
    [
        (["drop_rate=0.8,1.5"], "over drop_rate: .*1.5"),
        (["drop_rat=0.8"], "'drop_rat'.*did you mean 'drop_rate'"),
        (["nosuch=0.8"], "'nosuch'$"),
        (["method=dare+tise"], "there is no stage 'tise'"),
        (["keep_ratio=0.2"], "over keep_ratio: keep_ratio would have no effect"),
        (["weight.maths=0:1"], "over weight.maths: .*did you mean 'math'"),
        (["seed=1,2"], "seeds = 5"),
        (["drop_rate=0.5:1"], "over drop_rate"),
        (["method=1:2"], "must be a list of methods"),
        (["scale=1:2:layers=3"], "over scale.*layers"),
        (["include.math=0:1"], "over include.math: .*true,false"),
        (["include.math=1,0"], "over include.math: .*true,false"),
        (["include.math=false"], "over include.math: .*true,false"),
        (["include.maths=true,false"], "over include.maths: .*math, code"),
    ],
)
def test_a_space_that_cannot_be_searched_is_refused(over, message):
    with pytest.raises(RecipeError, match=message):
        space(*over).check()


def test_settings_count_only_in_methods_that_have_them():
    found = space("method=dare+linear,trim+ties,sum", "drop_rate=0.8,0.9", "keep_ratio=0.2,0.3")
    found.check()
    assert found.grid() == [
        {"method": "dare+linear", "drop_rate": 0.8},
        {"method": "dare+linear", "drop_rate": 0.9},
        {"method": "trim+ties", "keep_ratio": 0.2},
        {"method": "trim+ties", "keep_ratio": 0.3},
        {"method": "sum"},
    ]
    assert [is_random(found.candidate(s)) for s in found.grid()] == [
        True,
        True,
        False,
        False,
        False,
    ]


def test_a_search_starts_where_the_recipe_is():
    over = ("method=sum,dare+sum", "drop_rate=0.2,0.4,0.6", "include.math=true,false")
    found = space(*over, method="dare+sum", stages={"dare": {"drop_rate": 0.55}})
    assert found.nearest() == {"method": "dare+sum", "drop_rate": 0.6, "include.math": True}
    assert space(*over, method="ties").nearest() is None


WITH_MODELS = ("include.math=true,false", "include.code=true,false", "weight.math=0.5,2")


@pytest.mark.parametrize(
    ("settings", "is_drawn"),
    [
        ({"drop_rate": 0.0}, False),
        ({"drop_rate": [0.0, 0.5]}, True),
        ({"drop_rate": 0.0, "embedding_drop_rate": 0.5}, True),
        ({"drop_rate": 0.0, "drop_rate.code": [0.0, 0.1]}, True),
        ({"method": "trim+sum", "keep_ratio": 0.5}, False),
    ],
)
def test_a_setting_that_drops_anywhere_is_tried_with_every_seed(settings, is_drawn):
    assert is_random(Space(recipe(method="dare+sum"), {}).candidate(settings)) is is_drawn


def test_models_can_be_left_out_but_not_all_of_them():
    found = space(*WITH_MODELS)
    found.check()
    both = {"include.math": True, "include.code": True}
    assert found.grid() == [
        {**both, "weight.math": 0.5},
        {**both, "weight.math": 2},
        {"include.math": True, "include.code": False, "weight.math": 0.5},
        {"include.math": True, "include.code": False, "weight.math": 2},
        {"include.math": False, "include.code": True},  # whose weight says nothing
    ]
    assert Space(recipe(), {}).grid() == []


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_samplers_leave_a_model(sampler):
    optuna = pytest.importorskip("optuna")
    samplers = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
    study = optuna.create_study(sampler=samplers[sampler](seed=0))
    found, seen = space(*WITH_MODELS), set()
    for _ in range(40):
        settings = found.suggest(study.ask())
        assert settings in found.grid()
        seen.add(tuple(settings[f"include.{name}"] for name in ("math", "code")))
    assert seen == {(True, True), (True, False), (False, True)}
    told = found.suggestion({"include.math": False, "include.code": True})
    study.enqueue_trial(told)
    assert found.suggest(study.ask()) == {"include.math": False, "include.code": True}


def test_a_model_that_is_left_out_takes_no_part():
    rules = [
        {"match": "*.mlp.*", "model": ["math", "code"], "settings": {"drop_rate": 0.1}},
        {"match": "*.norm.*", "model": ["math"], "settings": {"drop_rate": 0.2}},
        {"match": "*", "settings": {"drop_rate": 0.3}},
    ]
    given = Recipe(base="base", models=["math", "code", "law"], method="dare+linear", tensors=rules)
    left = with_settings(given, {"include.math": False, "weight.math": 3.0, "include.law": True})
    assert [entry.name for entry in left.models] == ["code", "law"]
    assert left.weights() == (0.5, 0.5)
    assert [(rule.match, rule.model) for rule in left.tensors] == [
        (("*.mlp.*",), ("code",)),
        (("*",), None),
    ]
    for wrong in ({"include.maths": True}, {"include.math": "no"}):
        with pytest.raises(RecipeError, match="true or false, for math, code, law"):
            with_settings(given, wrong)
    with pytest.raises(RecipeError, match="at least one"):
        with_settings(given, {f"include.{name}": False for name in ("math", "code", "law")})


def test_the_start_takes_the_mean_of_what_models_have_of_their_own():
    own = {"drop_rate": 0.5, "weight": 0.2}
    models = [{"file": "math", **own}, {"file": "code", "drop_rate": 0.7}]
    document = {"method": "dare+sum", "base": "base", "models": models}
    over = ("drop_rate=0:0.9", "weight.math=0:1", "drop_rate.code=0:0.65")
    over += ("weight.code=0:2:layers=2",)
    given = request_from_document(document, "").recipe
    assert Space(given, dict(map(parse_over, over))).nearest() == {
        "drop_rate": pytest.approx(0.6),
        "weight.math": 0.2,
        "drop_rate.code": 0.65,
        "weight.code": [1.0, 1.0],
    }


def test_a_candidate_has_its_settings_and_its_own_seeds():
    models = ["math", {"file": "code", "seed": 7}]
    given = request_from_document({"base": "b", "models": models}, "").recipe
    found = Space(given, dict([parse_over("drop_rate=0.5,0.9")]))
    first, second = found.candidate({"drop_rate": 0.5}), found.candidate({"drop_rate": 0.5}, 1000)
    assert (first.seeds(), second.seeds()) == ((42, 7), (1042, 1007))
    assert first.stages == {"dare": {"drop_rate": 0.5}}


@pytest.mark.parametrize("rule", [None, {"method": "trim+ties", "keep_ratio": 0.1}])
def test_another_method_leaves_out_what_it_has_no_use_for_but_rules_their_own(rule):
    own = {} if rule is None else {"trim": {"scope": "model"}}
    code = {"drop_rate": 0.5} if rule is None else {"keep_ratio": 0.5}
    document = {
        "base": "b",
        "models": ["math", {"file": "code", "weight": 0.7, **code}],
        "method": "dare+linear",
        "embedding_drop_rate": 0.3,
        "dare": {"drop_rate": 0.9},
        "tensors": [{"match": "*.up.*", "drop_rate": 0.1, "weight": 0.5}],
        **own,
    }
    document["tensors"] += [] if rule is None else [{"match": "*.mlp.*", "weight": 0.3, **rule}]
    given = request_from_document(document, "").recipe
    changed = with_settings(given, {"method": "slerp"})
    assert (changed.method, changed.stages, changed.embedding_drop_rate) == ("slerp", own, None)
    settings, weight = ({}, None) if rule is None else (given.models[1].settings, 0.7)
    assert (changed.models[1].settings, changed.models[1].weight) == (settings, weight)
    assert (changed.tensors[0].settings, changed.tensors[0].weight) == ({}, weight and 0.5)
    assert changed.tensors[1:] == given.tensors[1:]
    assert is_random(given)
    assert not is_random(changed)
    assert is_random(with_settings(changed, {"method": "dare+sum"}))
    kept = with_settings(given, {"method": "dare+sum"})
    assert (kept.stages, kept.models) == (given.stages, given.models)


@pytest.mark.parametrize("seed", range(20))
def test_a_setting_by_chance_depends_on_its_seed_and_keeps_to_the_space(seed):
    optuna = pytest.importorskip("optuna")
    weights = ("weight.math=0:1:layers=3", "weight.code=0:1:step=0.25")
    found = space("method=dare+sum,sum", "drop_rate=0.1:0.9", "scale=0.5:2:log", *weights)
    studies = [optuna.create_study(sampler=_sampler("random", [0, seed])) for _ in range(2)]
    drawn, again = (found.suggest(study.ask()) for study in studies)
    assert drawn == again
    assert ("drop_rate" in drawn) == (drawn["method"] == "dare+sum")
    assert 0.5 <= drawn["scale"] <= 2
    assert drawn["weight.code"] in (0, 0.25, 0.5, 0.75, 1)
    assert len(drawn["weight.math"]) == 3
    found.candidate(drawn)


def test_the_table_of_a_recipe_survives_being_written(tmp_path: Path):
    given = recipe(
        search={
            "over": {"drop_rate": [0.8, 0.9], "scale": {"from": 0.5, "to": 2.0, "log": True}},
            "guards": ["english:max:1.25"],
            "objective": {"add": 1.0, "loss": -0.5},
            "seeds": 5,
        }
    )
    (tmp_path / "recipe.toml").write_text(given.to_toml())
    again = load_recipe(tmp_path / "recipe.toml").recipe
    assert again == given
    assert again.search.over["scale"] == Range(start=0.5, to=2.0, log=True)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"sampelr": "grid"}, r"\[search\] sampelr: .*'sampler'"),
        ({"over": {"scale": []}}, r"\[search\] over scale = \[\]"),
        ({"over": {"scale": [1, 1]}}, r"over scale = \[1, 1\].*twice"),
        ({"over": {"scale": {"from": 1.0}}}, "over scale = to is missing"),
        ({"items": 5}, "items"),
        ({"trials": 0}, "trials = 0"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(table, message):
    with pytest.raises(RecipeError, match=message):
        recipe(search=table)


# ---------------------------------------------------------------- without settings


def tried(usual: UsualMerges) -> list[tuple]:
    return [(each["method"], each["scale"], each.get("drop_rate")) for each in usual.first]


USUAL = tried(UsualMerges(recipe(method="sum"), None))[1:]


@pytest.mark.parametrize(
    ("settings", "own"),
    [
        ({"method": "sum"}, [("sum", 1.0, None)]),
        ({"method": "linear"}, []),
        ({"method": "dare+linear", "stages": {"dare": {"drop_rate": 0.9}}}, []),
        ({"method": "ties", "scale": 0.8}, [("ties", 0.8, None)]),
        (
            {"method": "dare+ties", "stages": {"dare": {"drop_rate": 0.3}}},
            [("dare+ties", 1.0, None)],
        ),
    ],
)
def test_each_usual_merge_is_tried_once_and_the_recipes_own_first(settings, own):
    found = tried(UsualMerges(recipe(**settings), None))
    if own:
        assert found == [*own, *USUAL]
    else:
        assert sorted(found, key=str) == sorted(USUAL, key=str)
        assert found[0][0] == settings["method"]
    assert len(set(found)) == len(found)
    assert {("linear", 1.0, None), ("ties", 0.7, None), ("dare+ties", 1.5, 0.9)} <= set(found)


def test_regmean_is_tried_where_there_are_inputs():
    usual = UsualMerges(recipe(method="linear"), "grams.safetensors")
    last = [{k: v for k, v in each.items() if k != "scale"} for each in usual.first[-2:]]
    assert last == [{"method": "regmean", "gathered": "grams.safetensors"}] * 2
    Space(usual.recipe, usual.space).check()


def places(usual: UsualMerges, best: dict) -> list[dict]:
    return [usual.at(place, lambda _: best) for place in range(usual.count)]


def test_the_best_is_tried_without_each_model_and_then_at_scales_beside_its_own():
    given = Recipe(base="base", models=["math", "code", "law"], method="linear")
    usual = UsualMerges(given, None)
    best = {"method": "ties", "scale": 1.5}
    rest = places(usual, best)[len(USUAL) :]
    names = ("math", "code", "law")
    assert rest[:3] == [{**best, f"include.{name}": False} for name in names]
    assert [each["scale"] for each in rest[3:]] == [2.25, 1.05, 3.3]
    with pytest.raises(IndexError):
        usual.at(usual.count, lambda _: best)
    # Without a best, it is the first.
    assert usual.at(len(USUAL) + 1, lambda _: None) == {**usual.first[0], "include.code": False}


def test_strangers_are_left_out_of_all_and_two_models_stay_together():
    given = Recipe(base="base", models=["math", "code", "law"], method="linear")
    usual = UsualMerges(given, None, left_out=("code",))
    every = places(usual, usual.first[0])
    assert all(each["include.code"] is False for each in every)
    assert {frozenset(each) & {"include.math", "include.law"} for each in every} == {frozenset()}
    assert len(every) == len(USUAL) + 3
    assert [each["scale"] for each in every[-3:]] == [1.25, 0.85, 3.0]  # that were not tried
    pair = UsualMerges(recipe(method="linear"), None)
    assert len(places(pair, pair.first[0])) == len(USUAL) + 3
