"""Models as transformers builds them, and the names of their tensors once they are loaded.

An adapter names modules in memory. transformers 5 gives many of them other names than checkpoints
do, and holds all experts of a layer as one parameter. The names of common language models do not
change (a table lists them, which a test compares with transformers); for all others, transformers
builds the model without weights. A model that neither knows is refused.

The conversion tables of transformers say how it brings stored tensors into memory, and back. They
are not documented, so they may change with any version; `missing_names` says what a version lacks.
With such a version, models of the types in `loaded.toml` are read as before, because their names do
not change. All others are refused by name, and so is a model whose layout is not its base's;
nothing is guessed.
"""

from __future__ import annotations

import json
import sys
import tomllib
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from importlib.resources import files
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from dare.documents.notices import Notice, notice
from dare.errors import InputError, needed
from dare.inputs.lora import CONV1D_MODELS
from dare.inputs.quantised import tables_of
from dare.inputs.sources import CONFIG, read_config, says_tied
from dare.tensors.header import TensorInfo
from dare.tensors.names import is_embedding, is_tied_embedding, is_tied_head, some_of

NEEDED = "transformers 5 or newer and torch: pip install transformers torch"
KNOWN_ONLY = {"trust_remote_code": False, "local_files_only": True}
MAX_LAYERS = 10_000
# The names that are used from transformers' undocumented modules.
USED_NAMES = (
    "conversion_mapping.get_model_conversion_mapping",
    "core_model_loading.dot_natural_key",
    "core_model_loading.rename_source_key",
    "core_model_loading.WeightConverter.add_tensor",
    "core_model_loading.WeightConverter.convert",
    "core_model_loading.WeightConverter.reverse_transform",
    "core_model_loading.WeightConverter.was_used",
)


def missing_names() -> list[str]:
    """Return the names that this version of transformers does not have."""
    missing = []
    for name in USED_NAMES:
        module, _, attribute = name.partition(".")
        try:
            attrgetter(attribute)(import_module(f"transformers.{module}"))
        except AttributeError:
            missing.append(f"transformers.{name}")
    return missing


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the class that a configuration names for its model, or empty text."""
    classes = config.get("architectures")
    return str(classes[0]) if isinstance(classes, list) and classes else ""


def build_without_weights(where: Path, config: Mapping[str, Any], remedy: str) -> Any:
    """Build the model that a configuration describes, without memory for its weights."""
    kind = config.get("model_type")
    with needed(InputError(f"{where}: a {kind!a} needs {NEEDED}; or {remedy}")):
        import transformers

        lacking = missing_names()
    if lacking:
        version = f"transformers {transformers.__version__} has no {some_of(lacking)}"
        raise InputError(f"{where}: {version}; use another one from 5 on, or {remedy}")
    for table in tables_of(dict(config)):
        for key, value in table.items():
            if isinstance(value, int) and value > MAX_LAYERS and "layers" in key:
                raise InputError(f"{where}: {key} is {value}; at most {MAX_LAYERS} can be built")
    build = _class_of(where, config, f"so its modules are not known; {remedy}")
    try:
        with warnings.catch_warnings(), sys.modules["torch"].device("meta"):
            warnings.simplefilter("ignore")
            settings = {"attn_implementation": "eager", "use_pretrained_backbone": False}
            with TemporaryDirectory() as folder:  # the model's may be in a store
                Path(folder, CONFIG).write_text(json.dumps(config))
                loaded = transformers.AutoConfig.from_pretrained(folder, **settings, **KNOWN_ONLY)
            return build(loaded)
    except Exception as error:  # a configuration can make a model's code raise anything
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        text = f"{where}: transformers cannot build a {build.__name__} ({reason}); {remedy}"
        raise InputError(text) from error


def _class_of(where: Path, config: Mapping[str, Any], so: str) -> Any:
    import transformers

    name = architecture_of(config)
    named: Any = getattr(transformers, name, None) if name.isidentifier() else None
    is_model = isinstance(named, type) and issubclass(named, transformers.PreTrainedModel)
    if not is_model:
        raise InputError(f"{where}: names {name!a}, which transformers does not have, {so}")
    return named


def load_live(folder: Path, endings: tuple[str, ...] = ()) -> Any:
    """Build a folder's model with its weights, in float32, on the GPU if there is one.

    With `endings`, the name of its class must have one of them, and no weights may be missing.
    """
    with needed(InputError(f"{folder}: building it needs {NEEDED}")):
        import transformers
    remedy = "so it cannot be built; define load_model(base) in the evaluator's file"
    build = _class_of(folder / CONFIG, read_config(folder), remedy)
    if endings and not build.__name__.endswith(endings):
        what = f"holds a {build.__name__}, but the data are for …{' or …'.join(endings)}"
        raise InputError(f"{folder}: {what}; save base and models with such a head")
    how = {"dtype": "float32", "output_loading_info": True, **KNOWN_ONLY}
    try:
        model, info = build.from_pretrained(folder, **how)
    except Exception as error:  # a configuration can make a model's code raise anything
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        version = transformers.__version__
        raise InputError(f"{folder}: transformers {version} cannot load it: {reason}") from error
    if endings and (missing := sorted(info["missing_keys"])):
        raise InputError(f"{folder}: a {build.__name__} needs {some_of(missing)}, not in its file")
    has_gpu = sys.modules["torch"].cuda.is_available()
    return model.to("cuda" if has_gpu else "cpu").requires_grad_(False).eval()


def trainer_callback() -> Any:
    """Return the class of callbacks for Trainer."""
    with needed(InputError(f"a callback for Trainer needs {NEEDED}")):
        from transformers import TrainerCallback
    return TrainerCallback


class ConversionTables:
    """The tables by which transformers brings the stored tensors of a model into memory."""

    def __init__(self, model: Any, transforms: Sequence[Any] | None = None) -> None:
        from transformers import conversion_mapping, core_model_loading

        self.model, self._core = model, core_model_loading
        self.state: Mapping[str, Any] = model.state_dict(keep_vars=True)
        if transforms is None:
            transforms = conversion_mapping.get_model_conversion_mapping(model)
        self._transforms = transforms  # each notes whether it was used
        self.converters = [each for each in transforms if hasattr(each, "operations")]
        self._renamings = [each for each in transforms if not hasattr(each, "operations")]

    def in_order(self, names: Iterable[str]) -> list[str]:
        """Return names of tensors in the order in which transformers loads them."""
        return sorted(names, key=self._core.dot_natural_key)

    def find(self, name: str) -> tuple[str, str | None]:
        """Return the name in memory of a stored tensor, and the pattern of its converter if any."""
        new, pattern = self._core.rename_source_key(
            name, self._renamings, self.converters, self.model.base_model_prefix, self.state
        )
        return (name, None) if new not in self.state and name in self.state else (new, pattern)

    def load(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Return stored tensors as the model has them in memory."""
        return self._convert(tensors, self.find)

    def save(self, loaded: Mapping[str, Any]) -> dict[str, Any]:
        """Return tensors in memory as they are saved, in the layout that was loaded."""
        used = [each for each in self._transforms if each.was_used()]
        back = ConversionTables(self.model, [each.reverse_transform() for each in reversed(used)])
        rename = self._core.rename_source_key
        saved = back._convert(loaded, lambda name: rename(name, [], back.converters))
        return {rename(name, back._renamings, [])[0]: tensor for name, tensor in saved.items()}

    def _convert(self, tensors: Mapping[str, Any], find: Callable[[str], Any]) -> dict[str, Any]:
        by_pattern = {p: each for each in self.converters for p in each.source_patterns}
        converted: dict[str, Any] = {}
        gathered: dict[str, Any] = {}
        for name in self.in_order(tensors):
            new, pattern = find(name)
            if pattern is None:
                converted.setdefault(new, tensors[name])
                continue
            if new not in gathered:
                gathered[new] = deepcopy(by_pattern[pattern])
            gathered[new].add_tensor(new, name, pattern, tensors[name])
        for new, converter in gathered.items():
            made = converter.convert(new, model=self.model, config=self.model.config)
            converted |= {name: t[0] if isinstance(t, list) else t for name, t in made.items()}
        return converted


# ---------------------------------------------------------------- tensors in memory

# The module of a tensor: a layer, a layer that stores inputs × outputs, an embedding, any other; or
# the tensor is a parameter to PEFT (the experts of a layer, perhaps as inputs × outputs), a part of
# a larger one, or not loaded at all.
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
    """Return the place of each tensor in the loaded model, with a note if one is due."""
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
    """Use names as they are; every matrix counts as a layer unless its name says otherwise."""
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
    """Find the tensors of a model whose names do not change; None if it is not in the table."""
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
                kind = "parameter"  # by its name, PEFT would take the module for an expert
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
