"""Models as transformers builds them: live, or without weights, with its tables of names.

The tables say how it brings stored tensors into memory, and back. It does not describe them to its
users, so they may change with any version; `missing_names` says what a version lacks. With such a
version, models of the types in `loaded.toml` are read as before, because their names stay as they
are. All others are refused by name, and so is a model whose layout is not its base's; nothing is
guessed.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from dare.errors import InputError
from dare.inputs.quantised import tables_of
from dare.inputs.sources import CONFIG, read_config
from dare.tensors.names import some_of

NEEDED = "transformers 5 or newer and torch: pip install transformers torch"
KNOWN_ONLY = {"trust_remote_code": False, "local_files_only": True}
MAX_LAYERS = 10_000
# What is used of transformers' undocumented modules.
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
    from transformers import conversion_mapping, core_model_loading

    modules = SimpleNamespace(
        conversion_mapping=conversion_mapping, core_model_loading=core_model_loading
    )
    missing = []
    for name in USED_NAMES:
        try:
            attrgetter(name)(modules)
        except AttributeError:
            missing.append(f"transformers.{name}")
    return missing


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the class that a configuration names for its model, or empty text."""
    classes = config.get("architectures")
    return str(classes[0]) if isinstance(classes, list) and classes else ""


def build_without_weights(where: Path, config: Mapping[str, Any], remedy: str) -> Any:
    """Build the model that a configuration describes, without memory for its weights."""
    try:
        import transformers

        lacking = missing_names()
    except ImportError:
        kind = config["model_type"]
        raise InputError(f"{where}: a {kind!a} needs {NEEDED}; or {remedy}") from None
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
                found = transformers.AutoConfig.from_pretrained(folder, **settings, **KNOWN_ONLY)
            return build(found)
    except Exception as error:  # whatever a configuration can do to a model's code
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        text = f"{where}: transformers cannot build a {build.__name__} ({reason}); {remedy}"
        raise InputError(text) from error


def _class_of(where: Path, config: Mapping[str, Any], so: str) -> Any:
    import transformers

    name = architecture_of(config)
    found: Any = getattr(transformers, name, None) if name.isidentifier() else None
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    if not is_model:
        raise InputError(f"{where}: names {name!a}, which transformers does not have, {so}")
    return found


def load_live(folder: Path, endings: tuple[str, ...] = ()) -> Any:
    """Build a directory's model with its weights, in float32, on the GPU if there is one.

    If the name of its class must have one of some endings, all its weights must be there too.
    """
    try:
        import transformers
    except ImportError:
        raise InputError(f"{folder}: building it needs {NEEDED}") from None
    remedy = "so it cannot be built; define load_model(base) in the evaluator's file"
    build = _class_of(folder / CONFIG, read_config(folder), remedy)
    if endings and not build.__name__.endswith(endings):
        what = f"holds a {build.__name__}, but the data are for …{' or …'.join(endings)}"
        raise InputError(f"{folder}: {what}; save base and models with such a head")
    how = {"dtype": "float32", "output_loading_info": True, **KNOWN_ONLY}
    try:
        model, info = build.from_pretrained(folder, **how)
    except Exception as error:  # whatever a configuration can do to a model's code
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        version = transformers.__version__
        raise InputError(f"{folder}: transformers {version} cannot load it: {reason}") from error
    if endings and (missing := sorted(info["missing_keys"])):
        raise InputError(f"{folder}: a {build.__name__} needs {some_of(missing)}, not in its file")
    has_gpu = sys.modules["torch"].cuda.is_available()
    return model.to("cuda" if has_gpu else "cpu").requires_grad_(False).eval()


class ConversionTables:
    """The tables by which transformers brings the stored tensors of a model into memory."""

    def __init__(self, model: Any, transforms: Sequence[Any] | None = None) -> None:
        from transformers import conversion_mapping, core_model_loading

        self.model, self._core = model, core_model_loading
        self.state: Mapping[str, Any] = model.state_dict(keep_vars=True)
        if transforms is None:
            transforms = conversion_mapping.get_model_conversion_mapping(model)
        self._transforms = transforms  # which note whether they were used
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
        """Return tensors in memory as they are saved, in the layout that these have loaded."""
        used = [each for each in self._transforms if each.was_used()]
        back = ConversionTables(self.model, [each.reverse_transform() for each in reversed(used)])
        rename = self._core.rename_source_key
        found = back._convert(loaded, lambda name: rename(name, [], back.converters))
        return {rename(name, back._renamings, [])[0]: tensor for name, tensor in found.items()}

    def _convert(self, tensors: Mapping[str, Any], find: Callable[[str], Any]) -> dict[str, Any]:
        by_pattern = {p: each for each in self.converters for p in each.source_patterns}
        found: dict[str, Any] = {}
        gathered: dict[str, Any] = {}
        for name in self.in_order(tensors):
            new, pattern = find(name)
            if pattern is None:
                found.setdefault(new, tensors[name])
                continue
            if new not in gathered:
                gathered[new] = deepcopy(by_pattern[pattern])
            gathered[new].add_tensor(new, name, pattern, tensors[name])
        for new, converter in gathered.items():
            made = converter.convert(new, model=self.model, config=self.model.config)
            found |= {name: t[0] if isinstance(t, list) else t for name, t in made.items()}
        return found
