"""Files of this user alone: what nobody else could have written is believed, and nothing else."""

from __future__ import annotations

import os
import stat
import sys
from contextlib import suppress
from pathlib import Path

HAS_OWNERS = hasattr(os, "geteuid")
"""Whether files have owners and modes, which Windows' do not."""
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)


def is_safe(place: Path) -> bool:
    """Whether nobody but this user and root can write to a folder, or put another in its place.

    In a sticky folder above it, such as the system's for temporary files, others can write, but
    cannot rename or remove what is not theirs.
    """
    if not HAS_OWNERS:
        return True
    above = {*place.absolute().parents, *place.resolve().parents}
    return _is_private(place.stat()) and all(_keeps_entries(each.stat()) for each in above)


def _keeps_entries(status: os.stat_result) -> bool:
    is_sticky = bool(status.st_mode & stat.S_ISVTX)
    return _is_private(status) or (is_sticky and _is_ours(status))


def _is_private(status: os.stat_result) -> bool:
    return _is_ours(status) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid in (0, os.geteuid())


def read_private(file: Path) -> bytes:
    """Read a file that nobody but this user and root can write to; PermissionError if it is not."""
    with open(file, "rb", opener=lambda path, flags: os.open(path, flags | NOFOLLOW)) as opened:
        is_private = not HAS_OWNERS or _is_private(os.fstat(opened.fileno()))
        if not (is_private and is_safe(file.parent)):
            raise PermissionError(f"{file}: somebody else can write to it")
        return opened.read()


def write_private(file: Path, content: bytes) -> None:
    """Write a file that only this user can read, as a whole or not at all."""
    make_private(file.parent)
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    with open(partial, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as opened:
        opened.write(content)
    partial.replace(file)


def make_private(place: Path) -> None:
    """Make a folder, and those above it, for this user alone, whatever the umask is."""
    if not place.is_dir():
        make_private(place.parent)
        with suppress(FileExistsError):
            place.mkdir(mode=0o700)


def cache_folder() -> Path:
    """Where this user's programs keep what they can make again."""
    home = os.environ.get("XDG_CACHE_HOME")
    if home is None and sys.platform == "win32":
        home = os.environ.get("LOCALAPPDATA")
    if home:
        return Path(home) / "dare"
    with suppress(RuntimeError):  # no HOME, and nobody is known by this number
        return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "dare"
    return temporary_folder()


def temporary_folder() -> Path:
    """Where this user's files lie if there is no home."""
    user = os.geteuid() if HAS_OWNERS else "user"
    return Path(os.environ.get("TMPDIR") or "/tmp") / f"dare-{user}"  # noqa: S108 (if it is safe)
