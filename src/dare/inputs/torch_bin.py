"""Weights that torch.save wrote: pytorch_model.bin, its shards, .pt and .pth.

Such a file is a zip archive with a pickle, which says what there is, and the bytes of every
storage. A pickle can hold any program, so nothing here is opened unless the user asks for it, and
torch's own restricted loader (`weights_only=True`) reads it. It does so without storages
(FakeTensorMode), to tell where in the file each tensor lies; weights are then read from there like
those of any other file, in the tensor's order whatever its strides, and shared ones for each name.
"""

from __future__ import annotations

import os
import pickle
import re
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dare.errors import HeaderError, InputError
from dare.inputs.sources import (
    InputFiles,
    StampedSource,
    check_against_index,
    read_index,
)
from dare.tensors.dtypes import BY_TORCH_NAME, StorageType
from dare.tensors.header import TensorInfo

SINGLE_NAME = "pytorch_model.bin"
INDEX_NAME = "pytorch_model.bin.index.json"
SUFFIXES = (".bin", ".pt", ".pth")
CONTAINERS = ("state_dict", "model_state_dict", "model", "module")
"""Keys under which training programs keep the weights."""
PIECE_ELEMENTS = 1 << 18
"""How many elements of a tensor that is not contiguous are gathered at once."""

_LOCAL_HEADER = struct.Struct("<26xHH")
"""Of a record in a zip archive; the lengths of the two texts that follow it."""


@dataclass(frozen=True)
class Placed:
    """Where a tensor's elements lie in a file."""

    file: Path
    start: int
    """Offset of the first element, from the start of the file."""
    dtype: StorageType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    """In elements."""

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one after the other, in order."""
        expected = 1
        for size, stride in zip(self.shape[::-1], self.strides[::-1], strict=True):
            if size > 1 and stride != expected:
                return False
            expected *= size
        return True

    def positions(self, first: int, count: int) -> NDArray[np.int64]:
        """Where elements lie, counted in elements from `start`."""
        index = np.arange(first, first + count)
        found = np.zeros(count, np.int64)
        for size, stride in zip(self.shape[::-1], self.strides[::-1], strict=True):
            index, within = np.divmod(index, size)
            found += within * stride
        return found


class TorchSource(StampedSource):
    """The tensors of a state dict in one file or in shards."""

    def __init__(self, path: Path) -> None:
        super().__init__(InputFiles())
        self.path = path
        self.tensors: dict[str, TensorInfo] = {}
        self.left_out: tuple[str, ...] = ()
        """What is in the files and is no tensor of the state dict."""
        self._placed: dict[str, Placed] = {}
        for file, promised in _files_of(path).items():
            found = self._look_into(file)
            if promised is not None:
                check_against_index(path / INDEX_NAME, file, found, promised)
        if not self.tensors:
            raise InputError(f"{path}: holds no tensors")
        if self.left_out:
            told = ", ".join(self.left_out)
            self.remarks = (f"{path}: left out, no tensors of the model: {told}",)

    def _look_into(self, file: Path) -> set[str]:
        """Read what a file says of its tensors, and no weights; return their names."""
        with self._files.first_look(file) as file_descriptor:
            records = _read_records(file_descriptor, file)
        found = set()
        for name, value in self._state_dict(_load(file), file).items():
            if not isinstance(name, str) or not _is_tensor(value):
                self.left_out += (str(name),)
                continue
            if name in self.tensors:
                raise HeaderError(f"{self.path}: {name} is in {file.name} and in another shard")
            placed = _place(value, file, name, records)
            self._placed[name] = placed
            self.tensors[name] = TensorInfo(name, placed.dtype, placed.shape, placed.start)
            found.add(name)
        return found

    def _state_dict(self, loaded: object, file: Path) -> Mapping[Any, Any]:
        if not isinstance(loaded, Mapping):
            kind = type(loaded).__name__
            raise InputError(f"{file}: holds a {kind}; expected a dict of tensors (a state dict)")
        for key in CONTAINERS:
            inner = loaded.get(key)
            if isinstance(inner, Mapping) and any(map(_is_tensor, inner.values())):
                self.left_out += tuple(str(other) for other in loaded if other != key)
                return inner
        return loaded

    def prefetch(self, name: str, offset: int, nbytes: int) -> None:
        placed = self._placed[name]
        if placed.is_contiguous:
            self._files.prefetch(placed.file, placed.start + offset, nbytes)

    def read(self, name: str, offset: int, into: NDArray[np.uint8]) -> None:
        placed = self._placed[name]
        if placed.is_contiguous:
            self._files.read(placed.file, placed.start + offset, into, name)
            return
        size = placed.dtype.itemsize
        end = -(-(offset + into.size) // size)
        for first in range(offset // size, end, PIECE_ELEMENTS):
            piece = self._gather(name, placed, first, min(PIECE_ELEMENTS, end - first))
            place = first * size - offset
            begin, stop = max(place, 0), min(place + piece.size, into.size)
            into[begin:stop] = piece[begin - place : stop - place]

    def _gather(self, name: str, placed: Placed, first: int, count: int) -> NDArray[np.uint8]:
        """Collect elements that do not lie side by side: each run of neighbours by one read."""
        size = placed.dtype.itemsize
        wanted, inverse = np.unique(placed.positions(first, count), return_inverse=True)
        stored = np.empty((wanted.size, size), np.uint8)
        edges = np.flatnonzero(np.diff(wanted) != 1) + 1
        for begin, end in zip([0, *edges], [*edges, wanted.size], strict=True):
            position = placed.start + int(wanted[begin]) * size
            self._files.read(placed.file, position, stored[begin:end].reshape(-1), name)
        return stored[inverse].reshape(-1)


def looks_like(path: Path) -> bool:
    """Say whether a path is a file of torch's, or a directory with nothing better, by names."""
    if path.suffix in SUFFIXES:
        return True
    try:
        names = set(os.listdir(path))
    except (OSError, ValueError):  # no directory
        return False
    has_safetensors = any(name.endswith(".safetensors") for name in names)
    return bool(names & {INDEX_NAME, SINGLE_NAME}) and not has_safetensors


def open_torch(path: str | os.PathLike[str]) -> TorchSource:
    """Open what torch.save wrote. It is a pickle: do this only if the user has asked for it."""
    return TorchSource(Path(path))


def _files_of(path: Path) -> dict[Path, set[str] | None]:
    """The files of a model, each with the tensors that its index promises, if it has one."""
    try:
        is_directory = path.is_dir()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    if not is_directory:
        return {path: None}
    if (path / INDEX_NAME).exists():
        return dict(read_index(path / INDEX_NAME))
    return {path / SINGLE_NAME: None}


def _read_records(file_descriptor: int, file: Path) -> dict[int, int]:
    """The place and size of every record of the archive."""
    try:
        with (
            os.fdopen(os.dup(file_descriptor), "rb") as stream,
            zipfile.ZipFile(stream) as archive,
        ):
            infos = archive.infolist()
            orders = [i for i in infos if i.filename.endswith("/byteorder") and i.file_size < 16]
            is_big = any(archive.read(info) == b"big" for info in orders)
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error, EOFError):
        raise InputError(f"{file}: {_what_else(file_descriptor)}") from None
    if is_big:
        raise InputError(f"{file}: written on a big-endian machine; save it again on another")
    if any(info.filename.endswith("/constants.pkl") for info in infos):
        raise InputError(f"{file}: is a TorchScript program; save its state_dict() instead")
    if any(info.compress_type != zipfile.ZIP_STORED for info in infos):
        raise HeaderError(f"{file}: has compressed records, which torch.save does not write")
    return {_data_start(file_descriptor, info, file): info.file_size for info in infos}


def _what_else(file_descriptor: int) -> str:
    """What a file is that is no archive."""
    beginning = os.pread(file_descriptor, 64, 0)
    if beginning.startswith(b"\x80"):
        return (
            "in the format of torch before 1.6, which cannot be read in parts; save it again with "
            "torch.save(torch.load(FILE, weights_only=True), FILE)"
        )
    if beginning.startswith(b"version https://git-lfs"):
        return "a pointer of Git LFS, not the weights; run git lfs pull"
    return "not a file of torch.save (a zip archive), or truncated"


def _data_start(file_descriptor: int, info: zipfile.ZipInfo, file: Path) -> int:
    size = os.fstat(file_descriptor).st_size
    if 0 <= info.header_offset <= size - _LOCAL_HEADER.size:
        header = os.pread(file_descriptor, _LOCAL_HEADER.size, info.header_offset)
        texts: tuple[int, int] = _LOCAL_HEADER.unpack(header)
        start = info.header_offset + _LOCAL_HEADER.size + sum(texts)
        if start + info.file_size <= size:
            return start
    raise HeaderError(f"{file}: its record {info.filename} is not inside the file")


def _load(file: Path) -> object:
    """Read the pickle without running anything in it, and without reading weights."""
    torch = _import_torch(file)
    from torch._subclasses.fake_tensor import FakeTensorMode

    try:
        with FakeTensorMode():
            return torch.load(file, weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        if found is None:
            raise InputError(
                f"{file}: its pickle is damaged, or not one that torch.save writes"
            ) from None
        raise InputError(
            f"{file}: refused, because it holds more than weights ({found[1]}): loading it could "
            "run any program. If you trust it, load it with torch and save the state dict alone, "
            "as safetensors"
        ) from None
    except Exception as error:  # a damaged file can make torch raise anything
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise InputError(f"{file}: torch cannot load it ({said})") from error


def _import_torch(path: Path) -> Any:
    try:
        import torch
    except ImportError:
        raise InputError(
            f"{path}: reading it needs torch: pip install 'dare-merge[torch]'"
        ) from None
    return torch


def _is_tensor(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _place(tensor: Any, file: Path, name: str, records: Mapping[int, int]) -> Placed:
    """Find a tensor in its file; check that all of it lies in one record."""
    dtype = BY_TORCH_NAME.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None or str(tensor.layout) != "torch.strided" or tensor.is_conj():
        raise InputError(
            f"{file}: {name} is {tensor.dtype}, {tensor.layout}; only plain tensors of "
            f"{', '.join(BY_TORCH_NAME)} can be read"
        )
    shape, strides = tuple(tensor.shape), tuple(tensor.stride())
    first = int(tensor.storage_offset()) * dtype.itemsize
    start = getattr(tensor.untyped_storage(), "_checkpoint_offset", -1)
    if _extent(shape, strides) * dtype.itemsize + first > records.get(start, -1):
        raise HeaderError(
            f"{file}: {name} does not lie inside its record; the file is damaged or truncated"
        )
    return Placed(file, start + first, dtype, shape, strides)


def _extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from the first to the last, both included."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
