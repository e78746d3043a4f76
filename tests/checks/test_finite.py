"""Inputs that are not finite are refused early, by every way into a merge, unless allowed."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

import dare
from dare.run.slices import GoneError
from helpers import listing, write_recipe

SIZE = 700_000  # more than a chunk
PLACES = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf}


def vectors(broken=(), value=np.nan, kind=np.float32, size=SIZE):
    base = {"v": np.zeros(size, kind), "w": np.zeros((32, 40), kind)}
    tuned = {name: array + np.array(1e-3, kind) for name, array in base.items()}
    tuned["v"][list(broken)] = value
    return base, tuned


def refused(count, where="model0", tensor="v", size=SIZE):
    found = rf"^{where}: {count:,} of {size:,} elements of {tensor} .*allow_not_finite = true"
    return pytest.raises(dare.InputError, match=found)


@pytest.mark.parametrize("method", ["sum", "dare+linear", "ties", "trim+sum", "della+sum", "slerp"])
@pytest.mark.parametrize("value", PLACES.values(), ids=PLACES)
def test_a_model_with_one_is_refused_and_leaves_no_output(tmp_path, method, value):
    base, tuned = vectors([5], value, size=1000)
    others = [vectors(size=1000)[1]] if method == "slerp" else []
    recipe = write_recipe(tmp_path, base, [tuned, *others], method=method)
    with refused(1, size=1000):
        dare.merge(recipe)
    assert not recipe.recipe.output.exists()
    assert not recipe.recipe.output.with_name("out.safetensors.manifest.json").exists()


@pytest.mark.parametrize("kind", [np.float16, np.float64, ml_dtypes.bfloat16])
def test_every_type_is_looked_at(tmp_path, kind):
    base, tuned = vectors([7, 8], kind=kind, size=1000)
    with refused(2, size=1000):
        dare.merge(write_recipe(tmp_path, base, [tuned]))


def test_a_broken_base_is_named(tmp_path):
    base, tuned = vectors(size=1000)
    base["v"][3], base["v"][4] = np.nan, np.inf
    with refused(2, "base", size=1000):
        dare.merge(write_recipe(tmp_path, base, [tuned, tuned]))


def test_a_matrix_that_is_broken_all_over_is_refused_before_anything_is_written(tmp_path):
    base, tuned = vectors(size=1000)
    base["layers.0.weight"] = np.zeros((128, 128), np.float32)
    tuned["layers.0.weight"] = np.full((128, 128), np.nan, np.float32)
    recipe = write_recipe(tmp_path, base, [tuned])
    with refused(128 * 128, tensor="layers.0.weight", size=128 * 128):
        dare.merge(recipe)
    assert not recipe.recipe.output.with_name("out.safetensors.partial").exists()


@pytest.mark.parametrize("output", ["out", "new/folder/out.safetensors"])
def test_one_that_is_found_in_the_middle_leaves_nothing_behind(tmp_path, output):
    base, tuned = vectors([1, 600_000, 699_999])
    recipe = write_recipe(tmp_path, base, [tuned], method="sum", output=tmp_path / output)
    before = listing(tmp_path)
    with refused(3):
        dare.merge(recipe)
    assert listing(tmp_path) == before


def test_what_is_allowed_is_merged_and_warned_of(tmp_path):
    base, tuned = vectors([5], size=1000)
    recipe = write_recipe(tmp_path, base, [tuned], method="sum", allow_not_finite=True)
    report = dare.merge(recipe)
    assert np.flatnonzero(np.isnan(load_file(recipe.recipe.output)["v"])).tolist() == [5]
    assert [(n.code, n.severity) for n in report.warnings] == [("not_a_number", "severe")]


def test_the_setting_changes_no_byte_of_what_would_be_merged_without_it(tmp_path):
    base, tuned = vectors(size=1000)
    outputs = []
    for allowed in (False, True):
        folder = tmp_path / str(allowed)
        recipe = write_recipe(folder, base, [tuned], allow_not_finite=allowed)
        dare.merge(recipe)
        outputs.append(recipe.recipe.output.read_bytes())
        manifest = (folder / "out.safetensors.manifest.json").read_text()
        assert ("allow_not_finite" in manifest) is allowed
    assert outputs[0] == outputs[1]


def test_infinities_that_are_shared_are_not_refused_and_those_made_on_the_way_are():
    base = {"v": np.array([-np.inf, -3e38, 1.0], np.float32)}
    tuned = {"v": np.array([-np.inf, 3e38, 1.0], np.float32)}  # the change is above float32
    how = {"method": "sum", "scale": 0.5, "verbose": False}
    with pytest.raises(dare.NotFiniteError, match=r"^v: 1 value .*F32; lower scale"):
        dare.merge_arrays(base, [tuned], **how)
    merged, report = dare.merge_arrays(base, [tuned], **how, allow_not_finite=True)
    assert merged["v"][0] == -np.inf
    assert (report.overflowed, [n.code for n in report.warnings]) == (1, ["overflow"])
    tuned["v"][1] = -3e38
    assert dare.merge_arrays(base, [tuned], **how)[0]["v"][0] == -np.inf


WIDE = {"F16": (66e3, "BF16 or F32"), "F8_E4M3": (465, "BF16 or F32"), "BF16": (3.4e38, "F32")}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("place", ["merged", "copied"])
@pytest.mark.parametrize("dtype", WIDE)
def test_what_the_output_cannot_hold_is_refused_at_once_and_leaves_nothing(
    tmp_path, dtype, place, backend
):
    base, tuned = vectors(size=10)
    large, remedy = WIDE[dtype]
    names = {"merged": "layers.0.weight", "copied": "layers.1.weight"}
    for name in names.values():
        base[name] = np.full((1024, 1024), 1.0, np.float32)  # two chunks
    base[names[place]][0, 3] = large
    tuned[names["merged"]] = base[names["merged"]] + 0  # the model lacks the other
    how = {"method": "dare+sum", "dtype": dtype, "backend": backend, "on_missing": "base"}
    given = write_recipe(tmp_path, base, [tuned], threads=1, **how)
    before, seen = listing(tmp_path), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dare.output.output.Output.record", lambda _self, made: seen.extend(made))
        with pytest.raises(
            dare.NotFiniteError,
            match=rf"^{names[place]}: 1 value .* {dtype}; set dtype = {remedy}, .*allow_not_finite",
        ):
            dare.merge(given)
    assert listing(tmp_path) == before
    assert (names[place], 1) not in {record.key for record in seen}
    assert dare.merge(given.changed(allow_not_finite=True)).overflowed == 1


def test_a_model_without_weight_in_a_tensor_may_be_broken_there():
    base, tuned = vectors([5], size=1000)
    _, sound = vectors(size=1000)
    merged, _ = dare.merge_arrays(base, [tuned, sound], method="sum", weights=[0, 1], verbose=False)
    assert np.isfinite(merged["v"]).all()


# ---------------------------------------------------------------- other ways in


def test_arrays_candidates_and_the_published_functions_refuse_likewise(tmp_path):
    base, tuned = vectors([5], size=1000)
    with refused(1, "model 0", size=1000):
        dare.merge_arrays(base, [tuned], method="sum")
    with refused(1, "model 0", size=1000):
        dare.dare_sparsify(base, tuned, drop_rate=0.5)
    dare.merge_arrays(base, [tuned], allow_not_finite=True, verbose=False)
    recipe = write_recipe(tmp_path, base, [tuned], method="sum")
    with refused(1, size=1000):
        dare.Candidates(recipe).make()
    allowed = recipe.changed(allow_not_finite=True)
    assert np.isnan(dare.Candidates(allowed).make().arrays["v"][5])


def test_slices_and_finish_refuse_likewise(tmp_path):
    def gone(*_given):
        raise GoneError

    base, tuned = vectors([600_000])
    recipe = write_recipe(tmp_path, base, [tuned], method="sum")
    with refused(1):
        for number in (1, 2):
            dare.merge_slice(recipe, f"{number}/2")
    allowed = recipe.changed(allow_not_finite=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dare.run.slices.Finisher.claim", gone)
        for number in (1, 2):
            dare.merge_slice(allowed, f"{number}/2")
    with refused(1):
        dare.finish(recipe)
    assert dare.finish(allowed).nans == 1


def test_chunks_of_an_interrupted_merge_that_allowed_it_are_refused_too(tmp_path, monkeypatch):
    base, tuned = vectors([5])
    recipe = write_recipe(tmp_path, base, [tuned], method="sum")
    with monkeypatch.context() as patch:
        patch.setattr("dare.output.output.Output.finish", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            dare.merge(recipe.changed(allow_not_finite=True))
    with refused(1):
        dare.merge(recipe)
    assert not recipe.recipe.output.exists()


def test_chunks_that_overflow_are_refused_by_slices_resumed_merges_and_candidates(tmp_path):
    base, tuned = vectors([600_000], 7e4)
    given = write_recipe(tmp_path, base, [tuned], method="sum", dtype="F16")
    ways = [lambda: dare.merge_slice(given, "2/2"), dare.Candidates(given).make]
    ways += [lambda: dare.merge_arrays(base, [tuned], method="sum", dtype="F16")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dare.output.output.Output.finish", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            dare.merge(given.changed(allow_not_finite=True))
    for way in (*ways, lambda: dare.merge(given)):
        with pytest.raises(dare.NotFiniteError, match=r"^v: 1 value .* F16; set dtype = BF16"):
            way()
