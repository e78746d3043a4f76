"""Weights that torch.save wrote: pytorch_model.bin, its shards, .pt, .pth and .ckpt.

Such a file is a zip archive with a pickle, which lists the tensors, and the bytes of every storage.
A pickle can hold any program, so nothing here is opened unless the user asks for it. Then it is
read without torch: the few names that tensors need become values of this module, and any other name
is refused, so that nothing is imported and nothing in the file can run. Weights are read from their
places like those of any other file, in the tensor's order whatever its strides, and shared ones
once for each name.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
import struct
import tomllib
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from dare.documents.notices import notice
from dare.errors import HeaderError, InputError
from dare.inputs.quantised import read_quantised
from dare.inputs.shards import check_against_index, find_files
from dare.inputs.sources import InputFiles, Opening, Raw, Source
from dare.stores.locations import is_stored
from dare.tensors.dtypes import BY_TORCH_NAME
from dare.tensors.files import InputFile, InputStream, read_beginning
from dare.tensors.header import TensorInfo, admit

CONTAINERS = ("state_dict", "model_state_dict", "model", "module")
MAX_PICKLE_BYTES = 64 << 20  # for the list of tensors; with 10,000 tensors it takes about 2 MB
DAMAGED_ARCHIVE = (zipfile.BadZipFile, struct.error, zlib.error)
MAX_VALUES = 10_000_000  # the limit for one value of a pickle; repeated parts are counted each time
MAX_DEPTH = 1000  # of values inside each other
FILLING = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")  # opcodes
PIECE_ELEMENTS = 1 << 18  # elements of a tensor that is not contiguous which are gathered at once
MAX_NUMBER = 1 << 63  # of a shape, a stride or a place
_TABLES = tomllib.loads(files("dare.inputs").joinpath("torch_bin.toml").read_text("utf-8"))
STORAGE_DTYPES: dict[str, str] = _TABLES["storages"]
HARMLESS_NAME, RECORD_NAME = (re.compile("|".join(_TABLES[key])) for key in ("harmless", "records"))


class PickledTensors(InputFiles):
    """Tensors as pickles describe them, read in their own order whatever their strides."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.strides: dict[str, tuple[int, ...]] = {}  # in elements, if not contiguous

    def describe(
        self, name: str, value: Any, file: Path, records: Mapping[str, range]
    ) -> TensorInfo:
        """Add a tensor of a pickle, if all of it is in its record."""
        info = _describe(value, file, name, records)
        admit(info, (), str(file))
        self.add(info, file)
        if not value.is_contiguous:
            self.strides[name] = value.strides
        return info

    def place(self, name: str) -> Hashable:
        return self._home[name], self.tensors[name].start, self.strides.get(name)

    def prefetch(self, name: str, start: int, count: int) -> None:
        if name not in self.strides:
            super().prefetch(name, start, count)

    def read(self, name: str, start: int, into: Raw, _base: Raw | None = None) -> None:
        if name not in self.strides:
            super().read(name, start, into)
            return
        strides, shape = np.array(self.strides[name]), self.tensors[name].shape
        for done in range(0, into.size, PIECE_ELEMENTS):
            piece = into[done : done + PIECE_ELEMENTS]
            elements = np.arange(start + done, start + done + piece.size)
            self._gather(name, strides @ np.array(np.unravel_index(elements, shape)), piece)

    def _gather(self, name: str, places: NDArray[np.int64], into: Raw) -> None:
        """Collect elements that are not contiguous, with one read for each run of neighbours."""
        wanted, inverse = np.unique(places, return_inverse=True)
        stored = np.empty(wanted.size, into.dtype)
        edges = np.flatnonzero(np.diff(wanted) != 1) + 1
        for begin, end in zip([0, *edges], [*edges, wanted.size], strict=True):
            super().read(name, int(wanted[begin]), stored[begin:end])
        into[:] = stored[inverse]


class TorchSource(PickledTensors):
    """The tensors of a state dict in one file or in shards.

    The file is a pickle: open it only if the user has asked for it.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.left_out: tuple[str, ...] = ()  # entries that are not tensors of the state dict
        for file, listed in find_files(path, "bin", "pytorch_model").items():
            held = self._read_pickle(file)
            if listed is not None:
                check_against_index(listed, file, held)
        if not self.tensors:
            raise InputError(f"{path}: holds no tensors")
        if self.left_out:
            self.remarks = (notice("not_weights", names=", ".join(self.left_out)),)

    def _read_pickle(self, file: Path) -> set[str]:
        """Read a file's list of tensors, but no weights; return their names."""
        check_fetched(file)
        with self.open_header(file) as opened:
            pickled, records = read_archive(opened, file)
        held = set()
        for name, value in self._state_dict(unpickle(pickled, file), file).items():
            if not isinstance(name, str) or not is_tensor(value):
                self.left_out += (_key_text(name),)
                continue
            self.describe(name, value, file, records)
            held.add(name)
        return held

    def _state_dict(self, loaded: object, file: Path) -> Mapping[Any, Any]:
        if not isinstance(loaded, Mapping):
            kind = "tensor" if is_tensor(loaded) else type(loaded).__name__
            raise InputError(f"{file}: contains a {kind}; expected a dict of tensors (state dict)")
        for key in CONTAINERS:
            inner = loaded.get(key)
            if isinstance(inner, Mapping) and any(map(is_tensor, inner.values())):
                self.left_out += tuple(_key_text(other) for other in loaded if other != key)
                return inner
        return loaded


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


def check_fetched(path: Path) -> None:
    """Refuse a pickle in a store."""
    if is_stored(path):
        raise InputError(f"{path}: is a pickle in a store; save it as safetensors, or fetch it")


def read_archive(
    opened: InputFile, file: Path, place: range | None = None
) -> tuple[bytes, dict[str, range]]:
    """Return the pickle of what torch.save wrote, and the position of each record in the file.

    That is the whole file, or `place` in it.
    """
    span = InputStream(opened, range(opened.size) if place is None else place)
    try:
        with io.BufferedReader(span) as stream, zipfile.ZipFile(stream) as archive:
            infos = archive.infolist()
            orders = [i for i in infos if i.filename.endswith("/byteorder") and i.file_size < 16]
            is_big = any(archive.read(info) == b"big" for info in orders)
            stored = [i for i in infos if i.compress_type == zipfile.ZIP_STORED]
            lists = [i for i in stored if i.filename.endswith("/data.pkl")]
            small = [archive.read(i) for i in lists if i.file_size <= MAX_PICKLE_BYTES]
            found = [(info.filename.partition("/")[2], _find_record(span, info)) for info in stored]
    except (*DAMAGED_ARCHIVE, ValueError, RuntimeError, OSError, EOFError):
        raise InputError(f"{file}: {_describe_other(file)}") from None
    if is_big:
        raise InputError(f"{file}: was written on a big-endian machine; save it again elsewhere")
    if any(info.filename.endswith("/constants.pkl") for info in infos):
        raise InputError(f"{file}: is a TorchScript program; save its state_dict() instead")
    if len(small) < len(lists):
        raise HeaderError(f"{file}: its pickle is larger than {MAX_PICKLE_BYTES} bytes")
    if len(stored) < len(infos):
        raise HeaderError(f"{file}: has compressed records, which torch.save does not write")
    return small[0] if len(small) == 1 else b"", dict(found)


def _find_record(span: InputStream, info: zipfile.ZipInfo) -> range:
    """Return the position of a record's bytes, after the name and extra field of its header."""
    span.seek(info.header_offset + 26)
    name_bytes, more_bytes = struct.unpack("<HH", span.read(4) or b"")
    start = info.header_offset + 30 + name_bytes + more_bytes
    if start + info.file_size > len(span.span):
        raise zipfile.BadZipFile
    return range(span.span.start + start, span.span.start + start + info.file_size)


def _check_values(pickled: bytes, file: Path) -> None:
    """Refuse a pickle with too many values to hash or print, or with values nested too deeply.

    A pickle can put a tuple twice into a tuple, that twice into another, and so on: fifty lines
    make 2⁵⁰ values. Nested values could overflow the stack. The opcodes are not run, only followed
    by the effects that `pickletools` documents for them.
    """
    stack: list[tuple[int, int] | None] = []  # number and depth of each one's values; None: a mark
    memo: dict[Any, tuple[int, int] | None] = {}
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            place = len(memo) if argument is None else argument
            if place > len(pickled):
                raise ValueError("memory for as many values would be taken")
            memo[place] = stack[-1]
        elif opcode.name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif opcode.name == "MARK":
            stack.append(None)
        else:
            taken = _take(stack, opcode)
            values, depth = 1 + sum(n for n, _ in taken), 1 + max((d for _, d in taken), default=0)
            if opcode.name in FILLING:  # what was taken last is filled with the others
                depth = max(taken[-1][1], 1 + max((d for _, d in taken[:-1]), default=0))
            if values > MAX_VALUES or depth > MAX_DEPTH:
                limit = f"{MAX_VALUES} values, or to more than {MAX_DEPTH} inside each other"
                raise InputError(f"{file}: its pickle expands to more than {limit}")
            stack += [(values, depth)] * len(opcode.stack_after)


def _take(
    stack: list[tuple[int, int] | None], opcode: pickletools.OpcodeInfo
) -> list[tuple[int, int]]:
    """Pop an opcode's arguments, the last first: a fixed number, or all down to the last mark."""
    count = len(opcode.stack_before)
    taken = []
    if pickletools.markobject in opcode.stack_before:
        while (value := stack.pop()) is not None:
            taken.append(value)
        count = opcode.stack_before.index(pickletools.markobject)
    return taken + [stack.pop() or (1, 1) for _ in range(count)]


def _describe_other(file: Path) -> str:
    beginning = read_beginning(file, 64)
    if beginning.startswith(b"\x80"):
        return "in the format of torch before 1.6; load it with torch and save it again"
    return "not a file of torch.save (a zip archive), or it is truncated"


# ---------------------------------------------------------------- a pickle without programs


# Named tuples, because a pickle cannot set their state, as it can for other objects.


class Storage(NamedTuple):
    """A storage as a pickle names it."""

    dtype: str
    key: str
    nbytes: int


class PickledName(NamedTuple):
    """A name in a pickle. Called as a function, it makes a tensor, or returns itself."""

    name: str

    def __call__(self, *arguments: Any) -> Any:
        return MAKERS[self.name](*arguments) if self.name in MAKERS else self


class FileTensor(NamedTuple):
    """A tensor as a pickle describes it, by the arguments that torch would make it from."""

    storage: Storage
    start: int  # in elements of the storage
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    needs_gradient: bool = False
    hooks: object = None
    marks: Mapping[str, bool] | None = None  # `conj`: the values are not those that are stored
    own_dtype: PickledName | None = None  # if it is another than the storage's

    @property
    def dtype(self) -> str:
        return self.own_dtype.name.removeprefix("torch.") if self.own_dtype else self.storage.dtype

    @property
    def is_contiguous(self) -> bool:
        """True if its elements are stored one after the other, in order."""
        expected = 1
        for size, stride in zip(self.shape[::-1], self.strides[::-1], strict=True):
            if size > 1 and stride != expected:
                return 0 in self.shape
            expected *= size
        return True


def _make_tensor(*arguments: Any) -> FileTensor:
    """Make a tensor from a pickle's arguments; refuse those that do not describe one."""
    tensor = FileTensor(*arguments)
    kinds = {"storage": Storage, "marks": Mapping | None, "own_dtype": PickledName | None}
    is_sound = all(isinstance(getattr(tensor, name), kind) for name, kind in kinds.items())
    counts = (tensor.start, *tensor.shape, *tensor.strides)
    if not is_sound or len(tensor.shape) != len(tensor.strides) or not all(map(is_count, counts)):
        raise ValueError("not a tensor")
    return tensor


def _make_typed(*arguments: Any) -> FileTensor:
    *plain, dtype = arguments[:7]
    return _make_tensor(*plain, *(arguments[7:] or [None]), dtype)


# torch's functions that make tensors and shapes; parameters and subclasses become what they hold.
MAKERS: dict[str, Callable[..., Any]] = {
    "torch._utils._rebuild_tensor_v2": _make_tensor,
    "torch._utils._rebuild_tensor_v3": _make_typed,
    "torch._utils._rebuild_parameter": lambda tensor, *_: tensor,
    "torch._utils._rebuild_parameter_with_state": lambda tensor, *_: tensor,
    "torch.Size": lambda numbers=(): numbers,
    "torch._tensor._rebuild_from_type_v2": lambda make, _type, arguments, _state: make(*arguments),
}


class PickledObject:
    """An object of a class that is not imported, with what its pickle says of it.

    A pickle sets the state by `__setstate__`; without that it could set attributes of this class.
    """

    state: Any = None

    def __new__(cls, *_arguments: Any) -> Self:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class ForbiddenNameError(pickle.UnpicklingError):
    """A pickle has a name that no file of weights needs."""


class WeightsUnpickler(pickle.Unpickler):
    """Reads a state dict; every name in it becomes a value of this module."""

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module.replace('__builtin__', 'builtins')}.{name}"
        if full == "collections.OrderedDict":
            return OrderedDict
        if RECORD_NAME.fullmatch(full):
            return PickledObject
        if full in MAKERS or HARMLESS_NAME.fullmatch(full):
            return PickledName(full)
        raise ForbiddenNameError(full)

    def persistent_load(self, pid: Any) -> Storage:
        _, kind, key, _device, count = pid
        if not is_count(count):
            raise ValueError(f"{count!a} elements")
        dtype = STORAGE_DTYPES.get(kind.name.rpartition(".")[2], kind.name)
        itemsize = BY_TORCH_NAME[dtype].itemsize if dtype in BY_TORCH_NAME else 0
        return Storage(dtype, key, count * itemsize)


def unpickle(pickled: bytes, file: Path) -> object:
    """Read the list of tensors without running anything in it."""
    try:
        _check_values(pickled, file)
        return WeightsUnpickler(io.BytesIO(pickled)).load()
    except InputError:
        raise
    except ForbiddenNameError as error:
        raise InputError(
            f"{file}: refused, because it contains more than weights ({error}), and could run "
            "any program. If you trust it, load it with torch and save it as safetensors"
        ) from None
    except Exception:  # damage can lead to any error
        text = f"{file}: its pickle is damaged, or not one that torch.save writes"
        raise InputError(text) from None


def _key_text(name: object) -> str:
    """Return a key as text: any value can be one."""
    return name if isinstance(name, str) else f"{name!a:.80}"


def is_tensor(value: object) -> bool:
    """Return whether a value is a tensor, even one of a kind that is refused."""
    return isinstance(value, FileTensor) or (
        isinstance(value, PickledName) and "._rebuild" in value.name
    )


def _describe(value: Any, file: Path, name: str, records: Mapping[str, range]) -> TensorInfo:
    """Return a tensor's type, shape and position; check that all of it is in its record."""
    kind = value.dtype if isinstance(value, FileTensor) else value.name.partition("_rebuild_")[2]
    dtype = BY_TORCH_NAME.get(kind)
    if dtype is None or any((value.marks or {}).values()):
        raise InputError(f"{file}: {name} is {kind}, or a view of it; give a plain tensor")
    shape, strides, storage = tuple(value.shape), value.strides, value.storage
    record = records.get(f"data/{storage.key}", range(0))
    info = TensorInfo(name, dtype, shape, record.start + value.start * dtype.itemsize)
    extent = 1 + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    end = min(record.stop, record.start + storage.nbytes)
    if info.position(0 if 0 in shape else extent) > end:
        raise HeaderError(f"{file}: {name} reaches beyond its record; the file is truncated")
    return info


def is_count(number: object) -> bool:
    """Return whether a value is a number of elements or bytes, or a position."""
    return isinstance(number, int) and 0 <= number < MAX_NUMBER
