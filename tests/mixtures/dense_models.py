"""Tiny language models with random weights and a tokenizer of words, written by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

WORDS = ["<s>", "</s>", "<unk>", "def", "f", "x", "return", "once", "upon", "a", "time", "king"]
LAYERS, WIDTH, INNER = 2, 32, 48
CLASSES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}


def write_models(folder: Path, kind: str, names: tuple[str, ...], **settings: Any) -> None:
    """Write a model for each name into a folder of that name, no two alike."""
    tokenizer = Tokenizer(WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    config = getattr(transformers, f"{CLASSES[kind]}Config")(
        vocab_size=len(WORDS),
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=None,
        **settings,
    )
    for seed, name in enumerate(names):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{CLASSES[kind]}ForCausalLM")(config)
        with torch.no_grad():
            for parameter in model.parameters():  # biases and norms too
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(folder / name)
        fast.save_pretrained(folder / name)
