"""From a complete folder to an output with its name, so that nothing else is ever seen there.

A directory gets its name in one step: by a rename, or by exchanging names with the one that it
replaces, so that the name never leads nowhere. A file follows its manifest. What is left over when
a process dies in between is known by the journal, and the next run removes it. Of a replaced
directory only the files are deleted that its manifest names.
"""

from __future__ import annotations

import ctypes
import errno
import glob
import io
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import xxhash

from dare.errors import OutputError
from dare.output.journal import JournalContent, read_locked
from dare.output.targets import (
    JOURNAL_NAME,
    MANIFEST_NAME,
    MARK,
    MARK_NAME,
    REPLACED,
    check_replaceable,
    has_mark,
    manifest_path,
    partial_folder,
    written_files,
)
from dare.planning.data import Layout
from dare.tensors.chunks import bytes_digest
from dare.tensors.files import NO_LINKS, as_stream, open_input

COPIED_BYTES = 1 << 20

_NO_SUCH_CALL = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM}


def give_name(layout: Layout, made: Sequence[Path], *, overwrite: bool) -> list[str]:
    """Give a complete output its name, and sync the folders `made` for it; return later faults."""
    target, folder = layout.target, partial_folder(layout.target)
    name = _name_directory if layout.is_directory else _name_file
    name(folder, layout, overwrite=overwrite)
    problems: list[str] = []
    for parent in dict.fromkeys((target.parent, *(path.parent for path in made))):
        _attempt(problems, sync_folder, parent)
    _clear_away(layout, problems)
    return problems


def _name_directory(folder: Path, layout: Layout, *, overwrite: bool) -> None:
    target = layout.target
    if _rename(folder, target, "new"):
        return
    if not overwrite:
        raise _appeared(target)
    check_replaceable(layout)  # it may have come since the merge began
    if not _rename(folder, target, "exchange"):
        target.rename(target.with_name(f"{target.name}{REPLACED}{os.getpid()}"))
        folder.rename(target)


def _name_file(folder: Path, layout: Layout, *, overwrite: bool) -> None:
    target = layout.target
    manifest = manifest_path(target)
    if os.path.lexists(target):
        if not overwrite:
            raise _appeared(target)
        check_replaceable(layout)  # it may have come since the merge began
    (folder / manifest.name).replace(manifest)
    sync_folder(target.parent)
    weights = folder / target.name
    if overwrite:
        weights.replace(target)
    elif not _rename(weights, target, "new"):
        raise _appeared(target)


def _appeared(target: Path) -> OutputError:
    return OutputError(
        f"{target}: appeared during the merge; move it away and run the same merge again"
    )


def _rename(old: Path, new: Path, how: str) -> bool:
    """Rename to a name that is `new`, or `exchange` two names; False if that cannot be done."""
    system = {"linux": ("renameat2", 1, 2), "darwin": ("renamex_np", 4, 2)}.get(sys.platform)
    call = getattr(ctypes.CDLL(None, use_errno=True), system[0], None) if system else None
    if system is not None and call is not None:
        paths = os.fsencode(old), os.fsencode(new)
        flag = ctypes.c_uint(system[1] if how == "new" else system[2])
        here = ctypes.c_int(-100)  # AT_FDCWD
        given = (here, paths[0], here, paths[1]) if system[0] == "renameat2" else paths
        if call(*given, flag) == 0:
            return True
        error = ctypes.get_errno()
        if error == errno.EEXIST:
            return False
        if error not in _NO_SUCH_CALL:
            raise OSError(error, os.strerror(error), str(new))
    if how == "exchange" or os.path.lexists(new):
        return False
    old.rename(new)
    return True


# ---------------------------------------------------------------- clearing away


def finished_before(layout: Layout) -> JournalContent | None:
    """Return the journal of an output whose process died after giving the name, else None."""
    target = layout.target
    home = target if layout.is_directory else partial_folder(target)
    try:
        if not has_mark(home) or (not layout.is_directory and (home / target.name).exists()):
            return None
        manifest = bytes_digest(manifest_path(target).read_bytes())
        found = read_locked(home / JOURNAL_NAME)
    except (OSError, OutputError):
        return None
    return found if found.finished == manifest and target.exists() else None


def clear_leftovers(layout: Layout, *, finished: bool) -> None:
    """Remove what such a process left, or one that died while removing it."""
    if finished or _has_mark_only(layout):
        _clear_away(layout, [])


def _has_mark_only(layout: Layout) -> bool:
    """Tell whether only a mark or an empty folder is left of the making of an output."""
    target = layout.target
    if layout.is_directory:
        return has_mark(target) and not os.path.lexists(target / JOURNAL_NAME)
    folder = partial_folder(target)
    is_done = target.exists() and folder.is_dir() and not folder.is_symlink()
    return is_done and not set(os.listdir(folder)) - {MARK_NAME}


def _clear_away(layout: Layout, problems: list[str]) -> None:
    """Remove the replaced output, and what only served the making of this one."""
    home = layout.target
    if layout.is_directory:
        for replaced in _replaced(home):
            _attempt(problems, _remove_output, replaced)
        _attempt(problems, sync_folder, home.parent)
        if problems:
            return  # what tells the next run to clear away stays
    else:
        home = partial_folder(home)
    for name in (JOURNAL_NAME, MARK_NAME):  # by the mark what is left is known to the last
        if not problems:
            _attempt(problems, os.unlink, home / name)
    if not problems and not layout.is_directory:
        _attempt(problems, os.rmdir, home)


def _replaced(target: Path) -> Iterator[Path]:
    """Yield the folders of outputs that have been replaced."""
    names = f"{glob.escape(target.name)}{REPLACED}*"
    for path in (partial_folder(target), *target.parent.glob(names)):
        is_under_way = os.path.lexists(path / JOURNAL_NAME)
        if path.is_dir() and not path.is_symlink() and not is_under_way:
            yield path


def _remove_output(folder: Path) -> None:
    """Remove of a directory what its manifest names, the manifest last, and no more."""
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
    """Do something that the output no longer depends on."""
    try:
        action(path)
    except FileNotFoundError:
        pass
    except (OSError, OutputError) as error:
        problems.append(str(error))


def remove(path: Path) -> None:
    """Remove a file, a link or a folder of ours."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


# ---------------------------------------------------------------- what is on the disk


def claim(folder: Path) -> list[Path]:
    """Make a folder of ours, or find our mark on it; return the parents that did not exist."""
    made = [path for path in folder.parents if not os.path.lexists(path)]
    if not made and not folder.parent.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder.parent))
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir()
    except FileExistsError:
        if folder.is_symlink() or not folder.is_dir():
            what = "the output is made in this folder, but this is not a folder; move it away"
            raise OutputError(f"{folder}: {what}") from None
        found = next(folder.iterdir(), None)
        if found is not None and not has_mark(folder):
            what = f"contains {found.name} and was not made by dare; move it away"
            raise OutputError(f"{folder}: {what}") from None
    if not has_mark(folder):
        _mark(folder)
    return made


def _mark(folder: Path) -> None:
    """Write our mark, as others may do at the same moment."""
    file_descriptor = os.open(folder / MARK_NAME, os.O_WRONLY | os.O_CREAT | NO_LINKS, 0o666)
    try:
        os.write(file_descriptor, MARK)
        os.fsync(file_descriptor)
    finally:
        os.close(file_descriptor)


def write_synced(path: Path, content: bytes | Path) -> str:
    """Write or copy a file, sync it and return its digest; a link of that name is replaced."""
    path.unlink(missing_ok=True)
    digest = xxhash.xxh3_128()
    with ExitStack() as stack:
        stream = (
            as_stream(open_input(content)) if isinstance(content, Path) else io.BytesIO(content)
        )
        source = stack.enter_context(stream)
        file = stack.enter_context(path.open("xb"))
        while piece := source.read(COPIED_BYTES):
            digest.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    file_descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file_descriptor)
    finally:
        os.close(file_descriptor)
