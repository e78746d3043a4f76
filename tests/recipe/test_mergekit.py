"""What a mergekit configuration becomes; tests/peers/test_yaml.py runs both programs."""

from __future__ import annotations

import tomllib

import numpy as np
import pytest
from safetensors.numpy import load_file

import dare
from dare.api import load_recipe
from dare.cli import main
from dare.errors import RecipeError
from dare.inputs.opening import convert_yaml, open_model
from dare.recipe.document import request_from_document
from helpers import save

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


@pytest.mark.parametrize(
    ("method", "parameters", "expected"),
    [
        ("task_arithmetic", "{}", {"method": "sum"}),
        ("dare_linear", "{}", {"method": "dare+sum", "dare": {"drop_rate": 0.0, "rescale": "l1"}}),
        (
            "dare_ties",
            "{density: [0.1, 0.4], normalize: 1}",
            {"method": "dare+ties", "dare": {"drop_rate": [0.9, 0.6], "rescale": "l1"}},
        ),
        ("ties", "{density: 0.2}", {"method": "ties", "ties": {"keep_ratio": 0.2}}),
        (
            "breadcrumbs",
            "{density: 0.4}",
            {
                "method": "breadcrumbs+sum",
                "breadcrumbs": {"keep_middle": 0.4, "drop_largest": 0.01},
            },
        ),
        (
            "breadcrumbs_ties",
            "{density: [0.4, 0.5], gamma: 0.2}",
            {
                "method": "breadcrumbs+ties",
                "breadcrumbs": {"keep_middle": [0.4, 0.5], "drop_largest": 0.2},
                "ties": {"divide_by": "nothing"},
            },
        ),
        (
            "della",
            "{density: 0.4}",
            {
                "method": "della+ties",
                "della": {"drop_rate": 0.6, "window": 0.3, "rescale": "l1"},
            },
        ),
        (
            "della_linear",
            "{density: 0.4, epsilon: [0.1, 0.05], lambda: 2}",
            {
                "method": "della+sum",
                "scale": 2.0,
                "della": {"drop_rate": 0.6, "window": [0.2, 0.1], "rescale": "l1"},
            },
        ),
        ("nuslerp", "{}", {"method": "nuslerp", "nuslerp": {"on": "deltas", "each": "tensor"}}),
        (
            "nuslerp",
            "{nuslerp_flatten: false}",
            {"method": "nuslerp", "nuslerp": {"on": "deltas", "each": "row"}},
        ),
    ],
)
def test_methods_with_two_models(convert, method, parameters, expected):
    found = document(convert(head(method, parameters=parameters) + TWO))
    files = {
        "base_file": "base",
        "merge_files": [{"file": "math", "weight": 0.7}, {"file": "code", "weight": 0.3}],
    }
    assert found == {"dtype": "F32", "models": files, **expected}


def test_normalize_divides_weights_by_their_sum(convert):
    models = "models: [{model: a, parameters: {weight: 3}}, {model: b, parameters: {weight: 1}}]"
    found = convert(head("task_arithmetic", parameters="{normalize: true}") + models)
    assert [entry.weight for entry in found.recipe.models] == [0.75, 0.25]
    assert any("divided by their sum" in text for text in found.differences)
    opposed = models.replace("weight: 1", "weight: -3")
    kept = convert(head("task_arithmetic", parameters="{normalize: true}") + opposed)
    assert [entry.weight for entry in kept.recipe.models] == [3, -3], "a sum of 0 divides nothing"


def test_a_mean_of_weights_has_its_first_model_as_base(convert):
    text = "merge_method: linear\n" + TWO
    found = convert(text)
    assert document(found)["models"] == {
        "base_file": "math",
        "merge_files": [{"file": "code", "weight": 0.3}],
    }
    assert found.recipe.method == "linear"
    assert any("math is the base" in text for text in found.differences)
    listed = TWO + "  - {model: base, parameters: {weight: 1}}\n"
    with_base = convert(head("linear") + listed).recipe
    assert str(with_base.base) == "base"
    assert [entry.weight for entry in with_base.models] == [0.35, 0.15]


def test_slerp_goes_from_the_base_to_the_other(convert):
    found = convert(
        head("slerp", "code", parameters="{t: [{filter: mlp, value: [0, 1]}, {value: 0.25}]}")
        + "models: [{model: math}]\n"
    )
    assert document(found) == {
        "method": "slerp",
        "dtype": "F32",
        "slerp": {"t": 0.25},
        "models": {"base_file": "code", "merge_files": ["code", "math"]},
        "tensors": [{"contains": ["mlp"], "t": [0.0, 1.0]}],
    }


def test_nuslerp_without_a_base_interpolates_the_models_themselves(convert):
    found = document(convert("merge_method: nuslerp\n" + TWO))
    assert found["nuslerp"] == {"on": "weights", "each": "tensor"}
    assert found["models"] == {
        "base_file": "math",
        "merge_files": [{"file": "math", "weight": 0.7}, {"file": "code", "weight": 0.3}],
    }


UNWEIGHTED = "models: [{model: math}, {model: code}]\n"


def test_a_mean_on_the_sphere_takes_the_base_in(convert):
    found = convert(head("karcher", parameters="{max_iter: 7}") + UNWEIGHTED)
    assert document(found)["models"] == {
        "base_file": "base",
        "merge_files": ["math", "code", "base"],
    }
    assert found.recipe.method == "karcher"
    assert any("stops after 7 steps" in text for text in found.differences)
    without = convert("merge_method: karcher\n" + UNWEIGHTED)
    assert document(without)["models"] == {"base_file": "math", "merge_files": ["math", "code"]}


def test_model_stock_has_no_weights(convert):
    found = convert(head("model_stock") + TWO)
    assert document(found) == {
        "dtype": "F32",
        "method": "model_stock",
        "models": {"base_file": "base", "merge_files": ["math", "code"]},
    }
    assert [note.split()[2] for note in found.notes] == ["weight", "weight"]


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


@pytest.mark.parametrize(
    ("method", "parameters"), [("dare_ties", "{}"), ("ties", "{normalize: false}")]
)
def test_without_normalize_the_models_that_agree_are_added_up(convert, method, parameters):
    found = document(convert(head(method, parameters=parameters) + TWO))
    assert found["method"].endswith("ties")
    assert found["ties"] == {"divide_by": "nothing"}


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
    notes = convert(text).notes
    found = [(note.partition(":")[0], note.split()[2]) for note in notes]
    assert found == [
        ("line 5", "weight"),
        ("line 9", "density"),
        ("line 10", "normalize"),
        ("line 12", "int8_mask"),
        ("line 13", "epsilon"),
    ]


def test_weights_that_change_but_add_up_to_the_same_can_be_divided(convert):
    models = """
models:
  - {model: a, parameters: {weight: [0.5, 2]}}
  - {model: b, parameters: {weight: [2, 0.5]}}
"""
    found = convert(head("dare_linear", parameters="{normalize: true}") + models)
    assert [entry.weight for entry in found.recipe.models] == [[0.2, 0.8], [0.8, 0.2]]


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
    found = convert(head("ties", tokenizer_source="union", chat_template="'{{ x }}'") + TWO).recipe
    assert (found.vocabulary, found.chat_template) == ("union", "{{ x }}")
    chosen = convert(head("ties", tokenizer="{source: math}") + TWO).recipe
    assert (chosen.vocabulary, chosen.copy_from) == ("error", "math")
    assert convert(head("ties", tokenizer="{}") + TWO).recipe.vocabulary == "union"
    assert convert(head("ties") + TWO).recipe.vocabulary == "error"


def test_an_adapter_of_the_base_is_a_model(convert):
    found = convert(head("task_arithmetic") + TWO.replace("code", "base+lora"))
    assert str(found.recipe.models[1].file) == "lora"
    assert any("adapter is merged as it is" in note for note in found.notes)


def test_models_may_be_tables(convert):
    models = """
models:
  - model: {model: {path: org/math, revision: v2}}
    parameters: {weight: 1}
  - model: {model: base, lora: org/adapter, override_architecture: X}
    parameters: {weight: 1}
"""
    found = convert(head("task_arithmetic") + models).recipe
    assert [str(entry.file) for entry in found.models] == ["org/math@v2", "org/adapter"]


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


def test_slices_that_tile_the_model_are_the_model(convert, tmp_path):
    found = convert(head("task_arithmetic") + SLICES)
    assert document(found)["models"]["merge_files"] == [{"file": "math", "weight": 1.0}]
    assert any("3 layers" in note for note in found.notes), "base is not here to be counted"

    weights = {f"layers.{layer}.w": np.ones(2, np.float32) for layer in range(3)}
    save(tmp_path / "base" / "model.safetensors", weights)
    assert convert(head("task_arithmetic") + SLICES).notes == ()


def test_slices_that_are_not_the_whole_model_are_refused(convert, tmp_path):
    weights = {f"layers.{layer}.w": np.ones(2, np.float32) for layer in range(4)}
    save(tmp_path / "base" / "model.safetensors", weights)
    with pytest.raises(RecipeError, match=r"m.yaml, line 5: slices end .* 4 in layers"):
        convert(head("task_arithmetic") + SLICES)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("{model: math, layer_range: [2, 3]", "{model: math, layer_range: [1, 2]", "line 8: .* 2 "),
        ("{model: math, layer_range: [0, 2]", "{model: math, layer_range: [0, 1]", "line 5: .* 0 "),
        ("[2, 3], parameters: {weight: 1}", "[2, 3], parameters: {weight: 2}", "line 8: .*first"),
        ("weight: 1", "weight: [1, 2]", "line 5: lists of values run over each slice"),
        ("[2, 3]", "[3, 2]", r"line 9: layer_range: \[3, 2\] holds no layers"),
        ("[2, 3]", "[2, x]", "line 9: layer_range: must be two whole numbers"),
        ("layer_range: [0, 2], ", "", "line 7: layer_range: must be"),
    ],
)
def test_slices_that_cannot_be_converted(convert, old, new, message):
    with pytest.raises(RecipeError, match=rf"m.yaml, {message}"):
        convert(head("task_arithmetic") + SLICES.replace(old, new))


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
        ("merge_methd: ties\n" + TWO, r"line 1: merge_methd: .*did you mean 'merge_method'"),
        (head("dare_lineer") + TWO, r"line 1: .*did you mean 'dare_linear'.*task_arithmetic"),
        (head("passthrough") + TWO, r"line 1: merge_method 'passthrough' cannot be converted"),
        (head("ties", random_seed="0") + TWO, r"line 4: random_seed: is a flag .* set seed"),
        (head("ties"), r"either models or slices"),
        (head("ties", models="[{model: 5}]"), r"line 4: model: must be text, and is 5"),
        (head("ties", models="[{model: a+b}]"), r"line 4: a\+b: an adapter .* which is base"),
        (head("ties") + TWO.replace("code", "math"), r"line 7: math: is given on line 6 already"),
        (head("ties") + TWO.replace("0.3", "x"), r"line 7: weight: must be a number, and is 'x'"),
        (head("ties") + TWO.replace("0.3", "[]"), r"line 7: weight is missing for code"),
        (head("ties") + TWO.replace("0.3", "[1, {value: 2}]"), r"line 7: weight: must be numbers"),
        (
            head("ties") + TWO.replace("0.3", "{filter: a, value: 1}"),
            r"line 7: weight is missing for tensors that no filter matches",
        ),
        (head("ties") + TWO.replace("0.3", "-1"), r"line 7: weight: is negative, and ties"),
        (head("ties", models="[{model: base}]"), r"line 1: only the base is given"),
        ("merge_method: ties\n" + TWO, r"line 1: base_model is missing; ties needs one"),
        (head("ties", parameters="{density: 0}") + TWO, r"line 4: density = 0: must be above 0"),
        (head("ties", parameters="{lambda: [1, 2]}") + TWO, r"line 4: lambda: must be one value"),
        (
            head("ties", parameters="{rescale: true, density: 0.5}") + TWO,
            r"line 4: rescale: what ties leaves",
        ),
        (
            head("della", parameters="{density: 0.1}") + TWO,
            r"epsilon = 0.15 at density = 0.1: .*lower epsilon",
        ),
        ("merge_method: linear\nparameters: {normalize: false}\n" + TWO.replace("7", "6"), "to 1"),
        (
            "merge_method: linear\n"
            + TWO.replace("0.7", "[{filter: a, value: 1}, {value: 2}]").replace(
                "0.3", "[{filter: b, value: 1}, {value: 2}]"
            ),
            r"line 5: weight: .*filters must be the same",
        ),
        (head("slerp") + TWO, r"line 1: slerp goes from the base to one other model, and 2"),
        (head("slerp", models="[{model: a}]"), r"line 1: t is missing"),
        (head("nuslerp", "math") + TWO, r"line 1: nuslerp merges two models"),
        ("merge_method: model_stock\n" + TWO, r"line 1: base_model is missing; model_stock"),
        (
            head("model_stock", parameters="{filter_wise: true}") + TWO,
            r"line 4: filter_wise: true: the angle",
        ),
        (head("sce") + TWO, r"line 1: merge_method 'sce' cannot be converted: it weighs .*these"),
        (head("ties").replace("float32", "float23") + TWO, r"line 3: 'float23' .*'float32'"),
        (head("ties", tokenizer_source="a", tokenizer="{}") + TWO, r"line 5: give either"),
        (head("ties", tokenizer="{pad_to_multiple_of: 8}") + TWO, r"line 4: pad_to_multiple_of"),
        (
            head("ties", slices="[{sources: [], residual_weight: 1}]"),
            r"line 4: residual_weight",
        ),
    ],
)
def test_what_cannot_be_converted_is_refused_with_its_line(convert, text, message):
    with pytest.raises(RecipeError, match=rf"^m\.yaml.*{message}"):
        convert(text)


# ---------------------------------------------------------------- what is converted can be merged

WITH_BASE = TWO + "  - {model: base}\n"
WEIGHTED_BASE = TWO + "  - {model: base, parameters: {weight: 0.5}}\n"
FROM_BASE = "models: [{model: base}, {model: math}]\n"
WHOLE = """slices:
  - sources:
      - {model: base, layer_range: [0, 3]}
      - {model: math, layer_range: [0, 3]}
"""
DELTAS = ("task_arithmetic", "ties", "dare_linear", "dare_ties", "breadcrumbs", "breadcrumbs_ties")
DELTAS += ("della", "della_linear")
WITHOUT_BASE = {method: f"merge_method: {method}\n" for method in ("linear", "nuslerp", "karcher")}
ARCS = "[{filter: self_attn, value: [0, 0.5, 1]}, {filter: mlp, value: [1, 0]}, {value: 0.5}]"
DENSITIES = "{density: [{filter: mlp, value: [0.2, 0.5]}, {value: 0.4}], epsilon: 0.1, gamma: 0.05}"

MERGED = {
    **{
        f"{method}, base {place}": head(method) + models
        for method in DELTAS
        for place, models in (("apart", TWO), ("among", WITH_BASE))
    },
    **{f"{method}, densities": head(method, parameters=DENSITIES) + TWO for method in DELTAS[1:]},
    **{
        f"{method}, one model": head(method)
        + FROM_BASE.replace("math", "math, parameters: {weight: 1}")
        for method in DELTAS
    },
    **{
        f"{method} without a base": text + (UNWEIGHTED if method == "karcher" else TWO)
        for method, text in WITHOUT_BASE.items()
    },
    **{
        f"slerp, t {t} {where}": head("slerp", base, parameters=f"{{t: {t}}}") + models
        for t in ("0.5", "[0, 0.5, 0.3, 0.7, 1]", ARCS)
        for where, base, models in (
            ("in slices", "base", WHOLE),
            ("to the base", "math", FROM_BASE),
            ("to another", "code", "models: [{model: math}]\n"),
        )
    },
    "linear, base weighted": head("linear") + WEIGHTED_BASE,
    "linear, base a model": head("linear", "math") + TWO,
    "nuslerp": head("nuslerp") + TWO,
    "nuslerp, base among": head("nuslerp") + WITH_BASE,
    "nuslerp, rows": head("nuslerp", parameters="{nuslerp_flatten: false}") + TWO,
    "nuslerp of the base": WITHOUT_BASE["nuslerp"] + TWO.replace("code", "base"),
    "karcher, base apart": head("karcher") + UNWEIGHTED,
    "karcher, base among": head("karcher") + FROM_BASE,
    "karcher, base a model": head("karcher", "math") + UNWEIGHTED,
    "model_stock": head("model_stock") + UNWEIGHTED,
    "model_stock, base among": head("model_stock") + UNWEIGHTED.replace("]", ", {model: base}]"),
    "della, lists": head("della", parameters="{density: [0.2, 0.8], epsilon: [0.1, 0.05]}") + TWO,
    "two slices": head("task_arithmetic") + SLICES,
    "tokenizer of the first": WITHOUT_BASE["linear"] + "tokenizer_source: math\n" + TWO,
    "tokenizer of a model": head("ties", tokenizer_source="code") + TWO,
    "tokenizer of the base": head("ties", "math", tokenizer_source="math") + TWO,
    "tokenizer of a namesake": head("ties", tokenizer_source="org/math")
    + TWO.replace("code", "org/math"),
    "filters of a namesake": head("ties")
    + TWO.replace("code", "org/math").replace("0.3", "[{filter: mlp, value: 1}, {value: 2}]"),
    **{f"stored as {kind}": head("ties", out_dtype=kind) + TWO for kind in ("bfloat16", "float16")},
}
NOT_MERGED = {
    "nuslerp from the base": (head("nuslerp", "math") + TWO, "delete base_model"),
    "tokenizer of another model": (head("ties", tokenizer_source="chat") + TWO, "line 4: chat"),
    "rates beyond 1 in some layers": (
        head("della", parameters="{density: [{filter: mlp, value: 0.5}, {value: [0.9, 0.5]}]}")
        + TWO,
        "use a window below",
    ),
    "layers in another order": (head("passthrough") + TWO, "passthrough"),
}


@pytest.fixture(scope="module")
def llamas(tmp_path_factory):
    """A base of three layers and fine-tunes of it, two of them with the same name."""
    folder = tmp_path_factory.mktemp("llamas")
    shapes = {"model.embed_tokens.weight": (12, 8), "model.norm.weight": (8,)}
    shapes |= {
        f"model.layers.{layer}.{part}.weight": shape
        for layer in range(3)
        for part, shape in {"self_attn.q_proj": (8, 8), "mlp.up_proj": (16, 8)}.items()
    }
    generator = np.random.default_rng(0)
    base = {name: generator.standard_normal(s, np.float32) for name, s in shapes.items()}
    for model in ("base", "math", "code", "org/math"):
        size = np.float32(0 if model == "base" else 0.01)
        tuned = {
            name: array + size * generator.standard_normal(array.shape, np.float32)
            for name, array in base.items()
        }
        save(folder / model / "model.safetensors", tuned)
    return folder


@pytest.mark.parametrize("text", MERGED.values(), ids=MERGED)
def test_what_is_converted_is_a_recipe_that_runs(llamas, tmp_path, monkeypatch, capsys, text):
    monkeypatch.chdir(llamas)
    (tmp_path / "their.yaml").write_text(text)
    assert main(["convert", str(tmp_path / "their.yaml")]) == 0
    (tmp_path / "ours.toml").write_text(capsys.readouterr().out)
    dare.merge(tmp_path / "ours.toml", output=tmp_path / "merged.safetensors", verbose=False)
    merged, base = map(open_model, (tmp_path / "merged.safetensors", llamas / "base"))
    assert {name: info.shape for name, info in merged.tensors.items()} == {
        name: info.shape for name, info in base.tensors.items()
    }


@pytest.mark.parametrize(("text", "remedy"), NOT_MERGED.values(), ids=NOT_MERGED)
def test_what_could_not_be_merged_is_not_converted(
    llamas, tmp_path, monkeypatch, capsys, text, remedy
):
    monkeypatch.chdir(llamas)
    (tmp_path / "their.yaml").write_text(text)
    assert main(["convert", str(tmp_path / "their.yaml")]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert remedy in told.err
    assert "their.yaml" in told.err


def test_a_slerp_converted_from_yaml_ends_at_its_models(llamas, tmp_path, monkeypatch):
    """Mergekit's t = 0 is base_model, wherever it stands."""
    monkeypatch.chdir(llamas)
    for t, end in ((0, "math"), (1, "base")):
        (tmp_path / "their.yaml").write_text(
            head("slerp", "math", parameters=f"{{t: {t}}}") + WHOLE
        )
        output = tmp_path / f"{end}.safetensors"
        dare.merge(tmp_path / "their.yaml", output=output, verbose=False)
        for name, array in load_file(llamas / end / "model.safetensors").items():
            np.testing.assert_allclose(load_file(output)[name], array, rtol=0, atol=2e-7)
