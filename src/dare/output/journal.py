"""The journal of an output under way: what is done, line by line, each with a check of its own.

The first line names the merge (its fingerprint). A line `stamps` says by which inode and times the
inputs were known from there on; the lines after it are finished chunks. A line counts only if its
check fits, which is taken over the fingerprint and the line, so that neither a damaged line nor one
of another merge is ever believed; what it speaks of is done again. `finished` is written when
everything is in place but the name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from dare.errors import OutputError
from dare.tensors.digest import DIGEST_LENGTH, bytes_digest
from dare.tensors.files import NO_LINKS

JOURNAL_VERSION = 2

Digest = Annotated[str, Field(pattern=f"^[0-9a-f]{{{DIGEST_LENGTH}}}$")]
Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of a finished chunk."""

    tensor: str
    chunk: Count
    inputs: tuple[Digest, ...]
    """Of the bytes that were read, base first."""
    output: Digest
    models: tuple[tuple[Count, ...], ...]
    """For each model: bits of the largest |δ|, elements over the threshold, survivors."""
    exceptions: tuple[Count, Count]
    """Elements that overflow, and that are NaN."""
    piece: tuple[int, ...] = ()
    """Of a coded chunk: where it lies among the pieces, its size, and how many values it has."""
    sums: tuple[float, ...] = ()
    """Of a coded chunk: what is added up over all of them."""


@cache
def _records() -> TypeAdapter[Record]:
    return TypeAdapter(Record)


@dataclass
class Found:
    """What a journal says."""

    fingerprint: str | None = None
    """The merge it is of; None if its first line cannot be believed."""
    records: dict[tuple[str, int], tuple[str, Record]] = field(default_factory=dict)
    """The last record of each chunk, and the stamps of the inputs that it was made from."""
    finished: str | None = None
    """The digest of the manifest, if only the name was missing."""


def read_journal(text: bytes) -> Found:
    """Believe what can be believed of a journal."""
    lines = checked_lines(text)
    found = Found(next(lines, {}).get("fingerprint"))
    stamps = ""
    for line in lines:
        if "stamps" in line:
            stamps = str(line["stamps"])
        elif "finished" in line:
            found.finished = str(line["finished"])
        else:
            try:
                record = _records().validate_json(json.dumps(line), strict=True)
            except ValidationError:
                continue
            found.records[record.tensor, record.chunk] = stamps, record
    return found


def checked_lines(text: bytes) -> Iterator[dict[str, Any]]:
    """The lines whose checks fit, without the checks; none if that of the first does not."""
    fingerprint = ""
    for number, line in enumerate(text.split(b"\n")):
        body, _, check = line.rpartition(b',"check":"')
        try:
            document = json.loads(body + b"}")
            fingerprint = fingerprint or document["fingerprint"]
            expected = _check(body, fingerprint)
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
            expected = ""
        if check == f'{expected}"}}'.encode() and document.pop("journal", None) in (
            None,
            JOURNAL_VERSION,
        ):
            yield document
        elif number == 0:
            return


def _check(body: bytes, fingerprint: str) -> str:
    return bytes_digest(fingerprint.encode() + body)


def first_line(fingerprint: str) -> dict[str, Any]:
    """Says which merge a journal is of."""
    return {"journal": JOURNAL_VERSION, "fingerprint": fingerprint}


def line_of(record: Record) -> dict[str, Any]:
    """Says that a chunk is done."""
    line = {name: getattr(record, name) for name in Record.__slots__}
    if not record.piece:
        del line["piece"], line["sums"]
    return line


def with_checks(lines: Iterable[dict[str, Any]], fingerprint: str) -> bytes:
    """The text of some lines, each with its check."""
    text = bytearray()
    for line in lines:
        body = json.dumps(line, separators=(",", ":")).encode()[:-1]
        text += body + f',"check":"{_check(body, fingerprint)}"}}\n'.encode()
    return bytes(text)


class Journal:
    """A journal that is open, and locked for this process."""

    def __init__(self, path: Path, fingerprint: str, *, create: bool = True) -> None:
        self.fingerprint = fingerprint
        flags = os.O_RDWR | os.O_APPEND | NO_LINKS | (os.O_CREAT if create else 0)
        self._file = os.open(path, flags, 0o666)
        try:
            is_ours = _lock(self._file) and os.path.samestat(os.fstat(self._file), path.stat())
        except OSError:  # it was published and is gone
            is_ours = False
        if not is_ours:
            self.close()
            raise OutputError(f"{path.parent}: another process is writing this output")

    def read(self) -> Found:
        """What it says; what is written next begins a line of its own."""
        size = os.fstat(self._file).st_size
        text = os.pread(self._file, size, 0)
        while len(text) < size and (more := os.pread(self._file, size - len(text), len(text))):
            text += more
        if text and not text.endswith(b"\n"):
            os.write(self._file, b"\n")
        return read_journal(text)

    def start(self) -> None:
        """Forget everything and begin with the merge's fingerprint, which is on the disk then."""
        os.truncate(self._file, 0)
        self._append([first_line(self.fingerprint)])
        os.fsync(self._file)

    def note_stamps(self, stamps: str) -> None:
        """Say by what the inputs are known from here on."""
        self._append([{"stamps": stamps}])

    def add(self, records: Iterable[Record]) -> None:
        """Say that chunks are done."""
        self._append(map(line_of, records))

    def finish(self, manifest: str) -> None:
        """Say that only the name is missing."""
        self._append([{"finished": manifest}])
        os.fsync(self._file)

    def _append(self, lines: Iterable[dict[str, Any]]) -> None:
        rest = memoryview(with_checks(lines, self.fingerprint))
        while rest:
            rest = rest[os.write(self._file, rest) :]

    def close(self) -> None:
        """Close, and let others have it."""
        if self._file >= 0:
            os.close(self._file)
        self._file = -1


def _lock(file_descriptor: int) -> bool:
    import fcntl

    try:
        fcntl.flock(file_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, BlockingIOError)  # else a file system without locks
    return True
