"""Model directories of a few kilobytes, whose tokenizer is written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from dare.inputs.gguf import FAMILIES
from helpers import save

HEADS, KEY_HEADS, HEAD, WIDTH, LAYERS, ROWS = 4, 2, 8, 32, 2, 12
EXPERTS = 3
SHAPES = {
    "self_attn.q_proj": (HEADS * HEAD, WIDTH),
    "self_attn.k_proj": (KEY_HEADS * HEAD, WIDTH),
    "self_attn.v_proj": (KEY_HEADS * HEAD, WIDTH),
    "self_attn.o_proj": (WIDTH, HEADS * HEAD),
    "mlp.gate_proj": (40, WIDTH),
    "mlp.up_proj": (40, WIDTH),
    "mlp.down_proj": (WIDTH, 40),  # no whole blocks of Q8_0
    "self_attn.q_norm": (HEAD,),
    "self_attn.k_norm": (HEAD,),
    "self_attn.qkv_proj": ((HEADS + 2 * KEY_HEADS) * HEAD, WIDTH),
    "mlp.gate_up_proj": (80, WIDTH),
    "block_sparse_moe.gate": (EXPERTS, WIDTH),
    "block_sparse_moe.experts.*.w1": (24, WIDTH),
    "block_sparse_moe.experts.*.w2": (WIDTH, 24),
    "block_sparse_moe.experts.*.w3": (24, WIDTH),
    "mlp.gate": (EXPERTS, WIDTH),
    "mlp.experts.*.gate_proj": (24, WIDTH),
    "mlp.experts.*.up_proj": (24, WIDTH),
    "mlp.experts.*.down_proj": (WIDTH, 24),
    "mlp.shared_expert_gate": (1, WIDTH),
    "mlp.shared_expert.gate_proj": (40, WIDTH),
    "mlp.shared_expert.up_proj": (40, WIDTH),
    "mlp.shared_expert.down_proj": (WIDTH, 40),
}
MODEL_TYPES = {
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
}
PIECES = ["<unk>", "<s>", "</s>", "<0x0A>", "a", "b", "▁", "ab", "▁a", "▁ab"]


def parts_of(model_type: str) -> list[str]:
    """The parts of a layer: where GGUF has several forms of one, those that the models have."""
    parts = FAMILIES[MODEL_TYPES.get(model_type, model_type)].parts.values()
    others: tuple[str, ...] = ("block_sparse_moe",)
    if model_type in ("mixtral", "qwen2_moe", "qwen3_moe"):
        others = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    if model_type == "phi3":
        others = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj")
    return [part for part in parts if not part.startswith(others)]


def weights(parts: Any, seed: int = 0, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Tensors under their Hugging Face names."""
    rng = np.random.default_rng(seed)
    shapes = {"model.embed_tokens.weight": (ROWS, WIDTH), "model.norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        for part in parts:
            for number in range(EXPERTS if "*" in part else 1):
                name = part.replace("*", str(number))
                shapes[f"model.layers.{layer}.{name}.weight"] = SHAPES.get(part, (WIDTH,))
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def config(model_type: str, **more: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": 128,
        "hidden_size": WIDTH,
        "intermediate_size": 40,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": HEAD,
        "vocab_size": ROWS,
        "rms_norm_eps": 1e-5,
        "sliding_window": 16,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "num_experts_per_tok": 2,
        "num_local_experts" if model_type == "mixtral" else "num_experts": EXPERTS,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "decoder_sparse_step": 1,
        "norm_topk_prob": model_type == "qwen3_moe",
        **more,
    }


def byte_tokenizer(*steps: dict[str, Any], **model: Any) -> dict[str, Any]:
    """A tokenizer of bytes that splits text in these steps."""
    return {
        "added_tokens": [
            {"id": 0, "content": "<|end|>", "special": False},
            {"id": 1, "content": "x▁y", "special": False},
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(steps)},
        "model": {
            "type": "BPE",
            "vocab": {"a": 2, "b": 3, "ab": 4, "Ġ": 5, "Ġab": 6},
            "merges": ["a b", ["Ġ", "ab"]],
            **model,
        },
    }


BY_WORDS = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
DIGITS = {"type": "Digits", "individual_digits": True}


def split(regex: str) -> dict[str, Any]:
    pattern = {"Regex": regex}
    return {"type": "Split", "behavior": "Isolated", "invert": False, "pattern": pattern}


def piece_tokenizer() -> dict[str, Any]:
    """A tokenizer as sentencepiece makes one: pieces, with bytes for what they lack."""
    merges = [["a", "b"], ["▁", "a"], ["▁", "ab"], ["▁a", "b"]]
    special = [{"id": n, "content": PIECES[n], "special": True} for n in range(3)]
    single = [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}]
    normalizers = [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
    ]
    return {
        "added_tokens": special,
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": None,
        "post_processor": {"type": "TemplateProcessing", "single": single},
        "model": {
            "type": "BPE",
            "byte_fallback": True,
            "unk_token": "<unk>",
            "vocab": {piece: number for number, piece in enumerate(PIECES)},
            "merges": merges,
        },
    }


def make_directory(
    folder: Path,
    tensors: dict[str, np.ndarray],
    settings: dict[str, Any],
    tokenizer: dict[str, Any] | None = None,
) -> Path:
    save(folder / "model.safetensors", tensors)
    special = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ x }}"}
    written = {
        "config": settings,
        "tokenizer": piece_tokenizer() if tokenizer is None else tokenizer,
        "tokenizer_config": special,
    }
    for name, document in written.items():
        (folder / f"{name}.json").write_text(json.dumps(document, ensure_ascii=False))
    return folder
