"""Models in other forms than plain safetensors, presented as sources.

Each form is a module with a class that has the methods of `dare.inputs.sources.Source` and computes
what it presents as it is read: any byte range of a tensor, from any thread, the same bytes
whatever the range. Optional packages are imported where they are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dare.errors import InputError
from dare.inputs import gguf, lora, torch_bin
from dare.inputs.delta_files import DeltaFile, DeltaSource, is_delta_file
from dare.inputs.quantised import read_quantised
from dare.inputs.small_files import MAX_CONFIG_BYTES, is_there, parse_json
from dare.inputs.sources import Source, open_source
from dare.stores.locations import to_path
from dare.tensors.files import read_limited

if TYPE_CHECKING:
    from dare.recipe.mergekit import Conversion


def open_model(
    path: Path,
    *,
    allow_pickle: bool = False,
    base_config: Mapping[str, Any] | None = None,
    base: Source | None = None,
    rescales: bool = True,
) -> Source:
    """Read the headers of a model, whatever form it has.

    An adapter is read by the configuration of its base, where that is known, and a delta file
    needs its base. What was dropped of that is made up for unless `rescales` is false.
    """
    if lora.looks_like(path):
        return lora.open_adapter(path, base_config)
    if gguf.looks_like(path):
        return gguf.open_gguf(path)
    if not torch_bin.looks_like(path):
        source = open_source(path)
        if not is_delta_file(source):
            return read_quantised(source, read_config(path))
        if base is None:
            raise InputError(f"{path}: is a delta file; first run `dare apply BASE DELTA -o OUT`")
        return DeltaSource(DeltaFile(source), base, rescales=rescales)
    if not allow_pickle:
        raise InputError(
            f"{path}: stores its weights as a pickle, which can contain programs; save it as "
            "safetensors, or set allow_pickle = true (--allow-pickle)"
        )
    return read_quantised(torch_bin.open_torch(path), read_config(path))


def read_config(path: Path) -> Mapping[str, Any]:
    """What the `config.json` of a model directory says; nothing where there is none."""
    try:
        file = (path if path.is_dir() else path.parent) / "config.json"
        if not is_there(file):
            return {}
    except (OSError, ValueError):  # no possible name of a file
        return {}
    config = parse_json(read_limited(file, MAX_CONFIG_BYTES), file)
    return config if isinstance(config, dict) else {}


def convert_yaml(path: str | PathLike[str]) -> Conversion:
    """Read a mergekit configuration as a recipe, which has no output yet; say how they differ."""
    from dare.recipe.mergekit import convert

    return convert(to_path(path), lambda model: open_model(model).tensors)
