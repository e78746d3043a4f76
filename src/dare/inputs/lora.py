"""LoRA adapters as PEFT writes them, presented as the deltas they stand for.

ΔW = scaling · B·A, computed for the rows that are asked for, in float32 and in a fixed order: the
bytes do not depend on how a matrix is cut. Tensors that the adapter holds in full
(`modules_to_save`, biases) are presented as they are, or with ΔW added where there is one (PEFT
stores an embedding that has a LoRA in full as well). Tensors that it lacks are unchanged.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dare import kernels
from dare.errors import InputError
from dare.inputs.sources import (
    DeltaInfo,
    FileSource,
    Floats,
    Opening,
    Raw,
    Source,
    SourceView,
    decoded,
    hold_same,
    read_floats,
)
from dare.tensors.chunks import CHUNK
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.files import read_limited
from dare.tensors.header import MAX_CONFIG_BYTES, TensorInfo, admit, parse_json

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

F32 = STORAGE_TYPES["F32"]

MERGE_WITH_PEFT = "merge it with PEFT (merge_and_unload), and give the result as a model"
# Settings that make an adapter something else than B·A, and why each is refused.
REFUSED = {
    "use_dora": f"DoRA's magnitudes depend on the base's weights; {MERGE_WITH_PEFT}",
    "use_qalora": "QA-LoRA pools its input, so it is not equal to a change of the weights",
    "use_bdlora": "block-diagonal LoRA is not supported",
    "layer_replication": "its base has repeated layers, and this base does not",
    "alora_invocation_tokens": "an activated LoRA applies only to some tokens",
    "target_parameters": "LoRA on bare parameters (experts) is not supported",
    "arrow_config": "Arrow chooses adapters for each token, so it is no change of the weights",
    "kasa_config": "KaSA changes the weights of the base too",
    "trainable_token_indices": "trained token rows are not supported; merge it with PEFT first",
}

# Model types whose layers are Conv1D, which stores inputs × outputs.
CONV1D_MODELS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")

# Ways to initialise that take a part out of the base's own weights.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")

PIECE = 1 << 20
MAX_PATTERN_CHARACTERS = 1000
MAX_MATCHES = 10**8  # the limit of ways to match a pattern with a name
_CHARACTER = re.compile(r"\\.|\[\^?\]?(?:[^\]\\]|\\.)*\]", re.DOTALL)
_GROUP = re.compile(r"\((?:\?(?:[:=!]|<[=!]|P<\w+>))?([^()]*)\)")
_REPEAT = re.compile(r"[*+?]|\{[\d,]*\}")

_FACTOR = re.compile(
    r"^(.*)\.lora_(embedding_)?([AB])(?:\.(?!weight$|bias$)[^.]+)?(\.weight|\.bias)?$"
)
_PREFIX = "base_model.model."


class ModulePattern:
    r"""A key of `alpha_pattern`, matched by `re` as PEFT does; ValueError if it is not usable.

    `re` goes back and forth, so a hostile pattern takes longer than anyone waits. None is taken
    that repeats a group with repeats or alternatives inside, or that can match in too many ways.

    >>> ModulePattern("q_proj").matches("layers.0.q_proj"), ModulePattern("proj").matches("q_proj")
    (True, False)
    >>> ModulePattern(r"layers\.(0|1)\..*").matches("model.layers.1.q_proj")
    True
    """

    def __init__(self, pattern: str) -> None:
        self._text = pattern
        if len(pattern) > MAX_PATTERN_CHARACTERS:
            raise self._refusal(f"longer than {MAX_PATTERN_CHARACTERS} characters")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of sets in sets, which are none
                self._whole = re.compile(rf"(.*\.)?({pattern})$")
        except (re.error, RecursionError, OverflowError) as error:
            raise self._refusal(f"not a regular expression: {error}") from None
        self._ways = 1
        text = _CHARACTER.sub("x", pattern)
        while group := _GROUP.search(text):
            inner = group[1]
            if _REPEAT.match(text, group.end()) and ("|" in inner or _REPEAT.search(inner)):
                raise self._refusal("repeats a group with repeats or alternatives")
            self._ways *= 1 + inner.count("|")
            text = text[: group.start()] + inner.replace("|", "x") + text[group.end() :]
        self._ways *= (1 + text.count("|")) * 2 ** text.count("?")
        self._repeats = len(_REPEAT.findall(text)) - text.count("?")

    def matches(self, module: str) -> bool:
        """Say whether a module's name, or what follows one of its dots, is of the pattern."""
        if self._ways * len(module) ** (1 + self._repeats) > MAX_MATCHES:
            raise self._refusal(f"takes too long to match {module:.200}")
        return self._whole.match(module) is not None

    def _refusal(self, reason: str) -> ValueError:
        return ValueError(f"{self._text!r}: {reason}; name the modules")

    def __repr__(self) -> str:
        return repr(self._text)


@dataclass(frozen=True)
class Adapter:
    """The settings of `adapter_config.json` that decide numbers."""

    alpha: float
    alpha_pattern: Mapping[ModulePattern, float]
    use_rslora: bool
    fan_in_fan_out: bool
    base_name: str | None
    ensure_weight_tying: bool = False  # True if a tied tensor has one adapter under all its names

    def scaling(self, module: str, rank: int) -> float:
        """Return the factor on B·A for a module, by its name without `base_model.model.`."""
        try:
            patterns = self.alpha_pattern.items()
            alpha = next((a for pattern, a in patterns if pattern.matches(module)), self.alpha)
        except ValueError as error:
            raise InputError(f"{CONFIG_NAME}: alpha_pattern {error}") from None
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


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
        # The change of each tensor: a sum, where the base has one tensor under several names.
        self._products: dict[str, tuple[Product, ...]] = {}
        super().__init__(stored, {}, self._whole, computed=self._products)
        self.files = {**stored.files, path / CONFIG_NAME: ()}
        self.is_partial = True
        self._sort()
        self._count_cost()

    def _sort(self) -> None:
        factors: dict[tuple[str, str], dict[str, str]] = {}
        for key, info in self._stored.tensors.items():
            name = key.removeprefix(_PREFIX)
            if factor := _FACTOR.match(name):
                module, embedding, letter, part = factor.groups()
                if not info.shape:
                    raise InputError(f"{self.path}: {key} is a single number, not a LoRA factor")
                kind = "bias" if part == ".bias" else "embedding" if embedding else "weight"
                pair = factors.setdefault((module, kind), {})
                admit(info, (), str(self.path), as_weight=True)
                if letter in pair or (kind == "bias" and letter == "A"):
                    raise self._refusal(key, pair.get(letter))
                pair[letter] = key
                continue
            if "lora_" in name or "trainable_tokens" in name:
                raise self._refusal(key)
            name = re.sub(r"\.(modules_to_save|original_module)\.[^.]+\.", ".", name)
            name = re.sub(r"\.base_layer\.", ".", name)
            if name in self._whole:
                raise self._refusal(key, self._whole[name])
            self._add(replace(info, name=name))
            self._whole[name] = key
        ranks = {
            module: self._stored.tensors[pair["A"]].shape[0]
            for (module, kind), pair in factors.items()
            if kind != "bias" and "A" in pair
        }
        for (module, kind), pair in factors.items():
            if kind == "bias":
                scale = self.adapter.scaling(module, ranks.get(module, 1))
                info = replace(self._stored.tensors[pair["B"]], name=f"{module}.bias")
                self._add(info, Product(pair["B"], None, False, scale))
            else:
                self._add_pair(module, kind, pair)

    def _refusal(self, key: str, other: str | None = None) -> InputError:
        reason = f"{other} and {key} are for the same tensor; save one, or {MERGE_WITH_PEFT}"
        if other is None:
            reason = f"{key} is not a known kind of tensor; {MERGE_WITH_PEFT}"
        return InputError(f"{self.path}: {reason}")

    def _add_pair(self, module: str, kind: str, pair: Mapping[str, str]) -> None:
        if set(pair) != {"A", "B"}:
            missing = "AB".replace(next(iter(pair)), "")
            raise InputError(f"{self.path}: {module} has no lora_{missing}; the adapter is damaged")
        down, up = (self._stored.tensors[pair[letter]] for letter in "AB")
        rank, height = down.shape[0], up.shape[0]
        if math.prod(up.shape[1:]) != rank or not rank:
            forms = f"lora_A is {down.form}, lora_B {up.form}"
            raise InputError(f"{self.path}: {module}: {forms}; they do not fit")
        scale = self.adapter.scaling(module, rank)
        if kind == "embedding" or self._is_transposed(module):
            product = Product(pair["A"], pair["B"], True, scale)
            shape: tuple[int, ...] = math.prod(down.shape[1:]), height
        else:
            product = Product(pair["B"], pair["A"], False, scale)
            shape = height, *down.shape[1:]
        self._add(TensorInfo(f"{module}.weight", F32, shape, 0), product)

    def _is_transposed(self, module: str) -> bool:
        """Return whether the base has inputs × outputs there; PEFT notes only the last layer's."""
        if self._is_conv1d is None:
            return self.adapter.fan_in_fan_out
        return self._is_conv1d and not module.endswith(("lm_head", "score"))

    def _add(self, info: TensorInfo, product: Product | None = None) -> None:
        """Take in a tensor stored in full, or a change, which may be added to one."""
        admit(info, self._products, str(self.path))
        self.tensors[info.name] = info if product is None else replace(info, dtype=F32)
        if product is not None:
            self._products[info.name] = (product,)

    def tie(self, names: Sequence[str]) -> bool:
        """Take tensors for one, the first, as the base does; return whether changes are added."""
        first, *others = names
        infos = [self.tensors[name] for name in names]
        is_one = self.adapter.ensure_weight_tying
        saved = [name for name in names if name not in self._products]
        held = [name for name in names if name in self._whole]
        if saved and not is_one and (saved != list(names) or not others):
            raise InputError(f"{self.path}: {saved[0]} is tied in the base; {MERGE_WITH_PEFT}")
        keys = [self._whole[name] for name in held]
        are_same = all(hold_same(self._stored, keys[0], key) for key in keys[1:])
        if len({(info.shape, info.dtype) for info in infos}) > 1 or not are_same:
            tied = " and ".join(names)
            raise InputError(f"{self.path}: {tied} are tied in the base; {MERGE_WITH_PEFT}")
        parts = [product for name in names for product in self._products.get(name, ())]
        if held:
            self._whole[first] = self._whole[held[0]]
        for name in others:
            del self.tensors[name]
            self._whole.pop(name, None)
            self._products.pop(name, None)
        if parts:
            self._products[first] = tuple(parts[:1] if is_one else parts)
        self._count_cost()
        return not is_one and len(parts) > 1

    @property
    def folder(self) -> Path | None:
        return self.path

    def delta_of(self, name: str) -> DeltaInfo:
        return DeltaInfo(is_change=name in self._products and name not in self._whole)

    def fingerprint(self) -> list[Any]:
        return [*super().fingerprint(), repr(self.adapter), repr(self._products)]

    def compute(self, name: str, start: int, into: Raw) -> None:
        first, *others = self._products[name]
        first.fill(self._stored, start, into)
        for product in others:
            further = np.empty_like(into)
            product.fill(self._stored, start, further)
            into += further
        if name in self._whole:
            into += read_floats(self._stored, self._whole[name], start, into.size)

    def _count_cost(self) -> None:
        """Count the pieces of a product's factors, and the tensor that is added to it."""
        stored = self._stored.tensors
        both = [stored[key] for name, key in self._whole.items() if name in self._products]
        further = any(len(products) > 1 for products in self._products.values())
        products = (product for several in self._products.values() for product in several)
        most = max((product.reading_bytes(self._stored) for product in products), default=0)
        added = max((4 + info.dtype.itemsize for info in both), default=4 * further)
        self.cost = self._stored.cost.with_reading(CHUNK * added + most)


def looks_like(path: Path) -> bool:
    """Say whether a directory holds an adapter."""
    return (path / CONFIG_NAME).is_file()


def open_form(opening: Opening) -> LoraSource:
    """Open an adapter; the configuration of its base tells how its layers are stored."""
    return open_adapter(opening.path, opening.base_config, opening.most_ahead_bytes)


def open_adapter(
    path: Path,
    base_config: Mapping[str, Any] | None = None,
    most_ahead_bytes: int | None = None,
) -> LoraSource:
    """Read an adapter's configuration and header; `base_config` is its base's config.json."""
    adapter = read_config(path)
    weights = path / WEIGHTS_NAME
    if not weights.exists():
        raise InputError(f"{path}: has no {WEIGHTS_NAME}; save it with safe_serialization=True")
    kind = (base_config or {}).get("model_type")
    is_conv1d = None if kind is None else kind in CONV1D_MODELS
    stored = FileSource(weights, most_ahead_bytes)
    return LoraSource(path, adapter, stored, is_conv1d=is_conv1d)


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
        what = f"init_lora_weights is {start!r}, which changes the weights of the base too"
        how = "save it with PEFT's path_initial_model_for_weight_conversion"
        raise InputError(f"{file}: {what}; {how}")
    name = config.get("base_model_name_or_path")
    alphas = config.get("alpha_pattern") or {}
    try:
        return Adapter(
            alpha=_finite(config["lora_alpha"]),
            alpha_pattern={ModulePattern(str(key)): _finite(a) for key, a in alphas.items()},
            use_rslora=bool(config.get("use_rslora")),
            fan_in_fan_out=bool(config.get("fan_in_fan_out")),
            base_name=name if isinstance(name, str) else None,
            ensure_weight_tying=bool(config.get("ensure_weight_tying")),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(f"{file}: lora_alpha or alpha_pattern cannot be used: {error}") from None


def _finite(value: Any) -> float:
    number = float(value)
    if not abs(number) <= float(np.finfo(np.float32).max):
        raise ValueError(f"{value!a:.80} is out of range")
    return number


@dataclass(frozen=True)
class Product:
    """A delta as a product: scale · left·right, each a stored tensor or its transpose.

    The left factor is read a piece at a time. An element is the sum of its products in the order of
    the rank, so its bits do not depend on the pieces.
    """

    left: str
    right: str | None  # None is a column of ones: the delta is `left` itself
    transposed: bool
    scale: float

    def sides(self, stored: Source) -> tuple[int, int, int]:
        """Return rows, rank and columns."""
        if self.right is None:
            return stored.tensors[self.left].elements, 1, 1
        left, right = (_as_matrix(stored, key) for key in (self.left, self.right))
        if self.transposed:
            return left[1], left[0], right[0]
        return left[0], left[1], right[1]

    def reading_bytes(self, stored: Source) -> int:
        """Return the memory for a chunk beside it: right factor, rows of the left, one twice."""
        rows, rank, columns = self.sides(stored)
        height = min(rows, max(1, PIECE // max(1, rank)), CHUNK // max(1, columns) + 2)
        keys = (key for key in (self.left, self.right) if key is not None)
        itemsize = max(4, *(stored.tensors[key].dtype.itemsize for key in keys))
        return rank * (4 * (height + columns) + itemsize * max(height, columns))

    def fill(self, stored: Source, start: int, into: Floats) -> None:
        """Compute the elements from `start` on."""
        if not into.size:
            return
        _, rank, columns = self.sides(stored)
        right = np.ones((1, 1), np.float32)
        if self.right is not None:
            right = self._read(stored, self.right, 0, rank)
        end, most = start + into.size, max(1, PIECE // max(1, rank))
        last = -(-end // columns)
        for top in range(start // columns, last, most):
            bottom, begin = min(top + most, last), max(start, top * columns)
            left = self._read(stored, self.left, top, bottom)
            part = into[begin - start : min(end, bottom * columns) - start]
            first = begin - top * columns
            kernels.load("cpu").low_rank(left, right, first, np.float32(self.scale), part)
            del left  # before the next is read, for memory's sake

    def _read(self, stored: Source, key: str, top: int, bottom: int) -> Floats:
        """Read some rows of a factor, which are columns if it is stored transposed."""
        if not self.transposed:
            return read_block(stored, key, top, bottom)
        height = stored.tensors[key].shape[0]
        return np.ascontiguousarray(read_block(stored, key, 0, height, top, bottom).T)


def read_block(
    stored: Source, key: str, top: int, bottom: int, first: int = 0, last: int | None = None
) -> Floats:
    """Read rows and columns of a stored matrix, in float32; a vector is a column."""
    width = _as_matrix(stored, key)[1]
    last = width if last is None else last
    raw: Raw = np.empty((bottom - top, last - first), stored.tensors[key].dtype.carrier)
    if last - first == width:
        stored.read(key, top * width, raw.reshape(-1))
    else:
        for row in range(top, bottom):
            stored.read(key, row * width + first, raw[row - top])
    if raw.dtype == np.float32:  # which only F32 is carried by
        return raw
    return decoded(raw.reshape(-1), "cpu").reshape(raw.shape)


def _as_matrix(stored: Source, key: str) -> tuple[int, int]:
    shape = stored.tensors[key].shape
    return shape[0], math.prod(shape[1:])
