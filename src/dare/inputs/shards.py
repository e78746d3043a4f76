"""The files of a model: a single one, shards with their index, or a folder for each component."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import NamedTuple

from dare.errors import HeaderError, InputError
from dare.stores.locations import WEIGHT_SUFFIXES
from dare.tensors.files import is_directory, list_names, read_limited
from dare.tensors.header import MAX_CONFIG_BYTES, parse_json
from dare.tensors.names import some_of

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
STEMS = ("model", "diffusion_pytorch_model")  # of files of weights: transformers', diffusers'
MODEL_INDEX = "model_index.json"  # of a pipeline of diffusers, which is one model in each folder
MAX_INDEX_BYTES = 100_000_000


def components_of(directory: Path) -> list[str]:
    """Return the folders of a pipeline of diffusers, with weights or not; none for other models."""
    used = named_components(directory)
    return [name for name in list_names(directory) if name in used] if used else []


def named_components(directory: Path) -> list[str]:
    """Return the names of the components that a pipeline of diffusers has."""
    if not is_directory(directory) or MODEL_INDEX not in list_names(directory):
        return []
    file = directory / MODEL_INDEX
    document = parse_json(read_limited(file, MAX_CONFIG_BYTES), file)
    named = document.items() if isinstance(document, dict) else ()
    used = (name for name, given in named if isinstance(given, list) and any(given))
    return [name for name in used if re.fullmatch(r"[a-zA-Z]\w*", name)]


def folders_of(path: Path) -> dict[str, Path]:
    """Return the folders of a model's weights, by the prefix of their tensors' names."""
    if not (components := components_of(path)):
        return {"": path}
    folders = [path / name for name in components if is_directory(path / name)]
    weights = {f: [n for n in list_names(f) if n.endswith(WEIGHT_SUFFIXES)] for f in folders}
    if not any(weights.values()):
        raise InputError(f"{path}: none of the folders in {MODEL_INDEX} has weights")
    return {f"{folder.name}/": folder for folder, files in weights.items() if files}


class IndexedShard(NamedTuple):
    """The tensors that an index says a shard has."""

    index_file: Path
    tensors: set[str]


def find_files(path: Path, kind: str, *stems: str) -> dict[Path, IndexedShard | None]:
    """Find the files of a model, each with the tensors that its index lists, if there is one.

    In a folder, look for the index, then the usual single file, then the only file with the
    right ending: a variant such as `model.fp16.safetensors`, which may have an index, too.
    """
    if not is_directory(path):
        return {path: None}
    names, index = list_names(path), f"{stems[0]}.{kind}.index.json"
    weights = [name for name in names if name.endswith(f".{kind}")]
    usual = [f"{stem}.{kind}{ending}" for stem in stems for ending in (".index.json", "")]
    found = [name for name in usual if name in names][:1]
    if not found:
        found = [name for name in names if re.fullmatch(rf".+\.{kind}\.index\.\w+\.json", name)]
        found += [name for name in weights if not found or not re.search(r"-of-\d+\.", name)]
    if len(found) == 1:
        file = path / found[0]
        if file.suffix != ".json":
            return {file: None}
        return {shard: IndexedShard(file, listed) for shard, listed in read_index(file).items()}
    if weights:
        raise InputError(f"{path}: has {len(weights)} {kind} files and no {index}; name one file")
    raise InputError(f"{path}: has no {kind} file and no {index}")


def read_index(index: Path) -> dict[Path, set[str]]:
    """Return the shards that an index names, each with its tensors."""
    text = read_limited(index, MAX_INDEX_BYTES)
    try:
        weight_map = json.loads(text)["weight_map"]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise HeaderError(f"{index}: must be JSON with a weight_map") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise HeaderError(f"{index}: weight_map must map tensors to files")
    shards: dict[Path, set[str]] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or name != os.path.basename(name) or name in ("", ".", ".."):
            must = "a shard must be a file in the same folder"
            raise HeaderError(f"{index}: {tensor} is in {name!r}; {must}")
        shards.setdefault(index.parent / name, set()).add(tensor)
    return shards


def check_against_index(shard: IndexedShard, file: Path, held: set[str]) -> None:
    """Refuse a shard whose tensors are not those that its index lists."""
    index, listed = shard
    for tensors, complaint in ((listed - held, "lacks"), (held - listed, "also holds")):
        if tensors:
            names = some_of(sorted(tensors))
            raise HeaderError(f"{index}: {file.name} {complaint} {names}; get both files again")
