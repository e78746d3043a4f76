"""Where files lie: on this machine, or in a store that has an address.

A `StorePath` is a path whose text is an address such as `s3://bucket/model`. It has names, parents
and suffixes like any path, and asks the store (`dare.tensors.stores`) whether it exists and what is
in it. So whatever takes a path takes an address.

What an address says besides the place (a password, a signature, a token) is kept apart, and is
found again by `access_to`. The text of a path never has it, so no message, manifest or card can.
"""

from __future__ import annotations

import fnmatch
import io
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import urlsplit

WEB = ("http", "https")
SCHEMES = ("s3", "gs", "az", "hf", *WEB)

_ADDRESS = re.compile(rf"({'|'.join(SCHEMES)}):/{{1,2}}(?!/)", re.IGNORECASE)
_PASSWORD = re.compile(r"(?<=://)[^/\s@'\"]*@")
_QUERY = re.compile(r"(https?://[^\s'\"?#]*)[?#][^\s'\"]*")

_LocalPath = type(Path()) if not TYPE_CHECKING else Path


@dataclass(frozen=True)
class Access:
    """How what lies at a place, or below it, is asked for; some of it is secret."""

    password: str = field(default="", repr=False)
    """`name:password` of the address."""
    query: str = field(default="", repr=False)
    """What stands after the `?`: the signature of a signed address, or a token."""
    url: str = field(default="", repr=False)
    """Where to ask in place of the address."""
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    names: Mapping[str, int] | None = field(default=None, repr=False)
    """All files below the place and their sizes, if those are known and cannot change."""


_ACCESS: dict[str, Access] = {}
"""By the text of a path."""


class StorePath(_LocalPath):
    """A place in a store; `to_path` makes one of an address.

    >>> path = to_path("s3://bucket/models/math") / "model.safetensors"
    >>> str(path), path.parent.name, path.suffix
    ('s3://bucket/models/math/model.safetensors', 'math', '.safetensors')
    """

    def __str__(self) -> str:
        """The address."""
        text = super().__str__()
        scheme, colon, rest = text.partition(":")
        return f"{scheme}:/{rest or '/'}" if colon and scheme in SCHEMES else text

    def __eq__(self, other: object) -> bool:
        """A path of this machine is never the same, whatever its text."""
        return isinstance(other, StorePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __fspath__(self) -> str:
        """Refuse: no call of the system can open an address."""
        raise TypeError(f"{self}: lies in a store, and not in a file of this machine")

    def __reduce__(self) -> Any:
        """Another process can ask as this one does."""
        return _restored, (str(self), *_access_above(self))

    @property
    def scheme(self) -> str:
        """What kind of store it is."""
        return self.parts[0].removesuffix(":")

    @property
    def authority(self) -> str:
        """The bucket, container or host; of a model on the hub its organisation."""
        return self.parts[1] if len(self.parts) > 1 else ""

    @property
    def key(self) -> str:
        """The place within the bucket, container or host."""
        return "/".join(self.parts[2:])

    # ------------------------------------------------------------ an address is what it is

    def absolute(self) -> StorePath:
        return self

    def resolve(self, strict: bool = False) -> StorePath:  # noqa: ARG002
        return self

    def expanduser(self) -> StorePath:
        return self

    def is_absolute(self) -> bool:
        return True

    def is_symlink(self) -> bool:
        return False

    # ------------------------------------------------------------ what the store has

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:  # noqa: ARG002
        from dare.tensors import stores

        return stores.status(self)

    def exists(self, *, follow_symlinks: bool = True) -> bool:  # noqa: ARG002
        return self.is_file() or self.is_dir()

    def is_file(self, *, follow_symlinks: bool = True) -> bool:  # noqa: ARG002
        from dare.tensors import stores

        return stores.is_file(self)

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:  # noqa: ARG002
        from dare.tensors import stores

        return bool(stores.list_folder(self))

    def iterdir(self) -> Iterator[StorePath]:
        from dare.tensors import stores

        return (self / name for name in stores.list_folder(self))

    def rglob(self, pattern: str, **_options: Any) -> Iterator[StorePath]:
        from dare.tensors import stores

        for name, size in stores.list_folder(self).items():
            if fnmatch.fnmatchcase(name, pattern):
                yield self / name
            if size is None:
                yield from (self / name).rglob(pattern)

    def open(self, mode: str = "r", *_: Any, **__: Any) -> Any:
        if mode != "rb":
            raise TypeError(f"{self}: lies in a store, and can only be opened to read bytes")
        from dare.tensors import files

        return files.as_stream(files.open_input(self))

    def read_bytes(self) -> bytes:
        stream: BinaryIO
        with self.open("rb") as stream:
            return stream.read()

    def read_text(self, encoding: str | None = None, *_: Any, **__: Any) -> str:
        return io.TextIOWrapper(io.BytesIO(self.read_bytes()), encoding or "utf-8").read()


def to_path(place: str | os.PathLike[str]) -> Path:
    """The path that a text means; what is secret in an address is kept apart.

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


def grant_access(path: StorePath, access: Access) -> None:
    """Remember how to ask for what lies at a place and below it, as long as this process lives."""
    _ACCESS[str(path)] = access


def access_to(path: StorePath) -> tuple[StorePath, Access]:
    """The place at or above a path whose access holds for it, and that access."""
    place, access = _access_above(path)
    return StorePath(place or str(path)), access or Access()


def _access_above(path: StorePath) -> tuple[str, Access | None]:
    for place in (path, *path.parents):
        if (found := _ACCESS.get(str(place))) is not None:
            return str(place), found
    return "", None


def _restored(text: str, place: str, access: Access | None) -> StorePath:
    if access is not None:
        _ACCESS[place] = access
    return StorePath(text)


def without_credentials(text: str) -> str:
    """A text without the passwords, signatures and tokens that stand in its addresses.

    >>> without_credentials("no answer from https://me:secret@hub.example/x")
    'no answer from https://hub.example/x'
    >>> without_credentials("'https://host/file?X-Amz-Signature=secret' is wrong")
    "'https://host/file?…' is wrong"
    """
    return _QUERY.sub(r"\1?…", _PASSWORD.sub("", text))
