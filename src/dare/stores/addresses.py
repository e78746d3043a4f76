"""Addresses of things in stores, as paths; nothing is asked of a store here.

Secrets in an address (a password, a signature, a token) are kept apart, and found again by
`access_to`. The text of a path never has them, so no message, manifest or card can.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self


@dataclass(frozen=True)
class Store:
    """A kind of store, of which obstore makes a client by the address."""

    remedy: str  # the way to get access
    is_writable: bool = False  # True if an output can go there
    is_web: bool = False  # True for a web server, which lists nothing and quotes names
    speaks_s3: bool = False  # True if boto3 finds accounts and regions


TABLES = tomllib.loads(files("dare.stores").joinpath("stores.toml").read_text("utf-8"))
# The kinds of stores, by the beginning of their addresses.
STORES = {scheme: Store(**kind) for scheme, kind in TABLES["kinds"].items()}

_PASSWORD = re.compile(r"(\w\w:/{1,2})[^/\s@'\"]*@")  # a path has one slash
_QUERY = re.compile(r"(https?:/{1,2}[^\s'\"?#]*)[?#][^\s'\"]*")

if TYPE_CHECKING:
    from pathlib import Path as _LocalPath
else:
    _LocalPath = type(Path())  # which the system decides


@dataclass(frozen=True)
class Access:
    """What requests for objects at a place, or below it, need; some of it is secret."""

    password: str = field(default="", repr=False)  # `name:password` of the address
    # The part after the `?`: the signature of a signed address, or a token.
    query: str = field(default="", repr=False)
    url: str = field(default="", repr=False)  # the address to use in place of the path's
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    # All files below the place and their sizes, if those are known and cannot change.
    names: Mapping[str, int] | None = field(default=None, repr=False)


_ACCESS: dict[str, Access] = {}  # access by the text of a path


class Address(_LocalPath):
    """A path whose text is an address, with names, parents and suffixes like any path.

    >>> path = Address("s3://bucket/models/math") / "model.safetensors"
    >>> str(path), path.parent.name, path.suffix
    ('s3://bucket/models/math/model.safetensors', 'math', '.safetensors')
    """

    def __str__(self) -> str:
        """Return the address."""
        text = super().__str__().replace(os.sep, "/")
        scheme, colon, rest = text.partition(":")
        return f"{scheme}:/{rest or '/'}" if colon and scheme in STORES else text

    def __eq__(self, other: object) -> bool:
        """Compare addresses; a path of this machine is never the same, whatever its text."""
        return isinstance(other, Address) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __fspath__(self) -> str:
        """Refuse: no call of the system can open an address."""
        raise TypeError(f"{self}: is in a store, not in a file on this machine")

    def __reduce__(self) -> Any:
        """Pickle the path with its access, so that another process has it too."""
        place, access = access_to(self)
        return _restored, (type(self), str(self), str(place), access)

    @property
    def scheme(self) -> str:
        """The beginning of the address."""
        return self.parts[0].removesuffix(":")

    @property
    def store(self) -> Store:
        """The table's entry of that kind."""
        return STORES[self.scheme]

    @property
    def authority(self) -> str:
        """The bucket, container or host; of a model on the hub its organisation."""
        return self.parts[1] if len(self.parts) > 1 else ""

    @property
    def key(self) -> str:
        """The place within the bucket, container or host."""
        return "/".join(self.parts[2:])

    # ------------------------------------------------------------ an address is absolute

    def absolute(self) -> Self:
        return self

    def resolve(self, strict: bool = False) -> Self:  # noqa: ARG002
        return self

    def expanduser(self) -> Self:
        return self

    def is_absolute(self) -> bool:
        return True

    def is_symlink(self) -> bool:
        return False


def grant_access(path: Address, access: Access) -> None:
    """Remember the access to a place and below it, as long as this process lives."""
    _ACCESS[str(path)] = access


def access_to(path: Address) -> tuple[Address, Access]:
    """Return the place at or above a path whose access holds for it, and that access."""
    for place in (path, *path.parents):
        if (found := _ACCESS.get(str(place))) is not None:
            return place, found
    return path, Access()


def _restored(kind: type[Address], text: str, place: str, access: Access) -> Address:
    if access != Access():
        _ACCESS[place] = access
    return kind(text)


def without_credentials(text: str) -> str:
    """Return a text without the passwords, signatures and tokens of its addresses.

    >>> without_credentials("https://me:secret@host/x, Path('s3:/me:secret@bucket')")
    "https://host/x, Path('s3:/bucket')"
    >>> without_credentials("'https://host/file?X-Amz-Signature=secret' is wrong")
    "'https://host/file?…' is wrong"
    """
    return _QUERY.sub(r"\1?…", _PASSWORD.sub(r"\1", text))
