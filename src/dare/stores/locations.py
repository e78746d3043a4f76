"""Places of files: a path on this machine, an address in a store, a name on the hub.

`to_path` makes a path of a text where one is read; from there on a path is one, and `is_stored`
tells whether it is an address. A `StorePath` asks the store (`dare.stores.reading`) whether it
exists and what is in it. So whatever takes a path takes an address.

Names on the hub are told from paths without asking the hub. A name is `org/name`, or
`org/name/inside@revision`, where `inside` is a folder or a file of the repository. A path that
exists here is never a name. Otherwise

- with `@revision` a text is a name;
- without it, only if it has exactly two parts, the second does not end like a file of weights,
  and there is no folder here that is called like the first: `models/bas` beside a folder `models`
  is a slip of the pen, and is not sent to a server.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Self, TypeGuard
from urllib.parse import unquote, urlsplit

from dare.errors import InputError, OutsideError, RecipeError
from dare.stores import reading
from dare.stores.addresses import STORES, Access, Address, grant_access, without_credentials

__all__ = ["StorePath", "home_folder", "to_path", "without_credentials"]

AnyPath = str | os.PathLike[str]

MOST_OF_NAME, MOST_OF_PATH = 255, 4000  # characters; no system takes more
_ADDRESS = re.compile(rf"({'|'.join(STORES)}):/{{1,2}}(?!/)", re.IGNORECASE)


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


_given_folders: list[Path] = []  # the only ones that are read; everything, if there are none


def confine(folders: Iterable[Path]) -> None:
    """Let this process open nothing outside some folders; without any, everything again."""
    _given_folders[:] = map(Path, map(os.path.realpath, folders))


def check_inside(path: Path, folders: Sequence[Path] = _given_folders) -> None:
    """Refuse a path that leads out of the folders that the user has given, links followed."""
    if not folders:
        return
    real = path if is_stored(path) else Path(os.path.realpath(path))
    if not any(real.is_relative_to(folder) for folder in folders):
        leads = "" if real == path else f" leads to {real}, which"
        remedy = "start the playground with its folder: dare playground FOLDER …, or use a command"
        raise OutsideError(f"{path}:{leads} is outside {', '.join(map(str, folders))}; {remedy}")


def to_path(place: str | os.PathLike[str]) -> Path:
    """Return the path that a text means; secrets of an address are kept apart.

    >>> to_path("models/base"), str(to_path("https://me:secret@host/base?token=1"))
    (PosixPath('models/base'), 'https://host/base')
    """
    if isinstance(place, StorePath):
        return place
    text = os.fspath(place)
    if not text:  # which would be the current folder
        raise RecipeError("a path is empty; name a file or folder (is a variable unset?)")
    found = _ADDRESS.match(text) if isinstance(text, str) else None
    if found is None:
        path = Path(text)
        if len(text) > MOST_OF_PATH or max(map(len, path.parts), default=0) > MOST_OF_NAME:
            short = f"{text[:40]}…: the path has {len(text):,} characters, too many for this system"
            raise RecipeError(f"{short}; shorten it (is it the content of a file?)")
        return path
    scheme, rest = found[1].lower(), text[found.end() :]
    check_inside(StorePath(f"{scheme}://{without_credentials(rest)}"))
    if not STORES[scheme].is_web:
        if "@" in rest.partition("/")[0]:
            raise ValueError("an address must not hold a password; set it in the environment")
        return StorePath(f"{scheme}://{rest}")
    parts = urlsplit(f"{scheme}://{rest}")
    password, _, host = parts.netloc.rpartition("@")
    path = StorePath(f"{scheme}://{host}{parts.path}")
    if password or parts.query:
        grant_access(path, Access(password=password, query=parts.query))
    return path


def is_stored(path: object) -> TypeGuard[StorePath]:
    """Return whether a place is in a store, not on this machine."""
    return isinstance(path, StorePath)


def is_here(path: Path) -> bool:
    """Return whether a path leads to something without asking the hub, as far as can be told."""
    if is_stored(path):
        return path.scheme != "hf"
    try:
        return path.exists()
    except OSError:  # opening it will say what is wrong
        return True


# ---------------------------------------------------------------- names on the hub

# Endings of files of weights; `org/model.safetensors` is a path, not a name.
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".onnx", ".h5", ".msgpack")


def usual_output(base: object) -> str:
    """Return the output of a recipe that names none: a folder, or a file if the base is one.

    >>> usual_output("base.safetensors"), usual_output("org/Llama-3.2-1B")
    ('merged.safetensors', 'merged')
    """
    return "merged.safetensors" if str(base).endswith(WEIGHT_SUFFIXES) else "merged"


_PART = re.compile(r"(?=.{1,96}$)\w(?:[\w.-]*\w)?", re.ASCII)
_REVISION = re.compile(r"[^\s@:?*\[\\^~]+")
_NO_PARTS = {"", ".", ".."}


@dataclass(frozen=True)
class Name:
    """A model on the hub: repository, folder or file inside it, revision if one is given."""

    repo: str
    inside: str
    revision: str | None

    def __str__(self) -> str:
        place = "/".join(filter(None, (self.repo, self.inside)))
        return place + (f"@{self.revision}" if self.revision else "")

    @property
    def file(self) -> str | None:
        """The file of weights that is asked for, if it is a file."""
        path = PurePosixPath(self.inside)
        return path.name if path.suffix in WEIGHT_SUFFIXES else None

    @property
    def folder(self) -> PurePosixPath:
        """The folder of the repository that holds the model."""
        path = PurePosixPath(self.inside)
        return path.parent if self.file else path


def looks_like_name(text: str) -> bool:
    """Return whether a text has the form of a name on the hub; files here are not considered.

    >>> [looks_like_name(t) for t in ("org/name", "org/name@v1", "org/name/sub@main")]
    [True, True, True]
    >>> [looks_like_name(t) for t in ("name", "a/b/c", "/org/name", "org/model.safetensors")]
    [False, False, False, False]
    """
    return parse_name(text) is not None


def parse_name(text: str) -> Name | None:
    """Parse a name; return None if the text is none."""
    place, at, revision = text.partition("@")
    org, slash, rest = place.partition("/")
    name, _, inside = rest.partition("/")
    is_name = (
        slash
        and all(_PART.fullmatch(part) for part in (org, name))
        and not re.search(r"--|\.\.|\.git$", f"{org}/{name}")
        and not text.endswith(WEIGHT_SUFFIXES)
        and not (inside and _NO_PARTS & set(inside.split("/")))
        and (_REVISION.fullmatch(revision) if at else not inside)
        and not (at and _NO_PARTS & set(revision.split("/")))
    )
    return Name(f"{org}/{name}", inside, revision or None) if is_name else None


def parse_address(text: str) -> Name:
    """Parse an address: `hf://org/name@revision/inside`.

    >>> str(parse_address("hf://org/name@v1/q/m.gguf"))
    'org/name/q/m.gguf@v1'
    """
    org, _, rest = text.removeprefix("hf://").partition("/")
    place, _, inside = rest.partition("/")
    name, _, revision = place.partition("@")
    revision = unquote(revision)
    known = parse_name("/".join(filter(None, (org, name, inside))) + f"@{revision or 'main'}")
    if known is None:
        forms = "hf://org/name, or hf://org/name@revision/folder"
        raise InputError(f"{text}: is not the address of a model on the hub; write {forms}")
    return Name(known.repo, known.inside, revision or None)
