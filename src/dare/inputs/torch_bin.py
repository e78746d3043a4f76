"""Weights that torch.save wrote: pytorch_model.bin, its shards, .pt, .pth and .ckpt.

Such a file is a zip archive with a pickle, which says what there is, and the bytes of every
storage. A pickle can hold any program, so nothing here is opened unless the user asks for it, and
torch's own restricted loader (`weights_only=True`) reads it. It does so without storages
(FakeTensorMode), to tell where in the file each tensor lies; weights are then read from there like
those of any other file, in the tensor's order whatever its strides, and shared ones for each name.
"""

from __future__ import annotations

import os
import pickle
import pickletools
import re
import struct
import zipfile
import zlib
from bisect import bisect_right
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dare.documents.notices import notice
from dare.errors import HeaderError, InputError, install_command
from dare.inputs.quantised import read_quantised
from dare.inputs.shards import check_against_index, find_files
from dare.inputs.sources import InputFiles, Opening, Raw, Source
from dare.stores.locations import is_stored
from dare.tensors.dtypes import BY_TORCH_NAME
from dare.tensors.files import LocalFile, read_beginning
from dare.tensors.header import TensorInfo, admit

CONTAINERS = ("state_dict", "model_state_dict", "model", "module")
MAX_PICKLE_BYTES = 64 << 20  # for the list of tensors; that of 10,000 tensors has some 2 MB
DAMAGED_ARCHIVE = (zipfile.BadZipFile, struct.error, zlib.error)
MAX_VALUES = 10_000_000  # the limit for one value of a pickle; repeated parts are counted each time
PIECE_ELEMENTS = 1 << 18  # elements of a tensor that is not contiguous which are gathered at once


class TorchSource(InputFiles):
    """The tensors of a state dict in one file or in shards.

    It is a pickle: open it only if the user has asked for it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.left_out: tuple[str, ...] = ()  # entries that are no tensor of the state dict
        self._strides: dict[str, tuple[int, ...]] = {}  # in elements, if not contiguous
        for file, promise in find_files(path, "bin", "pytorch_model").items():
            held = self._read_pickle(file)
            if promise is not None:
                check_against_index(promise, file, held)
        if not self.tensors:
            raise InputError(f"{path}: holds no tensors")
        if self.left_out:
            self.remarks = (notice("not_weights", names=", ".join(self.left_out)),)

    def _read_pickle(self, file: Path) -> set[str]:
        """Read a file's list of tensors, and no weights; return their names."""
        if is_stored(file):
            raise InputError(f"{file}: is a pickle in a store; save it as safetensors, or fetch it")
        with self.open_header(file) as opened:
            assert isinstance(opened, LocalFile)
            edges = _read_edges(opened.file_descriptor, file)
        held = set()
        for name, value in self._state_dict(_load(file), file).items():
            if not isinstance(name, str) or not _is_tensor(value):
                self.left_out += (_shown(name),)
                continue
            info = _describe(value, file, name, edges)
            admit(info, (), str(file))
            self.add(info, file)
            if not value.is_contiguous():
                self._strides[name] = tuple(value.stride())
            held.add(name)
        return held

    def _state_dict(self, loaded: object, file: Path) -> Mapping[Any, Any]:
        if not isinstance(loaded, Mapping):
            kind = type(loaded).__name__
            raise InputError(f"{file}: contains a {kind}; expected a dict of tensors (state dict)")
        for key in CONTAINERS:
            inner = loaded.get(key)
            if isinstance(inner, Mapping) and any(map(_is_tensor, inner.values())):
                self.left_out += tuple(_shown(other) for other in loaded if other != key)
                return inner
        return loaded

    def place(self, name: str) -> Hashable:
        return self._home[name], self.tensors[name].start, self._strides.get(name)

    def prefetch(self, name: str, start: int, count: int) -> None:
        if name not in self._strides:
            super().prefetch(name, start, count)

    def read(self, name: str, start: int, into: Raw, _base: Raw | None = None) -> None:
        if name not in self._strides:
            super().read(name, start, into)
            return
        strides, shape = np.array(self._strides[name]), self.tensors[name].shape
        for done in range(0, into.size, PIECE_ELEMENTS):
            piece = into[done : done + PIECE_ELEMENTS]
            elements = np.arange(start + done, start + done + piece.size)
            self._gather(name, strides @ np.array(np.unravel_index(elements, shape)), piece)

    def _gather(self, name: str, places: NDArray[np.int64], into: Raw) -> None:
        """Collect elements that do not lie side by side: each run of neighbours by one read."""
        wanted, inverse = np.unique(places, return_inverse=True)
        stored = np.empty(wanted.size, into.dtype)
        edges = np.flatnonzero(np.diff(wanted) != 1) + 1
        for begin, end in zip([0, *edges], [*edges, wanted.size], strict=True):
            super().read(name, int(wanted[begin]), stored[begin:end])
        into[:] = stored[inverse]


def open_form(opening: Opening) -> Source:
    """Open a pickle, if the user allows it."""
    check_allowed(opening)
    return read_quantised(TorchSource(opening.path), opening.config)


def check_allowed(opening: Opening) -> None:
    """Refuse a model whose weights are a pickle, unless the user allows it."""
    if not opening.allow_pickle:
        why = "stores its weights as a pickle, which can contain programs"
        how = "save it as safetensors, or set allow_pickle = true (--allow-pickle)"
        raise InputError(f"{opening.path}: {why}; {how}")


def _read_edges(file_descriptor: int, file: Path) -> list[int]:
    """Return the latest ends of the archive's records: the next one's start, or the file's end."""
    try:
        with os.fdopen(os.dup(file_descriptor), "rb") as stream, zipfile.ZipFile(stream) as archive:
            infos = archive.infolist()
            orders = [i for i in infos if i.filename.endswith("/byteorder") and i.file_size < 16]
            is_big = any(archive.read(info) == b"big" for info in orders)
            stored = [i for i in infos if i.compress_type == zipfile.ZIP_STORED]
            small = [i for i in stored if i.file_size <= MAX_PICKLE_BYTES]
            pickles = [archive.read(i) for i in small if i.filename.endswith(".pkl")]
    except (*DAMAGED_ARCHIVE, ValueError, RuntimeError, OSError, EOFError):
        raise InputError(f"{file}: {_what_else(file)}") from None
    if is_big:
        raise InputError(f"{file}: was written on a big-endian machine; save it again elsewhere")
    if any(info.filename.endswith("/constants.pkl") for info in infos):
        raise InputError(f"{file}: is a TorchScript program; save its state_dict() instead")
    if any(i.filename.endswith(".pkl") and i.file_size > MAX_PICKLE_BYTES for i in infos):
        raise HeaderError(f"{file}: its pickle is larger than {MAX_PICKLE_BYTES} bytes")
    if len(stored) < len(infos):
        raise HeaderError(f"{file}: has compressed records, which torch.save does not write")
    if any(_count_values(pickled) > MAX_VALUES for pickled in pickles):
        raise InputError(f"{file}: its pickle expands to more than {MAX_VALUES} values")
    return sorted([*(info.header_offset for info in infos), os.fstat(file_descriptor).st_size])


def _count_values(pickled: bytes) -> int:
    """Count the values that the largest value of a pickle stands for, as far as it can be read.

    A pickle can put a tuple twice into a tuple, that twice into another, and so on: fifty lines
    stand for 2⁵⁰ values, and whoever hashes or prints the last one never comes to an end. The
    opcodes are walked without being run, by the effect that `pickletools` says each has.
    """
    stack: list[int | None] = []  # sizes; None is a mark
    memo: dict[Any, int] = {}
    largest = 0
    with suppress(ValueError, IndexError, struct.error, OverflowError):  # damaged: torch says so
        for opcode, argument, _ in pickletools.genops(pickled):
            name = opcode.name
            if name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
                memo[len(memo) if name == "MEMOIZE" else argument] = _top(stack)
            elif name in ("GET", "BINGET", "LONG_BINGET"):
                stack.append(memo.get(argument, 1))
            elif name == "MARK":
                stack.append(None)
            else:
                value = 1 + sum(_take(stack, opcode))
                stack += [value] * len(opcode.stack_after)
                largest = max(largest, _top(stack))
                if largest > MAX_VALUES:
                    break
    return largest


def _top(stack: list[int | None]) -> int:
    return (stack[-1] if stack else 0) or 0


def _take(stack: list[int | None], opcode: pickletools.OpcodeInfo) -> list[int]:
    """Pop an opcode's arguments: a number of values, or all down to the last mark."""
    count = len(opcode.stack_before)
    taken: list[int] = []
    if pickletools.markobject in opcode.stack_before:
        while stack and (size := stack.pop()) is not None:
            taken.append(size)
        count = opcode.stack_before.index(pickletools.markobject)
    for _ in range(min(count, len(stack))):
        taken.append(stack.pop() or 0)
    return taken


def _what_else(file: Path) -> str:
    beginning = read_beginning(file, 64)
    if beginning.startswith(b"\x80"):
        return "in the format of torch before 1.6; load it with torch and save it again"
    return "not a file of torch.save (a zip archive), or it is truncated"


def _load(file: Path) -> object:
    """Read the pickle without running anything in it, and without reading weights."""
    try:
        import torch
        from torch._subclasses.fake_tensor import FakeTensorMode
    except ImportError:
        raise InputError(f"{file}: needs torch: {install_command('torch')}") from None
    try:
        with FakeTensorMode():
            return torch.load(file, weights_only=True)
    except pickle.UnpicklingError as error:
        refused = re.search(r"GLOBAL (\S+)", str(error))
        if refused is None:
            text = f"{file}: its pickle is damaged, or not one that torch.save writes"
            raise InputError(text) from None
        raise InputError(
            f"{file}: refused, because it contains more than weights ({refused[1]}), and could run "
            "any program. If you trust it, load it with torch and save it as safetensors"
        ) from None
    except Exception as error:  # a damaged file can make torch raise anything
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise InputError(f"{file}: torch cannot load it ({reason})") from error


def _shown(name: object) -> str:
    """Return a key as text: any value can be one."""
    return name if isinstance(name, str) else f"{name!a:.80}"


def _is_tensor(value: object) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _describe(tensor: Any, file: Path, name: str, edges: Sequence[int]) -> TensorInfo:
    """Say what a tensor is and where it begins; check that all of it lies in one record."""
    dtype = BY_TORCH_NAME.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None or str(tensor.layout) != "torch.strided" or tensor.is_conj():
        raise InputError(f"{file}: {name} is {tensor.dtype}, {tensor.layout}; give a plain tensor")
    shape = tuple(tensor.shape)
    record = getattr(tensor.untyped_storage(), "_checkpoint_offset", -1)
    info = TensorInfo(name, dtype, shape, record + tensor.storage_offset() * dtype.itemsize)
    end = next(iter(edges[bisect_right(edges, record) :]), -1)
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, tensor.stride(), strict=True))
    if info.position(0 if 0 in shape else extent) > end:
        raise HeaderError(f"{file}: {name} reaches beyond its record; the file is truncated")
    return info
