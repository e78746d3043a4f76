"""Places for the bytes of an output: files at fixed offsets, or pieces whose size is known later.

A worker puts bytes into a sink and knows nothing else of the output. The process that has the
output open (`dare.output.output`) also asks a sink of files which chunks it expects, whether they
are intact, and how much space it still needs.
"""

from __future__ import annotations

import errno
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dare.documents.words import show_size
from dare.errors import OutputError
from dare.output.journal import Journal, JournalContent, Key, Record
from dare.planning.data import Layout
from dare.tensors.chunks import (
    bytes_digest,
    chunk_count,
    chunk_span,
    file_digest,
    running_digest,
)
from dare.tensors.files import OutputFile
from dare.tensors.header import stored_elements
from dare.tensors.system import sync_folder

PIECES_NAME = "dare-pieces.bin"
READ_BYTES = 8 << 20  # read back at once

Bytes = NDArray[np.uint8]
Metadata = Mapping[str, Mapping[str, str]]  # by file
Pieces = Iterable[tuple[int, int] | bytes]  # parts of a tensor: start and size, or the bytes


class Sink:
    """Takes merged tensors, from any thread; this one discards them."""

    def place(self, name: str, offset: int, nbytes: int) -> Bytes | None:  # noqa: ARG002
        """Return the memory in which a tensor's bytes can be made; None if they must be written."""
        return None

    def place_on_gpu(self, gpu: int, name: str, offset: int, nbytes: int) -> int | None:  # noqa: ARG002
        """Return the address on a GPU where a tensor's bytes can be made."""
        return None

    def take_from_gpu(self, places: Sequence[tuple[str, int]]) -> None:
        """Store what was made there of tensors, from some bytes on, if that is not its place."""

    def position(self, name: str, offset: int) -> int:  # noqa: ARG002
        """Return the position of a tensor's byte in its file, to align data the same way."""
        return 0

    def write(self, name: str, offset: int, data: Bytes) -> None:
        """Store a tensor's bytes from `offset` on."""


class FileSink(Sink):
    """The files of an output under way, written at any position, by any thread or process."""

    def __init__(self, folder: Path, layout: Layout, metadata: Mapping[str, str]) -> None:
        self.folder = folder
        self.opened: dict[str, OutputFile] = {}
        self.resumable, self.overwrite = True, False  # settings of the output
        self.announce: Callable[[str], None] = lambda _text: None  # shows progress
        self.lay_out(layout, metadata)

    def lay_out(self, layout: Layout, metadata: Mapping[str, str]) -> None:
        """Give every tensor its place; the metadata of a file decides where its tensors begin."""
        self.layout = layout
        self.built = layout.build(metadata)  # by file: its header, and the place of each tensor
        self.places = {
            name: (file, info)
            for file, (_, placed) in self.built.items()
            for name, info in placed.items()
        }

    # ------------------------------------------------------------ for workers

    def place(self, name: str, offset: int, nbytes: int) -> Bytes | None:
        file, info = self.places[name]
        return self.opened[file].place(info.start + offset, nbytes)

    def position(self, name: str, offset: int) -> int:
        return self.places[name][1].start + offset

    def write(self, name: str, offset: int, data: Bytes) -> None:
        file, info = self.places[name]
        with explaining(self.folder / file, resumable=self.resumable):
            self.opened[file].write(data, info.start + offset)

    # ------------------------------------------------------------ for the output

    @property
    def names(self) -> Collection[str]:
        """The files that chunks are written into."""
        return self.built

    def begin(self, journal: Journal, found: JournalContent) -> None:
        """Take note of the journal, and of its content from an earlier try."""

    def make(self, files: Iterable[str] | None = None) -> None:
        """Open all files or some; create missing ones, and write the headers."""
        for file in self.built if files is None else files:
            header, placed = self.built[file]
            size = max((i.start + i.nbytes for i in placed.values()), default=len(header))
            (self.folder / file).parent.mkdir(exist_ok=True)
            self.opened[file] = OutputFile(self.folder / file, size)
            self.opened[file].write(header, 0)

    def join(self, files: Iterable[str] | None = None) -> None:
        """Open files that another process has created: all, or only these."""
        for file in self.built if files is None else files:
            self.opened[file] = OutputFile(self.folder / file, None)

    def sync(self) -> None:
        """Wait until all that was written is on the disk."""
        for file in self.opened.values():
            file.sync()

    def reserve(self) -> None:
        """Allocate the space that the files need."""
        for file in self.opened.values():
            file.reserve()

    def missing_bytes(self) -> int:
        """Return the bytes that are still needed on the disk."""
        return sum(file.unwritten_bytes() for file in self.opened.values())

    def expects(self, record: Record) -> bool:
        """Tell whether a chunk belongs to this output."""
        place = self.places.get(record.tensor)
        return place is not None and record.chunk in range(chunk_count(place[1].elements))

    def has(self, record: Record) -> bool:
        """Tell whether a chunk that was recorded is there, byte for byte."""
        try:
            return all(self.digest(*part[:3]) == part[3] for part in self.parts(record))
        except OSError:  # the disk cannot read it
            return False

    def files_of(self, name: str) -> set[str]:
        """Return the files that a merged tensor is written into."""
        return {self.places[name][0]}

    def parts(self, record: Record) -> Iterator[tuple[str, int, int, str]]:
        """Yield the places where a chunk was written: file, position, number of bytes, digest."""
        file, info = self.places[record.tensor]
        start, count = (n * info.dtype.itemsize for n in chunk_span(record.chunk, info.elements))
        yield file, info.start + start, count, record.output

    def digest(self, file: str, position: int, nbytes: int) -> str:
        """Hash some bytes of a file."""
        digest, end = running_digest(), position + nbytes
        for start in range(position, end, READ_BYTES):
            digest.update(self.opened[file].read(start, min(READ_BYTES, end - start)))
        return digest.hexdigest()

    def take_over(self, records: list[Record]) -> list[Record]:
        """Continue from chunks of an earlier try; return those that count."""
        return records

    def note(self, records: Iterable[Record]) -> None:
        """Take note of chunks that are in the journal now."""

    def complete(self, metadata: Metadata, *, whole: bool) -> dict[str, str]:
        """Write the final headers and sync; return the digests of headers, or of `whole` files."""
        digests = {}
        for name, file in self.opened.items():
            if name not in self.built:
                continue
            header = self.final_header(name, metadata[name])
            file.write(header, 0)
            file.sync()
            digests[name] = file_digest(self.folder / name) if whole else bytes_digest(header)
        return digests

    def final_header(self, file: str, metadata: Mapping[str, str]) -> bytes:
        """Return a file's header with its metadata, as long as the first one was."""
        header, _ = self.layout.build(metadata)[file]
        if len(header) != len(self.built[file][0]):
            raise AssertionError("the final header must be as long as the first one")
        return header

    def clear_up(self) -> None:
        """Remove temporary files."""

    def close(self, *, discard: bool = False) -> None:  # noqa: ARG002
        """Close all files; with `discard`, delete files elsewhere that can never be finished."""
        for file in self.opened.values():
            file.close()
        self.opened = {}


class CodedSink(FileSink):
    """Files of another format, which store stretches of chunks; see `dare.formats.recoding`.

    The record of a stretch's first chunk describes what was stored.
    """

    def __init__(self, folder: Path, layout: Layout, metadata: Mapping[str, str]) -> None:
        super().__init__(folder, layout, metadata)
        assert layout.recoding is not None
        self._recoding = layout.recoding
        self._chunks: dict[str, int] = {}  # the number of chunks of each merged tensor
        self._together: dict[str, int] = {}  # the number in a stretch
        self._stored: dict[str, list[str]] = {}  # the tensors of the output that store it
        for name, dtype, shape in layout.merged:
            self._chunks[name] = chunk_count(stored_elements(dtype, shape))
            self._together[name] = self._recoding.chunks_together((name, dtype, shape))
            stored = self._recoding.stored((name, dtype, shape))
            self._stored[name] = [part for part, *_ in stored]

    def make(self, files: Iterable[str] | None = None) -> None:
        super().make(files)
        for tensor in self.layout.merged:
            if not self._chunks[tensor[0]]:  # no chunk is made of it, but it may have a scale
                self._recoding.encode(tensor, lambda _size: (), self.write)

    def expects(self, record: Record) -> bool:
        return record.chunk in range(self._chunks.get(record.tensor, 0))

    def missing_bytes(self) -> int:
        return super().missing_bytes() + sum(self.layout.sizes if self._recoding.replacing else ())

    def complete(self, metadata: Metadata, *, whole: bool) -> dict[str, str]:
        replacing = self._recoding.replacing
        digests = super().complete(metadata, whole=whole and not replacing)
        if replacing:
            self._recoding.replace(self.folder, self.places)
        return {name: file_digest(self.folder / name) for name in replacing} or digests

    def clear_up(self) -> None:
        for file in self.built if self._recoding.replacing else ():
            (self.folder / file).unlink()
        sync_folder(self.folder)

    def files_of(self, name: str) -> set[str]:
        parts = {self.places[part][0] for part in self._stored[name]}
        return parts or set(self.layout.files)  # it may lie in a tensor that another makes

    def parts(self, record: Record) -> Iterator[tuple[str, int, int, str]]:
        for name, start, count, digest in record.stored:
            file, info = self.places[name]
            yield file, info.start + start, count, digest

    def take_over(self, records: list[Record]) -> list[Record]:
        """Continue from complete stretches."""
        stretches = defaultdict[Key, list[Record]](list)
        for record in records:
            stretches[record.tensor, record.chunk // self._together[record.tensor]].append(record)
        whole: list[Record] = []
        for (name, number), stretch in stretches.items():
            together = self._together[name]
            if len(stretch) == min(together, self._chunks[name] - number * together):
                whole += stretch
        return whole


def make_sink(folder: Path, layout: Layout, metadata: Mapping[str, str]) -> FileSink:
    """Return a sink for the files of an output."""
    kind = FileSink if layout.recoding is None else CodedSink
    return kind(folder, layout, metadata)


class PieceSink(FileSink):
    """A file whose tensors' sizes depend on their chunks; `assemble` it when all are made."""

    def __init__(self, folder: Path, target: Path, chunks: Mapping[str, int]) -> None:
        super().__init__(folder, Layout(target, {}), {})
        self._chunks = chunks
        self._appending = threading.Lock()
        self._end = 0

    @property
    def names(self) -> Collection[str]:
        return {PIECES_NAME}

    def make(self, files: Iterable[str] | None = None) -> None:
        if self.built:
            super().make(files)
            return
        path = self.folder / PIECES_NAME
        self._end = path.stat().st_size if path.exists() else 0
        self.opened[PIECES_NAME] = OutputFile(path, self._end)

    def expects(self, record: Record) -> bool:
        return bool(record.piece) and record.chunk in range(self._chunks.get(record.tensor, 0))

    def parts(self, record: Record) -> Iterator[tuple[str, int, int, str]]:
        start, nbytes, _ = record.piece
        yield PIECES_NAME, start, nbytes, record.output

    @property
    def size(self) -> int:
        """The bytes of the file, once it is assembled."""
        ((header, placed),) = self.built.values()
        return len(header) + sum(info.nbytes for info in placed.values())

    def append(self, data: Bytes) -> int:
        """Append the parts of a chunk; return their position."""
        with self._appending:
            start = self._end
            self._end += data.size
        with explaining(self.folder / PIECES_NAME, resumable=self.resumable):
            self.opened[PIECES_NAME].write(data, start)
        return start

    def assemble(
        self, layout: Layout, metadata: Mapping[str, str], tensors: Mapping[str, Pieces]
    ) -> None:
        """Join each tensor from its parts; the final metadata must be as long as this."""
        self.lay_out(layout, metadata)
        ((name, (_, placed)),) = self.built.items()
        parts = self.opened[PIECES_NAME]
        with explaining(self.folder / name, resumable=self.resumable):
            self.make()
            check_free_space(self)
            for tensor, pieces in tensors.items():
                position = placed[tensor].start
                for piece in pieces:
                    data = piece if isinstance(piece, bytes) else parts.read(*piece)
                    self.opened[name].write(data, position)
                    position += len(data)
                if position != placed[tensor].start + placed[tensor].nbytes:
                    raise AssertionError(f"{tensor}: its pieces do not add up to the planned size")

    def clear_up(self) -> None:
        (self.folder / PIECES_NAME).unlink()
        sync_folder(self.folder)  # else a power cut may bring it back after the end


def check_free_space(sink: FileSink) -> None:
    """Refuse an output that the disk has no room for."""
    missing, free = sink.missing_bytes(), shutil.disk_usage(sink.folder).free
    if missing > free:
        needs = f"needs {show_size(missing)} more and the disk has {show_size(free)} free"
        raise OutputError(f"{sink.folder}: {needs}; make room or choose another place")


@contextmanager
def explaining(place: Path, *, what: str = "written", resumable: bool = False) -> Iterator[None]:
    """Turn errors of the system into OutputError, with the place and the remedy."""
    try:
        yield
    except OSError as error:
        fault = f"cannot be {what}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and resumable:
            fault = "the disk is full; make room and run the same merge again; it resumes"
        raise OutputError(f"{place}: {fault}") from error
