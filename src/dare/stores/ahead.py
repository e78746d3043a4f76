"""A file in a store, read ahead: requests are under way before their bytes are needed.

Reading in order is noticed, as a disk's cache does it: each hint or read that begins where the last
one ended doubles what is requested in advance, in pieces of 8 MiB and up to a limit that the files
of one source share. A lone read asks for its own bytes and no more. Every answer must be of
the version that was planned for.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field

from dare.errors import InputError
from dare.stores import reading
from dare.stores.addresses import Address, access_to
from dare.stores.reading import Answer, Stamp

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
