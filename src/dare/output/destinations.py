"""The destination of an output: this machine, or by way of a scratch folder a store.

An output in a store is made in a folder of this machine as any other, with the same journal and
lock. A complete file is uploaded in the background, compared with the store's, noted in the journal
and deleted here, while the next one is merged. A merge that is run again resumes from these notes.

The index and the manifest come last, so whoever finds a manifest finds all that it names. An output
that is replaced loses its manifest before anything else. Nothing is replaced or deleted in a store
but what the manifest there names, what the journal here names, and objects that carry our mark.

A file of several is uploaded before the digests of all of them are known, so its header has zeros
in their place; they stand in the manifest beside it.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from dare.documents.words import show_size
from dare.errors import ExistsError, OutputError
from dare.output import publishing, targets
from dare.output.journal import Journal, JournalContent, Key, Record, read_locked
from dare.output.manifest import METADATA_KEY, checked_metadata
from dare.output.targets import JOURNAL_NAME, SEAL, has_mark, manifest_path, work_folder
from dare.output.writer import PartialOutput
from dare.planning.data import Layout
from dare.stores import uploading
from dare.stores.locations import StorePath
from dare.stores.reading import forget, in_background
from dare.stores.uploading import Stored
from dare.tensors.chunks import bytes_digest, chunk_count

SCRATCH_FILES = 2  # files in the scratch folder: one that is merged, and one that is uploaded
UPLOAD_NEWS_SECONDS = 10.0  # between two announcements of how far an upload is
EXIT_SECONDS = 5.0  # time for a part that is being sent when the merge ends early


def open_output(layout: Layout, *identity: Any, **how: Any) -> PartialOutput:
    """Return an output under way, a context manager; arguments are those of `PartialOutput`."""
    return (StoreOutput if layout.is_sent else PartialOutput)(layout, *identity, **how)


def check_target(layout: Layout, inputs: Iterable[Path], *, overwrite: bool) -> None:
    """Refuse to touch an input, ever, and to replace an output without `overwrite`."""
    if not layout.is_sent:
        targets.check_target(layout, inputs, overwrite=overwrite)
        return
    _check_place(layout, inputs)
    _replaceable(layout, _noted(layout).ours, overwrite=overwrite)


def finished_before(layout: Layout) -> JournalContent | None:
    """Return the journal of an output whose process died after the last step, else None."""
    if not layout.is_sent:
        return publishing.finished_before(layout)
    try:
        found = _noted(layout)
    except OutputError:
        return None
    manifest = uploading.read_object(_place(layout, manifest_path(layout.target).name))
    is_finished = manifest is not None and bytes_digest(manifest) == found.finished
    return found if is_finished else None


def clear_leftovers(layout: Layout) -> None:
    """Remove what such a process left, or one that died while removing it."""
    if not layout.is_sent:
        publishing.clear_leftovers(layout)
    elif finished_before(layout) is not None:
        shutil.rmtree(work_folder(layout), ignore_errors=True)


# ---------------------------------------------------------------- what is in the store


def _place(layout: Layout, name: str) -> StorePath:
    target = layout.target
    place = target / name if layout.is_directory else target.with_name(name)
    assert isinstance(place, StorePath)
    return place


def _check_place(layout: Layout, inputs: Iterable[Path]) -> None:
    """Refuse an address that cannot be written to, and one that an input has."""
    target = layout.target
    assert isinstance(target, StorePath)
    if not target.store.is_writable:
        what = f"outputs cannot be written to {target.scheme}:// addresses"
        raise OutputError(f"{target}: {what}; choose s3://, gs://, az:// or a path")
    if not target.key or target.key.endswith(".."):
        raise OutputError(f"{target}: is not a name for an output; add a name after the bucket")
    largest = max(layout.sizes, default=0)
    if largest > uploading.MAX_OBJECT_BYTES:
        raise OutputError(
            f"{target}: a file would have {show_size(largest)}, and an object can have at most "
            f"{show_size(uploading.MAX_OBJECT_BYTES)}; set shard_size"
        )
    for file in inputs:
        if {target, manifest_path(target)} & {file, *file.parents}:
            what = f"the output would overwrite the input {file}"
            raise OutputError(f"{target}: {what}; choose another output")


def _existing(layout: Layout) -> list[str]:
    """The names of what lies where the output would be."""
    assert isinstance(layout.target, StorePath)
    below = uploading.list_names(layout.target)  # which raises where there is no such bucket
    if layout.is_directory:
        return below
    names = layout.target.name, manifest_path(layout.target).name
    return [name for name in names if uploading.describe_object(_place(layout, name)) is not None]


def _replaceable(layout: Layout, known: Collection[str], *, overwrite: bool) -> list[str]:
    """Return the names in the way, manifest first; `known` ones are of an unfinished merge."""
    found = _existing(layout)
    manifest = manifest_path(layout.target).name
    if manifest not in found and not set(found) - set(known):
        return found
    if not overwrite:
        raise ExistsError(layout.target)
    ours = {*known, *_written_names(layout)}
    for name in (name for name in found if name not in ours):
        seen = uploading.describe_object(_place(layout, name))
        if seen is not None and not seen.is_ours:
            raise OutputError(
                f"{layout.target}: contains {name}, which was not made by dare, so it is not "
                "replaced; move it away, or choose another output"
            )
    return sorted(found, key=lambda name: name != manifest)


def _written_names(layout: Layout) -> list[str]:
    """Return the files that the manifest in the store lists, and the manifest itself."""
    name = manifest_path(layout.target).name
    try:
        document = json.loads(uploading.read_object(_place(layout, name)) or b"")
        return [*document["files"], name] if SEAL in document else []
    except (ValueError, RecursionError, TypeError, KeyError):
        return []


def _noted(layout: Layout) -> JournalContent:
    """Return the content of the journal here."""
    folder = work_folder(layout)
    if not has_mark(folder):
        return JournalContent()
    try:
        return read_locked(folder / JOURNAL_NAME)
    except OSError:
        return JournalContent()


# ---------------------------------------------------------------- an output under way


class StoreOutput(PartialOutput):
    """An output that is made in the scratch folder and uploaded file by file."""

    def __init__(
        self, layout: Layout, metadata: Mapping[str, str], *identity: str, **how: Any
    ) -> None:
        super().__init__(layout, metadata, *identity, **how)
        self._is_one = len(layout.files) == 1
        if not self._is_one and METADATA_KEY in metadata:
            checked = checked_metadata(layout, json.loads(metadata[METADATA_KEY]))
            self.built = {file: layout.build(checked[file])[file] for file in layout.files}
        self._ours: set[str] = set()  # names in the store that this merge may have written
        self._sent: dict[str, Stored] = {}  # files that the store has
        self._missing: dict[str, set[Key]] = {}  # the chunks that files lack
        self._begun: set[str] = set()  # files that take room in the folder, or have taken it
        self._uploads: dict[str, Future[None]] = {}
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._is_free = False
        self._is_over = False

    # ------------------------------------------------------------ beginning and end

    def __enter__(self) -> Self:
        super().__enter__()
        if not self.doubtful:
            self._send_complete()
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *error: object) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        if self._sending.acquire(timeout=EXIT_SECONDS):
            self._sending.release()
        if kind is not None and issubclass(kind, self._HOPELESS):
            with suppress(OutputError):
                uploading.delete(self._place(file) for file in self._sent)
        super().__exit__(kind, *error)

    def _place(self, name: str) -> StorePath:
        return _place(self.layout, name)

    def _take_over(self, found: JournalContent) -> None:
        self._ours = set(found.ours)
        for file, (size, version) in found.sent.items():
            seen = uploading.describe_object(self._place(file)) if file in self.built else None
            if seen is not None and (seen.size, seen.version) == (size, version):
                self._sent[file] = seen
        super()._take_over(found)

    def _start_over(self, journal: Journal, found: JournalContent) -> None:
        super()._start_over(journal, found)
        self._ours = set(found.ours)
        journal.note_synced(ours=sorted(self._ours))

    def _open_files(self) -> None:
        self.make(file for file in self.built if file not in self._sent)
        for file in self._sent:
            (self.folder / file).unlink(missing_ok=True)

    def reserve(self) -> None:
        pass  # each file when it is begun

    def _missing_bytes(self) -> int:
        return sum(sorted(f.unwritten_bytes() for f in self.opened.values())[-SCRATCH_FILES:])

    def intact(self, records: list[Record]) -> list[Record]:
        """Keep the records of chunks that are in the store, or here as the journal says."""
        sent = [record for record in records if self._file_of(record) in self._sent]
        here = [record for record in records if self._file_of(record) not in self._sent]
        return [*sent, *super().intact(here)]

    def confirm(self, records: Iterable[Record]) -> None:
        super().confirm(records)
        found = {record.key for record in self.resumed}
        if lacking := [file for file in self._sent if self._chunks(file) - found]:
            for file in lacking:
                del self._sent[file]
            self.make(lacking)
            self.resumed = [r for r in self.resumed if self._file_of(r) not in lacking]
        self._send_complete()

    def _file_of(self, record: Record) -> str:
        return self.places[record.tensor][0]

    def _chunks(self, file: str) -> set[Key]:
        placed = self.built[file][1]
        return {(n, chunk) for n, t in placed.items() for chunk in range(chunk_count(t.elements))}

    # ------------------------------------------------------------ chunks

    def place(self, name: str, offset: int, nbytes: int) -> NDArray[np.uint8] | None:
        self._begin(self.places[name][0])
        return super().place(name, offset, nbytes)

    def write(self, name: str, offset: int, data: NDArray[np.uint8]) -> None:
        self._begin(self.places[name][0])
        super().write(name, offset, data)

    def _begin(self, file: str) -> None:
        """Take room for a file; wait for that while others are being uploaded."""
        if file in self._begun:
            return
        with self._changed:
            while not self._is_over and self._is_full(file):
                self._changed.wait()
            self._raise()
            if file not in self._begun:
                self._begun.add(file)
                with self._explaining(self.folder / file):
                    self.opened[file].reserve()

    def _is_full(self, file: str) -> bool:
        here = self._begun - self._sent.keys() - {file}
        return len(here) >= SCRATCH_FILES and self._count_uploads() > 0

    def _count_uploads(self) -> int:
        return sum(not upload.done() for upload in self._uploads.values())

    def record(self, records: Sequence[Record]) -> None:
        super().record(records)
        with self._changed:
            for record in records:
                if (missing := self._missing.get(self._file_of(record))) is not None:
                    missing.discard(record.key)
            self._submit_complete()
            while not self._is_over and self._count_uploads() > SCRATCH_FILES:
                self._changed.wait(0.2)  # nodes of a cluster do not wait before they begin a file
            self._raise()

    # ------------------------------------------------------------ uploading

    def _send_complete(self) -> None:
        """Begin to upload what an earlier try has left complete."""
        done = {record.key for record in self.resumed}
        with self._changed:
            for file in self.built:
                if file not in self._sent:
                    self._missing[file] = self._chunks(file) - done
            self._submit_complete()

    def _submit_complete(self) -> None:
        """Have complete files uploaded; the only one waits for the digests in its header."""
        for file, missing in self._missing.items():
            if not missing and not self._is_one and file not in self._uploads:
                self._submit(file)

    def _submit(self, file: str) -> None:
        self._begun.add(file)
        self._uploads[file] = in_background(lambda: self._send(file))

    def _send(self, file: str) -> None:
        try:
            with self._sending:
                if not self._is_over:
                    self._send_now(file)
        except BaseException:
            self._is_over = True
            raise
        finally:
            with self._changed:
                self._changed.notify_all()

    def _send_now(self, file: str) -> None:
        assert self._journal is not None
        self._free_place()
        opened, path = self.opened[file], self.folder / file
        with self._explaining(path):
            opened.sync()
            stored = self._upload(file, path)
            self._journal.note_synced(sent=file, size=stored.size, version=stored.version)
            self._sent[file] = stored
            opened.close()
            path.unlink()

    def _upload(self, name: str, path: Path) -> Stored:
        size, sent, announced = path.stat().st_size, 0, time.monotonic()
        if name in self.built:
            self.announce(f"uploading {name} ({show_size(size)})")

        def progress(nbytes: int) -> None:
            nonlocal sent, announced
            if self._is_over:
                raise InterruptedError
            sent += nbytes
            if time.monotonic() > announced + UPLOAD_NEWS_SECONDS:
                announced = time.monotonic()
                self.announce(f"uploaded {show_size(sent)} of {show_size(size)} of {name}")

        return uploading.upload(self._place(name), path, progress)

    def _free_place(self) -> None:
        """Delete what is replaced, its manifest first, before anything is uploaded."""
        assert self._journal is not None
        if self._is_free:
            return
        known = {*self._ours, *self._sent}
        found = _replaceable(self.layout, known, overwrite=self._overwrite)
        self._journal.note_synced(ours=sorted([*found, *self.built]))
        uploading.delete(self._place(name) for name in found if name not in self._sent)
        self._is_free = True

    def _raise(self) -> None:
        """Raise what went wrong with an upload."""
        for upload in self._uploads.values():
            if upload.done() and (error := upload.exception()) is not None:
                raise error

    def _write_headers(
        self, metadata: Mapping[str, Mapping[str, str]], digests_of_all: bool
    ) -> dict[str, str]:
        """Upload the files that are not there yet; merges have digests of headers alone."""
        del digests_of_all
        if self._is_one:
            ((file, (_, placed)),) = self.built.items()
            header = self._final_header(file, metadata[file])
            self.built[file] = header, placed
            if file not in self._sent:
                self.opened[file].write(header, 0)
        with self._changed:
            for file in self.built:
                if file not in self._sent and file not in self._uploads:
                    self._submit(file)
            while self._count_uploads():
                self._changed.wait(0.2)  # so that Ctrl-C comes through
            self._raise()
        return {file: bytes_digest(header) for file, (header, _) in self.built.items()}

    def _publish(self, manifest: bytes) -> list[str]:
        """Upload the index and the manifest, and clear the folder away."""
        assert self._journal is not None
        name = manifest_path(self.layout.target).name
        self._free_place()
        self._journal.note_synced(ours=sorted([*self._others, name]))
        self._journal.note_synced(finished=bytes_digest(manifest))
        for other in self._others:  # of which the index is the last
            self._upload(other, self.folder / other)
        uploading.upload(self._place(name), manifest)
        try:
            shutil.rmtree(self.folder)
        except OSError as error:
            return [f"{self.folder}: cannot be removed: {error.strerror}"]
        finally:
            forget()
        return []
