"""`trim` over all tensors of a model together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import dare
from dare.planning.cost import Cost
from dare.stages import STAGES

PER_MODEL = {"keep_ratio": 0.5, "scope": "model"}


def merge(models, backend="cpu", method="trim+sum", trim=PER_MODEL, **recipe):
    models = [
        {name: np.array(delta, np.float32) for name, delta in model.items()} for model in models
    ]
    base = {name: np.zeros_like(delta) for name, delta in models[0].items()}
    merged, _ = dare.merge_arrays(
        base, models, method=method, stages={"trim": trim}, verbose=False, backend=backend, **recipe
    )
    return merged


def trimmed(model, keep_ratio):
    """By a stable sort of all elements, tensors in the order of their names."""
    names = sorted(model)
    flat = np.concatenate([np.ravel(model[name]) for name in names])
    kept = np.argsort(-np.abs(flat), kind="stable")[: max(1, int(keep_ratio * flat.size))]
    result = np.zeros_like(flat)
    result[kept] = flat[kept]
    ends = np.cumsum([np.size(model[name]) for name in names])[:-1]
    parts = zip(names, np.split(result, ends), strict=True)
    return {name: part.reshape(np.shape(model[name])) for name, part in parts}


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_the_largest_of_all_tensors_are_kept(backend):
    merged = merge([{"large": [9, -8, 7], "small": [1, 2, -10]}], backend)
    assert merged["large"].tolist() == [9, -8, 0]
    assert merged["small"].tolist() == [0, 0, -10]


def test_of_equals_the_first_tensor_by_name_keeps_the_first():
    merged = merge([{"b": [5, 5, 1], "a": [0, 5, 5]}], trim={"keep_ratio": 0.5, "scope": "model"})
    assert merged["a"].tolist() == [0, 5, 5]
    assert merged["b"].tolist() == [5, 0, 0]


def test_each_model_has_its_own_cut():
    merged = merge([{"a": [4, 1], "b": [3, 2]}, {"a": [0.1, 0.2], "b": [0.4, 0.3]}])
    np.testing.assert_allclose(merged["a"], [4, 0])
    np.testing.assert_allclose(merged["b"], [3.4, 0.3])


def test_after_dare_survivors_count():
    delta = np.arange(1, 1001, dtype=np.float32)
    model = {"a": delta, "b": delta / 2}
    recipe = {"method": "dare+trim+sum"}
    merged = merge([model], trim={"keep_ratio": 0.5, "scope": "model"}, **recipe)
    dropped = merge([model], trim={"keep_ratio": 1.0}, **recipe)
    survivors = sum(np.count_nonzero(part) for part in dropped.values())
    assert sum(np.count_nonzero(part) for part in merged.values()) == survivors // 2


def test_tensors_of_another_ratio_are_ranked_among_themselves():
    model = {"a": [9, 8], "b": [7, 6], "c": [1, 2], "d": [3, 4]}
    rules = [{"match": ["c", "d"], "keep_ratio": 0.25}]
    merged = merge([model], tensors=rules)
    assert {name: part.tolist() for name, part in merged.items()} == {
        "a": [9, 8],
        "b": [0, 0],
        "c": [0, 0],
        "d": [0, 4],
    }


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("spare_bytes", [0, None])
def test_exact_over_chunks_threads_and_memory(threads, spare_bytes, monkeypatch):
    if spare_bytes is not None:
        monkeypatch.setattr(Cost, "spare_bytes", spare_bytes)
    generator = np.random.default_rng(0)
    shapes = {"a": (700, 1000), "b": (7,), "c": (40, 30), "empty": (0, 3), "scalar": ()}
    model = {
        name: (generator.standard_normal(shape) * 10).round(1).astype(np.float32)
        for name, shape in shapes.items()
    }
    merged = merge([model], trim={"keep_ratio": 0.3, "scope": "model"}, threads=threads)
    expected = trimmed(model, 0.3)
    for name in shapes:
        np.testing.assert_array_equal(merged[name], expected[name])


@pytest.mark.parametrize("keep_ratio", [0.001, 0.1, 0.9])
def test_exact_where_half_the_model_is_too_small_for_a_sample(keep_ratio):
    generator = np.random.default_rng(0)
    shapes = {"a": 70_000, "b": 60_000}
    model = {n: generator.standard_normal(size, np.float32) for n, size in shapes.items()}
    merged = merge([model], trim={"keep_ratio": keep_ratio, "scope": "model"})
    expected = trimmed(model, keep_ratio)
    for name in shapes:
        np.testing.assert_array_equal(merged[name], expected[name])


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.lists(st.integers(-5, 5), min_size=1, max_size=8), min_size=1, max_size=4),
    st.floats(0.01, 0.99),
)
def test_it_is_a_stable_sort(tensors, keep_ratio):
    model = {f"t{index}": np.array(part, np.float32) for index, part in enumerate(tensors)}
    merged = merge([model], trim={"keep_ratio": keep_ratio, "scope": "model"})
    expected = trimmed(model, keep_ratio)
    for name, part in merged.items():
        np.testing.assert_array_equal(part, expected[name])


def test_shards_do_not_change_it_and_the_plan_counts_the_passes(tmp_path):
    generator = np.random.default_rng(1)
    shapes = {"z": (30, 20), "a": (11,), "m": (5, 6)}
    base = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    tuned = {
        name: generator.integers(-3, 4, shape).astype(np.float32) for name, shape in shapes.items()
    }
    save_file(base, tmp_path / "base.safetensors")
    save_file(tuned, tmp_path / "tuned.safetensors")
    recipe = {
        "base": tmp_path / "base.safetensors",
        "models": [tmp_path / "tuned.safetensors"],
        "method": "trim+sum",
        "stages": {"trim": PER_MODEL},
        "verbose": False,
    }
    one = dare.Request.of(output=tmp_path / "one.safetensors", **recipe)
    assert dare.plan(one).cost.passes == 2
    dare.merge(one)
    dare.merge(dare.Request.of(output=tmp_path / "many", shard_size=500, **recipe))
    merged = load_file(tmp_path / "one.safetensors")
    for path in (tmp_path / "many").glob("*.safetensors"):
        for name, part in load_file(path).items():
            np.testing.assert_array_equal(part, merged[name])
    for name, part in trimmed(tuned, 0.5).items():
        np.testing.assert_array_equal(merged[name], part)


def test_an_error_while_observing_ends_the_merge(monkeypatch):
    def fail(*_arguments, **_settings):
        raise OSError("disk on fire")

    trim = STAGES["trim"]
    broken = replace(trim.census, rounds=(replace(trim.census.rounds[0], observe=fail),))
    monkeypatch.setitem(STAGES, "trim", replace(trim, census=broken))
    with pytest.raises(OSError, match="disk on fire"):
        merge([{"a": [1, 2], "b": [3, 4]}], threads=2)
