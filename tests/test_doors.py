"""The same request gives the same numbers through every door: files, the command line, arrays of
NumPy and torch, and the functions that published descriptions of DARE use."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import dare
from dare.cli import main
from helpers import save

SHAPES = {"embed.weight": (40, 24), "layers.0.weight": (24, 36), "layers.1.norm.weight": (24,)}
RATE = 0.6


def make_models(count=3):
    generator = np.random.default_rng(7)
    base = {name: generator.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}
    tuned = [
        {
            name: array + generator.standard_normal(array.shape, np.float32) / 64
            for name, array in base.items()
        }
        for _ in range(count)
    ]
    return base, tuned


BASE, TUNED = make_models()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    models = [save(folder / f"{i}.safetensors", model) for i, model in enumerate(TUNED)]
    return save(folder / "base.safetensors", BASE), models


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dare.DareWarning)
        yield


def assert_same(left, right):
    assert left.keys() == right.keys() == SHAPES.keys()
    for name in SHAPES:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


REQUESTS = [
    ("dare+linear", {"dare": {"drop_rate": RATE}}),
    ("dare+sum", {"dare": {"drop_rate": RATE}}),
    ("dare+ties", {"dare": {"drop_rate": RATE}}),
    ("dare+trim+ties", {"dare": {"drop_rate": RATE}, "trim": {"keep_ratio": 0.5}}),
    (
        "dare+trim+ties",
        {"dare": {"drop_rate": RATE}, "trim": {"keep_ratio": 0.5, "scope": "model"}},
    ),
    ("dare+darex+linear", {"dare": {"drop_rate": RATE}, "darex": {"drop_rate": 0.3}}),
    ("della+nm+linear", {"della": {"drop_rate": RATE}, "nm": {"choose": "random"}}),
    ("dare+slerp", {"dare": {"drop_rate": RATE}}),
]


def merged_arrays(method, stages, models, base=BASE, **settings):
    return dare.merge_arrays(base, models, method=method, stages=stages, verbose=False, **settings)[
        0
    ]


@pytest.mark.parametrize(("method", "stages"), REQUESTS)
def test_files_the_command_line_numpy_and_torch_agree(files, tmp_path, method, stages):
    count = 2 if method.endswith("slerp") else 3
    base, models = files[0], files[1][:count]
    expected = merged_arrays(method, stages, TUNED[:count])

    output = tmp_path / "out.safetensors"
    recipe = dare.Request.of(
        base=base, models=models, output=output, method=method, stages=stages, verbose=False
    )
    dare.merge(recipe)
    assert_same(load_file(output), expected)

    document = tmp_path / "recipe.toml"
    document.write_text(recipe.changed(output=tmp_path / "cli.safetensors").to_toml())
    assert main(["merge", str(document), "--quiet"]) == 0
    assert_same(load_file(tmp_path / "cli.safetensors"), expected)

    tensors = [{n: torch.from_numpy(a) for n, a in model.items()} for model in (BASE, *TUNED)]
    by_torch = merged_arrays(method, stages, tensors[1 : 1 + count], tensors[0])
    assert_same({name: tensor.numpy() for name, tensor in by_torch.items()}, expected)


@pytest.mark.parametrize("method", ["linear", "sum", "ties"])
def test_dare_merge_is_merge(files, tmp_path, method):
    output = tmp_path / "out.safetensors"
    base, models = files
    dare.dare_merge(base, models, output, RATE, 0.5, method, dtype="float32")
    stages = {"dare": {"drop_rate": RATE}}
    assert_same(load_file(output), merged_arrays(f"dare+{method}", stages, TUNED, scale=0.5))


def test_other_published_functions_are_merge(files, tmp_path):
    output = tmp_path / "out.safetensors"
    stages = {"dare": {"drop_rate": RATE}, "trim": {"keep_ratio": 0.3}}
    expected = merged_arrays("dare+trim+ties", stages, TUNED)
    dare.dare_ties_merge(*files, output, RATE, 0.3, dtype="float32")
    assert_same(load_file(output), expected)
    assert_same(dare.dare_ties_merge(TUNED, BASE, drop_rate=RATE, density=0.3), expected)
    stages = {"dare": {"drop_rate": RATE}}
    expected = merged_arrays("dare+slerp", stages, TUNED[:2])
    assert_same(dare.dare_slerp_merge(TUNED[0], TUNED[1], BASE, RATE), expected)
    expected = merged_arrays("dare+sum", stages, TUNED[:1])
    assert_same(dare.dare_sparsify(BASE, TUNED[0], RATE), expected)


def test_dropping_trimming_electing_and_averaging_step_by_step_are_the_chain():
    deltas = [{name: model[name] - BASE[name] for name in SHAPES} for model in TUNED]
    dropped = [dare.dare_drop(delta, RATE, seed=42 + i) for i, delta in enumerate(deltas)]
    trimmed = [dare.ties_trim(delta, 0.3) for delta in dropped]
    merged = dare.ties_disjoint_merge(trimmed, dare.ties_elect_sign(trimmed))
    stages = {"dare": {"drop_rate": RATE}, "trim": {"keep_ratio": 0.3}}
    zeros = {name: np.zeros_like(array) for name, array in BASE.items()}
    chain = merged_arrays("dare+trim+ties", stages, deltas, zeros)
    for name in SHAPES:  # a step rounds where the chain does not
        np.testing.assert_allclose(merged[name], chain[name], rtol=3e-7, err_msg=name)


# ---------------------------------------------------------------- trimming before ties


def test_which_doors_to_dare_ties_trim_and_to_what(files, tmp_path):
    """Only the published function does, to the share that each of its two publications has."""
    base, models = files
    rate, seed = {"drop_rate": 0.9}, 42
    whole, to_fifth, to_half = (
        merged_arrays(method, {"dare": rate, **trim}, TUNED, seed=seed)
        for method, trim in (
            ("dare+ties", {}),
            ("dare+trim+ties", {"trim": {"keep_ratio": 0.2}}),
            ("dare+trim+ties", {"trim": {"keep_ratio": 0.5}}),
        )
    )
    assert_same(dare.dare_ties_merge(TUNED, BASE), to_fifth)
    assert_same(dare.dare_ties_merge(TUNED, BASE, density=1.0), whole)

    output = tmp_path / "published.safetensors"
    report = dare.dare_ties_merge(base, models, output, dtype="float32")
    assert report.method == "dare+trim+ties"
    assert_same(load_file(output), to_half)
    output = tmp_path / "method.safetensors"
    report = dare.dare_merge(base, models, output, merge_method="ties", dtype="float32")
    assert report.method == "dare+ties"
    assert_same(load_file(output), whole)
    config = dare.DareConfig(method="dare+ties", verbose=False)
    output = tmp_path / "program.safetensors"
    dare.DareMerger(base_file=base, merge_files=models, config=config).merge(output)
    assert_same(load_file(output), whole)
