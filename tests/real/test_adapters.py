"""Every kind of adapter: the merged model has the logits of the model that PEFT loads."""

import warnings

import pytest

import dare

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from safetensors.torch import load_file, save_file
    from shapes import SIZES, TOLERANCE, UNET, build_causal, difference, load_causal

pytestmark = pytest.mark.filterwarnings("ignore")

UNTIED = SIZES | {"tie_word_embeddings": False}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
MODELS = {
    "llama": ("Llama", UNTIED | {"attention_bias": True}),
    "tied": ("Llama", SIZES | {"tie_word_embeddings": True}),
    "gpt2": ("GPT2", {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 2}),
    "mixtral": ("Mixtral", UNTIED | EXPERTS),
    "qwen3_moe": ("Qwen3Moe", UNTIED | EXPERTS | {"moe_intermediate_size": 16}),
    "square": ("GptOss", UNTIED | EXPERTS | {"intermediate_size": 32}),
    "gpt_oss": ("GptOss", UNTIED | EXPERTS),
}
FUSED = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def save_base(model, folder):
    """Write a model under the names that it has in memory: experts stay fused."""
    folder.mkdir(parents=True)
    tensors = {name: value.contiguous() for name, value in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model.config.architectures = [type(model).__name__]
    (folder / "config.json").write_text(model.config.to_json_string())
    return folder


def train(model, seed=1, scale=0.1):
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * scale)
    return model


USUAL = ("r", "lora_alpha")  # settings that all adapters have


def merged(folder):
    receipt = dare.merge(
        base=folder / "base",
        models=[folder / "adapter"],
        output=folder / "out",
        method="linear",
        verbose=False,
    )
    return load_causal(folder / "out"), receipt


def check(folder, add_row, kind, **config):
    """Merge a random adapter and compare with PEFT; it must have changed the logits by far more."""
    save_base(build_causal(*MODELS[kind]), folder / "base")
    tuned = get_peft_model(load_causal(folder / "base"), LoraConfig(**config))
    train(tuned).save_pretrained(folder / "adapter")
    peft = PeftModel.from_pretrained(load_causal(folder / "base"), folder / "adapter")
    result, receipt = merged(folder)
    off = difference(result, peft)
    settings = (f"{name} = {value!r}" for name, value in config.items() if name not in USUAL)
    add_row("adapters", kind, f"`{', '.join(settings)}`", off)
    assert difference(load_causal(folder / "base"), peft) > 0.01
    assert off < TOLERANCE
    return receipt


# ---------------------------------------------------------------- parameters


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("mixtral", {"target_parameters": FUSED}),
        ("mixtral", {"target_parameters": FUSED[1:], "target_modules": ["q_proj"]}),
        ("qwen3_moe", {"target_parameters": FUSED, "use_rslora": True, "lora_alpha": 5}),
        (
            "qwen3_moe",
            {
                "target_parameters": ["gate_up_proj", "down_proj", "mlp.gate.weight"],
                "rank_pattern": {"experts.down_proj": 3, "q_proj": 2},
                "alpha_pattern": {r".*\.1\..*gate_up_proj": 3, "gate.weight": 2},
                "target_modules": ["q_proj"],
            },
        ),
        ("gpt_oss", {"target_parameters": FUSED}),
        ("square", {"target_parameters": [*FUSED, "experts.gate_up_proj_bias"]}),
        ("square", {"target_parameters": FUSED[1:]}),
    ],
)
def test_parameters(tmp_path, add_row, kind, config):
    check(tmp_path, add_row, kind, **{"r": 4, "lora_alpha": 6, "target_modules": [], **config})


# ---------------------------------------------------------------- DoRA


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("llama", {"target_modules": "all-linear"}),
        ("llama", {"target_modules": ["embed_tokens", "q_proj", "lm_head"], "use_rslora": True}),
        ("llama", {"target_modules": ["q_proj", "v_proj"], "alpha_pattern": {"v_proj": 9}}),
        ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    ],
)
def test_dora(tmp_path, add_row, kind, config):
    check(tmp_path, add_row, kind, **{"r": 4, "lora_alpha": 6, "use_dora": True, **config})


# ---------------------------------------------------------------- tokens


@pytest.mark.parametrize(
    ("kind", "tokens"),
    [
        ("llama", [3, 1, 17]),
        ("llama", {"embed_tokens": [3, 1], "lm_head": [5, 6, 2]}),
        ("tied", [3, 1, 17]),
        ("gpt2", {"wte": [0, 39]}),
    ],
)
def test_tokens(tmp_path, add_row, kind, tokens):
    modules = ["c_attn"] if kind == "gpt2" else ["q_proj"]
    check(tmp_path, add_row, kind, target_modules=modules, trainable_token_indices=tokens)


# ---------------------------------------------------------------- starts that change the base

WAYS = {
    "inside": "the initial adapter in its folder",
    "beside": "the initial adapter beside it",
    "converted": "converted by PEFT",
}


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora"])
@pytest.mark.parametrize("way", WAYS)
def test_starts_that_change_the_base(tmp_path, add_row, start, way):
    save_base(build_causal(*MODELS["llama"]), tmp_path / "base")
    config = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "up_proj"]}
    tuned = get_peft_model(
        load_causal(tmp_path / "base"), LoraConfig(init_lora_weights=start, **config)
    )
    initial = (tmp_path / "adapter" if way == "inside" else tmp_path) / f"{start[:5]}_init"
    tuned.peft_config["default"].init_lora_weights = True
    tuned.save_pretrained(initial)
    tuned.peft_config["default"].init_lora_weights = start
    settings = {"path_initial_model_for_weight_conversion": initial} if way == "converted" else {}
    train(tuned).save_pretrained(tmp_path / "adapter", **settings)
    train(tuned, scale=0)
    result, _ = merged(tmp_path)
    off = difference(result, tuned.eval())
    add_row("adapters", "llama", f"`init_lora_weights = {start!r}`, {WAYS[way]}", off)
    assert off < TOLERANCE


@pytest.mark.parametrize("start", ["eva", "orthogonal", "gaussian"])
def test_starts_that_leave_the_base(tmp_path, add_row, start):
    config = {"target_modules": ["q_proj", "up_proj"], "init_lora_weights": start}
    check(tmp_path, add_row, "llama", r=4, lora_alpha=6, **config)


# ---------------------------------------------------------------- biases and embeddings


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("llama", {"target_modules": ["q_proj", "o_proj"], "lora_bias": True, "use_rslora": True}),
        ("gpt2", {"target_modules": ["c_attn"], "lora_bias": True, "fan_in_fan_out": True}),
        ("llama", {"target_modules": ["q_proj"], "bias": "all"}),
        ("llama", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
        ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]}),
        ("llama", {"target_modules": ["embed_tokens"], "modules_to_save": ["lm_head"]}),
        ("tied", {"target_modules": ["embed_tokens", "q_proj"], "ensure_weight_tying": True}),
    ],
)
def test_biases_and_embeddings(tmp_path, add_row, kind, config):
    check(tmp_path, add_row, kind, **{"r": 4, "lora_alpha": 6, **config})


# ---------------------------------------------------------------- diffusion


@pytest.mark.parametrize("alpha", [4, 6])
@pytest.mark.parametrize("form", ["diffusers", "kohya"])
def test_lora_files_of_a_unet(tmp_path, add_row, form, alpha):
    """The U-Net is merged by itself, and its output compared with that of the one with LoRA."""
    diffusers = pytest.importorskip("diffusers")
    from diffusers.utils import convert_state_dict_to_kohya
    from peft.utils import get_peft_model_state_dict

    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(**UNET, cross_attention_dim=8).eval()
    unet.save_pretrained(tmp_path / "base")
    config = LoraConfig(
        r=4, lora_alpha=alpha, target_modules=["to_q", "to_out.0", "conv1", "proj_in"]
    )
    unet.add_adapter(config)
    train(unet, scale=0.3)
    layers = get_peft_model_state_dict(unet)
    if form == "diffusers":
        pipeline = diffusers.StableDiffusionPipeline
        metadata = {"unet_lora_adapter_metadata": config.to_dict()}
        pipeline.save_lora_weights(tmp_path / "adapter", unet_lora_layers=layers, **metadata)
    else:
        (tmp_path / "adapter").mkdir()
        named = convert_state_dict_to_kohya(
            {f"unet.{name}": value for name, value in layers.items()}
        )
        alphas = {name: torch.tensor(float(alpha)) for name in named if name.endswith(".alpha")}
        assert alphas
        save_file(named | alphas, tmp_path / "adapter" / "lora.safetensors")
    given = {"base": tmp_path / "base", "output": tmp_path / "out", "method": "linear"}
    dare.merge(models=[tmp_path / "adapter"], verbose=False, **given)
    result = diffusers.UNet2DConditionModel(**UNET, cross_attention_dim=8).eval()
    (weights,) = (tmp_path / "out").glob("*.safetensors")
    result.load_state_dict(load_file(weights))
    inputs = torch.randn(2, 4, 8, 8), torch.tensor(3), torch.randn(2, 5, 8)
    with torch.no_grad():
        found, expected = (model(*inputs).sample.double() for model in (result, unet))
    off = float((found - expected).abs().max() / (expected.max() - expected.min()))
    add_row("adapters", "U-Net", f"a file of {form}, alpha {alpha}", off)
    assert off < TOLERANCE
