"""Objects written to a store, and seen to be there as they were sent.

obstore sends a file in parts of 16 MiB, with retries; nothing can be seen of it before the last
part is there. Then the store is asked for the object's size and its ETag. In S3 and what speaks its
language the ETag is made of the MD5 of each part, which is computed here too, so a byte that
changed on the way is found. Where the ETag is something else (Google, Azure, encryption by a key of
the user's), the object is read back and compared with the file, byte for byte.

Every object carries a mark that shows that it is one of ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from dare.errors import DareError, OutputError
from dare.stores.ahead import StoreFile
from dare.stores.locations import StorePath
from dare.stores.reading import explained, locate

MARK = "dare"  # the name of our mark among the attributes of an object
PART_BYTES = 16 << 20  # the size of a part, unless the object would have too many
MAX_PARTS = 10_000  # the most parts of one object in S3
MAX_OBJECT_BYTES = 5 << 40  # the limit of S3; other stores allow no less
PARTS_AT_ONCE = 4
COMPARED_BYTES = 4 << 20


@dataclass(frozen=True)
class StoredObject:
    """An object as its store describes it."""

    size: int
    version: str  # its ETag, which changes with its content
    is_ours: bool = True


def part_bytes(size: int) -> int:
    """Return the size of an object's parts."""
    return max(PART_BYTES, -(-size // MAX_PARTS))


def sending_bytes(size: int) -> int:
    """Return the memory for sending an object: the parts under way, and one that is read."""
    return min(size, (PARTS_AT_ONCE + 2) * part_bytes(size))


def list_names(folder: StorePath) -> list[str]:
    """List the names of all objects below a folder."""
    with explaining(folder) as (store, key):
        return [e["path"].removeprefix(f"{key}/") for entries in store.list(key) for e in entries]


def describe_object(path: StorePath) -> StoredObject | None:
    """Return the store's description of an object; None if there is none."""
    with explaining(path) as (store, key), suppress(FileNotFoundError):
        found = store.get(key, options={"head": True})
        etag = str(found.meta["e_tag"] or "").removeprefix("W/").strip('"')
        return StoredObject(found.meta["size"], etag, MARK in found.attributes)
    return None


def read_object(path: StorePath) -> bytes | None:
    """Read the content of a small object; None if there is none."""
    with explaining(path) as (store, key), suppress(FileNotFoundError):
        return bytes(store.get(key).bytes())
    return None


def delete(paths: Iterable[StorePath]) -> None:
    """Remove objects, in this order, if they are there."""
    for path in paths:
        with explaining(path) as (store, key), suppress(FileNotFoundError):
            store.delete(key)


def upload(
    path: StorePath, content: bytes | Path, progress: Callable[[int], None] = lambda _nbytes: None
) -> StoredObject:
    """Store an object, in place of any other, and check that the store has it as it was sent.

    `progress` gets the number of bytes read to be sent, and stops everything if it raises.
    """
    size = len(content) if isinstance(content, bytes) else content.stat().st_size
    in_parts = size > PART_BYTES
    digests: list[bytes] = []

    def pieces(file: BinaryIO) -> Iterator[bytes]:
        while piece := file.read(part_bytes(size)):
            digests.append(hashlib.md5(piece, usedforsecurity=False).digest())
            progress(len(piece))
            yield piece

    with explaining(path) as (store, key), _opened(content) as file, suppress(FileNotFoundError):
        # An upload that is gone was completed if the answer to that was lost; what is there says.
        store.put(
            key,
            pieces(file) if in_parts else b"".join(pieces(file)),
            attributes={MARK: "made by dare"},
            use_multipart=in_parts,
            chunk_size=part_bytes(size),
            max_concurrency=PARTS_AT_ONCE,
        )
    stored = describe_object(path)
    whole = hashlib.md5(b"".join(digests), usedforsecurity=False).hexdigest()
    expected = f"{whole}-{len(digests)}" if in_parts else "".join(d.hex() for d in digests)
    if (
        stored is None
        or stored.size != size
        or (stored.version != expected and not _is_same(path, content))
    ):
        raise OutputError(f"{path}: the store's copy is not what was sent; run the merge again")
    return stored


def _is_same(path: StorePath, content: bytes | Path) -> bool:
    """Read an object back and compare it with what was sent, which has as many bytes."""
    there = StoreFile(path)
    place, into = 0, memoryview(bytearray(COMPARED_BYTES))
    try:
        with _opened(content) as file:
            while piece := file.read(COMPARED_BYTES):
                count = there.read_at(into[: len(piece)], place)
                if into[:count] != piece:
                    return False
                place += count
    finally:
        there.close()
    return True


def _opened(content: bytes | Path) -> BinaryIO:
    return BytesIO(content) if isinstance(content, bytes) else content.open("rb")


@contextmanager
def explaining(path: StorePath) -> Iterator[tuple[Any, str]]:
    """Give the client for a place and its name there; errors have a remedy and no secrets."""
    try:
        yield locate(path)
    except DareError as error:
        raise OutputError(str(error)) from None
    except Exception as error:
        raise OutputError(str(explained(path, error, writes=True))) from None
