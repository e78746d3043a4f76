"""Small models of the architectures that GGUF is written for, with tokenizers trained here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from training import TEXTS
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LOWER, UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
BEFORE = r"[^\r\n\p{L}\p{N}]?"
SPLITS = {
    "llama-bpe": rf"{CONTRACTIONS}|{LETTERS}|\p{{N}}{{1,3}}|{OTHERS}",
    "qwen2": rf"{CONTRACTIONS}|{LETTERS}|\p{{N}}|{OTHERS}",
    "tekken": rf"{BEFORE}{UPPER}*{LOWER}+|{BEFORE}{UPPER}+{LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
# Each with its tokenizer: a way to split bytes, or pieces with a space before a text or without.
KINDS = {
    "llama": "llama-bpe",
    "mistral": "pieces with a space",
    "mixtral": "pieces with a space",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2",
    "qwen3": "qwen2",
    "qwen3_moe": "qwen2",
    "phi3": "pieces with a space",
    "gemma": "pieces",
    "gemma2": "pieces",
    "gemma3_text": "pieces",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MORE = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {**EXPERTS, "num_experts": 3, "shared_expert_intermediate_size": 64},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True},
    "phi3": {"bos_token_id": 1, "eos_token_id": 2},
    "llama": {"rope_parameters": LLAMA3_ROPE},
    "gemma2": {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
}
SLIDING = {"query_pre_attn_scalar": 16, "sliding_window": 32}


def make_byte_tokenizer(splitter: str) -> Tokenizer:
    """Train a tokenizer of bytes that splits text in one of the ways that llama.cpp knows."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=splitter in ("llama-bpe", "tekken")))
    steps = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitter not in SPLITS)]
    if splitter in SPLITS:
        steps.insert(0, pre_tokenizers.Split(Regex(SPLITS[splitter]), "isolated"))
    if splitter == "smollm":
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TEXTS.values(), "12 345 6789 " * 5], trainer)
    if splitter == "llama-bpe":
        tokenizer.post_processor = template(0)
    return tokenizer


def make_piece_tokenizer(*, has_space: bool) -> Tokenizer:
    """Train a tokenizer as sentencepiece makes one, whose pieces are merged in any way."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    steps = [normalizers.Prepend("▁")] * has_space + [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{n:02X}>" for n in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=620, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator("".join(TEXTS.values()).split("\n"), trainer)
    document = json.loads(tokenizer.to_str())
    document["added_tokens"] = document["added_tokens"][:3]
    ranks = document["model"]["vocab"]
    pieces = [piece for piece in sorted(ranks, key=ranks.get) if piece not in special]
    cuts = ((p[:n], p[n:]) for p in pieces for n in range(1, len(p)))
    document["model"]["merges"] = [cut for cut in cuts if set(pieces).issuperset(cut)]
    made = Tokenizer.from_str(json.dumps(document))
    made.post_processor = template(1)
    return made


def template(number: int) -> Any:
    return processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", number)]
    )


def make_model(kind: str, folder: Path, splitter: str | None = None) -> Path:
    """Save a model of random weights with its tokenizer; three rows have no token."""
    name = splitter or KINDS[kind]
    is_pieces = name.startswith("pieces")
    made = (
        make_piece_tokenizer(has_space=name != "pieces") if is_pieces else make_byte_tokenizer(name)
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    config = AutoConfig.for_model(
        kind,
        vocab_size=len(tokenizer) + 3,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        pad_token_id=0,
        **MORE.get(kind, {}),
        **(SLIDING if kind in ("gemma2", "gemma3_text") else {}),
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_norm = name.endswith("norm.weight") and not kind.startswith("gemma")
            spread = 0.1 if weight.dim() == 1 else 0.6 / weight.shape[-1] ** 0.5
            weight.copy_(torch.randn_like(weight) * spread + is_norm)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
