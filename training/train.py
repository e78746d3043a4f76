"""Trains the demonstration's models: a base, and three fine-tunes of it.

    python training/train.py kjv.txt src/dare/demo/models

README.md says where the text comes from, and what the settings are for.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from data import english, exercises, training_examples
from model import CONTEXT, EMBEDDING, Weights, initial_weights, logits, save
from torch import Tensor
from torch.nn import functional

from dare.demo.tasks import END, TASKS, Exercise, held_out_english

DEVICE = "cuda"


@dataclass(frozen=True)
class Settings:
    """How a model is trained."""

    steps: int
    learning_rate: float
    averaging: float
    """Share of the newest weights in the running mean, which is what is kept."""
    english_rows: int
    """Windows of English in a step."""
    exercise_rows: int
    """Windows of each task's exercises in a step."""
    seed: int
    weight_decay: float = 0.0
    example_rows: int = 0
    """Examples of the task in a step."""
    distance_weight: float = 0.0
    """Weight of ‖delta‖² in the loss."""


BASE = Settings(
    steps=8_000,
    learning_rate=3e-3,
    averaging=0.003,
    english_rows=128,
    exercise_rows=42,
    seed=0,
    weight_decay=0.1,
)
TUNE = Settings(
    steps=3_000,
    learning_rate=4e-5,
    averaging=0.01,
    english_rows=32,
    exercise_rows=16,
    seed=1,
    example_rows=512,
    distance_weight=1e-4,
)


class Text:
    """Text on the device, cut into windows that start at a line, or anywhere."""

    def __init__(self, text: bytes, *, at_lines: bool) -> None:
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(DEVICE)
        starts = torch.arange(len(text), device=DEVICE)
        if at_lines:
            starts = torch.nonzero(self.bytes == ord(END)).flatten() + 1
        self.starts = starts[starts < len(text) - CONTEXT]

    def draw(self, rows: int) -> Tensor:
        """Draw windows of CONTEXT + 1 bytes: [rows, CONTEXT + 1]."""
        starts = self.starts[torch.randint(len(self.starts), (rows,), device=DEVICE)]
        return self.bytes[starts[:, None] + torch.arange(CONTEXT + 1, device=DEVICE)].long()


class Examples:
    """Examples on the device: one in a row, and which of its bytes are the answer."""

    def __init__(self, examples: Sequence[Exercise]) -> None:
        width = max(len(prompt) + len(answer) for prompt, answer in examples) + 1
        lines = [(prompt + answer + END).ljust(width).encode() for prompt, answer in examples]
        tokens = torch.frombuffer(bytearray(b"".join(lines)), dtype=torch.uint8).view(-1, width)
        starts = torch.tensor([len(prompt) for prompt, _ in examples])[:, None]
        stops = torch.tensor([len(p) + len(a) for p, a in examples])[:, None]
        places = torch.arange(width)
        self.tokens = tokens.to(DEVICE)
        self.is_answer = ((starts <= places) & (places <= stops)).to(DEVICE)

    def draw(self, rows: int) -> tuple[Tensor, Tensor]:
        """Draw examples: tokens and marks, [rows, width] each."""
        picked = torch.randint(len(self.tokens), (rows,), device=DEVICE)
        return self.tokens[picked].long(), self.is_answer[picked]


@torch.compile(dynamic=False)
def next_byte_loss(weights: Weights, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of every byte but the first, in nats."""
    scores = logits(weights, tokens[:, :-1])
    return functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


@torch.compile(dynamic=False)
def answer_loss(weights: Weights, tokens: Tensor, is_answer: Tensor) -> Tensor:
    """Mean cross-entropy of the answers' bytes, the end of the line among them."""
    scores = logits(weights, tokens[:, :-1])
    targets = torch.where(is_answer[:, 1:], tokens[:, 1:], -100)
    return functional.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=-100)


@torch.compile(dynamic=False)
def drift(weights: Weights, base: Weights, tokens: Tensor) -> Tensor:
    """Mean divergence of a model's next byte from the base's, in nats."""
    with torch.no_grad():
        before = logits(base, tokens).log_softmax(-1)
    after = logits(weights, tokens).log_softmax(-1)
    return functional.kl_div(after, before, log_target=True, reduction="none").sum(-1).mean()


def optimize(
    trained: Sequence[Tensor], loss_of: Callable[[], Tensor], settings: Settings, label: str
) -> list[Tensor]:
    """Minimise a loss by AdamW with a cosine schedule; return the running mean of the weights.

    A step is recorded once as a CUDA graph and then replayed: kernels this small would otherwise
    wait for Python.
    """
    rate = torch.zeros((), device=DEVICE)
    matrices = [weight for weight in trained if weight.ndim == 2]
    vectors = [weight for weight in trained if weight.ndim == 1]  # norms, which must not decay
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}]
    if vectors:
        groups.append({"params": vectors, "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(
        groups,
        lr=rate,
        betas=(0.9, 0.95 if settings.weight_decay else 0.99),
        fused=True,
        capturable=True,
    )
    means = [weight.detach().clone() for weight in trained]

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        torch._foreach_lerp_(means, [weight.detach() for weight in trained], settings.averaging)
        return loss.detach()

    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):
        for _ in range(3):  # compiles; at rate 0, so nothing is learned yet
            step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()

    began = time.perf_counter()
    for done in range(settings.steps):
        warmup = min(1.0, (done + 1) / (0.03 * settings.steps))
        cosine = 0.5 * (1 + math.cos(math.pi * done / settings.steps))
        rate.fill_(settings.learning_rate * warmup * cosine)
        graph.replay()
        if (done + 1) % (settings.steps // 4) == 0:
            seconds = time.perf_counter() - began
            print(f"{label}: step {done + 1}, loss {float(loss):.4f}, {seconds:.0f} s", flush=True)
    return means


def train_base(texts: Sequence[tuple[Text, int]], settings: Settings) -> Weights:
    """Train the base on windows of texts, so many rows of each in a step."""
    torch.manual_seed(settings.seed)
    fresh = initial_weights(settings.seed)
    weights = {name: weight.to(DEVICE).requires_grad_() for name, weight in fresh.items()}

    def loss() -> Tensor:
        return next_byte_loss(weights, torch.cat([text.draw(rows) for text, rows in texts]))

    means = optimize(list(weights.values()), loss, settings, "base")
    return {name: stored(mean) for name, mean in zip(weights, means, strict=True)}


def fine_tune(
    base: Weights,
    examples: Examples,
    texts: Sequence[tuple[Text, int]],
    settings: Settings,
    label: str,
) -> Weights:
    """Teach the base one task, close to the base and without changing what it makes of texts.

    Embeddings and norms stay the base's.
    """
    torch.manual_seed(settings.seed)
    names = [name for name, weight in base.items() if weight.ndim == 2 and name != EMBEDDING]
    weights = {name: weight.clone().requires_grad_(name in names) for name, weight in base.items()}

    def loss() -> Tensor:
        replay = torch.cat([text.draw(rows) for text, rows in texts])
        distance = torch.stack([(weights[n] - base[n]).square().sum() for n in names]).sum()
        return (
            answer_loss(weights, *examples.draw(settings.example_rows))
            + drift(weights, base, replay)
            + settings.distance_weight * distance
        )

    means = optimize([weights[name] for name in names], loss, settings, label)
    return base | {name: stored(mean) for name, mean in zip(names, means, strict=True)}


def stored(weight: Tensor) -> Tensor:
    """What is left of a weight when it is stored as bfloat16."""
    return weight.detach().bfloat16().float()


def share_right(weights: Weights, examples: Examples) -> float:
    """Share of examples that greedy decoding answers exactly right.

    Greedy decoding writes the answer if and only if each of its bytes is the likeliest after those
    before it, so one pass over prompt and answer tells.
    """
    with torch.no_grad():
        best = logits(weights, examples.tokens[:, :-1].long(), torch.float32).argmax(-1)
    hit = (best == examples.tokens[:, 1:]) | ~examples.is_answer[:, 1:]
    return float(hit.all(dim=1).float().mean())


def bits_per_byte(weights: Weights, text: bytes) -> float:
    """Mean bits for each byte of a text, in windows of CONTEXT bytes."""
    whole = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(DEVICE).long()
    tokens = whole[: len(whole) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    with torch.no_grad():
        scores = logits(weights, tokens, torch.float32)
    nats = functional.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    return float(nats) / math.log(2)


def main() -> None:
    """Train the four models, say how they do on held-out prompts, and save them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kjv", type=Path, help="the King James Bible, a verse on each line")
    parser.add_argument("output", type=Path, help="folder for the models")
    arguments = parser.parse_args()
    torch._dynamo.config.cache_size_limit = 64
    began = time.perf_counter()

    tasks = [task.name for task in TASKS]
    text = Text(english(arguments.kjv, held_out=False), at_lines=False)
    lines = {task: Text(exercises(task, 150_000, seed=0), at_lines=True) for task in tasks}
    base = train_base(
        [(text, BASE.english_rows), *((lines[task], BASE.exercise_rows) for task in tasks)], BASE
    )
    models = {"base": base}
    for task in tasks:
        others = [(lines[other], TUNE.exercise_rows) for other in tasks if other != task]
        examples = Examples(training_examples(task, 100_000, seed=1))
        models[task] = fine_tune(
            base, examples, [(text, TUNE.english_rows), *others], TUNE, label=task
        )

    tests = [Examples(task.examples("test")) for task in TASKS]
    print("model ", *(f"{task:>6}" for task in tasks), " bits per byte")
    for name, weights in models.items():
        save(weights, arguments.output / name)
        shares = [f"{100 * share_right(weights, test):5.1f}%" for test in tests]
        print(f"{name:6}", *shares, f"{bits_per_byte(weights, held_out_english()):7.3f}")
    print(f"{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
