"""An output while it is being made: a sink for its bytes, a journal, and a publisher for its name.

Chunks are written at their final offsets in any order. After each chunk a line goes into the
journal. When a merge is resumed, every chunk in the journal is hashed again on disk, and only those
that are intact count as done; so it does not matter what was synced when the process or the machine
died. The target's name appears when everything is in place.

`SoleWriter` opens the journal for a process that makes the whole output; if several processes share
it, classes in `dare.run.slices` do this.

A folder gets its name in one step: by a rename, or by exchanging names with the folder that
it replaces, so that the name always leads somewhere. A file follows its manifest. If a process dies
in between, the journal identifies the leftovers, and the next run removes them. In a replaced
folder only the files that its manifest names are deleted.
"""

from __future__ import annotations

import glob
import itertools
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

from dare.errors import (
    MismatchError,
    NotFiniteError,
    OutputError,
    RecipeError,
    VerificationError,
)
from dare.output.journal import Journal, JournalContent, Record, is_held, read_locked
from dare.output.sink import FileSink, Metadata, check_free_space, explaining, make_sink
from dare.output.targets import (
    JOURNAL_NAME,
    MANIFEST_NAME,
    MARK_NAME,
    REPLACED,
    check_replaceable,
    check_target,
    claim,
    has_mark,
    is_only_name,
    manifest_path,
    partial_folder,
    remove,
    seal,
    slice_journals,
    work_folder,
    write_synced,
    written_files,
)
from dare.planning.data import Layout
from dare.tensors.chunks import bytes_digest
from dare.tensors.system import rename, sync_folder


class Identity(NamedTuple):
    """The identity of an output: it must be the same for chunks of an earlier try to be reused."""

    fingerprint: str
    stamps: str = ""  # identifies the input files on this machine


class SoleWriter:
    """A process that makes a whole output: it holds the journal, and makes the files."""

    # Errors after which nothing is left behind.
    FATAL: tuple[type[BaseException], ...] = (
        MismatchError,
        NotFiniteError,
        RecipeError,
        VerificationError,
    )
    is_shared = False  # True if other processes may have begun, so that the folder stays

    def claim(self, folder: Path) -> list[Path]:
        """Make the folder, or find our mark on it; return the parents that did not exist."""
        return claim(folder)

    def open_journal(self, output: Output) -> JournalContent:
        """Open the output's journal; return the content that counts."""
        journal = output.journal = output.lock(JOURNAL_NAME)
        output.refuse_beside_slices()
        if output.resume:
            journal.absorb(slice_journals(output.folder).values())
        found = journal.read()
        if output.resume and found.fingerprint == output.identity.fingerprint:
            output.clear({MARK_NAME, JOURNAL_NAME, *output.sink.names})
        else:
            output.start_over(journal, found)
            found = JournalContent(ours=found.ours)
        journal.note_stamps(output.identity.stamps)
        sync_folder(output.folder)
        return found

    def open_files(self, sink: FileSink) -> None:
        """Open the files, or make them."""
        sink.make()

    def owns(self, record: Record) -> bool:  # noqa: ARG002
        """Tell whether a chunk is for this process to make."""
        return True

    def must_rehash(self, records: list[Record]) -> Collection[Record]:
        """Return the chunks that must be hashed again before they count."""
        return records


class Publisher:
    """Gives an output its name on this machine; before, it is in a folder beside that name."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    @property
    def folder(self) -> Path:
        """The folder in which the output is made."""
        return work_folder(self.layout)

    def check(self, inputs: Iterable[Path], *, overwrite: bool) -> None:
        """Refuse to touch any input, and to replace an output without `overwrite`."""
        check_target(self.layout, inputs, overwrite=overwrite)

    def finished_before(self) -> JournalContent | None:
        """Return the journal if a process died between naming the output and clearing up."""
        target, is_directory = self.layout.target, self.layout.is_directory
        home = target if is_directory else partial_folder(target)
        try:
            if not has_mark(home) or (not is_directory and (home / target.name).exists()):
                return None
            manifest = bytes_digest(manifest_path(target).read_bytes())
            found = read_locked(home / JOURNAL_NAME)
        except (OSError, OutputError):
            return None
        return found if found.finished == manifest and target.exists() else None

    def clear_leftovers(self, *, finished: bool) -> None:
        """Remove the leftovers of such a process, or of one that died while clearing up."""
        if finished or has_mark_only(self.layout):
            clear_away(self.layout, [])

    def make_sink(self, metadata: Mapping[str, str]) -> FileSink:
        """Return a sink for an output whose layout is known."""
        return make_sink(self.folder, self.layout, metadata)

    def publish(self, output: Output, manifest: bytes) -> list[str]:
        """Give a complete output its name; return later problems."""
        assert output.journal is not None
        layout = output.sink.layout
        write_synced(self.folder / manifest_path(layout.target).name, manifest)
        written = [self.folder / name for name in (*output.others, *layout.files)]
        for folder in {self.folder, *(path.parent for path in written)}:
            sync_folder(folder)
        output.journal.note_synced(finished=bytes_digest(manifest))
        output.sink.close()
        output.sink.clear_up()
        output.journal.release()
        return give_name(layout, output.made, overwrite=output.overwrite)


class Output:
    """An output under way; use as a context manager, and call `finish` at the end."""

    def __init__(
        self,
        sink: FileSink,
        publisher: Publisher,
        identity: Identity,
        *,
        resume: bool = True,
        overwrite: bool = False,
        writer: SoleWriter | None = None,
        discards: bool = False,
    ) -> None:
        self.sink = sink
        self.folder = sink.folder
        self.identity = identity
        self.resume = sink.resumable = resume
        self.overwrite = sink.overwrite = overwrite
        self.journal: Journal | None = None
        self.resumed: list[Record] = []  # chunks on the disk, from inputs with these stamps
        self.doubtful: list[Record] = []  # chunks on the disk, from inputs with other stamps
        self.started_over = ""  # the reason why an earlier try is not used
        self.others: dict[str, str] = {}  # digests of the files beside the weights
        self.made: list[Path] = []  # folders that did not exist
        self.commit: str | None = None  # the commit that it is on the hub
        self._publisher = publisher
        self._writer = writer or SoleWriter()
        self._discards = discards  # True if the next try cannot use an incomplete output
        self._removes_folder = False

    def __enter__(self) -> Self:
        try:
            with self.explaining():
                self.made = self._writer.claim(self.folder)
                found = self._writer.open_journal(self)
                self._sort(found)
                assert self.journal is not None  # opening it was the first thing
                self.sink.begin(self.journal, found)
                self._writer.open_files(self.sink)
            # Until the space is known to suffice, a failure removes a folder without finished
            # chunks; after that, only if the next try cannot use it.
            self._removes_folder = not self.resumed and not self.doubtful
            check_free_space(self.sink)
            self._removes_folder = self._discards
            self.sink.reserve()
            self.resumed = self._intact(self.resumed)
            self.doubtful = self._intact(self.doubtful)
            if not self.doubtful:
                self.resumed = self.sink.take_over(self.resumed)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None = None, *_error: object) -> None:
        is_fatal = kind is not None and issubclass(kind, self._writer.FATAL)
        self.sink.close(discard=is_fatal)
        if self.journal is not None and (
            (self._removes_folder and not self._writer.is_shared) or is_fatal
        ):
            # Nothing is in it, or this can never be finished as it was planned.
            self.journal.release()
            shutil.rmtree(self.folder, ignore_errors=True)
            for made in self.made:
                with suppress(OSError):
                    made.rmdir()
        if self.journal is not None:
            self.journal.close()
        self.journal = None

    def explaining(self, name: str = "") -> AbstractContextManager[None]:
        """Add the place in the folder to errors of writing."""
        return explaining(self.folder / name, resumable=self.resume)

    # ------------------------------------------------------------ an earlier try

    def lock(self, name: str, wait: float = 0) -> Journal:
        """Open and lock one of the journals."""
        path = self.folder / name
        if os.path.lexists(path) and not is_only_name(path):
            remove(path)
        return Journal(path, self.identity.fingerprint, wait=wait)

    def refuse_beside_slices(self, wait: float = 0) -> None:
        """Refuse to make an output that slices are making, after waiting for them to end."""
        journals, deadline = slice_journals(self.folder), time.monotonic() + wait
        while running := [part for part, path in journals.items() if is_held(path)]:
            if time.monotonic() >= deadline:
                raise OutputError(
                    f"{self.folder}: slices are writing this output "
                    f"({', '.join(map(str, running))}); wait until they are done, or stop them"
                )
            time.sleep(0.01)

    def start_over(self, journal: Journal, found: JournalContent) -> None:
        """Remove an earlier try; note why, unless the user asked for it."""
        journal.start()
        if self.clear({MARK_NAME, JOURNAL_NAME}) and self.resume:
            self.started_over = "its journal cannot be read, so it starts over"
            if found.fingerprint is not None:
                self.started_over = f"{found.origin}, and is not used"

    def clear(self, kept: Collection[str]) -> bool:
        """Remove all other files, also sidecars of an earlier try; tell if there were any."""
        held = (MARK_NAME, JOURNAL_NAME)
        folders = [self.folder]
        leftovers = []
        for path in itertools.chain.from_iterable(map(Path.iterdir, folders)):
            name = path.relative_to(self.folder).as_posix()
            is_plain = path.is_dir() and not path.is_symlink()
            if is_plain and any(file.startswith(f"{name}/") for file in kept):
                folders.append(path)
            elif name not in kept or (name not in held and not is_only_name(path)):
                leftovers.append(path)
        for leftover in leftovers:
            remove(leftover)
        return bool(leftovers)

    def _sort(self, found: JournalContent) -> None:
        """Sort chunks by whether their inputs are known to be the same."""
        for stamps, record in found.records.values():
            if self.sink.expects(record) and self._writer.owns(record):
                is_same = stamps == self.identity.stamps
                (self.resumed if is_same else self.doubtful).append(record)

    def _intact(self, records: list[Record]) -> list[Record]:
        """Keep the records of chunks that are on the disk as the journal says."""
        to_rehash = self._writer.must_rehash(records)
        with ThreadPoolExecutor() as pool:
            intact = list(itertools.compress(to_rehash, pool.map(self.sink.has, to_rehash)))
        checked = {record.key for record in to_rehash}
        return [record for record in records if record.key not in checked] + intact

    def confirm(self, records: Iterable[Record]) -> None:
        """Accept doubtful chunks whose inputs were found to be the same."""
        confirmed = list(records)
        self.record(confirmed)
        self.resumed = self.sink.take_over([*self.resumed, *confirmed])
        self.doubtful = []

    # ------------------------------------------------------------ what is done

    def record(self, records: Sequence[Record]) -> None:
        """Note that some chunks are complete."""
        assert self.journal is not None  # it is opened first
        with self.explaining(JOURNAL_NAME):
            self.journal.add(records)
        self.sink.note(records)

    def add_files(self, files: Mapping[str, bytes | Path]) -> None:
        """Write or copy the files beside the weights."""
        for name, content in files.items():
            path = self.folder / name
            with self.explaining(name):
                path.parent.mkdir(parents=True, exist_ok=True)
                self.others[name] = write_synced(path, content)

    def finish(
        self, metadata: Metadata, manifest: Mapping[str, Any], *, whole: bool = False
    ) -> list[str]:
        """Write the final headers and the manifest, sync, give the name; return later problems.

        For weights, the manifest has the digest of the header, since tensors have their own
        digests, or the digest of the `whole` file.
        """
        with self.explaining():
            self._removes_folder = False
            digests = self.sink.complete(metadata, whole=whole)
            self.add_files(self.sink.layout.indexes())
            return self._publisher.publish(self, seal(manifest, {**digests, **self.others}))


# ---------------------------------------------------------------- giving the name


def give_name(layout: Layout, made: Sequence[Path], *, overwrite: bool) -> list[str]:
    """Give a complete output its name, sync the folders `made` for it; return later problems."""
    target, folder = layout.target, partial_folder(layout.target)
    name = _name_directory if layout.is_directory else _name_file
    name(folder, layout, overwrite=overwrite)
    problems: list[str] = []
    for parent in dict.fromkeys((target.parent, *(path.parent for path in made))):
        _attempt(problems, sync_folder, parent)
    clear_away(layout, problems)
    return problems


def _name_directory(folder: Path, layout: Layout, *, overwrite: bool) -> None:
    target = layout.target
    if rename(folder, target):
        return
    _refuse_newcomer(layout, overwrite=overwrite)
    if not rename(folder, target, exchange=True):
        target.rename(target.with_name(f"{target.name}{REPLACED}{os.getpid()}"))
        folder.rename(target)


def _name_file(folder: Path, layout: Layout, *, overwrite: bool) -> None:
    target = layout.target
    manifest = manifest_path(target)
    if os.path.lexists(target):
        _refuse_newcomer(layout, overwrite=overwrite)
        if target.suffix != ".safetensors":  # either name of the weights has a manifest beside it
            (folder / target.name).replace(target)
            sync_folder(target.parent)
            (folder / manifest.name).replace(manifest)
            return
    (folder / manifest.name).replace(manifest)
    sync_folder(target.parent)
    weights = folder / target.name
    if overwrite:
        weights.replace(target)
    elif not rename(weights, target):
        _refuse_newcomer(layout, overwrite=False)


def _refuse_newcomer(layout: Layout, *, overwrite: bool) -> None:
    """Refuse to replace a file that appeared during the merge, unless that is allowed."""
    if not overwrite:
        what = "appeared during the merge; move it away and run the same merge again"
        raise OutputError(f"{layout.target}: {what}")
    check_replaceable(layout)


# ---------------------------------------------------------------- clearing away


def has_mark_only(layout: Layout) -> bool:
    """Tell whether nothing but a mark or an empty folder is left to clear away."""
    target = layout.target
    if layout.is_directory:
        return has_mark(target) and not os.path.lexists(target / JOURNAL_NAME)
    folder = partial_folder(target)
    is_done = target.exists() and folder.is_dir() and not folder.is_symlink()
    return is_done and not set(os.listdir(folder)) - {MARK_NAME}


def clear_away(layout: Layout, problems: list[str]) -> None:
    """Remove the replaced output, and the temporary files of this one."""
    home = layout.target
    if layout.is_directory:
        for replaced in _replaced(home):
            _attempt(problems, remove_output, replaced)
        _attempt(problems, sync_folder, home.parent)
        if problems:
            return  # the journal stays, so the next run will clear away
    else:
        home = partial_folder(home)
    for name in (JOURNAL_NAME, MARK_NAME):  # the mark last: it identifies leftovers as ours
        if not problems:
            _attempt(problems, os.unlink, home / name)
    if not problems and not layout.is_directory:
        _attempt(problems, os.rmdir, home)


def _replaced(target: Path) -> Iterator[Path]:
    """Yield the folders of outputs that have been replaced."""
    names = f"{glob.escape(target.name)}{REPLACED}*"
    for path in (partial_folder(target), *target.parent.glob(names)):
        is_begun = has_mark(path) and not os.path.lexists(path / MANIFEST_NAME)
        is_under_way = is_begun or os.path.lexists(path / JOURNAL_NAME)
        if path.is_dir() and not path.is_symlink() and not is_under_way:
            yield path


def remove_output(folder: Path) -> None:
    """Remove the files of a folder that its manifest names, and the manifest last."""
    if not any(folder.iterdir()):
        folder.rmdir()
        return
    manifest = folder / MANIFEST_NAME
    files = written_files(folder)
    for file in sorted(files - {manifest}):
        file.unlink(missing_ok=True)
    subfolders = {parent for file in files for parent in file.parents if folder in parent.parents}
    for subfolder in sorted(subfolders, reverse=True):
        with suppress(FileNotFoundError):
            subfolder.rmdir()
    manifest.unlink()
    folder.rmdir()


def _attempt(problems: list[str], action: Callable[[Path], None], path: Path) -> None:
    """Do something; only note a failure, as the output is complete without it."""
    try:
        action(path)
    except FileNotFoundError:
        pass
    except (OSError, OutputError) as error:
        problems.append(str(error))
