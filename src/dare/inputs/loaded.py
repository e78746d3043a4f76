"""Where the stored tensors of a model are once it is loaded: names and kinds of its modules.

An adapter names modules in memory. transformers 5 gives many of them other names than checkpoints
do, and holds all experts of a layer as one parameter. What a model becomes is known here for the
common language models, whose names stay as they are (a table, which a test compares with
transformers); for all others transformers is asked, which builds the model without weights. What
neither knows is refused.
"""

from __future__ import annotations

import sys
import tomllib
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from dare.errors import InputError
from dare.inputs.lora import CONV1D_MODELS
from dare.inputs.quantised import tables_of
from dare.tensors.header import TensorInfo
from dare.tensors.names import is_embedding, is_tied_embedding, is_tied_head

Kind = Literal["linear", "conv1d", "embedding", "other", "fused", "absent"]
"""What holds a tensor: a layer, one that stores inputs × outputs, an embedding, any other module;
or the tensor is a part of a larger one, or is not loaded at all."""

EMBEDDINGS = ("relative_attention_bias",)
"""Modules that are embeddings though their names do not say so."""
LINEAR_CLASSES = ("Linear", "FalconLinear")
"""Layers that multiply by their weight and do nothing else. Routers inherit from Linear too."""
MOST_LAYERS = 10_000
AS_STORED = "set as_stored (--as-stored) if its modules are called what its file calls them"


@dataclass(frozen=True)
class Place:
    """Where a stored tensor is in the loaded model."""

    name: str
    """Of the parameter, in memory."""
    kind: Kind
    is_tied: bool = False
    """Whether other modules have the same parameter."""
    hindrance: str = ""
    """Why PEFT can have no LoRA for it, though it is of a layer."""

    @property
    def module(self) -> str:
        """The module that holds it."""
        return self.name.rpartition(".")[0]

    @property
    def parameter(self) -> str:
        """What it is called there."""
        return self.name.rpartition(".")[2]

    @property
    def is_layer(self) -> bool:
        """Whether it is the matrix of a layer that can have a LoRA."""
        is_matrix = self.kind in ("linear", "conv1d") and self.parameter == "weight"
        return is_matrix and not self.hindrance


@dataclass(frozen=True)
class Loaded:
    """All tensors of a model, by their stored names."""

    places: Mapping[str, Place]
    notes: tuple[str, ...] = ()


def find_places(path: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> Loaded:
    """Say what the tensors of a model become when it is loaded by its configuration."""
    if "model_type" not in config:
        return Loaded(
            places_as_stored(tensors, is_tied=config.get("tie_word_embeddings") is True),
            (
                f"{path}: has no config.json that says what it is, so modules are called what "
                "their file calls them",
            ),
        )
    if places := _by_table(config, tensors):
        return Loaded(places)
    return _by_transformers(path if path.is_dir() else path.parent, config, tensors)


def architecture_of(config: Mapping[str, Any]) -> str:
    """The class that a configuration says its model is of; empty if it does not."""
    classes = config.get("architectures")
    return str(classes[0]) if isinstance(classes, list) and classes else ""


def places_as_stored(
    tensors: Mapping[str, TensorInfo], *, is_conv1d: bool = False, is_tied: bool = False
) -> dict[str, Place]:
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
        places[name] = Place(name, kind, tied)
    return places


# ---------------------------------------------------------------- by the table


@cache
def plain_types() -> dict[str, list[str]]:
    """Model types whose modules are called what they are stored as: by model type, their parts."""
    text = files("dare.inputs").joinpath("plain_types.toml").read_text("utf-8")
    families = tomllib.loads(text)["families"]
    return {kind: family["parts"] for family in families for kind in family["types"]}


def _by_table(
    config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> dict[str, Place] | None:
    parts = plain_types().get(str(config["model_type"]))
    architecture = architecture_of(config) or "ForCausalLM"
    if parts is None or not architecture.endswith(
        ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
    ):
        return None
    if any(name.partition(".")[0] not in (*parts, "lm_head") for name in tensors):
        return None
    is_tied = config.get("tie_word_embeddings") is True or "lm_head.weight" not in tensors
    is_conv1d = config["model_type"] in CONV1D_MODELS
    return places_as_stored(tensors, is_conv1d=is_conv1d, is_tied=is_tied)


# ---------------------------------------------------------------- by transformers


def _by_transformers(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> Loaded:
    where = folder / "config.json"
    try:
        import transformers
        from transformers import conversion_mapping, core_model_loading
    except ImportError:
        raise InputError(
            f"{where}: what modules a {config['model_type']!a} has is not known without "
            f"transformers 5 or newer and torch: pip install transformers torch; or {AS_STORED}"
        ) from None
    model = _without_weights(where, config)
    transforms = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, core_model_loading.WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, core_model_loading.WeightConverter)]
    experts = {
        pattern.split(".")[-2]
        for converter in converters
        for pattern in converter.source_patterns
        if "experts" in pattern
    }
    state = model.state_dict(keep_vars=True)
    owners = Counter(map(id, state.values()))
    places = {}
    for name in sorted(tensors, key=core_model_loading.dot_natural_key):  # as they are loaded
        new, converter = core_model_loading.rename_source_key(
            name, renamings, converters, model.base_model_prefix, state
        )
        if new not in state and name in state:
            new, converter = name, None
        if new not in state:
            places[name] = Place(name, "absent")
        elif converter is not None or tuple(state[new].shape) != tensors[name].shape:
            places[name] = Place(new, "fused")
        else:
            module = new.rpartition(".")[0]
            is_taken = module.rpartition(".")[2] in experts
            hindrance = "PEFT takes its name for that of an expert" if is_taken else ""
            kind = _kind_of(model.get_submodule(module))
            places[name] = Place(new, kind, owners[id(state[new])] > 1, hindrance)
    moved = sum(name != place.name for name, place in places.items())
    note = f"{moved} tensors have other names in memory (transformers {transformers.__version__})"
    return Loaded(places, (note,) if moved else ())


def _without_weights(where: Path, config: Mapping[str, Any]) -> Any:
    """Build the model that a configuration describes, without memory for its weights."""
    import transformers

    for table in tables_of(dict(config)):
        for key, value in table.items():
            if isinstance(value, int) and value > MOST_LAYERS and "layers" in key:
                raise InputError(f"{where}: {key} is {value}; at most {MOST_LAYERS} can be built")
    architecture = architecture_of(config)
    build = getattr(transformers, architecture, None) if architecture.isidentifier() else None
    if not (isinstance(build, type) and issubclass(build, transformers.PreTrainedModel)):
        raise InputError(
            f"{where}: architectures names {architecture!a}, which transformers does not have, so "
            f"its modules are not known; {AS_STORED}"
        )
    try:
        with warnings.catch_warnings(), sys.modules["torch"].device("meta"):
            warnings.simplefilter("ignore")
            return build(transformers.AutoConfig.from_pretrained(where.parent))
    except Exception as error:  # whatever a configuration can do to a model's code
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise InputError(
            f"{where}: transformers cannot build a {architecture} by it ({reason}), so its modules "
            f"are not known; {AS_STORED}"
        ) from error


def _kind_of(module: Any) -> Kind:
    from transformers.pytorch_utils import Conv1D

    if type(module) is Conv1D:
        return "conv1d"
    if isinstance(module, sys.modules["torch"].nn.Embedding):
        return "embedding"
    return "linear" if type(module).__name__ in LINEAR_CLASSES else "other"
