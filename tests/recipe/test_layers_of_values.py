"""Parameters that change from layer to layer, and rules for parts of models."""

from __future__ import annotations

import json
import tomllib
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dare
from dare import ModelEntry, Recipe, RecipeError, TensorRule
from dare.recipe.document import request_from_document
from dare.recipe.layers import count_layers, find_depths, stack_and_layer, value_at
from helpers import sha256, write_recipe

LAYERS = 4
NAMES = [
    "model.embed_tokens.weight",
    *(f"model.layers.{layer}.{part}.weight" for layer in range(LAYERS) for part in ("mlp", "attn")),
    "model.norm.weight",
    "vision.blocks.0.weight",
    "vision.blocks.1.weight",
]


def make_arrays(models: int = 2):
    generator = np.random.default_rng(5)

    def new(size):
        return {n: size * generator.standard_normal((7, 9)).astype(np.float32) for n in NAMES}

    base = new(1.0)
    return base, [{n: base[n] + delta for n, delta in new(0.01).items()} for _ in range(models)]


def merged(**given):
    base, models = make_arrays()
    return dare.merge_arrays(base, models, verbose=False, **given)[0]


def assert_equal(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert value.tobytes() == right[name].tobytes(), name


def recipe(**given):
    return Recipe(**{"base": "b", "models": ["math", "code"], "method": "dare+ties", **given})


# ---------------------------------------------------------------- where a tensor stands


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model.layers.12.mlp.up_proj.weight", ("model.layers", 12)),
        ("h.3.attn.weight", ("h", 3)),
        ("transformer.blocks.0.experts.7.w", ("transformer.blocks", 0)),
        ("model.embed_tokens.weight", None),
        ("0.weight", None),
        ("layer12.weight", None),
        (
            "model.diffusion_model.output_blocks.3.1.transformer_blocks.0.attn1.to_q.weight",
            ("model.diffusion_model.output_blocks", 3),
        ),
        (
            "model.diffusion_model.middle_block.2.out_layers.3.weight",
            ("model.diffusion_model.middle_block", 0),
        ),
        ("mid_block.attentions.0.proj_in.weight", ("mid_block", 0)),
        ("model.diffusion_model.time_embed.2.weight", None),
        ("t_embedder.mlp.0.weight", None),
    ],
)
def test_the_layer_is_the_first_number_between_dots(name, place):
    assert stack_and_layer(name) == place


def test_each_stack_counts_its_own_layers():
    assert count_layers(NAMES) == {"model.layers": LAYERS, "vision.blocks": 2}
    depths = find_depths(NAMES)
    assert depths["model.layers.1.mlp.weight"] == Fraction(1, 3)
    assert depths["vision.blocks.1.weight"] == 1
    assert depths["model.embed_tokens.weight"] == depths["model.norm.weight"] == 0
    assert find_depths(["layers.0.w"]) == {"layers.0.w": 1}  # as t in mergekit
    # The autoencoder of diffusers goes down in one module, and up in another.
    names = ["encoder.down_blocks.1.w", "encoder.mid_block.resnets.0.w", "decoder.up_blocks.1.w"]
    depths = find_depths(["decoder.mid_block.resnets.0.w", *names])
    assert list(depths.values()) == [0, Fraction(1, 2), 1, 1]
    flux = [f"double_blocks.{i}.w" for i in range(19)] + [f"single_blocks.{i}.w" for i in range(38)]
    depths = find_depths(["img_in.weight", *flux, "final_layer.linear.weight"])
    assert [depths[name] * 56 for name in flux] == list(range(57))
    assert depths["img_in.weight"] == depths["final_layer.linear.weight"] == 0


# ---------------------------------------------------------------- values between numbers

numbers = st.floats(allow_nan=False, allow_infinity=False)
depths = st.fractions(0, 1)


@given(st.lists(numbers, min_size=1, max_size=6))
def test_the_ends_are_met(gradient):
    assert value_at(gradient, Fraction(0)) == gradient[0]
    assert value_at(gradient, Fraction(1)) == gradient[-1]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6), depths)
def test_between_the_ends_it_is_numpys_interpolation(gradient, depth):
    anchors = np.linspace(0, 1, len(gradient)) if len(gradient) > 1 else [0.0]
    expected = np.interp(float(depth), anchors, gradient)
    assert value_at(gradient, depth) == pytest.approx(expected, rel=1e-9, abs=1e-6)
    assert min(gradient) <= value_at(gradient, depth) <= max(gradient)


# ---------------------------------------------------------------- in a recipe


@pytest.mark.parametrize(
    "given",
    [
        {"stages": {"dare": {"drop_rate": [0.5, 0.9]}}},
        {"models": [ModelEntry(file="a", settings={"drop_rate": [0.5, 0.9]})]},
        {"tensors": [TensorRule(match="*", settings={"drop_rate": [0.5, 0.9]})]},
    ],
)
def test_a_number_may_be_a_list_wherever_it_stands(given):
    found = recipe(**given)
    rates = [found.settings_for("w", 0, Fraction(k, 2))[0]["drop_rate"] for k in range(3)]
    assert rates == [0.5, 0.7, 0.9]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dare": {"drop_rate": []}}, r"\[dare\] drop_rate = \[\]: .* at least one number"),
        ({"dare": {"drop_rate": [0.5, "x"]}}, r"\[dare\] drop_rate = .*'x' is not a number"),
        ({"dare": {"drop_rate": [0.5, True]}}, r"True is not a number"),
        ({"dare": {"drop_rate": [0.5, 1.0]}}, r"\[dare\] .*nothing to rescale"),
        ({"dare": {"rescale": [True, False]}}, r"\[dare\] rescale = \[True, False\]"),
        ({"ties": {"keep_ratio": [0.5, None]}}, r"\[ties\] keep_ratio .*None is not a number"),
        ({"ties": {"keep_ratio": [0.5, 0.0]}}, r"\[ties\] keep_ratio = 0.0: .*greater than 0"),
        ({"ties": {"divide_by": ["weights"]}}, r"\[ties\] divide_by"),
        (
            {"tensors": [TensorRule(contains="w", settings={"drop_rate": [0.5, 2.0]})]},
            r"tensors containing 'w': .*2\.0",
        ),
        (
            {"tensors": [TensorRule(match="w", model="cod", settings={"drop_rate": 0.5})]},
            r"tensors matching 'w' of model 'cod': there is no model 'cod' \(did you mean 'code'",
        ),
    ],
)
def test_a_value_that_does_not_fit_is_refused_with_its_place(given, message):
    with pytest.raises(RecipeError, match=message):
        recipe(**{"stages": given} if "tensors" not in given else given)


def test_lists_survive_toml():
    asked = recipe(
        stages={"dare": {"drop_rate": (0.5, 0.9)}, "ties": {"keep_ratio": [0.5]}},
        models=[ModelEntry(file="math", weight=(1, 2), settings={"drop_rate": (0.25, 0.5)}), "b"],
        tensors=[
            TensorRule(contains="mlp", weight=[0.5, 1.0], model="math"),
            TensorRule(match=[], contains=["a", "b"], settings={"drop_rate": [0.1, 0.2]}),
        ],
    )
    found = request_from_document(tomllib.loads(asked.to_toml()), "recipe").recipe
    assert found == asked
    assert found.weights() == ([1.0, 2.0], 1.0)
    assert found.described_rules() == asked.described_rules()


# ---------------------------------------------------------------- merged


def rules_by_layer(parameter, values):
    """What a gradient says, as a rule for each tensor."""
    return [
        TensorRule(match=name, settings={parameter: value_at(values, depth)})
        for name, depth in find_depths(NAMES).items()
    ]


@pytest.mark.parametrize(
    ("method", "stage", "parameter", "values"),
    [
        ("dare+linear", "dare", "drop_rate", [0.2, 0.9, 0.4]),
        ("trim+sum", "trim", "keep_ratio", [0.9, 0.1]),
        ("ties", "ties", "keep_ratio", [0.3, 1.0]),
        ("slerp", "slerp", "t", [0.0, 0.3, 1.0]),
    ],
)
def test_a_gradient_gives_the_bytes_of_rules_for_each_tensor(method, stage, parameter, values):
    by_rules = merged(method=method, tensors=rules_by_layer(parameter, values))
    assert_equal(merged(method=method, stages={stage: {parameter: values}}), by_rules)
    everywhere = TensorRule(contains=".", settings={parameter: values})
    assert_equal(merged(method=method, tensors=[everywhere]), by_rules)


def test_a_weight_that_changes_gives_the_bytes_of_rules_for_each_tensor():
    weights = ([0.0, 1.0], 0.5)
    rules = [
        TensorRule(match=name, model=f"model {model}", weight=value_at(weight, depth))
        for model, weight in enumerate(([0.0, 1.0], [0.5]))
        for name, depth in find_depths(NAMES).items()
    ]
    assert_equal(merged(method="sum", weights=weights), merged(method="sum", tensors=rules))


def test_what_was_done_is_recorded_and_can_be_repeated(tmp_path):
    base, models = make_arrays()
    asked = write_recipe(
        tmp_path,
        base,
        models,
        method="dare+ties",
        stages={"dare": {"drop_rate": [0.1, 0.8]}},
        tensors=[TensorRule(contains="mlp", model="model1", weight=[0.5, 2.0])],
    )
    dare.merge(asked)
    manifest = json.loads((tmp_path / "out.safetensors.manifest.json").read_text())
    assert manifest["stages"][0]["drop_rate"] == [0.1, 0.8]
    more = {"contains": ["mlp"], "models": [1], "weight": [0.5, 2.0]}
    assert manifest["tensors"] == [[None, {}, more]]
    assert dare.verify(tmp_path / "out.safetensors").ok

    again = dare.load_recipe(tmp_path / "out.safetensors")
    dare.merge(again.changed(output=tmp_path / "again.safetensors", verbose=False))
    assert sha256(tmp_path / "again.safetensors") == sha256(tmp_path / "out.safetensors")


def test_the_plan_has_every_tensors_own_values(tmp_path):
    base, models = make_arrays()
    asked = write_recipe(
        tmp_path,
        base,
        models,
        models=[
            ModelEntry(file=tmp_path / "model0.safetensors", weight=[0.0, 3.0]),
            tmp_path / "model1.safetensors",
        ],
        stages={"dare": {"drop_rate": [0.0, 0.9]}},
    )
    made = dare.plan(asked)
    found = {tensor.name: tensor for tensor in made.tensors}
    third = found["model.layers.2.attn.weight"]
    assert third.weights == (2.0, 0.5)
    assert third.settings_of(0)[0]["drop_rate"] == 0.6
    assert found["model.norm.weight"].weights == (0.0, 0.5)
    assert found["vision.blocks.1.weight"].weights == (3.0, 0.5)
    assert made.to_dict()["models"][0]["weight"] == [0.0, 3.0]
    assert dare.merge(made).models[0].weight == [0.0, 3.0]


# ---------------------------------------------------------------- rules


@pytest.mark.parametrize(
    ("rule", "matching", "others"),
    [
        ({"contains": ["mlp", "attn"]}, ["a.mlp.w", "a.attn.w"], ["norm.w"]),
        (
            {"contains": "mlp", "match": "*.weight"},
            ["x.mlp.weight"],
            ["x.mlp.bias", "x.attn.weight"],
        ),
        ({"contains": "*"}, [], ["w"]),
        (
            {"match": "layers.*.weight"},  # the whole name, in its case
            ["layers.0.attn.weight"],
            ["model.layers.0.weight", "layers.0.weight.scale", "LAYERS.0.weight"],
        ),
    ],
)
def test_contains_stands_beside_match_or_instead_of_it(rule, matching, others):
    assert list(filter(TensorRule(**rule).matches, [*matching, *others])) == matching


def rates(found, tensor):
    return [found.settings_for(tensor, model)[0]["drop_rate"] for model in range(2)]


def test_a_rule_may_be_for_one_model_by_name_or_file():
    for word in ("code", "models/code", "code.safetensors"):
        files = ["models/math", "code.safetensors" if word.endswith("tensors") else "models/code"]
        rule = TensorRule(contains="mlp", model=word, settings={"drop_rate": 0.25})
        found = recipe(models=files, tensors=[rule])
        assert rates(found, "mlp.w") == [0.9, 0.25]
        assert rates(found, "attn.w") == [0.9, 0.9]
