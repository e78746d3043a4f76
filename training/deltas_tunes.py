"""Fine-tunes on which delta files are measured, and how each is scored, item by item.

The demonstration's three models come with the package; those of MiniLM are written by minilm.py,
and are stored here in bfloat16, base and all, as models are.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from minilm import JOBS, Encoder, load_head, minilm
from minilm_data import TASKS as TEXT_TASKS
from minilm_data import Examples
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch.nn import functional

from dare.demo.llama import Llama
from dare.demo.merges import BASE, CONFIG, TUNED
from dare.demo.tasks import END, TASKS, Exercise

Numbers = NDArray[np.float64]

PROMPTS = 1000
"""Held-out prompts of a task of the demonstration, if it has so many."""
WEIGHTS = "model.safetensors"
TEXT_TUNES = ("docstrings", "sentiment", "lora")
"""Models of minilm.py: two full fine-tunes and a LoRA, merged into the weights."""


@dataclass(frozen=True)
class Items:
    """What a model did on each held-out item."""

    right: Numbers
    """1 where its answer was right, else 0."""
    likelihood: Numbers
    """The logarithm of the probability that it gave to the right answer, in nats."""


@dataclass(frozen=True)
class Tune:
    """A base, a fine-tune of it, and how weights of their kind are scored."""

    name: str
    base: Path
    model: Path
    score: Callable[[Path], Items]
    """Of a safetensors file with all weights."""


def demo_tunes() -> list[Tune]:
    """The demonstration's models, each on its own task."""
    return [
        Tune(task.name, BASE, TUNED[task.name], partial(score_prompts, task.name)) for task in TASKS
    ]


def score_prompts(name: str, weights: Path) -> Items:
    """Score held-out prompts: greedy decoding's answer, and the right answer's probability."""
    task = next(task for task in TASKS if task.name == name)
    examples = task.examples("test", PROMPTS)
    model = Llama(weights, CONFIG)
    right, likelihood = np.zeros(len(examples)), np.zeros(len(examples))
    for rows in _alike(examples):
        texts = [examples[row].prompt + examples[row].answer + END for row in rows]
        tokens = np.array([list(text.encode("latin-1")) for text in texts], np.intp)
        answer = slice(len(examples[rows[0]].prompt) - 1, None)
        logits = model.logits(tokens[:, :-1])[:, answer].astype(np.float64)
        wanted = tokens[:, 1:][:, answer]
        total = np.logaddexp.reduce(logits, axis=-1)
        chosen = np.take_along_axis(logits, wanted[..., None], axis=-1)[..., 0]
        right[rows] = (logits.argmax(-1) == wanted).all(axis=1)
        likelihood[rows] = (chosen - total).sum(axis=1)
    return Items(right, likelihood)


def _alike(examples: list[Exercise]) -> list[list[int]]:
    """Examples whose prompts and whose answers are as long: a batch needs no padding."""
    groups: dict[tuple[int, int], list[int]] = {}
    for row, (prompt, answer) in enumerate(examples):
        groups.setdefault((len(prompt), len(answer)), []).append(row)
    return list(groups.values())


def text_tunes(written: Path, scratch: Path) -> list[Tune]:
    """MiniLM's fine-tunes in bfloat16, each with its own head on its own task."""
    torch.set_num_threads(1)
    base = in_bfloat16(minilm(), scratch / "base")
    return [
        Tune(
            name,
            base,
            in_bfloat16(written / name, scratch / name),
            partial(score_texts, written, name),
        )
        for name in TEXT_TUNES
    ]


def in_bfloat16(model: Path, output: Path) -> Path:
    """Write a model's directory with all weights rounded to bfloat16, and nothing but weights."""
    output.mkdir(parents=True, exist_ok=True)
    shutil.copy(model / "config.json", output)
    weights = load_file(model / WEIGHTS)
    short = {
        name: value.to(torch.bfloat16)
        for name, value in weights.items()
        if value.is_floating_point()
    }
    save_file(short, output / WEIGHTS, {"format": "pt"})
    return output


@cache
def _encoder() -> Encoder:
    return Encoder.load(minilm())


@cache
def _held_out(task: str) -> Examples:
    return TEXT_TASKS[task]().held_out


def score_texts(written: Path, name: str, weights: Path) -> Items:
    """Score held-out texts: the label of the encoder and the model's head, in float32."""
    examples, head, encoder = _held_out(JOBS[name].task), load_head(written, name), _encoder()
    values = {key: value.float() for key, value in load_file(weights).items()}
    encoder.model.load_state_dict(values, strict=False)  # positions are not stored
    targets = torch.tensor(examples.targets)
    scores = head(encoder.all_vectors(examples.texts))
    likelihood = -functional.cross_entropy(scores, targets, reduction="none")
    right = scores.argmax(1) == targets
    return Items(right.double().numpy(), likelihood.double().numpy())
