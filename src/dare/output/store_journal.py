"""The journal of an output under way in a store: objects below `OUT.partial/journal/`.

Objects cannot be appended to. So there is one for the start, with the ids of the uploads; one for
each part that was sent, with the records of its chunks; and one that says that the output is being
published, with the names of all that it consists of. Each is a journal by itself (`journal`): its
first line names the merge, and a line counts only if its check fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from dare.errors import OutputError
from dare.output.journal import (
    Found,
    Record,
    checked_lines,
    first_line,
    line_of,
    read_journal,
    with_checks,
)
from dare.output.objects import Objects, Upload
from dare.output.targets import MARK, MARK_NAME

READERS = 16
"""Objects of a journal that are read at the same time."""

PartName = tuple[str, int]
"""A file of the output and the number of a part."""


@dataclass(frozen=True)
class SentPart:
    """What a journal says of a part."""

    upload: str
    etag: str
    nbytes: int
    digest: str
    stamps: str
    """Of the inputs that it was made from."""
    records: tuple[Record, ...]


@dataclass
class Started:
    """What a journal says of the beginning and the end of an output."""

    fingerprint: str | None = None
    """The merge it is of; None if there is none, or it cannot be believed."""
    uploads: dict[str, Upload] = field(default_factory=dict)
    """By the files of the output."""
    finished: str | None = None
    """The digest of the manifest, if the output is being published."""
    names: tuple[str, ...] = ()
    """What belongs to the output then, and to the one that it replaces."""


class StoreJournal:
    """The journal in one folder of a store."""

    def __init__(self, objects: Objects, folder: str) -> None:
        self._objects = objects
        self.folder = folder
        self._start = f"{folder}/journal/start.jsonl"
        self._finish = f"{folder}/journal/finished.jsonl"
        self._mark = f"{folder}/{MARK_NAME}"
        self.lock = f"{folder}/lock"
        """Where the lock of whoever writes it lies."""

    # ------------------------------------------------------------ reading

    def read_start(self) -> Started:
        """What is known without reading of the parts."""
        started = Started()
        lines = checked_lines(self._objects.get(self._start) or b"")
        started.fingerprint = next(lines, {}).get("fingerprint")
        for line in lines:
            for file, given in line.get("uploads", {}).items():
                started.uploads[file] = Upload(*map(str, given))
        started.finished, started.names = self.read_finish()
        return started

    def read_finish(self) -> tuple[str | None, tuple[str, ...]]:
        """The digest of the manifest and all names, if the output is being published."""
        for line in checked_lines(self._objects.get(self._finish) or b""):
            if "finished" in line:
                return str(line.get("finished")), tuple(map(str, line.get("names", ())))
        return None, ()

    def read_parts(self, fingerprint: str) -> dict[PartName, SentPart]:
        """What is known of the parts of a merge."""
        keys = [key for key in self._objects.list(f"{self.folder}/journal") if self._part(key)]
        found: dict[PartName, SentPart] = {}
        with ThreadPoolExecutor(READERS) as pool:
            for key, text in zip(keys, pool.map(self._objects.get, keys), strict=True):
                part = None if text is None else _read_part(text, fingerprint)
                if part is not None and (name := self._part(key)) is not None:
                    found[name] = part
        return found

    def read_all(self) -> Found:
        """What a journal on a disk would say."""
        started = self.read_start()
        found = Found(started.fingerprint, finished=started.finished)
        for part in self.read_parts(started.fingerprint or "").values():
            for record in part.records:
                found.records[record.tensor, record.chunk] = part.stamps, record
        return found

    def _part(self, key: str) -> PartName | None:
        file, _, number = key.removeprefix(f"{self.folder}/journal/").rpartition("/")
        digits = number.removesuffix(".jsonl")
        return (file, int(digits)) if file and digits.isdecimal() else None

    # ------------------------------------------------------------ writing

    def is_empty(self) -> bool:
        """Whether there is nothing but mark and lock."""
        return set(self._objects.list(self.folder)) <= {self._mark, self.lock}

    def claim(self) -> None:
        """Mark the folder as ours, or find our mark there."""
        found = self._objects.get(self._mark)
        if found is not None and MARK.startswith(found):
            return
        others = sorted(set(self._objects.list(self.folder)) - {self._mark, self.lock})
        if found is not None or others:
            raise OutputError(
                f"{self._objects.describe(self.folder)}: holds "
                f"{(others or [self._mark])[0]} and was not made by dare; move it away, "
                "because the output is made there"
            )
        self._objects.put(self._mark, MARK)

    def start(self, fingerprint: str, uploads: Mapping[str, Upload]) -> None:
        """Say which merge it is, and by which uploads it is sent."""
        given = {file: [u.key, u.id, u.mark] for file, u in uploads.items()}
        lines = [first_line(fingerprint), {"uploads": given}]
        self._objects.put(self._start, with_checks(lines, fingerprint))

    def add(self, fingerprint: str, name: PartName, part: SentPart) -> None:
        """Say that a part was sent."""
        described = {k: getattr(part, k) for k in ("upload", "etag", "nbytes", "digest")}
        lines = [
            first_line(fingerprint),
            {"stamps": part.stamps},
            {"part": described},
            *map(line_of, part.records),
        ]
        self._objects.put(self._key(name), with_checks(lines, fingerprint))

    def forget(self, names: Iterable[PartName]) -> None:
        """Let parts be made again."""
        self._objects.delete([self._key(name) for name in names])

    def finish(self, fingerprint: str, manifest: str, names: Sequence[str]) -> None:
        """Say that all is sent, and what belongs to the output."""
        lines = [first_line(fingerprint), {"finished": manifest, "names": list(names)}]
        self._objects.put(self._finish, with_checks(lines, fingerprint))

    def clear(self, *, keep_lock: bool = False) -> None:
        """Remove everything; what tells that there is something to remove goes last."""
        last = {self._finish, self._mark, self.lock}
        others = set(self._objects.list(self.folder)) - {*last, self._start}
        last -= {self.lock} if keep_lock else set()
        for keys in ({self._start}, others, last):
            self._objects.delete(sorted(keys))

    def _key(self, name: PartName) -> str:
        return f"{self.folder}/journal/{name[0]}/{name[1]:05}.jsonl"


def _read_part(text: bytes, fingerprint: str) -> SentPart | None:
    """What the journal of one part says, if it is of this merge."""
    found = read_journal(text)
    described = next((line["part"] for line in checked_lines(text) if "part" in line), None)
    if found.fingerprint != fingerprint or not isinstance(described, dict):
        return None
    stamps = next((stamps for stamps, _ in found.records.values()), "")
    records = tuple(record for _, record in found.records.values())
    try:
        return SentPart(**described, stamps=stamps, records=records)
    except TypeError:
        return None
