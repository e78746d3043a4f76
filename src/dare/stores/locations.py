"""Paths of files on this machine, or in a store that has an address.

A `StorePath` asks the store (`dare.stores.reading`) whether it exists and what is in it. So
whatever takes a path takes an address.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Generator
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from dare.stores import reading
from dare.stores.addresses import SCHEMES, WEB, Access, Address, grant_access, without_credentials

__all__ = ["StorePath", "home_folder", "to_path", "without_credentials"]

_ADDRESS = re.compile(rf"({'|'.join(SCHEMES)}):/{{1,2}}(?!/)", re.IGNORECASE)


class StorePath(Address):
    """A place in a store; `to_path` makes one of an address."""

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:  # noqa: ARG002
        return reading.status(self)

    def exists(self, *, follow_symlinks: bool = True) -> bool:  # noqa: ARG002
        return self.is_file() or self.is_dir()

    def is_file(self, *, follow_symlinks: bool = True) -> bool:  # noqa: ARG002
        return reading.is_file(self)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:  # noqa: ARG002
        return bool(reading.list_folder(self))

    def iterdir(self) -> Generator[Self, None, None]:
        return (self / name for name in reading.list_folder(self))

    def rglob(self, pattern: str) -> Generator[Self, None, None]:
        for name, size in reading.list_folder(self).items():
            if fnmatch.fnmatchcase(name, pattern):
                yield self / name
            if size is None:
                yield from (self / name).rglob(pattern)


def home_folder() -> Path | None:
    """Return this user's folder; None without HOME for a user that the system does not know."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def to_path(place: str | os.PathLike[str]) -> Path:
    """Return the path that a text means; secrets of an address are kept apart.

    >>> to_path("models/base"), str(to_path("https://me:secret@host/base?token=1"))
    (PosixPath('models/base'), 'https://host/base')
    """
    if isinstance(place, StorePath):
        return place
    text = os.fspath(place)
    found = _ADDRESS.match(text) if isinstance(text, str) else None
    if found is None:
        return Path(text)
    scheme, rest = found[1].lower(), text[found.end() :]
    if scheme not in WEB:
        if "@" in rest.partition("/")[0]:
            raise ValueError(
                "an address must not hold a password; set it in the environment or in a profile"
            )
        return StorePath(f"{scheme}://{rest}")
    parts = urlsplit(f"{scheme}://{rest}")
    password, _, host = parts.netloc.rpartition("@")
    path = StorePath(f"{scheme}://{host}{parts.path}")
    if password or parts.query:
        grant_access(path, Access(password=password, query=parts.query))
    return path
