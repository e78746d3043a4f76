"""Adapters as they are stored: factors, not the deltas they stand for.

`dare.inputs.lora` says what each stored tensor is for; here the pieces are handed out one by one,
so that adapters can be merged without ever forming ΔW. A module is called what the base calls it,
its tensor is that name with `.weight`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dare.errors import InputError, MismatchError
from dare.inputs import lora
from dare.inputs.lora import LoraSource
from dare.inputs.reading import read_floats
from dare.inputs.sources import FileSource, open_source
from dare.tensors.header import TensorInfo

Floats = NDArray[np.float32]

WITH_THE_BASE = (
    "or merge the adapters into the base, as models: dare --base BASE --merge ADAPTER ADAPTER …"
)
FINDINGS_SHOWN = 10


@dataclass(frozen=True)
class Pair:
    """One module's two factors in one adapter, as they are stored."""

    down: TensorInfo
    """lora_A: rank × inputs, with the kernel's dimensions at the end for a convolution."""
    up: TensorInfo
    """lora_B: outputs × rank, with dimensions of 1 at the end for a convolution."""
    scaling: float

    @property
    def rank(self) -> int:
        """How many directions there are."""
        return self.down.shape[0]

    @property
    def is_embedding(self) -> bool:
        """Whether it is of an embedding, whose factors PEFT names and turns differently."""
        return ".lora_embedding_" in self.down.name


class AdapterFile(LoraSource):
    """An adapter whose deltas are presented without what it holds in full, which is apart."""

    def __init__(self, path: Path, config: Mapping[str, Any], stored: FileSource) -> None:
        super().__init__(path, lora.read_config(path), stored)
        self.config = config
        self.saved = {
            name: TensorInfo(name, info.dtype, info.shape, 0)
            for name, key in self._whole.items()
            for info in (stored.tensors[key],)
        }
        """What is stored in full, by the names of the base's tensors."""
        self._saved_keys, self._whole = self._whole, {}
        self.tensors = {name: self.tensors[name] for name in self._products}
        self.pairs = {
            tensor.removesuffix(".weight"): self._pair(tensor)
            for tensor, product in self._products.items()
            if product.right is not None
        }
        """The factors of each module."""
        self.biases = {
            tensor.removesuffix(".bias")
            for tensor, product in self._products.items()
            if product.right is None
        }
        """Modules whose lora_B has a bias."""

    @property
    def name(self) -> str:
        """What the adapter is called in messages."""
        return self.path.name or str(self.path)

    def _pair(self, tensor: str) -> Pair:
        product = self._products[tensor]
        assert product.right is not None  # a bias is no pair
        keys = (product.left, product.right)
        down, up = keys if product.transposed else reversed(keys)
        return Pair(self._stored.tensors[down], self._stored.tensors[up], product.scale)

    def read_pair(self, module: str) -> tuple[Floats, Floats]:
        """lora_A as rank × columns, and lora_B as rows × rank."""
        pair = self.pairs[module]
        return self._read_matrix(pair.down.name), self._read_matrix(pair.up.name)

    def read_bias(self, module: str) -> Floats:
        """The bias of a module's lora_B, with the scaling."""
        product = self._products[f"{module}.bias"]
        info = self._stored.tensors[product.left]
        return read_floats(self._stored, product.left, 0, info.elements) * np.float32(product.scale)

    def read_saved(self, tensor: str, start: int, count: int) -> Floats:
        """Elements of a tensor that is stored in full."""
        return read_floats(self._stored, self._saved_keys[tensor], start, count)


def open_adapters(paths: Sequence[Path]) -> list[AdapterFile]:
    """Read configurations and headers; raise MismatchError if the adapters do not fit together."""
    adapters = [_open_adapter(path) for path in paths]
    _check_fit(adapters)
    return adapters


def _open_adapter(path: Path) -> AdapterFile:
    if not lora.looks_like(path):
        raise InputError(f"{path}: has no {lora.CONFIG_NAME}; give the directory of a LoRA adapter")
    stored = lora.open_adapter(path)  # which checks what the parts are
    config = json.loads((path / lora.CONFIG_NAME).read_bytes())
    return AdapterFile(path, config, open_source(stored.files[0]))


@contextmanager
def reading(adapters: Sequence[AdapterFile]) -> Iterator[None]:
    """Hold the adapters open; at the end, make sure that they are still what they were."""
    with ExitStack() as stack:
        for adapter in adapters:
            stack.enter_context(adapter)
        yield
        for adapter in adapters:
            adapter.check_unchanged()


# ---------------------------------------------------------------- do they fit together?


def _check_fit(adapters: Sequence[AdapterFile]) -> None:
    problems = [
        *_different_shapes(adapters),
        *_different_names(adapters),
        *_different_settings(adapters),
        *_saved_by_some(adapters),
        *_biases_by_some(adapters),
    ]
    if problems:
        shown = problems[:FINDINGS_SHOWN]
        if len(problems) > len(shown):
            shown.append(f"… and {len(problems) - len(shown)} more")
        head = f"{len(problems)} things do not fit together:\n  " if len(problems) > 1 else ""
        raise MismatchError(head + "\n  ".join(shown))


def _different_shapes(adapters: Sequence[AdapterFile]) -> Iterator[str]:
    first: dict[str, tuple[AdapterFile, tuple[int, ...], bool]] = {}
    for adapter in adapters:
        for module, pair in adapter.pairs.items():
            shape = adapter.tensors[f"{module}.weight"].shape
            known = first.setdefault(module, (adapter, shape, pair.is_embedding))
            if known[1:] != (shape, pair.is_embedding):
                yield (
                    f"{module}: {known[0].name} changes {_described(*known[1:])}, "
                    f"{adapter.name} {_described(shape, pair.is_embedding)}; "
                    "only adapters of one base can be merged"
                )


def _described(shape: tuple[int, ...], is_embedding: bool) -> str:
    return f"{'an embedding' if is_embedding else 'a layer'} of {'×'.join(map(str, shape))}"


def _different_names(adapters: Sequence[AdapterFile]) -> Iterator[str]:
    """`layers.0.q_proj` beside `model.layers.0.q_proj`: one was trained on the body alone."""
    for adapter in adapters:
        for other in adapters:
            shorter = {f".{module}" for module in other.pairs}
            for module in adapter.pairs:
                ends = (module[place:] for place, char in enumerate(module) if char == ".")
                if end := next((end for end in ends if end in shorter), None):
                    yield (
                        f"{adapter.name} calls {module} what {other.name} calls {end[1:]}: they "
                        "were made for different classes of one model; save both from the same, "
                        f"{WITH_THE_BASE}"
                    )
                    break


def _different_settings(adapters: Sequence[AdapterFile]) -> Iterator[str]:
    flags = {adapter.adapter.fan_in_fan_out for adapter in adapters}
    if len(flags) > 1:
        yield (
            "fan_in_fan_out is true for some adapters and false for others, so they were made for "
            "different kinds of layers; only adapters of one base can be merged"
        )


def _saved_by_some(adapters: Sequence[AdapterFile]) -> Iterator[str]:
    for tensor in dict.fromkeys(tensor for adapter in adapters for tensor in adapter.saved):
        lacking = [adapter.name for adapter in adapters if tensor not in adapter.saved]
        shapes = {a.saved[tensor].shape for a in adapters if tensor in a.saved}
        if lacking:
            yield (
                f"{tensor}: stored in full (modules_to_save, bias or a resized embedding), and not "
                f"by {', '.join(lacking)}, so there is nothing to average it with; leave that "
                f"adapter out, {WITH_THE_BASE}"
            )
        elif len(shapes) > 1:
            listed = ", ".join("×".join(map(str, shape)) for shape in sorted(shapes))
            yield f"{tensor}: stored in full with different shapes ({listed}), so has no average"


def _biases_by_some(adapters: Sequence[AdapterFile]) -> Iterator[str]:
    modules = {module for adapter in adapters for module in adapter.pairs}
    biases = {module for adapter in adapters for module in adapter.biases}
    if biases and modules - biases:
        yield (
            f"{min(biases)} has a lora_bias and {min(modules - biases)} has none, and an adapter "
            f"has it for all modules or for none; leave out the adapters with lora_bias, "
            f"{WITH_THE_BASE}"
        )
