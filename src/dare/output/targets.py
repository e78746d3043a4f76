"""The names that belong to an output, and the checks before anything is written there.

Three names belong to an output: its own, its manifest's, and `OUT.partial`, where it is made.
Before anything is written these are compared with every input by device and inode, so that a second
path to an input (a link, a bind mount) is recognised. A folder in which an output is made has a
mark; a folder without it is somebody else's and is not changed.

Nothing is replaced that dare did not write. A model is recognised by the check in its header or by
the digest in its manifest (`check_replaceable`), a page or a recipe by its beginning
(`check_free`).

A sealed document, such as a manifest, shows whether it has been changed: it lists the files that it
describes, and ends with the digest of its own text, computed while that digest is all zeros.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path, PureWindowsPath
from typing import Any

import xxhash

from dare.checks.inputs import file_identity
from dare.errors import ExistsError, InputError, OutputError
from dare.planning.data import Layout, is_directory_target
from dare.planning.slices import Slice
from dare.stores.locations import is_stored
from dare.tensors.chunks import DIGEST_LENGTH, SEAL, UNKNOWN, bytes_digest, file_digest
from dare.tensors.files import (
    as_stream,
    cache_folder,
    open_input,
    read_beginning,
    read_limited,
)
from dare.tensors.header import json_bytes, read_header
from dare.tensors.system import NO_LINKS

MANIFEST_NAME = "dare-manifest.json"
MARK_NAME = "dare-partial.txt"
MARK = b"dare makes an output here, and may delete everything in this folder.\n"
JOURNAL_NAME = "journal.jsonl"
REPLACED = ".replaced-"  # in the name of a replaced output, if names cannot be exchanged
COPIED_BYTES = 1 << 20
LONGEST_NAME = 255  # bytes, on every file system that people use

# Patterns for the beginnings of the small files that dare writes.
KINDS = {
    "page": rb'\A<!doctype html>[\s\S]*<p class="brand">dare <span>',
    "analysis": rb'\A\s*\{\s*"schema":\s*"dare-',
    "recipe": rb"(?m)\A[^\0]*?^[ \t]*(\[\[?models\]|(base|models|method)\s*=)",
    "table": rb"\A\w+(,\w+)*\r\n",
    "signature": rb'\A\s*\{\s*"mediaType":\s*"application/vnd\.dev\.sigstore\.bundle',
    "demonstration": rb"\A\x89PNG\r\n[\s\S]{,200}dare demo",
}
BEGINNING_BYTES = 1 << 20

MAX_MANIFEST_BYTES = 1 << 30  # more than for a million tensors and ten models

Identity = tuple[int, int]


def partial_folder(target: Path) -> Path:
    """Return the folder beside an output in which it is made."""
    return target.with_name(target.name + ".partial")


def work_folder(layout: Layout) -> Path:
    """Return the folder in which an output is made: beside it, or for a store in the scratch."""
    if not layout.is_sent:
        return partial_folder(layout.target)
    address = str(layout.target)
    scratch = layout.scratch or default_scratch()
    return scratch / f"{layout.target.name}-{bytes_digest(address.encode())[:8]}.partial"


def default_scratch() -> Path:
    """Return the scratch folder of this user, where the next try finds unfinished outputs."""
    return cache_folder() / "uploads"


def manifest_path(target: Path) -> Path:
    """Return the path of an output's manifest."""
    if is_directory_target(target):
        return target / MANIFEST_NAME
    return target.with_name(target.name + ".manifest.json")


def slice_journal(folder: Path, part: Slice) -> Path:
    """Return the path of a slice's journal."""
    return folder / f"slice-{part.number}-of-{part.count}.jsonl"


def slice_journals(folder: Path) -> dict[Slice, Path]:
    """Return the journals of slices in a folder, in order."""
    journals = {}
    for path in folder.glob("slice-*-of-*.jsonl"):
        if name := re.fullmatch(r"slice-([0-9]{1,6})-of-([0-9]{1,6})", path.stem):
            journals[Slice(*map(int, name.groups()))] = path
    return dict(sorted(journals.items()))


def has_mark(folder: Path) -> bool:
    """Tell whether an output is being made in a folder, or was made there."""
    mark = folder / MARK_NAME
    if folder.is_symlink() or mark.is_symlink() or not mark.is_file():
        return False
    with mark.open("rb") as file:
        text = file.read(len(MARK) + 1)
    return MARK.startswith(text.rstrip(b"\0"))  # its writer may have died in the middle


def is_only_name(path: Path) -> bool:
    """Tell whether a file has no other name, so that writing changes no other file."""
    status = path.lstat()
    return stat.S_ISREG(status.st_mode) and status.st_nlink == 1


def check_target(layout: Layout, inputs: Iterable[Path], *, overwrite: bool) -> None:
    """Refuse to touch any input, and to replace an output without `overwrite`."""
    target = layout.target
    _check_name(target)
    _check_inputs(layout, inputs)
    if not os.path.lexists(target):
        _check_manifest(target)
        return
    if not overwrite:
        raise ExistsError(target)
    check_replaceable(layout)


def refuse_existing(target: Path | None) -> None:
    """Refuse an output that exists, unless there are leftovers to clear away."""
    if target is None or is_stored(target) or not os.path.lexists(target):
        return
    if not (has_mark(target) or partial_folder(target).exists()):
        raise ExistsError(target)


def check_replaceable(layout: Layout) -> None:
    """Refuse to replace an output that dare did not write, or that has changed since."""
    target = layout.target
    if target.is_symlink():
        raise OutputError(f"{target}: is a link, and links are not replaced; give its target")
    if layout.is_directory != target.is_dir():
        raise OutputError(f"{target}: is {'no' * layout.is_directory or 'a'} folder; rename it")
    if layout.is_directory:
        _check_folder(target)
        return
    _check_manifest(target)
    if target.stat().st_size == 0:
        return
    manifest = manifest_path(target)
    digests = set[str]()
    # A process that dies while it publishes leaves the manifest in the second place.
    for place in (manifest, partial_folder(target) / manifest.name):
        with suppress(InputError):
            digests |= set(read_sealed(place)["files"].values())
    if not _is_as_written(target, digests):
        raise OutputError(
            f"{target}: was not made by dare, or has changed since (neither its header's check "
            f"nor {manifest.name} matches it), so it is not replaced; choose another output"
        )


def check_free(path: Path | None, kind: str, *, overwrite: bool) -> None:
    """Refuse to replace a file by a small one without `overwrite`, or if it is of another kind."""
    if path is None or not os.path.lexists(path):
        return
    if not overwrite:
        raise OutputError(f"{path}: exists already; choose another path, or add --overwrite")
    beginning = read_beginning(path, BEGINNING_BYTES) if path.is_file() else b""
    if beginning.strip() and not re.search(KINDS[kind], beginning):
        raise OutputError(
            f"{path}: was not made by dare (it does not begin like the {kind} that would be "
            "written there), so it is not replaced; remove it yourself, or choose another path"
        )


def write_file(path: Path, content: bytes, kind: str | None, *, overwrite: bool = True) -> None:
    """Write a file, and create its folders; never replace a file of another kind."""
    if kind is not None:
        check_free(path, kind, overwrite=overwrite)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb" if overwrite else "xb") as file:
            file.write(content)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror or error}") from None


def _check_name(target: Path) -> None:
    if not target.name or target.name == "..":
        raise OutputError(f"{target}: is not a name for an output; add a name")
    longest = f"{target.name}{REPLACED}{os.getpid()}"
    if not is_directory_target(target):
        longest = manifest_path(target).name
    if (surplus := len(os.fsencode(longest)) - LONGEST_NAME) > 0:
        raise OutputError(f"{target}: the name is {surplus} bytes too long; choose a shorter name")
    if target.exists() and not (target.is_file() or target.is_dir()):
        raise OutputError(f"{target}: is a device or a pipe; choose another output")


# ---------------------------------------------------------------- inputs


def _check_inputs(layout: Layout, inputs: Iterable[Path]) -> None:
    target, partial = layout.target, partial_folder(layout.target)
    at_risk = dict(_identities((target, manifest_path(target), partial)))
    for folder in (target, partial):
        if folder.is_dir():
            at_risk |= _identities(_entries(folder))
    for file in inputs:
        for place in () if is_stored(file) else _places(file):
            if (danger := at_risk.get(file_identity(place))) is None:
                continue
            if danger == partial or partial in danger.parents:
                what = f"would be made in {partial}, where the input {file} is"
            else:
                what = f"the output would overwrite the input {file}"
                what += "" if place == file else f", which is in {place}"
            raise OutputError(f"{target}: {what}; choose another output")


def _places(file: Path) -> Iterator[Path]:
    """Yield an input, its parent folders, and those of the target of its links."""
    given = Path(os.path.abspath(file))
    real = Path(os.path.realpath(file))
    yield file
    yield from dict.fromkeys((*given.parents, real, *real.parents))


def _entries(folder: Path) -> Iterator[Path]:
    for path, folders, files in os.walk(folder):
        yield from (Path(path, name) for name in (*folders, *files))


def _identities(paths: Iterable[Path]) -> Iterator[tuple[Identity | None, Path]]:
    """Yield the identity of each path, and of its target if it is a link."""
    for path in paths:
        for follow in (False, True):
            if (identity := file_identity(path, follow=follow)) is not None:
                yield identity, path


# ---------------------------------------------------------------- outputs that may be replaced


def _check_manifest(target: Path) -> None:
    """Refuse to replace a file that only has the name of a manifest."""
    manifest = manifest_path(target)
    if manifest.parent == target or not os.path.lexists(manifest):
        return
    try:
        if not manifest.is_symlink():
            read_sealed(manifest)
            return
    except InputError:
        pass
    raise OutputError(
        f"{manifest}: is not a manifest of dare, so it is not replaced; choose another output"
    )


def _check_folder(target: Path) -> None:
    """Refuse to replace a folder that contains anything dare did not write."""
    if not any(target.iterdir()):
        return
    if not (target / MANIFEST_NAME).exists():
        raise OutputError(
            f"{target}: was not made by dare (it has no {MANIFEST_NAME}), so it is "
            "not replaced; remove it yourself, or choose another output"
        )
    ours = written_files(target)
    digests = read_sealed(target / MANIFEST_NAME)["files"]
    folders = {parent for path in ours for parent in path.parents}
    for path in _entries(target):
        is_folder = path.is_dir() and not path.is_symlink()
        name = path.relative_to(target).as_posix()
        if path not in (folders if is_folder else ours):
            what = ", which dare did not write"
        elif name in digests and not _is_as_written(path, [digests[name]]):
            what = ", which has changed since dare wrote it"
        else:
            continue
        raise OutputError(
            f"{target}: contains {name}{what}, so it is not replaced; move that file away, "
            "or choose another output"
        )


def _is_as_written(file: Path, digests: Collection[str]) -> bool:
    """Tell whether a file is as dare wrote it, by its header or else by its digest."""
    try:
        if file.suffix == ".safetensors":
            with closing(open_input(file)) as opened:
                raw = read_beginning(file, read_header(opened, str(file)).data_start)
            if bytes_digest(raw) in digests or has_fitting_check(raw):
                return True
        return bool(digests) and file_digest(file) in digests
    except InputError:
        return False
    except OSError as error:
        raise OutputError(f"{file}: cannot be read: {error.strerror or error}") from None


def written_files(folder: Path) -> set[Path]:
    """Return the files of an output folder that its manifest lists, and the manifest."""
    try:
        names = read_sealed(folder / MANIFEST_NAME)["files"]
    except InputError as error:
        raise OutputError(
            f"{error}; so the files that dare wrote are not known, and {folder} is not replaced"
        ) from None
    return {folder / name for name in (*names, MANIFEST_NAME, MARK_NAME, JOURNAL_NAME)}


# ---------------------------------------------------------------- sealed documents


def seal(document: Mapping[str, Any], files: Mapping[str, str]) -> bytes:
    """Return a document as text, with the digests of its files and its own."""
    text = json_bytes({**document, "files": dict(files), SEAL: UNKNOWN}, indent=1)
    return _with_seal(text, bytes_digest(text))


def _with_seal(text: bytes, digest: str) -> bytes:
    """Replace the digest at the end."""
    head, _, tail = text.rpartition(f'"{SEAL}": "'.encode())
    return head + f'"{SEAL}": "{digest}'.encode() + tail[DIGEST_LENGTH:]


def has_fitting_check(header: bytes) -> bool:
    """Tell whether the check in a header, which merges and delta files have, matches the header."""
    check = re.search(rb'\\"%b\\":\s?\\"([0-9a-f]{%d})\\"' % (SEAL.encode(), DIGEST_LENGTH), header)
    if check is None:
        return False
    return bytes_digest(header.replace(check[1], UNKNOWN.encode(), 1)) == check[1].decode()


def read_sealed(path: Path) -> dict[str, Any]:
    """Read a sealed document; InputError if it is not one, or has been changed."""
    text = read_limited(path, MAX_MANIFEST_BYTES)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: the manifest is not valid JSON: {error}") from None
    if not isinstance(document, dict) or SEAL not in document:
        raise InputError(f"{path}: is not a manifest made by dare")
    if bytes_digest(_with_seal(text, UNKNOWN)) != document[SEAL]:
        raise InputError(f"{path}: the manifest has been changed since it was written")
    for name in files if isinstance(files := document.get("files"), dict) else ():
        place = PureWindowsPath(name)  # it knows the separators of all systems
        if place.anchor or ".." in place.parts:
            raise InputError(f"{path}: files: {name!a} is not in the output's folder")
    return document


# ---------------------------------------------------------------- files on the disk


def remove(path: Path) -> None:
    """Remove a file, a link or a folder of ours."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


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
            what = "must be a folder, in which the output is made; move it away"
            raise OutputError(f"{folder}: {what}") from None
        first = next(folder.iterdir(), None)
        if first is not None and not has_mark(folder):
            what = f"contains {first.name} and was not made by dare; move it away"
            raise OutputError(f"{folder}: {what}") from None
    if not has_mark(folder):
        _mark(folder)
    return made


def _mark(folder: Path) -> None:
    """Write our mark; others may do so at the same moment."""
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
    stream = io.BytesIO(content) if isinstance(content, bytes) else as_stream(open_input(content))
    with stream as source, path.open("xb") as file:
        while piece := source.read(COPIED_BYTES):
            digest.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
    return digest.hexdigest()
