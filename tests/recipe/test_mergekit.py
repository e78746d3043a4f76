"""What a mergekit configuration becomes; tests/peers/test_yaml.py runs both programs."""

from __future__ import annotations

import json
import re
import tomllib

import numpy as np
import pytest
from safetensors.numpy import load_file

import dare
from configurations import CONFIGURATIONS, REFUSED, REFUSED_HERE, Configuration
from dare.api import load_recipe
from dare.cli import main
from dare.errors import RecipeError
from dare.inputs.opening import convert_yaml, open_model
from dare.recipe.document import request_from_document
from dare.stores.locations import to_path
from helpers import save

UNWEIGHTED = "models: [{model: math}, {model: code}]\n"
ONE = "models: [{model: math}]\n"
MATH, CODE = ({"file": name, "weight": w} for name, w in (("math", 0.7), ("code", 0.3)))
TWO = """
models:
  - {model: math, parameters: {weight: 0.7}}
  - {model: code, parameters: {weight: 0.3}}
"""


@pytest.fixture
def convert(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def converted(text):
        (tmp_path / "m.yaml").write_text(text)
        return convert_yaml("m.yaml")

    return converted


def document(conversion):
    return conversion.recipe.to_document()


def head(method, base="base", **more):
    lines = [f"merge_method: {method}", f"base_model: {base}", "dtype: float32"]
    return "\n".join([*lines, *(f"{key}: {value}" for key, value in more.items())]) + "\n"


# ---------------------------------------------------------------- methods


# A method, its parameters, the method here, and its tables.
WEIGHTED = [
    ("task_arithmetic", "{}", "sum", {}),
    ("dare_linear", "{}", "dare+sum", {"dare": {"drop_rate": 0.0, "rescale": "l1"}}),
    (
        "dare_ties",
        "{density: [0.1, 0.4], normalize: 1}",
        "dare+ties",
        {"dare": {"drop_rate": [0.9, 0.6], "rescale": "l1"}},
    ),
    ("ties", "{density: 0.2}", "ties", {"ties": {"keep_ratio": 0.2}}),
    (
        "breadcrumbs",
        "{density: 0.4}",
        "breadcrumbs+sum",
        {"breadcrumbs": {"keep_middle": 0.4, "drop_largest": 0.01}},
    ),
    (
        "breadcrumbs_ties",
        "{density: [0.4, 0.5], gamma: 0.2}",
        "breadcrumbs+ties",
        {
            "breadcrumbs": {"keep_middle": [0.4, 0.5], "drop_largest": 0.2},
            "ties": {"divide_by": "nothing"},
        },
    ),
    (
        "della",
        "{density: 0.4}",
        "della+ties",
        {"della": {"drop_rate": 0.6, "window": 0.3, "rescale": "l1"}},
    ),
    (
        "della_linear",
        "{density: 0.4, epsilon: [0.1, 0.05], lambda: 2}",
        "della+sum",
        {"scale": 2.0, "della": {"drop_rate": 0.6, "window": [0.2, 0.1], "rescale": "l1"}},
    ),
    ("task_arithmetic", "{normalize: true}", "sum", {"sum": {"normalize": True}}),
    (
        "ties",
        "{density: 0.2, rescale: true}",
        "trim+ties",
        {"trim": {"keep_ratio": 0.2, "rescale": "l1"}},
    ),
    (
        "breadcrumbs",
        "{rescale: true}",
        "breadcrumbs+sum",
        {"breadcrumbs": {"keep_middle": 1.0, "drop_largest": 0.01, "rescale": "l1"}},
    ),
    ("nuslerp", "{}", "nuslerp", {"nuslerp": {"on": "deltas", "each": "tensor"}}),
    (
        "multislerp",
        "{normalize_weights: false}",
        "multislerp",
        {"multislerp": {"on": "deltas", "normalize": False}},
    ),
    (
        "nuslerp",
        "{nuslerp_flatten: false}",
        "nuslerp",
        {"nuslerp": {"on": "deltas", "each": "row"}},
    ),
]
WITHOUT_WEIGHTS = [
    ("model_stock", "{}", "model_stock", {}),
    ("model_stock", "{filter_wise: true}", "model_stock", {"model_stock": {"each": "row"}}),
    ("sce", "{}", "sce", {}),
    ("sce", "{select_topk: [0.2, 0.5]}", "sce", {"sce": {"select_ratio": [0.2, 0.5]}}),
    (
        "sce",
        "{select_topk: {filter: mlp, value: 0.2}}",
        "sce",
        {"sce": {"select_ratio": 1.0}, "tensors": [{"contains": "mlp", "select_ratio": 0.2}]},
    ),
    ("ram", "{epsilon: 1e-4}", "ram", {"ram": {"threshold": 0.0001}}),
    ("ramplus_tl", "{r: 0.2, alpha: 0.3}", "ramplus", {"ramplus": {"boost": 0.2, "most": 0.3}}),
]
OF_ONE_MODEL = [
    ("arcee_fusion", "{}", "arcee_fusion", {}),
    ("nearswap", "{t: 1e-4}", "nearswap+sum", {"nearswap": {"t": 0.0001}}),
]


@pytest.mark.parametrize(
    ("models", "listed", "case"),
    [
        *((TWO, [MATH, CODE], case) for case in WEIGHTED),
        *((UNWEIGHTED, ["math", "code"], case) for case in WITHOUT_WEIGHTS),
        *((ONE, ["math"], case) for case in OF_ONE_MODEL),
    ],
)
def test_methods_that_merge_changes_to_a_base(convert, models, listed, case):
    method, parameters, ours, tables = case
    found = convert(head(method, parameters=parameters) + models).document
    assert found == {"base": "base", "models": listed, "dtype": "float32", "method": ours, **tables}


@pytest.mark.parametrize("method", ["arcee_fusion", "nearswap"])
def test_methods_of_one_model_take_no_more(convert, method):
    with pytest.raises(RecipeError, match=r"line 1: .* 1 model into the base; 2 are given"):
        convert(head(method, parameters="{t: 1e-4}") + UNWEIGHTED)


def whole(base, models, method="linear", **more):
    return {"base": base, "models": models, "method": method, **more}


BASE_AMONG = TWO + "  - {model: base, parameters: {weight: 1}}\n"
SCALE = "[{filter: o_proj, value: 0}, {filter: mlp, value: [0.5, 1]}]"
MEAN = {"on": "weights", "normalize": True}
ON_BASE = {"dtype": "float32", **whole("base", [], "passthrough")}
SPHERE = {"on": "weights", "each": "tensor"}
# Configurations that do not merge changes to the base, and what they become.
WHOLE_MODELS = [
    ("merge_method: linear\n" + TWO, whole("math", [MATH, CODE], linear=MEAN)),
    (
        head("linear", "math", parameters="{normalize: false}") + TWO,
        whole("math", [MATH, CODE], dtype="float32", linear={"on": "weights"}),
    ),
    (
        head("linear") + BASE_AMONG,
        whole("base", [MATH, CODE, {"file": "base", "weight": 1}], dtype="float32", linear=MEAN),
    ),
    (head("ties", models="[{model: base}]"), ON_BASE),  # one model is copied
    ("merge_method: karcher\ndtype: float32\nmodels: [{model: base}]\n", ON_BASE),
    ("merge_method: passthrough\ndtype: float32\nmodels: [{model: base}]\n", ON_BASE),
    (
        f"merge_method: passthrough\nmodels: [{{model: math, parameters: {{scale: {SCALE}}}}}]\n",
        whole(
            "math",
            [{"file": "math", "weight": 1.0}],
            linear={"on": "weights"},
            tensors=[
                {"contains": "mlp", "model": "math", "weight": [0.5, 1.0]},
                {"contains": "o_proj", "model": "math", "weight": 0.0},
            ],
        ),
    ),
    (
        head("slerp", "code", parameters="{t: [{filter: mlp, value: [0, 1]}, {value: 0.25}]}")
        + "models: [{model: math}]\n",
        whole(
            "code",
            ["code", "math"],
            "slerp",
            dtype="float32",
            slerp={"t": 0.25},
            tensors=[{"contains": "mlp", "t": [0.0, 1.0]}],
        ),
    ),
    ("merge_method: nuslerp\n" + TWO, whole("math", [MATH, CODE], "nuslerp", nuslerp=SPHERE)),
    (
        head("karcher") + UNWEIGHTED,
        whole("base", ["math", "code", "base"], "karcher", dtype="float32"),
    ),
    ("merge_method: karcher\n" + UNWEIGHTED, whole("math", ["math", "code"], "karcher")),
]


@pytest.mark.parametrize(("text", "expected"), WHOLE_MODELS)
def test_methods_of_whole_models(convert, text, expected):
    assert convert(text).document == expected


@pytest.mark.parametrize(
    ("method", "weights", "expected"),
    [
        ("ties", "0.3", None),
        ("ties", "[1, -0.5]", {"divide_by": "signed"}),
        ("dare_ties", "0.3", {"divide_by": "nothing"}),
    ],
)
def test_ties_divides_as_mergekit_does(convert, method, weights, expected):
    found = convert(head(method) + TWO.replace("0.3", weights)).document
    assert found.get("ties") == expected


def test_steps_of_a_mean_on_the_sphere_are_a_difference_and_weights_are_noted(convert):
    found = convert(head("karcher", parameters="{max_iter: 7}") + UNWEIGHTED)
    assert any("stops after 7 steps" in text for text in found.differences)
    found = convert(head("model_stock") + TWO)
    assert found.document["models"] == ["math", "code"]
    assert [note.split()[0] for note in found.notes] == ["weight", "weight"]


def test_parameters_of_a_delta_may_be_a_models_own(convert):
    models = """
models:
  - {model: math, parameters: {weight: 1, density: 0.5, gamma: 0.1}}
  - {model: code, parameters: {weight: 1, density: [{filter: mlp, value: 0.7}, {value: 1}]}}
"""
    found = convert(head("breadcrumbs") + models).recipe
    settings = [found.settings_for("mlp.up", model)[0] for model in range(2)]
    assert [(s["keep_middle"], s["drop_largest"]) for s in settings] == [(0.5, 0.1), (0.7, 0.01)]
    assert found.settings_for("norm", 1)[0]["keep_middle"] == 1


# ---------------------------------------------------------------- parameters

FILTERS = """
models:
  - model: math
    parameters:
      weight: 1
      density:
        - filter: mlp.up
          value: 0.5
        - filter: mlp
          value: [0.2, 0.3]
  - model: code
    parameters:
      weight: [{filter: norm, value: 0}, {filter: "*", value: 2}, {filter: never, value: 3}]
parameters:
  density: [{filter: attn, value: 0.75}, {value: 0.9}]
"""


def test_the_first_filter_that_matches_counts_and_a_model_comes_before_all(convert):
    found = convert(head("dare_linear") + FILTERS).recipe

    def rates(tensor):
        return [found.settings_for(tensor, model)[0]["drop_rate"] for model in range(2)]

    assert rates("mlp.up") == [0.5, 0.1]
    assert rates("mlp.down") == [0.8, 0.1]
    assert rates("attn") == [0.25, 0.25]
    assert rates("other") == [0.1, 0.1]
    assert [found.weight_for("norm", model) for model in range(2)] == [1, 0]
    assert [found.weight_for("never", model) for model in range(2)] == [1, 2]


def test_what_has_no_effect_is_noted_with_its_line(convert):
    text = """merge_method: task_arithmetic
base_model: base
models:
  - model: base
    parameters: {weight: 5}
  - model: math
    parameters:
      weight: 1
      density: 0.5
      normalize: true
parameters:
  int8_mask: true
  epsilon: 0.1
"""
    found = convert(text)
    assert [note.partition(":")[0] for note in found.notes] == [
        "weight (line 5)",
        "density (line 9)",
        "normalize (line 10)",
        "int8_mask (line 12)",
        "epsilon (line 13)",
    ]
    assert found.summary.endswith("left out: weight, density, normalize, int8_mask, epsilon")


def test_what_means_nothing_to_mergekit_is_noted_and_left_out(convert):
    text = head("ties", random_seed="0", parameters="{densty: 0.5}")
    slip = TWO.replace("weight: 0.7", "weight: {pattern: mlp, value: 0.7}")
    found = convert(text + slip)
    assert found.document == convert(head("ties") + TWO).document
    assert [note.split()[0] for note in found.notes] == ["random_seed", "densty", "pattern"]
    assert "'density'" in found.notes[1]


# ---------------------------------------------------------------- the rest of a configuration


@pytest.mark.parametrize(
    ("lines", "dtype"),
    [
        ("", None),
        ("dtype: bfloat16", "BF16"),
        ("dtype: float32\nout_dtype: torch.float16", "F16"),
        ("out_dtype: float64", "F64"),
    ],
)
def test_types(convert, lines, dtype):
    found = convert(f"merge_method: task_arithmetic\nbase_model: b\n{lines}\n" + TWO)
    assert found.recipe.dtype == dtype
    assert any("float32" in text for text in found.differences) == ("dtype: float32" not in lines)


def test_tokenizer_and_template_are_carried_over(convert):
    found = convert(head("ties", tokenizer_source="union", chat_template="chatml") + TWO).document
    assert (found["vocabulary"], found["chat_template"]) == ("union", "chatml")
    for source, expected in {"math": "math", "base": "base", "union": "union"}.items():
        chosen = convert(head("ties", tokenizer=f"{{source: {source}}}") + TWO).document
        assert chosen["vocabulary"] == expected
    of_base = convert(head("ties", "org/b", tokenizer_source="org/b") + TWO).document
    assert of_base["vocabulary"] == "base"
    assert convert(head("ties", tokenizer="{}") + TWO).document["vocabulary"] == "union"
    assert "vocabulary" not in convert(head("ties") + TWO).document


@pytest.mark.parametrize(
    ("base", "source", "expected"),
    [
        *(("b", "union", "merge"), ("b", "math", "merge"), ("b", "base", "mean")),
        *(("", "union", "merge_all"), ("", "base", "merge_all")),
    ],
)
def test_new_rows_are_merged_as_mergekit_does(convert, base, source, expected):
    found = convert(head("nuslerp", base, tokenizer_source=source) + TWO)
    assert found.recipe.new_rows == expected
    assert any(text.startswith("padding:") for text in found.differences)


def test_rows_of_tokens(convert):
    tokens = """
tokenizer:
  pad_to_multiple_of: 8
  tokens:
    a: {source: math}
    b: {source: {kind: model_token, model: code, token: c}, force: true}
    c: {source: {kind: model_token, model: base, token_id: 7}}
    d: {source: {kind: zero}, force: true}
"""
    found = convert(head("ties") + TWO + tokens)
    assert found.document["pad_to_multiple_of"] == 8
    assert found.document["tokens"] == {
        "a": {"model": "math"},
        "b": {"model": "code", "token": "c", "force": True},
        "c": {"model": "base", "id": 7},
        "d": {"zero": True, "force": True},
    }
    assert found.differences[-1].startswith("padding:")


def test_a_model_with_an_adapter_is_a_merge(convert):
    found = convert(head("task_arithmetic", "x+y") + TWO.replace("code", "math+lora")).document
    assert found["base"] == "x+y"
    assert found["models"][1]["file"] == "math+lora"
    assert found["merges"] == {
        "x+y": {"base": "x", "models": ["y"], "method": "sum"},
        "math+lora": {"base": "math", "models": ["lora"], "method": "sum"},
    }


def test_models_may_be_tables(convert):
    models = """
models:
  - model: {model: {path: org/math, revision: v2}}
    parameters: {weight: 1}
  - model: {model: base, lora: org/adapter, override_architecture: X}
    parameters: {weight: 1}
"""
    found = convert(head("task_arithmetic") + models).document
    assert [entry["file"] for entry in found["models"]] == ["org/math@v2", "base+org/adapter"]


def test_merges_of_one_file_are_models_of_each_other(convert):
    first = "merge_method: linear\nname: ./out/a\n" + TWO
    last = head("ties", "./out/a") + TWO.replace("code", "out/b")
    found = convert(first + "---\n" + first.replace("out/a", "out/b") + "---\n" + last).document
    assert list(found["merges"]) == ["out/a", "out/b"]
    assert found["merges"]["out/a"]["method"] == "linear"
    assert (found["method"], str(to_path(found["base"]))) == ("ties", "out/a")
    assert convert(first.replace("name", "out_path") + "---\n" + last).document == {
        **found,
        "merges": {"out/a": found["merges"]["out/a"]},
    }
    alone = convert(first + "---\n" + first.replace("out/a", "b")).document
    assert (alone["method"], list(alone["merges"])) == ("linear", ["out/a"])
    for same in (first, "merge_method: linear\n" + TWO):
        with pytest.raises(RecipeError, match=r"line 1?[0-9]: name"):
            convert(same + "---\n" + same)


def test_aliases_and_merge_keys_are_followed(convert):
    text = """
models:
  - {model: a, parameters: &usual {weight: 0.5, density: 0.2}}
  - {model: b, parameters: *usual}
  - {model: c, parameters: {<<: *usual, weight: 2}}
"""
    found = document(convert(head("ties") + text))
    assert found["ties"] == {"keep_ratio": 0.2}
    assert [entry["weight"] for entry in found["models"]["merge_files"]] == [0.5, 0.5, 2.0]


def test_the_toml_says_what_is_different_and_gives_the_same_recipe(convert):
    found = convert(head("dare_linear") + FILTERS + "  int8_mask: true\n")
    text = found.to_toml()
    assert text.startswith("# Converted from m.yaml")
    assert all(f"# - {line}" in text for line in (*found.differences, *found.notes))
    assert request_from_document(tomllib.loads(text), "toml").recipe == found.recipe


def test_yaml_is_told_by_the_name(convert, tmp_path):
    whole = convert(head("ties") + TWO)
    other = tmp_path / "other.YML"
    other.write_bytes((tmp_path / "m.yaml").read_bytes())
    assert load_recipe(other).recipe == whole.recipe
    assert whole.recipe.output is None


# ---------------------------------------------------------------- slices

SLICES = """slices:
  - sources:
      - {model: base, layer_range: [0, 2]}
      - {model: math, layer_range: [0, 2], parameters: {weight: 1}}
  - sources:
      - {model: base, layer_range: [2, 3]}
      - {model: math, layer_range: [2, 3], parameters: {weight: 1}}
"""


def test_a_slice_of_all_layers_is_the_model(convert, tmp_path):
    one = SLICES.partition("  - sources:\n      - {model: base, layer_range: [2, 3]}")[0]
    stack = convert(head("task_arithmetic") + one).document
    assert list(stack) == ["base", "dtype", "layers"], "base is not here to be counted"
    weights = {f"layers.{layer}.w": np.ones(2, np.float32) for layer in range(2)}
    save(tmp_path / "base" / "model.safetensors", weights)
    whole = convert(head("task_arithmetic") + one).document
    assert whole["models"] == [{"file": "math", "weight": 1.0}]
    weights["layers.2.w"] = weights["layers.0.w"]
    save(tmp_path / "base" / "model.safetensors", weights)
    assert convert(head("task_arithmetic") + one).document == stack


def test_slices_are_a_stack(convert):
    second = SLICES.replace("math, layer_range: [2, 3]", "math, layer_range: [0, 1]")
    found = convert(head("task_arithmetic", parameters="{lambda: 0.5}") + second).document
    shared = {"base": "base", "method": "sum", "scale": 0.5}
    assert found == {
        "base": "base",
        "dtype": "float32",
        "layers": [
            {"range": [0, 2], "models": [{"file": "math", "weight": 1.0}], **shared},
            {
                "range": [2, 3],
                "models": [{"file": "math", "range": [0, 1], "weight": 1.0}],
                **shared,
            },
        ],
    }


def test_layers_that_are_copied(convert):
    text = """merge_method: passthrough
slices:
  - sources: [{model: a, layer_range: [0, 8]}]
  - sources: [{model: b+c, layer_range: [4, 12], parameters: {scale: 0.5}}]
"""
    found = convert(text).document
    assert found["layers"][0] == {"model": "a", "range": [0, 8]}
    assert found["layers"][1] == {
        "range": [4, 12],
        "base": "b+c",
        "models": [{"file": "b+c", "weight": 0.5}],
        "method": "linear",
        "linear": {"on": "weights"},
    }
    assert list(found["merges"]) == ["b+c"]


def test_a_slice_has_parameters_and_a_base_of_its_own(convert):
    own = "    parameters: {weight: 2}\n    base_model: math\n"
    found = convert(head("task_arithmetic") + SLICES.replace("1}}\n  -", "1}}\n" + own + "  -"))
    first, second = found.document["layers"]
    assert (first["base"], second["base"]) == ("math", "base")
    assert first["models"] == [{"file": "base", "weight": 2.0}]


def test_a_last_slice_of_more_models_is_a_difference(convert):
    text = SLICES.replace("      - {model: base, layer_range: [0, 2]}\n", "")
    text = text.replace(
        "base, layer_range: [2, 3]", "base, layer_range: [2, 3], parameters: {weight: 1}"
    )
    found = convert("merge_method: linear\ndtype: float32\n" + text)
    assert [text.partition(":")[0] for text in found.differences] == ["head"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "{model: math, layer_range: [0, 2]",
            "{model: math, layer_range: [0, 1]",
            "line 5: .*leng",
        ),
        ("[2, 3]", "[3, 2]", r"line 9: layer_range: \[3, 2\] holds no layers"),
        ("[2, 3]", "[2, x]", "line 9: layer_range: must be two whole numbers"),
        ("layer_range: [0, 2], ", "", "line 7: layer_range: must be"),
        ("      - {model: base, layer_range: [0, 2]}\n", "", "line 5: .*not among the sources"),
    ],
)
def test_slices_that_cannot_be_converted(convert, old, new, message):
    with pytest.raises(RecipeError, match=rf"m.yaml, {message}"):
        convert(head("task_arithmetic") + SLICES.replace(old, new))


MODULES = """merge_method: linear
modules:
  vision_tower:
    models: [{model: a, parameters: {weight: 3}}, {model: b}]
    parameters: {weight: [{filter: mlp, value: 2}, {value: 4}]}
  text_decoder:
    models: [{model: a}, {model: b}]
    parameters: {weight: 5}
"""


def test_modules_are_rules(convert):
    found = convert(MODULES).document
    vision = ["*vision*", "*visual*"]
    assert [entry["weight"] for entry in found["models"]] == [5.0, 5.0]
    assert found["tensors"] == [
        {"match": vision, "model": "a", "weight": 3.0},
        {"match": vision, "model": "b", "weight": 4.0},
        {"match": vision, "contains": "mlp", "model": "b", "weight": 2.0},
    ]


def test_a_slice_of_all_layers_of_a_module_is_that_module(convert, tmp_path):
    names = ("vision.layers.2.w", "text.layers.1.w")
    save(tmp_path / "a.safetensors", {name: np.zeros(1, np.float32) for name in names})
    sources = "[{model: a, layer_range: [0, N]}, {model: b, layer_range: [0, N]}]"
    sliced = MODULES.replace("models: [{model: a}, {m", f"slices: [{{sources: {sources}}}] # [{{m")
    sliced, plain = (text.replace("model: a", "model: a.safetensors") for text in (sliced, MODULES))
    assert convert(sliced.replace("N", "2")).document == convert(plain).document
    with pytest.raises(RecipeError, match="only the layers"):
        convert(sliced.replace("N", "3"))


def test_experts_that_are_stored_apart_are_named(convert, tmp_path):
    save(tmp_path / "base", {"layers.0.mlp.experts.1.w": np.zeros(1, np.float32)})
    found = convert(head("ties") + TWO)
    assert any(text.startswith("experts:") for text in found.differences)
    (tmp_path / "base").write_bytes(b"no model")
    assert convert(head("ties") + TWO).document == found.document


def test_a_lambda_by_filter_is_multiplied_into_the_weights(convert):
    lambdas = "[{filter: mlp, value: 0.5}, {filter: up, value: [2, 4]}]"
    text = head("task_arithmetic", parameters=f"{{lambda: {lambdas}}}") + TWO
    found = convert(text.replace("0.3", "[{filter: q_, value: 3}, {value: 2}]")).document
    assert [entry["weight"] for entry in found["models"]] == [0.7, 2]
    assert "scale" not in found
    assert found["tensors"] == [
        {"match": ["*up*"], "model": "math", "weight": [1.4, 2.8]},
        {"match": ["*mlp*"], "model": "math", "weight": 0.35},
        {"contains": "q_", "model": "code", "weight": 3},
        {"match": ["*up*"], "model": "code", "weight": [4, 8]},
        {"contains": "q_", "match": ["*up*"], "model": "code", "weight": [6, 12]},
        {"match": ["*mlp*"], "model": "code", "weight": 1},
        {"contains": "q_", "match": ["*mlp*"], "model": "code", "weight": 1.5},
    ]
    with pytest.raises(RecipeError, match=r"lambda.*multiply the weights"):
        convert(text.replace("0.3", "[2, 3]"))


def test_modules_without_a_rest_cover_the_model(convert):
    text = MODULES.replace("vision_tower", "encoder").replace("text_decoder", "blocks.")
    found = convert(text).document
    assert [entry["weight"] for entry in found["models"]] == [3.0, 4.0]
    assert {"match": ["*blocks.*"], "model": "a", "weight": 5.0} in found["tensors"]
    lacking = text.replace("    parameters: {weight: 5}\n", "")
    with pytest.raises(RecipeError, match="weight is missing for tensors"):
        convert(lacking)


def test_one_module_is_the_model(convert):
    text = "merge_method: linear\nmodules:\n  default:\n    parameters: {weight: 1}\n    "
    found = convert(text + UNWEIGHTED).document
    assert [entry["weight"] for entry in found["models"]] == [1.0, 1.0]
    sliced = "merge_method: passthrough\nmodules:\n  default:\n    "
    sliced += "slices: [{sources: [{model: a, layer_range: [0, 1]}]}]\n"
    assert convert(sliced).document["layers"] == [{"model": "a", "range": [0, 1]}]


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r": is empty"),
        ("a: [", r"line 1: not valid YAML"),
        ("a: !!python/object:os.system x", r"line 1: not valid YAML"),
        ("- a\n", r"line 1: a configuration: must be a table"),
        ("models: &a [*a]\n", r"line 1: contains itself"),
        ("merge_method: ties\nmerge_method: sum\n", r"line 2: merge_method is already on line 1"),
        ("base_model: b\n" + TWO, r"merge_method is missing"),
        ("merge_methd: ties\n" + TWO, r"line 1: .*merge_methd: .*did you mean 'merge_method'"),
        (head("dare_lineer") + TWO, r"line 1: .*did you mean 'dare_linear'.*task_arithmetic"),
        ("merge_method: passthrough\n" + TWO, r"line 1: passthrough copies one model; 2 are"),
        ("base_model: b\nexperts: []\n", r"line 1: is a mixture: dare moe m.yaml --output"),
        (head("ties"), r"either models, slices or modules"),
        (head("ties", slices="[]") + TWO, r"either models, slices or modules"),
        (head("ties", models="[{model: 5}]"), r"line 4: model: must be text, not 5"),
        (head("ties", models="[{model: a+b+c}]"), r"line 4: 'a\+b\+c' is not MODEL or"),
        (head("ties") + TWO.replace("code", "math"), r"line 7: math: is already given on line 6"),
        (head("ties") + TWO.replace("0.3", "x"), r"line 7: weight: must be a number, not 'x'"),
        (head("ties") + TWO.replace("0.3", "[]"), r"line 7: weight is missing for code"),
        (head("ties") + TWO.replace("0.3", "[1, {value: 2}]"), r"line 7: weight: must be numbers"),
        (
            head("ties") + TWO.replace("0.3", "{filter: a, value: 1}"),
            r"line 7: weight is missing for tensors that no filter matches",
        ),
        ("merge_method: ties\n" + TWO, r"line 1: base_model is missing; ties needs one"),
        (head("ties", parameters="{density: 0}") + TWO, r"line 4: density = 0: must be above 0"),
        (head("ties", parameters="{lambda: [1, 2]}") + TWO, r"line 4: lambda: must be one value"),
        (
            head("della", parameters="{density: 0.1}") + TWO,
            r"epsilon = 0.15 at density = 0.1: .*lower epsilon",
        ),
        (head("slerp") + TWO, r"line 1: slerp goes from the base to one other model, but 2"),
        (head("slerp", models="[{model: a}]"), r"line 1: t is missing"),
        *(
            (head("ties", models=f"[{{model: {m}}}]"), "line 4: .*ADAPTER")
            for m in ("a+", "+a", "''")
        ),
        (head("nuslerp", "math") + TWO, r"line 1: nuslerp merges two .* delete base_model"),
        ("merge_method: model_stock\n" + TWO, r"line 1: base_model is missing; model_stock"),
        (head("model_stock", models="[{model: a}]"), r"line 1: model_stock needs two"),
        (head("nearswap", models="[{model: a}]"), r"line 1: t is missing"),
        (
            MODULES.replace("[{model: a}, {model: b}]", "[{model: b}]"),
            r"line 7: modules: each must have the same",
        ),
        (head("ties").replace("float32", "float23") + TWO, r"line 3: 'float23' .*'float32'"),
        (head("ties", tokenizer_source="a", tokenizer="{}") + TWO, r"line 5: give either"),
        (head("ties", tokenizer_source="chat") + TWO, r"line 4: chat: is not one of the"),
        (head("ties", tokenizer="{tokens: {a: {force: true}}}") + TWO, r"line 4: source is miss"),
        (head("ties", tokenizer="{tokens: [a]}") + TWO, r"line 4: tokens: must be a table"),
    ],
)
def test_what_cannot_be_converted_is_refused_with_its_line(convert, text, message):
    with pytest.raises(RecipeError, match=rf"^m\.yaml.*{message}"):
        convert(text)


# ---------------------------------------------------------------- what is converted can be merged

RATES = "{density: [{filter: mlp, value: 0.5}, {value: [0.9, 0.5]}]}"
NOT_HERE = re.compile("gpt2|vlm|t5|with-tokens|experts")  # models that take transformers to make
CONVERTED = {given.name: given for given in CONFIGURATIONS if not NOT_HERE.search(given.text)}
CONVERTED |= {
    given.name: given
    for given in (
        Configuration(
            "rates beyond 1 in some layers", head("della", parameters=RATES) + TWO, REFUSED
        ),
        Configuration("stored in 16 bits", head("ties", out_dtype="float16") + TWO),
        Configuration("a namesake", head("ties") + TWO.replace("code", "org/math")),
    )
}


@pytest.fixture(scope="module")
def llamas(tmp_path_factory):
    """A base of four layers, fine-tunes of it, two of them with the same name, and adapters."""
    folder = tmp_path_factory.mktemp("llamas")
    inner = {"self_attn.q_proj": (8, 8), "self_attn.o_proj": (8, 8)}
    inner |= {"mlp.up_proj": (16, 8), "mlp.down_proj": (8, 16)}
    shapes = {"model.embed_tokens.weight": (12, 8), "model.norm.weight": (8,)}
    shapes |= {
        f"model.layers.{layer}.{part}.weight": shape
        for layer in range(4)
        for part, shape in inner.items()
    }
    shapes["lm_head.weight"] = (12, 8)
    generator = np.random.default_rng(0)
    base = {name: generator.standard_normal(s, np.float32) for name, s in shapes.items()}
    for model in ("base", "math", "code", "chat", "far", "related", "alike", "org/math"):
        size = np.float32(0 if model == "base" else 0.01)
        tuned = {
            name: array + size * generator.standard_normal(array.shape, np.float32)
            for name, array in base.items()
        }
        save(folder / model / "model.safetensors", tuned)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    for model in ("lora", "lora-too"):
        pair = {f"{name}A.weight": np.ones((2, 8), "f4"), f"{name}B.weight": np.ones((8, 2), "f4")}
        save(folder / model / "adapter_model.safetensors", pair)
        (folder / model / "adapter_config.json").write_text(json.dumps(config))
    return folder


def kinds(path):
    """The shapes of a model's tensors, whatever their layers."""
    return {re.sub(r"\d+", "N", n): info.shape for n, info in open_model(path).tensors.items()}


@pytest.mark.parametrize("name", CONVERTED)
def test_what_is_converted_is_a_recipe_that_runs(llamas, tmp_path, monkeypatch, capsys, name):
    monkeypatch.chdir(llamas)
    given, file = CONVERTED[name], tmp_path / "their.yaml"
    file.write_text(given.yaml)
    status, told = main(["convert", str(file)]), capsys.readouterr()
    if given.verdict in (REFUSED, REFUSED_HERE):
        assert (status, told.out) == (1, "")
        assert "their.yaml" in told.err
        return
    (tmp_path / "ours.toml").write_text(told.out)
    dare.merge(tmp_path / "ours.toml", output=tmp_path / "merged.safetensors", verbose=False)
    assert kinds(tmp_path / "merged.safetensors") == kinds(llamas / "base")


def test_a_slerp_converted_from_yaml_ends_at_its_models(llamas, tmp_path, monkeypatch):
    """Mergekit's t = 0 is base_model, wherever it stands."""
    monkeypatch.chdir(llamas)
    sources = ", ".join(f"{{model: {model}, layer_range: [0, 4]}}" for model in ("base", "math"))
    whole = f"slices: [{{sources: [{sources}]}}]"
    for t, end in ((0, "math"), (1, "base")):
        (tmp_path / "their.yaml").write_text(
            head("slerp", "math", parameters=f"{{t: {t}}}") + whole
        )
        output = tmp_path / f"{end}.safetensors"
        dare.merge(tmp_path / "their.yaml", output=output, verbose=False)
        for name, array in load_file(llamas / end / "model.safetensors").items():
            np.testing.assert_allclose(load_file(output)[name], array, rtol=0, atol=2e-7)


def test_a_merge_says_in_a_line_what_is_unlike_mergekit(llamas, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(llamas)
    file = tmp_path / "their.yml"
    file.write_text(head("dare_linear", parameters="{density: 0.5, densty: 1}") + TWO)
    assert main([str(file), "--output", str(tmp_path / "merged")]) == 0
    told = capsys.readouterr().out.split("unlike mergekit")[1]
    assert all(word in told for word in ("masks", "densty", "dare convert", "mergekit.md"))
    file.write_text(head("task_arithmetic") + TWO)
    assert main(["plan", str(file)]) == 0
    assert "unlike mergekit" not in capsys.readouterr().out
