"""The demonstration's model in PyTorch: Llama's arithmetic over a dict of tensors.

Tensors have the names and shapes of Hugging Face's LlamaForCausalLM with tied embeddings. Bytes
are tokens. Functions take the weights as an argument, so that a merge is scored like a model.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

Weights = dict[str, Tensor]

HIDDEN, LAYERS, HEADS, INNER, VOCABULARY, CONTEXT = 128, 5, 4, 344, 256, 256
HEAD = HIDDEN // HEADS
ROPE_THETA = 10_000.0
NORM_EPSILON = 1e-5
EMBEDDING = "model.embed_tokens.weight"


def initial_weights(seed: int) -> Weights:
    """Draw a fresh model; what writes into the residual stream starts smaller, as in GPT-2."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, deviation: float = 0.02) -> Tensor:
        return deviation * torch.randn(shape, generator=generator)

    residual = 0.02 / math.sqrt(2 * LAYERS)
    weights = {EMBEDDING: normal(VOCABULARY, HIDDEN), "model.norm.weight": torch.ones(HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name in ("q_proj", "k_proj", "v_proj"):
            weights[f"{prefix}self_attn.{name}.weight"] = normal(HIDDEN, HIDDEN)
        weights[f"{prefix}self_attn.o_proj.weight"] = normal(HIDDEN, HIDDEN, deviation=residual)
        for name in ("gate_proj", "up_proj"):
            weights[f"{prefix}mlp.{name}.weight"] = normal(INNER, HIDDEN)
        weights[f"{prefix}mlp.down_proj.weight"] = normal(HIDDEN, INNER, deviation=residual)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = torch.ones(HIDDEN)
    return weights


def logits(weights: Weights, tokens: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Score the next byte at each position; tokens are [rows, positions]."""
    weights = {name: weight.to(dtype) for name, weight in weights.items()}
    cosine, sine = _angles(tokens.shape[1], tokens.device, dtype)

    def heads(hidden: Tensor, name: str) -> Tensor:
        return (hidden @ weights[name].T).unflatten(-1, (HEADS, HEAD)).transpose(1, 2)

    def norm(stream: Tensor, name: str) -> Tensor:
        return functional.rms_norm(stream, (HIDDEN,), weights[name], NORM_EPSILON)

    stream = weights[EMBEDDING][tokens]
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        hidden = norm(stream, f"{prefix}input_layernorm.weight")
        query, key, value = (heads(hidden, f"{prefix}self_attn.{n}_proj.weight") for n in "qkv")
        mixed = functional.scaled_dot_product_attention(
            _rotate(query, cosine, sine), _rotate(key, cosine, sine), value, is_causal=True
        )
        mixed = mixed.transpose(1, 2).flatten(2)
        stream = stream + mixed @ weights[f"{prefix}self_attn.o_proj.weight"].T
        hidden = norm(stream, f"{prefix}post_attention_layernorm.weight")
        gate = functional.silu(hidden @ weights[f"{prefix}mlp.gate_proj.weight"].T)
        inner = gate * (hidden @ weights[f"{prefix}mlp.up_proj.weight"].T)
        stream = stream + inner @ weights[f"{prefix}mlp.down_proj.weight"].T
    return (norm(stream, "model.norm.weight") @ weights[EMBEDDING].T).float()


def _angles(length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    frequencies = ROPE_THETA ** (-torch.arange(0, HEAD, 2, device=device) / HEAD)
    angles = torch.outer(torch.arange(length, device=device), frequencies).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _rotate(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cosine + torch.cat((-second, first), dim=-1) * sine


def save(weights: Weights, folder: Path) -> None:
    """Write a model as Hugging Face keeps one, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    halved = {name: weight.bfloat16().cpu().contiguous() for name, weight in weights.items()}
    save_file(halved, folder / "model.safetensors", metadata={"format": "pt"})
    for name, content in _CONFIGURATION.items():
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (folder / name).write_text(text + "\n", encoding="utf-8")


def _spelling(byte: int) -> str:
    """The character by which byte-level tokenizers write a byte: itself, or one from 256 on."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [other for other in range(256) if other not in visible]
    return chr(byte) if byte in visible else chr(256 + hidden.index(byte))


def _byte_level(**settings: Any) -> dict[str, Any]:
    return {"type": "ByteLevel", "trim_offsets": True, **settings}


_CONFIGURATION: dict[str, Any] = {
    "config.json": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": NORM_EPSILON,
        "rope_theta": ROPE_THETA,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 10,
        "pad_token_id": None,
        "torch_dtype": "bfloat16",
    },
    "generation_config.json": {"do_sample": False, "eos_token_id": 10, "max_new_tokens": 40},
    "tokenizer.json": {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": _byte_level(add_prefix_space=False, use_regex=False),
        "post_processor": None,
        "decoder": _byte_level(add_prefix_space=False, use_regex=False),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {_spelling(byte): byte for byte in range(256)},
            "merges": [],
        },
    },
    "tokenizer_config.json": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
    },
}
"""A token is a byte, and its number the byte's value; the end of a line ends an answer."""
