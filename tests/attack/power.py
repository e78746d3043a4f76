"""What a power cut may leave on a disk, worked out from the log of a run.

`watching.py` has written down every call that changed files, with the data. `cut` plays the first
of them on a disk that keeps only what it must: of a file what was there when it was last synced, of
a folder the names it had when it was last synced. Everything later is kept or forgotten by seed:

* of the data of a file any subset of its sectors, and its length apart from them;
* of the names in a folder any number of changes, the later ones first; folders are independent;
* a rename happens in both folders or in none, and an exchange is one change.

That is less than any file system in use promises, as far as it says what it promises.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from watching import Call

Contents = dict[str, bytes | None]
"""Every path below a folder: a file's bytes, a link's target, None for a folder."""
SECTOR = 512


def read_log(log: Path, root: Path) -> list[Call]:
    """The calls of a run, with paths relative to the folder that was watched."""
    calls: list[Call] = []
    with log.open("rb") as file, suppress(EOFError):
        while True:
            call: Call = pickle.load(file)
            path, other = relative(call.path, root), relative(call.other, root)
            calls.append(call._replace(path=path, other=other))
    return calls


def relative(path: str, root: Path) -> str:
    """A path below the root; what has been deleted while it was open has none."""
    if not path or path.endswith(" (deleted)"):
        return ""
    return str(Path(path).relative_to(root))


@dataclass(eq=False)
class File:
    """Data that is on the disk, and changes that may not be."""

    durable: bytes
    size: int
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    """A place and a sector's data, or a new length and None."""

    def resize(self, size: int) -> None:
        self.size = size
        self.pending.append((size, None))

    def write(self, offset: int, data: bytes) -> None:
        if offset + len(data) > self.size:
            self.resize(offset + len(data))
        start = 0
        while start < len(data):
            stop = start + SECTOR - (offset + start) % SECTOR
            self.pending.append((offset + start, data[start:stop]))
            start = stop

    def sync(self) -> None:
        self.durable = self.after([True] * len(self.pending))
        self.pending = []

    def after(self, kept: Sequence[bool]) -> bytes:
        """The data if these of the pending changes are kept."""
        data = bytearray(self.durable)
        for is_kept, (place, sector) in zip(kept, self.pending, strict=True):
            if is_kept and sector is None:
                del data[place:]
                data.extend(bytes(place - len(data)))
            elif is_kept and sector is not None and place < len(data):
                data[place : place + len(sector)] = sector[: len(data) - place]
        return bytes(data)


@dataclass(eq=False)
class Folder:
    """Names, as a running system sees them."""

    names: dict[str, Folder | File] = field(default_factory=dict)


Names = dict[Folder, dict[str, Folder | File]]
"""What is in folders."""


@dataclass
class Renaming:
    """A change of names: what each of them stands for afterwards."""

    changes: tuple[tuple[Folder, str, Folder | File | None], ...]
    is_durable: bool = False


class Disk:
    """A disk on which calls are played."""

    def __init__(self, start: Contents) -> None:
        self.root = Folder()
        self.renamings: list[Renaming] = []
        for name in sorted(start):
            data = start[name]
            folder, last = self._find(name)
            folder.names[last] = Folder() if data is None else File(data, len(data))
        self._first = {folder: dict(folder.names) for folder in walk(self.root)}

    def play(self, call: Call) -> None:
        """Do what a call did."""
        if not call.path:
            return
        if call.path == ".":
            folder, last, found = self.root, "", self.root
        else:
            folder, last = self._find(call.path)
            found = folder.names.get(last)
        match call.name:
            case "create":
                self._rename((folder, last, File(b"", 0)))
            case "mkdir":
                self._rename((folder, last, Folder()))
            case "unlink" | "rmdir":
                self._rename((folder, last, None))
            case "rename" | "exchange":
                other, other_last = self._find(call.other)
                swapped = other.names[other_last] if call.name == "exchange" else None
                self._rename((folder, last, swapped), (other, other_last, found))
            case "link":
                self._rename((*self._find(call.other), found))
            case "write":
                as_file(found).write(call.offset, call.data)
            case "resize" | "truncate":
                as_file(found).resize(call.offset)
            case "allocate":
                as_file(found).resize(max(as_file(found).size, call.offset))
            case "sync" if isinstance(found, Folder):
                self._sync_names(found)
            case "sync":
                as_file(found).sync()
            case "open":
                pass
            case _:
                raise NotImplementedError(call.name)

    def _find(self, path: str) -> tuple[Folder, str]:
        *parents, last = path.split("/")
        folder = self.root
        for parent in parents:
            below = folder.names[parent]
            assert isinstance(below, Folder)
            folder = below
        return folder, last

    def _rename(self, *changes: tuple[Folder, str, Folder | File | None]) -> None:
        self.renamings.append(Renaming(changes))
        for folder, name, what in changes:
            put(folder.names, name, what)

    def _sync_names(self, folder: Folder) -> None:
        for renaming in self.renamings:
            if any(folder is touched for touched, _, _ in renaming.changes):
                renaming.is_durable = True

    def after_cut(self, generator: random.Random | None) -> Contents:
        """What is found after a power cut; without a generator all is forgotten that may be."""
        names: Names = {folder: dict(first) for folder, first in self._first.items()}
        cut: set[Folder] = set()
        stays = 1.0 if generator is None else generator.choice((0.5, 0.8, 0.95))
        for renaming in self.renamings:
            touched = {folder for folder, _, _ in renaming.changes}
            is_lucky = generator is not None and generator.random() < stays
            if not renaming.is_durable and (cut & touched or not is_lucky):
                cut |= touched
                continue
            for folder, name, what in renaming.changes:
                put(names.setdefault(folder, {}), name, what)

        def remembered(file: File) -> bytes:
            luck = 0.0 if generator is None else generator.choice((0.0, 0.5, 0.9, 1.0))
            return file.after([bool(generator and generator.random() < luck) for _ in file.pending])

        return dict(gather(self.root, "", names, remembered))

    def now(self) -> Contents:
        """What the running system sees."""
        names = {folder: folder.names for folder in walk(self.root)}
        return dict(
            gather(self.root, "", names, lambda file: file.after([True] * len(file.pending)))
        )


def gather(
    folder: Folder, prefix: str, names: Names, remembered: Callable[[File], bytes]
) -> Iterator[tuple[str, bytes | None]]:
    """All below a folder, by relative path."""
    for name, what in names.get(folder, {}).items():
        if isinstance(what, Folder):
            yield prefix + name, None
            yield from gather(what, f"{prefix}{name}/", names, remembered)
        else:
            yield prefix + name, remembered(what)


def as_file(found: Folder | File | None) -> File:
    """What must be a file."""
    assert isinstance(found, File)
    return found


def put(names: dict[str, Folder | File], name: str, what: Folder | File | None) -> None:
    """Let a name stand for something, or for nothing."""
    if what is None:
        names.pop(name, None)
    else:
        names[name] = what


def walk(folder: Folder) -> Iterator[Folder]:
    """A folder and all below it."""
    yield folder
    for below in folder.names.values():
        if isinstance(below, Folder):
            yield from walk(below)


def played(start: Contents, calls: Sequence[Call]) -> Disk:
    """A disk after these calls."""
    disk = Disk(start)
    for call in calls:
        disk.play(call)
    return disk


def cut(start: Contents, calls: Sequence[Call], seed: object | None) -> Contents:
    """What a power cut after these calls leaves; None forgets all that may be forgotten."""
    return played(start, calls).after_cut(None if seed is None else random.Random(repr(seed)))
