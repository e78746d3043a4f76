"""Pipelines and single files of diffusion models: what diffusers loads of a merge is the merge."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from shapes import UNET
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
)

import dare

diffusers = pytest.importorskip("diffusers")
sys.path.insert(0, str(Path(__file__).parents[1] / "inputs"))
from diffusion_models import stable_diffusion, wan  # noqa: E402

WEIGHTS = (0.5, 0.3, -0.2)
TEXT = {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2, "vocab_size": 8}
TOKENS = [*"abc", "a</w>", "b</w>", "c</w>", "<|startoftext|>", "<|endoftext|>"]


def clip(kind=CLIPTextModel):
    ends = {"bos_token_id": 6, "eos_token_id": 7, "pad_token_id": 7}
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 16, "projection_dim": 8}
    return kind(CLIPTextConfig(**TEXT, **ends, **sizes))


def tokenizer(folder):
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps({t: n for n, t in enumerate(TOKENS)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    files = (str(folder / name) for name in ("vocab.json", "merges.txt"))
    return CLIPTokenizer(*files, model_max_length=16)


def autoencoder():
    blocks = {
        "down_block_types": ["DownEncoderBlock2D"] * 2,
        "up_block_types": ["UpDecoderBlock2D"] * 2,
    }
    sizes = {"block_out_channels": [8, 16], "latent_channels": 4, "norm_num_groups": 4}
    return diffusers.AutoencoderKL(**blocks, **sizes)


def stable_diffusion_pipeline(folder):
    return diffusers.StableDiffusionPipeline(
        unet=diffusers.UNet2DConditionModel(**UNET, cross_attention_dim=8),
        vae=autoencoder(),
        text_encoder=clip(),
        tokenizer=tokenizer(folder),
        scheduler=diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
    )


def xl_pipeline(folder):
    added = {"addition_embed_type": "text_time", "addition_time_embed_dim": 8}
    added |= {"projection_class_embeddings_input_dim": 8 + 6 * 8, "cross_attention_dim": 16}
    tokens = tokenizer(folder)
    return diffusers.StableDiffusionXLPipeline(
        unet=diffusers.UNet2DConditionModel(**UNET, **added),
        vae=autoencoder(),
        text_encoder=clip(),
        text_encoder_2=clip(CLIPTextModelWithProjection),
        tokenizer=tokens,
        tokenizer_2=tokens,
        scheduler=diffusers.DDIMScheduler(steps_offset=1, clip_sample=False),
    )


def flux_pipeline(folder):
    tokens = tokenizer(folder)
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 8}
    return diffusers.FluxPipeline(
        transformer=diffusers.FluxTransformer2DModel(
            patch_size=1,
            in_channels=16,
            num_layers=2,
            num_single_layers=3,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=8,
            pooled_projection_dim=8,
            axes_dims_rope=(4, 4, 8),
        ),
        vae=autoencoder(),
        text_encoder=clip(),
        text_encoder_2=T5EncoderModel(T5Config(**sizes)),
        tokenizer=tokens,
        tokenizer_2=tokens,
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
    )


def networks(pipeline):
    return {n: m for n, m in pipeline.components.items() if isinstance(m, torch.nn.Module)}


def tuned(base, seed):
    torch.manual_seed(seed)
    model = copy.deepcopy(base)
    for network in networks(model).values():
        for parameter in network.parameters():
            parameter.data += 0.02 * torch.randn_like(parameter)
    return model


def merged_by_torch(base, models, kept=("vae",)):
    merged = copy.deepcopy(base)
    for name, network in networks(merged).items():
        own = [dict(networks(model)[name].named_parameters()) for model in models]
        for key, parameter in network.named_parameters():
            for weight, values in zip(WEIGHTS, own, strict=True):
                before = networks(base)[name].get_parameter(key)
                parameter.data += 0 if name in kept else weight * (values[key] - before)
    return merged


def denoise(pipeline):
    how = {"height": 16, "width": 16, "num_inference_steps": 1, "output_type": "latent"}
    how["generator"] = torch.Generator().manual_seed(0)
    if isinstance(pipeline, diffusers.FluxPipeline):
        how["max_sequence_length"] = 16
    pipeline.set_progress_bar_config(disable=True)
    for network in networks(pipeline).values():
        network.eval()
    return pipeline("a b c", **how).images


@pytest.mark.parametrize(
    ("make", "saving", "merging"),
    [
        (stable_diffusion_pipeline, {}, {}),
        (xl_pipeline, {"variant": "fp16"}, {"shard_size": "30kB"}),
        (flux_pipeline, {"max_shard_size": "20kB"}, {}),
    ],
)
def test_a_merged_pipeline_denoises_as_the_same_merge_made_in_torch(
    tmp_path, add_row, make, saving, merging
):
    torch.manual_seed(0)
    base = make(tmp_path / "tokens")
    models = [tuned(base, seed) for seed in (1, 2, 3)]
    paths = [tmp_path / name for name in ("base", "photo", "anime", "paint")]
    for pipeline, path in zip((base, *models), paths, strict=True):
        pipeline.save_pretrained(path, **saving)
    entries = [dare.ModelEntry(file=p, weight=w) for p, w in zip(paths[1:], WEIGHTS, strict=True)]
    given = {"base": paths[0], "models": entries, "output": tmp_path / "out", "method": "sum"}
    dare.merge(dare.Request.of(**given, verbose=False, **merging))
    assert dare.verify(tmp_path / "out").ok
    found = diffusers.DiffusionPipeline.from_pretrained(tmp_path / "out", local_files_only=True)
    expected = merged_by_torch(base, models)
    for name, network in networks(expected).items():
        state = networks(found)[name].state_dict()
        for key, value in network.state_dict().items():
            assert torch.allclose(state[key], value, atol=1e-6), (name, key)
    off = float((denoise(found) - denoise(expected)).abs().max())
    assert off < 1e-4
    add_row("formats", "pipeline of diffusers", "diffusers", type(base).__name__, off)
    assert not torch.allclose(denoise(found), denoise(base), atol=1e-3)


def single_files(tmp_path, shapes):
    torch.manual_seed(0)
    base = {name: 0.1 * torch.randn(shape) for name, shape in shapes.items()}
    tuned = {name: value + 0.02 * torch.randn_like(value) for name, value in base.items()}
    save_file(base, tmp_path / "base.safetensors")
    save_file(tuned, tmp_path / "tuned.safetensors")
    out = tmp_path / "out.safetensors"
    dare.merge(
        base=tmp_path / "base.safetensors",
        models=[tmp_path / "tuned.safetensors"],
        output=out,
        method="sum",
        weight=0.5,
        verbose=False,
    )
    with safe_open(out, "pt") as file:
        assert set(file.keys()) == set(shapes)
    return out, {name: value + 0.5 * (tuned[name] - value) for name, value in base.items()}


def same_values(loaded, expected):
    """The values of all tensors, however they are called and cut."""
    found = torch.cat([value.flatten() for value in loaded.state_dict().values()]).sort().values
    return torch.allclose(
        found, torch.cat([v.flatten() for v in expected]).sort().values, atol=1e-6
    )


def test_a_single_file_of_stable_diffusion_is_loaded(tmp_path):
    out, expected = single_files(tmp_path, stable_diffusion())
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(8, 8, 8, 8),
        cross_attention_dim=6,
        norm_num_groups=4,
        attention_head_dim=2,
    )
    unet.save_pretrained(tmp_path / "unet")
    loaded = diffusers.UNet2DConditionModel.from_single_file(
        str(out), config=str(tmp_path / "unet")
    )
    prefix = "model.diffusion_model."
    assert same_values(loaded, [v for n, v in expected.items() if n.startswith(prefix)])


def test_a_single_file_of_wan_is_loaded(tmp_path):
    out, expected = single_files(tmp_path, wan())
    model = diffusers.WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=12,
        text_dim=6,
        freq_dim=8,
        ffn_dim=32,
        num_layers=3,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
    )
    model.save_pretrained(tmp_path / "wan")
    loaded = diffusers.WanTransformer3DModel.from_single_file(
        str(out), config=str(tmp_path / "wan")
    )
    assert same_values(loaded, expected.values())
