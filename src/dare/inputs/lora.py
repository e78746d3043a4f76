"""LoRA adapters as PEFT writes them, presented as the deltas they stand for.

ΔW = scaling · B·A, computed for the rows that are asked for, in float32 and in a fixed order: the
bytes do not depend on how a matrix is cut. What the adapter holds in full (`modules_to_save`,
biases) is presented as it is, or with ΔW added where there is one (PEFT stores an embedding that
has a LoRA in full as well). A tensor that the adapter does not have is unchanged.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dare import kernels
from dare.errors import InputError
from dare.inputs.patterns import ModulePattern
from dare.inputs.reading import Floats, read_floats
from dare.inputs.small_files import MAX_CONFIG_BYTES, parse_json, read_limited
from dare.inputs.sources import FileSource, Raw, open_source
from dare.inputs.views import SourceView
from dare.tensors.chunks import CHUNK
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.header import TensorInfo

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

Factors = tuple[Floats, Floats]
F32 = STORAGE_TYPES["F32"]

REFUSED = {
    "use_dora": "DoRA's magnitudes depend on the base's weights; merge it into the base with PEFT "
    "first (merge_and_unload), and give the result as a model",
    "use_qalora": "QA-LoRA pools its input, which no change of the weights is equal to",
    "use_bdlora": "block-diagonal LoRA is not supported",
    "layer_replication": "its base has repeated layers, which this one has not",
    "alora_invocation_tokens": "an activated LoRA applies to some tokens only, and weights apply "
    "to all",
    "target_parameters": "LoRA on bare parameters (experts) is not supported",
    "arrow_config": "Arrow routes between adapters for each token, which no change of weights does",
    "kasa_config": "KaSA changes the base's own weights",
    "trainable_token_indices": "trained token rows are not supported; merge it with PEFT first",
}
"""Settings that make an adapter something else than B·A, and why each is refused."""

CONV1D_MODELS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
"""Model types whose layers are Conv1D, which stores inputs × outputs."""

CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to initialise that take a part out of the base's own weights."""

_FACTOR = re.compile(
    r"^(.*)\.lora_(embedding_)?([AB])(?:\.(?!weight$|bias$)[^.]+)?(\.weight|\.bias)?$"
)
_PREFIX = "base_model.model."


@dataclass(frozen=True)
class Adapter:
    """What `adapter_config.json` says, as far as it reaches the numbers."""

    alpha: float
    alpha_pattern: Mapping[str, float]
    use_rslora: bool
    fan_in_fan_out: bool
    base_name: str | None

    @cached_property
    def _patterns(self) -> list[ModulePattern]:
        return list(map(ModulePattern, self.alpha_pattern))

    def scaling(self, module: str, rank: int) -> float:
        """The factor on B·A for a module, by its name without `base_model.model.`."""
        alphas = zip(self._patterns, self.alpha_pattern.values(), strict=True)
        alpha = next((alpha for pattern, alpha in alphas if pattern.matches(module)), self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


@dataclass(frozen=True)
class Product:
    """A delta as a product: scale · left·right, each a stored tensor or its transpose."""

    left: str
    right: str | None
    """None is a column of ones: the delta is `left` itself."""
    transposed: bool
    scale: float


class LoraSource(SourceView):
    """An adapter's deltas, by the names of the base's tensors."""

    tensors: dict[str, TensorInfo]

    def __init__(
        self, path: Path, adapter: Adapter, stored: FileSource, *, is_conv1d: bool | None = None
    ) -> None:
        self.path = path
        self.adapter = adapter
        self._is_conv1d = is_conv1d
        self._stored = stored
        self._whole: dict[str, str] = {}
        self._products: dict[str, Product] = {}
        super().__init__(stored, {}, self._whole)
        self.files = (*stored.files, path / CONFIG_NAME)
        self.is_partial = True
        self._sort()
        self.reading_bytes = self._count_reading_bytes()
        self._kept: dict[int, tuple[str, Factors]] = {}
        """For each thread, the factors of the tensor that it read last."""

    def _sort(self) -> None:
        """Find out what each stored tensor is for."""
        factors: dict[tuple[str, str], dict[str, str]] = {}
        for key, info in self._stored.tensors.items():
            name = key.removeprefix(_PREFIX)
            if factor := _FACTOR.match(name):
                module, embedding, letter, part = factor.groups()
                if not info.shape:
                    raise InputError(f"{self.path}: {key} is a single number, and no factor")
                kind = "bias" if part == ".bias" else "embedding" if embedding else "weight"
                factors.setdefault((module, kind), {})[letter] = key
                continue
            if "lora_" in name or "trainable_tokens" in name:
                raise InputError(
                    f"{self.path}: {key} is of no known kind; merge the adapter into its base with "
                    "PEFT (merge_and_unload) and give the result as a model"
                )
            name = re.sub(r"\.(modules_to_save|original_module)\.[^.]+\.", ".", name)
            name = re.sub(r"\.base_layer\.", ".", name)
            self._whole[name] = key
            self.tensors[name] = replace(info, name=name)
        ranks = {
            module: self._stored.tensors[pair["A"]].shape[0]
            for (module, kind), pair in factors.items()
            if kind != "bias" and "A" in pair
        }
        for (module, kind), pair in factors.items():
            if kind == "bias":
                scale = self.adapter.scaling(module, ranks.get(module, 1))
                shape = self._stored.tensors[pair["B"]].shape
                self._add(f"{module}.bias", shape, Product(pair["B"], None, False, scale))
            else:
                self._add_pair(module, kind, pair)

    def _add_pair(self, module: str, kind: str, pair: Mapping[str, str]) -> None:
        if set(pair) != {"A", "B"}:
            missing = "AB".replace(next(iter(pair)), "")
            raise InputError(f"{self.path}: {module} has no lora_{missing}; the adapter is damaged")
        down, up = (self._stored.tensors[pair[letter]] for letter in "AB")
        rank, height = down.shape[0], up.shape[0]
        if math.prod(up.shape[1:]) != rank:
            raise InputError(
                f"{self.path}: {module}: lora_A is {down.form} and lora_B is {up.form}, "
                "which cannot be multiplied"
            )
        scale = self.adapter.scaling(module, rank)
        if kind == "embedding" or self._is_transposed(module):
            product = Product(pair["A"], pair["B"], True, scale)
            self._add(f"{module}.weight", (math.prod(down.shape[1:]), height), product)
        else:
            product = Product(pair["B"], pair["A"], False, scale)
            self._add(f"{module}.weight", (height, *down.shape[1:]), product)

    def _is_transposed(self, module: str) -> bool:
        """Whether the base stores a layer as inputs × outputs.

        PEFT decides this for each layer and writes down only what it was for the last one, so the
        base's architecture, where it is known, is the better witness.
        """
        if self._is_conv1d is None:
            return self.adapter.fan_in_fan_out
        return self._is_conv1d and not module.endswith(("lm_head", "score"))

    def _add(self, name: str, shape: tuple[int, ...], product: Product) -> None:
        self._products[name] = product
        self.tensors[name] = TensorInfo(name, F32, shape, 0)

    def holds_delta(self, name: str) -> bool:
        return name in self._products and name not in self._whole

    def fingerprint(self) -> list[Any]:
        return [*self._stored.fingerprint(), repr(self.adapter)]

    def __exit__(self, *error: object) -> None:
        self._kept.clear()
        super().__exit__(*error)

    def prefetch(self, name: str, start: int, count: int) -> None:
        if name not in self._products:
            super().prefetch(name, start, count)

    def read(self, name: str, start: int, into: Raw) -> None:
        if name not in self._products:
            super().read(name, start, into)
            return
        left, right = self._factors(name)
        scale = np.float32(self._products[name].scale)
        kernels.load("cpu").low_rank(left, right, start, scale, into)
        if name in self._whole:
            into += read_floats(self._stored, self._whole[name], start, into.size)

    def _count_reading_bytes(self) -> int:
        """A product's factors, one of them as it is stored or before it is turned, and a sum."""
        stored = self._stored.tensors
        both = [stored[key] for name, key in self._whole.items() if name in self._products]
        most = 0
        for product in self._products.values():
            infos = [stored[key] for key in (product.left, product.right) if key]
            before = max(info.elements * max(4, info.dtype.itemsize) for info in infos)
            most = max(most, 4 * sum(info.elements for info in infos) + before)
        return CHUNK * max((4 + info.dtype.itemsize for info in both), default=0) + most

    def _factors(self, name: str) -> Factors:
        """The factors of a product, rows × rank and rank × columns; threads share them."""
        thread = threading.get_ident()
        shared = (factors for kept, factors in list(self._kept.values()) if kept == name)
        if (factors := next(shared, None)) is None:
            self._kept.pop(thread, None)  # so that no thread ever has two
            product = self._products[name]
            keys = [key for key in (product.left, product.right) if key is not None]
            matrices = [self._read_matrix(key, product.transposed) for key in keys]
            factors = matrices[0], matrices[1] if len(keys) == 2 else np.ones((1, 1), np.float32)
        self._kept[thread] = name, factors
        return factors

    def _read_matrix(self, key: str, transposed: bool = False) -> Floats:
        """A stored factor or its transpose, contiguous."""
        info = self._stored.tensors[key]
        matrix = read_floats(self._stored, key, 0, info.elements).reshape(info.shape[0], -1)
        return np.ascontiguousarray(matrix.T) if transposed else matrix


def looks_like(path: Path) -> bool:
    """Say whether a directory holds an adapter."""
    return (path / CONFIG_NAME).is_file()


def open_adapter(path: Path, base_config: Mapping[str, Any] | None = None) -> LoraSource:
    """Read an adapter's configuration and header; `base_config` is its base's config.json."""
    adapter = read_config(path)
    weights = path / WEIGHTS_NAME
    if not weights.exists():
        raise InputError(
            f"{path}: has a {CONFIG_NAME} and no {WEIGHTS_NAME}; "
            "save the adapter again with safe_serialization=True"
        )
    kind = (base_config or {}).get("model_type")
    is_conv1d = None if kind is None else kind in CONV1D_MODELS
    return LoraSource(path, adapter, open_source(weights), is_conv1d=is_conv1d)


def read_config(path: Path) -> Adapter:
    """Read `adapter_config.json`; refuse what is not plain LoRA, with the reason."""
    file = path / CONFIG_NAME
    config = parse_json(read_limited(file, MAX_CONFIG_BYTES), file)
    kind = config.get("peft_type") if isinstance(config, dict) else None
    if kind != "LORA":
        raise InputError(f"{file}: peft_type is {kind!r}; only 'LORA' adapters can be merged")
    for setting, reason in REFUSED.items():
        if config.get(setting):
            raise InputError(f"{file}: {setting} is set: {reason}")
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
        raise InputError(
            f"{file}: init_lora_weights is {start!r}, which changes the base's own weights; "
            "save it with PEFT's path_initial_model_for_weight_conversion, as a plain LoRA"
        )
    try:
        adapter = Adapter(
            alpha=_finite(config["lora_alpha"]),
            alpha_pattern={
                str(key): _finite(value)
                for key, value in (config.get("alpha_pattern") or {}).items()
            },
            use_rslora=bool(config.get("use_rslora")),
            fan_in_fan_out=bool(config.get("fan_in_fan_out")),
            base_name=config.get("base_model_name_or_path"),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(f"{file}: lora_alpha or alpha_pattern is not usable: {error}") from None
    for pattern in adapter.alpha_pattern:
        try:
            ModulePattern(pattern)
        except ValueError as error:
            raise InputError(f"{file}: alpha_pattern {pattern!r}: {error}") from None
    return adapter


def _finite(value: Any) -> float:
    """A number that float32 can hold."""
    number = float(value)
    if not abs(number) <= float(np.finfo(np.float32).max):
        raise ValueError(f"{value!a:.80} is out of range")
    return number
