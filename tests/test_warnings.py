"""Warnings: one for each concern, at the line that called, whichever door was taken."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import pytest

import dare
from dare.demo.merges import write_models
from dare.recipe.document import request_from_document
from dare.run.slices import GoneError
from helpers import write_recipe as quiet_recipe

BASE = {"w": np.zeros(1000, np.float32)}
TUNED = {"w": np.linspace(-0.5, 0.5, 1000, dtype=np.float32)}
LARGE = "|δ| exceeds 0.002 in"


def write_recipe(folder, **settings):
    return quiet_recipe(folder, BASE, [TUNED], verbose=True, **settings)


def paths(folder):
    recipe = write_recipe(folder)
    return recipe.recipe.base, [entry.file for entry in recipe.recipe.models], recipe.recipe.output


def merge_toml(folder):
    (folder / "r.toml").write_text(write_recipe(folder).to_toml())
    return dare.merge(folder / "r.toml")


def finish(folder):
    def gone(*_given):
        raise GoneError

    recipe = write_recipe(folder)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore", dare.DareWarning)
        patch.setattr("dare.run.slices.Finisher.claim", gone)
        dare.merge_slice(recipe, "1/1")
    return dare.finish(recipe)


def merge_files(folder, **config):
    base, models, output = paths(folder)
    merger = dare.DareMerger(base_file=base, merge_files=models, config=dare.DareConfig(**config))
    return merger.merge(output)


DOORS = {
    "merge of a recipe": lambda folder: dare.merge(write_recipe(folder)),
    "merge of a plan": lambda folder: dare.merge(dare.plan(write_recipe(folder))),
    "merge of a file": merge_toml,
    "merge_slice": lambda folder: dare.merge_slice(write_recipe(folder), "1/1"),
    "finish": finish,
    "merge_arrays": lambda _: dare.merge_arrays(BASE, [TUNED]),
    "DareMerger": merge_files,
    "dare_merge": lambda folder: dare.dare_merge(*paths(folder)),
    "dare_ties_merge of files": lambda folder: dare.dare_ties_merge(*paths(folder)),
    "dare_ties_merge of dicts": lambda _: dare.dare_ties_merge([TUNED], BASE),
    "dare_sparsify": lambda _: dare.dare_sparsify(BASE, TUNED),
    "dare_slerp_merge": lambda _: dare.dare_slerp_merge(
        TUNED, {"w": -TUNED["w"] + np.float32(1)}, BASE
    ),
}


def _two_files(folder):
    base, (model,), _ = paths(folder)
    return base, model


def _compressed_and_applied(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dare.DareWarning)
        dare.compress(*_two_files(folder), folder / "d.safetensors", drop_rate=0.5, bits="native")
    return dare.apply_delta(folder / "base.safetensors", folder / "d.safetensors", folder / "o")


OTHERS = {
    "dare_drop": (lambda _: dare.dare_drop(TUNED, seed=1, rescale=False), "rescale = false"),
    "detect_delta_sparsity": (
        lambda _: dare.detect_delta_sparsity({"w": np.array([1, np.nan], np.float32)}),
        "NaN or infinite",
    ),
    "compress": (
        lambda folder: dare.compress(*_two_files(folder), folder / "d.safetensors"),
        "Keep the model",
    ),
    "apply_delta": (_compressed_and_applied, LARGE),
}


def caught_from(call, folder):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(folder)
    return caught


@pytest.mark.parametrize("name", [*DOORS, *OTHERS])
def test_every_door_warns_once_and_at_the_line_that_called(tmp_path, name):
    door, text = (DOORS[name], LARGE) if name in DOORS else OTHERS[name]
    caught = caught_from(door, tmp_path)
    texts = [str(warning.message) for warning in caught]
    assert any(text in line for line in texts)
    assert len(set(texts)) == len(texts)
    assert {warning.filename for warning in caught} == {__file__}
    assert {warning.category for warning in caught} == {dare.DareWarning}


def test_what_is_issued_is_what_the_report_has(tmp_path):
    recipe = write_recipe(tmp_path, stages={"dare": {"drop_rate": 0.99}})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        report = dare.merge(recipe)
    assert [str(warning.message) for warning in caught] == list(map(str, report.warnings))
    assert [warning.code for warning in report.warnings] == ["high_drop_rate", "large_deltas"]


def test_the_line_is_that_of_the_nearest_caller_outside(tmp_path):
    """Also where the call is made by code that the package has called."""
    namespace = {"dare": dare, "recipe": write_recipe(tmp_path)}
    code = compile("\n\ndare.merge(recipe)", "evaluator.py", "exec")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(code, namespace)
    assert {(warning.filename, warning.lineno) for warning in caught} == {("evaluator.py", 3)}


# ---------------------------------------------------------------- large deltas


def matrices(size, *, seed=0, share=1.0):
    """A matrix of which a share is changed by so much relative to the base, which is 1."""
    generator = np.random.default_rng(seed)
    base = {"layers.0.w.weight": generator.standard_normal((128, 128), np.float32)}
    change = size * generator.standard_normal((128, 128), np.float32)
    change[generator.random((128, 128)) >= share] = 0
    return base, {name: array + change for name, array in base.items()}


def large_deltas(base, *models, **settings):
    _, report = dare.merge_arrays(base, list(models), verbose=False, **settings)
    return [(n.severity, str(n)) for n in report.warnings if n.code == "large_deltas"]


def rate(value, stage="dare"):
    return {stage: {"drop_rate": value}}


JUDGED = [
    # where nothing is dropped at random, large changes are no matter
    *((method, {}, 0.5, 1.0, 0) for method in ("sum", "linear", "ties", "trim+sum", "nm+sum")),
    ("dare+sum", rate(0.9), 0.5, 1.0, 1),
    ("darex+sum", rate(0.9, "darex"), 0.5, 1.0, 1),
    ("della+sum", rate(0.8, "della"), 0.5, 1.0, 1),
    ("nm+sum", {"nm": {"n": 1, "m": 8, "choose": "random"}}, 0.5, 1.0, 1),
    # the predicted error is size·√(p/(1 - p)) and more
    *(
        ("dare+sum", rate(p), 0.04, 1.0, count)
        for p, count in ((0, 0), (0.1, 0), (0.5, 0), (0.9, 1))
    ),
    ("dare+sum", rate(0.8), 0.01, 1.0, 0),
    # a few large changes are no matter only if outputs stay in bounds
    *(
        ("dare+sum", rate(0.8), size, share, count)
        for share in (0.05, 0.3, 0.87)
        for size, count in ((0.003, 0), (0.5, 1))
    ),
]


@pytest.mark.parametrize(("method", "stages", "size", "share", "count"), JUDGED)
def test_large_changes_matter_if_they_are_dropped_at_random(method, stages, size, share, count):
    base, tuned = matrices(size, share=share)
    found = large_deltas(base, tuned, method=method, stages=stages)
    assert [severity for severity, _ in found] == ["warning"] * count
    for _, text in found:
        assert f"leave {method.partition('+')[0]} out" in text


def test_the_size_relative_to_the_base_decides():
    base, tuned = matrices(0.01)
    smaller = {name: np.float32(0.02) * array for name, array in base.items()}
    change = {name: smaller[name] + tuned[name] - base[name] for name in base}
    assert len(large_deltas(smaller, change, method="dare+sum", stages=rate(0.8))) == 1


@pytest.mark.parametrize(("size", "count"), [(0.3, 0), (20.0, 1)])
def test_large_deltas_that_no_sample_sees_count_too(size, count):
    base, tuned = matrices(0.005)
    for number in range(1, 5):
        base[f"norms.{number}"] = np.ones(4096, np.float32)
        tuned[f"norms.{number}"] = base[f"norms.{number}"].copy()
    tuned["norms.2"][7:9] += np.float32(size)
    assert len(large_deltas(base, tuned, method="dare+sum", stages=rate(0.8))) == count


@pytest.mark.parametrize(("given", "count"), [({}, 0), ({"delta_threshold": 0.002}, 1)])
def test_a_threshold_is_given_where_it_is_written_down(tmp_path, given, count):
    """Be it the default's value; it stays so when settings are laid over the recipe."""
    base, tuned = matrices(0.0001)
    tuned["layers.0.w.weight"][0, 0] += np.float32(0.01)
    recipe = quiet_recipe(tmp_path, base, [tuned], stages=rate(0.5), **given)
    base, (model,), output = recipe.recipe.base, recipe.recipe.models, recipe.recipe.output
    config = dare.DareConfig(drop_rate=0.5, verbose=False, **given)
    merger = dare.DareMerger(base, [model.file], replace(config, seed=43))
    for merged in (
        dare.merge(recipe),
        dare.merge(recipe, scale=0.5, overwrite=True),
        merger.merge(output, overwrite=True),
    ):
        assert sum(found.code == "large_deltas" for found in merged.warnings) == count


@pytest.mark.parametrize(("seed", "severity"), [(1, "severe"), (0, None)])
def test_a_merge_and_an_analysis_judge_an_unrelated_model_alike(seed, severity):
    (base, _), (_, tuned) = matrices(0.5), matrices(0.5, seed=seed)
    _, report = dare.merge_arrays(base, [tuned], method="dare+sum", verbose=False)
    readiness = dare.assess(dare.analyze_arrays(base, [tuned]), method="dare+sum")
    for found in (report.warnings, readiness.findings):
        graded = {notice.code: notice.severity for notice in found}
        assert graded.get("unrelated") == severity


def test_whoever_gives_a_threshold_is_warned_by_it_alone():
    base, tuned = matrices(0.01)
    settings = {"method": "dare+sum", "stages": rate(0.5)}
    assert large_deltas(base, tuned, **settings) == []
    ((severity, text),) = large_deltas(base, tuned, **settings, delta_threshold=0.001)
    assert (severity, "predicted" in text) == ("warning", False)
    assert large_deltas(base, tuned, **settings, delta_threshold=0.1) == []


ONE_LARGE = {
    "a": np.full(5000, 1e-4, np.float32),
    "b": np.r_[np.full(4990, 1e-4, np.float32), np.full(10, 0.25, np.float32)],
    "c": np.r_[np.full(4999, 1e-4, np.float32), np.float32(0.5)],
}
UNMOVED = {name: np.zeros_like(array) for name, array in ONE_LARGE.items()}


@pytest.mark.parametrize("method", ["dare+linear", "linear", "trim+ties", "sum"])
@pytest.mark.parametrize("threshold", [0.001, 0.002])
def test_a_few_elements_above_a_given_threshold_are_counted_and_placed(method, threshold):
    # Without one, large elements matter only where they are dropped at random.
    assert len(large_deltas(UNMOVED, ONE_LARGE, method=method)) == ("dare" in method)
    ((severity, text),) = large_deltas(UNMOVED, ONE_LARGE, method=method, delta_threshold=threshold)
    assert severity == "warning"
    for figure in (f"exceeds {threshold:g} in 11 of 15,000", "0.5 in c"):
        assert figure in text
    assert ("drop_rate" in text) == ("dare" in method)
    assert large_deltas(UNMOVED, ONE_LARGE, method=method, delta_threshold=0.5) == []


def test_only_tensors_that_are_dropped_from_count():
    base, tuned = matrices(0.5)
    base["head"], tuned["head"] = np.zeros(10, np.float32), np.full(10, 1e-4, np.float32)
    rule = dare.TensorRule(match="layers.*", settings={"drop_rate": 0.0})
    assert large_deltas(base, tuned, tensors=[rule]) == []
    ((_, text),) = large_deltas(base, tuned)
    assert "of 16,394 elements" in text
    rule = dare.TensorRule(match="head", settings={"drop_rate": 0.0})
    ((_, text),) = large_deltas(base, tuned, tensors=[rule])
    assert "of 16,384 elements" in text


# ---------------------------------------------------------------- what is advised


def test_what_is_advised_for_the_demonstration_runs_without_a_warning(tmp_path):
    write_models(tmp_path / "m")
    folder = tmp_path / "m"
    models = [folder / name for name in ("add", "say", "sort")]
    analysis = dare.analyze(folder / "base", models, verbose=False)
    advice = dare.advise(analysis, dare.assess(analysis))
    recipe = request_from_document(advice.recipe, "advice")
    report = dare.merge(recipe.changed(output=tmp_path / "out"))
    assert report.warnings == ()
    assert "## Warnings" not in (tmp_path / "out" / "README.md").read_text()
