"""A complete output gets its name, and what only served its making goes.

A directory gets its name in one step: by a rename, or by exchanging names with the one that it
replaces, so that the name never leads nowhere. A file follows its manifest. What is left over when
a process dies in between is known by the journal, and the next run removes it. Of a replaced
directory only the files are deleted that its manifest names.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from dare.errors import OutputError
from dare.output.targets import (
    JOURNAL_NAME,
    MANIFEST_NAME,
    MARK_NAME,
    REPLACED,
    check_replaceable,
    has_mark,
    manifest_path,
    partial_folder,
    written_files,
)
from dare.planning.data import Layout
from dare.tensors.system import rename, sync_folder


def give_name(layout: Layout, made: Sequence[Path], *, overwrite: bool) -> list[str]:
    """Give a complete output its name, sync the folders `made` for it; return what fails later."""
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
        if target.suffix != ".safetensors":  # which of the two there are now, a manifest has it
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
    """Refuse to replace what appeared during the merge, unless that is allowed."""
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
        is_begun = has_mark(path) and not os.path.lexists(path / MANIFEST_NAME)
        is_under_way = is_begun or os.path.lexists(path / JOURNAL_NAME)
        if path.is_dir() and not path.is_symlink() and not is_under_way:
            yield path


def _remove_output(folder: Path) -> None:
    """Remove the files of a directory that its manifest names, and the manifest last."""
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
    """Do something; a failure is noted, as the output is complete without it."""
    try:
        action(path)
    except FileNotFoundError:
        pass
    except (OSError, OutputError) as error:
        problems.append(str(error))
