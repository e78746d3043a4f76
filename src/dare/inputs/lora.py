"""LoRA and other adapters as PEFT writes them, presented as the deltas they represent.

ΔW = scaling · B·A, computed for the requested rows, in float32 and in a fixed order: the bytes do
not depend on how a matrix is cut. Tensors that the adapter holds in full (`modules_to_save`,
biases) are presented as they are, or with ΔW added if there is one (PEFT also stores an embedding
that has a LoRA in full). Missing tensors are unchanged. With DoRA, IA³ and trained tokens, the
results are whole weights, computed from the base's. `adapter_kinds` has the other kinds' formulas.
"""

from __future__ import annotations

import math
import re
import tomllib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from dare.errors import InputError
from dare.inputs.adapter_kinds import NEED_BASE, SHARED, AdaptedLayer
from dare.inputs.adapter_tensors import (
    Computed,
    DoraMagnitudes,
    FactorView,
    Product,
    ScaledWeights,
    TrainedRows,
)
from dare.inputs.sources import (
    DeltaInfo,
    FileSource,
    Floats,
    Opening,
    Raw,
    Source,
    SourceView,
    StackedSource,
    read_floats,
    same_bytes,
)
from dare.inputs.torch_bin import TorchSource, check_allowed
from dare.tensors.chunks import CHUNK
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.files import read_limited
from dare.tensors.header import MAX_CONFIG_BYTES, TensorInfo, admit, parse_json

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
PICKLE_NAME = "adapter_model.bin"

F32 = STORAGE_TYPES["F32"]

MERGE_INTO_BASE = "merge it into its base: dare merge BASE ADAPTER -o OUT"
MERGE_WITH_PEFT = "merge it with PEFT (merge_and_unload), and give the result as a model"
IF_PEFT_CAN = "if PEFT can merge it (merge_and_unload), give the result as a model"
CONVERT_WITH_PEFT = "save it with PEFT's path_initial_model_for_weight_conversion"
_TABLES = tomllib.loads(files("dare.inputs").joinpath("lora.toml").read_text("utf-8"))

FLAGS = ("use_rslora", "fan_in_fan_out", "ensure_weight_tying", "use_dora")

# Model types whose layers are Conv1D, which stores inputs × outputs.
CONV1D_MODELS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")

# Model types whose experts are stored inputs × outputs, which PEFT asks the modules about.
TURNED_EXPERTS = ("gpt_oss", "openai_privacy_filter", "aria", "aria_text")
PARAMETERS: list[str] = _TABLES["parameters"]
KINDS: dict[str, dict[str, str]] = _TABLES["kinds"]

# Ways to initialise that subtract the initial product from the base's weights; LoftQ changes them
# in another way.
CHANGES_BASE = ("pissa", "olora", "corda", "lora_ga", "loftq")
INITIAL = "initial:"  # before the names of the initial factors, if the base was changed like that

MAX_PATTERN_CHARACTERS = 1000
MAX_MATCHES = 10**8  # the most ways to match a pattern with a name
_CHARACTER = re.compile(r"\\.|\[\^?\]?(?:[^\]\\]|\\.)*\]", re.DOTALL)
_GROUP = re.compile(r"\((?:\?(?:[:=!]|<[=!]|P<\w+>))?([^()]*)\)")
_REPEAT = re.compile(r"[*+?]|\{[\d,]*\}")

_FACTOR = re.compile(
    r"^(.*)\.lora_(embedding_)?([AB])(?:\.(?!weight$|bias$)[^.]+)?(\.weight|\.bias)?$"
)
_MADE = re.compile(
    r"^(.*)\.(lora_magnitude_vector|token_adapter\.trainable_tokens_delta)(?:\..+)?$"
)
_PARTS = {
    kind: re.compile(rf"^(.*)\.({settings['parts']})(?:\.[^.]+)?$")
    for kind, settings in KINDS.items()
    if "parts" in settings
}
_PREFIX = "base_model.model."
_MARKS = ("lora_", "trainable_tokens", "hada_", "lokr_", "ia3_l", "vera_lambda_")


class ModulePattern:
    r"""A key of `alpha_pattern`, matched by `re` as PEFT does; ValueError if it is not usable.

    `re` backtracks, so a hostile pattern could take forever. Patterns are refused if they repeat a
    group with repeats or alternatives inside, or can match in too many ways.

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
                warnings.simplefilter("ignore", FutureWarning)  # about "[[", which is not a set
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
        """Return whether the pattern matches a module's name, or its end after one of the dots."""
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
    rank: float | None = None  # None if every rank is that of the factors
    rank_pattern: Mapping[ModulePattern, float] = field(default_factory=dict)
    target_parameters: tuple[str, ...] = ()
    use_dora: bool = False
    # The tokens with trained rows, by the ends of names of embeddings.
    tokens: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    initial: Path | None = None  # the adapter before training, if it was subtracted from the base
    kind: str = field(default="LORA", repr=False)
    # The modules whose inputs IA³ multiplies; all others' outputs.
    feedforward: tuple[ModulePattern, ...] = field(default=(), repr=False)

    def rank_of(self, module: str) -> float:
        """Return the rank of a module, by the settings."""
        return _matching("rank_pattern", self.rank_pattern, module, self.rank or 0)

    def scaling(self, module: str, rank: float) -> float:
        """Return the factor on B·A for a module, by its name without `base_model.model.`."""
        if self.kind == "ADALORA":
            return (self.alpha if self.alpha > 0 else rank) / ((self.rank or 0) + 1e-5)
        if self.kind in NEED_BASE:
            return 1.0
        alpha = _matching("alpha_pattern", self.alpha_pattern, module, self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def count_experts(self, folder: Path, name: str, rows: int, *, is_parameter: bool) -> int:
        """Return the number of experts that a lora_A with `rows` rows is for; 1 for a module."""
        usual = rows if self.rank is None else self.rank
        rank = _matching("rank_pattern", self.rank_pattern, name, usual)
        if not rank >= 1 or (rows % rank if is_parameter else rows != rank):
            what = f"lora_A of {name} has {rows} rows, and its rank here is {rank:g}"
            remedy = "set r and rank_pattern as it was trained"
            raise InputError(f"{folder / CONFIG_NAME}: {what}; {remedy}")
        return int(rows // rank)


def _matching(
    setting: str, patterns: Mapping[ModulePattern, float], name: str, usual: float
) -> float:
    try:
        return next((v for pattern, v in patterns.items() if pattern.matches(name)), usual)
    except ValueError as error:
        raise InputError(f"{CONFIG_NAME}: {setting} {error}") from None


class LoraSource(SourceView):
    """An adapter's deltas, by the names of the base's tensors."""

    tensors: dict[str, TensorInfo]
    folder: Path | None = None

    def __init__(
        self,
        path: Path,
        adapter: Adapter,
        stored: Source,
        *,
        model_type: str | None = None,
        base: Source | None = None,
    ) -> None:
        self.path = self.folder = path
        self.adapter = adapter
        self._model_type, self._base = model_type, base  # if they are known
        self._base_tensors: Mapping[str, TensorInfo] = {} if base is None else base.tensors
        self._base_names: dict[str, str] = {}  # of tensors that the base calls something else
        # Whole weights that are computed from the base's, rather than changes.
        self._adapted: dict[str, DoraMagnitudes | TrainedRows | ScaledWeights] = {}
        self._stored = stored
        self._whole: dict[str, str] = {}
        # The change of each tensor: a sum, where the base has one tensor under several names.
        self._products: dict[str, tuple[Computed, ...]] = {}
        super().__init__(stored, {}, self._whole, computed=self._products)
        self.files = {**stored.files, path / CONFIG_NAME: ()}
        self.is_partial = True
        self._sort()
        if self._adapted and base is not None:
            self._opened = (stored, base)
        self._count_cost()

    def _sort(self) -> None:
        factors: dict[tuple[str, str], dict[str, str]] = {}
        ranks: dict[str, int] = {}
        magnitudes: dict[str, str] = {}
        tokens: dict[str, str] = {}
        parts: dict[str, dict[str, str]] = {}  # of adapters of other kinds
        form = _PARTS.get(self.adapter.kind)
        kinds = {"lora_magnitude_vector": magnitudes} if self.adapter.use_dora else {}
        kinds["token_adapter.trainable_tokens_delta"] = tokens
        for key, info in self._stored.tensors.items():
            if key.startswith(INITIAL):
                continue
            name = key.removeprefix(_PREFIX)
            if form and (match := form.match(name)):
                self._put(key, match[2], parts.setdefault(match[1], {}))
            elif form is None and (factor := _FACTOR.match(name)):
                module, embedding, letter, part = factor.groups()
                if not info.shape:
                    raise InputError(f"{self.path}: {key} is a single number, not a LoRA factor")
                kind = "bias" if part == ".bias" else "embedding" if embedding else "weight"
                if kind == "bias" and letter == "A":
                    raise self._refusal(key)
                self._put(key, letter, factors.setdefault((module, kind), {}))
                if letter == "A":
                    ranks[module] = info.shape[0]
            elif (made := _MADE.match(name)) and made[2] in kinds:
                kinds[made[2]][made[1]] = key
            elif any(mark in name for mark in _MARKS):
                raise self._refusal(key)
            else:
                name = re.sub(r"\.(modules_to_save|original_module)\.[^.]+\.", ".", name)
                name = re.sub(r"(\.token_adapter)?\.base_layer\.", ".", name)
                if self._whole.setdefault(name, key) != key:
                    raise self._refusal(key, self._whole[name])
                self._add(replace(info, name=name))
        if parts:
            self._add_layers(parts)
        parameters = self._find_parameters([module for module, _ in factors])
        for (module, kind), pair in factors.items():
            if module in parameters:
                self._add_parameter(parameters[module], pair)
            elif kind == "bias":
                scale = self.adapter.scaling(module, ranks.get(module, 1))
                info = replace(self._stored.tensors[pair["B"]], name=f"{module}.bias")
                self._add(info, Product(pair["B"], None, False, scale))
            else:
                self._add_pair(module, kind, pair)
        for module in sorted(magnitudes.keys() | {m for m, _ in factors if self.adapter.use_dora}):
            self._add_magnitudes(f"{module}.weight", magnitudes.get(module))
        for module, key in tokens.items():
            self._add_tokens(module, key)
        if self.adapter.initial is not None:
            self._subtract_initial()

    def _put(self, key: str, part: str, parts: dict[str, str]) -> None:
        """Add a stored tensor to the parts of a layer."""
        admit(self._stored.tensors[key], (), str(self.path), as_weight=True)
        if parts.setdefault(part, key) != key:
            raise self._refusal(key, parts[part])

    def _add_layers(self, parts: dict[str, dict[str, str]]) -> None:
        """Add the layers of an adapter of another kind than LoRA."""
        adapter, shared = self.adapter, parts.pop(SHARED, {})
        self._stored = view = FactorView(self._stored)
        for module, own in parts.items():
            keys, rank = {**shared, **own}, adapter.rank_of(module)
            shape, bias = self._find_in_base(module)
            if adapter.kind in NEED_BASE and not shape:
                raise InputError(f"{self.path}: {module} is not in the base; {MERGE_WITH_PEFT}")
            if adapter.kind == "ADALORA" and not rank:
                continue  # nothing is left of it, so the layer is unchanged
            try:
                scale, is_transposed = adapter.scaling(module, rank), self._is_transposed(module)
                layer = AdaptedLayer(module, keys, view, rank, scale, is_transposed, shape)
                if adapter.kind == "IA3":
                    self._multiply(layer, bias)
                else:
                    shape, change = layer.change(adapter.kind)
                    self._add(TensorInfo(f"{module}.weight", F32, shape, 0), change)
            except (KeyError, ValueError, ZeroDivisionError):
                forms = ", ".join(f"{part} {view.tensors[key].form}" for part, key in keys.items())
                what = f"{module} has {forms}, which do not fit its settings and the base"
                raise InputError(f"{self.path}: {what}; give it as PEFT saved it") from None

    def _multiply(self, layer: AdaptedLayer, bias: tuple[int, ...]) -> None:
        """Add the tensors that IA³ multiplies: a layer's weight, and its bias with the outputs."""
        by_input = any(pattern.matches(layer.name) for pattern in self.adapter.feedforward)
        weight = layer.multiplied(by_input=by_input)
        made = {"weight": (layer.shape, weight)}
        if bias and not by_input:
            made["bias"] = bias, ScaledWeights(weight.key, 1, bias[0], bias[0])
        for kind, (shape, numbers) in made.items():
            self._add(TensorInfo(name := f"{layer.name}.{kind}", F32, shape, 0))
            self._products[name] = ()
            self._adapted[name] = numbers

    def _find_in_base(self, module: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of a module's weight and bias in the base; () for what is not known.

        The beginnings of names may differ in the base's files. Modules that have the same end must
        have the same shapes.
        """
        base, name, kinds = self._base_tensors, f"{module}.weight", ("weight", "bias")
        ends = (f".{name}".split(".", first)[-1] for first in range(1, name.count(".") + 1))
        alike = ([other for other in base if f".{other}".endswith(f".{end}")] for end in ends)
        found = [name] if name in base else next(filter(None, alike), [])
        infos = ([base.get(each[: -len("weight")] + kind) for kind in kinds] for each in found)
        shapes = {tuple(info.shape if info else () for info in both) for both in infos}
        weight, bias = shapes.pop() if len(shapes) == 1 else ((), ())
        return weight, bias

    def _find_parameters(self, modules: Sequence[str]) -> dict[str, str]:
        """Return the parameters that have their own LoRA, by the names of their factors."""
        parameters: dict[str, str] = {}
        levels: dict[str, list[str]] = {}
        for module in sorted(dict.fromkeys(modules), key=len, reverse=True):
            levels.setdefault(module.replace(".base_layer", ""), []).append(module)
        for module, wrapped in levels.items():
            names = self._targets_in(module)
            if len(names) > 1:
                names = [name for name in PARAMETERS if name in names]
            if len(wrapped) > 1 and len(names) != len(wrapped):
                text = f"target_parameters do not say which parameters of {module} have a LoRA"
                raise InputError(f"{self.path}: {text}; {MERGE_WITH_PEFT}")
            if len(names) == len(wrapped):
                parameters |= {w: f"{module}.{n}" for w, n in zip(wrapped, names, strict=True)}
        return parameters

    def _targets_in(self, module: str) -> list[str]:
        """Return the parameters of a module that `target_parameters` names."""
        in_base = {}
        for target in self.adapter.target_parameters:
            name = target.rpartition(".")[2]
            if f".{module}.{name}".endswith(f".{target}") and not f".{module}".endswith(f".{name}"):
                in_base[name] = f"{module}.{name}" in self._base_tensors
        is_known = any(in_base.values()) or f"{module}.weight" in self._base_tensors
        return [name for name in in_base if in_base[name] or not is_known]

    def _refusal(self, key: str, other: str | None = None) -> InputError:
        reason = f"{other} and {key} are for the same tensor; save one, or {MERGE_WITH_PEFT}"
        if other is None:
            reason = f"{key} is not a known kind of tensor; {MERGE_WITH_PEFT}"
        return InputError(f"{self.path}: {reason}")

    def _factors(self, module: str, pair: Mapping[str, str]) -> tuple[TensorInfo, TensorInfo]:
        """Return lora_A and lora_B; refuse those that do not fit."""
        if set(pair) != {"A", "B"}:
            missing = "AB".replace(next(iter(pair)), "")
            raise InputError(f"{self.path}: {module} has no lora_{missing}; the adapter is damaged")
        down, up = (self._stored.tensors[pair[letter]] for letter in "AB")
        rank = math.prod(up.shape[1:]) if up.shape else 0
        if not rank or down.shape[:1] != (rank,):
            forms = f"lora_A is {down.form}, lora_B {up.form}"
            raise InputError(f"{self.path}: {module}: {forms}; they do not fit")
        return down, up

    def _add_pair(self, module: str, kind: str, pair: Mapping[str, str]) -> None:
        down, up = self._factors(module, pair)
        self.adapter.count_experts(self.path, module, down.shape[0], is_parameter=False)
        scale = self.adapter.scaling(module, down.shape[0])
        if kind == "embedding" or self._is_transposed(module):
            product = Product(pair["A"], pair["B"], True, scale)
            shape: tuple[int, ...] = math.prod(down.shape[1:]), up.shape[0]
        else:
            product = Product(pair["B"], pair["A"], False, scale)
            shape = up.shape[0], *down.shape[1:]
        self._add(TensorInfo(f"{module}.weight", F32, shape, 0), product)

    def _is_transposed(self, module: str) -> bool:
        """Return whether the base stores inputs × outputs; PEFT notes only the last layer's."""
        if self._model_type is None:
            return self.adapter.fan_in_fan_out
        return self._model_type in CONV1D_MODELS and not module.endswith(("lm_head", "score"))

    def _add_parameter(self, name: str, pair: Mapping[str, str]) -> None:
        """Add the LoRA of a parameter: a matrix, or one for each of several experts."""
        down, up = self._factors(name, pair)
        experts = self.adapter.count_experts(self.path, name, down.shape[0], is_parameter=True)
        scale = self.adapter.scaling(name, down.shape[0] // experts)
        known = self._base_tensors[name].shape if name in self._base_tensors else ()
        sides = up.shape[0], math.prod(down.shape[1:])
        is_turned = self._model_type in TURNED_EXPERTS
        if known and sides[0] != sides[1]:
            is_turned = known[-2:] == sides[::-1]
        is_turned = is_turned and experts > 1
        left, right = (pair["A"], pair["B"]) if is_turned else (pair["B"], pair["A"])
        of_experts = (experts,) if experts > 1 or len(known) == 3 else ()
        shape = *of_experts, *(sides[::-1] if is_turned else sides)
        self._add(TensorInfo(name, F32, shape, 0), Product(left, right, is_turned, scale, experts))

    def _add_magnitudes(self, name: str, key: str | None) -> None:
        (product,) = self._products.get(name, (None,))
        if key is None or not isinstance(product, Product) or product.experts > 1:
            raise InputError(f"{self.path}: {name} lacks part of its DoRA; the adapter is damaged")
        rows, _, columns = product.sides(self._stored)
        made = DoraMagnitudes(key, rows, columns, by_column=product.transposed)
        magnitudes = self._stored.tensors[key]
        admit(magnitudes, (), str(self.path), as_weight=True)
        if magnitudes.elements != (columns if made.by_column else rows):
            raise InputError(f"{self.path}: {key} is {magnitudes.form}; it does not fit {name}")
        self._adapted[name] = made

    def _add_tokens(self, module: str, key: str) -> None:
        """Add the trained rows of an embedding that the base or the adapter has in full."""
        name, trained = f"{module}.weight", self._stored.tensors[key]
        held = {**self._base_tensors, **self.tensors}
        leaf = name.split(".")[-2:]  # the part before it may differ in the base's files
        alike = (other for other in held if other.split(".")[-2:] == leaf)
        info = held.get(name if name in held else next(alike, ""))
        rows = next((ids for e, ids in self.adapter.tokens.items() if module.endswith(e)), ())
        if info is None or name in self._products or len(info.shape) != 2:
            what = "tokens and a LoRA" if name in self._products else "rows but is not an embedding"
            raise InputError(f"{self.path}: {name} has trained {what}; {MERGE_WITH_PEFT}")
        admit(trained, (), str(self.path), as_weight=True)
        height, width = info.shape
        if trained.shape != (len(rows), width) or not all(0 <= row < height for row in rows):
            what = f"{key} is {trained.form}, for {len(rows)} rows of an embedding of {info.form}"
            raise InputError(f"{self.path}: {what}; they do not fit")
        self._add(TensorInfo(name, F32, info.shape, 0))
        self._products[name] = ()
        self._adapted[name] = TrainedRows(key, width, rows)

    def _subtract_initial(self) -> None:
        """Subtract the product of the initial factors, which was subtracted from the base."""
        stored = self._stored.tensors
        for name, products in self._products.items():
            for product in products:
                assert isinstance(product, Product)  # or the adapter would not be LoRA
                left, right = (f"{INITIAL}{key}" for key in (product.left, product.right))
                pairs = ((left, product.left), (right, str(product.right)))
                if any(i not in stored or stored[i].shape != stored[k].shape for i, k in pairs):
                    what = f"{self.adapter.initial}: lacks the factors of {name}"
                    raise InputError(f"{what}; give the adapter as it was before training")
                initial = replace(product, left=left, right=right, scale=-product.scale)
                self._products[name] = product, initial

    def bind(self, names: Mapping[str, str]) -> None:
        """Set the base's names for the tensors, by the names here; computed tensors need them."""
        self._base_names = dict(names)
        for name in self._adapted.keys() - self._whole.keys():
            info = self._base_tensors.get(names.get(name, name))
            if info is None or info.shape != self.tensors[name].shape:
                found = "has none" if info is None else f"has {info.form}"
                what = f"{name} is computed from the base's tensor, and the base {found}"
                raise InputError(f"{self.path}: {what}; give the base that it was trained on")

    def _add(self, info: TensorInfo, product: Computed | None = None) -> None:
        """Add a tensor stored in full, or a change, perhaps to such a tensor."""
        admit(info, self._products, str(self.path))
        self.tensors[info.name] = info if product is None else replace(info, dtype=F32)
        if product is not None:
            self._products[info.name] = (product,)

    def tie(self, names: Sequence[str]) -> str:
        """Treat tensors as one, the first, as the base does; return a notice's code."""
        first, *others = names
        forms = {(self.tensors[name].shape, self.tensors[name].dtype) for name in names}
        is_one = self.adapter.ensure_weight_tying
        saved = [name for name in names if name not in self._products]
        keys = [self._whole[name] for name in names if name in self._whole]
        unfit = ""
        if others and not self._adapted.keys().isdisjoint(names):
            unfit = f"{first} is"
        elif saved and not is_one and (saved != list(names) or not others):
            unfit = f"{saved[0]} is"
        elif len(forms) > 1 or not all(same_bytes(self._stored, keys[0], key) for key in keys[1:]):
            unfit = f"{' and '.join(names)} are"
        if unfit:
            raise InputError(f"{self.path}: {unfit} tied in the base; {MERGE_WITH_PEFT}")
        parts = [self._products[name] for name in names if self._products.get(name)]
        if keys:
            self._whole[first] = keys[0]
        for name in others:
            del self.tensors[name]
            self._whole.pop(name, None)
            self._products.pop(name, None)
        if parts:
            self._products[first] = parts[0] if is_one else tuple(chain(*parts))
        self._count_cost()
        return "" if is_one or not parts else "added_changes" if len(parts) > 1 else "tied_change"

    def delta_of(self, name: str) -> DeltaInfo:
        whole = self._whole.keys() | self._adapted.keys()
        return DeltaInfo(is_change=name in self._products and name not in whole)

    def fingerprint(self) -> list[Any]:
        made = [self._products, self._adapted] if self._adapted else [self._products]
        return [*super().fingerprint(), repr(self.adapter), *map(repr, made)]

    def compute(self, name: str, start: int, into: Raw) -> None:
        if name in self._adapted:
            self._adapted[name].fill(partial(self._read_tuned, name), self._stored, start, into)
        else:
            self._read_tuned(name, start, into)

    def _read_tuned(self, name: str, start: int, into: Floats) -> None:
        """Compute the change by all factors, and add the weight that it changes, if known."""
        into[:] = 0
        part = into
        for place, product in enumerate(self._products[name]):
            if place == 1:
                part = np.empty_like(into)
            product.fill(self._stored, start, part)
            if place:
                into += part
        if name in self._whole:
            into += read_floats(self._stored, self._whole[name], start, into.size)
        elif name in self._adapted:
            assert self._base is not None  # or it would not have been opened
            into += read_floats(self._base, self._base_names.get(name, name), start, into.size)

    def _count_cost(self) -> None:
        """Count the pieces of a product's factors, and the tensor that is added to it."""
        stored = self._stored.tensors
        both = [stored[key] for name, key in self._whole.items() if name in self._products]
        further = any(len(products) > 1 for products in self._products.values())
        products = (product for several in self._products.values() for product in several)
        most = max((product.reading_bytes(self._stored) for product in products), default=0)
        added = max((4 + info.dtype.itemsize for info in both), default=4 * further)
        self.cost = self._stored.cost.with_reading(CHUNK * added + most)
        if self._adapted and self._base is not None:
            itemsize = max((info.dtype.itemsize for info in self._base_tensors.values()), default=0)
            made = max(each.reading_bytes for each in self._adapted.values())
            made += self._base.cost.reading_bytes + CHUNK * (4 + itemsize)
            self.cost = self.cost.with_reading(made)


def looks_like(path: Path) -> bool:
    """Return whether a folder holds an adapter."""
    return (path / CONFIG_NAME).is_file()


def open_form(opening: Opening) -> LoraSource:
    """Open an adapter; the configuration of its base says how its layers are stored."""
    path, base = opening.path, opening.base
    adapter, weights = check_folder(opening)
    is_plain = weights.name == WEIGHTS_NAME
    is_made = adapter.use_dora or adapter.tokens or adapter.initial or adapter.kind in NEED_BASE
    if base is None and is_made:
        raise InputError(f"{path}: cannot be read without its base; {MERGE_INTO_BASE}")
    ahead = opening.most_ahead_bytes
    stored: Source = FileSource(weights, ahead) if is_plain else TorchSource(weights)
    if adapter.initial is not None:
        first = FileSource(adapter.initial / WEIGHTS_NAME, ahead)
        homes: dict[str, tuple[Source, str]] = {key: (stored, key) for key in stored.tensors}
        stored = StackedSource(homes | {INITIAL + key: (first, key) for key in first.tensors})
    kind = (opening.base_config or {}).get("model_type")
    return LoraSource(path, adapter, stored, model_type=kind, base=base)


def check_folder(opening: Opening) -> tuple[Adapter, Path]:
    """Return an adapter's settings and its file of weights; refuse a folder that lacks either."""
    path, adapter = opening.path, read_config(opening.path)
    if (weights := path / WEIGHTS_NAME).exists():
        return adapter, weights
    if not (weights := path / PICKLE_NAME).exists():
        raise InputError(f"{path}: has no {WEIGHTS_NAME}; save it with safe_serialization=True")
    check_allowed(opening)
    return adapter, weights


def open_adapter(path: Path, base_config: Any = None, **given: Any) -> LoraSource:
    """Read an adapter's configuration and header; `base_config` is its base's config.json."""
    return open_form(Opening(path, base_config=base_config, **given))


def bind_base(model: Source) -> None:
    """Pass the base's names for its tensors to an adapter that is seen under other names."""
    names, view = {name: name for name in model.tensors}, model
    while isinstance(view, SourceView) and not isinstance(view, LoraSource):
        names = {name: view.names.get(inner, inner) for name, inner in names.items()}
        view = view.inner
    if isinstance(view, LoraSource):
        view.bind({inner: name for name, inner in reversed(names.items())})


def read_config(path: Path) -> Adapter:
    """Read `adapter_config.json`."""
    file = path / CONFIG_NAME
    return parse_config(parse_json(read_limited(file, MAX_CONFIG_BYTES), file), file)


def parse_config(config: Any, file: Path) -> Adapter:
    """Return the settings of an adapter; refuse kinds that are not read, with the reason."""
    kind = str(config.get("peft_type")) if isinstance(config, dict) else "missing"
    if kind not in KINDS:
        what = f"peft_type is {kind!r:.80}, and only these are read: {', '.join(KINDS)}"
        raise InputError(f"{file}: {what}; {IF_PEFT_CAN}")
    settings, is_lora = KINDS[kind], kind == "LORA"
    flags = FLAGS if is_lora else ("fan_in_fan_out",)
    if kind == "VERA" and not config.get("save_projection", True):
        what = "save_projection is false, so its shared matrices are not stored"
        raise InputError(f"{file}: {what}; save it with save_projection=True, or {MERGE_WITH_PEFT}")
    for setting, reason in _TABLES["refused"].items():
        if config.get(setting):
            raise InputError(f"{file}: {setting} is set: {reason}")
    name = config.get("base_model_name_or_path")
    try:
        return Adapter(
            alpha=finite(config[settings["alpha"]]) if "alpha" in settings else 1.0,
            alpha_pattern=_read_pattern(config, "alpha_pattern"),
            base_name=name if isinstance(name, str) else None,
            rank=finite(config.get(settings["rank"], 8)) if "rank" in settings else 0.0,
            rank_pattern=_read_pattern(config, "rank_pattern"),
            target_parameters=tuple(map(str, config.get("target_parameters") or ())),
            tokens=_read_tokens(config.get("trainable_token_indices") or {}),
            initial=_find_initial(file, str(is_lora and config.get("init_lora_weights")).lower()),
            **{flag: flag in flags and bool(config.get(flag)) for flag in FLAGS},
            kind=kind,
            feedforward=_read_feedforward(config) if kind == "IA3" else (),
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InputError(f"{file}: a setting is missing or not valid: {error}") from None


def _read_pattern(config: Mapping[str, Any], setting: str) -> dict[ModulePattern, float]:
    patterns = config.get(setting) or {}
    if config["peft_type"] == "ADALORA":  # which directions of each factor are left, by its name
        names = {re.sub(r"\.lora_E(\.[^.]+)?$", "", str(key)): key for key in patterns}
        patterns = {re.escape(name): sum(patterns[key]) for name, key in names.items()}
    return {ModulePattern(str(key)): finite(value) for key, value in patterns.items()}


def _read_feedforward(config: Mapping[str, Any]) -> tuple[ModulePattern, ...]:
    """Read IA³'s modules whose inputs are multiplied: a pattern for whole names, or their ends."""
    given = config["feedforward_modules"]
    whole = [f"^(?:{given})"] if isinstance(given, str) else [f".*{re.escape(e)}" for e in given]
    return tuple(map(ModulePattern, whole))


def _find_initial(file: Path, start: str) -> Path | None:
    """Find the adapter as it was before training, if its product was subtracted from the base."""
    kind = next(filter(start.startswith, CHANGES_BASE), None)
    if kind is None:
        return None
    folders = [folder / f"{kind}_init" for folder in file.parents[:2]]
    found = next(filter(looks_like, folders), None) if kind != "loftq" else None
    if found is None:
        what = f"init_lora_weights is {start!r}, which changes the weights of the base too"
        how = f"put the adapter as it was before training into {folders[0]}"
        how = MERGE_WITH_PEFT if kind == "loftq" else f"{how}, or {CONVERT_WITH_PEFT}"
        raise InputError(f"{file}: {what}; {how}")
    return found


def _read_tokens(given: Any) -> dict[str, tuple[int, ...]]:
    """Read the numbers of trained tokens: those of the input embedding, or of several by name."""
    tables = given.items() if isinstance(given, dict) else [("", given)]
    return {str(end): tuple(int(row) for row in rows) for end, rows in tables}


def finite(value: Any) -> float:
    """Return a number that float32 can hold; raise ValueError if it is out of range."""
    if isinstance(value, str):
        raise TypeError(f"{value!a:.80} is text; write a number")
    number = float(value)
    if not abs(number) <= float(np.finfo(np.float32).max):
        raise ValueError(f"{value!a:.80} is out of range")
    return number
