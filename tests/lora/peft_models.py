"""Adapters for tests: written by hand, or by PEFT."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from dare.inputs.lora import CONFIG_NAME, WEIGHTS_NAME

PREFIX = "base_model.model."


def write_adapter(folder: Path, tensors: Mapping[str, np.ndarray], **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    ranks = {name.rpartition(".lora_")[0]: len(v) for name, v in tensors.items() if "_A" in name}
    given = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **config}
    if config.keys().isdisjoint(("r", "rank_pattern")):
        given["rank_pattern"] = ranks
    (folder / CONFIG_NAME).write_text(json.dumps(given))
    save_file({PREFIX + name: value for name, value in tensors.items()}, folder / WEIGHTS_NAME)
    return folder


def read_adapter(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    stored = load_file(folder / WEIGHTS_NAME)
    assert all(key.startswith(PREFIX) for key in stored)
    config = json.loads((folder / CONFIG_NAME).read_text())
    return {key.removeprefix(PREFIX): value for key, value in stored.items()}, config


def pair(module: str, rows: int, rank: int, columns: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Factors of small multiples of 1/8, whose products and sums are exact in float32."""
    generator = np.random.default_rng(seed)
    sides = {"A": (rank, columns), "B": (rows, rank)}
    return {
        f"{module}.lora_{letter}.weight": generator.integers(-8, 8, shape).astype(np.float32) / 8
        for letter, shape in sides.items()
    }


def gaussian(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def product(tensors: Mapping[str, np.ndarray], module: str) -> np.ndarray:
    down = tensors[f"{module}.lora_A.weight"].astype(np.float64)
    up = tensors[f"{module}.lora_B.weight"].astype(np.float64)
    return up.reshape(len(up), -1) @ down.reshape(len(down), -1)


def train(folder: Path, model: Any, seed: int, **config: Any) -> Path:
    """Write an adapter with random weights in all that PEFT would train."""
    import torch
    from peft import LoraConfig, get_peft_model

    with quiet():
        tuned = get_peft_model(model, LoraConfig(**config))
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in tuned.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        tuned.save_pretrained(folder)
    return folder


def deltas(model: Any, folder: Path) -> dict[str, np.ndarray]:
    """What PEFT adds to a model's weights when it merges an adapter into them."""
    from peft import PeftModel

    plain = weights(model)
    with quiet():
        merged = PeftModel.from_pretrained(model, folder).merge_and_unload()
    return {name: value - plain[name] for name, value in weights(merged).items()}


def weights(model: Any) -> dict[str, np.ndarray]:
    return {name: value.double().numpy().copy() for name, value in model.state_dict().items()}


class quiet(warnings.catch_warnings):  # noqa: N801
    """Without the warnings of other people's packages while their code runs."""

    def __enter__(self) -> None:
        super().__enter__()
        for package in ("peft", "transformers", "torch", "huggingface_hub"):
            warnings.filterwarnings("ignore", module=rf"{package}(\..*)?")
