"""Merged adapters stand for the merged deltas, and are written whole or not at all."""

import json
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from peft_models import pair, product, read_adapter, write_adapter
from safetensors.numpy import load_file, save_file

from cuda_on_host import on_host_only
from dare import ModelEntry, Request, TensorRule, dare_drop, keep_mask, merge
from dare.cli import main
from dare.errors import InputError, MismatchError, OutputError, RecipeError
from dare.inputs.lora import CONFIG_NAME, WEIGHTS_NAME, open_adapter
from dare.inputs.sources import read_floats
from dare.lora import merge_adapters, plan_adapters

Q, V = "m.q_proj", "m.v_proj"


def eighths(*shape, seed=0):
    return np.random.default_rng(seed).integers(-8, 8, shape).astype(np.float32) / 8


@pytest.fixture
def two(tmp_path):
    first = write_adapter(tmp_path / "first", pair(Q, 4, 2, 3))
    second = write_adapter(tmp_path / "second", pair(Q, 4, 1, 3, 1) | pair(V, 5, 1, 3, 2), r=1)
    return [first, second]


def delta(folder, module):
    """What an adapter stands for, by its own configuration."""
    source = open_adapter(folder)
    name = f"{module}.weight"
    if name not in source.tensors:
        return 0.0
    with source:
        values = read_floats(source, name, 0, source.tensors[name].elements)
    return values.reshape(source.tensors[name].shape).astype(np.float64)


@pytest.mark.usefixtures("matrices_on_host")
@pytest.mark.parametrize("method", ["tsv", "trim+ties", "linear"])
def test_a_gpu_merges_whole_matrices_and_truncates_them(two, tmp_path, method):
    products = {}
    for device in ("cpu", "cuda"):
        output = tmp_path / device
        merge_adapters(two, output, method=method, rank=2, device=device)
        products[device] = delta(output, Q)
        manifest = json.loads((output / "dare-manifest.json").read_text())
        is_there = device == "cuda" and method != "linear"  # which needs only the factors
        assert ("device" in manifest) == is_there
    np.testing.assert_allclose(products["cuda"], products["cpu"], rtol=0, atol=1e-5)


@on_host_only
@pytest.mark.usefixtures("matrices_on_host")
def test_a_plan_needs_what_computes_on_the_gpu(two, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RecipeError, match=r"cuda:.*gpu-matrices"):
        plan_adapters(two, method="trim+ties", rank=2, device="cuda")
    assert plan_adapters(two, rank=2, device="cuda")


# ---------------------------------------------------------------- concatenation


def test_concatenation_by_hand(two, tmp_path):
    report = merge_adapters(two, tmp_path / "out", weights=[0.5, 0.25])
    tensors, config = read_adapter(tmp_path / "out")
    first, second = pair(Q, 4, 2, 3), pair(Q, 4, 1, 3, 1)
    down, up = "m.q_proj.lora_A.weight", "m.q_proj.lora_B.weight"
    assert tensors[down].tolist() == [*first[down].tolist(), *second[down].tolist()]
    stacked = np.hstack([first[up] * 0.5 * 2, second[up] * 0.25 * 4])  # weight · alpha / rank
    assert tensors[up].tolist() == stacked.tolist()
    assert tensors["m.v_proj.lora_A.weight"].shape == (1, 3)
    assert (config["r"], config["lora_alpha"], config["use_rslora"]) == (3, 3, False)
    assert config["rank_pattern"] == config["alpha_pattern"] == {r"^m\.v_proj": 1}
    assert config["target_modules"] == [Q, V]
    assert (report.error, report.energy, report.rank) == (0, 1, 3)
    assert [(module.name, module.ranks, module.rank) for module in report.modules] == [
        (Q, (2, 1), 3),
        (V, (1,), 1),
    ]
    exact = 0.5 * 2 * product(first, Q) + 0.25 * 4 * product(second, Q)
    assert delta(tmp_path / "out", Q).tolist() == exact.tolist()
    assert report.modules[0].norm == pytest.approx(np.linalg.norm(exact))


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({"method": "linear"}, [0.5, 0.5]),
        ({"method": "sum"}, [1, 1]),
        ({"normalize": True, "weights": [1.5, 0.5], "space": "core"}, [0.75, 0.25]),
    ],
)
def test_weights_that_are_not_given_or_divided_by_their_sum(two, tmp_path, settings, weights):
    report = merge_adapters(two, tmp_path / "out", scale=0.5, **settings)
    assert report.weights == tuple(settings.get("weights", weights))
    for module in (Q,) if "space" in settings else (Q, V):
        parts = zip(two, weights, strict=True)
        expected = sum(0.5 * weight * delta(path, module) for path, weight in parts)
        tolerance = 1e-6 if "space" in settings else 0
        np.testing.assert_allclose(delta(tmp_path / "out", module), expected, 0, tolerance)


specification = st.tuples(
    st.integers(1, 4),  # rank
    st.sampled_from([1, 2, 8, 0.5]),  # alpha
    st.booleans(),  # rslora
    st.sampled_from([(Q,), (V,), (Q, V)]),
    st.sampled_from([1, 0.5, -0.25, 2]),  # weight
)


def write_specified(folder, specifications):
    paths = []
    for number, (rank, alpha, rslora, modules, _) in enumerate(specifications):
        pairs = [pair(m, 4, rank, 3, 9 * number + place) for place, m in enumerate(modules)]
        tensors = {name: array for arrays in pairs for name, array in arrays.items()}
        config = {"r": rank, "lora_alpha": alpha, "use_rslora": rslora}
        path = folder / str(number)
        paths.append(write_adapter(path, tensors, **config, alpha_pattern={"v_proj": 3}))
    return paths


@settings(deadline=None, max_examples=10)
@given(st.lists(specification, min_size=1, max_size=4), st.randoms())
def test_concatenation_is_the_weighted_sum_in_any_order(tmp_path_factory, specifications, random):
    folder = tmp_path_factory.mktemp("sum")
    paths = write_specified(folder, specifications)
    weights = [specification[-1] for specification in specifications]
    order = list(range(len(paths)))
    random.shuffle(order)
    report = merge_adapters(paths, folder / "out", weights=weights)
    shuffled = [paths[i] for i in order], folder / "shuffled"
    merge_adapters(*shuffled, weights=[weights[i] for i in order])
    for module in report.modules:
        parts = zip(paths, weights, strict=True)
        expected = sum(weight * delta(path, module.name) for path, weight in parts)
        size = sum(
            np.abs(w * delta(p, module.name)).max() for p, w in zip(paths, weights, strict=True)
        )
        assert module.rank == sum(module.ranks)
        for out in ("out", "shuffled"):
            found = delta(folder / out, module.name)
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * size)


# ---------------------------------------------------------------- SVD


@pytest.mark.parametrize("fan_in_fan_out", [False, True])
@pytest.mark.parametrize("method", ["dare+linear", "dare+sum"])
def test_dropping_uses_the_masks_of_the_base_tensors(two, tmp_path, method, fan_in_fan_out):
    for path in two:
        config = json.loads((path / CONFIG_NAME).read_text())
        (path / CONFIG_NAME).write_text(json.dumps(config | {"fan_in_fan_out": fan_in_fan_out}))
    settings = {"method": method, "drop_rate": 0.5, "seed": 7, "weights": [0.75, 0.5]}
    report = merge_adapters(two, tmp_path / "out", rank=9, **settings)
    assert report.seeds == (7, 8)
    expected = 0.0
    for place, weight in enumerate([0.75, 0.5]):
        change = delta(two[place], Q)
        keep = keep_mask(f"{Q}.weight", change.size, 0.5, seed=7 + place).reshape(change.shape)
        expected = expected + weight * np.where(keep, 2 * change, 0)
        dropped = dare_drop({f"{Q}.weight": change.astype(np.float32)}, 0.5, seed=7 + place)
        assert dropped[f"{Q}.weight"].tolist() == np.where(keep, 2 * change, 0).tolist()
    np.testing.assert_allclose(delta(tmp_path / "out", Q), expected, atol=1e-6)


def test_a_module_of_which_all_is_dropped_is_left_out(tmp_path):
    alone = np.zeros((2, 3), np.float32)
    alone[0, 0] = 1
    up = {f"{V}.lora_B.weight": np.array([[1, 0]], np.float32)}
    path = write_adapter(tmp_path / "a", pair(Q, 40, 2, 30) | {f"{V}.lora_A.weight": alone} | up)
    seed = next(s for s in range(99) if not keep_mask(f"{V}.weight", 1, 0.5, seed=s)[0])
    settings = {"method": "dare+sum", "drop_rate": 0.5, "seed": seed, "rank": 2}
    report = merge_adapters([path], tmp_path / "out", **settings)
    assert [module.name for module in report.modules] == [Q]
    assert "zero_modules" in [note.code for note in report.notes]
    assert set(read_adapter(tmp_path / "out")[1]["target_modules"]) == {Q}


# ---------------------------------------------------------------- other kinds of tensors


def test_what_is_stored_in_full_is_averaged_by_weight(tmp_path):
    heads = [eighths(3, 2, seed=n) for n in range(2)]
    biases = [eighths(4, seed=n + 5) for n in range(2)]
    paths = [
        write_adapter(
            tmp_path / str(n),
            pair([Q, V][n], 4, 2, 3, n)
            | {"lm_head.weight": heads[n]}
            | {f"{Q}{'.base_layer' if n == 0 else ''}.bias": biases[n]},
            modules_to_save=["lm_head"],
            bias="all",
        )
        for n in range(2)
    ]
    report = merge_adapters(paths, tmp_path / "out", weights=[3, 1], method="sum")
    stored, config = read_adapter(tmp_path / "out")
    assert stored["lm_head.weight"].tolist() == (0.75 * heads[0] + 0.25 * heads[1]).tolist()
    expected = (0.75 * biases[0] + 0.25 * biases[1]).tolist()
    assert stored[f"{Q}.base_layer.bias"].tolist() == expected
    assert (config["modules_to_save"], config["bias"]) == (["lm_head"], "all")
    assert sorted(report.averaged) == ["lm_head.weight", f"{Q}.bias"]
    assert any(
        "divided by their sum 4.0" in n.text for n in report.notes if n.code == "averaged_in_full"
    )
    with pytest.raises(RecipeError, match="they sum to 0"):
        merge_adapters(paths, tmp_path / "none", weights=[1, -1])


def test_biases_of_factors_are_summed(tmp_path):
    paths = [
        write_adapter(
            tmp_path / str(n),
            pair(Q, 4, 2, 3, n) | ({f"{Q}.lora_B.bias": eighths(4, seed=n)} if n else {}),
            lora_bias=bool(n),
        )
        for n in range(2)
    ]
    for asked in ({}, {"rank": 3, "method": "dare+linear", "drop_rate": 0.0}):
        merge_adapters(paths, tmp_path / "out", overwrite=True, weights=[1, 0.5], **asked)
        stored, config = read_adapter(tmp_path / "out")
        assert config["lora_bias"] is True
        assert stored[f"{Q}.lora_B.bias"].tolist() == (0.5 * 2 * eighths(4, seed=1)).tolist()


# ---------------------------------------------------------------- what does not fit


def test_what_only_some_store_in_full_is_refused_with_advice(two, tmp_path):
    head = write_adapter(tmp_path / "head", pair(Q, 4, 2, 3) | {"lm_head.weight": eighths(3, 3)})
    with pytest.raises(MismatchError, match=r"lm_head\.weight: .* by first") as e:
        merge_adapters([head, two[0]], tmp_path / "out")
    assert "dare merge BASE ADAPTER" in str(e.value)
    other = write_adapter(tmp_path / "other", pair(Q, 4, 2, 3) | {"lm_head.weight": eighths(4, 3)})
    with pytest.raises(MismatchError, match="different shapes \\(3×3, 4×3\\)"):
        merge_adapters([head, other], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("tensors", "config", "message"),
    [
        (pair(Q, 4, 2, 9), {}, r"m\.q_proj: .*4×3 in first, .*4×9 in other"),
        (pair("q_proj", 4, 2, 3), {}, r"m\.q_proj in first is q_proj in other"),
        (pair(V, 4, 2, 3), {"fan_in_fan_out": True}, "fan_in_fan_out differs"),
        (
            pair(V, 4, 2, 3) | {f"{V}.lora_B.bias": eighths(4)},
            {"lora_bias": True},
            r"m\.v_proj has a lora_bias, m\.q_proj",
        ),
    ],
)
def test_adapters_of_other_bases_are_refused(two, tmp_path, tensors, config, message):
    with pytest.raises(MismatchError, match=message):
        plan_adapters([two[0], write_adapter(tmp_path / "other", tensors, **config)])


def test_another_name_of_the_base_is_noted(two, tmp_path):
    other = write_adapter(tmp_path / "b2", pair(Q, 4, 2, 3), base_model_name_or_path="that")
    note = plan_adapters([two[0], other]).notes[0]
    assert (note.code, "None, that" in note.text) == ("different_bases", True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "dare+linear"}, "set rank = 16 or energy"),
        ({"method": "dare+slerp", "rank": 4}, "slerp needs the base"),
        ({"drop_rate": 0.5}, "would have no effect: method 'linear'"),
        ({"method": "dare+sum", "drop_rates": 0.5}, "did you mean 'drop_rate'"),
        ({"vocabulary": "union"}, "vocabulary: not known"),
        ({"on": "weights"}, "linear needs the base"),
        ({"tensors": [TensorRule(match="*", settings={"on": "weights"})]}, "linear needs the base"),
        ({"normalize": True}, "set rank = 16 or energy"),
        ({"tensors": [TensorRule(match="*", weight=[0.1, 1.0])]}, "the same for all layers"),
        ({"weights": [[0.1, 0.2], 1]}, "one number for each adapter"),
        ({"rank": 0}, "rank = 0"),
        ({"method": "dare+tise", "rank": 2}, "did you mean 'ties'"),
        ({"dtype": "F99"}, "dtype F99"),
    ],
)
def test_wrong_settings_are_refused(two, settings, message):
    with pytest.raises(RecipeError, match=message):
        plan_adapters(two, **settings)


@pytest.mark.parametrize(
    ("method", "parameters", "flags", "stages"),
    [
        ("dare+linear", {"drop_rate": 0.5}, "--drop-rate 0.5", {"dare": {"drop_rate": 0.5}}),
        (
            "ties",
            {"keep_ratio": 0.5, "divide_by": "count", "weighted": False},
            "--keep-ratio 0.5 --divide-by count --weighted false",
            {"ties": {"keep_ratio": 0.5, "divide_by": "count", "weighted": False}},
        ),
        (
            "della+sum",
            {"drop_rate": [0.25, 0.75], "window": 0.2, "model_seed": [5, 6]},
            "--drop-rate 0.25 0.75 --window 0.2 --model-seed 5 6",
            None,
        ),
        ("linear", {"normalize": True}, "--normalize true", {"linear": {"normalize": True}}),
    ],
)
def test_parameters_of_stages_are_keywords_and_flags(
    two, tmp_path, method, parameters, flags, stages
):
    given = {"method": method, "rank": 4, "weights": [1.5, 0.5]}
    merge_adapters(two, tmp_path / "keywords", **given, **parameters)
    command = ["lora", "merge", *map(str, two), "--method", method, "--rank", "4"]
    command += ["--output", str(tmp_path / "flags"), "--weight", "1.5", "0.5"]
    assert main([*command, *flags.split()]) == 0
    entries = [
        ModelEntry(file=path, seed=5 + n, settings={"drop_rate": 0.25 + 0.5 * n, "window": 0.2})
        for n, path in enumerate(two)
    ]
    merge_adapters(two if stages else entries, tmp_path / "tables", **given, stages=stages)
    outputs = ("keywords", "flags", "tables")
    assert len({(tmp_path / name / WEIGHTS_NAME).read_bytes() for name in outputs}) == 1


def test_what_is_no_adapter_is_refused(two, tmp_path):
    with pytest.raises(InputError, match=r"has no adapter_config\.json"):
        merge_adapters([tmp_path], tmp_path / "out")
    with pytest.raises(RecipeError, match="must be a list of folders"):
        merge_adapters(str(two[0]), tmp_path / "out")
    with pytest.raises(InputError, match=r"no adapter .* LoRA module"):
        merge_adapters(two, tmp_path / "none", weights=[0, 0])
    with pytest.raises(InputError, match="the merged change is zero in every module"):
        merge_adapters([two[0]] * 2, tmp_path / "out", weights=[1, -1], rank=2, method="ties")
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- the directory


def test_the_directory_says_how_it_was_made(two, tmp_path):
    merge_adapters(two, tmp_path / "out", method="dare+sum", rank=2, drop_rate=0.25, seed=3)
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert names == {CONFIG_NAME, WEIGHTS_NAME, "README.md", "dare-manifest.json"}
    manifest = json.loads((tmp_path / "out" / "dare-manifest.json").read_text())
    assert manifest["method"] == "dare+sum"
    assert manifest["stages"][0]["drop_rate"] == 0.25
    assert [entry["seed"] for entry in manifest["adapters"]] == [3, 4]
    assert (manifest["rank"], manifest["mask"]) == (2, 1)
    assert "dare+sum of 2 adapters" in (tmp_path / "out" / "README.md").read_text()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first", "out", "second"]


def test_the_weights_are_the_same_bytes_every_time(two, tmp_path):
    for asked in ({}, {"rank": 2}, {"rank": 2, "method": "dare+ties", "drop_rate": 0.5}):
        for out in ("a", "b"):
            merge_adapters(two, tmp_path / out, overwrite=True, **asked)
        a, b = ((tmp_path / out / WEIGHTS_NAME).read_bytes() for out in ("a", "b"))
        assert a == b


def test_nothing_is_overwritten_unless_told(two, tmp_path):
    merge_adapters(two, tmp_path / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    (tmp_path / "file").write_text("")
    for output, overwrite, words in (
        (tmp_path / "out", False, "exists already"),
        (two[0], True, "would overwrite the input"),
        (tmp_path / "mine", True, "not made by dare"),
        (tmp_path / "out.safetensors", False, "an adapter is a folder"),
        (tmp_path / "file" / "out", False, "cannot be written"),
    ):
        with pytest.raises(OutputError, match=words):
            merge_adapters(two, output, overwrite=overwrite)
    merge_adapters(two, tmp_path / "out", rank=1, overwrite=True)
    assert read_adapter(tmp_path / "out")[1]["r"] == 1


def test_a_failure_leaves_the_old_output_in_place(two, tmp_path, monkeypatch):
    merge_adapters(two, tmp_path / "out")
    before = (tmp_path / "out" / WEIGHTS_NAME).read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    for call in ("os.fsync", "os.pwrite"):
        with monkeypatch.context() as patch:
            patch.setattr(call, fail)
            with pytest.raises(OutputError, match="No space left"):
                merge_adapters(two, tmp_path / "out", rank=1, overwrite=True)
        assert (tmp_path / "out" / WEIGHTS_NAME).read_bytes() == before
    assert not (tmp_path / "out.partial").exists()
    merge_adapters(two, tmp_path / "out", rank=1, overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["first", "out", "second"]


def test_narrower_types_and_their_limits(two, tmp_path):
    merge_adapters(two, tmp_path / "out", dtype="bfloat16")
    assert {
        info.dtype.name for info in open_adapter(tmp_path / "out")._stored.tensors.values()
    } == {"BF16"}
    np.testing.assert_allclose(
        delta(tmp_path / "out", Q), 0.5 * delta(two[0], Q) + 0.5 * delta(two[1], Q), atol=0.02
    )
    with pytest.raises(InputError, match=r"F16 cannot hold; .*dtype"):
        merge_adapters(two, tmp_path / "big", dtype="F16", scale=1e6)
    assert not (tmp_path / "big").exists()


# ---------------------------------------------------------------- the same as with the base


MODULES = [f"model.layers.{layer}.{name}" for layer in range(3) for name in ("q", "up")]


def some_adapters(folder):
    """Two adapters whose changes differ in size from module to module; each lacks one."""
    generator = np.random.default_rng(5)
    paths = []
    for number in range(2):
        tensors = {}
        for place, module in enumerate(MODULES):
            if place == 5 * number:
                continue
            size = np.float32(0.1 * 2**place)
            tensors[f"{module}.lora_A.weight"] = generator.standard_normal((3, 16), np.float32)
            up = size * generator.standard_normal((24, 3), np.float32)
            tensors[f"{module}.lora_B.weight"] = up
        paths.append(write_adapter(folder / "ab"[number], tensors, r=3))
    return paths


RULES = [
    TensorRule(match="*.0.*", settings={"keep_ratio": 0.4}),
    TensorRule(contains="up", model="b", settings={"keep_ratio": 0.7}),
]


@pytest.mark.parametrize(
    ("method", "stages", "own", "rules"),
    [
        ("linear", {}, {}, [TensorRule(match="*.up.*", weight=0.25)]),
        ("sum", {}, {}, [TensorRule(match="*.1.*", model="b", weight=0.0)]),
        ("dare+linear", {"dare": {"drop_rate": 0.5}}, {"drop_rate": 0.25},
         [TensorRule(match="*.up.*", weight=0.25, settings={"drop_rate": 0.75})]),
        ("trim+ties", {"trim": {"keep_ratio": 0.3}}, {"keep_ratio": 0.6}, RULES),
        ("trim+linear", {"trim": {"keep_ratio": 0.3, "scope": "model"}}, {}, []),
        ("trim+ties", {"trim": {"keep_ratio": 0.3, "scope": "model"}}, {"keep_ratio": 0.6}, RULES),
        ("trim+sum", {"trim": {"keep_ratio": 0.3}}, {"scope": "model"}, []),
        ("dare+trim+sum", {"trim": {"keep_ratio": 0.2, "scope": "model"}}, {"drop_rate": 0.5}, []),
        ("della+linear", {}, {"drop_rate": 0.5},
         [TensorRule(match="*.q.*", settings={"drop_rate": 0.2})]),
        ("breadcrumbs+sum", {}, {}, []),
        ("nm+linear", {"nm": {"n": 1, "m": 4}}, {"n": 2}, []),
        ("star+sum", {}, {}, []),
        ("dare+linear", {"dare": {"drop_rate": [0.2, 0.8]}}, {}, []),
        ("linear", {}, {}, [TensorRule(match="*.up.*", method="sum")]),
        ("dare+sum", {"trim": {"scope": "model"}}, {"keep_ratio": 0.6},
         [TensorRule(match="*.up.*", method="trim+ties"), TensorRule(match="*.q.*", method="sum")]),
    ],
)  # fmt: skip
def test_adapters_alone_give_what_they_give_with_their_base(tmp_path, method, stages, own, rules):
    first, second = some_adapters(tmp_path)
    models = [ModelEntry(file=first, weight=0.75, seed=3, settings=own), ModelEntry(file=second)]
    given = {"method": method, "stages": stages, "tensors": rules, "scale": 0.5}
    zeros = {f"{module}.weight": np.zeros((24, 16), np.float32) for module in MODULES}
    save_file(zeros | {"other": np.ones(3, np.float32)}, tmp_path / "base.safetensors")
    merged = tmp_path / "merged.safetensors"
    recipe = {"base": tmp_path / "base.safetensors", "output": merged, "verbose": False}
    merge(Request.of(**recipe, models=models, **given))
    merge_adapters(models, tmp_path / "out", rank=16, **given)
    expected = load_file(merged)
    for module in MODULES:
        found, wanted = delta(tmp_path / "out", module), expected[f"{module}.weight"]
        np.testing.assert_allclose(found, wanted, atol=3e-6 * np.abs(wanted).max() + 1e-12)


def test_what_changes_over_the_layers_is_said_to_end_at_the_last_one_changed(two):
    stages = {"dare": {"drop_rate": [0.2, 0.8]}}
    plan = plan_adapters(two, method="dare+sum", stages=stages, rank=2)
    assert "adapter_layers" in [note.code for note in plan.notes]
