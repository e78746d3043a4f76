"""Small models in quantised formats, made by formulas of torch; merged, loaded and compared.

As a program it does this on a GPU where there is one, and says how far logits are apart:
`python tests/real/quantised_models.py`.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    FineGrainedFP8Config,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mxfp4Config,
)

import dare

BLOCK = 128
FP8_MAX = 448
CODES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
TOKENS = torch.arange(48).reshape(2, 24)
NOISE = 0.05  # of a fine-tune, as a share of a weight's spread
SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def small_llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": 256, "intermediate_size": 384, "vocab_size": 64, **SIZES}
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(**sizes, tie_word_embeddings=False, dtype="bfloat16")
    ).bfloat16()


def small_gpt_oss() -> GptOssForCausalLM:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 64, "head_dim": 16, **SIZES}
    torch.manual_seed(0)
    config = GptOssConfig(
        **sizes, num_local_experts=4, num_experts_per_tok=2, sliding_window=16, dtype="bfloat16"
    )
    model = GptOssForCausalLM(config)
    return model.bfloat16()


def tuned(state: dict[str, torch.Tensor], seed: int) -> dict[str, torch.Tensor]:
    """Return a fine-tune: weights with a little noise."""
    torch.manual_seed(seed)
    return {
        name: (value.float() + NOISE * value.float().std() * torch.randn(value.shape)).bfloat16()
        for name, value in state.items()
    }


def is_fp8(name: str, value: torch.Tensor) -> bool:
    return value.ndim == 2 and ".layers." in name


def scale_of(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the scales of a weight: for blocks, rows or all of it."""
    if kind == "block":
        rows, columns = weight.shape
        blocks = weight.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        return blocks.abs().amax((1, 3)) / FP8_MAX
    return (weight.abs().amax(1, keepdim=True) if kind == "row" else weight.abs().amax()) / FP8_MAX


def to_fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if scale.ndim == 2 and scale.shape[0] < weight.shape[0]:
        scale = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return (weight / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def fp8_state(state: dict[str, torch.Tensor], kind: str) -> dict[str, torch.Tensor]:
    """Quantise the weights of layers as transformers stores them."""
    stored = {}
    for name, value in state.items():
        stored[name] = value
        if is_fp8(name, value):
            scale = scale_of(value.float(), kind)
            stored |= {name: to_fp8(value.float(), scale), f"{name}_scale_inv": scale}
    return stored


def mxfp4_state(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Pack experts as gpt-oss is published."""
    stored = {}
    for name, value in state.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = value
            continue
        groups = value.float().transpose(1, 2).unflatten(2, (-1, 32))
        exponents = torch.ceil(torch.log2(groups.abs().amax(3, keepdim=True) / 6))
        scaled = groups / torch.exp2(exponents)
        codes = (scaled.abs()[..., None] - CODES).abs().argmin(-1) + 8 * (scaled < 0)
        stored[f"{name}_blocks"] = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        stored[f"{name}_scales"] = (exponents[..., 0] + 127).to(torch.uint8)
    return stored


def write(
    folder: Path, model: torch.nn.Module, state: dict[str, torch.Tensor], settings: dict | None
) -> Path:
    folder.mkdir(parents=True)
    save_file(
        {name: value.contiguous() for name, value in state.items()}, folder / "model.safetensors"
    )
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    if settings is not None:
        config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


FORMATS = {
    "FP8": (
        small_llama,
        lambda state: fp8_state(state, "block"),
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
            "modules_to_not_convert": ["lm_head"],
        },
        FineGrainedFP8Config,
    ),
    "MXFP4": (small_gpt_oss, mxfp4_state, {"quant_method": "mxfp4"}, Mxfp4Config),
}


def make(folder: Path, name: str) -> tuple[Path, Path]:
    """Write a base and a fine-tune of it in a format."""
    build, store, settings, _ = FORMATS[name]
    model = build()
    state = model.state_dict()
    base = write(folder / "base", model, store(state), settings)
    return base, write(folder / "tuned", model, store(tuned(state, 1)), settings)


def merge(base: Path, model: Path, output: Path, **given: object) -> dare.Report:
    """Merge halfway between base and model."""
    models = [{"file": model, "weight": 0.5}]
    return dare.merge(
        base=base, models=models, output=output, method="linear", verbose=False, **given
    )


def load(folder: Path, **given: object) -> torch.nn.Module:
    """Load a model; nothing may be missing or left over."""
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, local_files_only=True, **given
    )
    wrong = {key: value for key, value in info.items() if value}
    assert not wrong, wrong
    return model.eval()


def logits(model: torch.nn.Module, device: str = "cpu") -> torch.Tensor:
    if device == "cpu" and not getattr(model, "is_quantized", False):
        model = model.float()  # BF16 is slow on processors
    with torch.no_grad():
        return model.to(device)(TOKENS.to(device)).logits.float().cpu()


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return how far logits are apart, as a share of their spread."""
    return float((found - expected).norm() / (expected - expected.mean()).norm())


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(f"transformers on {device}, torch {torch.__version__}")
    for name, (*_, settings) in FORMATS.items():
        with tempfile.TemporaryDirectory() as room:
            base, model = make(Path(room), name)
            report = merge(base, model, Path(room) / "out", format="input")
            merge(base, model, Path(room) / "plain", dtype="BF16")
            expected = logits(load(Path(room) / "plain"), device)
            print(report.recoded)
            ways = {
                "as it is": {"device_map": device},
                "dequantised": {"quantization_config": settings(dequantize=True)},
            }
            for way, how in ways.items():
                try:
                    found = logits(load(Path(room) / "out", **how), device)
                except Exception as error:  # kernels that must be fetched, most likely
                    print(f"{name}, {way}: {error!r:.300}")
                else:
                    print(f"{name}, {way}: logits {distance(found, expected):.4f} apart")


if __name__ == "__main__":
    sys.exit(main())
