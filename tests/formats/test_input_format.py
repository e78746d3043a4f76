"""`format = "input"`: a merge of a quantised base is quantised as the base is."""

import json
import tomllib

import ml_dtypes
import numpy as np
import pytest
from encoding import decoded, merge, write_model
from encoding import stored as read

import dare
from dare.errors import RecipeError
from dare.recipe.recipe import Request
from helpers import save

E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
SCALES = {  # the ending of a scale's name, and the shape for 256×128
    "block": ("_scale_inv", (2, 1)),
    "row": ("_scale", (256, 1)),
    "one": ("_scale", ()),
}
EXCEPTED = ["lm_head", "model.layers.1.mlp.gate", "vision.layers.1.x"]


def weight(layer, kind):
    return f"model.layers.{layer}.mlp.{kind}.weight"


def fp8_tensors(seed, grid="block", *, is_static=False, spread=0.02):
    """Two layers, each with a weight in FP8 and a gate that is not."""
    generator = np.random.default_rng(seed)
    ending, shape = SCALES[grid]
    tensors = {"model.embed_tokens.weight": generator.normal(size=(9, 128)).astype(BF16)}
    for layer in range(2):
        values = np.random.default_rng(layer).normal(size=(256, 128)) * 0.1
        values += generator.normal(size=values.shape) * spread * 0.1
        rows = 256 // max(1, (*shape, 1)[0])
        scale = np.abs(values).reshape(-1, rows, 128).max(axis=(1, 2)).astype(np.float32) / 448
        codes = (values.reshape(-1, rows, 128) / scale[:, None, None]).astype(E4M3)
        tensors |= {
            weight(layer, "up"): codes.reshape(256, 128),
            weight(layer, "up") + ending: scale.reshape(shape),
            weight(layer, "gate"): generator.normal(size=(4, 128)).astype(BF16),
        }
        if is_static:
            name = weight(layer, "up").replace("weight", "input_scale")
            tensors[name] = np.array(0.5 + layer + seed, np.float32)
    return tensors


def write(folder, tensors, **settings):
    usual = {"quant_method": "fp8", "modules_to_not_convert": EXCEPTED}
    return write_model(folder, tensors, **{**usual, **settings})


def types(tensors):
    return {name: (array.dtype.name, array.shape) for name, array in tensors.items()}


@pytest.mark.parametrize("grid", SCALES)
def test_fp8_is_stored_as_the_base_has_it_and_reads_as_the_plain_merge(tmp_path, grid):
    base = write(tmp_path / "base", fp8_tensors(1, grid))
    tuned = write(tmp_path / "tuned", fp8_tensors(2, grid))
    models = [{"file": tuned, "weight": 0.5}]
    report = merge(base, *models, output=tmp_path / "out")
    plain = merge(base, *models, output=tmp_path / "plain", format=None)
    stored, merged = read(tmp_path / "out"), read(tmp_path / "plain")
    assert types(stored) == types(read(base))
    assert report.recoded.format == "FP8"
    assert set(report.recoded.tensors) == {weight(0, "up"), weight(1, "up")}
    for name, loss in report.recoded.tensors.items():
        apart = decoded({n: a for n, a in stored.items() if n.startswith(name)}, name)
        error = np.linalg.norm(apart - merged[name]) / np.linalg.norm(merged[name])
        assert loss.error == pytest.approx(error, rel=1e-4)
        assert 0.01 < error < 0.04
        assert np.abs(stored[name].astype(np.float32)).max() == 448
    for name in merged.keys() - report.recoded.tensors.keys():
        assert stored[name].tobytes() == merged[name].tobytes()
    assert report.digests.output == plain.digests.output
    configs = [json.loads((f / "config.json").read_text()) for f in (base, tmp_path / "out")]
    assert configs[0] == configs[1]
    assert dare.verify(tmp_path / "out").problems == ()
    again = merge(base, *models, output=tmp_path / "again", threads=3)
    assert again.recoded == report.recoded
    files = [(tmp_path / n / "model.safetensors").read_bytes() for n in ("out", "again")]
    assert files[0] == files[1]


def test_a_base_with_blocks_of_another_size_keeps_it(tmp_path):
    base = write(tmp_path / "base", fp8_tensors(1), weight_block_size=[200, 64])
    scale = {f"{weight(n, 'up')}_scale_inv": np.full((2, 2), 0.01, np.float32) for n in range(2)}
    for folder in (base, write(tmp_path / "tuned", {}, weight_block_size=[200, 64])):
        save(folder / "model.safetensors", fp8_tensors(1) | scale)
    merge(base, tmp_path / "tuned", output=tmp_path / "out")
    codes, grid = (read(tmp_path / "out")[weight(0, "up") + end] for end in ("", "_scale_inv"))
    found = codes.astype(np.float32) * np.repeat(np.repeat(grid, 200, 0), 64, 1)[:256]
    expected = read(base)[weight(0, "up")].astype(np.float32) * np.float32(0.01)
    np.testing.assert_allclose(found, expected, rtol=0.07, atol=1e-3)
    largest = np.abs(expected)[200:, 64:].max()
    assert grid[1, 1] == pytest.approx(largest / 448)


def test_scales_of_activations_are_the_bases_and_that_is_said(tmp_path):
    base = write(tmp_path / "base", fp8_tensors(1, is_static=True))
    tuned = write(tmp_path / "tuned", fp8_tensors(2, is_static=True))
    given = {"base": base, "models": [tuned], "output": tmp_path / "out", "verbose": False}
    planned = dare.plan(Request.of(**given, format="input"))
    assert [(n.code, n.subjects[0]) for n in planned.notes if "scales" in n.code] == [
        ("base_scales", "base")
    ]
    assert "not_weights" in [n.code for n in planned.notes if n.subjects[:1] == ("tuned",)]
    merge(base, tuned, output=tmp_path / "out")
    stored = read(tmp_path / "out")
    assert types(stored) == types(read(base))
    assert stored["model.layers.1.mlp.up.input_scale"] == 2.5
    plain = dare.plan(Request.of(**given))
    assert "plain_output" in [note.code for note in plain.notes]
    assert not [tensor.name for tensor in plain.tensors if "scale" in tensor.name]


def test_powers_of_two_stay_such_in_float32(tmp_path):
    tensors = fp8_tensors(1)
    base = write(tmp_path / "base", tensors, scale_fmt="ue8m0")
    merge(base, write(tmp_path / "tuned", fp8_tensors(2)), output=tmp_path / "out")
    scales = read(tmp_path / "out")[weight(0, "up") + "_scale_inv"]
    assert scales.dtype == np.float32
    assert (np.frexp(scales)[0] == 0.5).all()


def test_modelopts_own_configuration_comes_along(tmp_path):
    base = write(tmp_path / "base", fp8_tensors(1))
    (base / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    tuned = write(tmp_path / "tuned", fp8_tensors(2))
    for kind, is_there in (("input", True), (None, False)):
        folder = tmp_path / f"out {kind}"
        merge(base, tuned, output=folder, format=kind)
        assert (folder / "hf_quant_config.json").exists() == is_there


def test_a_merge_inside_a_merge_and_more_rows_keep_the_format(tmp_path):
    tensors = fp8_tensors(1, "row", is_static=True)
    head = {
        "lm_head.weight": np.ones((9, 128), E4M3),
        "lm_head.weight_scale": np.ones((9, 1), "f4"),
    }
    base = write(tmp_path / "base", {**tensors, **head})
    tuned = write(tmp_path / "tuned", {**fp8_tensors(2, "row"), **head})
    inner = {"base": base, "models": [{"file": tuned, "weight": 0.5}], "method": "linear"}
    given = {"merges": {"inner": inner}, "pad_to_multiple_of": 4}
    merge("inner", tuned, output=tmp_path / "out", **given)
    stored = types(read(tmp_path / "out"))
    assert {name: shape for name, (_, shape) in stored.items() if "head" in name} == {
        "lm_head.weight": (12, 128),
        "lm_head.weight_scale": (12, 1),
    }
    assert stored.keys() == read(base).keys()
    assert dare.merge(tmp_path / "out", output=tmp_path / "again", verbose=False).recoded
    files = [(tmp_path / n / "model.safetensors").read_bytes() for n in ("out", "again")]
    assert files[0] == files[1]


# ---------------------------------------------------------------- stacks


def stack(tmp_path, base, *parts):
    ranges = "".join(f'[[layers]]\nbase = "{part}"\nrange = {span}\n' for part, span in parts)
    text = f'base = "{base}"\noutput = "{tmp_path / "stack"}"\nformat = "input"\n{ranges}'
    return dare.merge({**tomllib.loads(text), "verbose": False})


def test_a_stack_has_scales_and_exceptions_for_all_its_layers(tmp_path):
    base = write(tmp_path / "base", fp8_tensors(1, is_static=True))
    stack(tmp_path, base, (base, [0, 2]), (base, [1, 2]))
    before, after = read(base), read(tmp_path / "stack")
    for kind in ("up", "gate"):
        assert after[weight(2, kind)].tobytes() == before[weight(1, kind)].tobytes()
    assert after["model.layers.2.mlp.up.input_scale"] == 2.5
    settings = json.loads((tmp_path / "stack" / "config.json").read_text())["quantization_config"]
    assert settings["modules_to_not_convert"] == [
        *("lm_head", "model.layers.1.mlp.gate", "model.layers.2.mlp.gate", "vision.layers.1.x")
    ]


def test_a_stack_of_models_in_different_formats_is_refused(tmp_path):
    base = write(tmp_path / "base", fp8_tensors(1))
    other = write(tmp_path / "other", fp8_tensors(2, "row"))
    tensors = fp8_tensors(3)
    for layer in range(2):
        tensors[weight(layer, "up")] = tensors[weight(layer, "up")].astype(BF16)
        del tensors[weight(layer, "up") + "_scale_inv"]
    plain = write(tmp_path / "plain", tensors)
    for part in (other, plain):
        with pytest.raises(RecipeError, match=r"layers.1.mlp.up.weight: .*leave format"):
            stack(tmp_path, base, (base, [0, 1]), (part, [1, 2]))
    same = write(tmp_path / "same", fp8_tensors(1), weight_block_size=[128, 128])
    blocks = write(tmp_path / "blocks", fp8_tensors(1), weight_block_size=[200, 200])
    for part in (other, blocks):
        with pytest.raises(RecipeError, match=r"mlp.up.weight: .*weight_block_size.*leave format"):
            stack(tmp_path, same, (part, [0, 2]))
    (plain / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}')
    with pytest.raises(RecipeError, match=r"config.json does not say .* take another base"):
        stack(tmp_path, plain, (base, [0, 1]), (base, [1, 2]))


# ---------------------------------------------------------------- other formats


def test_mxfp4_is_stored_as_the_base_has_it(tmp_path):
    name = "model.layers.0.mlp.experts.down_proj"
    generator = np.random.default_rng(0)
    tensors = {
        f"{name}_blocks": generator.integers(0, 256, (2, 5, 3, 16), np.uint8),
        f"{name}_scales": generator.integers(118, 122, (2, 5, 3), np.uint8),
        f"{name}_bias": generator.normal(size=(2, 5)).astype(BF16),
    }
    settings = {"quant_method": "mxfp4"}
    folders = [tmp_path / part for part in ("base", "tuned")]
    for number, folder in enumerate(folders):
        own = {**tensors, f"{name}_bias": tensors[f"{name}_bias"] + 1}
        write_model(folder, own, model_type="gpt_oss", **settings)
        tensors[f"{name}_scales"] = tensors[f"{name}_scales"] + np.uint8(number + 1)
    report = merge(*folders, output=tmp_path / "out")  # by linear with one model: the model itself
    assert report.recoded.format == "MXFP4"
    assert report.recoded.tensors[name].error == 0
    expected = read(folders[1])
    found = read(tmp_path / "out")
    assert types(found) == types(expected)
    assert decoded(found, name).tobytes() == decoded(expected, name).tobytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == settings
    halves = merge(folders[0], {"file": folders[1], "weight": 0.3}, output=tmp_path / "between")
    assert 0 < halves.recoded.tensors[name].error < 0.2


def test_what_cannot_be_written_is_refused_by_name(tmp_path):
    packed = {
        "l.weight": np.zeros((2, 8), np.uint8),
        "l.weight_scale": np.ones((2, 1), E4M3),
        "l.weight_scale_2": np.ones(1, np.float32),
    }
    plain = {"l.weight": np.ones((2, 16), np.float32)}
    for tensors, why in ((packed, "NVFP4 cannot be written"), (plain, "the base is not quantised")):
        base, tuned = (save(tmp_path / f"{n}.safetensors", tensors) for n in ("base", "tuned"))
        with pytest.raises(RecipeError, match=rf'format = "input": {why}.*leave format out'):
            merge(base, tuned, output=tmp_path / "out")
