"""Merges inside merges, and stacks of layers."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import dare
from dare.run.nested import open_recipe
from dare.tensors.chunks import CHUNK
from helpers import save

LAYERS = 4
ROWS = CHUNK // 512 + 3  # so that one tensor has two chunks


def tensors(seed, kind=ml_dtypes.bfloat16):
    shapes = {"model.embed_tokens.weight": (ROWS, 512), "model.norm.weight": (7,)}
    shapes |= {"lm_head.weight": (ROWS, 7)}
    shapes |= {f"model.layers.{n}.{part}.weight": (9, 7) for n in range(LAYERS) for part in "qm"}
    generator = np.random.default_rng(seed)
    return {name: generator.normal(size=shape).astype(kind) for name, shape in shapes.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("models")
    base = tensors(0)
    save(found / "base.safetensors", base)
    for seed, name in enumerate(("math", "code", "chat"), start=1):
        change = tensors(seed, np.float32)
        tuned = {n: base[n] + (0.1 * change[n]).astype(base[n].dtype) for n in base}
        save(found / f"{name}.safetensors", tuned)
    return found


@pytest.fixture(autouse=True)
def _inside(folder, monkeypatch):
    monkeypatch.chdir(folder)


def recipe_of(*models, method="dare+linear", **more):
    return {"base": "base.safetensors", "models": list(models), "method": method, **more}


def merge(recipe, output, **more):
    return dare.merge(recipe, output=output, verbose=False, **more)


def save_folder(folder, arrays, config):
    """Save a model with its configuration; return the folder."""
    save(folder / "model.safetensors", arrays)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


MATH, CODE, CHAT = (f"{name}.safetensors" for name in ("math", "code", "chat"))
ELEMENT = recipe_of(MATH, CODE, dare={"drop_rate": 0.5})
INNER = {
    "element": ELEMENT,
    "tensor": recipe_of(MATH, CODE, method="trim+slerp"),
    "model": recipe_of(MATH, CODE, method="trim+ties", trim={"scope": "model"}),
    "matrix": recipe_of(MATH, CODE, method="iso+svc"),
    "wider": {**ELEMENT, "dtype": "F32"},
}


@pytest.mark.parametrize("outer", ["dare+linear", "trim+ties", "slerp"])
@pytest.mark.parametrize("inner", INNER)
def test_a_merge_of_a_result_is_that_of_the_written_result(tmp_path, inner, outer):
    first = merge(INNER[inner], tmp_path / "first.safetensors")
    written = recipe_of(str(tmp_path / "first.safetensors"), CHAT, method=outer)
    two = merge(written, tmp_path / "two.safetensors")
    one = merge(
        recipe_of({"recipe": INNER[inner]}, CHAT, method=outer), tmp_path / "one", threads=1
    )
    assert one.digests.output == two.digests.output
    assert one.digests.models[0] == first.digests.output


def test_a_result_may_be_the_base_and_a_merge_may_use_another(tmp_path):
    merges = {"first": ELEMENT, "second": recipe_of("first", CHAT, method="sum")}
    one = merge(
        {"base": "second", "models": [MATH], "merges": merges}, tmp_path / "one.safetensors"
    )
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    merge(ELEMENT, first)
    merge(recipe_of(str(first), CHAT, method="sum"), second)
    two = merge({"base": str(second), "models": [MATH]}, tmp_path / "two.safetensors")
    assert one.digests == two.digests


def test_a_result_has_the_same_bytes_whatever_is_read(folder):
    request = dare.api.make_request(recipe_of({"recipe": INNER["tensor"]}, CHAT))
    _, inputs = open_recipe(request.recipe)
    (source, _), name = inputs.models, "model.embed_tokens.weight"
    size = source.tensors[name].elements
    whole = np.empty(size, np.uint16)

    @settings(max_examples=20, deadline=None)
    @given(st.integers(0, size), st.integers(0, size))
    def check(one, other):
        start, end = sorted((one, other))
        part = np.empty(end - start, np.uint16)
        source.read(name, start, part)
        assert np.array_equal(part, whole[start:end])

    with source:
        source.read(name, 0, whole)
        check()


def test_what_is_not_finite_inside_is_refused(tmp_path):
    bad = load_file("math.safetensors")
    bad["model.norm.weight"][3] = np.nan
    save(tmp_path / "bad.safetensors", bad)
    inner = recipe_of(str(tmp_path / "bad.safetensors"), method="sum")
    with pytest.raises(dare.NotFiniteError, match=r"bad.*model\.norm\.weight"):
        merge(recipe_of({"recipe": inner}, CHAT), tmp_path / "one.safetensors")


def test_recipes_are_read_from_files_but_not_from_themselves(tmp_path):
    outer, inner = tmp_path / "outer.toml", tmp_path / "stage1.toml"
    inner.write_text(f'base = "base.safetensors"\nmodels = ["{MATH}", "{CODE}"]\n')
    outer.write_text(
        f'base = "base.safetensors"\nmodels = [{{recipe = "{inner}", weight = 0.25}}]\n'
    )
    recipe = dare.load_recipe(outer).recipe
    assert recipe.merges["stage1"] == dare.load_recipe(inner).recipe
    assert [(entry.name, entry.weight) for entry in recipe.models] == [("stage1", 0.25)]
    inner.write_text(f'base = "base.safetensors"\nmodels = [{{recipe = "{inner}"}}]\n')
    with pytest.raises(dare.RecipeError, match="itself"):
        dare.load_recipe(outer)
    merges = {"first": recipe_of("second"), "second": recipe_of("first")}
    with pytest.raises(dare.RecipeError, match=r"merges\.first.*itself"):
        dare.plan(recipe_of("first", merges=merges))


def test_a_merge_that_nothing_uses_is_refused():
    used = {"first": ELEMENT, "second": recipe_of("first", method="sum")}
    dare.plan(recipe_of("second", merges=used))
    dare.plan({"layers": [{"model": "second", "range": [0, 2]}], "merges": used})
    for outer in (recipe_of(MATH), STACK):
        with pytest.raises(dare.RecipeError, match=r"\[merges\.second\].*no effect"):
            dare.plan({**outer, "merges": {"second": {**ELEMENT, "base": "missing"}}})


@pytest.mark.parametrize("nests", [True, False])
def test_merges_deep_inside_each_other_are_refused(nests):
    inner, merges = dict(ELEMENT), {"0": ELEMENT}
    for number in range(200):
        inner = recipe_of({"recipe": inner}, method="sum")
        merges[f"{number + 1}"] = recipe_of(f"{number}", method="sum")
        if number == 2:
            dare.plan(inner)
    with pytest.raises(dare.RecipeError, match="too many merges"):
        dare.plan(inner if nests else recipe_of("200", merges=merges))


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        ({"output": "o"}, "top level"),
        ({"threads": 2}, "top level"),
        ({"metod": "sum"}, "method"),
        ({"models": []}, "name at least one"),
    ],
)
def test_what_is_wrong_inside_is_refused_with_its_place(wrong, remedy):
    with pytest.raises(dare.RecipeError, match=f"merges.first.*{remedy}"):
        dare.plan(recipe_of("first", merges={"first": {**ELEMENT, **wrong}}))


# ---------------------------------------------------------------- stacks


STACK = {
    "layers": [
        {"model": MATH, "range": [0, 3]},
        {"model": CODE, "range": [1, 4]},
        {**recipe_of(CODE, {"file": CHAT, "range": [2, 4]}, method="dare+sum"), "range": [0, 2]},
    ]
}


def test_a_stack_has_the_layers_of_its_models_in_order(tmp_path):
    merge(STACK, tmp_path / "out.safetensors")
    out, math, code = map(load_file, (tmp_path / "out.safetensors", MATH, CODE))
    assert len(out) == 3 + 2 * 8
    expected = [*((math, n) for n in range(3)), *((code, n) for n in range(1, 4))]
    for number, (model, layer) in enumerate(expected):
        for part in "qm":
            taken = model[f"model.layers.{layer}.{part}.weight"]
            assert np.array_equal(out[f"model.layers.{number}.{part}.weight"], taken)
    assert np.array_equal(out["model.embed_tokens.weight"], math["model.embed_tokens.weight"])


def test_a_range_is_a_merge_of_its_own(tmp_path):
    """The last two layers, and the head: as a merge of files that hold them under those names."""
    merge(STACK, tmp_path / "out.safetensors")

    def renamed(file, shift):
        found = {
            n: t for n, t in load_file(file).items() if n in ("lm_head.weight", "model.norm.weight")
        }
        for layer, part in ((layer, part) for layer in (0, 1) for part in "qm"):
            source = f"model.layers.{layer + shift}.{part}.weight"
            found[f"model.layers.{layer + 6}.{part}.weight"] = load_file(file)[source]
        return save(tmp_path / file, found)

    files = [renamed("base.safetensors", 0), renamed(CODE, 0), renamed(CHAT, 2)]
    alone = {"base": files[0], "models": files[1:], "method": "dare+sum"}
    merge(alone, tmp_path / "alone.safetensors")
    out, alone = load_file(tmp_path / "out.safetensors"), load_file(tmp_path / "alone.safetensors")
    assert len(alone) == 6
    assert all(np.array_equal(out[name], alone[name]) for name in alone)


@pytest.mark.parametrize("form", ["lora", "dora", "delta"])
def test_layers_of_a_change_are_those_of_the_model_that_it_makes(tmp_path, form):
    """A range of its own gives the bytes of the same change merged first, and written."""
    change = tmp_path / f"{form}.delta.safetensors"
    if form == "delta":
        dare.compress("base.safetensors", MATH, change, drop_rate=0.5, verbose=False)
    else:
        rng, factors = np.random.default_rng(4), {}
        for module in (f"base_model.model.model.layers.{n}.q" for n in range(LAYERS)):
            factors[f"{module}.lora_A.weight"] = rng.normal(size=(2, 7)).astype(np.float32)
            factors[f"{module}.lora_B.weight"] = rng.normal(size=(9, 2)).astype(np.float32)
            if form == "dora":
                factors[f"{module}.lora_magnitude_vector"] = rng.random(9).astype(np.float32)
        save(change / "adapter_model.safetensors", factors)
        config = {"peft_type": "LORA", "lora_alpha": 2, "r": 2, "use_dora": form == "dora"}
        (change / "adapter_config.json").write_text(json.dumps(config))
    written = tmp_path / "written.safetensors"
    merge(recipe_of(str(change), method="sum"), written)
    outputs = []
    for file in (change, written):
        models = {"file": str(file), "range": [0, 3]}
        layers = [
            {"model": CODE, "range": [0, 1]},
            {**recipe_of(models, method="sum"), "range": [1, 4]},
        ]
        report = merge({"layers": layers}, tmp_path / f"{len(outputs)}.safetensors")
        outputs.append(report.digests.output)
    assert outputs[0] == outputs[1]


def test_values_run_over_the_layers_of_a_range(tmp_path):
    one = {**recipe_of(CODE, method="sum", scale=1.0), "range": [0, 3]}
    one["models"] = [{"file": CODE, "weight": [0.0, 0.5, 1.0]}]
    merge(
        {"layers": [{"model": MATH, "range": [0, 1]}, one], "dtype": "F32"},
        tmp_path / "o.safetensors",
    )
    out, base, code = map(load_file, (tmp_path / "o.safetensors", "base.safetensors", CODE))
    for layer, share in enumerate((0.0, 0.5, 1.0)):
        name = f"model.layers.{layer}.q.weight"
        start, change = base[name].astype(np.float32), code[name].astype(np.float32)
        expected = start + np.float32(share) * (change - start)
        assert np.array_equal(out[f"model.layers.{layer + 1}.q.weight"], expected)


def test_a_stack_is_planned_repeated_sliced_and_verified(tmp_path):
    out, again = tmp_path / "out.safetensors", tmp_path / "again.safetensors"
    planned = dare.plan(STACK, output=out).to_dict()
    assert [row["layers"] for row in planned["layers"]] == [[0, 3], [3, 6], [6, 8]]
    assert planned["layers"][2]["from"][2] == {"model": CHAT, "range": [2, 4]}
    merge(STACK, out)
    assert dare.verify(out).ok
    assert dare.merge(out, output=again, verbose=False).digests.output
    assert out.read_bytes() == again.read_bytes()
    for part in ("1/2", "2/2"):
        plan = dare.plan(STACK, output=tmp_path / "sliced.safetensors", verbose=False)
        dare.merge_slice(plan, part)
    assert out.read_bytes() == (tmp_path / "sliced.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("layers", "remedy"),
    [
        ([{"model": MATH, "range": [0, 5]}], r"number 1: range = \[0, 5\].*4 layers"),
        ([{"model": MATH, "range": [2, 2]}], r"as in \[0, 16\]"),
        ([{"model": MATH}], "range"),
        ([{"model": MATH, "range": "0-2"}], r"as in \[0, 16\]"),
        ([{**recipe_of({"file": CODE, "range": "0-2"}), "range": [0, 2]}], r"as in \[0, 16\]"),
        ([{**recipe_of({"file": CODE, "range": [0, 3]}), "range": [0, 2]}], "hold 2 layers"),
        (
            [{"model": MATH, "range": [0, 1]}, {"model": "thin.safetensors", "range": [0, 1]}],
            "number 2",
        ),
    ],
)
def test_ranges_that_cannot_be_are_refused(layers, remedy):
    save(Path("thin.safetensors"), {n: t[..., :5] for n, t in load_file(MATH).items()})
    with pytest.raises(dare.DareError, match=remedy):
        dare.plan({"layers": layers})


def test_a_stack_takes_no_models_beside_it():
    with pytest.raises(dare.RecipeError, match="layers"):
        dare.plan({**STACK, "base": "base.safetensors", "models": [CODE], "method": "sum"})


def test_lists_of_a_configuration_have_the_values_of_their_layers(tmp_path):
    layers = []
    for name, kinds, span in (("a", "sfsf", [0, 3]), ("b", "ssff", [1, 4])):
        config = {"num_hidden_layers": 4, "layer_types": list(kinds), "sizes": [1, 2]}
        config["vision_config"] = {"num_hidden_layers": 4}
        folder = save_folder(tmp_path / name, load_file(MATH), config)
        layers.append({"model": folder, "range": span})
    merge({"layers": layers}, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["layer_types"] == list("sfs" + "sff")
    assert (written["num_hidden_layers"], written["sizes"]) == (6, [1, 2])
    assert written["vision_config"] == {"num_hidden_layers": 4}


def test_embedding_and_head_of_a_stack_have_the_same_rows(tmp_path):
    layers = [{"model": MATH, "range": [0, 2]}, {"model": CODE, "range": [2, 4]}]
    merge({"layers": layers}, tmp_path / "out.safetensors", pad_to_multiple_of=64)
    out = load_file(tmp_path / "out.safetensors")
    rows = {out[name].shape[0] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    assert rows == {-(-ROWS // 64) * 64}
    short = {n: t[:-1] if n == "lm_head.weight" else t for n, t in load_file(CODE).items()}
    save(tmp_path / "short.safetensors", short)
    with pytest.raises(dare.RecipeError, match="different tokens"):
        dare.plan(
            {"layers": [layers[0], {**layers[1], "model": str(tmp_path / "short.safetensors")}]}
        )


def test_a_model_is_passed_through_in_another_type(tmp_path):
    recipe = {"base": MATH, "models": [], "method": "passthrough"}
    merge(recipe, tmp_path / "out.safetensors", dtype="F32")
    out = load_file(tmp_path / "out.safetensors")
    assert all(np.array_equal(out[n], t.astype(np.float32)) for n, t in load_file(MATH).items())
    with pytest.raises(dare.RecipeError, match="name at least one"):
        dare.plan({**recipe, "method": "sum"})


def test_a_stack_of_models_whose_weights_mean_different_things_is_refused(tmp_path):
    for name, theta in (("one", 1e4), ("two", 5e5)):
        config = {"model_type": "llama", "rope_theta": theta, "layer_types": [name] * LAYERS}
        save_folder(tmp_path / name, tensors(1), config)
    ranges = [{"model": str(tmp_path / n), "range": [0, 2]} for n in ("one", "one", "two")]
    with pytest.raises(dare.MismatchError, match=r"number 2.*rope_theta is 500000.0"):
        dare.plan({"layers": ranges[1:]})
    dare.plan({"layers": ranges[:2]})
    mixed = {"base": str(tmp_path / "one"), "models": [str(tmp_path / "two")], "range": [0, 2]}
    with pytest.raises(dare.MismatchError, match="rope_theta"):
        dare.plan({"layers": [ranges[0], {**mixed, "method": "sum"}]})
