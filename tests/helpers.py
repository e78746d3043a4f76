"""Safetensors files for tests: written byte by byte, or with the safetensors library."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors.numpy import save_file

from dare.inputs.shards import INDEX_NAME
from dare.inputs.sources import Source
from dare.recipe.recipe import Request
from dare.stages import STAGES

Arrays = Mapping[str, np.ndarray]
Value = TypeVar("Value")
PATIENCE_SECONDS = 300
"""More than anything takes that is waited for, on a machine that does ten other things."""


def eventually(check: Callable[[], Value]) -> Value:
    """Check again and again until it holds, as a page follows when the machine lets it."""
    until = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return check()
        except AssertionError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def wait_until(is_so: Callable[[], object], what: str = "it") -> None:
    until = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < until, f"{what} did not happen in {PATIENCE_SECONDS} s"
        time.sleep(0.005)


def is_alive(pid: int | str) -> bool:
    """Whether a process runs; one that has ended and was not asked how, does not."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def method_of(stage: str) -> str:
    """The shortest method with a stage: `dare+linear`, `ties`, `linear+svc`."""
    return {"delta": f"{stage}+linear", "combine": stage, "refine": f"linear+{stage}"}[
        STAGES[stage].kind
    ]


def file_bytes(header: object, data: bytes = b"", length: int | None = None) -> bytes:
    """A file with this header (JSON, or bytes as they are), claiming `length` if given."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    claimed = len(text) if length is None else length
    return claimed.to_bytes(8, "little") + text + data


def entry(dtype: Any, shape: Any, *offsets: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": list(offsets)}


def save_hollow(path: Path, shapes: Mapping[str, Sequence[int]], mark: int = 0) -> Path:
    """Write a true header of BF16 and a hole for data, in which the last tensor has a mark."""
    header, start, end = {}, 0, 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = entry("BF16", shape, start, end)
    beginning = file_bytes(header)
    with path.open("wb") as file:
        file.write(beginning)
        file.truncate(len(beginning) + end)
        if mark:
            file.seek(len(beginning) + start)
            file.write(bytes([mark]))
    return path


def save(path: Path, arrays: Arrays) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(arrays), path)
    return path


def save_shards(folder: Path, arrays: Arrays, count: int) -> Path:
    """Deal the arrays out to `count` files with an index; return the folder."""
    places = {}
    for number in range(count):
        name = f"model-{number + 1:05}-of-{count:05}.safetensors"
        names = sorted(arrays)[number::count]
        save(folder / name, {tensor: arrays[tensor] for tensor in names})
        places.update(dict.fromkeys(names, name))
    write_index(folder, places)
    return folder


def write_index(folder: Path, weight_map: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


def write_recipe(folder: Path, base: Arrays, tuned: Sequence[Arrays], **settings: Any) -> Request:
    """Save the arrays and return a quiet request that merges them to out.safetensors."""
    files = [
        save(folder / f"model{number}.safetensors", model) for number, model in enumerate(tuned)
    ]
    given = {
        "base": save(folder / "base.safetensors", base),
        "models": files,
        "output": folder / "out.safetensors",
        "verbose": False,
        "threads": 1,
        **settings,
    }
    return Request.of(**given)


def read_elements(source: Source, name: str, start: int = 0, count: int | None = None) -> Any:
    """Elements as they are stored, by default all."""
    info = source.tensors[name]
    into = np.empty(info.elements if count is None else count, info.dtype.carrier)
    into.view(np.uint8)[:] = 0xAA
    source.read(name, start, into)
    return into


def read_tensor(source: Source, name: str) -> bytes:
    return read_elements(source, name).tobytes()


def flip_bit(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def listing(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))
