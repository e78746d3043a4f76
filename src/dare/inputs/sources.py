"""Where weights come from: tensors by name, whatever holds them.

A source is opened twice: once to read headers, for the plan, and once to read weights. In between
no file is held open, and the second time each file must still be the one that was planned for.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from dare.errors import HeaderError, InputError
from dare.tensors.dtypes import StorageType
from dare.tensors.files import read_at
from dare.tensors.header import Header, TensorInfo, read_header

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_INDEX_BYTES = 100_000_000

Raw = NDArray[Any]
"""Elements as they are stored, flat."""


class Source(Protocol):
    """Tensors by name, readable from any element on, from any thread."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """What a header says of each tensor."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files behind the source; none for arrays."""

    @property
    def remarks(self) -> tuple[str, ...]:
        """What a user should know of how it is read."""

    @property
    def is_partial(self) -> bool:
        """Whether a tensor that it lacks is meant to be unchanged, as in an adapter."""

    @property
    def reading_bytes(self) -> int:
        """What reading takes for each thread, beside the buffer that is filled."""

    def holds_delta(self, name: str) -> bool:
        """Whether a tensor is the change to the base, in float32, instead of the weights."""

    def fingerprint(self) -> list[Any]:
        """What must stay the same for a half-finished merge to be resumed."""

    def read(self, name: str, start: int, into: Raw) -> None:
        """Fill `into`, an array of the tensor's carrier type, with its elements from `start` on."""

    def prefetch(self, name: str, start: int, count: int) -> None:
        """Say that these elements will be read soon."""

    def __enter__(self) -> Self:
        """Open for reading weights."""

    def __exit__(self, *_error: object) -> None:
        """Close."""

    def check_unchanged(self) -> None:
        """Raise InputError if what was read may no longer be what was planned for."""


@dataclass(frozen=True)
class _Stamp:
    """How to tell that a file is still the same."""

    size: int
    modified_ns: int

    @classmethod
    def of(cls, file_descriptor: int) -> Self:
        status = os.fstat(file_descriptor)
        return cls(status.st_size, status.st_mtime_ns)


class InputFiles:
    """The files behind a source: as they were for the plan, and open while weights are read."""

    def __init__(self) -> None:
        self._stamps: dict[Path, _Stamp] = {}
        self._open: dict[Path, int] = {}

    @contextmanager
    def first_look(self, file: Path) -> Iterator[int]:
        """Open a file to read its header, and remember what it looks like now."""
        file_descriptor = _open(file)
        try:
            yield file_descriptor
            self._stamps[file] = _Stamp.of(file_descriptor)
        except OSError as error:
            raise InputError(f"{file}: cannot be read: {error.strerror or error}") from error
        finally:
            os.close(file_descriptor)

    def __iter__(self) -> Iterator[Path]:
        return iter(self._stamps)

    def fingerprint(self) -> list[Any]:
        """What must stay the same for a half-finished merge to be resumed."""
        return [
            [os.path.realpath(file), stamp.size, stamp.modified_ns]
            for file, stamp in self._stamps.items()
        ]

    def __enter__(self) -> Self:
        try:
            for file in self._stamps:
                self._open[file] = _open(file)
            self.check_unchanged()
        except InputError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        for file_descriptor in self._open.values():
            os.close(file_descriptor)
        self._open = {}

    def check_unchanged(self) -> None:
        """Raise InputError if a file is not the one that was looked at first."""
        for file, stamp in self._stamps.items():
            if _Stamp.of(self._open[file]) != stamp:
                raise InputError(f"{file}: changed since the merge was planned; run it again")

    def read(self, file: Path, position: int, into: Raw, what: str) -> None:
        """Fill `into` from a position in bytes on; `what` is being read, for messages."""
        try:
            count = read_at(self._open[file], into.view(np.uint8).data, position)
        except OSError as error:
            raise InputError(f"{file}: cannot read {what}: {error.strerror or error}") from error
        if count < into.nbytes:
            raise InputError(f"{file}: ends inside {what}; it was cut while being read")

    def prefetch(self, file: Path, position: int, nbytes: int) -> None:
        """Say that these bytes will be read soon."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._open[file], position, nbytes, os.POSIX_FADV_WILLNEED)


class StampedSource:
    """What sources in files have in common: whole models, read from files that must not change."""

    remarks: tuple[str, ...] = ()
    is_partial = False
    reading_bytes = 0

    def __init__(self, files: InputFiles) -> None:
        self._files = files

    @property
    def files(self) -> tuple[Path, ...]:
        return tuple(self._files)

    def holds_delta(self, name: str) -> bool:  # noqa: ARG002
        return False

    def fingerprint(self) -> list[Any]:
        return self._files.fingerprint()

    def __enter__(self) -> Self:
        self._files.__enter__()
        return self

    def __exit__(self, *_error: object) -> None:
        self._files.__exit__()

    def check_unchanged(self) -> None:
        self._files.check_unchanged()


class FileSource(StampedSource):
    """One safetensors file, or the shards of one model."""

    def __init__(self, path: Path, headers: Mapping[Path, Header], files: InputFiles) -> None:
        super().__init__(files)
        self.path = path
        self.headers = headers
        self.tensors: dict[str, TensorInfo] = {}
        self._home: dict[str, Path] = {}
        for file, header in headers.items():
            for name, info in header.tensors.items():
                if name in self._home:
                    raise HeaderError(
                        f"{path}: {name} is in both {self._home[name].name} and {file.name}"
                    )
                self.tensors[name] = info
                self._home[name] = file

    def read(self, name: str, start: int, into: Raw) -> None:
        position = self.tensors[name].position(start)
        self._files.read(self._home[name], position, into, name)

    def prefetch(self, name: str, start: int, count: int) -> None:
        info = self.tensors[name]
        self._files.prefetch(self._home[name], info.position(start), count * info.dtype.itemsize)


class ArraySource:
    """Arrays in memory, each flat, as bytes or as elements of its carrier type."""

    files: tuple[Path, ...] = ()
    remarks: tuple[str, ...] = ()
    reading_bytes = 0

    def __init__(
        self,
        arrays: Mapping[str, tuple[StorageType, tuple[int, ...], Raw]],
        *,
        holds_deltas: bool = False,
    ) -> None:
        self.is_partial = holds_deltas
        self.tensors = {
            name: TensorInfo(name, dtype, shape, 0) for name, (dtype, shape, _) in arrays.items()
        }
        self._elements = {name: raw.view(kind.carrier) for name, (kind, _, raw) in arrays.items()}

    def holds_delta(self, name: str) -> bool:  # noqa: ARG002
        return self.is_partial

    def fingerprint(self) -> list[Any]:
        return []

    def read(self, name: str, start: int, into: Raw) -> None:
        into[:] = self._elements[name][start : start + into.size]

    def prefetch(self, name: str, start: int, count: int) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        pass

    def check_unchanged(self) -> None:
        pass


def open_source(path: str | os.PathLike[str]) -> FileSource:
    """Read the headers of a safetensors file, or of a directory with one or with shards."""
    path = Path(path)
    files = _files_of(path) if _is_directory(path) else {path: None}
    headers, looked_at = {}, InputFiles()
    for file, expected in files.items():
        with looked_at.first_look(file) as file_descriptor:
            headers[file] = read_header(file_descriptor, str(file))
        if expected is not None:
            check_against_index(path / INDEX_NAME, file, set(headers[file].tensors), expected)
    return FileSource(path, headers, looked_at)


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError:
        return False  # no possible file name; opening it will say so


def _files_of(directory: Path) -> dict[Path, set[str] | None]:
    """Find a directory's weight files, each with the tensors its index promises, if it has one."""
    try:
        names = sorted(os.listdir(directory))
    except OSError as error:
        raise InputError(f"{directory}: cannot be listed: {error.strerror}") from error
    if INDEX_NAME in names:
        return dict(read_index(directory / INDEX_NAME))
    weights = [name for name in names if name.endswith(".safetensors")]
    if SINGLE_NAME in weights:
        return {directory / SINGLE_NAME: None}
    if len(weights) == 1:
        return {directory / weights[0]: None}
    if weights:
        raise InputError(
            f"{directory}: has {len(weights)} safetensors files and no {INDEX_NAME} to say which "
            "belong together; name one file"
        )
    raise InputError(f"{directory}: has no safetensors file and no {INDEX_NAME}")


def read_index(index: Path) -> dict[Path, set[str]]:
    """The shards that an index names, each with the tensors it promises."""
    try:
        with index.open("rb") as file:
            text = file.read(MAX_INDEX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{index}: cannot be read: {error.strerror}") from error
    if len(text) > MAX_INDEX_BYTES:
        raise HeaderError(f"{index}: larger than {MAX_INDEX_BYTES} bytes")
    try:
        weight_map = json.loads(text)["weight_map"]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise HeaderError(f"{index}: not JSON with a weight_map") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise HeaderError(f"{index}: weight_map must map tensors to files")
    shards: dict[Path, set[str]] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or name != os.path.basename(name) or name in ("", ".", ".."):
            raise HeaderError(
                f"{index}: {tensor} is said to be in {name!r}; "
                "a shard must be a file in the same folder"
            )
        shards.setdefault(index.parent / name, set()).add(tensor)
    return shards


def check_against_index(index: Path, file: Path, held: set[str], promised: set[str]) -> None:
    """Refuse a shard that holds other tensors than its index promises."""
    for tensors, complaint in ((promised - held, "lacks"), (held - promised, "also holds")):
        if tensors:
            raise HeaderError(
                f"{index}: {file.name} {complaint} {sorted(tensors)[0]}"
                + (f" and {len(tensors) - 1} more" if len(tensors) > 1 else "")
                + "; the index and the shards do not belong together"
            )


def _open(file: Path) -> int:
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise InputError(f"{file}: is not an ordinary file")
        return os.open(file, os.O_RDONLY)
    except FileNotFoundError:
        raise InputError(f"{file}: no such file") from None
    except OSError as error:
        raise InputError(f"{file}: cannot be opened: {error.strerror}") from error
    except ValueError:  # a NUL or half a character
        raise InputError(f"{str(file)!r}: is not a possible file name") from None
