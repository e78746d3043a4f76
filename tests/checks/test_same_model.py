"""The base, a model or an earlier output that a pattern such as *.safetensors puts into a merge."""

from __future__ import annotations

import os

import numpy as np
import pytest

import dare
from dare import ModelEntry, Request
from helpers import save

BASE = {"w": np.zeros(200, np.float32), "v": np.zeros((8, 8), np.float32)}


def changed(seed):
    generator = np.random.default_rng(seed)
    return {
        name: (array + 1e-4 * generator.standard_normal(array.shape)).astype(np.float32)
        for name, array in BASE.items()
    }


@pytest.fixture
def folder(tmp_path):
    """A folder of three models, which is where the user is."""
    for name, arrays in {"base": BASE, "code": changed(1), "math": changed(2)}.items():
        save(tmp_path / "here" / f"{name}.safetensors", arrays)
    return tmp_path / "here"


def merge(folder, *models, **settings):
    given = {"base": folder / "base.safetensors", "output": folder / "out.safetensors"}
    files = [m if isinstance(m, ModelEntry) else folder / f"{m}.safetensors" for m in models]
    return dare.merge(Request.of(**{**given, "models": files, "verbose": False, **settings}))


ON_DELTAS = {"method": "slerp", "stages": {"slerp": {"on": "deltas"}}}
REFUSED = [
    (("base", "math"), {}, r"base\.safetensors: is the base.*out of models"),
    (("base", "math"), ON_DELTAS, r'is the base.*set on = "weights" in \[slerp\]'),
    (("symlink", "math"), {}, r"symlink\.safetensors: is the base"),
    (("second", "math"), {}, r"second\.safetensors: is the base"),
    (("math", "code", "math"), {}, r"math\.safetensors: is among the models twice; take"),
    (("math", "link"), {}, r"link\.safetensors: is the file .*math\.safe"),
    (("code", "math", "merged"), {}, r"merged\.safetensors: .*code and math"),
    (("math", "merged"), {}, r"merged\.safetensors: .* math; .*models"),
]


@pytest.mark.parametrize(("models", "settings", "reason"), REFUSED)
def test_a_model_that_is_there_already_is_refused_under_any_name(folder, models, settings, reason):
    merge(folder, "code", "math", output=folder / "merged.safetensors")
    (folder / "symlink.safetensors").symlink_to(folder / "base.safetensors")
    (folder / "second.safetensors").hardlink_to(folder / "base.safetensors")
    (folder / "link.safetensors").hardlink_to(folder / "math.safetensors")
    with pytest.raises(dare.RecipeError, match=reason):
        merge(folder, *models, **settings)


def test_a_delta_file_of_the_base_itself_is_refused_too(folder):
    with pytest.raises(dare.RecipeError, match=r"base\.safetensors: is the base"):
        dare.compress(*[folder / "base.safetensors"] * 2, folder / "d.safetensors", verbose=False)


@pytest.mark.parametrize("method", ["slerp", "karcher", "multislerp", "nuslerp", "dare+slerp"])
def test_an_interpolation_may_begin_at_the_base(folder, method):
    report = merge(folder, "base", "math", method=method)
    assert "equals_base" not in [notice.code for notice in report.warnings]
    os.link(folder / "base.safetensors", folder / "copy.safetensors")
    linked = merge(folder, "copy", "math", method=method, output=folder / "linked.safetensors")
    assert linked.digests.output == report.digests.output


def test_every_method_must_interpolate_where_the_base_is_a_model(folder):
    rules = [dare.TensorRule(match="*", method="nuslerp")]  # which is of deltas unless told
    mixed = merge(folder, "base", "math", method="slerp", tensors=rules)
    alone = {"method": "nuslerp", "output": folder / "alone.safetensors"}
    assert mixed.digests.output == merge(folder, "base", "math", **alone).digests.output
    with pytest.raises(dare.RecipeError, match=r"is the base.*take it out of models"):
        merge(folder, "base", "math", method="linear", tensors=rules)


def test_one_goes_on_from_the_base_to_an_earlier_interpolation(folder):
    merge(folder, "base", "math", method="slerp", output=folder / "half.safetensors")
    assert merge(folder, "base", "half", method="slerp").warnings == ()
    with pytest.raises(dare.RecipeError, match=r"half.*from this base and math.*give it a seed"):
        merge(folder, "math", "half", method="slerp")


def test_a_base_with_a_weight_is_meant(folder):
    entry = ModelEntry(file=folder / "base.safetensors", weight=0.5)
    report = merge(folder, entry, "math", method="linear")
    assert report.warnings == ()


def test_two_masks_of_one_model_are_meant(folder):
    entries = [ModelEntry(file=folder / "math.safetensors", seed=seed) for seed in (1, 2)]
    assert merge(folder, *entries).models[1].seed == 2


def test_outputs_are_merged_on_purpose(folder):
    """With other models, on another base, or with a weight."""
    save(folder / "other.safetensors", changed(3))
    merge(folder, "code", "math", output=folder / "merged.safetensors")
    assert merge(folder, "merged", "other").warnings == ()
    assert merge(
        folder, "merged", "code", base=folder / "other.safetensors", output=folder / "b.safetensors"
    )
    entry = ModelEntry(file=folder / "merged.safetensors", weight=0.5)
    assert merge(folder, entry, "code", output=folder / "c.safetensors")


# ---------------------------------------------------------------- equal contents


def notices(base, *models, **settings):
    _, report = dare.merge_arrays(base, list(models), method="linear", verbose=False, **settings)
    return [(notice.code, notice.severity) for notice in report.warnings], report


def test_a_copy_of_the_base_is_warned_of():
    found, report = notices(BASE, changed(1), {name: a.copy() for name, a in BASE.items()})
    assert found == [("equals_base", "severe")]
    assert report.warnings[0].subjects == ("model 1",)
    assert notices(BASE, changed(1), BASE, weights=[0.5, 0.5])[0] == []


def test_a_copy_of_a_model_is_warned_of_once_before_and_after_the_work():
    generator = np.random.default_rng(0)
    base = {"layers.0.weight": generator.standard_normal((128, 128), np.float32)}
    tuned = {"layers.0.weight": base["layers.0.weight"] + np.float32(0.001)}
    found, report = notices(base, tuned, dict(tuned))  # seen in the sample, and by the digests
    assert found == [("same_model", "severe")]
    assert report.warnings[0].subjects == ("model 0", "model 1")
    found, _ = notices(BASE, changed(1), changed(1), changed(2))  # by the digests alone
    assert found == [("same_model", "severe")]
