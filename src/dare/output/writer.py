"""The output while it is being made: `OUT.partial/`, a journal, and the name at the end.

Blocks are written at their final offsets in any order. After each chunk a line goes into the
journal. When a merge is resumed, every chunk the journal speaks of is hashed again on disk, and
only those that are there byte for byte count as done; so it does not matter what was and was not
synced when the process or the machine died. The target's name appears when everything is in place.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from dare.documents.words import show_size
from dare.errors import MismatchError, NotFiniteError, OutputError, VerificationError
from dare.inputs.sources import INDEX_NAME
from dare.output.journal import Journal, JournalContent, Record, is_held
from dare.output.publishing import claim, publish, remove, sync_folder, write_synced
from dare.output.targets import (
    JOURNAL_NAME,
    MARK_NAME,
    is_only_name,
    manifest_path,
    seal,
    slice_journals,
    work_folder,
)
from dare.planning.data import Layout
from dare.tensors.chunks import bytes_digest, chunk_count, chunk_span, file_digest
from dare.tensors.files import OutputFile
from dare.tensors.header import TensorInfo


class Sink(Protocol):
    """Somewhere to put merged tensors."""

    def place(self, name: str, offset: int, nbytes: int) -> NDArray[np.uint8] | None:
        """Return the memory in which a tensor's bytes can be made; None if they must be written."""

    def position(self, name: str, offset: int) -> int:
        """Return the position of a tensor's byte in its file, for data to be aligned alike."""

    def write(self, name: str, offset: int, data: NDArray[np.uint8]) -> None:
        """Store a tensor's bytes from `offset` on; may be called from any thread."""

    def record(self, records: Sequence[Record]) -> None:
        """Note that some chunks are complete."""


class ArraySink:
    """Keeps merged tensors in memory."""

    def __init__(self, tensors: Iterable[TensorInfo]) -> None:
        self.arrays = {info.name: np.empty(info.nbytes, np.uint8) for info in tensors}

    def place(self, name: str, offset: int, nbytes: int) -> NDArray[np.uint8]:
        return self.arrays[name][offset : offset + nbytes]

    def position(self, name: str, offset: int) -> int:  # noqa: ARG002
        return 0

    def write(self, name: str, offset: int, data: NDArray[np.uint8]) -> None:
        self.place(name, offset, data.size)[:] = data

    def record(self, records: Sequence[Record]) -> None:
        pass


class OutputFiles:
    """The files of an output under way, written at any place, by any thread or process."""

    def __init__(
        self, folder: Path, layout: Layout, metadata: Mapping[str, str], *, resumable: bool = True
    ) -> None:
        self.folder = folder
        self.opened: dict[str, OutputFile] = {}
        self._resumable = resumable
        self._lay_out(layout, metadata)

    def _lay_out(self, layout: Layout, metadata: Mapping[str, str]) -> None:
        self.layout = layout
        self.built = layout.build(metadata)  # by file: its header, and each tensor's place
        self.places = {
            name: (file, info)
            for file, (_, placed) in self.built.items()
            for name, info in placed.items()
        }

    def make(self, files: Iterable[str] | None = None) -> None:
        """Open all files or some; make those that are missing, and write the headers."""
        for file in self.built if files is None else files:
            header, placed = self.built[file]
            size = max((i.start + i.nbytes for i in placed.values()), default=len(header))
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

    def close(self) -> None:
        """Close what is open."""
        for file in self.opened.values():
            file.close()
        self.opened = {}

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Read back what was written of a tensor."""
        file, info = self.places[name]
        return self.opened[file].read(info.start + offset, nbytes)

    def place(self, name: str, offset: int, nbytes: int) -> NDArray[np.uint8] | None:
        file, info = self.places[name]
        return self.opened[file].place(info.start + offset, nbytes)

    def position(self, name: str, offset: int) -> int:
        return self.places[name][1].start + offset

    def write(self, name: str, offset: int, data: NDArray[np.uint8]) -> None:
        file, info = self.places[name]
        with self._explaining(self.folder / file):
            self.opened[file].write(data, info.start + offset)

    def record(self, records: Sequence[Record]) -> None:
        pass  # whoever has the journal does

    def _explaining(self, place: Path) -> AbstractContextManager[None]:
        return explaining(place, resumable=self._resumable)


class PartialOutput(OutputFiles):
    """An output under way; use as a context manager, and call `finish` at the end.

    `fingerprint` says which merge it is, and `stamps` by what its inputs are known here and now.
    """

    _HOPELESS: tuple[type[BaseException], ...] = (MismatchError, VerificationError, NotFiniteError)
    """After these nothing is left behind."""

    def __init__(
        self,
        layout: Layout,
        metadata: Mapping[str, str],
        fingerprint: str,
        stamps: str = "",
        *,
        resume: bool = True,
        overwrite: bool = False,
    ) -> None:
        super().__init__(work_folder(layout), layout, metadata, resumable=resume)
        self.resumed: list[Record] = []  # chunks on the disk, made of inputs with these stamps
        self.doubtful: list[Record] = []  # chunks on the disk, made of inputs with other stamps
        self.started_over = ""  # the reason why an earlier try is not used
        self.announce: Callable[[str], None] = lambda _text: None  # shows progress
        self._fingerprint = fingerprint
        self._stamps = stamps
        self._overwrite = overwrite
        self._others: dict[str, str] = {}  # digests of the files beside the weights
        self._journal: Journal | None = None
        self._made: list[Path] = []
        self._is_void = False

    def __enter__(self) -> Self:
        try:
            with self._explaining(self.folder):
                self._made = self._claim()
                self._open_journal()
                self._open_files()
            self._is_void = not self.resumed and not self.doubtful
            self._check_free_space()
            self._is_void = False
            self.reserve()
            self.resumed = self.intact(self.resumed)
            self.doubtful = self.intact(self.doubtful)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_error: object) -> None:
        self.close()
        hopeless = kind is not None and issubclass(kind, self._HOPELESS)
        if self._journal is not None and (self._is_void or hopeless):
            # Nothing is in it, or this can never be finished as it was planned.
            shutil.rmtree(self.folder, ignore_errors=True)
            for made in self._made:
                with suppress(OSError):
                    made.rmdir()
        if self._journal is not None:
            self._journal.close()
        self._journal = None

    def _claim(self) -> list[Path]:
        return claim(self.folder)

    def _open_files(self) -> None:
        self.make()

    def _open_journal(self) -> None:
        journal = self._journal = self._lock(JOURNAL_NAME)
        self._refuse_beside_slices()
        if self._resumable:
            journal.absorb(slice_journals(self.folder).values())
        found = journal.read()
        if self._resumable and found.fingerprint == self._fingerprint:
            self._take_over(found)
            self._clear({MARK_NAME, JOURNAL_NAME, *self._made_files()})
        else:
            self._start_over(journal, found)
        journal.note_stamps(self._stamps)
        sync_folder(self.folder)

    def _lock(self, name: str, wait: float = 0) -> Journal:
        """Open one of the journals, for this process alone."""
        path = self.folder / name
        if os.path.lexists(path) and not is_only_name(path):
            remove(path)
        return Journal(path, self._fingerprint, wait=wait)

    def _refuse_beside_slices(self) -> None:
        journals = slice_journals(self.folder)
        if running := [part for part, path in journals.items() if is_held(path)]:
            raise OutputError(
                f"{self.folder}: slices are writing this output ({', '.join(map(str, running))}); "
                "wait until they are done, or stop them"
            )

    def _start_over(self, journal: Journal, found: JournalContent) -> None:
        """Forget what was left there, and say why, if that was not asked for."""
        journal.start()
        if self._clear({MARK_NAME, JOURNAL_NAME}) and self._resumable:
            self.started_over = "its journal cannot be read, so it starts over"
            if found.fingerprint is not None:
                self.started_over = f"{found.stranger}, and is not used"

    def _clear(self, kept: Collection[str]) -> bool:
        """Remove all but these files, also sidecars of an earlier try; tell if there were any."""
        held = (MARK_NAME, JOURNAL_NAME)
        leftovers = [
            path
            for path in self.folder.iterdir()
            if path.name not in kept or (path.name not in held and not is_only_name(path))
        ]
        for leftover in leftovers:
            remove(leftover)
        return bool(leftovers)

    def _made_files(self) -> Collection[str]:
        """The files that chunks are written into."""
        return self.built

    def _take_over(self, found: JournalContent) -> None:
        """Sort the chunks that the output has by whether their inputs are known to be the same."""
        for stamps, record in found.records.values():
            if self._is_expected(record):
                (self.resumed if stamps == self._stamps else self.doubtful).append(record)

    def _is_expected(self, record: Record) -> bool:
        place = self.places.get(record.tensor)
        return place is not None and record.chunk in range(chunk_count(place[1].elements))

    def confirm(self, records: Iterable[Record]) -> None:
        """Take over what was doubtful: its inputs have been seen to be the same."""
        confirmed = list(records)
        self.record(confirmed)
        self.resumed += confirmed
        self.doubtful = []

    def _check_free_space(self) -> None:
        missing = self._missing_bytes()
        free = shutil.disk_usage(self.folder).free
        if missing > free:
            needs = f"needs {show_size(missing)} more and the disk has {show_size(free)} free"
            raise OutputError(f"{self.folder}: {needs}; make room or choose another place")

    def _missing_bytes(self) -> int:
        """Room on the disk that is still needed."""
        return sum(file.unwritten_bytes() for file in self.opened.values())

    def intact(self, records: list[Record]) -> list[Record]:
        """Keep the records whose chunk on disk has the digest the journal says."""

        def is_intact(record: Record) -> bool:
            try:
                return bytes_digest(self._read_chunk(record)) == record.output
            except OSError:  # the disk does not give it back
                return False

        with ThreadPoolExecutor() as pool:
            return list(itertools.compress(records, pool.map(is_intact, records)))

    def _read_chunk(self, record: Record) -> bytes:
        """Read back what was written of a chunk."""
        info = self.places[record.tensor][1]
        start, count = (n * info.dtype.itemsize for n in chunk_span(record.chunk, info.elements))
        return self.read(info.name, start, count)

    def record(self, records: Sequence[Record]) -> None:
        assert self._journal is not None  # it is open from the first moment on
        with self._explaining(self.folder / JOURNAL_NAME):
            self._journal.add(records)

    def add_files(self, files: Mapping[str, bytes | Path]) -> None:
        """Write or copy what goes beside the weights."""
        for name, content in files.items():
            path = self.folder / name
            with self._explaining(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                self._others[name] = write_synced(path, content)

    def finish(
        self,
        metadata: Mapping[str, Mapping[str, str]],
        manifest: Mapping[str, Any],
        *,
        digests_of_all: bool = False,
    ) -> list[str]:
        """Write the final headers (metadata for each file) and the manifest, sync, give the name.

        Of weights the manifest has the digest of the header, as their tensors have digests of
        their own, or that of the whole file. Returns what went wrong when the output was there.
        """
        with self._explaining(self.folder):
            digests = self._write_headers(metadata, digests_of_all)
            if (index := self.layout.index()) is not None:
                self.add_files({INDEX_NAME: index})
            return self._publish(seal(manifest, {**digests, **self._others}))

    def _write_headers(
        self, metadata: Mapping[str, Mapping[str, str]], digests_of_all: bool
    ) -> dict[str, str]:
        """Complete the files of weights; return their digests for the manifest."""
        digests = {}
        for name, file in self.opened.items():
            header = self._final_header(name, metadata[name])
            file.write(header, 0)
            file.sync()
            path = self.folder / name
            digests[name] = file_digest(path) if digests_of_all else bytes_digest(header)
        return digests

    def _final_header(self, file: str, metadata: Mapping[str, str]) -> bytes:
        header, _ = self.layout.build(metadata)[file]
        if len(header) != len(self.built[file][0]):
            raise AssertionError("the final header must be as long as the first one")
        return header

    def _publish(self, manifest: bytes) -> list[str]:
        assert self._journal is not None
        write_synced(self.folder / manifest_path(self.layout.target).name, manifest)
        for folder in {(self.folder / name).parent for name in ("x", *self._others)}:
            sync_folder(folder)
        self._journal.note_synced(finished=bytes_digest(manifest))
        self._clear_up()
        return publish(self.layout, self._made, overwrite=self._overwrite)

    def _clear_up(self) -> None:
        """Remove what only served the making of the output."""


@contextmanager
def explaining(place: Path, *, resumable: bool = False) -> Iterator[None]:
    """Say where something cannot be written, and what becomes of what was."""
    try:
        yield
    except OSError as error:
        what = f"cannot be written: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT) and resumable:
            what = "the disk is full; make room and run the same merge again; it resumes"
        raise OutputError(f"{place}: {what}") from error


PIECES_NAME = "dare-pieces.bin"

Bytes = NDArray[np.uint8]


class PieceOutput(PartialOutput):
    """A file under way of which only the chunks are known; `assemble` it, then `finish`."""

    def __init__(self, target: Path, chunks: Mapping[str, int], *identity: str, **how: Any) -> None:
        super().__init__(Layout(target, {}), {}, *identity, **how)
        self._chunks = chunks
        self._appending = threading.Lock()
        self._pieces: OutputFile
        self._end = 0

    def _made_files(self) -> Collection[str]:
        return {PIECES_NAME}

    def _open_files(self) -> None:
        path = self.folder / PIECES_NAME
        self._end = path.stat().st_size if path.exists() else 0
        self._pieces = OutputFile(path, self._end)

    def _is_expected(self, record: Record) -> bool:
        return bool(record.piece) and record.chunk in range(self._chunks.get(record.tensor, 0))

    def _read_chunk(self, record: Record) -> bytes:
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
        with self._explaining(self.folder / PIECES_NAME):
            self._pieces.write(data, start)
        return start

    def assemble(
        self,
        layout: Layout,
        metadata: Mapping[str, str],
        tensors: Mapping[str, Iterable[tuple[int, int] | bytes]],
    ) -> None:
        """Join each tensor from pieces (start and size) or bytes; `finish` gets equal metadata."""
        self._lay_out(layout, metadata)
        ((name, (_, placed)),) = self.built.items()
        with self._explaining(self.folder / name):
            self.make()
            self._check_free_space()
            for tensor, pieces in tensors.items():
                position = placed[tensor].start
                for piece in pieces:
                    data = piece if isinstance(piece, bytes) else self._pieces.read(*piece)
                    self.opened[name].write(data, position)
                    position += len(data)
                if position != placed[tensor].start + placed[tensor].nbytes:
                    raise AssertionError(f"{tensor}: its pieces do not add up to the planned size")

    def _clear_up(self) -> None:
        (self.folder / PIECES_NAME).unlink()
        sync_folder(self.folder)  # or else a power cut may bring it back when all is done

    def __exit__(self, kind: type[BaseException] | None = None, *error: object) -> None:
        if hasattr(self, "_pieces"):
            self._pieces.close()
        super().__exit__(kind, *error)
