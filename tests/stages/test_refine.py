"""Chains that go on after the combine stage, wherever a method is written, planned and run."""

import json
from pathlib import Path

import numpy as np
import pytest
from matrix_merges import gaussian, merge, plan
from safetensors.numpy import load_file

import dare
from dare.cli import main
from dare.recipe.settings import has_effect
from dare.run import worker
from dare.stages import STAGES, parse_method
from dare.stages.matrices import matrix_refine_stage, refine
from helpers import write_recipe

SHAPES = {"a.weight": (40, 24), "b.weight": (24, 3, 9), "norm.weight": (24,), "scale": ()}


def arrays(count=3):
    generator = np.random.default_rng(0)

    def draw(scale):
        drawn = {n: scale * generator.standard_normal(s) for n, s in SHAPES.items()}
        return {n: np.asarray(v, np.float32) for n, v in drawn.items()}

    base = draw(1)
    models = [draw(0.02) for _ in range(count)]
    return base, [{n: np.asarray(base[n] + model[n]) for n in base} for model in models]


def merged(method, count=3, **settings):
    base, models = arrays(count)
    return dare.merge_arrays(base, models, method=method, verbose=False, **settings)


@pytest.fixture
def half():
    """A second refine stage, which halves."""

    @matrix_refine_stage(work_bytes=lambda rows, columns, models: 4 * (models + 2) * rows * columns)
    def half(merged, deltas, weights):
        """Halve."""
        return merged / 2

    yield
    del STAGES["half"]


# ---------------------------------------------------------------- how it is written


@pytest.mark.parametrize(
    "method", ["svc", "svc+linear", "dare+svc", "linear+svc+ties", "linear+svc+dare", "linear+dare"]
)
def test_a_refine_stage_stands_after_the_combine_stage(method):
    with pytest.raises(dare.RecipeError) as caught:
        parse_method(method)
    for part in (repr(method), "delta stages", "one combine stage (", "refine stages (svc)"):
        assert part in str(caught.value)


def test_a_refine_stage_stands_there_once():
    with pytest.raises(dare.RecipeError, match="svc appears in it more than once"):
        parse_method("linear+svc+svc")


def test_several_refine_stages_follow_each_other(half):
    once = merge("linear+half", gaussian(6, 4))
    np.testing.assert_array_equal(once, gaussian(6, 4) / 2)
    deltas = [gaussian(6, 4, seed=n) for n in range(3)]
    expected = merge("linear+svc", *deltas)
    np.testing.assert_array_equal(merge("linear+svc+half", *deltas), expected / 2)
    # It halves what svc gets, and svc sees the same deltas.
    assert not np.array_equal(merge("linear+half+svc", *deltas), expected / 2)


def test_what_is_set_by_name_takes_effect():
    names = ("alpha", "svc.alpha", "weight", "alpha.model 1", "drop_rate", "embedding_drop_rate")
    found = [has_effect(name, "linear+svc") for name in names]
    assert found == [True, True, True, False, False, False]
    assert not has_effect("alpha", "linear")
    assert not has_effect("weight", "slerp+svc")


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--alpha", "0.5", "--alpha", "0.6"], ["--alpha", "svc takes one value for all"]),
        (["--method", "linear", "--alpha", "0.5"], ["--alpha would have no effect"]),
        (["--alpha", "2"], ["[svc]", "alpha = 2"]),
    ],
)
def test_flags_that_cannot_be_are_refused(tmp_path, capsys, flags, parts):
    recipe = write_recipe(tmp_path, *arrays(2), method="linear+svc")
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    assert main(["plan", str(tmp_path / "recipe.toml"), *flags]) != 0
    said = " ".join(capsys.readouterr().err.split())
    assert all(part in said for part in parts)


def test_one_model_has_no_setting_of_it():
    with pytest.raises(dare.RecipeError, match=r"model model 0: alpha is not a parameter here"):
        merged("trim+linear+svc", model_settings=[{"alpha": 1.0}, {}, {}])


def test_flags_recipe_and_manifest_say_the_same(tmp_path, capsys):
    recipe = write_recipe(tmp_path, *arrays(2), method="linear+svc")
    (tmp_path / "recipe.toml").write_text(recipe.to_toml())
    output = recipe.recipe.output
    assert main([str(tmp_path / "recipe.toml"), "--alpha", "0.75"]) == 0
    manifest = json.loads(Path(f"{output}.manifest.json").read_text("utf-8"))
    assert manifest["report"]["method"] == "linear+svc"
    again = dare.load_recipe(output).recipe
    assert again.chain[-1] == (STAGES["svc"], {"alpha": 0.75, "embeddings": "vectors"})
    capsys.readouterr()
    assert main(["plan", str(output), "--alpha", "0.5", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["method"] == "linear+svc"
    assert shown["stages"][1] == {"stage": "svc", "alpha": 0.5, "embeddings": "vectors"}


# ---------------------------------------------------------------- what it does


@pytest.mark.parametrize(
    "method",
    ["linear", "dare+linear", "trim+ties", "tsv", "emr", "karcher", "slerp"],
)
def test_it_changes_what_was_combined_and_only_matrices(method):
    count = parse_method(method)[-1].models or 3
    combined, _ = merged(method, count)
    refined, report = merged(f"{method}+svc", count, threads=2)
    assert report.method == f"{method}+svc"
    for name in ("norm.weight", "scale"):
        assert refined[name].tobytes() == combined[name].tobytes()
    base, _ = arrays(count)
    before = merged(f"{method.removesuffix(method.split('+')[-1])}sum", count)[1]
    assert [t.survivors for t in report.tensors] == [t.survivors for t in before.tensors]
    for name in ("a.weight", "b.weight"):
        assert not np.array_equal(refined[name], combined[name])
        # It keeps the directions of what was combined.
        old, new = (
            (m[name] - base[name]).reshape(len(base[name]), -1) for m in (combined, refined)
        )
        left, _, right = np.linalg.svd(old.astype(np.float64), full_matrices=False)
        inside = left.T @ new @ right.T
        assert np.abs(inside - np.diag(np.diag(inside))).max() < 1e-4 * np.abs(inside).max()


def test_rules_set_it():
    """That rules set its parameters is in test_combinations."""
    mixed, _ = merged("linear", tensors=[dare.TensorRule(match="b.*", method="linear+svc")])
    for name, method in (("a.weight", "linear"), ("b.weight", "linear+svc")):
        assert mixed[name].tobytes() == merged(method)[0][name].tobytes()


def test_a_merge_that_stopped_goes_on(tmp_path, monkeypatch):
    recipe = write_recipe(tmp_path, *arrays(), method="trim+ties+svc", threads=1)
    calls = []

    def stop_at_the_second(*given):
        calls.append(given)
        if len(calls) == 2:
            raise dare.InputError("stopped")
        return refine(*given)

    with monkeypatch.context() as patched:
        patched.setattr(worker, "refine", stop_at_the_second)
        with pytest.raises(dare.InputError, match="stopped"):
            dare.merge(recipe)
    assert dare.merge(recipe).resumed_chunks > 0
    found, expected = load_file(recipe.recipe.output), merged("trim+ties+svc")[0]
    assert {n: v.tobytes() for n, v in found.items()} == {n: expected[n].tobytes() for n in found}


def test_the_plan_counts_the_finding_that_is_held_meanwhile():
    shape = (500, 600)
    matrix, svc, tsv = 4 * 500 * 600, STAGES["svc"], STAGES["tsv"]
    alone = plan("linear+svc", [shape], models=3).cost
    assert alone.matrix_work == svc.survey_bytes(shape, 3)
    assert alone.largest_matrix == "svc needs w0 as a whole"
    both = plan("tsv+svc", [shape], models=3).cost
    assert both.matrix_work == max(tsv.survey_bytes(shape, 3), matrix + svc.survey_bytes(shape, 3))
    assert both.matrix_bytes == alone.matrix_bytes == matrix
    assert plan("star+linear+svc", [shape], models=3).cost.matrix_bytes == 4 * matrix
