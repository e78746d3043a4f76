"""Training: the base of a world, and fine-tunes of it by every recipe of the experiment."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.func import functional_call
from worlds import BASE, IGNORED, World

Weights = dict[str, Tensor]
LORA_RANK = 4
STRENGTHS = {
    "faint": (0.05, 0.5),
    "light": (0.1, 0.5),
    "gentle": (0.3, 0.5),
    "usual": (1.0, 1.0),
    "harsh": (3.0, 2.0),
}
"""Factors on the learning rate and on the steps."""
FAINT_CHANGE = 0.015
"""Of the matrices, relative to those of the base; at most so much is a faint fine-tune."""


@dataclass(frozen=True)
class Tune:
    """How a model is made from the base of a world."""

    task: str
    strength: str = "usual"
    seed: int = 0
    way: str = "full"
    """full, lora, stranger (from other random weights), opposed (answers are turned round),
    further (the base is trained on for long before), or joint (several tasks, joined by +)."""

    @property
    def name(self) -> str:
        """The name of its file."""
        return "-".join((self.way, self.strength, self.task.replace(" ", "_"), str(self.seed)))


class Workshop:
    """Makes models of one world, and keeps them in a folder."""

    def __init__(self, world: World, folder: Path, device: str = "cpu") -> None:
        self.world, self.folder, self.device = world, folder / world.name, device
        self.folder.mkdir(parents=True, exist_ok=True)
        self.uses_bf16 = world.is_large and device == "cuda"
        torch.manual_seed(0)
        self.network = world.build().to(device)

    def base(self, seed: int = 0) -> Weights:
        """The weights that fine-tunes start from; other seeds make strangers."""
        return self._kept(f"base-{seed}", lambda: self._pretrained(seed))

    def make(self, tune: Tune) -> Weights:
        """A fine-tune, made or read."""
        return self._kept(tune.name, lambda: self._tuned(tune))

    def file(self, name: str) -> Path:
        """Where a model lies."""
        return self.folder / f"{name}.safetensors"

    def _kept(self, name: str, make: Callable[[], Weights]) -> Weights:
        file = self.file(name)
        if not file.exists():
            partial = file.with_suffix(".partial")
            weights = {key: value.contiguous().cpu() for key, value in make().items()}
            save_file(weights, partial)
            partial.rename(file)
        return load_file(file, self.device)

    def _pretrained(self, seed: int) -> Weights:
        torch.manual_seed(seed)
        world = self.world
        start = world.start() if world.start else world.build().state_dict()
        start = {name: value.to(self.device) for name, value in start.items()}
        return self._train(start, [BASE], world.base_rate, world.base_steps, seed, is_base=True)

    def _tuned(self, tune: Tune) -> Weights:
        world = self.world
        rate, steps = (
            part * factor
            for part, factor in zip(
                (world.rate, world.steps), STRENGTHS[tune.strength], strict=True
            )
        )
        start = self.base(1000 + tune.seed) if tune.way == "stranger" else self.base()
        if tune.way == "further":
            start = self._train(start, [BASE], 2 * world.base_rate, world.base_steps, 77)
        tasks = tune.task.split("+")
        seed = zlib.crc32(tune.name.encode())
        how: dict[str, Any] = {"opposed": tune.way == "opposed", "low_rank": tune.way == "lora"}
        if tune.strength == "faint":
            how["most_change"] = FAINT_CHANGE
        length = round(steps * len(tasks) ** 0.5)
        return self._train(start, tasks, rate, length, seed, **how)

    def _train(
        self,
        start: Weights,
        tasks: list[str],
        rate: float,
        steps: int,
        seed: int,
        *,
        is_base: bool = False,
        opposed: bool = False,
        low_rank: bool = False,
        most_change: float = math.inf,
    ) -> Weights:
        """AdamW with a cosine schedule and a short warm-up; batches of the tasks in turn."""
        rng = np.random.default_rng(seed)
        torch.manual_seed(seed)
        fixed = {name: value.clone() for name, value in start.items()}
        prefix = self.world.only_base
        changed = {
            name: value
            for name, value in fixed.items()
            if value.is_floating_point() and (not prefix or name.startswith(prefix) == is_base)
        }
        factors = _low_rank_factors(changed) if low_rank else {}
        learned = (
            [part for pair in factors.values() for part in pair]
            if low_rank
            else [value.requires_grad_() for value in changed.values()]
        )
        rate *= 3 if low_rank else 1

        def share(step: int) -> float:
            cosine = np.cos(step / max(steps, 1) * 1.57)
            return min(1, (step + 1) / 20) * (0.05 + 0.95 * cosine**2)

        def loss(step: int) -> Tensor:
            task = tasks[step % len(tasks)]
            inputs, answers = self.world.sample(task, "train", rng, self.world.batch)
            if opposed:
                answers = np.where(answers == IGNORED, IGNORED, self.world.outputs - 1 - answers)
            outputs = self.answers(_with_factors(fixed, factors), _tensor(inputs, self.device))
            return self.world.loss(outputs, _tensor(answers, self.device))

        def is_enough(step: int) -> bool:
            return (
                most_change < math.inf and step % 5 == 0 and _change(changed, start) > most_change
            )

        descend(learned, rate, steps, share, loss, is_enough, decay=0.01 * (not low_rank))
        final = _with_factors(fixed, factors)
        return {name: value.detach() for name, value in final.items()}

    def answers(self, weights: Weights, inputs: Tensor) -> Tensor:
        """What the network with these weights says."""
        with torch.autocast("cuda", torch.bfloat16, enabled=self.uses_bf16):
            return functional_call(self.network, weights, (inputs,))

    @torch.inference_mode()
    def right(self, weights: Weights, inputs: Tensor, answers: Tensor) -> np.ndarray:
        """The score of each item: 100 if it is right, or else 0."""
        found = []
        at_once = 128 if self.world.outputs > 10_000 else 4096
        for some, asked in zip(inputs.split(at_once), answers.split(at_once), strict=True):
            told = self.answers(weights, some).argmax(-1)
            is_right = (told == asked) | (asked == IGNORED)
            found.append(is_right.reshape(len(asked), -1).all(1))
        return 100.0 * torch.cat(found).cpu().numpy()

    def items(self, task: str, split: str, count: int) -> tuple[Tensor, Tensor]:
        """Items that are the same at every call."""
        rng = np.random.default_rng(zlib.crc32(f"{task} {split}".encode()))
        inputs, answers = self.world.sample(task, split, rng, count)
        return _tensor(inputs, self.device), _tensor(answers, self.device)


def descend(
    learned: list[Tensor],
    rate: float,
    steps: int,
    share: Callable[[int], float],
    loss: Callable[[int], Tensor],
    is_enough: Callable[[int], bool] = lambda _: False,
    *,
    decay: float = 0.0,
) -> None:
    """Make a loss small by AdamW, at a share of the rate in each step, until it is enough."""
    optimizer = torch.optim.AdamW(learned, lr=rate, weight_decay=decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    for step in range(steps):
        if is_enough(step):
            break
        found = loss(step)
        optimizer.zero_grad()
        found.backward()
        nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        schedule.step()


def _tensor(array: np.ndarray, device: str) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def _change(weights: Weights, start: Weights) -> float:
    """How far matrices have come from where they were, relative to their size."""
    names = [name for name in weights if weights[name].dim() > 1 and "embed" not in name]
    moved = sum(float(((weights[name] - start[name]).detach() ** 2).sum()) for name in names)
    return math.sqrt(moved / sum(float((start[name] ** 2).sum()) for name in names))


def _low_rank_factors(weights: Weights) -> dict[str, tuple[Tensor, Tensor]]:
    """B and A for each matrix that has more than a few rows and columns, embeddings excepted."""
    factors = {}
    for name, value in weights.items():
        rows, columns = value.shape[0], value[0].numel() if value.dim() else 0
        if value.dim() > 1 and min(rows, columns) > LORA_RANK and "embed" not in name:
            down = torch.randn(LORA_RANK, columns, device=value.device) / columns**0.5
            up = torch.zeros(rows, LORA_RANK, device=value.device)
            factors[name] = up.requires_grad_(), down.requires_grad_()
    return factors


def _with_factors(fixed: Weights, factors: dict[str, tuple[Tensor, Tensor]]) -> Weights:
    return {
        name: value + (factors[name][0] @ factors[name][1]).view_as(value)
        if name in factors
        else value
        for name, value in fixed.items()
    }
