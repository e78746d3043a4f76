"""The journal of an output under way: what is done, line by line, each with its own check.

The first line names the merge (its fingerprint). A line `stamps` has the inodes and times that
identify the inputs from there on; the lines after it are finished chunks. A line counts only if its
check fits. The check covers the fingerprint and the line, so a damaged line or one of another merge
is never believed; what it describes is done again. `finished` is written when only the output's
name is missing. For an output in a store, `sent` says that the store has a file, and `ours` lists
the names in the store that are about to be written or deleted.

A slice of a merge has its own journal, with the same lines, so that they can be appended to those
of another. A line `slice` begins the part of a slice; `synced` says that all of its chunks are
done, and on the disk.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any

from dare import __version__
from dare.documents.values import Limits, checked
from dare.errors import OutputError
from dare.planning.data import JOURNAL_VERSION
from dare.tensors.chunks import Digest, bytes_digest
from dare.tensors.system import IS_POSIX, NO_LINKS, lock_file

WRITER = {"journal": JOURNAL_VERSION, "dare": __version__}  # first in every journal

OF_CODED = ("piece", "sums", "stored")  # fields that only coded chunks have

LOCK_POLL_SECONDS = 0.05
LONGEST_LAST_LINE = 1024

Count = Annotated[int, Limits(ge=0)]
Key = tuple[str, int]  # a chunk: its tensor, and its number


@dataclass(frozen=True, slots=True)
class Record:
    """A finished chunk, for the journal."""

    tensor: str
    chunk: Count
    inputs: tuple[Digest, ...]  # digests of the bytes that were read, base first
    output: Digest
    models: tuple[tuple[Count, ...], ...]  # peak's bits, count over the threshold, survivors
    exceptions: tuple[Count, Count]  # elements that overflow, and that are NaN
    piece: tuple[int, ...] = ()  # a coded chunk's start among the pieces, size and number of values
    sums: tuple[float, ...] = ()  # a coded chunk's figures, to be added up over all chunks
    # For the first chunk of a stretch in another format: tensors of the output, the place in each,
    # the number of bytes there, and their digest.
    stored: tuple[tuple[str, Count, Count, Digest], ...] = ()

    @property
    def key(self) -> Key:
        return self.tensor, self.chunk


def group_by_tensor(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Return the records of each tensor's chunks, in order."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in sorted(records, key=attrgetter("chunk")):
        groups[record.tensor].append(record)
    return groups


@dataclass(frozen=True)
class SliceFigures:
    """The figures of a slice whose chunks are all on the disk."""

    bytes_read: Count
    resumed_chunks: Count


@dataclass
class SliceState:
    """The state of a slice in a journal."""

    started: float  # the first start, in seconds since 1970
    synced: SliceFigures | None = None  # None while it is under way


@dataclass
class JournalContent:
    """The content of a journal."""

    fingerprint: str | None = None  # of its merge; None if its first line cannot be believed
    writer: str = ""  # the versions of the journal and of the program that wrote it
    # The last record of each chunk, and the stamps of the inputs that it was made from.
    records: dict[Key, tuple[str, Record]] = field(default_factory=dict)
    finished: str | None = None  # the digest of the manifest, if only the name was missing
    stamps: str = ""  # the last stamps of the inputs
    parts: dict[str, SliceState] = field(default_factory=dict)  # slices, as they are written
    makers: dict[Key, str] = field(default_factory=dict)  # the slice that made a chunk
    sent: dict[str, tuple[int, str]] = field(default_factory=dict)  # size and version by file
    ours: list[str] = field(default_factory=list)  # names in a store that this merge may change

    @property
    def origin(self) -> str:
        """Describe who wrote a journal with another fingerprint."""
        theirs, ours = self.writer or "unknown", _describe_writer(WRITER)
        return f"was left by another merge or version of dare ({theirs}; this is {ours})"

    def is_synced(self, key: Key) -> bool:
        """Tell whether a chunk was made by a slice that has synced all its chunks."""
        part = self.parts.get(self.makers.get(key, ""))
        return part is not None and part.synced is not None

    def add(self, other: JournalContent) -> None:
        """Add the content of another journal, if it belongs to the same merge."""
        if other.fingerprint == self.fingerprint:
            self.records |= other.records
            self.parts |= other.parts
            for key in other.records:
                self.makers.pop(key, None)
            self.makers |= other.makers


def read_journal(text: bytes) -> JournalContent:
    """Read a journal; lines that do not match their check are ignored."""
    lines = checked_lines(text)
    first = next(lines, {})
    content = JournalContent(first.get("fingerprint"), _describe_writer(first))
    if first.get("journal", WRITER["journal"]) != WRITER["journal"]:
        return replace(content, fingerprint="")
    maker = ""
    for line in lines:
        try:
            if "stamps" in line:
                content.stamps, maker = str(line["stamps"]), ""
            elif "finished" in line:
                content.finished = str(line["finished"])
            elif "sent" in line:
                content.sent[str(line["sent"])] = int(line["size"]), str(line["version"])
            elif "ours" in line:
                content.ours += map(str, line["ours"])
            elif "slice" in line:
                maker = str(line["slice"])
                content.parts.setdefault(maker, SliceState(float(line["started"]))).synced = None
            elif "synced" in line:
                content.parts[maker].synced = checked(line["synced"], SliceFigures)
            else:
                record = checked(line, Record)
                content.records[record.key] = content.stamps, record
                content.makers.pop(record.key, None)
                if maker:
                    content.makers[record.key] = maker
        except (KeyError, TypeError, ValueError):
            continue
    return content


def is_complete(path: Path, fingerprint: str) -> bool:
    """Tell whether the last line of a slice's journal says that all is on the disk."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LONGEST_LAST_LINE))
            line = file.read().rstrip(b"\n").rpartition(b"\n")[2]
    except FileNotFoundError:
        return False
    body, _, check = line.rpartition(b',"check":"')
    return body.startswith(b'{"synced"') and check == f'{_check(body, fingerprint)}"}}'.encode()


def checked_lines(text: bytes) -> Iterator[dict[str, Any]]:
    """Yield the lines whose checks fit, without the checks; none if the first line's does not."""
    fingerprint = ""
    for number, line in enumerate(text.split(b"\n")):
        body, _, check = line.rpartition(b',"check":"')
        try:
            document = json.loads(body + b"}")
            fingerprint = fingerprint or document["fingerprint"]
            expected = _check(body, fingerprint)
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            expected = ""
        if check == f'{expected}"}}'.encode():
            yield document
        elif number == 0:
            return


def _describe_writer(line: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {line[name]}" for name in WRITER if name in line)


def _check(body: bytes, fingerprint: str) -> str:
    return bytes_digest(fingerprint.encode() + body)


class BusyError(OutputError):
    """Another process has the journal."""


class Journal:
    """A journal that is open, and locked for this process.

    If another process has it, wait for `wait` seconds. With `create`, a missing one is created.
    """

    def __init__(
        self, path: Path, fingerprint: str, *, create: bool = True, wait: float = 0
    ) -> None:
        self.fingerprint = fingerprint
        self._path = path
        flags = os.O_RDWR | os.O_APPEND | NO_LINKS | (os.O_CREAT if create else 0)
        end = time.monotonic() + wait
        while not self._open(flags):
            if time.monotonic() >= end:
                raise BusyError(f"{path.parent}: another process is writing this output")
            time.sleep(LOCK_POLL_SECONDS * random.uniform(0.5, 1.5))  # noqa: S311 (not all at once)

    def _open(self, flags: int) -> bool:
        """Open and lock it; check that it still has its name: it may have been published."""
        self._file = os.open(self._path, flags, 0o666)
        try:
            is_ours = lock_file(self._file) and os.path.samestat(
                os.fstat(self._file), self._path.stat()
            )
        except OSError:  # it was published and is gone
            is_ours = False
        if not is_ours:
            self.close()
        return is_ours

    def read(self) -> JournalContent:
        """Return its content; the next line that is written begins a new line."""
        with open(self._file, "rb", closefd=False) as file:
            file.seek(0)
            text = file.read()
        if text and not text.endswith(b"\n"):
            os.write(self._file, b"\n")
        return read_journal(text)

    def start(self) -> None:
        """Forget everything and begin with the merge's fingerprint; wait until it is on disk."""
        os.ftruncate(self._file, 0)
        self.note_synced(**WRITER, fingerprint=self.fingerprint)

    def note_stamps(self, stamps: str) -> None:
        """Write the stamps of the inputs from here on."""
        self._append([{"stamps": stamps}])

    def note_synced(self, **line: Any) -> None:
        """Write a line other than a chunk, and wait until it is on the disk."""
        self._append([line])
        os.fsync(self._file)

    def absorb(self, paths: Iterable[Path]) -> None:
        """Append the lines of other journals of this merge; wait until they are on the disk."""
        for path in paths:
            with open(path, "rb", opener=lambda p, flags: os.open(p, flags | NO_LINKS)) as file:
                head, _, rest = file.read().partition(b"\n")
            if next(checked_lines(head), {}).get("fingerprint") == self.fingerprint:
                self._write(rest + b"\n")
        os.fsync(self._file)

    def add(self, records: Iterable[Record]) -> None:
        """Write that chunks are done."""
        self._append(
            {n: value for n in Record.__slots__ if (value := getattr(r, n)) or n not in OF_CODED}
            for r in records
        )

    def _append(self, lines: Iterable[dict[str, Any]]) -> None:
        """Write lines, each with its check."""
        text = bytearray()
        for line in lines:
            body = json.dumps(line, separators=(",", ":")).encode()[:-1]
            text += body + f',"check":"{_check(body, self.fingerprint)}"}}\n'.encode()
        self._write(text)

    def _write(self, text: bytes | bytearray) -> None:
        rest = memoryview(text)
        while rest:
            rest = rest[os.write(self._file, rest) :]

    def release(self) -> None:
        """Close it before its folder is renamed or removed, on systems that require this."""
        if not IS_POSIX:
            self.close()

    def close(self) -> None:
        """Close and unlock it."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def read_locked(path: Path) -> JournalContent:
    """Return the content of a journal; BusyError if another process has it open."""
    with closing(Journal(path, "", create=False)) as journal:
        return journal.read()


def is_held(path: Path) -> bool:
    """Tell whether a process has a journal open."""
    try:
        Journal(path, "", create=False).close()
    except BusyError:
        return True
    except FileNotFoundError:
        return False
    return False
