"""Outputs in a store, by way of a scratch folder on this machine.

An output in a store is made in a folder of this machine like any other, with the same journal and
lock. A complete file is uploaded in the background, compared with the store's, noted in the journal
and deleted here, while the next one is merged. A merge that is run again resumes from these notes.

The index and the manifest come last, so if there is a manifest, all its files are there. An output
that is replaced loses its manifest first. In a store, only three kinds of objects are replaced or
deleted: those that its manifest names, those that the journal here names, and those with our mark.

If there are several files, each is uploaded before the digests of all are known, so its header has
zeros in their place; the manifest beside it has the digests.
"""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from dare.documents.words import show_size
from dare.errors import ExistsError, OutputError
from dare.output.journal import Journal, JournalContent, Key, Record, read_locked
from dare.output.output import Output, Publisher
from dare.output.receipt import METADATA_KEY, checked_metadata
from dare.output.sink import Bytes, FileSink, Metadata, explaining
from dare.output.targets import JOURNAL_NAME, has_mark, manifest_path, work_folder
from dare.planning.data import Layout
from dare.stores import objects
from dare.stores.locations import StorePath, is_stored
from dare.stores.objects import StoredObject
from dare.stores.reading import forget, in_background
from dare.tensors.chunks import SEAL, bytes_digest, chunk_count

SCRATCH_FILES = 2  # files in the scratch folder: one being merged, and one being uploaded
UPLOAD_NEWS_SECONDS = 10.0  # between two announcements of an upload's progress
EXIT_SECONDS = 5.0  # time for a part that is being sent when the merge ends early


# ---------------------------------------------------------------- the content of the store


def _place(layout: Layout, name: str) -> StorePath:
    target = layout.target
    place = target / name if layout.is_directory else target.with_name(name)
    assert is_stored(place)
    return place


def _check_place(layout: Layout, inputs: Iterable[Path]) -> None:
    """Refuse an address that cannot be written to, and one that an input has."""
    target = layout.target
    assert is_stored(target)
    if not target.store.is_writable:
        what = f"outputs cannot be written to {target.scheme}:// addresses"
        raise OutputError(f"{target}: {what}; choose s3://, gs://, az:// or a path")
    if not target.key or target.key.endswith(".."):
        raise OutputError(f"{target}: is not a name for an output; add a name after the bucket")
    largest = max(layout.sizes, default=0)
    if largest > objects.MAX_OBJECT_BYTES:
        raise OutputError(
            f"{target}: a file would be {show_size(largest)}, and an object can be at most "
            f"{show_size(objects.MAX_OBJECT_BYTES)}; set shard_size"
        )
    for file in inputs:
        if {target, manifest_path(target)} & {file, *file.parents}:
            what = f"the output would overwrite the input {file}"
            raise OutputError(f"{target}: {what}; choose another output")


def _existing(layout: Layout) -> list[str]:
    """Return the names of objects in the output's place."""
    assert is_stored(layout.target)
    below = objects.list_names(layout.target)  # which raises an error if the bucket is missing
    if layout.is_directory:
        return below
    names = layout.target.name, manifest_path(layout.target).name
    return [name for name in names if objects.describe_object(_place(layout, name)) is not None]


def _replaceable(layout: Layout, known: Collection[str], *, overwrite: bool) -> list[str]:
    """Return the names to replace, manifest first; `known` ones are of an unfinished merge."""
    found = _existing(layout)
    manifest = manifest_path(layout.target).name
    if manifest not in found and not set(found) - set(known):
        return found
    if not overwrite:
        raise ExistsError(layout.target)
    ours = {*known, *written_names(objects.read_object(_place(layout, manifest)) or b"", manifest)}
    for name in (name for name in found if name not in ours):
        seen = objects.describe_object(_place(layout, name))
        if seen is not None and not seen.is_ours:
            raise OutputError(
                f"{layout.target}: contains {name}, which was not made by dare, so it is not "
                "replaced; move it away, or choose another output"
            )
    return sorted(found, key=lambda name: name != manifest)


def written_names(manifest: bytes, name: str) -> list[str]:
    """Return the files that a manifest lists, and itself by its name; none if it is not valid."""
    try:
        document = json.loads(manifest)
        return [*document["files"], name] if SEAL in document else []
    except (ValueError, RecursionError, TypeError, KeyError):
        return []


def noted(layout: Layout) -> JournalContent:
    """Return the content of the journal in the scratch folder."""
    folder = work_folder(layout)
    if not has_mark(folder):
        return JournalContent()
    try:
        return read_locked(folder / JOURNAL_NAME)
    except OSError:
        return JournalContent()


# ---------------------------------------------------------------- an output under way


class StoreSink(FileSink):
    """Files in the scratch folder, which are uploaded one by one as soon as they are complete."""

    def __init__(self, folder: Path, layout: Layout, metadata: Mapping[str, str]) -> None:
        super().__init__(folder, layout, metadata)
        self._is_one = len(layout.files) == 1
        if not self._is_one and METADATA_KEY in metadata:
            checked = checked_metadata(layout, json.loads(metadata[METADATA_KEY]))
            self.built = {file: layout.build(checked[file])[file] for file in layout.files}
        self._journal: Journal
        self._ours: set[str] = set()  # names in the store that this merge may have written
        self._sent: dict[str, StoredObject] = {}  # files that the store has
        self._missing: dict[str, set[Key]] = {}  # the chunks that files lack
        self._begun: set[str] = set()  # files that take space in the folder, or have taken it
        self._uploads: dict[str, Future[None]] = {}
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._is_free = False
        self._is_over = False

    # ------------------------------------------------------------ beginning and end

    def begin(self, journal: Journal, found: JournalContent) -> None:
        """Find out which files the store has."""
        self._journal, self._ours = journal, set(found.ours)
        journal.note_synced(ours=sorted(self._ours))
        for file, (size, version) in found.sent.items():
            seen = objects.describe_object(self._place(file)) if file in self.built else None
            if seen is not None and (seen.size, seen.version) == (size, version):
                self._sent[file] = seen

    def make(self, files: Iterable[str] | None = None) -> None:
        super().make(file for file in files or self.built if file not in self._sent)
        for file in self._sent:
            (self.folder / file).unlink(missing_ok=True)

    def close(self, *, discard: bool = False) -> None:
        with self._changed:
            self._is_over = True
            self._changed.notify_all()
        if self._sending.acquire(timeout=EXIT_SECONDS):
            self._sending.release()
        if discard:
            with suppress(OutputError):
                objects.delete(self._place(file) for file in self._sent)
        super().close()

    def _place(self, name: str) -> StorePath:
        return _place(self.layout, name)

    def reserve(self) -> None:
        """Do nothing: space is reserved for each file when it is begun."""

    def missing_bytes(self) -> int:
        return sum(sorted(f.unwritten_bytes() for f in self.opened.values())[-SCRATCH_FILES:])

    def has(self, record: Record) -> bool:
        return self._file_of(record) in self._sent or super().has(record)

    def take_over(self, records: list[Record]) -> list[Record]:
        """Merge files again that the store has with chunks that do not count; upload others."""
        found = {record.key for record in records}
        if lacking := [file for file in self._sent if self._chunks(file) - found]:
            for file in lacking:
                del self._sent[file]
            self.make(lacking)
            records = [r for r in records if self._file_of(r) not in lacking]
            found = {record.key for record in records}
        with self._changed:
            for file in self.built:
                if file not in self._sent:
                    self._missing[file] = self._chunks(file) - found
            self._submit_complete()
        return records

    def _file_of(self, record: Record) -> str:
        return self.places[record.tensor][0]

    def _chunks(self, file: str) -> set[Key]:
        placed = self.built[file][1]
        return {(n, chunk) for n, t in placed.items() for chunk in range(chunk_count(t.elements))}

    # ------------------------------------------------------------ chunks

    def place(self, name: str, offset: int, nbytes: int) -> Bytes | None:
        self._begin_file(self.places[name][0])
        return super().place(name, offset, nbytes)

    def write(self, name: str, offset: int, data: Bytes) -> None:
        self._begin_file(self.places[name][0])
        super().write(name, offset, data)

    def _begin_file(self, file: str) -> None:
        """Reserve space for a file; wait for it while others are being uploaded."""
        if file in self._begun:
            return
        with self._changed:
            while not self._is_over and self._is_full(file):
                self._changed.wait()
            self._raise()
            if file not in self._begun:
                self._begun.add(file)
                with explaining(self.folder / file, resumable=self.resumable):
                    self.opened[file].reserve()

    def _is_full(self, file: str) -> bool:
        here = self._begun - self._sent.keys() - {file}
        return len(here) >= SCRATCH_FILES and self._count_uploads() > 0

    def _count_uploads(self) -> int:
        return sum(not upload.done() for upload in self._uploads.values())

    def note(self, records: Iterable[Record]) -> None:
        """Upload files that now have all their chunks; wait if there are too many."""
        with self._changed:
            for record in records:
                if (missing := self._missing.get(self._file_of(record))) is not None:
                    missing.discard(record.key)
            self._submit_complete()
            while not self._is_over and self._count_uploads() > SCRATCH_FILES:
                self._changed.wait(0.2)  # because nodes of a cluster begin files without waiting
            self._raise()

    # ------------------------------------------------------------ uploading

    def _submit_complete(self) -> None:
        """Upload complete files; a single file waits for the digests in its header."""
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
        self.free_place()
        opened, path = self.opened[file], self.folder / file
        with explaining(path, resumable=self.resumable):
            opened.sync()
            stored = self.upload(file)
            self._journal.note_synced(sent=file, size=stored.size, version=stored.version)
            self._sent[file] = stored
            opened.close()
            path.unlink()

    def upload(self, name: str) -> StoredObject:
        """Upload a file of the folder, and announce the progress."""
        path = self.folder / name
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

        return objects.upload(self._place(name), path, progress)

    def free_place(self) -> None:
        """Delete the output to replace, its manifest first, before anything is uploaded."""
        if self._is_free:
            return
        known = {*self._ours, *self._sent}
        found = _replaceable(self.layout, known, overwrite=self.overwrite)
        self._journal.note_synced(ours=sorted([*found, *self.built]))
        objects.delete(self._place(name) for name in found if name not in self._sent)
        self._is_free = True

    def _raise(self) -> None:
        """Raise the error of an upload that failed."""
        for upload in self._uploads.values():
            if upload.done() and (error := upload.exception()) is not None:
                raise error

    def complete(self, metadata: Metadata, *, whole: bool) -> dict[str, str]:
        """Upload the remaining files; return digests of headers, as merges need."""
        del whole
        if self._is_one:
            ((file, (_, placed)),) = self.built.items()
            header = self.final_header(file, metadata[file])
            self.built[file] = header, placed
            if file not in self._sent:
                self.opened[file].write(header, 0)
        with self._changed:
            for file in self.built:
                if file not in self._sent and file not in self._uploads:
                    self._submit(file)
            while self._count_uploads():
                self._changed.wait(0.2)  # so that Ctrl-C is noticed
            self._raise()
        return {file: bytes_digest(header) for file, (header, _) in self.built.items()}


class StorePublisher(Publisher):
    """Publishes an output in a store: file by file from the scratch folder, the manifest last."""

    def check(self, inputs: Iterable[Path], *, overwrite: bool) -> None:
        _check_place(self.layout, inputs)
        _replaceable(self.layout, noted(self.layout).ours, overwrite=overwrite)

    def finished_before(self) -> JournalContent | None:
        try:
            found = noted(self.layout)
        except OutputError:
            return None
        if found.finished is None:
            return None
        return found if bytes_digest(self.read_manifest()) == found.finished else None

    def read_manifest(self) -> bytes:
        """Return the manifest that the store has in the output's place; nothing if it has none."""
        name = manifest_path(self.layout.target).name
        return objects.read_object(_place(self.layout, name)) or b""

    def clear_leftovers(self, *, finished: bool) -> None:
        if finished:
            shutil.rmtree(self.folder, ignore_errors=True)

    def make_sink(self, metadata: Mapping[str, str]) -> FileSink:
        return StoreSink(self.folder, self.layout, metadata)

    def publish(self, output: Output, manifest: bytes) -> list[str]:
        """Upload the index and the manifest, and remove the folder."""
        sink, journal = output.sink, output.journal
        assert isinstance(sink, StoreSink)
        assert journal is not None
        name = manifest_path(self.layout.target).name
        sink.free_place()
        journal.note_synced(ours=sorted([*output.others, name]))
        journal.note_synced(finished=bytes_digest(manifest))
        for other in output.others:  # the index is the last of them
            sink.upload(other)
        objects.upload(_place(self.layout, name), manifest)
        return self.remove_folder()

    def remove_folder(self) -> list[str]:
        """Remove the scratch folder of an output that is in the store; return later problems."""
        try:
            shutil.rmtree(self.folder)
        except OSError as error:
            return [f"{self.folder}: cannot be removed: {error.strerror}"]
        finally:
            forget()
        return []
