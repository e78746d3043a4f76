"""The place of every tensor in the output, decided before anything is written."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dare.errors import OutputError, RecipeError
from dare.inputs.sources import SINGLE_NAME
from dare.stores.locations import StorePath
from dare.tensors.header import Described, TensorInfo, build_header

OTHER_FORMATS = re.compile(
    r"\.(safetensors|gguf|ggml|bin|pt|pth|ckpt|pkl|pickle|onnx|tflite|h5|hdf5|keras|msgpack|np[yz]"
    r"|zip|tar|t?gz|json|toml|ya?ml|html|txt|md|csv)",
    re.IGNORECASE,
)
"""Endings of files, so that nobody expects a directory of that name."""


@dataclass(frozen=True)
class Layout:
    """The files of an output and the tensors in each, in order."""

    target: Path  # the name the finished output gets: a `.safetensors` file, or a directory
    files: Mapping[str, tuple[Described, ...]]
    scratch: Path | None = field(default=None, kw_only=True)  # folder for a store's output

    def __post_init__(self) -> None:
        """Refuse a name that means a format which is not written."""
        ending = self.target.suffix
        if is_directory_target(self.target) and OTHER_FORMATS.fullmatch(ending):
            how = ", then convert_hf_to_gguf.py of llama.cpp" if ending.lower() == ".gguf" else ""
            raise OutputError(
                f"{self.target}: outputs are written as safetensors, not as {ending}; name a "
                f"directory (without {ending}) or a file that ends with .safetensors{how}"
            )

    @property
    def is_directory(self) -> bool:
        return is_directory_target(self.target)

    @property
    def is_sent(self) -> bool:
        """True if it goes to a store, file by file in their order."""
        return isinstance(self.target, StorePath)

    @property
    def scratch_bytes(self) -> int:
        """About how much room it takes until it is in its store: two files, one after the other."""
        sizes = self.sizes if self.is_sent else []
        return max(map(sum, itertools.pairwise([0, *sizes])), default=0)

    @property
    def sizes(self) -> list[int]:
        """About how many bytes each file has."""
        return [sum(map(_nbytes, tensors)) for tensors in self.files.values()]

    def build(self, metadata: Mapping[str, str]) -> dict[str, tuple[bytes, dict[str, TensorInfo]]]:
        """Return each file's header bytes and the places of its tensors."""
        return {name: build_header(tensors, metadata) for name, tensors in self.files.items()}

    def index(self) -> bytes | None:
        """The shard index, where there is more than one file."""
        if len(self.files) == 1:
            return None
        total = sum(_nbytes(tensor) for tensors in self.files.values() for tensor in tensors)
        places = {tensor[0]: name for name, tensors in self.files.items() for tensor in tensors}
        document = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        return json.dumps(document, indent=2, ensure_ascii=False).encode() + b"\n"


def is_directory_target(target: Path) -> bool:
    """Say whether an output of this name is a directory."""
    return target.suffix != ".safetensors"


def lay_out(target: Path, tensors: Iterable[Described], shard_size: int | None) -> Layout:
    """Order tensors as the safetensors library does, widest type first, and fill shards in turn."""
    ordered = sorted(tensors, key=lambda tensor: (-tensor[1].itemsize, tensor[0]))
    if not is_directory_target(target):
        if shard_size is not None:
            raise RecipeError(f"shard_size makes several files; {target} is one: give a directory")
        return Layout(target, {target.name: tuple(ordered)})

    shards: list[list[Described]] = [[]]
    room = math.inf if shard_size is None else shard_size
    for tensor in ordered:
        size = _nbytes(tensor)
        if shards[-1] and size > room:
            shards.append([])
            room = math.inf if shard_size is None else shard_size
        shards[-1].append(tensor)
        room -= size
    if len(shards) == 1:
        return Layout(target, {SINGLE_NAME: tuple(shards[0])})
    count = len(shards)
    return Layout(
        target,
        {
            f"model-{number:05}-of-{count:05}.safetensors": tuple(shard)
            for number, shard in enumerate(shards, start=1)
        },
    )


def _nbytes(tensor: Described) -> int:
    return tensor[1].stored_elements(tensor[2]) * tensor[1].itemsize
