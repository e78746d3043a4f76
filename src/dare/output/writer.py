"""The output while it is being made: `TARGET.partial/`, a journal, and the rename at the end.

Blocks are written at their final offsets in any order. After each chunk a line goes into the
journal. When a merge is resumed, every chunk the journal speaks of is hashed again on disk, and
only those that are there byte for byte count as done; so it does not matter what was and was not
synced when the process or the machine died. The target's name appears when everything is in place.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from dare.errors import MismatchError, OutputError
from dare.planning.layout import Layout
from dare.tensors.chunks import chunk_count, chunk_span
from dare.tensors.digest import bytes_digest
from dare.tensors.files import OutputFile
from dare.tensors.header import TensorInfo
from dare.tensors.sizes import show_size

JOURNAL_NAME = "journal.jsonl"
JOURNAL_VERSION = 1
MANIFEST_NAME = "dare-manifest.json"

Record = dict[str, Any]
"""A line of the journal: what is known of a finished chunk."""


class Sink(Protocol):
    """Somewhere to put merged tensors."""

    def position(self, name: str, offset: int) -> int:
        """Where in its file a tensor's byte lies; data aligned alike in memory is written best."""

    def write(self, name: str, offset: int, data: NDArray[np.uint8]) -> None:
        """Store a tensor's bytes from `offset` on; may be called from any thread."""

    def record(self, record: Record) -> None:
        """Note that a chunk is complete."""


class ArraySink:
    """Keeps merged tensors in memory."""

    def __init__(self, tensors: Iterable[TensorInfo]) -> None:
        self.arrays = {info.name: np.empty(info.nbytes, np.uint8) for info in tensors}

    def position(self, name: str, offset: int) -> int:  # noqa: ARG002
        return 0

    def write(self, name: str, offset: int, data: NDArray[np.uint8]) -> None:
        self.arrays[name][offset : offset + data.size] = data

    def record(self, record: Record) -> None:
        pass


class PartialOutput:
    """An output under way; use as a context manager, and call `finish` at the end."""

    def __init__(
        self, layout: Layout, metadata: Mapping[str, str], fingerprint: str, *, resume: bool = True
    ) -> None:
        self.layout = layout
        self.folder = partial_folder(layout.target)
        self.resumed: list[Record] = []
        self.started_over = False
        """Whether a partial output of another merge was found and discarded."""
        self._first = {"journal": JOURNAL_VERSION, "fingerprint": fingerprint}
        self._resume = resume
        self._built = layout.build(metadata)
        self._places = {
            name: (file, info)
            for file, (_, placed) in self._built.items()
            for name, info in placed.items()
        }
        self._files: dict[str, OutputFile] = {}
        self._journal = -1
        self._is_void = False

    def __enter__(self) -> Self:
        try:
            with _explaining(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)
                self._open_journal()
                for file, (header, placed) in self._built.items():
                    size = max((i.start + i.nbytes for i in placed.values()), default=len(header))
                    self._files[file] = OutputFile(self.folder / file, size)
                    self._files[file].write(header, 0)
            self._check_free_space()
            self.resumed = self._intact(self.resumed)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_error: object) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}
        if self._journal >= 0:
            os.close(self._journal)
        self._journal = -1
        if self._is_void or (kind is not None and issubclass(kind, MismatchError)):
            # Nothing is in it, or this can never be finished as it was planned.
            shutil.rmtree(self.folder, ignore_errors=True)

    def _open_journal(self) -> None:
        path = self.folder / JOURNAL_NAME
        self._journal = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        if not _lock(self._journal):
            raise OutputError(f"{self.folder}: another process is writing this output")
        lines, length = _whole_lines(path.read_bytes())
        ours = bool(lines) and isinstance(lines[0], dict) and "journal" in lines[0]
        leftovers = [file for file in self.folder.iterdir() if file != path]
        if leftovers and not ours:
            raise OutputError(
                f"{self.folder}: holds {leftovers[0].name} and no journal of ours; "
                "move it away, this is where the output is made"
            )
        if self._resume and ours and lines[0] == self._first:
            self.resumed = self._known(lines[1:])
            os.truncate(self._journal, length)
            return
        self.started_over = ours
        for leftover in leftovers:
            _remove(leftover)
        os.truncate(self._journal, 0)
        self._append(self._first)

    def _known(self, lines: Iterable[Any]) -> list[Record]:
        """The last record of every chunk that the output has."""
        records = {}
        for line in lines:
            if not isinstance(line, dict) or line.get("tensor") not in self._places:
                continue
            name, chunk = line["tensor"], line.get("chunk")
            chunks = range(chunk_count(self._places[name][1].elements))
            if type(chunk) is int and chunk in chunks:
                records[name, chunk] = line
        return list(records.values())

    def _append(self, line: Record) -> None:
        os.write(self._journal, json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def _check_free_space(self) -> None:
        missing = sum(file.unwritten_bytes() for file in self._files.values())
        free = shutil.disk_usage(self.folder).free
        if missing > free:
            self._is_void = not self.resumed
            raise OutputError(
                f"{self.layout.target}: needs {show_size(missing)} more and the disk has "
                f"{show_size(free)} free; make room or choose another place, then run it again"
            )

    def _intact(self, records: list[Record]) -> list[Record]:
        """Keep the records whose chunk on disk has the digest the journal says."""

        def is_intact(record: Record) -> bool:
            _, info = self._places[record["tensor"]]
            start, count = chunk_span(record["chunk"], info.elements)
            data = self.read(info.name, start * info.dtype.itemsize, count * info.dtype.itemsize)
            return bytes_digest(data) == record.get("output")

        with ThreadPoolExecutor() as pool:
            return list(itertools.compress(records, pool.map(is_intact, records)))

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Read back what was written of a tensor."""
        file, info = self._places[name]
        return self._files[file].read(info.start + offset, nbytes)

    def position(self, name: str, offset: int) -> int:
        return self._places[name][1].start + offset

    def write(self, name: str, offset: int, data: NDArray[np.uint8]) -> None:
        file, info = self._places[name]
        with _explaining(self.folder / file):
            self._files[file].write(data, info.start + offset)

    def record(self, record: Record) -> None:
        with _explaining(self.folder / JOURNAL_NAME):
            self._append(record)

    def finish(
        self, metadata: Mapping[str, Mapping[str, str]], manifest: bytes, *, overwrite: bool = False
    ) -> None:
        """Write the final headers (metadata for each file), sync, and rename into place."""
        if self.layout.target.exists() and not overwrite:
            raise OutputError(
                f"{self.layout.target}: has appeared during the merge; move it away and run the "
                "same merge again, it has only this step left to do"
            )
        with _explaining(self.folder):
            for name, file in self._files.items():
                header, _ = self.layout.build(metadata[name])[name]
                if len(header) != len(self._built[name][0]):
                    raise AssertionError("the final header must be as long as the first one")
                file.write(header, 0)
                file.sync()
            beside = manifest_path(self.layout.target)
            _write_synced(self.folder / beside.name, manifest)
            if (index := self.layout.index()) is not None:
                _write_synced(self.folder / self.layout.index_name, index)
            self._publish(beside)

    def _publish(self, manifest: Path) -> None:
        target = self.layout.target
        if self.layout.is_directory:
            _sync_folder(self.folder)
            replaced = target.with_name(f"{target.name}.replaced-{os.getpid()}")
            if target.exists():
                target.rename(replaced)
            self.folder.rename(target)
            (target / JOURNAL_NAME).unlink()
            _remove(replaced)
        else:
            (self.folder / manifest.name).replace(manifest)
            (self.folder / target.name).replace(target)
            shutil.rmtree(self.folder)
        _sync_folder(target.parent)


def partial_folder(target: Path) -> Path:
    """Where an output is made before it has its name."""
    return target.with_name(target.name + ".partial")


def manifest_path(target: Path) -> Path:
    """Where the manifest of an output lies."""
    if target.suffix == ".safetensors":
        return target.with_name(target.name + ".manifest.json")
    return target / MANIFEST_NAME


def check_target(layout: Layout, inputs: Iterable[Path], *, overwrite: bool) -> None:
    """Refuse to overwrite an input, ever, and an existing output unless told to."""
    given, is_directory = layout.target, layout.is_directory
    if not given.name:
        raise OutputError(f"{given}: is not a name for an output; give it one")
    target = Path(os.path.realpath(given))
    for file in inputs:
        source = Path(os.path.realpath(file))
        if partial_folder(target) in source.parents:
            raise OutputError(
                f"{given}: would be made in {partial_folder(target)}, where the input "
                f"{file} lies; choose another output"
            )
        if target == source or (is_directory and target in source.parents):
            raise OutputError(
                f"{given}: the output would overwrite the input {file}; choose another output"
            )
        if given.exists() and given.samefile(file):
            raise OutputError(f"{given}: is the same file as the input {file}")
    if not given.exists():
        return
    if not overwrite:
        raise OutputError(
            f"{given}: exists already; choose another output, or replace it with "
            "--overwrite (overwrite=True in Python)"
        )
    if is_directory != given.is_dir():
        raise OutputError(f"{given}: is a {'file' if is_directory else 'directory'}")
    if is_directory and any(given.iterdir()) and not (given / MANIFEST_NAME).exists():
        raise OutputError(
            f"{given}: not made by dare (it has no {MANIFEST_NAME}), "
            "so it is not replaced; remove it yourself or choose another output"
        )


def _whole_lines(text: bytes) -> tuple[list[Any], int]:
    """Parse a journal up to the first line that is torn; also return how long that part is."""
    lines: list[Any] = []
    length = 0
    for line in text.split(b"\n")[:-1]:
        try:
            lines.append(json.loads(line))
        except (ValueError, RecursionError):
            break
        length += len(line) + 1
    return lines, length


def write_into(folder: Path, files: Mapping[str, bytes | Path]) -> None:
    """Write or copy files into a folder, and sync them."""
    for name, content in files.items():
        with explaining(folder / name):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            _write_synced(folder / name, content)


def _write_synced(path: Path, content: bytes | Path) -> None:
    with path.open("wb") as file:
        if isinstance(content, bytes):
            file.write(content)
        else:
            with content.open("rb") as original:
                shutil.copyfileobj(original, file, 1 << 20)
        file.flush()
        os.fsync(file.fileno())


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    file_descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file_descriptor)
    finally:
        os.close(file_descriptor)


def _lock(file_descriptor: int) -> bool:
    import fcntl

    try:
        fcntl.flock(file_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)  # else a file system without locks
    return True


@contextmanager
def explaining(place: Path) -> Iterator[None]:
    """Say where something cannot be written."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"{place}: cannot be written: {error.strerror or error}") from error


@contextmanager
def _explaining(place: Path) -> Iterator[None]:
    """The same for what can be resumed."""
    with explaining(place):
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise OutputError(
                f"{place}: the disk is full; make room and run the same merge again, "
                "it goes on where it stopped"
            ) from error
