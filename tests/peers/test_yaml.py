"""mergekit's program on its own configurations, against ours on what they are converted to."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from mergekit.merge_methods.registry import registered_methods
from safetensors.torch import load_file, save_file
from side_by_side import assert_near, assert_within, compares

import dare
from dare.inputs.opening import convert_yaml
from dare.recipe.mergekit.methods import METHODS, NOT_CONVERTED

LAYERS = 4
HIDDEN, INNER, VOCABULARY = 32, 48, 101
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
PARTS = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.v_proj": (HIDDEN // 2, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}
SHAPES = {
    "model.embed_tokens.weight": (VOCABULARY, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    "lm_head.weight": (VOCABULARY, HIDDEN),
} | {
    f"model.layers.{layer}.{part}.weight": shape
    for layer in range(LAYERS)
    for part, shape in PARTS.items()
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base, fine-tunes of it that differ a little, two like one of them, and one far away."""
    found = tmp_path_factory.mktemp("llamas")
    generator = torch.Generator().manual_seed(0)

    def noise(size):
        return {name: size * torch.randn(s, generator=generator) for name, s in SHAPES.items()}

    base = noise(0.02)
    sizes = {"base": 0.0, "math": 0.001, "code": 0.001, "chat": 0.001, "far": 0.02}
    changes = {name: noise(size) for name, size in sizes.items()}
    for name in ("related", "alike"):  # to math, and to each other
        own = noise(0.001)
        changes[name] = {n: change + own[n] for n, change in changes["math"].items()}
    for name, change in changes.items():
        tensors = {n: base[n] + change[n] for n in base}
        (found / name).mkdir()
        save_file(tensors, found / name / "model.safetensors", metadata={"format": "pt"})
        (found / name / "config.json").write_text(json.dumps(CONFIG))
    return found


def weights_of(path: Path) -> dict[str, torch.Tensor]:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


PEER = "mergekit YAML"
ITERATED = ("karcher",)
"""Methods that mergekit approaches step by step, in float32, from angles that it rounds."""


def run_mergekit(file: Path, output: Path, *more: str) -> None:
    """Run the program mergekit-yaml, in this process: to start one takes longer than to merge."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it has many, and they are its own
        from mergekit.scripts.run_yaml import main

        flags = ["--no-copy-tokenizer", "--no-write-model-card", "--quiet", "--random-seed", "1"]
        main([str(file), str(output), *flags, *more], standalone_mode=False)


def merge_both(folder, tmp_path, monkeypatch, text):
    """Run both programs on one configuration; return both results and the conversion."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    file = tmp_path / "merge.yaml"
    file.write_text(text)
    run_mergekit(file, tmp_path / "theirs")
    conversion = convert_yaml(file)
    output = tmp_path / "ours.safetensors"
    dare.merge(conversion.recipe, output=output, verbose=False)
    ours, theirs = weights_of(output), weights_of(tmp_path / "theirs")
    assert ours.keys() == theirs.keys() == SHAPES.keys()
    return ours, theirs, conversion


TASK_ARITHMETIC = """
merge_method: task_arithmetic
base_model: base
dtype: float32
models:
  - model: math
    parameters:
      weight:
        - filter: mlp
          value: [0.25, 1.5, 0.5]
        - filter: self_attn.q
          value: 0.9
        - value: [0.1, 0.8]
  - model: base
  - model: code
    parameters:
      weight:
        - filter: norm
          value: 2
  - model: chat
parameters:
  lambda: 0.7
  weight: [-0.5, 0.5, 1e-1]
"""


NORMALIZED_GRADIENT = """
merge_method: dare_linear
base_model: base
dtype: float32
models:
  - {model: math, parameters: {weight: [0.5, 2, 1.5], density: 1.0}}
  - {model: code, parameters: {weight: [2, 0.5, 1.0]}}
parameters: {normalize: true}
"""

DARE_LINEAR = """
merge_method: dare_linear
base_model: base
dtype: float32
models:
  - {model: math, parameters: {weight: 0.3, density: 1.0}}
  - {model: code, parameters: {weight: -0.7}}
"""

DARE_TIES = """
merge_method: dare_ties
base_model: base
dtype: float32
models:
  - {model: math, parameters: {weight: 0.5}}
  - {model: code, parameters: {weight: [0.25, 0.75]}}
  - {model: chat, parameters: {weight: 0.4}}
parameters: {normalize: true, int8_mask: true, lambda: 1.5}
"""

DARE_TIES_AS_USUAL = DARE_TIES.replace("normalize: true, ", "").replace("0.4", "-0.4")
TIES_WITHOUT_DIVISION = """
merge_method: ties
base_model: base
dtype: float32
models:
  - {model: math, parameters: {weight: 1.0, density: 0.31}}
  - {model: code, parameters: {weight: [0.5, 2.0], density: 0.43}}
parameters: {normalize: false}
"""


TIES = """
merge_method: ties
base_model: base
dtype: float32
models:
  - model: math
    parameters:
      weight: 1.0
      density: [{filter: mlp, value: 0.31}, {filter: embed, value: 0.9}]
  - model: code
    parameters:
      weight: [0.5, 2.0]
      density: [0.21, 0.93]
  - model: chat
    parameters: {weight: 0.7}
parameters: {density: 0.43, lambda: 0.7}
"""


LINEAR = """
merge_method: linear
dtype: float32
models:
  - {model: math, parameters: {weight: [{filter: mlp, value: 3}, {value: 1}]}}
  - {model: code, parameters: {weight: [{filter: mlp, value: [1, 0]}, {value: 4}]}}
  - {model: far, parameters: {weight: [{filter: mlp, value: [2, 3]}, {value: 0.5}]}}
"""


SLERP = """
merge_method: slerp
base_model: far
dtype: float32
slices:
  - sources:
      - {model: base, layer_range: [0, 4]}
      - {model: far, layer_range: [0, 4]}
parameters:
  t:
    - filter: self_attn
      value: [0, 0.5, 0.3, 0.7, 1]
    - filter: mlp
      value: [1, 0.5, 0.7, 0.3, 0]
    - value: 0.4
"""

NUSLERP = """
merge_method: nuslerp
base_model: base
dtype: float32
models:
  - {model: math, parameters: {weight: 1}}
  - {model: far, parameters: {weight: 3}}
"""

NUSLERP_WITHOUT_BASE = """
merge_method: nuslerp
dtype: float32
models:
  - {model: far, parameters: {weight: [0.2, 0.9]}}
  - {model: base, parameters: {weight: [0.8, 0.1]}}
"""


NUSLERP_ROWS = NUSLERP + "parameters: {nuslerp_flatten: false}\n"
NUSLERP_COLUMNS = NUSLERP + "parameters: {nuslerp_flatten: false, nuslerp_row_wise: true}\n"

BREADCRUMBS = """
merge_method: breadcrumbs
base_model: base
dtype: float32
models:
  - model: math
    parameters:
      weight: 0.7
      density: [{filter: mlp, value: 0.31}, {filter: embed, value: 1.0}]
      gamma: 0.07
  - {model: code, parameters: {weight: [0.5, -2.0], density: [0.21, 0.93]}}
  - {model: chat, parameters: {weight: 1.0, gamma: 0.0}}
parameters: {density: 0.43, lambda: 0.7}
"""


BREADCRUMBS_TIES = """
merge_method: breadcrumbs_ties
base_model: base
dtype: float32
models:
  - {model: math, parameters: {weight: 0.5, density: 0.71, gamma: [0.05, 0.2]}}
  - {model: code, parameters: {weight: [0.25, 0.75]}}
  - {model: chat, parameters: {weight: 0.4}}
parameters: {density: 0.53, gamma: 0.02}
"""

BREADCRUMBS_TIES_WITH_DIVISION = BREADCRUMBS_TIES.replace("gamma: 0.02", "normalize: true")

DELLA_LINEAR = """
merge_method: della_linear
base_model: base
dtype: float32
models:
  - {model: math, parameters: {weight: 0.3, density: 1.0}}
  - {model: code, parameters: {weight: -0.7}}
parameters: {epsilon: 0.1}
"""

DELLA = """
merge_method: della
base_model: base
dtype: float32
models:
  - {model: math, parameters: {weight: 0.5}}
  - {model: code, parameters: {weight: [0.25, 0.75]}}
  - {model: chat, parameters: {weight: 0.4}}
parameters: {lambda: 1.5, density: 1.0}
"""

KARCHER = """
merge_method: karcher
dtype: float32
models:
  - {model: math}
  - {model: far}
  - {model: chat}
parameters: {max_iter: 100, tol: 1e-9}
"""

KARCHER_WITH_BASE = KARCHER.replace("dtype", "base_model: base\ndtype")

MODEL_STOCK = """
merge_method: model_stock
base_model: base
dtype: float32
models:
  - {model: related}
  - {model: math}
  - {model: alike}
parameters: {filter_wise: false}
"""

TWO_SLICES = """
merge_method: task_arithmetic
base_model: base
dtype: float32
slices:
  - sources:
      - {model: base, layer_range: [0, 1]}
      - {model: math, layer_range: [0, 1], parameters: {weight: [{filter: mlp, value: 2}]}}
    parameters: {weight: 0.5}
  - sources:
      - {model: base, layer_range: [1, 4]}
      - {model: math, layer_range: [1, 4], parameters: {weight: [{filter: mlp, value: 2}]}}
    parameters: {weight: 0.5}
"""


def compared(text, **more):
    """A configuration as a case, marked with its method."""
    return pytest.param(text, marks=compares(yaml.safe_load(text)["merge_method"], PEER), **more)


DETERMINISTIC = [
    compared(text, id=name)
    for name, text in list(globals().items())
    if isinstance(text, str) and "\ndtype: f" in text
]


@pytest.mark.parametrize("text", DETERMINISTIC)
def test_what_drops_nothing_at_random_is_equal_to_rounding(folder, tmp_path, monkeypatch, text):
    ours, theirs, conversion = merge_both(folder, tmp_path, monkeypatch, text)
    stored = [weights_of(folder / model) for model in sorted(folder.iterdir())]
    for tensor, merged in ours.items():
        # Some ten operations on either side, on numbers no larger than the models' and twice that.
        if conversion.recipe.method in ITERATED:
            assert_near(merged, theirs[tensor], 1e-5)
            continue
        magnitude = 2 * sum(model[tensor].abs() for model in stored)
        assert_within(merged, theirs[tensor], 8, magnitude)
    changed = [n for n in ours if not any(torch.equal(ours[n], model[n]) for model in stored)]
    assert len(changed) > len(SHAPES) / 2, "or this compares models with themselves"


RANDOM = """
merge_method: dare_linear
base_model: base
dtype: float32
models:
  - {model: math, parameters: {weight: 0.5, density: [0.2, 0.8]}}
"""


RANKED = RANDOM.replace("dare_linear", "della_linear").replace("0.5,", "0.5, epsilon: 0.1,")


@pytest.mark.parametrize("text", [RANDOM, RANKED], ids=["dare", "della"])
def test_what_is_dropped_at_random_is_dropped_at_the_same_rate(folder, tmp_path, monkeypatch, text):
    ours, theirs, conversion = merge_both(folder, tmp_path, monkeypatch, text)
    base, math = weights_of(folder / "base"), weights_of(folder / "math")
    assert any("other elements are dropped" in text for text in conversion.differences)
    for layer, rate in enumerate((0.8, 0.6, 0.4, 0.2)):
        names = [n for n in SHAPES if f"layers.{layer}." in n]
        count = sum(base[n].numel() for n in names)
        deviation = (rate * (1 - rate) / count) ** 0.5
        for merged in (ours, theirs):
            dropped = sum((merged[n] == base[n]).sum().item() for n in names)
            assert abs(dropped / count - rate) < 5 * deviation
    for name in (n for n in SHAPES if "proj" in n):
        kept = [(merged[name] - base[name]).abs().sum().item() for merged in (ours, theirs)]
        whole = 0.5 * (math[name] - base[name]).abs().sum().item()
        assert kept == pytest.approx([whole, whole], rel=1e-4), "both keep the L1 norm"


def test_what_is_not_rescaled_keeps_its_size(folder, tmp_path, monkeypatch):
    text = RANDOM + "parameters: {rescale: false}\n"
    ours, theirs, _ = merge_both(folder, tmp_path, monkeypatch, text)
    base, math = weights_of(folder / "base"), weights_of(folder / "math")
    for name in SHAPES:
        for merged in (ours, theirs):
            kept = merged[name] != base[name]
            expected = base[name] + 0.5 * (math[name] - base[name])
            assert torch.equal(merged[name][kept], expected[kept])


def test_storage_types_are_mergekits(folder, tmp_path, monkeypatch):
    text = DARE_LINEAR + "out_dtype: bfloat16\n"
    ours, theirs, _ = merge_both(folder, tmp_path, monkeypatch, text)
    assert {tensor.dtype for tensor in ours.values()} == {torch.bfloat16}
    for name, merged in ours.items():
        assert theirs[name].dtype == torch.bfloat16
        assert (merged != theirs[name]).float().mean() < 0.01  # where float32 rounded otherwise


REFUSED = {
    "layers are left out": SLERP.replace("[0, 4]", "[0, 3]"),
    "the minus would cancel": DARE_TIES.replace("0.4", "-0.4"),
    "the angle would be that of rows": MODEL_STOCK.replace("false", "true"),
    "what is left would be rescaled": BREADCRUMBS.replace("lambda: 0.7", "rescale: true"),
}


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_what_would_be_another_model_is_refused(folder, tmp_path, monkeypatch, text):
    monkeypatch.chdir(folder)
    (tmp_path / "merge.yaml").write_text(text)
    assert yaml.safe_load(text)["merge_method"]
    with pytest.raises(dare.RecipeError, match=r"merge.yaml, line \d+: "):
        convert_yaml(tmp_path / "merge.yaml")


def test_every_method_of_mergekit_is_converted_or_has_a_reason_why_not():
    known = {method.spec.name for method in registered_methods()}
    assert METHODS.keys() | NOT_CONVERTED.keys() == known
    assert not METHODS.keys() & NOT_CONVERTED.keys()


@pytest.mark.parametrize("method", METHODS)
def test_the_parameters_of_a_method_are_mergekits(method):
    spec = next(m.spec for m in registered_methods() if m.spec.name == method)
    ours = {*METHODS[method].of_models, *METHODS[method].of_all}
    theirs = {parameter.name for parameter in spec.parameters} - {"int8_mask"}
    if method == "task_arithmetic":
        theirs -= {"density", "rescale"}  # which change nothing where nothing is dropped
    assert ours == theirs
