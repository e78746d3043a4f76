"""Candidates in memory have the bytes that a merge writes, in arrays and in live models."""

import json

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import dare
from dare.errors import InputError
from dare.output import memory as live_memory
from dare.output.memory import OnDevice
from dare.recipe.recipe import Recipe
from dare.stages import STAGES
from dare.studies import candidates as under_test
from dare.tensors.chunks import CHUNK, bytes_digest
from dare.tensors.dtypes import STORAGE_TYPES, WEIGHT_TYPES
from helpers import save
from helpers import write_recipe as write_request

BF16 = ml_dtypes.bfloat16
SHAPES = {
    "model.embed_tokens.weight": (37, 8),
    "model.layers.0.mlp.weight": (24, 8),
    "model.layers.1.mlp.weight": (24, 8),
    "model.layers.2.mlp.weight": (24, 8),
    "model.norm.weight": (9,),
    "none": (0, 3),
    "scale": (),
}
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def numbers(shape, seed, dtype=BF16, base=0.0):
    values = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return np.asarray(np.asarray(base, np.float32) + values).astype(dtype)


def write_recipe(folder, base, tuned, **settings):
    return write_request(folder, base, tuned, **settings).recipe


def moved(base, seed):
    """A fine-tune: other weights, and whole numbers as they are."""
    return {
        name: array if array.dtype == np.int64 else numbers(array.shape, seed, array.dtype, array)
        for name, array in base.items()
    }


def small_models(dtype=BF16, count=3):
    base = {name: numbers(shape, 1, dtype) for name, shape in SHAPES.items()}
    base["steps"] = np.arange(5)
    return base, [moved(base, seed) for seed in range(2, 2 + count)]


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    return write_recipe(tmp_path_factory.mktemp("three"), *small_models())


@pytest.fixture(scope="module")
def held(three):
    return dare.Candidates(three)


def contents(arrays):
    return {name: (a.dtype, a.shape, a.tobytes()) for name, a in arrays.items()}


def check_like_merge(candidates, settings):
    """The digest and every byte are those of a merge to a file."""
    candidate = candidates.make(settings)
    report = dare.merge(candidate.recipe, overwrite=True, resume=False, verbose=False)
    assert candidate.digest == report.digests.output
    assert contents(candidate.arrays) == contents(load_file(report.output))
    return candidate


# ---------------------------------------------------------------- the bytes of a merge

SETTINGS = [
    {},
    {"drop_rate": 0.3, "scale": 0.7, "seed": 5},
    {"method": "dare+ties", "drop_rate": 0.5},
    {"method": "trim+linear", "trim.keep_ratio": 0.3, "trim.scope": "model"},
    {"method": "tsv+svc", "svc.alpha": 1.0},
    {"method": "darex+linear", "drop_rate": 0.5, "q": 0.7},
    {"drop_rate.model0": 0.1, "drop_rate.model2": 0.9, "weight.model1": 0.5, "seed.model1": 3},
    {"drop_rate": [0.1, 0.9], "weight.model0": [0.0, 1.0, 0.5]},
    {"embedding_drop_rate": 0.2},
    {"scale": 0.0},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_candidate_is_what_a_merge_writes(held, settings):
    candidate = check_like_merge(held, settings)
    if settings == {"scale": 0.0}:
        assert contents(candidate.arrays) == contents(load_file(held.recipe.base))


def test_two_models_by_slerp_with_a_large_tensor_and_two_threads(tmp_path):
    base = {"w": numbers(CHUNK + 9, 1), "b": numbers(3, 1)}
    recipe = write_recipe(tmp_path, base, [moved(base, 2), moved(base, 3)], threads=2)
    candidates = dare.Candidates(recipe)
    for settings in ({"method": "dare+slerp", "t": 0.3}, {"drop_rate": 0.7}):
        check_like_merge(candidates, settings)


def test_another_type_of_output(held):
    candidate = check_like_merge(held, held.recipe.changed(dtype="F16"))
    assert (candidate.arrays["scale"].dtype, candidate.arrays["steps"].dtype) == ("f2", "i8")


@pytest.mark.parametrize("policy", ["drop", "average"])
def test_rules_for_tensors_and_policies(tmp_path, policy):
    base, tuned = small_models()
    del tuned[0]["scale"]
    tuned[1]["model.norm.weight"] = numbers(5, 7)
    tuned[2]["more"] = numbers(4, 7)
    tuned[0]["more"] = numbers(4, 8)
    rule = dare.TensorRule(match="*.mlp.*", model="model1", weight=2.0, settings={"drop_rate": 0.2})
    policies = {"on_missing": "base", "on_mismatch": "base", "on_extra": policy}
    recipe = write_recipe(tmp_path, base, tuned, tensors=(rule,), **policies)
    found = check_like_merge(dare.Candidates(recipe), {"scale": 0.5})
    assert ("more" in found.arrays) == (policy == "average")


def tied_files(folder, **settings):
    """Embedding and head hold the same in the base and in the first model, not in the second."""
    base, tuned = small_models(count=2)
    for model in (base, tuned[0]):
        model[HEAD] = model[EMBEDDING].copy()
    tuned[1][HEAD] = numbers(SHAPES[EMBEDDING], 9)
    return write_recipe(folder, base, tuned, **settings)


def test_a_tied_tensor_is_held_once_and_merged_as_one(tmp_path):
    recipe = tied_files(tmp_path)
    alone = recipe.changed(models=recipe.models[:1])
    candidates = dare.Candidates(alone)
    candidate = check_like_merge(candidates, {"drop_rate": 0.5})
    assert candidate.arrays[HEAD].tobytes() == candidate.arrays[EMBEDDING].tobytes()
    stored = sum(np.prod(shape, dtype=int) for shape in SHAPES.values())
    assert candidates.memory_bytes == 2 * (2 * stored + 5 * 8)
    candidates = dare.Candidates(recipe)  # with the second, they are two tensors
    both = check_like_merge(candidates, {"drop_rate": 0.5})
    assert both.arrays[HEAD].tobytes() != both.arrays[EMBEDDING].tobytes()
    one = check_like_merge(candidates, alone)
    assert one.arrays[HEAD].tobytes() == one.arrays[EMBEDDING].tobytes()


@pytest.mark.parametrize("places", [(0,), (2,), (2, 0), (1, 2, 0)])
def test_some_of_the_models_in_any_order(held, three, places):
    models = tuple(three.models[place] for place in places)
    check_like_merge(held, three.changed(models=models, method="dare+ties"))


def write_adapter(folder):
    """An adapter of one layer."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["mlp"]}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    layer = "base_model.model.model.layers.1.mlp"
    tensors = {
        f"{layer}.lora_A.weight": numbers((2, 8), 4, np.float32),
        f"{layer}.lora_B.weight": numbers((24, 2), 4, np.float32),
    }
    save(folder / "adapter_model.safetensors", tensors)
    return folder


def write_delta(recipe, **scheme):
    file = recipe.base.with_name("tuned.delta.safetensors")
    dare.compress(recipe.base, recipe.models[0].file, file, verbose=False, **scheme)
    return file


@pytest.mark.parametrize(
    ("scheme", "settings"),
    [
        (None, {}),
        (None, {"method": "dare+ties"}),
        (None, {"weight.adapter": 0.0}),
        ({"drop_rate": 0.8}, {}),
        ({"drop_rate": 0.8}, {"method": "trim+ties", "scale": 0.5}),
        ({"drop_rate": 0.5, "bits": 4}, {"method": "sum"}),
        ({"lossless": True}, {"method": "dare+ties"}),
    ],
)
def test_an_adapter_or_a_delta_file_among_the_models(tmp_path, scheme, settings):
    recipe = write_recipe(tmp_path, *small_models(count=2))
    file = write_adapter(tmp_path / "adapter") if scheme is None else write_delta(recipe, **scheme)
    models = (recipe.models[1], dare.ModelEntry(file=file))
    check_like_merge(dare.Candidates(recipe.changed(models=models)), settings)


def test_a_delta_file_of_another_base_is_refused(tmp_path):
    base = {"w": numbers(1 << 16, 1)}
    recipe = write_recipe(tmp_path, base, [moved(base, 2)])
    delta = dare.ModelEntry(file=write_delta(recipe))
    base["w"][31111] += 1  # which no sample sees
    save(recipe.base, base)
    with pytest.raises(InputError, match="is a delta file for another base: w differs"):
        dare.Candidates(recipe.changed(models=(delta,))).make()


def test_inputs_must_have_the_digests_that_the_recipe_names(held, three):
    digests = dare.merge(three, overwrite=True, resume=False, verbose=False).digests
    right = (digests.base, *digests.models)
    assert held.make(three.changed(input_digests=right)).digest == digests.output
    wrong = (digests.base, *digests.models[::-1])
    with pytest.raises(InputError, match=r"model0\.safetensors: is not what it was"):
        held.make(three.changed(input_digests=wrong))


# ---------------------------------------------------------------- vocabularies


def write_model_folder(folder, words, values):
    """An embedding of two columns, and a tokenizer whose last words were added."""
    vocabulary = {word: number for number, word in enumerate(words) if len(word) == 1}
    added = [
        {"id": number, "content": word, "special": False, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for number, word in enumerate(words)
        if len(word) > 1
    ]
    document = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "a"},
    }
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps(document))
    matrix = np.array([[value, -value] for value in values], np.float32)
    save(folder / "model.safetensors", {EMBEDDING: matrix})
    return folder


def vocabulary_recipe(folder, policy):
    return Recipe(
        base=write_model_folder(folder / "base", "abc", (1, 2, 3)),
        models=[
            write_model_folder(folder / "math", ["a", "b", "c", "<x>", "<y>"], (2, 3, 4, 10, 20)),
            write_model_folder(folder / "code", ["a", "b", "c", "<y>"], (1, 1, 1, 40)),
        ],
        output=folder / "out.safetensors",
        method="linear",
        vocabulary=policy,
    )


@pytest.mark.parametrize("policy", ["union", "base", "code"])
def test_rows_of_other_vocabularies(tmp_path, policy):
    recipe = vocabulary_recipe(tmp_path, policy)
    candidates = dare.Candidates(recipe)
    for settings in ({}, {"weight.math": 3.0}, {"scale": 0.5}):
        check_like_merge(candidates, settings)
    for models in (recipe.models[1:], recipe.models[::-1]):
        check_like_merge(candidates, recipe.changed(models=models))


# ---------------------------------------------------------------- one after the other


def test_candidates_do_not_disturb_each_other_and_arrays_can_be_filled_again(held):
    first = held.make({"drop_rate": 0.3})
    before = contents(first.arrays)
    second = held.make({"drop_rate": 0.6})
    assert contents(first.arrays) == before != contents(second.arrays)
    assert held.make({"drop_rate": 0.3}).digest == first.digest != second.digest
    again = held.make({"drop_rate": 0.6}, into=first.arrays)
    assert all(again.arrays[name] is array for name, array in first.arrays.items())
    wide = {name: np.zeros((*a.shape, 2), a.dtype) for name, a in first.arrays.items()}
    held.make({"drop_rate": 0.6}, into={name: array[..., 1] for name, array in wide.items()})
    expected = contents(second.arrays)
    assert contents({n: a[..., 1].copy() for n, a in wide.items()}) == expected
    assert contents(again.arrays) == expected
    assert not any(array[..., 0].any() for array in wide.values())


def test_no_method_changes_what_is_held(tmp_path):
    base, tuned = small_models(count=2)
    base["w"], tuned[0]["w"], tuned[1]["w"] = (numbers((16, 16), seed) for seed in (1, 2, 3))
    for model in (base, *tuned):
        model["w"][0, 0] = np.inf  # which takes ways of its own
    candidates = dare.Candidates(write_recipe(tmp_path, base, tuned))
    deltas = [stage.name for stage in STAGES.values() if stage.kind == "delta"]
    combines = [
        stage.name
        for stage in STAGES.values()
        if stage.kind == "combine" and stage.models not in (0, 1) and not stage.takes_grams
    ]
    methods = [f"{name}+linear" for name in deltas] + [f"trim+{name}" for name in combines]
    for method in (*methods, "trim+ties+svc"):
        candidates.make({"method": method})
    for _, held in candidates._kept.values():
        for each in held.values():
            raw = each.elements
            assert each.digests == ([bytes_digest(raw.data)] if raw.size else [])


def test_files_are_needed_no_more_and_must_be_the_same_where_they_are(tmp_path):
    base, tuned = small_models()
    recipe = write_recipe(tmp_path, base, tuned)
    recipe_file = tmp_path / "recipe.toml"
    recipe_file.write_text(recipe.to_toml())
    candidates = dare.Candidates(recipe_file, threads=2)
    assert candidates.recipe == recipe
    assert candidates._plan(recipe)[1].options.threads == 2
    digest = dare.merge(recipe, verbose=False).digests.output
    recipe.models[0].file.unlink()
    assert candidates.make().digest == digest
    save(recipe.models[1].file, {**tuned[1], "scale": numbers((), 77)})
    with pytest.raises(InputError, match=r"model1\.safetensors: changed since it was read"):
        candidates.make(recipe.changed(models=recipe.models[1:2]))
    for other in ({"models": ("other.safetensors",)}, {"base": "other.safetensors"}):
        with pytest.raises(InputError, match=r"^other\.safetensors: is not a model of"):
            candidates.make(recipe.changed(**other))


# ---------------------------------------------------------------- arrays that are there


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"scale": None}, r"scale: the array to fill must be a scalar bfloat16, not absent"),
        ({"more": np.zeros(3)}, r"more: the array to fill must be absent, not 3 float64"),
        ({"scale": np.zeros(1, BF16)}, r"must be a scalar bfloat16, not 1 bfloat16"),
        ({"scale": np.zeros((), np.float32)}, r"must be a scalar bfloat16, not a scalar float32"),
    ],
)
def test_arrays_of_another_kind_are_refused(held, wrong, match):
    arrays = {n: a for n, a in {**held.make().arrays, **wrong}.items() if a is not None}
    with pytest.raises(InputError, match=match):
        held.make(into=arrays)
    arrays = held.make().arrays
    arrays["scale"].flags.writeable = False
    with pytest.raises(InputError, match="scale: the array is read-only"):
        held.make(into=arrays)


# ---------------------------------------------------------------- live models


def module_of(arrays, dtype=None):
    """A module with these parameters; whole numbers are buffers."""
    root = torch.nn.Module()
    for name, array in arrays.items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, torch.nn.Module())
            module = module._modules[part]
        if array.dtype == np.int64:
            module.register_buffer(last, torch.zeros(array.shape, dtype=torch.int64))
        else:
            kind = dtype or getattr(torch, array.dtype.name)
            module.register_parameter(
                last, torch.nn.Parameter(torch.zeros(array.shape, dtype=kind))
            )
    return root


def values(model):
    state = model.state_dict() if isinstance(model, torch.nn.Module) else model
    return {name: tensor.double().numpy() for name, tensor in state.items()}


def assert_is(model, candidate):
    found = values(model)
    assert found.keys() == candidate.arrays.keys()
    for name, array in candidate.arrays.items():
        np.testing.assert_array_equal(found[name], array.astype(np.float64), name)


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float64])
def test_a_module_of_the_same_or_a_wider_type(held, dtype):
    candidate = held.make({"drop_rate": 0.4})
    module = module_of(candidate.arrays, dtype)
    for settings in ({"drop_rate": 0.8}, {"drop_rate": 0.4}):
        assert held.write_into(module, settings) == held.make(settings).digest
    assert_is(module, candidate)


@pytest.mark.parametrize("merged", WEIGHT_TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("kind", WEIGHT_TYPES, ids=lambda kind: kind.name)
def test_what_a_type_can_hold_of_another(kind, merged):
    """Every value of the narrower type must come back; of the large ones, some that tell."""
    if merged.itemsize <= 2:
        every = np.arange(1 << 8 * merged.itemsize, dtype=f"u{merged.itemsize}")
    else:
        telling = np.array([1 + 2.0**-23, 1e-40, 3e38, 1.0], np.float64)
        every = telling.astype(merged.numpy_type)
        every = np.append(every, merged.numpy_type.type(1 + 2.0**-52))
    every = every.view(merged.numpy_type)
    with np.errstate(over="ignore", invalid="ignore"):
        every = every[np.isfinite(every.astype(np.float64))]
        there = every.astype(kind.numpy_type)
    comes_back = bool((there.astype(np.float64) == every.astype(np.float64)).all())
    assert live_memory._holds_all(kind, merged) == comes_back


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda _: [1, 2], "expected a torch module or a dict of arrays"),
        (lambda arrays: module_of(arrays).to("meta"), "has no data"),
        (lambda a: module_of(a, torch.float16), r"is 37×8 F16 in the model and 37×8 BF16 in"),
        (
            lambda arrays: module_of({**arrays, "scale": np.zeros(1, BF16)}),
            r"scale: is 1 BF16 in the model and a scalar BF16",
        ),
        (
            lambda arrays: module_of(
                {n: a for n, a in arrays.items() if n not in ("none", "scale")}
            ),
            "the model has no none and 1 more",
        ),
    ],
)
def test_a_model_that_cannot_hold_a_candidate_is_refused_and_left_alone(held, change, match):
    model = change(held.make().arrays)
    with pytest.raises(InputError, match=match):
        held.write_into(model)
    if isinstance(model, torch.nn.Module) and not any(p.is_meta for p in model.parameters()):
        assert not any(value.any() for value in values(model).values())


def test_a_model_may_have_more_a_prefix_and_tensors_in_pieces(held):
    candidate = held.make()
    inner, outer = module_of(candidate.arrays), torch.nn.Module()
    inner.register_buffer("inv_freq", torch.full((4,), 7.0))  # which the base lacks
    outer.add_module("wrapped", inner)
    assert held.write_into(outer) == candidate.digest
    assert (inner.inv_freq == 7).all()
    del inner.inv_freq
    assert_is(inner, candidate)
    kinds = {n: torch.int64 if n == "steps" else torch.float32 for n in candidate.arrays}
    wide = {n: torch.zeros(*a.shape, 2, dtype=kinds[n]) for n, a in candidate.arrays.items()}
    held.write_into({name: tensor[..., 1] for name, tensor in wide.items()})
    assert_is({name: tensor[..., 1] for name, tensor in wide.items()}, candidate)
    assert not any(tensor[..., 0].any() for tensor in wide.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tensors_on_a_device(tmp_path, dtype, monkeypatch):
    base = {"w": numbers(CHUNK + 9, 1)}
    candidates = dare.Candidates(write_recipe(tmp_path, base, [moved(base, 2)]))
    kind = STORAGE_TYPES["BF16" if dtype is torch.bfloat16 else "F32"]
    model = {"w": torch.zeros(CHUNK + 9, dtype=dtype)}

    class Elsewhere(OnDevice):
        def read(self, start, count):
            raise AssertionError("nothing needs to come back from the device")

    def memory(array, _name):
        whole = array.view(torch.int16 if kind.itemsize == 2 else torch.int32)
        return kind, tuple(array.shape), Elsewhere(whole, kind.carrier)

    monkeypatch.setattr(live_memory, "memory_of", memory)
    candidates.write_into(model, {"drop_rate": 0.5})
    monkeypatch.undo()
    assert_is(model, candidates.make({"drop_rate": 0.5}))


def test_what_has_changed_of_a_live_model_since_the_last_candidate_is_noticed(tmp_path):
    base = {"a": np.ones((4, 4), np.float32), "b": np.ones((4, 4), np.float32)}
    recipe = write_recipe(tmp_path, base, [moved(base, 2)], method="sum")
    candidates, wanted = dare.Candidates(recipe), dare.merge(recipe, verbose=False).output
    model = {name: torch.zeros(4, 4) for name in base}
    candidates.write_into(model)
    before = model["a"].data
    model["a"].data = torch.zeros(4, 4)  # the same tensor in another place
    model["b"] = torch.zeros(4, 4)
    before.zero_()
    candidates.write_into(model)
    assert_is(model, candidates.make())
    assert contents(load_file(wanted)) == contents(candidates.make().arrays)
    assert not before.any()
    with pytest.raises(InputError, match="b: is 4×5"):
        candidates.write_into({**model, "b": torch.zeros(4, 5)})
    model["b"].data = model["a"].data.t()
    with pytest.raises(InputError, match="a and b share memory"):
        candidates.write_into(model)
    arrays = {name: np.zeros((4, 4), np.float32) for name in base}
    candidates.write_into(arrays)
    arrays["b"].flags.writeable = False
    with pytest.raises(InputError, match="b: the array is read-only"):
        candidates.write_into(arrays)


def test_candidates_have_the_digests_of_inputs_that_a_merge_reports(tmp_path, monkeypatch):
    base, (one, other) = small_models(count=2)
    recipe = write_recipe(tmp_path, base, [one, other], method="dare+linear", on_missing="base")
    found = []
    digests_of = under_test.digests_of
    monkeypatch.setattr(
        under_test, "digests_of", lambda *given: found.append(digests_of(*given)) or found[-1]
    )
    candidates = dare.Candidates(recipe)
    tried = [{}, {"scale": 0.5}, {"include.model1": False}, {"method": "ties"}]
    for settings in tried:
        made = candidates.make(settings)
        report = dare.merge(made.recipe, overwrite=True, resume=False, verbose=False)
        assert found[-1] == report.digests


def test_tied_parameters_must_be_one_tensor_in_the_base_too(tmp_path):
    recipe = tied_files(tmp_path)
    candidates = dare.Candidates(recipe.changed(models=recipe.models[:1]))
    candidate = candidates.make()
    module = module_of(candidate.arrays, torch.float32)
    module.lm_head.weight = module.model.embed_tokens.weight
    assert candidates.write_into(module) == candidate.digest
    assert_is(module, candidate)
    with pytest.raises(InputError, match=r"lm_head.* are one tensor in the model and two in the"):
        dare.Candidates(recipe).write_into(module)


def test_a_module_whose_tensors_share_memory_in_part_is_refused(tmp_path):
    base = {"a": np.ones((4, 4), np.float32), "b": np.ones((4, 4), np.float32)}
    tuned = {name: array + np.float32(1) for name, array in base.items()}
    candidates = under_test.Candidates(write_recipe(tmp_path, base, [tuned], method="sum"))
    shared = torch.ones(4, 4)
    model = {"a": shared, "b": shared.t()}
    with pytest.raises(InputError, match="a and b"):
        candidates.write_into(model)
    assert shared.unique().tolist() == [1]


def test_the_next_call_mends_what_a_failure_left(held, monkeypatch):
    candidate = held.make()
    module = module_of(candidate.arrays, torch.float32)
    calls = []

    def failing(self, start, raw):
        calls.append(self)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        put(self, start, raw)

    put = live_memory.Home.put
    monkeypatch.setattr(live_memory.Home, "put", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        held.write_into(module)
    monkeypatch.undo()
    assert held.write_into(module) == candidate.digest
    assert_is(module, candidate)


def test_progress_hears_what_was_read_and_can_end_a_merge(held):
    read: list[int] = []
    candidate = held.make(progress=read.append)
    assert sum(read) == dare.plan(candidate.recipe).cost.bytes_read

    def stop(_nbytes: int) -> None:
        raise TimeoutError

    with pytest.raises(TimeoutError):
        held.make(progress=stop)
    assert held.make().digest == candidate.digest
