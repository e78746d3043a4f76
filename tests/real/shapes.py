"""Small models that several tests build, and how far their logits are apart."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

TOLERANCE = 1e-5  # of the range of the logits
TOKENS = torch.arange(48).reshape(2, 24) % 40
SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
UNET = {
    "block_out_channels": (8, 16),
    "layers_per_block": 1,
    "sample_size": 8,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "norm_num_groups": 4,
    "attention_head_dim": 4,
}


def build_causal(kind: str, settings: dict[str, Any]) -> Any:
    """Return a language model of random weights, by the name that its configuration begins with."""
    config = getattr(transformers, f"{kind}Config")(**settings)
    torch.manual_seed(0)
    head = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    model = getattr(transformers, head)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.2)
    return model.eval()


def load_causal(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def difference(one: Any, other: Any) -> float:
    """Return the largest difference of two models' logits, as a part of their range."""
    with torch.no_grad():
        found, expected = (m(input_ids=TOKENS).logits.double().numpy() for m in (one, other))
    return float(np.abs(found - expected).max() / np.ptp(expected))
