"""Ways to store a fine-tune next to its base: delta files, and what they are compared with.

Each writes a file of all that is needed besides the base, and then the whole model from it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from deltas_tunes import WEIGHTS
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import dare
from dare.lora.extraction import extract_adapter

SEEDS = (1, 2, 3, 4, 5)
BUDGETS = (1.6, 0.8, 0.4, 0.2)
"""Bits for each parameter at which schemes are compared."""
SMALL_BYTES = 10_000_000
"""Of models on which more settings are tried."""


@dataclass(frozen=True)
class Stored:
    """What a scheme wrote, and how long it took."""

    nbytes: int
    """Of the file, header and all; 0 for the base, which everyone has."""
    header_bytes: int
    store_seconds: float
    restore_seconds: float

    @classmethod
    def of(cls, file: Path, began: float, stored: float) -> Stored:
        """Describe a safetensors file from which the model was just restored."""
        restored = time.perf_counter()
        with file.open("rb") as opened:
            header_bytes = 8 + int.from_bytes(opened.read(8), "little")
        return cls(file.stat().st_size, header_bytes, stored - began, restored - stored)


Store = Callable[[Path, Path, Path, int], Stored]
"""From the directories of base and model, and a folder, in which it writes model.safetensors; with
the seed of the mask."""


@dataclass(frozen=True)
class Scheme:
    """A row of the table."""

    name: str
    store: Store
    seeds: tuple[int, ...] = (0,)


RANDOM: dict[str | int, tuple[float, ...]] = {
    "native": (0.9, 0.95, 0.975, 0.99),
    4: (0.0, 0.6, 0.8, 0.9, 0.95),
    2: (0.0, 0.5, 0.6, 0.62, 0.8, 0.9, 0.99),
}
"""Drop rates by bits; most come to 1.6, 0.8, 0.4 or 0.2 bits for each parameter."""
RANDOM_TOO: dict[str | int, tuple[float, ...]] = {
    "native": (0.9875,),
    4: (0.5, 0.99),
    2: (0.2, 0.95),
}
"""Others, for models that are small enough."""


def schemes(base: Path) -> Iterator[Scheme]:
    """All rows. A LoRA's rank depends on the base's size, and so does how much is tried."""
    yield Scheme("the base", whole_of_base)
    yield Scheme("the fine-tune itself", whole_of_model)
    yield Scheme("lossless", partial(delta_file, {"lossless": True}))
    is_small = (base / WEIGHTS).stat().st_size < SMALL_BYTES
    for bits, rates in RANDOM.items():
        for rate in sorted((*rates, *RANDOM_TOO[bits] * is_small)):
            store = partial(delta_file, {"drop_rate": rate, "bits": bits})
            yield Scheme(f"random {rate:g}, {told(bits)}", store, SEEDS if rate else SEEDS[:1])
    yield Scheme("BitDelta, untrained scales", as_bitdelta)
    yield Scheme("signs, a scale for each tensor", one_bit)
    for rank in sorted({rank_of(base, bits) for bits in BUDGETS}, reverse=True):
        yield Scheme(f"LoRA of rank {rank}", partial(lora, rank))
    for group in (64, 128):
        yield Scheme(f"whole model in 4 bits, groups of {group}", partial(round_whole, group))


def told(bits: str | int) -> str:
    """How bits are called in the table."""
    if bits == "native":
        return "16 bits"
    return f"{bits} bits"


# ---------------------------------------------------------------- delta files


def delta_file(settings: dict[str, Any], base: Path, model: Path, to: Path, seed: int) -> Stored:
    """What `dare compress` and `dare apply` do, on files: no tokenizer is stored with them."""
    delta = to / "delta.safetensors"
    began = time.perf_counter()
    dare.compress(base / WEIGHTS, model / WEIGHTS, delta, seed=seed, verbose=False, **settings)
    stored = time.perf_counter()
    dare.apply_delta(base / WEIGHTS, delta, to / WEIGHTS, verbose=False)
    return Stored.of(delta, began, stored)


# ---------------------------------------------------------------- what they are compared with


def whole_of_base(base: Path, _model: Path, to: Path, _seed: int) -> Stored:
    """Nothing is stored."""
    (to / WEIGHTS).write_bytes((base / WEIGHTS).read_bytes())
    return Stored(0, 0, 0.0, 0.0)


def whole_of_model(_base: Path, model: Path, to: Path, _seed: int) -> Stored:
    """The file as it is."""
    (to / WEIGHTS).write_bytes((model / WEIGHTS).read_bytes())
    now = time.perf_counter()
    return Stored.of(to / WEIGHTS, now, now)


def as_bitdelta(base: Path, model: Path, to: Path, _seed: int) -> Stored:
    """BitDelta (Liu et al., 2024) before its scales are trained.

    Matrices of layers as signs and the mean |δ|; embeddings, norms and biases in full.
    """
    return signs(base, model, to, lambda name, value: value.dim() == 2 and "embed" not in name)


def one_bit(base: Path, model: Path, to: Path, _seed: int) -> Stored:
    """The same for every tensor."""
    return signs(base, model, to, lambda _name, _value: True)


def signs(base: Path, model: Path, to: Path, is_cut: Callable[[str, Tensor], bool]) -> Stored:
    """Store signs of δ and the mean |δ| of tensors that are cut, and others that changed whole."""
    began = time.perf_counter()
    before, after = load_file(base / WEIGHTS), load_file(model / WEIGHTS)
    parts: dict[str, Tensor] = {}
    for name, value in after.items():
        if torch.equal(value, before[name]):
            continue
        if is_cut(name, value):
            change = (value.float() - before[name].float()).numpy()
            parts[f"signs:{name}"] = torch.from_numpy(np.packbits(change > 0))
            parts[f"scale:{name}"] = torch.tensor(float(np.abs(change).mean()))
        else:
            parts[name] = value
    save_file(parts, to / "signs.safetensors")
    stored = time.perf_counter()
    before, parts = load_file(base / WEIGHTS), load_file(to / "signs.safetensors")
    for name, value in before.items():
        if f"signs:{name}" in parts:
            bits = np.unpackbits(parts[f"signs:{name}"].numpy(), count=value.numel())
            sign = torch.from_numpy(bits.astype(np.float32)).mul_(2).sub_(1).reshape(value.shape)
            before[name] = (value.float() + parts[f"scale:{name}"] * sign).to(value.dtype)
        elif name in parts:
            before[name] = parts[name]
    save_file(before, to / WEIGHTS)
    return Stored.of(to / "signs.safetensors", began, stored)


def rank_of(base: Path, bits: float) -> int:
    """The rank at which a LoRA of all layers has so many bits for each parameter of the model."""
    shapes = list(_shapes(base))
    ends = sum(sum(shape) for name, shape in shapes if len(shape) == 2 and "embed" not in name)
    return max(1, round(bits * sum(prod(shape) for _, shape in shapes) / (16 * ends)))


def _shapes(model: Path) -> Iterable[tuple[str, list[int]]]:
    with safe_open(model / WEIGHTS, "pt") as file:
        for name in file.keys():  # noqa: SIM118 (no mapping)
            yield name, file.get_slice(name).get_shape()


def lora(rank: int, base: Path, model: Path, to: Path, _seed: int) -> Stored:
    """The leading directions of δ, by `dare lora extract`; what is no layer is left out."""
    began = time.perf_counter()
    extract_adapter(base, model, to / "lora", rank=rank, dtype="BF16")
    stored = time.perf_counter()
    recipe = dare.Request.of(
        base=base,
        models=[to / "lora"],
        output=to / WEIGHTS,
        method="sum",
        on_missing="base",
        verbose=False,
    )
    dare.merge(recipe)
    return Stored.of(to / "lora" / "adapter_model.safetensors", began, stored)


def round_whole(group: int, _base: Path, model: Path, to: Path, _seed: int) -> Stored:
    """Every matrix of the model, not of its change, in 4 bits: rounded to sevenths of a group's
    largest; norms and biases in full. No base is needed to read it.
    """
    began = time.perf_counter()
    parts: dict[str, Tensor] = {}
    after = load_file(model / WEIGHTS)
    for name, value in after.items():
        if value.dim() != 2:
            parts[name] = value
            continue
        groups = value.float().reshape(-1, group)
        scale = (groups.abs().amax(dim=1, keepdim=True) / 7).to(torch.bfloat16)
        codes = (groups / scale.float().clamp_min(1e-30)).round().clamp(-7, 7).add(8).byte()
        codes = codes.reshape(-1, 2)
        parts[f"codes:{name}"] = codes[:, 0] * 16 + codes[:, 1]
        parts[f"scales:{name}"] = scale
    save_file(parts, to / "rounded.safetensors")
    stored = time.perf_counter()
    parts = load_file(to / "rounded.safetensors")
    for name, value in after.items():
        if value.dim() == 2:
            codes = parts.pop(f"codes:{name}")
            both = torch.stack((codes // 16, codes % 16), dim=1).float().sub_(8)
            values = both.reshape(-1, group) * parts.pop(f"scales:{name}").float()
            parts[name] = values.reshape(value.shape).to(value.dtype)
    save_file(parts, to / WEIGHTS)
    return Stored.of(to / "rounded.safetensors", began, stored)
