"""What to merge, by keyword: the same recipe as a file or flags would give, or one clear error."""

from __future__ import annotations

import inspect
from typing import get_type_hints

import numpy as np
import pytest

import dare
from dare import ModelEntry, Recipe, RecipeError
from dare.analysis.advice import Advice
from dare.api import Settings, make_request
from dare.recipe.entries import OTHER_NAMES
from dare.recipe.options import RunOptions
from dare.recipe.settings import parameter_names
from helpers import save

FILES = {"base": "b", "models": ["m", "n"], "output": "o"}
WHOLE = Recipe(**FILES, stages={"dare": {"drop_rate": 0.5}}, seed=3)


def entries(**by_name):
    return tuple(
        ModelEntry(file=file, **{name: values[place] for name, values in by_name.items()})
        for place, file in enumerate(FILES["models"])
    )


SAME = {
    "keywords": lambda: make_request(**FILES, drop_rate=0.5, seed=3),
    "a list of one": lambda: make_request(**FILES, drop_rate=[0.5], seed=3),
    "tables by stage": lambda: make_request(**FILES, stages={"dare": {"drop_rate": 0.5}}, seed=3),
    "a dict": lambda: make_request(WHOLE.to_tables()),
    "a dict as in manifests": lambda: make_request(WHOLE.to_document()),
    "a dict with a setting": lambda: make_request({**FILES, "seed": 3}, drop_rate=0.5),
    "a recipe with settings": lambda: make_request(Recipe(**FILES), drop_rate=0.5, seed=3),
    "advice": lambda: make_request(Advice((), WHOLE.to_tables(), ())),
    "numbers of NumPy's": lambda: make_request(
        **FILES, drop_rate=np.float32(0.5), seed=np.int64(3)
    ),
    "settings that are None": lambda: make_request(**FILES, drop_rate=0.5, seed=3, method=None),
}


@pytest.mark.parametrize("form", SAME)
def test_every_form_is_the_same_recipe(form):
    assert SAME[form]().recipe == WHOLE


@pytest.mark.parametrize("rate", ["x", np.array([0.5, 0.6]), 2])
def test_a_delta_file_is_refused_a_rate_that_is_none(rate, tmp_path):
    with pytest.raises(RecipeError, match="drop_rate = "):
        dare.compress("b", "m", tmp_path / "d.safetensors", drop_rate=rate)


def test_every_setting_has_a_type():
    known = {*Recipe.fields(), *RunOptions.fields(), *parameter_names()}
    explicit = {"base", "models", "output", "method"}
    assert {*get_type_hints(Settings)} == (known | {"weight", "model_seed"}) - explicit
    for function in (dare.merge, dare.plan, dare.merge_arrays):
        parameters = inspect.signature(function).parameters
        assert parameters["settings"].annotation == "Unpack[Settings]"


def test_progress_is_told_to_a_callback(tmp_path, capsys):
    base = {f"w{number}": np.ones((300, 400), np.float32) for number in range(5)}
    save(tmp_path / "base.safetensors", base)
    save(tmp_path / "math.safetensors", {name: 2 * array for name, array in base.items()})
    files = {"base": tmp_path / "base.safetensors", "models": [tmp_path / "math.safetensors"]}
    told = []
    how = {"drop_rate": 0.5, "verbose": False, "progress": lambda *counts: told.append(counts)}
    report = dare.merge(**files, output=tmp_path / "merged.safetensors", **how)
    amounts, totals = zip(*told, strict=True)
    assert sorted(amounts) == list(amounts)
    assert amounts[-1] == report.bytes_read == 2 * 5 * 300 * 400 * 4
    assert set(totals) == {report.bytes_read}
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("ours", OTHER_NAMES)
def test_every_other_name_is_understood(ours):
    for name in OTHER_NAMES[ours]:
        given = {key: value for key, value in FILES.items() if key != ours}
        assert make_request(**given, **{name: FILES[ours]}).recipe == Recipe(**FILES)


def test_a_file_with_settings(tmp_path):
    (tmp_path / "recipe.toml").write_text(Recipe(**FILES, seed=3).to_toml())
    assert make_request(tmp_path / "recipe.toml", drop_rate=0.5).recipe == WHOLE
    with pytest.raises(RecipeError, match=r"recipe.toml.*: t "):
        make_request(tmp_path / "recipe.toml", t=0.5)


def test_a_list_has_a_value_for_each_model():
    found = make_request(**FILES, drop_rate=[0.1, 0.2], weight=[1, 2], model_seed=[5, 6]).recipe
    settings = [{"drop_rate": 0.1}, {"drop_rate": 0.2}]
    assert found.models == entries(settings=settings, weight=[1, 2], seed=[5, 6])
    assert make_request(**FILES, weight=2.0).recipe.models == entries(weight=[2.0, 2.0])


def test_models_may_be_entries_and_tables():
    models = [{"file": "m", "weight": 2.0}, ModelEntry(file="n", settings={"drop_rate": 0.1})]
    found = make_request(base="b", models=models, weight=[3.0, 4.0]).recipe
    assert found.models == entries(weight=[3.0, 4.0], settings=[{}, {"drop_rate": 0.1}])
    assert models[0] == {"file": "m", "weight": 2.0}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({**FILES, "drop_rat": 0.5}, r"^arguments: drop_rat: not known \(did you mean 'drop_rate'"),
        ({**FILES, "base_path": "c"}, "^base and base_path: "),
        ({"models": ["m"]}, r"^arguments: base is missing$"),
        ({**FILES, "drop_rate": [0.1, 0.2, 0.3]}, r"drop_rate: 3 given for 2 models"),
        ({**FILES, "t": 0.5}, r"^arguments: t .*'dare\+linear'"),
        ({**FILES, "base": {"w": np.zeros(3)}}, r"^base is a dict: .* merge_arrays\(base, models"),
        ({**FILES, "stages": "clip.py"}, "stages"),
        *(
            ({**FILES, name: value}, f"{name} = array")
            for name in ("drop_rate", "weight", "scale")
            for value in (np.array([0.5, 0.6]), np.array("x"))
        ),
    ],
)
def test_a_wrong_keyword_is_refused_with_one_message(given, message):
    with pytest.raises(RecipeError, match=message):
        make_request(**given)


def test_what_is_not_merged_is_refused_before_anything_is_read():
    with pytest.raises(RecipeError, match="advice"):
        dare.merge(Advice((), {}, ()))
    with pytest.raises(RecipeError, match="progress = 5"):
        dare.merge(**FILES, progress=5)


BASE = {"w": np.zeros(1000, np.float32)}
TUNED = [{"w": np.full(1000, value, np.float32)} for value in (0.001, 0.002)]


def test_merging_files_plans_and_arrays_by_keyword_agree(tmp_path):
    base = save(tmp_path / "base.safetensors", BASE)
    models = [save(tmp_path / f"{n}.safetensors", model) for n, model in enumerate(TUNED)]
    asked = {"drop_rate": 0.5, "method": "dare+sum", "verbose": False}
    merged, _ = dare.merge_arrays(BASE, TUNED, **asked)
    report = dare.merge(base=base, models=models, output=tmp_path / "o.safetensors", **asked)
    planned = dare.plan(base=base, models=models, output=tmp_path / "p.safetensors", **asked)
    again = dare.merge(planned)
    kept = np.stack([dare.keep_mask("w", 1000, 0.5, seed=42 + number) for number in (0, 1)])
    expected = kept[0] * np.float32(0.002) + kept[1] * np.float32(0.004)
    np.testing.assert_array_equal(merged["w"], expected)
    assert report.digests.output == again.digests.output
    with pytest.raises(RecipeError, match=r"^scale: "):
        dare.merge(planned, scale=2.0)


def test_arrays_take_parameters_by_name_and_for_each_model():
    one, _ = dare.merge_arrays(BASE, TUNED, drop_rate=[0.5, 0.0], verbose=False)
    settings = [{"drop_rate": 0.5}, {}]
    other, _ = dare.merge_arrays(
        BASE, TUNED, drop_rate=0.0, model_settings=settings, weights=[0.5, 0.5], verbose=False
    )
    np.testing.assert_array_equal(one["w"], other["w"])
    assert len(np.unique(one["w"])) == 2
    with pytest.raises(RecipeError, match=r"^weight "):
        dare.merge_arrays(BASE, TUNED, weights=[1, 2], weight=[1, 2])


def test_another_method_leaves_out_what_the_recipe_says_for_its_own():
    entry = {"file": "m", "drop_rate": 0.3, "weight": 2}
    rule = {"match": "*.mlp.*", "drop_rate": 0.1, "weight": 0.5}
    given = {"base": "b", "models": [entry], "dare": {"drop_rate": 0.5}, "tensors": [rule]}
    changed = make_request({**given, "method": "dare+sum"}, method="sum").recipe
    assert (changed.method, changed.stages) == ("sum", {})
    assert changed.models == (ModelEntry(file="m", weight=2),)
    assert (changed.tensors[0].weight, changed.tensors[0].settings) == (0.5, {})
    assert make_request({**given, "dare": 3}, method="sum").recipe.stages == {}
