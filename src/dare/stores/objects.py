"""Objects in stores: read ahead, before their bytes are needed, and written.

Reading in order is noticed, as a disk's cache does it: each hint or read that begins where the last
one ended doubles what is requested in advance, in pieces of 8 MiB and up to a limit that the files
of one source share. A lone read asks for its own bytes and no more. Every answer must be of
the version that was planned for.

obstore sends a file in parts of 16 MiB, with retries; nothing can be seen of it before the last
part is there. Then the store is asked for the object's size and its ETag. In S3 and what speaks its
language the ETag is made of the MD5 of each part, which is computed here too, so a byte that
changed on the way is found. Where the ETag is something else (Google, Azure, encryption by a key of
the user's), the object is read back and compared with the file, byte for byte. Every object carries
a mark that shows that it is one of ours.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

from dare.errors import DareError, InputError, OutputError
from dare.stores import reading
from dare.stores.addresses import Address, access_to
from dare.stores.locations import StorePath
from dare.stores.reading import Answer, Stamp, explained, locate

PIECE_BYTES = 8 << 20  # the most that one request asks for
AHEAD_BYTES = 32 << 20  # the most that is read ahead of what is needed, of one source
LONE_BYTES = 2 << 20  # the most that is asked for at once where nothing was read ahead
MOST_RUNS = 16  # places of one file that are read on from at the same time
STALE_SECONDS = 5.0  # time after which unused pieces make room for others
# A read belongs to a run if it begins at most this many times its own size after it.
NEAR_SIZES = 16


@dataclass(eq=False)
class _Piece:
    """Bytes that were asked for."""

    begin: int
    end: int
    answer: Future[Answer]
    left: int  # bytes that were not read yet
    users: int = 0
    touched: float = field(default_factory=time.monotonic)


@dataclass(eq=False)
class _Run:
    """A part of a file that is read in order."""

    begin: int
    place: int  # the last position that was wanted
    end: int  # the end of what was requested
    step: int  # the bytes that are requested ahead

    def includes(self, begin: int, near: int) -> bool:
        """Tell whether a position is in the run, as far as it has come, or follows it."""
        return max(self.begin, self.place - near) <= begin <= self.end + near


class Ahead:
    """The room for reading ahead that the files of one source share."""

    def __init__(self, limit_bytes: int = AHEAD_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.lock = threading.Lock()
        self.held_bytes = 0
        self.files: list[StoreFile] = []  # those that are open

    def take(self, nbytes: int) -> bool:
        """Take room, some of it from stale pieces; the lock must be held."""
        if self.held_bytes + nbytes > self.limit_bytes:
            before = time.monotonic() - STALE_SECONDS
            for file in self.files:
                file.drop_stale(before)
        has_room = self.held_bytes + nbytes <= self.limit_bytes
        self.held_bytes += nbytes if has_room else 0
        return has_room


class StoreFile:
    """An object in a store, open for reading at any position, from any thread.

    With a `stamp` nothing is asked for yet, and what is read must be of that version. Without one
    the first bytes are asked for, which say what the version is.
    """

    lone_bytes, ahead_bytes = LONE_BYTES, AHEAD_BYTES

    def __init__(self, path: Address, stamp: Stamp | None = None, ahead: Ahead | None = None):
        self.path = path
        self._ahead = ahead or Ahead()
        self._lock = self._ahead.lock
        self._first = memoryview(b"")
        self._pieces: list[_Piece] = []
        self._runs: list[_Run] = []
        self._is_fixed = access_to(path)[1].names is not None
        if stamp is None:
            try:
                seen = reading.read_first_bytes(path)
            except FileNotFoundError:
                raise InputError(f"{path}: no such file") from None
            self._first, stamp = memoryview(seen.data), seen.stamp
        self.stamp = stamp
        self.size: int = stamp[0]
        with self._lock:
            self._ahead.files.append(self)

    def close(self) -> None:
        """Cancel what is under way."""
        with self._lock:
            self._ahead.files = [file for file in self._ahead.files if file is not self]
            for piece in list(self._pieces):
                self._drop(piece)

    # ------------------------------------------------------------ ahead

    def prefetch(self, position: int, nbytes: int) -> None:
        """Announce that these bytes will be read soon."""
        with self._lock:
            self._expect(position, min(position + nbytes, self.size), self._ahead.limit_bytes)

    def _expect(self, begin: int, end: int, near: int, *, asks: bool = True) -> None:
        """Request wanted bytes, and those after them as far as the run suggests."""
        run = next((r for r in reversed(self._runs) if r.includes(begin, near)), None)
        if run is None:
            run = _Run(begin, begin, end, end - begin)
        else:
            self._runs.remove(run)
            if begin > run.place:  # and not what was announced before
                run.step = min(2 * max(run.step, end - begin), self._ahead.limit_bytes)
                run.place = begin
            asks = True
        self._runs.append(run)
        del self._runs[:-MOST_RUNS]
        if asks:
            self._ask_between(begin, end, 1)
        target = min(begin + run.step, self.size)
        run.end = self._ask_between(max(run.end, end), target, min(PIECE_BYTES, run.step) // 2)

    def _ask_between(self, place: int, end: int, least: int) -> int:
        """Request what was not requested yet, if there is room; return how far it goes now.

        Less than `least` is not worth a request, and is requested with what follows it.
        """
        while place < end:
            if (there := self._at(place)) is not None:
                place = there.end
                continue
            stop = min(end, place + PIECE_BYTES, self._next_after(place))
            if stop - place < least or not self._ahead.take(stop - place):
                break
            asked = reading.ask_range(self.path, place, stop)
            self._pieces.append(_Piece(place, stop, asked, stop - place))
            place = stop
        return place

    def _at(self, position: int) -> _Piece | None:
        return next((p for p in self._pieces if p.begin <= position < p.end), None)

    def _next_after(self, position: int) -> int:
        """Return the beginning of the next piece, or the end of the file."""
        return min((p.begin for p in self._pieces if p.begin > position), default=self.size)

    def _drop(self, piece: _Piece) -> None:
        if piece in self._pieces:
            self._pieces.remove(piece)
            self._ahead.held_bytes -= piece.end - piece.begin
            piece.answer.cancel()

    def drop_stale(self, before: float) -> None:
        """Drop pieces that were not touched since; the lock must be held."""
        for piece in list(self._pieces):
            if piece.touched < before and not piece.users and piece.answer.done():
                self._drop(piece)

    # ------------------------------------------------------------ reading

    def read_at(self, into: memoryview, position: int) -> int:
        """Fill a buffer; return how many bytes there were before the end of the file."""
        place, end = position, min(position + len(into), self.size)
        if place < end <= len(self._first):
            into[: end - place] = self._first[place:end]
            return end - place
        while place < end:
            size = end - place
            with self._lock:
                self._expect(place, end, NEAR_SIZES * size, asks=size > LONE_BYTES)
                piece = self._at(place)
                if piece is not None:
                    piece.users += 1
                stop = min(end, piece.end if piece else self._next_after(place))
            if piece is None:
                stop = min(stop, place + LONE_BYTES)
                data = self._checked(reading.ask_range(self.path, place, stop))
            elif (found := self._received(piece, place, stop)) is not None:
                data = found
            else:
                continue
            into[place - position : stop - position] = data
            place = stop
        return max(0, end - position)

    def _received(self, piece: _Piece, begin: int, end: int) -> memoryview | None:
        """Return some bytes of a piece; None if it did not come, so that it is requested again."""
        data = None
        try:
            data = self._checked(piece.answer)[begin - piece.begin : end - piece.begin]
        except _Changed:
            raise
        except (InputError, CancelledError):
            pass
        with self._lock:
            piece.users -= 1
            piece.left -= end - begin
            piece.touched = time.monotonic()
            if data is None or piece.left <= 0:
                self._drop(piece)
        return data

    def _checked(self, asked: Future[Answer]) -> memoryview:
        """Return the bytes of an answer, if it is of the planned version."""
        try:
            answer = asked.result()
        except FileNotFoundError:
            what = "was removed after the merge was planned; put it back and run the merge again"
            raise _Changed(f"{self.path}: {what}") from None
        is_same = answer.size == self.size if self._is_fixed else answer.stamp == self.stamp
        if not is_same:
            raise _Changed(f"{self.path}: changed since the merge was planned; run the merge again")
        return memoryview(answer.data)


class _Changed(InputError):  # noqa: N818
    """There is another object now."""


# ---------------------------------------------------------------- written


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
