"""Models of transformers with a few thousand random weights, by the names of their classes."""

from __future__ import annotations

import warnings
from typing import Any

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    import transformers

TOKENS = torch.tensor([[3, 39, 39, 39, 39, 7, 8, 9]])
TEXT = {
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ENCODER = {name: TEXT[name] for name in list(TEXT)[1:5]}
IMAGE = {**ENCODER, "image_size": 8, "patch_size": 4}
HEAD = {**TEXT, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
MIXTURE = {**HEAD, **EXPERTS, "moe_intermediate_size": 12}
DEEPSEEK = {
    **TEXT,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_shared_experts": 1,
}
GPT = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 1}
GPT |= {"eos_token_id": 2, "n_positions": 64}
MASKED = {**{key: TEXT[key] for key in TEXT if key != "num_key_value_heads"}, "embedding_size": 16}
T5 = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
BART = {
    "vocab_size": 40,
    "d_model": 16,
    **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": 24 for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
    "max_position_embeddings": 64,
    **{f"{name}_token_id": number for number, name in enumerate(("pad", "bos", "eos"))},
    "decoder_start_token_id": 2,
}
AUDIO = {
    **ENCODER,
    "vocab_size": 40,
    "conv_dim": (8, 8),
    "conv_kernel": (4, 4),
    "conv_stride": (2, 2),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
LLAVA = {
    "vision_config": {"model_type": "clip_vision_model", **IMAGE},
    "text_config": {"model_type": "llama", **TEXT},
    "image_token_index": 39,
    "tie_word_embeddings": False,
}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
QWEN2_VL = {
    "text_config": {**TEXT, "rope_parameters": ROPE},
    "vision_config": {
        **{"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2},
        **{"patch_size": 4, "spatial_merge_size": 2},
    },
    **{"image_token_id": 38, "video_token_id": 37},
    **{"vision_start_token_id": 36, "vision_end_token_id": 35},
    "tie_word_embeddings": False,
}
MAMBA2 = {"num_heads": 4, "head_dim": 8, "n_groups": 1, "chunk_size": 4, "state_size": 4}
JAMBA = {"mamba_d_state": 4, "mamba_dt_rank": 4, "use_mamba_kernels": False}
JAMBA |= {
    f"{kind}_layer_{of}": n
    for kind in ("attn", "expert")
    for of, n in (("period", 2), ("offset", 1))
}
NEXT = {f"linear_{key}": 2 for key in ("num_key_heads", "num_value_heads")}
NEXT |= {f"linear_{key}_head_dim": 8 for key in ("key", "value")}
NEXT |= {
    "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 8,
}
SETTINGS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        [
            f"{name}ForCausalLM"
            for name in (
                *("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3", "Phi3"),
                *("Olmo2", "Granite", "Cohere", "Starcoder2", "Glm4", "SmolLM3", "Nemotron"),
            )
        ],
        HEAD,
    ),
    **dict.fromkeys(
        [f"{name}ForCausalLM" for name in ("Falcon", "Phi", "StableLm", "GPTNeoX")], TEXT
    ),
    **dict.fromkeys(
        [f"{name}ForCausalLM" for name in ("Mixtral", "Qwen3Moe", "Olmoe", "GraniteMoe", "GptOss")],
        MIXTURE,
    ),
    "Qwen2MoeForCausalLM": {**MIXTURE, "shared_expert_intermediate_size": 8},
    "Qwen3NextForCausalLM": {**MIXTURE, **NEXT},
    "Llama4ForCausalLM": {**MIXTURE, "intermediate_size_mlp": 24},
    "JambaForCausalLM": {**TEXT, **EXPERTS, **JAMBA},
    "DeepseekV3ForCausalLM": DEEPSEEK,
    **dict.fromkeys(("HrmTextForCausalLM", "NomicBertForMaskedLM", "GteModel"), TEXT),
    "GPT2LMHeadModel": GPT,
    "GPTJForCausalLM": {**GPT, "rotary_dim": 4},
    "GPTBigCodeForCausalLM": GPT,
    "GPTNeoForCausalLM": {
        **{"vocab_size": 40, "hidden_size": 16, "num_layers": 2, "num_heads": 2},
        "attention_types": [[["global", "local"], 1]],
    },
    "OPTForCausalLM": {**TEXT, "ffn_dim": 24, "word_embed_proj_dim": 16},
    "BloomForCausalLM": {"vocab_size": 40, "hidden_size": 16, "n_layer": 2, "n_head": 2},
    "MptForCausalLM": {"vocab_size": 40, "d_model": 16, "n_layers": 2, "n_heads": 2},
    "MambaForCausalLM": {**TEXT, "state_size": 4},
    "Mamba2ForCausalLM": {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, **MAMBA2},
    "T5ForConditionalGeneration": {**T5, "decoder_start_token_id": 0},
    "BartForConditionalGeneration": BART,
    "WhisperForConditionalGeneration": {
        **BART,
        **{"num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 16},
    },
    **dict.fromkeys(
        [f"{name}ForMaskedLM" for name in ("Bert", "Roberta", "DebertaV2", "Electra", "Albert")],
        MASKED,
    ),
    "BertForSequenceClassification": MASKED,
    "ModernBertForMaskedLM": {**MASKED, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2},
    "DistilBertForMaskedLM": {
        **{"vocab_size": 40, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 24},
    },
    "ViTForImageClassification": IMAGE,
    "Dinov2ForImageClassification": IMAGE,
    "CLIPModel": {"text_config": MASKED, "vision_config": IMAGE, "projection_dim": 16},
    "SiglipModel": {"text_config": {**MASKED, "projection_size": 16}, "vision_config": IMAGE},
    "Wav2Vec2ForCTC": AUDIO,
    "LlavaForConditionalGeneration": LLAVA,
    "Qwen2VLForConditionalGeneration": QWEN2_VL,
    "Qwen3VLMoeForConditionalGeneration": {
        "text_config": {**MIXTURE, "rope_parameters": ROPE},
        "vision_config": {
            **{**IMAGE, "depth": 1, "num_heads": 2, "out_hidden_size": 16},
            **{"num_position_embeddings": 4, "deepstack_visual_indexes": [0]},
        },
        "tie_word_embeddings": False,
    },
}


def inputs_of(architecture: str) -> dict[str, torch.Tensor]:
    """Something that a model of this class takes."""
    text = {"input_ids": TOKENS}
    image = {"pixel_values": torch.linspace(-1, 1, 192).reshape(1, 3, 8, 8)}
    start = {"decoder_input_ids": TOKENS[:, :3]}
    picture = torch.tensor([[3, 36, 38, 35, 7, 8]])
    return {
        "T5ForConditionalGeneration": text | start,
        "BartForConditionalGeneration": text | start,
        "WhisperForConditionalGeneration": {
            "input_features": torch.linspace(-1, 1, 128).reshape(1, 8, 16),
            **start,
        },
        "ViTForImageClassification": image,
        "Dinov2ForImageClassification": image,
        "CLIPModel": text | image,
        "SiglipModel": text | image,
        "LlavaForConditionalGeneration": text | image,
        "Wav2Vec2ForCTC": {"input_values": torch.linspace(-1, 1, 64).reshape(1, 64)},
        "Qwen2VLForConditionalGeneration": {
            "input_ids": picture,
            "pixel_values": torch.linspace(-1, 1, 4 * 96).reshape(4, 96),
            "image_grid_thw": torch.tensor([[1, 2, 2]]),
            "mm_token_type_ids": (picture == 38).int(),
        },
    }.get(architecture, text)


def build(architecture: str) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a model of a class, always the same one, and something that it takes."""
    torch.manual_seed(0)
    kind = getattr(transformers, architecture)
    model = kind(kind.config_class(**SETTINGS[architecture]))
    return model.eval(), inputs_of(architecture)
