"""The shapes of small models that several tests build."""

import torch

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
