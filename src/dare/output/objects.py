"""What the making of an output asks of a store: small objects, and large ones in parts.

Keys are places within one bucket. An upload is known by an id that the store gives, and by a mark
of ours that the finished object carries, so that an answer that was lost can be made up for by
looking. Every call tries again by itself where that can help, and raises `OutputError` where not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

MARK = "dare"
"""What our mark is called among the metadata of an object."""
GOES_ON = "run the same merge again; it resumes"


@dataclass(frozen=True, slots=True)
class Sent:
    """A part that a store has."""

    etag: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class Upload:
    """An object that is sent in parts."""

    key: str
    id: str
    mark: str
    """Which the object carries when it is complete; nothing else has the same."""


class Objects(Protocol):
    """The objects of a bucket."""

    def describe(self, key: str) -> str:
        """The address of an object."""

    def get(self, key: str) -> bytes | None:
        """The content of an object; None if there is none."""

    def put(self, key: str, content: bytes) -> None:
        """Store an object, in place of any other."""

    def put_new(self, key: str, content: bytes) -> bool:
        """Store an object if there is none; whether that was so."""

    def mark_of(self, key: str) -> str | None:
        """The mark of an object, or nothing if it has none; None if there is no object."""

    def age(self, key: str) -> float | None:
        """How many seconds ago an object was stored; None if there is none."""

    def list(self, folder: str) -> list[str]:
        """The keys below a folder."""

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects, if they are there."""

    def begin(self, key: str, mark: str) -> Upload:
        """Begin to send an object in parts."""

    def send(self, upload: Upload, number: int, content: bytes) -> str:
        """Send a part; return its ETag."""

    def sent(self, upload: Upload) -> Mapping[int, Sent] | None:
        """The parts that the store has; None if it knows of no such upload."""

    def complete(self, upload: Upload, parts: Mapping[int, str], *, new: bool) -> bool:
        """Make an object of parts, told by their ETags; False if it should be new and is not."""

    def abort(self, upload: Upload) -> None:
        """Let the parts of an upload go, if it is there."""
