"""An extracted adapter, loaded by PEFT, turns a base of any architecture into the fine-tune.

Models are saved by transformers, under the names of checkpoints, which are not those in memory.
"""

import copy
import json
import sys

import numpy as np
import pytest
from peft_models import quiet, read_adapter, train, write_adapter
from safetensors.numpy import load_file

import dare
from dare.errors import InputError, MismatchError, RecipeError
from dare.inputs import transformers_models
from dare.lora import extract_adapter
from dare.recipe.recipe import Recipe
from helpers import save

with quiet():
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5")
    peft = pytest.importorskip("peft")
    from architectures import build

torch.set_num_threads(1)  # these models are too small to share out

MODELS = [
    "LlamaForCausalLM",
    "GPT2LMHeadModel",
    "BertForSequenceClassification",
    "ViTForImageClassification",
    "LlavaForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "MixtralForCausalLM",
    "DeepseekV3ForCausalLM",
    "T5ForConditionalGeneration",
    "MambaForCausalLM",
]


def can_be_stored(model, name):
    """Whether PEFT can hold a parameter at all: its module has no others in it, and is not tied."""
    owner = model.get_submodule(name.rpartition(".")[0])
    same = [key for key, value in model.state_dict().items() if value is model.state_dict()[name]]
    is_tied = name in model.all_tied_weights_keys.values()
    holds_others = list(owner.children()) and ".experts." not in name  # which have a function
    return not (holds_others or is_tied or len(same) > 1)


def tune(model, chosen):
    tuned = copy.deepcopy(model)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if chosen(model, name):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return tuned


def save_all(folder, **models):
    with quiet():
        for name, model in models.items():
            model.save_pretrained(folder / name)


@pytest.mark.parametrize("architecture", MODELS)
def test_the_loaded_adapter_computes_what_the_fine_tune_does(tmp_path, architecture):
    base, inputs = build(architecture)
    tuned = tune(base, can_be_stored)
    save_all(tmp_path, base=base, tuned=tuned)
    report = extract_adapter(
        tmp_path / "base", tmp_path / "tuned", tmp_path / "out", rank=99, save_others=True
    )
    assert report.left_out == ()
    assert report.error < 1e-5
    with torch.no_grad():
        before, expected = (model(**inputs)[0] for model in (base, tuned))
        with quiet():
            loaded = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()
            weights = peft.load_peft_weights(tmp_path / "out", device="cpu")
            result = peft.set_peft_model_state_dict(loaded, weights)
        found = loaded(**inputs)[0]
    assert result.unexpected_keys == []
    assert not [key for key in result.missing_keys if ".default" in key]
    assert not torch.allclose(before, expected, atol=1e-2)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_experts_are_parameters(tmp_path):
    """Those that have the name of an expert's layer too, which PEFT would take for one."""
    for architecture, pattern, factors in (
        ("MixtralForCausalLM", "*experts*", ["experts", "experts.base_layer"]),
        ("DeepseekV3ForCausalLM", "shared_experts.up_proj", ["shared_experts.up_proj"]),
    ):
        base, _ = build(architecture)
        save_all(tmp_path / architecture, base=base, tuned=tune(base, can_be_stored))
        paths = [tmp_path / architecture / name for name in ("base", "tuned", "out")]
        with pytest.raises(RecipeError, match="'w1' matches no linear layer"):
            extract_adapter(*paths, rank=1, modules=["w1"])
        report = extract_adapter(*paths, rank=1, modules=[pattern])
        tensors, config = read_adapter(paths[-1])
        assert config["target_modules"] == []
        assert config["target_parameters"] == sorted(module.name for module in report.modules)
        ends = {name.partition(".mlp.")[2].partition(".lora_")[0] for name in tensors}
        assert sorted(ends) == factors
        (warning,) = (note for note in report.notes if note.code == "change_left_out")
        assert (warning.severity, report.share < 0.9) == ("warning", True)
        assert f"{1 - report.share:.2%}" in warning.text


def test_experts_that_cannot_be_converted_are_warned_of(tmp_path, monkeypatch):
    base, _ = build("MixtralForCausalLM")
    save_all(tmp_path, base=base, tuned=tune(base, can_be_stored))

    def fail(*_):
        raise InputError("another version")

    monkeypatch.setattr("dare.inputs.layouts._present", fail)
    paths = [tmp_path / name for name in ("base", "tuned", "out")]
    report = extract_adapter(*paths, rank=99, save_others=True)
    names = [left.tensor for left in report.left_out]
    assert {name.rpartition("experts.")[2][1:] for name in names} == {
        f".w{n}.weight" for n in (1, 2, 3)
    }
    (warning,) = (note for note in report.notes if note.code == "change_left_out")
    assert f"{1 - report.share:.2%}" in warning.text
    # What is stored in full beside a LoRA of one parameter has another reason.
    monkeypatch.undo()
    given = {"rank": 1, "modules": ["gate_up_proj"], "save_others": True, "overwrite": True}
    report = extract_adapter(*paths, **given)
    assert {left.tensor.rpartition(".")[2] for left in report.left_out} == {"down_proj"}


def test_a_checkpoint_of_the_body_is_an_adapter_of_the_whole(tmp_path):
    """As gpt2 is published: without the prefix that its class has in memory."""
    base, inputs = build("GPT2LMHeadModel")
    tuned = tune(base, can_be_stored)
    save_all(tmp_path, base=base, tuned=tuned)
    for name in ("base", "tuned"):
        file = tmp_path / name / "model.safetensors"
        save(file, {n.removeprefix("transformer."): v for n, v in load_file(file).items()})
    report = extract_adapter(
        tmp_path / "base", tmp_path / "tuned", tmp_path / "out", rank=99, save_others=True
    )
    assert report.modules[0].name == "transformer.h.0.attn.c_attn"
    assert "other_names" in [note.code for note in report.notes]
    with torch.no_grad(), quiet():
        expected = tuned(**inputs).logits
        found = peft.PeftModel.from_pretrained(base, tmp_path / "out").eval()(**inputs).logits
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_the_table_says_what_transformers_does(tmp_path):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )

    from dare.tensors.dtypes import STORAGE_TYPES
    from dare.tensors.header import TensorInfo

    classes = {**MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    for model_type in transformers_models.PLAIN_TYPES:
        with quiet():
            config = CONFIG_MAPPING[model_type]()
            config.num_hidden_layers = 1
            if getattr(config, "layer_types", None):
                config.layer_types = config.layer_types[:1]
            config.architectures = [classes[model_type]]
            config.save_pretrained(tmp_path)
            with torch.device("meta"):
                model = getattr(transformers, classes[model_type])(config)
        described = json.loads((tmp_path / "config.json").read_text())
        stored = {
            name: TensorInfo(name, STORAGE_TYPES["F32"], tuple(value.shape), 0)
            for name, value in model.state_dict().items()
            if name not in model.all_tied_weights_keys
        }
        by_table = transformers_models.find_by_table(described, stored)
        by_transformers, _ = transformers_models._by_transformers(tmp_path, described, stored)
        assert by_table is not None, model_type
        for name, expected in by_transformers.items():
            found = by_table[name]
            kinds = {found.kind, expected.kind} & {"linear", "conv1d", "embedding"}
            if len(stored[name].shape) == 2 and kinds:
                assert found == expected, model_type


def test_what_nobody_knows_is_refused(tmp_path, monkeypatch):
    base, _ = build("ViTForImageClassification")
    save_all(tmp_path, base=base, tuned=tune(base, can_be_stored))
    paths = (tmp_path / "base", tmp_path / "tuned", tmp_path / "out")
    file = tmp_path / "base" / "config.json"
    config = json.loads(file.read_text())

    def refused(message, **changes):
        file.write_text(json.dumps({**config, **changes}))
        with pytest.raises(InputError, match=message):
            extract_adapter(*paths, rank=1)
        assert not (tmp_path / "out").exists()

    refused(
        "names 'OwnModel', which transformers does not have.*as_stored", architectures=["OwnModel"]
    )
    refused("names 'torch', which transformers does not have", architectures=["torch"])
    refused("cannot build a ViTForImageClassification", hidden_size="x")
    refused("num_hidden_layers is 1000000; at most", num_hidden_layers=1_000_000)
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "transformers", None)
        refused("'vit' needs transformers 5")
    report = extract_adapter(*paths, rank=1, as_stored=True)
    assert report.modules[0].name.startswith("classifier")
    assert report.modules[1].name.startswith("vit.encoder.layer.0.attention.attention.")
    assert np.isfinite(report.error)


# ---------------------------------------------------------------- the other way round


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize(
    ("architecture", "targets"),
    [
        ("ViTForImageClassification", {"target_modules": ["q_proj", "fc1"]}),
        ("LlavaForConditionalGeneration", {"target_modules": ["q_proj", "linear_1"]}),
        ("Qwen2VLForConditionalGeneration", {"target_modules": ["q_proj", "qkv"]}),
        ("LlamaForCausalLM", {"target_modules": ["q_proj"]}),
        # experts that the files have one by one, and parts of what they have packed
        ("MixtralForCausalLM", {"target_parameters": EXPERTS}),
        ("Qwen3MoeForCausalLM", {"target_parameters": EXPERTS[:1]}),
        ("DeepseekV3ForCausalLM", {"target_parameters": EXPERTS[1:]}),
        ("NomicBertForMaskedLM", {"target_modules": ["q_proj", "v_proj", "o_proj"]}),
        ("HrmTextForCausalLM", {"target_modules": ["k_proj", "up_proj"]}),
    ],
)
def test_an_adapter_of_the_loaded_model_is_merged_into_the_stored_one(
    tmp_path, architecture, targets
):
    base, inputs = build(architecture)
    save_all(tmp_path, base=base)
    config = {"target_modules": [], "r": 2, **targets}
    train(tmp_path / "lora", copy.deepcopy(base), 1, **config)
    given = {"base": tmp_path / "base", "models": [tmp_path / "lora"], "output": tmp_path / "out"}
    dare.merge(**given, method="linear", verbose=False)
    with quiet():
        merged, info = type(base).from_pretrained(tmp_path / "out", output_loading_info=True)
        expected = peft.PeftModel.from_pretrained(base, tmp_path / "lora")
    assert not any(info.values())
    with torch.no_grad():
        found, wanted = (model.eval()(**inputs)[0] for model in (merged, expected))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_an_adapter_of_what_is_stored_otherwise_is_refused(tmp_path, monkeypatch):
    """Of fused experts, of no module at all, or of a model that nobody knows."""
    mixtral, vit = (build(name)[0] for name in ("MixtralForCausalLM", "ViTForImageClassification"))
    save_all(tmp_path, mixtral=mixtral, vit=vit)
    some = np.ones(16, np.float32)

    def refused(base, tensor, message, error=InputError, **others):
        adapter = write_adapter(tmp_path / "lora", {tensor: some, **others})
        recipe = Recipe(base=tmp_path / base, models=[adapter], output=tmp_path / "out")
        with pytest.raises(error, match=message):
            dare.plan(recipe)

    experts = "model.layers.0.mlp.experts.gate_up_proj"
    refused("mixtral", experts, "its layout cannot be converted .* merge the adapter into it")
    refused("vit", "vit.layers.0.q", "^lora: .*vit.layers.0.q.* leave it out", MismatchError)
    monkeypatch.setitem(sys.modules, "transformers", None)
    refused("vit", "vit.layers.0.q", "'vit' needs transformers 5 .* or merge the adapter")
    known = {"vit.layernorm.weight": some}
    refused("vit", "vit.layers.0.q", "0.q: in lora, not in the base", MismatchError, **known)
