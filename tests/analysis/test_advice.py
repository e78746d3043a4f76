import json

import numpy as np
import pytest
import tomli_w
from made_up import analysis, make_base, mixed, tune
from safetensors.numpy import load_file

from dare import merge
from dare.analysis.advice import METHODS, SMALL, advise, find_guidelines, judge
from dare.analysis.analyzing import analyze, analyze_arrays
from dare.analysis.readiness import Verdict, assess
from dare.analysis.results import Origin
from dare.demo.merges import BASE, TUNED
from dare.errors import RecipeError
from dare.planning.make import LeftOut, Misfit
from dare.recipe.document import request_from_document
from dare.recipe.entries import read_toml
from helpers import save

ROOT = make_base()
ONE, TWO = (tune(ROOT, seed=seed) for seed in (1, 2))


def recipe_of(advice):
    return request_from_document(advice.recipe, "advice").recipe


def values(advice, setting):
    return {each.model: each.value for each in advice.suggestions if each.setting == setting}


def many(count, ratio=0.02):
    return {f"m{seed}": tune(ROOT, ratio, seed=seed + 1) for seed in range(count)}


def chosen(models, **known):
    """The method and the scale that are advised."""
    recipe = recipe_of(advise(analysis(ROOT, models, **known)))
    return recipe.method, recipe.scale


# ---------------------------------------------------------------- which method

AVERAGE = ("linear", 1.0)
TSV = (SMALL.method, SMALL.scale)


@pytest.mark.parametrize("count", [2, 3, 7])
def test_small_independent_changes_are_more_than_averaged(count):
    models = many(count, 0.015)
    assert chosen(models) == TSV == ("tsv", 1.2)
    advice = advise(analysis(ROOT, models))
    assert values(advice, "method") == {None: "tsv"}
    assert values(advice, "scale") == {None: 1.2}


@pytest.mark.parametrize(
    "models",
    [
        many(1, 0.01),
        many(3, 0.025),
        {"a": tune(ROOT, 0.01), "b": tune(ROOT, 0.025, seed=2)},  # the largest change decides
        {"a": ONE, "b": mixed(ROOT, ONE, 0.8, TWO, 0.6)},
    ],
    ids=["one", "large", "one of them large", "alike"],
)
def test_all_others_are_averaged(models):
    assert chosen(models) == AVERAGE
    assert "scale" not in advise(analysis(ROOT, models)).recipe


def test_loras_are_averaged():
    models = many(2, 0.01)
    assert chosen(models, own={name: {"origin": Origin.UNKNOWN} for name in models}) == TSV
    assert chosen(models, own={"m1": {"origin": Origin.LORA}}) == AVERAGE


def test_models_without_matrices_are_averaged():
    vectors = {"a.norm": np.ones(4000, np.float32), "embed.weight": np.ones((50, 80), np.float32)}
    models = {name: tune(vectors, 0.01, seed) for name, seed in (("a", 1), ("b", 2))}
    assert recipe_of(advise(analysis(vectors, models))).method == "linear"
    matrix = {**vectors, "mlp.weight": np.ones((50, 80), np.float32)}
    models = {name: tune(matrix, 0.01, seed) for name, seed in (("a", 1), ("b", 2))}
    assert recipe_of(advise(analysis(matrix, models))).method == "tsv"


def test_what_is_left_out_does_not_decide():
    models = {**many(2, 0.01), "other": make_base(seed=9)}
    assert chosen(models) == TSV
    assert chosen({"a": ONE, "other": make_base(seed=9)}) == AVERAGE


# ---------------------------------------------------------------- what it cannot know


def is_said(doubt, seen, **size):
    return any(said.code == doubt for said in advise(seen, **size).doubts)


def test_advice_ends_with_a_comparison():
    for models in (many(1), many(3)):
        assert is_said("only_data_tell", analysis(ROOT, models))


def test_it_says_when_it_extrapolates():
    usual = {"base_dtypes": {"BF16": 1_000_000}}
    assert not is_said("extrapolates", analysis(ROOT, many(2), **usual))
    assert is_said("extrapolates", analysis(ROOT, many(9), **usual))
    assert is_said("extrapolates", analysis(ROOT, many(2), base_dtypes={"BF16": 7 * 10**9}))
    assert not is_said("extrapolates", analysis(ROOT, many(1), base_dtypes={"BF16": 7 * 10**9}))


def test_steps_must_be_some():
    with pytest.raises(RecipeError, match="steps"):
        advise(analysis(ROOT, many(2)), steps=0)


# ---------------------------------------------------------------- guidelines


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


def test_what_is_often_recommended_is_named_and_decides_nothing():
    seen = analysis(ROOT, many(3))

    def often(**size):
        advice = advise(seen, **size)
        assert advice.recipe == advise(seen).recipe
        return next(doubt.text for doubt in advice.doubts if doubt.code == "often_recommended")

    assert "dare+ties" in often()
    assert SHORT in often(parameters=6.7e9, steps=1_000)
    assert LONG not in often(parameters=6.7e9, steps=1_000)
    for size in (56e9, 70e9, 405e9):
        assert f"0.9 to 0.95 for {LARGE}" in often(parameters=size)
        assert "dare for 70B or more" in often(parameters=size)
        assert LARGE in often(parameters=size, steps=100)  # which says that steps are not used
    for size, steps, said in (
        *((6.7e9, 100, "6.7B after 100 steps"), (7e9, 20_000, "7B after 20000 steps")),
        *(
            (34e9, None, "34B after any number of steps"),
            (10e9, 1_000, "10B after 1000 steps"),
            (1e9, 600, "1B after 600 steps"),
        ),
    ):
        assert f"no drop rate for {said} (no evidence" in often(parameters=size, steps=steps)


def test_the_tables_are_whole():
    for relation in ("diverse", "lora"):
        for count in range(2, 20):
            assert any(
                habit.relation == relation and habit.models[0] <= count <= habit.models[1]
                for habit in METHODS
            )


# ---------------------------------------------------------------- what is left out


def test_what_no_setting_can_mend_is_left_out():
    models = {
        "math": ONE,
        "copy": ROOT,
        "again": ONE,
        "half": mixed(ROOT, ONE, 0.5, TWO, 0.0),
        "other": make_base(seed=9),
        "code": TWO,
    }
    advice = advise(analysis(ROOT, models))
    gone = values(advice, "models")
    assert gone == dict.fromkeys(("other", "copy", "again", "half"), "left out")
    files = [entry.file.name for entry in recipe_of(advice).models]
    assert files == ["math.safetensors", "code.safetensors"]


def test_what_is_wrong_twice_is_left_out_once():
    broken = make_base(seed=9)
    broken["layers.0.mlp.up_proj.weight"][0, 0] = np.nan
    advice = advise(analysis(ROOT, {"a": ONE, "broken": broken}))
    gone = [str(each) for each in advice.suggestions if each.setting == "models"]
    assert gone == ["broken is left out"]


def test_nothing_left_is_no_recipe():
    advice = advise(analysis(ROOT, {"copy": ROOT, "other": make_base(seed=9)}))
    assert advice.recipe == {}
    assert advice.doubts


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


@pytest.mark.parametrize(("shape", "codes"), [((), []), ((2,), ["integers_differ"])])
def test_a_network_with_different_integers_is_merged_as_advised(tmp_path, shape, codes):
    for name, steps in (("base", 100), ("a", 130), ("b", 145)):
        layers = ROOT if name == "base" else {"a": ONE, "b": TWO}[name]
        counter = {"1.num_batches_tracked": np.full(shape, steps)}
        save(tmp_path / f"{name}.safetensors", {**layers, **counter})
    files = [tmp_path / f"{name}.safetensors" for name in ("base", "a", "b")]
    seen = analyze(files[0], files[1:], verbose=False)
    readiness, advice = judge(seen)
    assert [f.code for f in readiness.findings if f.subjects == ("a", "b")] == codes
    assert ("on_integer_mismatch" in advice.recipe) == bool(codes)
    recipe = advice.recipe | {"output": str(tmp_path / "merged.safetensors"), "verbose": False}
    merge(request_from_document(recipe, "advice"))
    assert (load_file(recipe["output"])["1.num_batches_tracked"] == 100).all()


def test_missing_tensors_count_as_unchanged():
    less = {name: value for name, value in TWO.items() if "norm" not in name}
    assert advise(analysis(ROOT, {"a": ONE, "b": less})).recipe["on_missing"] == "base"
    copy = {name: value for name, value in ROOT.items() if "norm" not in name}
    assert "on_missing" not in advise(analysis(ROOT, {"a": ONE, "b": TWO, "copy": copy})).recipe


def test_a_verdict_that_is_given_is_used():
    seen = analysis(ROOT, many(2))
    readiness = assess(analysis(ROOT, {"m0": ROOT, "m1": TWO}))
    assert values(advise(seen, readiness), "models") == {"m0": "left out"}


# ---------------------------------------------------------------- as a recipe and as text


def test_the_recipe_can_be_written_and_carried_out(tmp_path):
    save(tmp_path / "base.safetensors", ROOT)
    models = many(2)
    own = {}
    for name, model in models.items():
        own[name] = {"file": str(save(tmp_path / f"{name}.safetensors", model))}
    advice = advise(analysis(ROOT, models, own=own, base=str(tmp_path / "base.safetensors")))
    document = advice.recipe
    document["output"] = str(tmp_path / "out.safetensors")
    file = tmp_path / "recipe.toml"
    file.write_text(tomli_w.dumps(document))
    recipe = request_from_document(read_toml(file), str(file))
    report = merge(recipe.changed(verbose=False))
    assert report.method == document["method"]


def test_words_and_json():
    advice = advise(analysis(ROOT, many(2)))
    assert f"method = {advice.recipe['method']}" in str(advice)
    document = json.loads(advice.to_json(), parse_constant=pytest.fail)
    assert document["recipe"] == advice.recipe
    assert document["suggestions"][0]["setting"] == "method"


def test_the_kernels_and_numpy_lead_to_the_same_judgement():
    models = {"math": ONE, "copy": ROOT, "half": mixed(ROOT, ONE, 0.5, TWO, 0.0), "code": TWO}
    measured = analyze_arrays(ROOT, models, spectra="none")
    own = {name: {"file": name, "origin": Origin.UNKNOWN} for name in models}
    computed = analysis(ROOT, models, own=own, base="base")
    assert [(each.code, each.subjects) for each in assess(measured).findings] == [
        (each.code, each.subjects) for each in assess(computed).findings
    ]
    assert advise(measured).recipe == advise(computed).recipe


def test_advice_on_real_models():
    """Two of the demonstration's models change their base by 3 %, more than the limit."""
    readiness, advice = judge(analyze(BASE, list(TUNED.values()), spectra="none", verbose=False))
    assert advice.recipe["method"] == "linear"
    assert (readiness.verdict, advice.left_out) == (Verdict.NO_DEFECT, ())
