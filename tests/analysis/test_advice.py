import json

import numpy as np
import pytest
from made_up import analysis, make_base, mixed, spoilt, tune
from safetensors.numpy import load_file

from dare import merge
from dare.analysis.advice import HABITS, SMALL, advise, find_guidelines, judge
from dare.analysis.analyzing import analyze
from dare.analysis.readiness import Verdict, assess
from dare.analysis.results import Origin
from dare.demo.merges import BASE, TUNED
from dare.errors import RecipeError
from dare.planning.make import LeftOut, Misfit
from dare.recipe.document import request_from_document
from helpers import save

ROOT = make_base()
ONE, TWO = (tune(ROOT, seed=seed) for seed in (1, 2))
STRANGER = make_base(seed=9)


def recipe_of(advice):
    return request_from_document(advice.recipe, "advice").recipe


def values(advice, setting):
    return {each.model: each.value for each in advice.suggestions if each.setting == setting}


def many(count, ratio=0.02):
    return {f"m{seed}": tune(ROOT, ratio, seed=seed + 1) for seed in range(count)}


# ---------------------------------------------------------------- which method

AVERAGE, TSV = ("linear", 1.0), (SMALL.method, SMALL.scale)
VECTORS = {"a.norm": np.ones(4000, np.float32), "embed.weight": np.ones((50, 80), np.float32)}
WITH_MATRIX = {**VECTORS, "mlp.weight": np.ones((50, 80), np.float32)}


def pair(base, one=0.01, other=0.01):
    return {"a": tune(base, one), "b": tune(base, other, seed=2)}


@pytest.mark.parametrize(
    ("base", "models", "own", "chosen"),
    [
        (ROOT, many(2, 0.015), {}, TSV),
        (ROOT, many(7, 0.015), {}, TSV),
        (ROOT, many(1, 0.01), {}, AVERAGE),
        (ROOT, many(3, 0.025), {}, AVERAGE),
        (ROOT, pair(ROOT, 0.01, 0.025), {}, AVERAGE),  # the largest change decides
        (ROOT, {"a": ONE, "b": mixed(ROOT, ONE, 0.8, TWO, 0.6)}, {}, AVERAGE),
        (ROOT, many(2, 0.01), {"m1": {"origin": Origin.UNKNOWN}}, TSV),
        (ROOT, many(2, 0.01), {"m1": {"origin": Origin.LORA}}, AVERAGE),
        (VECTORS, pair(VECTORS), {}, AVERAGE),
        (WITH_MATRIX, pair(WITH_MATRIX), {}, TSV),
        (ROOT, {**many(2, 0.01), "other": STRANGER}, {}, TSV),  # left out, and does not decide
        (ROOT, {"a": ONE, "other": STRANGER}, {}, AVERAGE),
    ],
)
def test_small_independent_changes_are_more_than_averaged(base, models, own, chosen):
    advice = advise(analysis(base, models, own=own))
    recipe = recipe_of(advice)
    assert (recipe.method, recipe.scale) == chosen
    assert values(advice, "method") == {None: chosen[0]}
    assert values(advice, "scale") == ({} if chosen is AVERAGE else {None: chosen[1]})
    assert ("scale" in advice.recipe) is (chosen is TSV)


def test_advice_on_real_models():
    """Two of the demonstration's models change their base by 3%, more than the limit."""
    readiness, advice = judge(analyze(BASE, list(TUNED.values()), spectra="none", verbose=False))
    assert advice.recipe["method"] == "linear"
    assert (readiness.verdict, advice.left_out) == (Verdict.NO_DEFECT, ())


# ---------------------------------------------------------------- what it cannot know

MILLION, SEVEN_BILLION = ({"base_dtypes": {"BF16": size}} for size in (10**6, 7 * 10**9))


@pytest.mark.parametrize(
    ("count", "size", "extrapolates"),
    [(2, MILLION, False), (9, MILLION, True), (2, SEVEN_BILLION, True), (1, SEVEN_BILLION, False)],
)
def test_doubts(count, size, extrapolates):
    doubts = {doubt.code for doubt in advise(analysis(ROOT, many(count), **size)).doubts}
    assert ("extrapolates" in doubts) is extrapolates
    assert "only_data_tell" in doubts


def test_steps_must_be_some():
    with pytest.raises(RecipeError, match="steps"):
        advise(analysis(ROOT, many(2)), steps=0)


SHORT, LONG = "7B after 500 to 2,000 steps", "7B after 2,000 to 10,000 steps"
LARGE, LORA = (f"{name} after any number of steps" for name in ("70B or more", "a LoRA"))


@pytest.mark.parametrize(
    ("is_lora", "parameters", "steps", "expected"),
    [
        (False, 7e9, 1_000, {SHORT: (0.85, 0.90)}),
        (False, 8.03e9, 5_000, {LONG: (0.90, 0.95)}),
        (False, 6.74e9, 2_000, {SHORT: (0.85, 0.90), LONG: (0.90, 0.95)}),
        (False, 7e9, None, {SHORT: (0.85, 0.90), LONG: (0.90, 0.95)}),
        (False, 7e9, 100, {}),
        (False, 7e9, 50_000, {}),
        (False, 13e9, 1_000, {"13B after 500 to 2,000 steps": (0.85, 0.90)}),
        (False, 13e9, 5_000, {}),
        (False, 70e9, 123, {LARGE: (0.90, 0.95)}),
        (False, 405e9, None, {LARGE: (0.90, 0.95)}),
        (False, 1e9, 1_000, {}),
        (False, 3.6e9, 1_000, {}),
        (False, 34e9, 1_000, {}),
        (True, 7e9, 1_000, {LORA: (0.70, 0.85)}),
        (True, 1e6, None, {LORA: (0.70, 0.85)}),
    ],
)
def test_the_table_of_guidelines(is_lora, parameters, steps, expected):
    rows = find_guidelines(is_lora, parameters, steps)
    assert {row.applies_to: (row.lowest, row.highest) for row in rows} == expected


@pytest.mark.parametrize(
    ("parameters", "steps", "wanted", "unwanted"),
    [
        (None, None, ["dare+ties"], []),
        (6.7e9, 1_000, [SHORT], [LONG]),
        (56e9, None, [f"0.9 to 0.95 for {LARGE}", "dare for 70B or more"], []),
        (405e9, 100, [f"0.9 to 0.95 for {LARGE}"], []),  # which says that steps are not used
        (6.7e9, 100, ["no drop rate for 6.7B parameters after 100 steps"], []),
        (34e9, None, ["no drop rate for 34B parameters after any number of steps"], []),
        (10e9, 1_000, ["no drop rate for 10B parameters after 1000 steps"], []),
    ],
)
def test_what_is_often_recommended_is_named_and_decides_nothing(
    parameters, steps, wanted, unwanted
):
    seen = analysis(ROOT, many(3))
    advice = advise(seen, parameters=parameters, steps=steps)
    assert advice.recipe == advise(seen).recipe
    (said,) = [doubt.text for doubt in advice.doubts if doubt.code == "often_recommended"]
    assert [part for part in (*wanted, *unwanted) if part in said] == wanted


@pytest.mark.parametrize("relation", ["diverse", "lora"])
def test_there_is_a_habit_for_every_number_of_models(relation):
    habits = [habit.models for habit in HABITS if habit.relation == relation]
    assert all(any(least <= count <= most for least, most in habits) for count in range(2, 20))


# ---------------------------------------------------------------- what is left out


def test_what_no_setting_can_mend_is_left_out():
    models = {
        **{"math": ONE, "copy": ROOT, "again": ONE, "half": mixed(ROOT, ONE, 0.5, TWO, 0.0)},
        **{"other": STRANGER, "code": TWO, "broken": spoilt(STRANGER)},
    }
    advice = advise(analysis(ROOT, models))
    gone = [str(each) for each in advice.suggestions if each.setting == "models"]
    out = ("copy", "again", "half", "other", "broken")  # what is wrong twice is left out once
    assert sorted(gone) == sorted(f"{name} is left out" for name in out)
    files = [entry.file.name for entry in recipe_of(advice).models]
    assert files == ["math.safetensors", "code.safetensors"]


def test_nothing_left_is_no_recipe():
    advice = advise(analysis(ROOT, {"copy": ROOT, "other": STRANGER}))
    assert advice.recipe == {}
    assert advice.doubts


def test_a_verdict_that_is_given_is_used():
    readiness = assess(analysis(ROOT, {"m0": ROOT, "m1": TWO}))
    assert values(advise(analysis(ROOT, many(2)), readiness), "models") == {"m0": "left out"}


@pytest.mark.parametrize(
    ("tensor", "reason", "setting", "value"),
    [
        ("layers.0.w", Misfit.UNLIKE_BASE, "on_mismatch", "base"),
        ("lm_head.weight", Misfit.UNLIKE_BASE, "vocabulary", "base"),
        ("layers.9.w", Misfit.NOT_IN_BASE, "on_extra", "drop"),
    ],
)
def test_what_a_setting_can_mend_is_set(tensor, reason, setting, value):
    left_out = (LeftOut(tensor, reason, ("m1",)),)
    advice = advise(analysis(ROOT, many(2), left_out=left_out))
    assert advice.recipe[setting] == value
    assert values(advice, setting) == {None: value}
    assert getattr(recipe_of(advice), setting) == value


def test_missing_tensors_count_as_unchanged():
    less, copy = (
        {name: value for name, value in model.items() if "norm" not in name}
        for model in (TWO, ROOT)
    )
    assert advise(analysis(ROOT, {"a": ONE, "b": less})).recipe["on_missing"] == "base"
    assert "on_missing" not in advise(analysis(ROOT, {"a": ONE, "b": TWO, "copy": copy})).recipe


@pytest.mark.parametrize(("shape", "codes"), [((), []), ((2,), ["integers_differ"])])
def test_a_network_with_different_integers_is_merged_as_advised(tmp_path, shape, codes):
    for name, steps, layers in (("base", 100, ROOT), ("a", 130, ONE), ("b", 145, TWO)):
        counter = {"1.num_batches_tracked": np.full(shape, steps)}
        save(tmp_path / f"{name}.safetensors", {**layers, **counter})
    files = [tmp_path / f"{name}.safetensors" for name in ("base", "a", "b")]
    readiness, advice = judge(analyze(files[0], files[1:], verbose=False))
    assert [f.code for f in readiness.findings if f.subjects == ("a", "b")] == codes
    assert ("on_integer_mismatch" in advice.recipe) == bool(codes)
    recipe = advice.recipe | {"output": str(tmp_path / "merged.safetensors"), "verbose": False}
    assert merge(request_from_document(recipe, "advice")).method == recipe["method"]
    assert (load_file(recipe["output"])["1.num_batches_tracked"] == 100).all()


def test_words_and_json():
    advice = advise(analysis(ROOT, many(2)))
    assert f"method = {advice.recipe['method']}" in str(advice)
    document = json.loads(advice.to_json(), parse_constant=pytest.fail)
    assert document["recipe"] == advice.recipe
    assert document["suggestions"][0]["setting"] == "method"
