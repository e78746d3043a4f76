"""Places for the bytes of an output: files at their offsets, pieces whose size shows later.

A worker puts bytes into a sink and knows nothing else of the output. Whoever has the output open
(`dare.output.output`) also asks a sink of files what it expects, reads back and still needs.
"""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dare.documents.words import show_size
from dare.errors import OutputError
from dare.formats.recoding import Loss
from dare.inputs.sources import Raw
from dare.output.journal import Journal, JournalContent, Record
from dare.planning.data import MERGED_NAME, Layout
from dare.tensors.chunks import bytes_digest, chunk_count, chunk_span, file_digest
from dare.tensors.files import OutputFile
from dare.tensors.header import TensorInfo
from dare.tensors.system import sync_folder

PIECES_NAME = "dare-pieces.bin"

Bytes = NDArray[np.uint8]
Metadata = Mapping[str, Mapping[str, str]]  # by file
Pieces = Iterable[tuple[int, int] | bytes]  # parts of a tensor: start and size, or the bytes


class Sink:
    """Takes merged tensors, from any thread; this one keeps nothing of them."""

    def place(self, name: str, offset: int, nbytes: int) -> Bytes | None:  # noqa: ARG002
        """Return the memory in which a tensor's bytes can be made; None if they must be written."""
        return None

    def position(self, name: str, offset: int) -> int:  # noqa: ARG002
        """Return the position of a tensor's byte in its file, for data to be aligned alike."""
        return 0

    def write(self, name: str, offset: int, data: Bytes) -> None:
        """Store a tensor's bytes from `offset` on."""


class FileSink(Sink):
    """The files of an output under way, written at any place, by any thread or process."""

    def __init__(self, folder: Path, layout: Layout, metadata: Mapping[str, str]) -> None:
        self.folder = folder
        self.opened: dict[str, OutputFile] = {}
        self.resumable, self.overwrite = True, False  # what the output is told
        self.announce: Callable[[str], None] = lambda _text: None  # shows progress
        self.lay_out(layout, metadata)

    def lay_out(self, layout: Layout, metadata: Mapping[str, str]) -> None:
        """Give every tensor its place; the metadata of a file decides where its tensors begin."""
        self.layout = layout
        self.built = layout.build(metadata)  # by file: its header, and each tensor's place
        self.places = {
            name: (file, info)
            for file, (_, placed) in self.built.items()
            for name, info in placed.items()
        }

    # ------------------------------------------------------------ for those who make chunks

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
        """Get to know the journal, and what it says of an earlier try."""

    def make(self, files: Iterable[str] | None = None) -> None:
        """Open all files or some; make those that are missing, and write the headers."""
        for file in self.built if files is None else files:
            header, placed = self.built[file]
            size = max((i.start + i.nbytes for i in placed.values()), default=len(header))
            (self.folder / file).parent.mkdir(exist_ok=True)
            self.opened[file] = OutputFile(self.folder / file, size)
            self.opened[file].write(header, 0)

    def join(self, files: Iterable[str] | None = None) -> None:
        """Open files that another process has made: all of them, or only these."""
        for file in self.built if files is None else files:
            self.opened[file] = OutputFile(self.folder / file, None)

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        for file in self.opened.values():
            file.sync()

    def reserve(self) -> None:
        """Take the room that the files need."""
        for file in self.opened.values():
            file.reserve()

    def missing_bytes(self) -> int:
        """Return the room on the disk that is still needed."""
        return sum(file.unwritten_bytes() for file in self.opened.values())

    def expects(self, record: Record) -> bool:
        """Tell whether a chunk belongs to this output."""
        place = self.places.get(record.tensor)
        return place is not None and record.chunk in range(chunk_count(place[1].elements))

    def has(self, record: Record) -> bool:
        """Tell whether a chunk that was recorded is there, byte for byte."""
        try:
            return bytes_digest(self.read_chunk(record)) == record.output
        except OSError:  # the disk does not give it back
            return False

    def read_chunk(self, record: Record) -> bytes:
        """Read back what was written of a chunk."""
        file, info = self.places[record.tensor]
        start, count = (n * info.dtype.itemsize for n in chunk_span(record.chunk, info.elements))
        return self.opened[file].read(info.start + start, count)

    def take_over(self, records: list[Record]) -> list[Record]:
        """Go on from chunks of an earlier try; return those that count."""
        return records

    def note(self, records: Iterable[Record]) -> None:
        """Hear that chunks are in the journal."""

    def complete(self, metadata: Metadata, *, whole: bool) -> dict[str, str]:
        """Write the final headers and sync; return the digest of each header, or `whole` file."""
        digests = {}
        for name, file in self.opened.items():
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
        """Remove what only served the making of the files."""

    def close(self, *, hopeless: bool = False) -> None:
        """Close what is open; take back what can never be finished and is elsewhere."""
        del hopeless  # here nothing is elsewhere
        for file in self.opened.values():
            file.close()
        self.opened = {}


class RecodedSink(FileSink):
    """A file of merged tensors; `recode` it into the output's files when all are there."""

    def __init__(
        self, folder: Path, merged: Layout, output: Layout, metadata: Mapping[str, str]
    ) -> None:
        super().__init__(folder, merged, metadata)
        self.layout = output
        self._metadata = metadata
        self._merged: OutputFile | None = None

    def missing_bytes(self) -> int:
        rest = sum(self.layout.sizes) if self._merged is None else 0
        return super().missing_bytes() + rest

    def recode(self, threads: int, progress: Callable[[int], None]) -> dict[str, Loss | None]:
        """Write every tensor in the output's format; return what each has lost by that."""
        recoding = self.layout.recoding
        assert recoding is not None
        ((name, (_, tensors)),) = self.built.items()
        merged = self._merged = self.opened.pop(name)
        self.lay_out(self.layout, self._metadata)
        with explaining(self.folder, resumable=self.resumable):
            self.make()
            check_free_space(self)

        def encode(info: TensorInfo) -> Loss | None:
            def read(start: int, count: int) -> Raw:
                with explaining(self.folder / name, what="read", resumable=self.resumable):
                    raw = merged.read(info.position(start), count * info.dtype.itemsize)
                return np.frombuffer(raw, info.dtype.carrier)

            loss = recoding.encode((info.name, info.dtype, info.shape), read, self.write)
            progress(info.nbytes)
            return loss

        with ThreadPoolExecutor(threads) as pool:
            return dict(zip(tensors, pool.map(encode, tensors.values()), strict=True))

    def clear_up(self) -> None:
        (self.folder / MERGED_NAME).unlink()
        sync_folder(self.folder)  # or else a power cut may bring it back when all is done

    def close(self, *, hopeless: bool = False) -> None:
        if self._merged is not None:
            self._merged.close()
        super().close(hopeless=hopeless)


class PieceSink(FileSink):
    """A file of which only the chunks are known; `assemble` it when all are there."""

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
        self._pieces = OutputFile(path, self._end)

    def expects(self, record: Record) -> bool:
        return bool(record.piece) and record.chunk in range(self._chunks.get(record.tensor, 0))

    def read_chunk(self, record: Record) -> bytes:
        start, nbytes, _ = record.piece
        return self._pieces.read(start, nbytes)

    @property
    def size(self) -> int:
        """Bytes of the file, once it is put together."""
        ((header, placed),) = self.built.values()
        return len(header) + sum(info.nbytes for info in placed.values())

    def append(self, data: Bytes) -> int:
        """Store the parts of a chunk, one after the other; return where."""
        with self._appending:
            start = self._end
            self._end += data.size
        with explaining(self.folder / PIECES_NAME, resumable=self.resumable):
            self._pieces.write(data, start)
        return start

    def assemble(
        self, layout: Layout, metadata: Mapping[str, str], tensors: Mapping[str, Pieces]
    ) -> None:
        """Join each tensor from its parts; the final metadata must be as long as this."""
        self.lay_out(layout, metadata)
        ((name, (_, placed)),) = self.built.items()
        with explaining(self.folder / name, resumable=self.resumable):
            self.make()
            check_free_space(self)
            for tensor, pieces in tensors.items():
                position = placed[tensor].start
                for piece in pieces:
                    data = piece if isinstance(piece, bytes) else self._pieces.read(*piece)
                    self.opened[name].write(data, position)
                    position += len(data)
                if position != placed[tensor].start + placed[tensor].nbytes:
                    raise AssertionError(f"{tensor}: its pieces do not add up to the planned size")

    def clear_up(self) -> None:
        (self.folder / PIECES_NAME).unlink()
        sync_folder(self.folder)  # or else a power cut may bring it back when all is done

    def close(self, *, hopeless: bool = False) -> None:
        if hasattr(self, "_pieces"):
            self._pieces.close()
        super().close(hopeless=hopeless)


def check_free_space(sink: FileSink) -> None:
    """Refuse to begin what the disk has no room for."""
    missing, free = sink.missing_bytes(), shutil.disk_usage(sink.folder).free
    if missing > free:
        needs = f"needs {show_size(missing)} more and the disk has {show_size(free)} free"
        raise OutputError(f"{sink.folder}: {needs}; make room or choose another place")


@contextmanager
def explaining(place: Path, *, what: str = "written", resumable: bool = False) -> Iterator[None]:
    """Say where something cannot be written, or read, and what becomes of what was."""
    try:
        yield
    except OSError as error:
        fault = f"cannot be {what}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and resumable:
            fault = "the disk is full; make room and run the same merge again; it resumes"
        raise OutputError(f"{place}: {fault}") from error
