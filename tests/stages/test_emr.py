import json
import re

import numpy as np
import pytest
from combining import BACKENDS, combine, few_deltas, large_deltas, same_bits_however_cut
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

import dare
from dare.analysis.emr import emr_tasks, emr_weights, tasks_path
from helpers import write_recipe


@pytest.fixture(params=BACKENDS)
def merged(request):
    return lambda *deltas, **given: combine("emr", *deltas, backend=request.param, **given).tolist()


def test_the_largest_of_the_elected_sign(merged):
    # 3 + 1 - 2 > 0: 3; 1 + 2 - 4 < 0: -4; all agree: 6; 1 - 1 + 0 = 0
    assert merged([3, 1, 2, 1], [1, 2, 4, -1], [-2, -4, 6, 0]) == [3, -4, 6, 0]


def test_weights_count_in_the_vote_and_the_size(merged):
    # 3·1 - 2 > 0: 3·1
    assert merged([1], [-2], weights=[3, 1]) == [3]
    assert merged([1], [-np.inf], weights=[1, 0]) == [1]


def test_nans_come_through(merged):
    assert np.isnan(merged([np.nan, 1], [1, 1])).tolist() == [True, False]


@settings(max_examples=20)
@given(few_deltas(most=1))
def test_one_model_is_itself(deltas):
    assert (combine("emr", *deltas) == deltas[0]).all()


@settings(max_examples=20)
@given(few_deltas(), st.randoms())
def test_the_order_of_models_makes_no_difference(deltas, random):
    shuffled = random.sample(list(deltas), len(deltas))
    assert (combine("emr", *deltas) == combine("emr", *shuffled)).all()


@settings(max_examples=20)
@given(few_deltas(), st.sampled_from([-4.0, -1.0, 0.5, 1024.0]))
def test_scales_with_its_inputs(deltas, factor):
    expected = combine("emr", *deltas) * np.float32(factor)
    assert (combine("emr", *deltas * np.float32(factor)) == expected).all()


def test_over_many_chunks():
    deltas = large_deltas(3)
    found = same_bits_however_cut("emr", deltas)
    total = (deltas[0] + deltas[1]) + deltas[2]
    expected = np.where(total > 0, np.max(deltas, axis=0), np.min(deltas, axis=0))
    assert (found == expected).all()


# ---------------------------------------------------------------- tasks


def merge_to_file(folder, base, models, **settings):
    recipe = write_recipe(folder, base, models, method="emr", **settings)
    dare.merge(recipe)
    return recipe.output


def test_masks_and_scales_by_hand(tmp_path):
    base = {"w": np.full((3, 3), 8, np.float32), "n": np.array([1], np.float32)}
    first = np.array([[2, -1, 4], [0, 1, 3], [-2, 1, 1]], np.float32)
    second = np.array([[4, -3, -1], [2, 1, 1], [-2, -3, 0]], np.float32)
    models = [{"w": 8 + first, "n": base["n"]}, {"w": 8 + second, "n": base["n"] + 2}]
    output = merge_to_file(tmp_path, base, models)
    # The unified delta is [[4, -3, 4], [2, 1, 3], [-2, -3, 1]] and 2.
    scales = emr_tasks(output)
    # First: 15 of its own; it sees 4, 3, 4, 1, 3, 2, 1 = 18. Second: 17 + 2; 4 + 3 + 2 + 1 + 3 +
    # 2 + 3 + 2 = 20.
    assert scales == {"model0": 15 / 18, "model1": 19 / 20}
    with safe_open(tasks_path(output), "np") as file:
        assert json.loads(file.metadata()["tasks"]) == ["model0", "model1"]
    found = load_file(tasks_path(output))
    assert found["model0/w"].tolist() == [0b01110111, 0b1]
    assert found["model1/w"].tolist() == [0b11111011, 0b0]
    assert found["model0/n"].tolist() == [0]
    assert found["rescalers"].tolist() == [15 / 18, 19 / 20]

    weights = dict(emr_weights(output, "model1"))
    seen = np.array([[4, -3, 0], [2, 1, 3], [-2, -3, 0]], np.float32)
    assert (weights["w"] == 8 + np.float32(19 / 20) * seen).all()
    assert weights["n"].tolist() == [1 + np.float32(19 / 20) * 2]


def test_tasks_over_many_chunks(tmp_path):
    stored = [{"w": 1 + delta} for delta in large_deltas(2)]
    output = merge_to_file(tmp_path, {"w": np.ones_like(stored[0]["w"])}, stored)
    scales = emr_tasks(output)
    unified = load_file(output)["w"] - 1
    packed = load_file(tasks_path(output))
    for number, model in enumerate(stored):
        own = model["w"] - 1
        mask = own * unified > 0
        bits = np.unpackbits(packed[f"model{number}/w"], count=own.size, bitorder="little")
        assert (bits.reshape(own.shape) == mask).all()
        ratio = np.abs(own).sum(dtype=np.float64) / np.abs(unified[mask]).sum(dtype=np.float64)
        assert scales[f"model{number}"] == pytest.approx(ratio, rel=1e-12)
        (name, weights), *_ = emr_weights(output, f"model{number}")
        expected = 1 + np.where(mask, np.float32(scales[f"model{number}"]) * unified, 0)
        assert name == "w"
        assert (weights == expected.astype(np.float32)).all()


def test_a_task_sees_more_of_itself_than_in_the_unified_model(tmp_path):
    generator = np.random.default_rng(0)
    base = {"w": generator.standard_normal(5000).astype(np.float32)}
    models = [
        {"w": base["w"] + 0.1 * generator.standard_normal(5000).astype(np.float32)}
        for _ in range(3)
    ]
    output = merge_to_file(tmp_path, base, models)
    emr_tasks(output)
    unified = load_file(output)["w"]
    for number, model in enumerate(models):
        ((_, weights),) = emr_weights(output, f"model{number}")
        assert np.linalg.norm(weights - model["w"]) < 0.7 * np.linalg.norm(unified - model["w"])


def test_other_outputs_and_tasks_are_refused(tmp_path):
    base, model = {"w": np.zeros(4, np.float32)}, {"w": np.ones(4, np.float32)}
    recipe = write_recipe(tmp_path, base, [model], method="sum")
    dare.merge(recipe)
    with pytest.raises(dare.InputError, match="was merged by sum; tasks are those of emr"):
        emr_tasks(recipe.output)
    with pytest.raises(dare.InputError, match="expected the output of a merge"):
        emr_tasks(tmp_path / "model.bin")

    output = merge_to_file(tmp_path / "emr", base, [model])
    assert emr_tasks(output) == {"model0": 1.0}
    with pytest.raises(dare.OutputError, match=re.escape("out.emr.safetensors: exists already")):
        emr_tasks(output)
    assert emr_tasks(output, overwrite=True) == {"model0": 1.0}
    with pytest.raises(dare.InputError, match=r"no such task .did you mean 'model0'"):
        next(emr_weights(output, "model"))
