"""An output in a store while it is being made: parts of uploads, a journal beside, and the names.

Chunks are collected into parts (`planning.parts`), which are sent as soon as they are full, in any
order, by a few threads. After each part an object with the records of its chunks goes into
`OUT.partial/journal/`. When a merge is resumed, on this machine or another, a part counts as done
if the journal speaks of it and the store lists it with the same ETag and size.

The first part of a file has the header, whose digests are known when everything else is there. So
its chunks are kept as an object of their own below `OUT.partial/`, and the part is sent at the end.

Nothing of a file can be seen before its upload is completed. Then, in this order: an output that is
replaced loses its manifest and its index; every file of weights appears, complete, in one step
each; files beside them; what the replaced output had and this one has not goes away; the index;
the manifest. So whoever finds a manifest finds all that it names, and whoever finds no manifest
(and of several shards no index) knows that the output is not there yet.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dare.errors import MismatchError, OutputError, VerificationError
from dare.output.journal import Record
from dare.output.objects import GOES_ON, Upload
from dare.output.sealing import seal
from dare.output.sending import Sender
from dare.output.store_journal import PartName, SentPart, Started
from dare.output.store_lock import StoreLock
from dare.output.store_targets import (
    existing,
    key_of,
    open_journal,
    open_objects,
    store_path,
    written_names,
)
from dare.output.targets import manifest_path, partial_folder
from dare.output.writer import OutputFiles
from dare.planning.layout import Layout
from dare.planning.parts import (
    HELD_PARTS,
    MAX_OBJECT_BYTES,
    UPLOADS,
    Part,
    cut,
    part_at,
    part_of,
)
from dare.stores.reading import forget
from dare.tensors.digest import bytes_digest
from dare.tensors.sizes import show_size


@dataclass
class _Filling:
    """A part that is being filled."""

    file: str
    part: Part
    pieces: dict[int, bytes] = field(default_factory=dict)
    """By their places in the file."""
    records: list[Record] = field(default_factory=list)

    @property
    def name(self) -> PartName:
        return self.file, self.part.number

    def content(self) -> bytes:
        return b"".join(self.pieces[place] for place in sorted(self.pieces))


class StoreOutput:
    """An output under way in a store; used like `PartialOutput`."""

    def __init__(
        self,
        layout: Layout,
        metadata: Mapping[str, str],
        fingerprint: str,
        stamps: str = "",
        *,
        resume: bool = True,
    ) -> None:
        self.layout = layout
        self.folder = partial_folder(layout.target)
        self.resumed: list[Record] = []
        """Chunks of parts that the store has, made from inputs with these stamps."""
        self.doubtful: list[Record] = []
        """The same, made from inputs with other stamps: whether they are the same must be seen."""
        self.started_over = ""
        """Why what was found there is not used, if that is so."""
        self._fingerprint = fingerprint
        self._stamps = stamps
        self._resume = resume
        self._files = OutputFiles(self.folder, layout, metadata)
        self._parts = {
            file: cut(len(header), placed.values())
            for file, (header, placed) in self._files.built.items()
        }
        self._check_sizes()
        self._objects = open_objects(store_path(layout.target))
        self._journal = open_journal(layout, self._objects)
        largest = max(part.nbytes for parts in self._parts.values() for part in parts)
        self._sender = Sender(self._send, UPLOADS, HELD_PARTS * largest)
        self._lock = StoreLock(self._objects, self._journal.lock, self._sender.fail)
        self._uploads: dict[str, Upload] = {}
        self._sent: dict[PartName, SentPart] = {}
        """What counts as done."""
        self._doubted: dict[PartName, SentPart] = {}
        self._published: set[str] = set()
        """Files of weights that have their names already."""
        self._replaced: set[str] = set()
        """Names that an interrupted publication may have given, or was about to replace."""
        self._filling: dict[PartName, _Filling] = {}
        self._changing = threading.Lock()
        self._others: dict[str, bytes | Path] = {}
        self._digests: dict[str, str] = {}
        """Of the files beside the weights."""
        self._is_fresh = False
        """Whether nothing is lost if all that lies in the folder is removed."""

    def _check_sizes(self) -> None:
        for file, parts in self._parts.items():
            size = parts[-1].start + parts[-1].nbytes
            if size > MAX_OBJECT_BYTES:
                raise OutputError(
                    f"{self.layout.target}: {file} would have {show_size(size)}, and an "
                    f"object can have at most {show_size(MAX_OBJECT_BYTES)}; set shard_size"
                )

    # ------------------------------------------------------------ beginning

    def __enter__(self) -> Self:
        try:
            self._journal.claim()
            self._lock.take()
            self._open()
        except BaseException as error:
            self.__exit__(type(error))
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_error: object) -> None:
        self._sender.stop()
        hopeless = kind is not None and issubclass(kind, MismatchError | VerificationError)
        if hopeless or (self._is_fresh and not self._sent):
            # This can never be finished as it was planned, or nothing is in it.
            with suppress(OutputError):
                self._discard(self._uploads.values())
        self._lock.release()

    def _open(self) -> None:
        started = self._journal.read_start()
        if self._resume and started.fingerprint == self._fingerprint:
            self._take_over(started)
        else:
            self._start_over(started)
            self._is_fresh = True
        self._begin_missing()

    def _begin_missing(self) -> None:
        missing = [
            file for file in self._files.built if file not in {*self._uploads, *self._published}
        ]
        if missing:
            self._uploads |= zip(missing, self._each(self._begin, missing), strict=True)
            self._journal.start(self._fingerprint, self._uploads)

    def _begin(self, file: str) -> Upload:
        return self._objects.begin(key_of(self.layout, file), uuid.uuid4().hex)

    def _take_over(self, started: Started) -> None:
        """Find out which parts the store has as the journal says."""
        found = self._journal.read_parts(self._fingerprint)
        self._uploads = dict(started.uploads)
        self._replaced = set(started.names)
        if started.finished is not None:
            marks = self._each(self._mark_of, started.uploads)
            for (file, upload), mark in zip(started.uploads.items(), marks, strict=True):
                if mark == upload.mark:
                    self._published.add(file)
        under_way = [file for file in started.uploads if file not in self._published]
        kept = set(self._objects.list(f"{self._journal.folder}/first"))
        listed = self._each(lambda file: self._objects.sent(started.uploads[file]), under_way)
        lost = 0
        for file, sent in zip(under_way, listed, strict=True):
            if sent is None:
                del self._uploads[file]
                lost += 1
            for name in [name for name in found if name[0] == file]:
                part, there = found[name], (sent or {}).get(name[1])
                if name[1] == 1:
                    is_there = sent is not None and self._first_key(file) in kept
                else:
                    is_there = there is not None and _is_same(part, self._uploads[file], there)
                if not is_there:
                    del found[name]
        if lost:
            self.started_over = (
                f"the store no longer has the uploads of {lost} of {len(started.uploads)} files "
                "(aborted, or expired), so those start over"
            )
        for name, part in found.items():
            if not self._is_expected(name, part):
                continue
            if part.stamps == self._stamps:
                self._sent[name] = part
                self.resumed += part.records
            else:
                self._doubted[name] = part
                self.doubtful += part.records

    def _is_expected(self, name: PartName, part: SentPart) -> bool:
        """Whether the output has such a part, with just these chunks."""
        file, number = name
        if file not in self._parts or number > len(self._parts[file]):
            return False
        planned = self._parts[file][number - 1]
        chunks = {(record.tensor, record.chunk) for record in part.records}
        return len(chunks) == planned.chunks and all(
            tensor in self._files.places and self._part_name(tensor, chunk) == name
            for tensor, chunk in chunks
        )

    def _start_over(self, started: Started) -> None:
        """Let go of what another merge has left."""
        is_begun = started.fingerprint is not None
        if is_begun or not self._journal.is_empty():
            if self._resume:
                self.started_over = (
                    "was left by another merge or another version of dare and is not used; "
                    "its uploads were aborted"
                    if is_begun
                    else "its journal cannot be read, so it starts over"
                )
            if started.finished is not None:
                self._take_back(started)
            self._discard(started.uploads.values(), keep_lock=True)
            self._journal.claim()

    def _take_back(self, started: Started) -> None:
        """Remove what an abandoned merge has published, and nothing of what it was to replace."""
        for upload in started.uploads.values():
            if self._objects.mark_of(upload.key) == upload.mark:
                self._objects.delete([upload.key])

    def _discard(self, uploads: Iterable[Upload], *, keep_lock: bool = False) -> None:
        self._each(self._objects.abort, list(uploads))
        self._journal.clear(keep_lock=keep_lock)

    def confirm(self, records: Iterable[Record]) -> None:
        """Take over what was doubtful: its inputs have been seen to be the same.

        A part counts only if all of it is the same.
        """
        same = {(record.tensor, record.chunk) for record in records}
        confirmed = {
            name: replace(part, stamps=self._stamps)
            for name, part in self._doubted.items()
            if all((record.tensor, record.chunk) in same for record in part.records)
        }
        for file in {file for file, _ in self._doubted.keys() - confirmed} & self._published:
            # It was made of other inputs and is complete: nothing can be put into it.
            self._published.discard(file)
            del self._uploads[file]
            for found in (confirmed, self._sent):
                for name in [name for name in found if name[0] == file]:
                    del found[name]
        self._each(lambda n: self._journal.add(self._fingerprint, n, confirmed[n]), confirmed)
        self._sent |= confirmed
        self._doubted = {}
        self.resumed = [record for part in self._sent.values() for record in part.records]
        self.doubtful = []
        self._begin_missing()

    # ------------------------------------------------------------ chunks

    def place(self, name: str, offset: int, nbytes: int) -> None:  # noqa: ARG002
        return None

    def position(self, name: str, offset: int) -> int:
        return self._files.position(name, offset)

    def write(self, name: str, offset: int, data: NDArray[np.uint8]) -> None:
        file, info = self._files.places[name]
        place = info.start + offset
        self._sender.reserve(data.size)
        while data.size:  # of several chunks, it may be
            part = part_at(self._parts[file], place)
            piece, data = np.split(data, [part.start + part.nbytes - place])
            self._filled(file, part).pieces[place] = piece.tobytes()
            place += piece.size

    def record(self, records: Sequence[Record]) -> None:
        for record in records:
            file, number = self._part_name(record.tensor, record.chunk)
            filling = self._filled(file, self._parts[file][number - 1])
            with self._changing:
                filling.records.append(record)
                is_full = len(filling.records) == filling.part.chunks
                if is_full:
                    del self._filling[filling.name]
            if is_full:
                self._sender.submit(filling)

    def _filled(self, file: str, part: Part) -> _Filling:
        with self._changing:
            return self._filling.setdefault((file, part.number), _Filling(file, part))

    def _part_name(self, tensor: str, chunk: int) -> PartName:
        file, info = self._files.places[tensor]
        return file, part_of(self._parts[file], info, chunk).number

    def _send(self, filling: _Filling) -> None:
        """Send a part and note it in the journal; done by the sender's threads."""
        content = filling.content()
        held = len(content)
        file, number = filling.name
        header = len(self._files.built[file][0]) if number == 1 else 0
        if header + held != filling.part.nbytes:
            raise AssertionError(f"{file}: part {number} is not what was planned")
        filling.pieces.clear()
        if number == 1:
            self._objects.put(self._first_key(file), content)
            upload, etag = "", ""
        else:
            upload = self._uploads[file].id
            etag = self._objects.send(self._uploads[file], number, content)
        stamps, records = self._stamps, tuple(filling.records)
        part = SentPart(upload, etag, held, bytes_digest(content), stamps, records)
        del content
        self._sender.release(held)
        self._journal.add(self._fingerprint, filling.name, part)
        with self._changing:
            self._sent[filling.name] = part

    def _first_key(self, file: str) -> str:
        return f"{self._journal.folder}/first/{file}"

    # ------------------------------------------------------------ the end

    def add_files(self, files: Mapping[str, bytes | Path]) -> None:
        """Say what goes beside the weights."""
        for name, content in files.items():
            self._others[name] = content
            self._digests[name] = bytes_digest(_bytes_of(content))

    def finish(
        self,
        metadata: Mapping[str, Mapping[str, str]],
        manifest: Mapping[str, Any],
        *,
        overwrite: bool = False,
    ) -> list[str]:
        """Send the final headers (metadata for each file), then publish, the manifest last.

        Returns what went wrong when the output was there.
        """
        self._sender.wait()
        headers: dict[str, bytes] = {}
        for file, (first, _) in self._files.built.items():
            headers[file] = self.layout.build(metadata[file])[file][0]
            if len(headers[file]) != len(first):
                raise AssertionError("the final header must be as long as the first one")
        index = self.layout.index()
        if index is not None:
            self._digests[self.layout.index_name] = bytes_digest(index)
        digests = {file: bytes_digest(header) for file, header in headers.items()}
        text = seal(manifest, {**digests, **self._digests})

        under_way = [file for file in headers if file not in self._published]
        self._each(lambda file: self._send_first(file, headers[file]), under_way)
        parts = dict(zip(under_way, self._each(self._checked_parts, under_way), strict=True))
        self._publish(parts, index, text, overwrite=overwrite)
        try:
            self._journal.clear()
        except OutputError as error:
            return [str(error)]
        finally:
            forget()
        return []

    def _send_first(self, file: str, header: bytes) -> None:
        """Send the part with the header, whose chunks were kept apart."""
        content = b""
        if self._parts[file][0].chunks:
            content = self._objects.get(self._first_key(file)) or b""
            if bytes_digest(content) != self._sent[file, 1].digest:
                self._journal.forget([(file, 1)])
                where = self._objects.describe(self._first_key(file))
                raise OutputError(f"{where}: has changed since it was stored; {GOES_ON}")
        self._objects.send(self._uploads[file], 1, header + content)

    def _checked_parts(self, file: str) -> dict[int, str]:
        """The ETags of all parts of a file, which the store must have."""
        sent = self._objects.sent(self._uploads[file]) or {}
        for part in self._parts[file]:
            there = sent.get(part.number)
            known = self._sent.get((file, part.number))
            is_good = there is not None and there.nbytes == part.nbytes
            if there is not None and known is not None and part.number > 1:
                is_good = is_good and _is_same(known, self._uploads[file], there)
            if not is_good:
                raise OutputError(
                    f"{self._objects.describe(self._uploads[file].key)}: the store does not have "
                    f"part {part.number} as it was sent; {GOES_ON}"
                )
        return {part.number: sent[part.number].etag for part in self._parts[file]}

    def _publish(
        self,
        parts: Mapping[str, Mapping[int, str]],
        index: bytes | None,
        text: bytes,
        *,
        overwrite: bool,
    ) -> None:
        manifest = manifest_path(self.layout.target).name
        names = [*self._files.built, *self._digests, manifest]
        replaced = self._replaced
        if overwrite:
            replaced = replaced | set(written_names(self.layout, self._objects) or ())
        elif appeared := set(existing(self.layout, self._objects)) - replaced:
            raise self._appeared(min(appeared))
        self._is_fresh = False
        self._journal.finish(self._fingerprint, bytes_digest(text), sorted({*names, *replaced}))
        first = [name for name in (manifest, self.layout.index_name) if name in replaced]
        self._delete(first)
        for file, etags in parts.items():
            is_new = file not in replaced
            if not self._objects.complete(self._uploads[file], etags, new=is_new):
                raise self._appeared(file)
            self._published.add(file)
        self._each(lambda name: self._put(name, _bytes_of(self._others[name])), self._others)
        self._delete(sorted(replaced - set(names)))
        if index is not None:
            self._put(self.layout.index_name, index)
        self._put(manifest, text)

    def _appeared(self, name: str) -> OutputError:
        return OutputError(
            f"{self._objects.describe(key_of(self.layout, name))}: appeared during "
            "the merge; move it away and run the same merge again; only this last "
            "step is left"
        )

    def _put(self, name: str, content: bytes) -> None:
        self._objects.put(key_of(self.layout, name), content)

    def _delete(self, names: Iterable[str]) -> None:
        self._objects.delete([key_of(self.layout, name) for name in names])

    def _mark_of(self, file: str) -> str | None:
        return self._objects.mark_of(key_of(self.layout, file))

    def _each(self, action: Any, items: Iterable[Any]) -> list[Any]:
        """Do the same for all, some at a time."""
        with ThreadPoolExecutor(UPLOADS) as pool:
            return list(pool.map(action, items))


def _is_same(part: SentPart, upload: Upload, there: Any) -> bool:
    """Whether a part that the store lists is the one that the journal speaks of."""
    return (upload.id, part.etag, part.nbytes) == (part.upload, there.etag, there.nbytes)


def _bytes_of(content: bytes | Path) -> bytes:
    return content if isinstance(content, bytes) else content.read_bytes()
