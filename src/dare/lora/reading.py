"""Adapters as they are stored: factors, not the deltas they represent.

`dare.inputs.lora` says what each stored tensor is for; here the pieces are handed out one by one,
so that adapters can be merged without ever forming ΔW. What has a LoRA is a module, called what the
base calls it, whose tensor is that name with `.weight`; or a parameter, called as its tensor is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dare.errors import InputError, MismatchError
from dare.inputs import lora
from dare.inputs.adapter_tensors import Product, read_block
from dare.inputs.lora import LoraSource
from dare.inputs.sources import Floats, RenamedSource
from dare.tensors.files import read_limited
from dare.tensors.header import MAX_CONFIG_BYTES, TensorInfo, parse_json

HOW_ELSE = "or merge into the base: dare merge BASE ADAPTER ADAPTER … -o OUT"
FINDINGS_SHOWN = 10


@dataclass(frozen=True)
class Pair:
    """One module's two factors in one adapter, as they are stored."""

    tensor: str  # the base's tensor that they change
    # lora_A: rank × inputs, with the kernel's dimensions at the end for a convolution
    down: TensorInfo
    up: TensorInfo  # lora_B: outputs × rank, with dimensions of 1 at the end for a convolution
    scaling: float
    experts: int  # matrices that have factors of their own
    is_parameter: bool  # True if PEFT finds it by `target_parameters`

    @property
    def rank(self) -> int:
        """The number of directions, of each expert."""
        return self.down.shape[0] // self.experts

    @property
    def is_embedding(self) -> bool:
        """True for an embedding, whose factors PEFT names and turns differently."""
        return ".lora_embedding_" in self.down.name


@dataclass(frozen=True)
class LoraModule:
    """One module or parameter of the result: the adapters that have it, and its factors there."""

    name: str
    owners: tuple[int, ...]  # the adapters that have it, by their place
    pairs: tuple[Pair, ...]  # the factors in each of those
    order: Literal["C", "F"]  # the base's order of B·A: by rows, or its transpose
    has_bias: bool

    @property
    def tensor(self) -> str:
        """The base's tensor that it changes."""
        return self.pairs[0].tensor

    @property
    def experts(self) -> int:
        """The number of matrices."""
        return self.pairs[0].experts

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank in each adapter that has it."""
        return tuple(pair.rank for pair in self.pairs)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows of lora_B, columns of lora_A, of one expert."""
        return self.pairs[0].up.shape[0], math.prod(self.pairs[0].down.shape[1:])

    @property
    def core_shape(self) -> tuple[int, ...]:
        """Its shape in the space that all of its adapters span, one for each expert."""
        sides = (min(side, sum(self.ranks)) for side in self.shape)
        return *((self.experts,) if self.experts > 1 else ()), *sides


class AdapterFile(LoraSource):
    """An adapter whose deltas are presented without what it holds in full, which is apart."""

    def __init__(self, plain: LoraSource) -> None:
        super().__init__(plain.path, plain.adapter, plain._stored)
        self.name = self.path.name or str(self.path)  # the name of the adapter in messages
        config = self.path / lora.CONFIG_NAME
        self.config = parse_json(read_limited(config, MAX_CONFIG_BYTES), config)
        # Tensors that are stored in full, by the names of the base's.
        self.saved = RenamedSource(self._stored, self._whole)
        self._whole = {}
        self.tensors = {name: self.tensors[name] for name in self._products}
        self.biases: set[str] = set()  # modules whose lora_B has a bias
        self.pairs: dict[str, Pair] = {}  # the factors of each module
        targets = tuple(f".{target}" for target in self.adapter.target_parameters)
        for tensor, (product,) in self._products.items():
            module = tensor.rpartition(".")[0]
            assert isinstance(product, Product)  # or the adapter would not be LoRA
            if not self.tensors[tensor].elements:
                raise InputError(f"{self.path}: {tensor} has no elements; the adapter is damaged")
            if product.right is None:
                self.biases.add(module)
                continue
            left, right = (self._stored.tensors[key] for key in (product.left, product.right))
            down, up = (left, right) if product.transposed else (right, left)
            is_parameter = f".{tensor}".endswith(targets)
            how = product.scale, product.experts, is_parameter
            self.pairs[tensor if is_parameter else module] = Pair(tensor, down, up, *how)

    def read_pair(self, module: str) -> tuple[Floats, Floats]:
        """Read lora_A as experts × rank × columns, and lora_B as experts × rows × rank."""
        pair = self.pairs[module]
        down, up = (read_block(self._stored, f.name, 0, f.shape[0]) for f in (pair.down, pair.up))
        ups = up.reshape(len(up), pair.rank, pair.experts).transpose(2, 0, 1)
        return down.reshape(pair.experts, pair.rank, -1), ups


def open_adapters(paths: Sequence[Path], *, allow_pickle: bool = False) -> tuple[AdapterFile, ...]:
    """Read configurations and headers; raise MismatchError if the adapters do not fit together."""
    for path in paths:
        if not lora.looks_like(path):
            raise InputError(f"{path}: has no {lora.CONFIG_NAME}; give a LoRA adapter's folder")
        if (kind := lora.read_config(path).kind) != "LORA":
            what = f"is an adapter of the kind {kind}, and only those of LORA become one adapter"
            raise InputError(f"{path}: {what}; give LoRA adapters, {HOW_ELSE}")
    opened = (lora.open_adapter(path, allow_pickle=allow_pickle) for path in paths)
    adapters = tuple(map(AdapterFile, opened))
    if problems := list(_find_problems(adapters)):
        head = [f"{len(problems)} things do not fit together:"] if len(problems) > 1 else []
        raise MismatchError(*head, *list_findings(problems))
    return adapters


def list_findings(findings: Sequence[str]) -> list[str]:
    """Return the first few findings, and how many more there are."""
    more = len(findings) - FINDINGS_SHOWN
    return [*findings[:FINDINGS_SHOWN], *([f"… and {more} more"] if more > 0 else [])]


# ---------------------------------------------------------------- do they fit together?


def _find_problems(adapters: Sequence[AdapterFile]) -> Iterator[str]:
    yield from _different_shapes(adapters)
    yield from _different_names(adapters)
    if len({adapter.adapter.fan_in_fan_out for adapter in adapters}) > 1:
        yield ("fan_in_fan_out differs; only adapters of one base can be merged")
    yield from _saved_by_some(adapters)
    modules = {module for adapter in adapters for module in adapter.pairs}
    biases = {module for adapter in adapters for module in adapter.biases}
    if biases and modules - biases:
        some, others = min(biases), min(modules - biases)
        yield f"{some} has a lora_bias, {others} has none; leave it out, {HOW_ELSE}"


def _different_shapes(adapters: Sequence[AdapterFile]) -> Iterator[str]:
    first: dict[str, tuple[str, str]] = {}
    for adapter in adapters:
        for module, pair in adapter.pairs.items():
            form = adapter.tensors[pair.tensor].form
            kind = "a parameter" if pair.is_parameter else "a layer"
            layer = f"{'an embedding' if pair.is_embedding else kind} of {form}"
            name, expected = first.setdefault(module, (adapter.name, layer))
            if layer != expected:
                yield f"{module}: {expected} in {name}, {layer} in {adapter.name}; use one base"


def _different_names(adapters: Sequence[AdapterFile]) -> Iterator[str]:
    """Find `layers.0.q_proj` beside `model.layers.0.q_proj`: one was trained on the body alone."""
    for adapter in adapters:
        for other in adapters:
            shorter = {f".{module}" for module in other.pairs}
            for module in adapter.pairs:
                ends = (module[place:] for place, char in enumerate(module) if char == ".")
                if end := next((end for end in ends if end in shorter), None):
                    both = f"{module} in {adapter.name} is {end[1:]} in {other.name}"
                    yield f"{both}; save both from the same class, {HOW_ELSE}"
                    break


def _saved_by_some(adapters: Sequence[AdapterFile]) -> Iterator[str]:
    for tensor in dict.fromkeys(name for adapter in adapters for name in adapter.saved.tensors):
        infos = [adapter.saved.tensors.get(tensor) for adapter in adapters]
        lacking = [a.name for a, info in zip(adapters, infos, strict=True) if info is None]
        forms = {info.shape: info.form for info in infos if info is not None}
        if lacking:
            names = ", ".join(lacking)
            yield f"{tensor}: is not stored in full by {names}; leave it out, {HOW_ELSE}"
        elif len(forms) > 1:
            listed = ", ".join(forms[shape] for shape in sorted(forms))
            yield (f"{tensor}: has different shapes ({listed}) and cannot be averaged")
