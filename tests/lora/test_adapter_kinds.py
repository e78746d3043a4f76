"""Adapters of other kinds than LoRA change a model as PEFT's merge_and_unload does."""

import copy
import json
import tracemalloc

import numpy as np
import pytest
from peft_models import gaussian, quiet, weights, write_adapter
from safetensors.numpy import load_file, save_file

import dare
from dare.errors import InputError
from dare.inputs.arrays import array_source
from dare.inputs.lora import CONFIG_NAME, open_adapter
from dare.inputs.sources import read_floats
from dare.lora import merge_adapters
from dare.tensors.chunks import CHUNK

with quiet():
    peft = pytest.importorskip("peft")
    from architectures import build, torch

LLAMA, GPT2 = "LlamaForCausalLM", "GPT2LMHeadModel"
BOTH = ["q_proj", "down_proj"]
STEPS = {"total_step": 10, "init_r": 4}


class Convolutions(torch.nn.Module):
    """Convolutions of every kind, with groups and without, and a layer with a bias."""

    def __init__(self):
        super().__init__()
        self.plane = torch.nn.Conv2d(4, 10, 3)
        self.point = torch.nn.Conv2d(6, 6, 1)
        self.grouped = torch.nn.Conv2d(6, 4, 3, groups=2)
        self.line = torch.nn.Conv1d(6, 10, 3)
        self.head = torch.nn.Linear(6, 3)


def model_of(name):
    if name != "convolutions":
        return build(name)[0]
    torch.manual_seed(0)
    return Convolutions()


def case(kind, model, **config):
    return pytest.param(kind, model, config, id=f"{kind} {model[:4]} {' '.join(config)}")


PLANES, ALL = ["plane", "point", "grouped", "head"], ["plane", "point", "grouped", "line", "head"]
PATTERNS = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 5}}
CASES = [
    case("AdaLora", LLAMA, target_modules=BOTH, lora_alpha=6, **STEPS),
    case("AdaLora", LLAMA, target_modules=BOTH, lora_alpha=0, modules_to_save=["norm"], **STEPS),
    case("AdaLora", GPT2, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True, **STEPS),
    case("AdaLora", "convolutions", target_modules=["plane", "head"], **STEPS),
    case("LoHa", LLAMA, target_modules=BOTH, r=3, alpha=6),
    case("LoHa", LLAMA, target_modules=BOTH, r=3, **PATTERNS),
    case("LoHa", LLAMA, target_modules="all-linear", r=4, init_weights=False),
    case("LoHa", "convolutions", target_modules=ALL, r=2),
    case("LoHa", "convolutions", target_modules=ALL, r=2, use_effective_conv2d=True),
    case("LoKr", LLAMA, target_modules=BOTH, r=1, alpha=3, decompose_both=True),
    case("LoKr", LLAMA, target_modules=BOTH, r=1, decompose_factor=2, **PATTERNS),
    case("LoKr", LLAMA, target_modules=BOTH, r=9, decompose_factor=4, init_weights="lycoris"),
    case("LoKr", "convolutions", target_modules=ALL, r=8),
    case("LoKr", "convolutions", target_modules=ALL, r=1, decompose_factor=2),
    case("LoKr", "convolutions", target_modules=ALL, r=2, use_effective_conv2d=True),
    case("IA3", LLAMA, target_modules=BOTH, feedforward_modules=["down_proj"]),
    case("IA3", LLAMA, target_modules=BOTH, feedforward_modules=r".*\.(up|down)_proj"),
    case("IA3", LLAMA, target_modules=BOTH, feedforward_modules=[], modules_to_save=["norm"]),
    case("IA3", GPT2, target_modules=["c_attn", "c_proj"], feedforward_modules=["c_proj"]),
    case("IA3", "convolutions", target_modules=PLANES, feedforward_modules=[]),
    case("IA3", "convolutions", target_modules=PLANES, feedforward_modules=PLANES),
    case("Vera", LLAMA, target_modules=BOTH, r=5, d_initial=0.5),
    case("Vera", GPT2, target_modules=["c_attn", "c_proj"], r=4, fan_in_fan_out=True, bias="all"),
]


def train(folder, kind, name, config, left=None):
    """Save a base and an adapter with random weights; return what PEFT merges them to."""
    base = model_of(name)
    with quiet():
        tuned = peft.get_peft_model(copy.deepcopy(base), getattr(peft, f"{kind}Config")(**config))
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in tuned.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
        if left is not None:
            tuned.peft_config["default"].rank_pattern = left
        tuned.save_pretrained(folder / "adapter")
        if name == "convolutions":
            (folder / "base").mkdir()
            tensors = {key: value.numpy() for key, value in base.state_dict().items()}
            save_file(tensors, folder / "base" / "model.safetensors")
        else:
            base.save_pretrained(folder / "base")
        loaded = peft.PeftModel.from_pretrained(base, folder / "adapter")
        return weights(loaded.merge_and_unload())


def merge(folder, base="base", **settings):
    """Merge the adapter into the base, and read both."""
    given = {"base": folder / base, "models": [folder / "adapter"], "output": folder / "out"}
    dare.merge(**given, method="linear", verbose=False, overwrite=True, **settings)
    return (load_file(folder / name / "model.safetensors") for name in (base, "out"))


@pytest.mark.parametrize(("kind", "name", "config"), CASES)
def test_a_merge_is_that_of_peft(tmp_path, kind, name, config):
    expected = train(tmp_path, kind, name, config)
    plain, found = merge(tmp_path)
    for tensor, value in found.items():
        np.testing.assert_allclose(value, expected[tensor], rtol=1e-5, atol=3e-6, err_msg=tensor)
    changed = {tensor for tensor in plain if np.any(plain[tensor] != found[tensor])}
    assert changed == {t for t in plain if np.any(np.abs(plain[t] - expected[t]) > 1e-7)}
    assert len(changed) >= 2


def test_adalora_keeps_its_scale_when_it_loses_rank(tmp_path):
    """Its pattern says which directions of each layer are left; here none of one layer."""
    some = [[True, False, True, False], [True] * 4, [False] * 4, [False, False, False, True]]
    names = [
        f"model.layers.{n}.{at}.lora_E"
        for n in (0, 1)
        for at in ("self_attn.q_proj", "mlp.down_proj")
    ]
    config = {"target_modules": BOTH, "lora_alpha": 6, **STEPS}
    expected = train(tmp_path, "AdaLora", LLAMA, config, dict(zip(names, some, strict=True)))
    plain, found = merge(tmp_path)
    for tensor, value in found.items():
        np.testing.assert_allclose(value, expected[tensor], rtol=1e-5, atol=3e-6, err_msg=tensor)
    changed = {f"{t.removesuffix('.weight')}.lora_E" for t in plain if np.any(plain[t] != found[t])}
    assert changed == {*names} - {names[2]}


@pytest.mark.parametrize(
    ("kind", "config"),
    [("Vera", {"r": 3, "d_initial": 0.5}), ("IA3", {"feedforward_modules": ["down_proj"]})],
)
def test_the_base_may_lack_a_prefix(tmp_path, kind, config):
    expected = train(tmp_path, kind, LLAMA, {"target_modules": BOTH, **config})
    (tmp_path / "short").mkdir()
    stored = load_file(tmp_path / "base" / "model.safetensors")
    short = {name.removeprefix("model."): value for name, value in stored.items()}
    save_file(short, tmp_path / "short" / "model.safetensors")
    _, found = merge(tmp_path, "short")
    for tensor, value in found.items():
        name = tensor if tensor in expected else f"model.{tensor}"
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=3e-6, err_msg=tensor)


def test_only_lora_becomes_one_adapter(tmp_path):
    train(tmp_path, "Vera", LLAMA, {"target_modules": BOTH, "r": 3})
    with pytest.raises(InputError, match=r"VERA.*dare merge BASE ADAPTER"):
        merge_adapters([tmp_path / "adapter"] * 2, tmp_path / "one")


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("PromptTuning", {"task_type": "CAUSAL_LM", "num_virtual_tokens": 2}),
        ("PromptEncoder", {"task_type": "CAUSAL_LM", "num_virtual_tokens": 2}),
        ("OFT", {"target_modules": BOTH, "oft_block_size": 4}),
        ("BOFT", {"target_modules": BOTH, "boft_block_size": 4}),
    ],
)
def test_what_is_not_read_is_refused_by_its_kind(tmp_path, kind, config):
    with quiet():
        peft.get_peft_model(
            model_of(LLAMA), getattr(peft, f"{kind}Config")(**config)
        ).save_pretrained(tmp_path)
    name = json.loads((tmp_path / CONFIG_NAME).read_text())["peft_type"]
    with pytest.raises(InputError, match=f"'{name}'.*merge_and_unload") as error:
        open_adapter(tmp_path)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- what does not fit

LOHA = {f"m.hada_{part}": gaussian(*sides) for part, *sides in (("w1_a", 4, 2), ("w1_b", 2, 3))}
LOHA |= {name.replace("w1", "w2"): value for name, value in LOHA.items()}
LOKR = {"m.lokr_w1": gaussian(2, 1), "m.lokr_w2_a": gaussian(2, 2), "m.lokr_w2_b": gaussian(2, 3)}
ADALORA = {"m.lora_A": gaussian(2, 3), "m.lora_B": gaussian(4, 2), "m.lora_E": gaussian(2, 1)}
VERA = {"m.vera_lambda_b": gaussian(4), "m.vera_lambda_d": gaussian(2)}
VERA |= {"base_model.vera_A": gaussian(2, 3), "base_model.vera_B": gaussian(4, 2)}
IA3 = {"m.ia3_l": gaussian(4, 1)}
SETTINGS = {
    "LOHA": (LOHA, {"alpha": 4}),
    "LOKR": (LOKR, {"alpha": 4}),
    "ADALORA": (ADALORA, {"init_r": 2, "rank_pattern": None}),
    "VERA": (VERA, {}),
    "IA3": (IA3, {"feedforward_modules": []}),
}
BASE = {"m.weight": gaussian(4, 3), "m.bias": gaussian(4)}


def open_changed(folder, kind, changed, base=BASE, **config):
    tensors, settings = SETTINGS[kind]
    stored = {name: v for name, v in {**tensors, **changed}.items() if v is not None}
    given = {"peft_type": kind, "r": 2, **settings, **config}
    given = array_source(base, "base") if base else None, write_adapter(folder, stored, **given)
    return open_adapter(given[1], base=given[0])


@pytest.mark.parametrize("kind", SETTINGS)
def test_each_part_is_needed_once_and_must_fit(tmp_path, kind):
    assert open_changed(tmp_path, kind, {}).tensors["m.weight"].shape == (4, 3)
    for name, value in SETTINGS[kind][0].items():
        other = np.ones(tuple(side + 1 for side in value.shape), np.float32)
        unfit = [other, np.ones(1, np.float32)]
        for changed in unfit if kind == "IA3" else [None, *unfit]:
            if kind == "LOKR" and name == "m.lokr_w1" and changed is other:
                continue  # a matrix of any size makes another one of any size
            with pytest.raises(InputError, match="as PEFT saved it"):
                open_changed(tmp_path, kind, {name: changed})
        with pytest.raises(InputError, match="are for the same tensor"):
            open_changed(tmp_path, kind, {f"{name}.other": value})
        with pytest.raises(InputError, match="must have one of these types"):
            open_changed(tmp_path, kind, {name: value.astype(np.int64)})


@pytest.mark.parametrize(
    ("kind", "config", "message"),
    [
        ("LOHA", {"r": 3}, "as PEFT saved it"),
        ("LOHA", {"alpha": None}, "not valid"),
        ("LOKR", {"r": 0}, "as PEFT saved it"),
        ("LOKR", {"changed": {"m.lokr_w1": gaussian(0, 1)}}, "as PEFT saved it"),
        ("ADALORA", {"init_r": 4}, "as PEFT saved it"),
        ("ADALORA", {"rank_pattern": {"m.lora_E": [True, False]}}, "as PEFT saved it"),
        ("ADALORA", {"rank_pattern": {"m.lora_E": 2}}, "not valid"),
        ("VERA", {"r": 3}, "as PEFT saved it"),
        ("VERA", {"save_projection": False}, "save_projection=True, or .*merge_and_unload"),
        ("VERA", {"base": {}}, "dare merge BASE ADAPTER"),
        (
            "VERA",
            {"base": {"n.weight": BASE["m.weight"]}},
            "m is not in the base.*merge_and_unload",
        ),
        ("VERA", {"base": {"m.weight": BASE["m.bias"]}}, "as PEFT saved it"),
        ("IA3", {"feedforward_modules": ["m"]}, "as PEFT saved it"),
        ("IA3", {"feedforward_modules": None}, "not valid"),
        ("IA3", {"base": {}}, "dare merge BASE ADAPTER"),
    ],
)
def test_settings_that_do_not_fit_are_refused(tmp_path, kind, config, message):
    with pytest.raises(InputError, match=message):
        open_changed(tmp_path, kind, **{"changed": {}, **config})


@pytest.mark.parametrize("kind", ["LOHA", "LOKR", "ADALORA", "VERA", "LORA"])
def test_parts_of_another_kind_are_refused(tmp_path, kind):
    other = "m.hada_w1_a" if kind != "LOHA" else "m.lokr_w1"
    write_adapter(tmp_path, {other: gaussian(2, 2)}, peft_type=kind, alpha=1, init_r=2, r=2)
    with pytest.raises(InputError, match="is not a known kind of tensor"):
        open_adapter(tmp_path, base=array_source(BASE, "base"))


# ---------------------------------------------------------------- memory

SIDE, RANK = 1024, 64
LARGE = {
    "ADALORA": {"lora_A": (RANK, SIDE), "lora_B": (SIDE, RANK), "lora_E": (RANK, 1)},
    "LOHA": {f"hada_w{n}_{s}": (SIDE, RANK)[:: 1 if s == "a" else -1] for n in "12" for s in "ab"},
    "LOKR": {"lokr_w1": (2, 2), "lokr_w2_a": (SIDE // 2, RANK), "lokr_w2_b": (RANK, SIDE // 2)},
    "VERA": {"vera_lambda_b": (SIDE,), "vera_lambda_d": (RANK,)},
    "IA3": {"ia3_l": (SIDE, 1)},
}


@pytest.mark.parametrize("kind", LARGE)
def test_memory_is_what_is_said(tmp_path, kind):
    tensors = {f"m.{part}": gaussian(*shape) for part, shape in LARGE[kind].items()}
    if kind == "VERA":
        tensors |= {
            "base_model.vera_A": gaussian(RANK, SIDE),
            "base_model.vera_B": gaussian(SIDE, RANK),
        }
    config = {**SETTINGS[kind][1], "r": RANK, "init_r": RANK, "peft_type": kind}
    base = array_source({"m.weight": gaussian(SIDE, SIDE)}, "base")
    source = open_adapter(write_adapter(tmp_path, tensors, **config), base=base)
    source.bind({})
    with source:
        read_floats(source, "m.weight", 0, 1)  # fills caches
        into = np.empty(CHUNK, np.float32)
        tracemalloc.start()
        source.read("m.weight", SIDE // 2, into)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < source.cost.reading_bytes + (64 << 10)
