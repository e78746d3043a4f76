"""Names and kinds of the modules that hold a model's stored tensors once it is loaded.

An adapter names modules in memory. transformers 5 gives many of them other names than checkpoints
do, and holds all experts of a layer as one parameter. The names of common language models stay as
they are (a table, which a test compares with transformers); for all others transformers is asked,
which builds the model without weights. A model that neither knows is refused.
"""

from __future__ import annotations

import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from dare.documents.notices import Notice, notice
from dare.errors import InputError
from dare.inputs.lora import CONV1D_MODELS
from dare.inputs.sources import CONFIG, says_tied
from dare.inputs.transformers_models import (
    ConversionTables,
    architecture_of,
    build_without_weights,
)
from dare.tensors.header import TensorInfo
from dare.tensors.names import is_embedding, is_tied_embedding, is_tied_head

# The module of a tensor: a layer, one that stores inputs × outputs, an embedding, any other; or the
# tensor is what PEFT knows as a parameter (the experts of a layer, perhaps as inputs × outputs), a
# part of a larger one, or not loaded at all.
Kind = Literal[
    "linear", "conv1d", "embedding", "other", "parameter", "turned_parameter", "fused", "absent"
]

EMBEDDINGS = ("relative_attention_bias",)  # embeddings whose names do not say so
# Layers that multiply by their weight and do nothing else. Routers inherit from Linear too.
LINEAR_CLASSES = ("Linear", "FalconLinear")
MAMBA_HINDRANCE = "Mamba's code reads its weight directly, so a LoRA has no effect"
LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_TABLES = tomllib.loads(files("dare.inputs").joinpath("loaded.toml").read_text("utf-8"))
# The parts of each model type whose modules have the names of its stored tensors.
PLAIN_TYPES = {kind: family["parts"] for family in _TABLES["families"] for kind in family["types"]}
AS_STORED = "set as_stored (--as-stored) if its modules have the names that its file uses"
MERGE_FIRST = "merge the adapter into it with PEFT (merge_and_unload) and give the result"


@dataclass(frozen=True)
class LoadedTensor:
    """A stored tensor in the loaded model, under its name in memory."""

    name: str
    kind: Kind
    is_tied: bool = False
    hindrance: str = ""  # the reason that PEFT can have no LoRA for it, though it is of a layer

    @property
    def module(self) -> str:
        """The module that holds it."""
        return self.name.rpartition(".")[0]

    @property
    def parameter(self) -> str:
        """Its name in the module."""
        return self.name.rpartition(".")[2]

    @property
    def is_parameter(self) -> bool:
        """True if an adapter names the parameter, not its module."""
        return self.kind in ("parameter", "turned_parameter")

    @property
    def is_layer(self) -> bool:
        """True if it is the matrix of a layer, or of each expert, that can have a LoRA."""
        is_matrix = self.kind in ("linear", "conv1d") and self.parameter == "weight"
        return self.is_parameter or (is_matrix and not self.hindrance)

    @property
    def target(self) -> str:
        """The module or the parameter that an adapter names."""
        return self.name if self.is_parameter else self.module


Places = dict[str, LoadedTensor]  # all tensors of a model, by their stored names


def find_places(
    path: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> tuple[Places, tuple[Notice, ...]]:
    """Find the tensors of a model once it is loaded, with a note if one is due."""
    if "model_type" not in config:
        is_tied = says_tied(config) is True
        note = notice("names_as_stored", str(path))
        return places_as_stored(tensors, is_tied=is_tied), (note,)
    if places := find_by_table(config, tensors):
        return places, ()
    return _by_transformers(path if path.is_dir() else path.parent, config, tensors)


def places_as_stored(
    tensors: Mapping[str, TensorInfo], *, is_conv1d: bool = False, is_tied: bool = False
) -> Places:
    """Take names as they are, and every matrix for a layer unless its name says otherwise."""
    places = {}
    for name, info in tensors.items():
        module, _, parameter = name.rpartition(".")
        leaf = module.rpartition(".")[2]
        kind: Kind = "other"
        if len(info.shape) == 2 and parameter == "weight":
            is_layer = is_tied_head(name) or not (is_embedding(name) or leaf in EMBEDDINGS)
            is_turned = is_conv1d and leaf not in ("lm_head", "score")
            kind = "embedding" if not is_layer else "conv1d" if is_turned else "linear"
        tied = is_tied and (is_tied_embedding(name) or is_tied_head(name))
        places[name] = LoadedTensor(name, kind, tied)
    return places


def find_by_table(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Places | None:
    """Find the tensors of a model whose names stay as they are; None: it is not in the table."""
    parts = PLAIN_TYPES.get(str(config["model_type"]))
    architecture = architecture_of(config) or "ForCausalLM"
    if parts is None or not architecture.endswith(LANGUAGE_MODELS):
        return None
    if any(name.partition(".")[0] not in (*parts, "lm_head") for name in tensors):
        return None
    is_tied = says_tied(config) is True or "lm_head.weight" not in tensors
    is_conv1d = config["model_type"] in CONV1D_MODELS
    return places_as_stored(tensors, is_conv1d=is_conv1d, is_tied=is_tied)


def _by_transformers(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> tuple[Places, tuple[Notice, ...]]:
    where = folder / CONFIG
    model = build_without_weights(where, config, AS_STORED)
    tables = ConversionTables(model)
    state = tables.state
    like_experts = set(_expert_layers(tables.converters))
    hindered = dict.fromkeys(
        _TABLES["mamba_layers"].get(str(config["model_type"]), ()), MAMBA_HINDRANCE
    )
    owners = Counter(map(id, state.values()))
    places = {}
    for name in tables.in_order(tensors):
        new, converter = tables.find(name)
        if new not in state:
            places[name] = LoadedTensor(name, "absent")
        elif converter is not None or tuple(state[new].shape) != tensors[name].shape:
            places[name] = LoadedTensor(new, "fused")
        else:
            module = new.rpartition(".")[0]
            leaf = module.rpartition(".")[2]
            kind = _kind_of(model.get_submodule(module), new, len(tensors[name].shape))
            if kind == "linear" and leaf in like_experts and new.endswith(".weight"):
                kind = "parameter"  # PEFT would take the module for an expert because of its name
            hindrance = hindered.get(leaf, "")
            places[name] = LoadedTensor(new, kind, owners[id(state[new])] > 1, hindrance)
    stored: dict[str, str] = {}
    for name, place in places.items():
        other = stored.setdefault(place.name, name)
        if other != name and place.kind not in ("fused", "absent"):  # a loader takes either
            both = f"{other} and {name} are loaded as one tensor"
            raise InputError(f"{folder}: {both}; save it with transformers")
    moved = sum(name != place.name for name, place in places.items())
    note = notice("other_names", count=moved, by=sys.modules["transformers"].__version__)
    return places, (note,) if moved else ()


def _expert_layers(converters: Iterable[Any]) -> Iterator[str]:
    """Yield the names of the layers of single experts before they became one parameter."""
    for converter in converters:
        for pattern in converter.source_patterns:
            plain = pattern.replace("\\", "")
            if "experts" in plain and plain.endswith(".weight"):
                yield plain.removesuffix(".weight").rpartition(".")[2]


def _kind_of(module: Any, name: str, dimensions: int) -> Kind:
    if type(module).__name__ == "Conv1D":  # transformers'; torch has Conv1d
        return "conv1d"
    if isinstance(module, sys.modules["torch"].nn.Embedding):
        return "embedding"
    said = f"{name} {type(module).__name__}".lower()
    if dimensions == 3 and ("expert" in said or "moe" in said):
        return "turned_parameter" if getattr(module, "is_transposed", False) else "parameter"
    if dimensions == 2 and name.rpartition(".")[0].endswith(".experts"):  # a bias of each
        return "parameter"
    return "linear" if type(module).__name__ in LINEAR_CLASSES else "other"
