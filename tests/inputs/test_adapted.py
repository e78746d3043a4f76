"""Weights that adapters make of the base's: values by hand, the same bits whatever the range."""

import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import dare
from dare.errors import InputError
from dare.inputs import adapted
from dare.inputs.adapted import DoraMagnitudes
from dare.inputs.arrays import array_source
from dare.inputs.lora import CONFIG_NAME, WEIGHTS_NAME, open_adapter


def floats(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def adapter(folder, tensors, **config):
    folder.mkdir()
    given = {"peft_type": "LORA", "r": 2, "lora_alpha": 3, **config}
    (folder / CONFIG_NAME).write_text(json.dumps(given))
    named = {f"base_model.model.{name}": value for name, value in tensors.items()}
    save_file(named, folder / WEIGHTS_NAME)
    return folder


def merge(folder, base, tensors, prefix="", model_type=None, **config):
    """Merge an adapter onto a base, whose tensors may have a prefix, and read the result."""
    base_folder = folder / "base"
    base_folder.mkdir()
    save_file({prefix + n: v for n, v in base.items()}, base_folder / "model.safetensors")
    if model_type:
        (base_folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    models = [adapter(folder / "adapter", tensors, **config)]
    given = {"output": folder / "out", "method": "linear", "verbose": False}
    dare.merge(base=base_folder, models=models, **given)
    return load_file(folder / "out" / "model.safetensors")


A, B = floats(2, 6, seed=1), floats(5, 2, seed=2)
CONVOLUTION = {"w.lora_A.weight": floats(2, 3, 2, 2), "w.lora_B.weight": floats(5, 2, 1, 1)}


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize(
    ("factors", "model_type", "axis", "count"),
    [
        ({"w.lora_A.weight": A, "w.lora_B.weight": B}, None, 1, 5),
        ({"w.lora_A.weight": A, "w.lora_B.weight": B}, "gpt2", 0, 5),
        ({"w.lora_embedding_A": A, "w.lora_embedding_B": B}, None, 0, 5),
        (CONVOLUTION, None, (1, 2, 3), 5),
    ],
    ids=["linear", "inputs first", "embedding", "convolution"],
)
def test_dora_brings_the_changed_weights_to_its_magnitudes(
    tmp_path, factors, model_type, axis, count, prefix
):
    down, up = (np.float64(value).reshape(len(value), -1) for value in factors.values())
    change = 1.5 * (up @ down)
    change = change.T if axis == 0 else change
    shape = (5, *next(iter(factors.values())).shape[1:]) if axis == (1, 2, 3) else change.shape
    weight, magnitudes = floats(*shape, seed=3), 1 + np.abs(floats(count, seed=4))
    stored = {**factors, "w.lora_magnitude_vector": magnitudes}
    found = merge(tmp_path, {"w.weight": weight}, stored, prefix, model_type, use_dora=True)
    tuned = weight + change.reshape(shape)
    norms = np.sqrt(np.square(tuned).sum(axis=axis, keepdims=True))
    expected = tuned * magnitudes.reshape(norms.shape) / norms
    np.testing.assert_allclose(found[f"{prefix}w.weight"], expected, rtol=1e-5, atol=1e-6)


@settings(deadline=None, max_examples=60)
@given(
    sides=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    chunk=st.integers(1, 40),
    by_column=st.booleans(),
    data=st.data(),
)
def test_any_elements_are_those_of_the_whole(sides, chunk, by_column, data):
    rows, columns = sides
    weights = floats(rows * columns)
    source = array_source({"m": floats(columns if by_column else rows, seed=1)}, "adapter")

    def read(start, into):
        into[:] = weights[start : start + into.size]

    whole = np.empty_like(weights)
    DoraMagnitudes("m", rows, columns, by_column).fill(read, source, 0, whole)
    start = data.draw(st.integers(0, whole.size))
    found = np.empty(data.draw(st.integers(0, whole.size - start)), np.float32)
    with pytest.MonkeyPatch.context() as patch:
        if not by_column:  # the norms of columns are sums of chunks
            patch.setattr(adapted, "CHUNK", chunk)
        DoraMagnitudes("m", rows, columns, by_column).fill(read, source, start, found)
    assert found.tobytes() == whole[start:][: found.size].tobytes()


@pytest.mark.parametrize("by_column", [False, True])
def test_magnitudes_take_the_memory_that_is_said(by_column):
    rows, columns = 3000, 700
    source = array_source({"m": floats(columns if by_column else rows)}, "adapter")
    made = DoraMagnitudes("m", rows, columns, by_column)
    into = np.empty(adapted.CHUNK, np.float32)
    made.fill(lambda _, block: block.fill(1), source, 0, into[:1])  # fills caches
    made = DoraMagnitudes("m", rows, columns, by_column)
    tracemalloc.start()
    made.fill(lambda _, block: block.fill(1), source, 5, into)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < made.reading_bytes + 8 * rows * 8


TOKENS = {"e.token_adapter.trainable_tokens_delta": floats(3, 4, seed=5)}


@pytest.mark.parametrize("prefix", ["", "model."])
@pytest.mark.parametrize("rows", [[6, 0, 2], {"e": [6, 0, 2]}])
def test_rows_of_trained_tokens_replace_those_of_the_base(tmp_path, rows, prefix):
    weight = floats(7, 4)
    found = merge(tmp_path, {"e.weight": weight}, TOKENS, prefix, trainable_token_indices=rows)
    expected = weight.copy()
    expected[[6, 0, 2]] = TOKENS["e.token_adapter.trainable_tokens_delta"]
    result = found[f"{prefix}e.weight"]
    np.testing.assert_allclose(result, expected, rtol=1e-6, atol=1e-6)
    assert result[[1, 3, 4, 5]].tobytes() == weight[[1, 3, 4, 5]].tobytes()


DORA = {"w.lora_A.weight": A, "w.lora_B.weight": B, "w.lora_magnitude_vector": floats(5)}


@pytest.mark.parametrize(
    ("tensors", "config"),
    [
        ({k: v for k, v in DORA.items() if "magnitude" not in k}, {"use_dora": True}),
        ({"w.lora_magnitude_vector": floats(5)}, {"use_dora": True}),
        ({**DORA, "w.lora_magnitude_vector": floats(6)}, {"use_dora": True}),
        (DORA, {}),
        (TOKENS, {}),
        (TOKENS, {"trainable_token_indices": [0, 1, 7]}),
        (TOKENS, {"trainable_token_indices": [0, -1, 2]}),
        (TOKENS, {"trainable_token_indices": [0, 1]}),
        (TOKENS, {"trainable_token_indices": {"e": ["x"]}}),
        (TOKENS, {"trainable_token_indices": {"f": [0, 1, 2]}}),
        (
            {"f.token_adapter.trainable_tokens_delta": floats(1, 4)},
            {"trainable_token_indices": [1]},
        ),
        (
            {"e.lora_A.weight": floats(2, 4), "e.lora_B.weight": floats(7, 2), **TOKENS},
            {"trainable_token_indices": [0, 1, 2]},
        ),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, tensors, config):
    base = {"w.weight": floats(5, 6), "e.weight": floats(7, 4)}
    with pytest.raises(InputError):
        merge(tmp_path, base, tensors, **config)


def test_the_base_is_needed_and_must_fit(tmp_path):
    folder = adapter(tmp_path / "lone", DORA, use_dora=True)
    with pytest.raises(InputError, match="dare merge BASE ADAPTER"):
        open_adapter(folder)
    with pytest.raises(InputError, match="give the base that it was trained on"):
        merge(tmp_path, {"w.weight": floats(5, 7)}, DORA, use_dora=True)
