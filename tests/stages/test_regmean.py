"""RegMean against NumPy, however it is run, and files of Gram matrices that do not fit."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import dare
from dare.errors import InputError, RecipeError
from dare.inputs.gathered import NOTE, as_triangle, write_gathered
from helpers import save

NAMES = ("math", "code", "chat")
ROWS, COLUMNS = 5, 7
ALPHA = 0.9


def inputs(seed, rows=40, columns=COLUMNS):
    mixed = np.random.default_rng(seed).standard_normal((columns, columns))
    return np.random.default_rng(seed + 100).standard_normal((rows, columns)) @ mixed


def solved(weights, features, alpha=ALPHA):
    """RegMean by its formula, in float64."""
    left, right = 0.0, 0.0
    for weight, seen in zip(weights, features, strict=True):
        gram = seen.T @ seen
        diagonal, size = np.diag(np.diag(gram)), len(gram)
        gram = (alpha * (gram - diagonal) + diagonal) / np.trace(gram)
        gram += np.eye(size) * 1e-6 / size
        left, right = left + gram, right + gram @ weight.astype(np.float64).T
    return np.linalg.solve(left, right).T


def write_grams(path, features, tensor="fc.weight", **notes):
    tensors = {f"gram/{m}/{tensor}": as_triangle(seen.T @ seen) for m, seen in features.items()}
    write_gathered(path, tensors, rows=dict.fromkeys(features, 40), **notes)
    return path


@pytest.fixture
def models(tmp_path):
    """Three models of a linear layer with a bias, and a matrix that no input was seen of."""
    generator = np.random.default_rng(0)
    tensors = {}
    for name in ("base", *NAMES):
        tensors[name] = {
            "fc.weight": generator.standard_normal((ROWS, COLUMNS), np.float32),
            "fc.bias": generator.standard_normal(ROWS, np.float32),
            "other.weight": generator.standard_normal((4, 3), np.float32),
        }
        save(tmp_path / f"{name}.safetensors", tensors[name])
    features = {name: inputs(seed) for seed, name in enumerate(NAMES)}
    write_grams(tmp_path / "grams.safetensors", features)
    return tmp_path, tensors, features


def asked(folder, names=NAMES, **more):
    files = [folder / f"{name}.safetensors" for name in names]
    usual = {"method": "regmean", "gathered": folder / "grams.safetensors", "verbose": False}
    usual |= {"output": folder / "out.safetensors"}
    return dare.Request.of(base=folder / "base.safetensors", models=files, **(usual | more))


def merged_layer(folder, *names, **more):
    dare.merge(asked(folder, *names, **more))
    return load_file(folder / "out.safetensors")["fc.weight"]


@pytest.mark.parametrize("names", [NAMES, NAMES[:2], NAMES[:1]])
@pytest.mark.parametrize(("alpha", "scale"), [(ALPHA, 1.0), (0.3, 1.0), (1.0, 0.5)])
def test_layers_are_solved_and_the_rest_is_averaged(models, names, alpha, scale):
    folder, tensors, features = models
    dare.merge(asked(folder, names, stages={"regmean": {"alpha": alpha}}, scale=scale))
    merged = load_file(folder / "out.safetensors")
    weights = [tensors[name]["fc.weight"] for name in names]
    found = solved(weights, [features[name] for name in names], alpha)
    base = tensors["base"]
    expected = base["fc.weight"] + scale * (found - base["fc.weight"])
    np.testing.assert_allclose(merged["fc.weight"], expected, rtol=0, atol=2e-6)
    for tensor in ("fc.bias", "other.weight"):
        mean = np.mean([tensors[name][tensor] for name in names], axis=0)
        expected = base[tensor] + scale * (mean - base[tensor])
        np.testing.assert_allclose(merged[tensor], expected, rtol=0, atol=1e-6)


@settings(max_examples=10)
@given(split=st.integers(1, COLUMNS - 1), seed=st.integers(0, 1000))
def test_each_model_is_kept_where_only_its_inputs_reach(tmp_path_factory, split, seed):
    """Inputs in orthogonal subspaces leave nothing to compromise on, but for the ridge."""
    folder = tmp_path_factory.mktemp("apart")
    generator = np.random.default_rng(seed)
    weights = generator.standard_normal((3, ROWS, COLUMNS), np.float32)
    for name, weight in zip(("base", "math", "code"), weights, strict=True):
        save(folder / f"{name}.safetensors", {"fc.weight": weight})
    one, other = (generator.standard_normal((50, COLUMNS)) for _ in range(2))
    one[:, split:] = other[:, :split] = 0
    write_grams(folder / "grams.safetensors", {"math": one, "code": other})
    merged = merged_layer(folder, ("math", "code"))
    np.testing.assert_allclose(merged[:, :split], weights[1][:, :split], atol=1e-4)
    np.testing.assert_allclose(merged[:, split:], weights[2][:, split:], atol=1e-4)


def test_a_layer_that_is_stored_as_inputs_by_outputs(models):
    folder, tensors, features = models
    for name, model in tensors.items():
        save(folder / f"{name}.safetensors", {"fc.weight": model["fc.weight"].T.copy()})
    write_grams(folder / "grams.safetensors", features, turned=["fc.weight"])
    expected = solved([tensors[name]["fc.weight"] for name in NAMES], features.values())
    np.testing.assert_allclose(merged_layer(folder), expected.T, rtol=0, atol=2e-6)


@pytest.mark.usefixtures("matrices_on_host")
@pytest.mark.parametrize("turned", [False, True])
def test_a_gpu_solves_layers_too(models, turned):
    folder, tensors, features = models
    if turned:
        for name, model in tensors.items():
            save(folder / f"{name}.safetensors", {"fc.weight": model["fc.weight"].T.copy()})
        write_grams(folder / "grams.safetensors", features, turned=["fc.weight"])
    assert dare.plan(asked(folder, device="cuda")).matrix_gpus
    found = merged_layer(folder, device="cuda")
    expected = solved([tensors[name]["fc.weight"] for name in NAMES], features.values())
    np.testing.assert_allclose(found.T if turned else found, expected, rtol=0, atol=2e-6)


def test_a_model_that_lacks_a_tensor_counts_as_the_base(models):
    folder, tensors, features = models
    save(folder / "code.safetensors", {"fc.bias": tensors["code"]["fc.bias"]})
    expected = solved(
        [tensors[name]["fc.weight"] for name in ("math", "base", "chat")], features.values()
    )
    found = merged_layer(folder, on_missing="base")
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("without", ["any inputs", "one model's matrix"])
def test_a_layer_without_inputs_is_averaged(models, without):
    folder, tensors, features = models
    if without == "any inputs":
        write_grams(folder / "grams.safetensors", {n: np.zeros((3, COLUMNS)) for n in NAMES})
    else:
        grams = {f"gram/{n}/fc.weight": as_triangle(features[n].T @ features[n]) for n in NAMES[:2]}
        write_gathered(folder / "grams.safetensors", grams, rows=dict.fromkeys(NAMES, 1))
    mean = np.mean([tensors[name]["fc.weight"] for name in NAMES], axis=0)
    np.testing.assert_allclose(merged_layer(folder), mean, rtol=0, atol=1e-6)


# ---------------------------------------------------------------- the same bytes


def test_candidates_slices_and_repeated_merges_have_the_same_bytes(models):
    folder, _, _ = models
    report = dare.merge(asked(folder))
    expected = (folder / "out.safetensors").read_bytes()
    assert dare.Candidates(asked(folder)).make().digest == report.digests.output
    assert dare.verify(folder / "out.safetensors").ok
    for part in ("1/2", "2/2"):
        dare.merge_slice(asked(folder, output=folder / "sliced.safetensors"), part)
    assert (folder / "sliced.safetensors").read_bytes() == expected
    dare.merge(folder / "out.safetensors", output=folder / "again.safetensors", verbose=False)
    assert (folder / "again.safetensors").read_bytes() == expected


def test_the_manifest_has_the_files_digest_and_a_path_from_the_output(models):
    folder, _, _ = models
    dare.merge(asked(folder))
    manifest = json.loads((folder / "out.safetensors.manifest.json").read_text())
    assert manifest["recipe"]["gathered"] == "../grams.safetensors"
    assert manifest["gathered"] == dare.plan(asked(folder)).gathered.digest
    assert (
        dare.plan(asked(folder, method="linear", gathered=None))
        .identity.keys()
        .isdisjoint({"gathered"})
    )


def test_other_gram_matrices_make_another_merge_and_are_not_what_a_manifest_demands(models):
    folder, _, features = models
    dare.merge(asked(folder))
    before = dare.plan(asked(folder)).fingerprint
    write_grams(folder / "grams.safetensors", features | {"math": inputs(9)})
    assert dare.plan(asked(folder)).fingerprint != before
    with pytest.raises(InputError, match=r"grams\.safetensors: is not what it was"):
        dare.merge(folder / "out.safetensors", output=folder / "again.safetensors", verbose=False)


# ---------------------------------------------------------------- files that do not fit


def test_without_a_file_it_is_said_what_to_name(models):
    with pytest.raises(RecipeError, match=r"regmean.*gathered = FILE"):
        dare.plan(asked(models[0], gathered=None))


def rewritten(folder, change):
    """Write the file again with other tensors, but the digests of before."""
    file = folder / "grams.safetensors"
    with safe_open(file, "numpy") as opened:
        notes = opened.metadata()
    save_file(change(load_file(file)), file, metadata=notes)


def spoil(tensors):
    tensors["gram/math/fc.weight"][0] += 1
    return tensors


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (spoil, r"gram/math/fc\.weight: changed since"),
        (lambda tensors: tensors | {"new": np.ones(3, np.float32)}, "digests of other tensors"),
    ],
)
def test_what_changed_in_the_file_is_refused(models, change, match):
    rewritten(models[0], change)
    with pytest.raises(InputError, match=match):
        dare.merge(asked(models[0]))
    assert not (models[0] / "out.safetensors").exists()


@pytest.mark.parametrize("notes", [{}, {NOTE: "[]"}, {NOTE: '{"digests": 3}'}])
def test_a_file_of_something_else_is_refused(models, notes):
    save_file({"w": np.ones(3, np.float32)}, models[0] / "grams.safetensors", metadata=notes)
    with pytest.raises(InputError, match=r"has no Gram matrices or statistics.*gather it again"):
        dare.plan(asked(models[0]))


def test_a_model_without_matrices_is_named(models):
    folder, _, features = models
    write_grams(folder / "grams.safetensors", {n: features[n] for n in NAMES[:2]})
    with pytest.raises(InputError, match=r"no Gram matrices of chat; it has: math, code\. Gather"):
        dare.plan(asked(folder))
    dare.plan(asked(folder, NAMES[:2]))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda seen: seen[:, 1:], r"gram/math/fc\.weight: is not that of a layer with 7"),
        (lambda seen: seen * np.nan, r"gram/math/fc\.weight: has NaN or infinite"),
        (lambda seen: seen * np.inf, r"gram/math/fc\.weight: has NaN or infinite"),
    ],
)
def test_a_matrix_that_cannot_be_the_layers_is_refused(models, change, match):
    folder, _, features = models
    with np.errstate(invalid="ignore"):
        write_grams(folder / "grams.safetensors", features | {"math": change(features["math"])})
    with pytest.raises(InputError, match=match):
        dare.merge(asked(folder))


def test_memory_is_counted_by_a_layers_inputs(models):
    """A head of many rows needs no matrix of their square."""
    stage = dare.plan(asked(models[0])).tensors[0].combine_stage
    head = stage.survey_bytes((50_000, 64), 2)
    assert head < 4 * 2 * 50_000 * 64 + 100 * 64**2 < stage.survey_bytes((64, 50_000), 2)


def test_a_file_that_cannot_be_written_is_an_error_of_ours(tmp_path):
    with pytest.raises(dare.OutputError, match="cannot be written"):
        write_gathered(tmp_path / "nowhere" / "g.safetensors", {"w": np.ones(2, np.float32)})
    assert not Path(tmp_path / "nowhere").exists()
