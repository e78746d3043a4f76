"""Tiny models that mergekit and we can read: Llamas, with adapters and tokenizers, and others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

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
OWN_TOKENS = {"with-tokens": "<|base|>", "with-tokens-a": "<|a|>", "with-tokens-b": "<|b|>"}
OWN_TOKENS["with-tokens-c"] = "<|a|>"  # which another model has too


def shapes(vocabulary: int = VOCABULARY) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a Llama's tensors."""
    outside = {
        "model.embed_tokens.weight": (vocabulary, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (vocabulary, HIDDEN),
    }
    inside = {
        f"model.layers.{layer}.{part}.weight": shape
        for layer in range(LAYERS)
        for part, shape in PARTS.items()
    }
    return outside | inside


SHAPES = shapes()


def write_models(folder: Path) -> None:
    """Write a base, fine-tunes of it, two like one of them, one far away, and other kinds."""
    generator = torch.Generator().manual_seed(0)

    def noise(size: float) -> dict[str, torch.Tensor]:
        return {n: size * torch.randn(s, generator=generator) for n, s in SHAPES.items()}

    base = noise(0.02)
    sizes = {"base": 0.0, "math": 0.001, "code": 0.001, "chat": 0.001, "far": 0.02}
    changes = {name: noise(size) for name, size in sizes.items()}
    for name in ("related", "alike"):  # to math, and to each other
        own = noise(0.001)
        changes[name] = {n: change + own[n] for n, change in changes["math"].items()}
    for name, change in changes.items():
        _write(folder / name, {n: base[n] + change[n] for n in base}, CONFIG)
    for name in ("base", "math", "code"):
        _write_mixture(folder / f"experts-{name}", folder / name)
    for name in ("lora", "lora-too"):
        _write_adapter(folder / name, generator)
    _write_others(folder)
    _write_with_tokens(folder, generator)


def _write(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, object]) -> None:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


def _write_mixture(folder: Path, dense: Path) -> None:
    """Write a Mixtral with two experts, stored apart, both made of a dense model's layers."""
    tensors = {}
    for name, tensor in load_file(dense / "model.safetensors").items():
        layer, is_inner, part = name.partition(".mlp.")
        if not is_inner:
            tensors[name] = tensor
            continue
        tensors[f"{layer}.block_sparse_moe.gate.weight"] = tensor.new_zeros((2, HIDDEN))
        number = {"gate_proj": 1, "down_proj": 2, "up_proj": 3}[part.removesuffix(".weight")]
        for expert in range(2):
            own = f"{layer}.block_sparse_moe.experts.{expert}.w{number}.weight"
            tensors[own] = tensor.roll(expert) * (1 + 2 * expert)
    kind = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"}
    _write(folder, tensors, {**CONFIG, **kind, "num_local_experts": 2})


def _write_adapter(folder: Path, generator: torch.Generator) -> None:
    tensors = {}
    for layer in range(LAYERS):
        for part in ("self_attn.q_proj", "mlp.up_proj"):
            rows, columns = PARTS[part]
            name = f"base_model.model.model.layers.{layer}.{part}"
            tensors[f"{name}.lora_A.weight"] = 0.1 * torch.randn((4, columns), generator=generator)
            tensors[f"{name}.lora_B.weight"] = 0.01 * torch.randn((rows, 4), generator=generator)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": "base",
        "task_type": "CAUSAL_LM",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "up_proj"],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def _write_others(folder: Path) -> None:
    """Write a GPT-2, a T5 and a Gemma with eyes, and fine-tunes of the last two."""
    import transformers as t

    torch.manual_seed(0)
    gpt2 = t.GPT2Config(n_layer=4, n_embd=32, n_head=2, vocab_size=101, n_positions=64)
    t.GPT2LMHeadModel(gpt2).save_pretrained(folder / "gpt2")
    sizes = {"d_model": 32, "d_ff": 48, "d_kv": 16, "num_heads": 2, "num_layers": 2}
    t5 = t.T5Config(**sizes, vocab_size=101, feed_forward_proj="gated-gelu")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    more = {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 101}
    text = t.Gemma3TextConfig(**sizes, **more, num_hidden_layers=2)
    sizes |= {"num_hidden_layers": 3, "image_size": 16, "patch_size": 8}
    vision = t.SiglipVisionConfig(**sizes, vision_use_head=False)
    vlm = t.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    for name, model in (
        ("t5", t.T5ForConditionalGeneration(t5)),
        ("vlm", t.Gemma3ForConditionalGeneration(vlm)),
    ):
        _write_published(folder / name, model)
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.add_(0.001 * torch.randn_like(tensor))
        _write_published(folder / f"{name}-tuned", model)


def _write_published(folder: Path, model: Any) -> None:
    """Write a model with the names that published files have."""
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = {
        name.replace("vision_tower.", "vision_tower.vision_model."): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})


def _write_with_tokens(folder: Path, generator: torch.Generator) -> None:
    """Write models whose tokenizers have some tokens in common, in another order."""
    import tokenizers as k
    from transformers import PreTrainedTokenizerFast

    common = {"base": [*"0123456789"], "other": [*"9876543210"]}
    base = {n: 0.02 * torch.randn(s, generator=generator) for n, s in shapes(12).items()}
    for name, own in OWN_TOKENS.items():
        words = ["<s>", *common["base" if name == "with-tokens" else "other"]]
        model = k.models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<s>")
        tokenizer = k.Tokenizer(model)
        tokenizer.pre_tokenizer = k.pre_tokenizers.Whitespace()
        wrapped = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>"
        )
        wrapped.add_tokens([own])
        tensors = {
            n: tensor + 0.001 * torch.randn(tensor.shape, generator=generator)
            for n, tensor in base.items()
        }
        _write(folder / name, tensors, {**CONFIG, "vocab_size": 12})
        wrapped.save_pretrained(folder / name)
