"""Files: opened, small ones read whole, buffers read and written at any position.

An input lies on this machine (`LocalFile`) or in a store (`ahead.StoreFile`): `open_input` opens
either, and readers need not know. A name from outside may lead to a pipe or a device that never
answers, so only an ordinary file is opened.

A merged model is written once and not read again by the merge, so copying it into the page cache
costs a good part of a core for nothing, and again when it is synced. Where the system allows it
(O_DIRECT), whole pages go straight from the buffer to the disk; the edges, and everything on other
systems, are written in the ordinary way.
"""

from __future__ import annotations

import ctypes
import errno
import io
import mmap
import os
import stat
import sys
from collections.abc import Iterable
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dare.errors import HeaderError, InputError, OutsideError, no_such_file
from dare.stores.locations import StorePath, check_inside
from dare.tensors.system import IS_POSIX, NO_LINKS, NO_WAIT, read_some, system_call, write_some

if TYPE_CHECKING:
    from dare.stores.objects import Ahead, StoreFile

ALIGNMENT = 4096  # direct writes start and end at multiples of this, in the file and in memory

Bytes = bytes | NDArray[np.uint8]
Stamp = tuple[Any, ...]  # facts that identify a file; the last may change with its name


InputFile: TypeAlias = "LocalFile | StoreFile"  # open for reading, from any thread

READ_AHEAD_BYTES = 128 << 10  # the usual length that a system reads ahead, if it does not say
LFS_POINTER = b"version https://git-lfs"  # the start of a pointer to a file that was not fetched
MAX_LFS_POINTER_BYTES = 1024
MAX_UNCHECKED_READS = 15  # reads of a file that was in memory, taken to be there still


class LocalFile:
    """An open file of this machine, which the system reads ahead."""

    lone_bytes = ahead_bytes = 0  # memory for reads of a store

    def __init__(self, file_descriptor: int) -> None:
        self.file_descriptor = file_descriptor
        self._window = 0  # bytes that its system reads ahead; 0 if it need not
        self._unchecked = self._streak = 0
        if hasattr(os, "posix_fadvise") and not _is_in_memory(file_descriptor):
            self._window = _read_ahead(os.fstat(file_descriptor).st_dev)

    @property
    def size(self) -> int:
        """The number of its bytes now."""
        return os.fstat(self.file_descriptor).st_size

    @property
    def stamp(self) -> Stamp:
        """Size, time, device and inode; last the time that nobody can set."""
        status = os.fstat(self.file_descriptor)
        return status.st_size, status.st_mtime_ns, status.st_dev, status.st_ino, status.st_ctime_ns

    def read_at(self, into: memoryview, position: int) -> int:
        """Fill a buffer; return how many bytes there were before the end of the file."""
        return read_at(self.file_descriptor, into, position)

    def prefetch(self, position: int, nbytes: int) -> None:
        """Have the system read these bytes, unless it has them."""
        if not self._window or self._is_there(position + nbytes - 1):
            return
        for start in range(position, position + nbytes, self._window):
            size = min(self._window, position + nbytes - start)
            os.posix_fadvise(self.file_descriptor, start, size, os.POSIX_FADV_WILLNEED)

    def _is_there(self, position: int) -> bool:
        """Return whether a byte is in memory; if it was so before, that is rarely checked."""
        if self._unchecked > 0:
            self._unchecked -= 1
            return True
        try:
            found = os.preadv(self.file_descriptor, [bytearray(1)], position, os.RWF_NOWAIT) > 0
        except (AttributeError, OSError):  # it is not, or nobody can say
            found = False
        self._streak = min(2 * self._streak + 1, MAX_UNCHECKED_READS) if found else 0
        self._unchecked = self._streak
        return found

    def close(self) -> None:
        """Close."""
        os.close(self.file_descriptor)


@cache
def _read_ahead(device: int) -> int:
    """Return the bytes that a file system reads ahead; Linux reads no more of any announcement."""
    with suppress(OSError, ValueError):
        bdi = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}")
        return max(READ_AHEAD_BYTES, 1024 * int((bdi / "read_ahead_kb").read_text()))
    return READ_AHEAD_BYTES


def open_input(file: Path, stamp: Stamp | None = None, ahead: Ahead | None = None) -> InputFile:
    """Open a file wherever it lies; one in a store must be as the `stamp` says, if there is one.

    `ahead` bounds what is read ahead of a store.
    """
    if not isinstance(file, StorePath):
        return LocalFile(open_ordinary(file))
    from dare.stores.objects import StoreFile

    return StoreFile(file, stamp, ahead)


def share_ahead(nbytes: int) -> Ahead:
    """Return a bound on what several files in a store read ahead, together."""
    from dare.stores.objects import Ahead

    return Ahead(nbytes)


def prefetch_beginnings(files: Iterable[Path]) -> None:
    """Say that the beginnings of these files will be read, so that stores are asked at once."""
    if stored := [file for file in files if isinstance(file, StorePath)]:
        from dare.stores import reading

        reading.prefetch_first_bytes(stored)


class InputStream(io.RawIOBase):
    """Some bytes of an input, or all of it, as a file."""

    def __init__(self, file: InputFile, span: range, *, closes: bool = False) -> None:
        self._file, self.span, self._position, self._closes = file, span, 0, closes

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + (0, self._position, len(self.span))[whence]
        if self._position < 0:
            raise OSError("before the beginning")
        return self._position

    def readinto(self, into: Any) -> int:
        wanted = memoryview(into).cast("B")[: max(0, len(self.span) - self._position)]
        count = self._file.read_at(wanted, self.span.start + self._position)
        self._position += count
        return count

    def close(self) -> None:
        if self._closes and not self.closed:
            self._file.close()
        super().close()


def as_stream(file: InputFile, *, closes: bool = True) -> io.BufferedReader:
    """Return an input as a stream of bytes, which closes it unless told otherwise."""
    return io.BufferedReader(InputStream(file, range(file.size), closes=closes), 1 << 20)


def open_ordinary(file: Path, where: Path | None = None) -> int:
    """Open a file for reading; `where` names it in errors, if it is what a link leads to.

    Anything but an ordinary file is refused at once: a pipe would wait for somebody who writes.
    """
    where = where or file
    try:
        check_inside(file)
        file_descriptor = os.open(file, os.O_RDONLY | NO_WAIT)
    except FileNotFoundError:
        raise no_such_file(where) from None
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a device that is not there
            raise InputError(f"{where}: is not an ordinary file") from None
        raise InputError(f"{where}: cannot be opened: {error.strerror or error}") from None
    except ValueError:  # a NUL or half a character
        raise InputError(f"{str(where)!r}: is not a possible file name") from None
    try:
        fault = _find_fault(file_descriptor)
    except (OSError, OutsideError) as error:
        fault = f"cannot be read: {getattr(error, 'strerror', None) or error}"
    if fault:
        os.close(file_descriptor)
        raise InputError(f"{where}: {fault}")
    return file_descriptor


def _find_fault(file_descriptor: int) -> str:
    """Say why an open file cannot be what its name says, if so."""
    if (opened := Path(f"/proc/self/fd/{file_descriptor}")).exists():  # as Linux knows it
        check_inside(opened)
    status = os.fstat(file_descriptor)
    if not stat.S_ISREG(status.st_mode):
        return "is not an ordinary file"
    if not len(LFS_POINTER) < status.st_size < MAX_LFS_POINTER_BYTES:
        return ""
    beginning = os.read(file_descriptor, len(LFS_POINTER))
    os.lseek(file_descriptor, 0, os.SEEK_SET)
    if beginning == LFS_POINTER:
        return "is a Git LFS pointer, not the file itself; run `git lfs pull` in its folder"
    return ""


def read_limited(file: Path, most_bytes: int, where: Path | None = None) -> bytes:
    """Read a file, or what the link `where` leads to; refuse a huge one unread."""
    where = where or file
    if isinstance(file, StorePath):
        from dare.stores import reading

        try:
            return reading.read_small(file, most_bytes)
        except FileNotFoundError:
            raise InputError(f"{file}: no such file") from None
    try:
        with os.fdopen(open_ordinary(file, where), "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            text = stream.read(min(size, most_bytes) + 1)  # so much memory is taken at once
    except OSError as error:
        raise InputError(f"{where}: cannot be read: {error.strerror or error}") from None
    if len(text) > most_bytes:
        raise HeaderError(f"{where}: larger than {most_bytes} bytes")
    return text


def read_beginning(file: Path, nbytes: int) -> bytes:
    """Read the first bytes of a file, or as many as there are."""
    with closing(open_input(file)) as opened:
        return bytes(read_up_to(opened, nbytes, 0))


def read_up_to(file: InputFile, nbytes: int, position: int) -> bytearray:
    """Read a number of bytes, or all if there are fewer."""
    found = bytearray(nbytes)
    del found[file.read_at(memoryview(found), position) :]
    return found


def begins_with(file: Path, mark: bytes) -> bool:
    """Return whether a file of this machine can be read, and has these first bytes."""
    with suppress(InputError, OSError):  # which is said better where it is opened
        return not isinstance(file, StorePath) and read_beginning(file, len(mark)) == mark
    return False


def is_directory(path: Path) -> bool:
    """Return whether a path is a folder; raise InputError if nobody can say."""
    try:
        return path.is_dir()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError:
        return False  # no possible file name; opening it will say so


def is_there(path: Path) -> bool:
    """Return whether there is something of that name, be it a link that leads nowhere."""
    return path.exists() if isinstance(path, StorePath) else os.path.lexists(path)


def list_names(directory: Path) -> list[str]:
    """List the names in a folder, in order."""
    check_inside(directory)
    try:
        return sorted(path.name for path in directory.iterdir())
    except OSError as error:
        raise InputError(f"{directory}: cannot be listed: {error.strerror or error}") from None


def aligned_bytes(size: int) -> NDArray[np.uint8]:
    """Return memory that begins on a page."""
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def read_at(file_descriptor: int, into: memoryview, position: int) -> int:
    """Fill a buffer; return how many bytes there were before the end of the file."""
    filled = 0
    while rest := into[filled:]:
        if not (count := read_some(file_descriptor, rest, position + filled)):
            break
        filled += count
    return filled


class OutputFile:
    """A file of known size that is written at any position, by any thread.

    Without a size it must be there already, as another process has made it.
    """

    def __init__(self, path: Path, size: int | None) -> None:
        make = 0 if size is None else os.O_CREAT
        self._buffered = os.open(path, os.O_RDWR | make | NO_LINKS, 0o666)
        self._writing = self._direct = -1
        self._memory: NDArray[np.uint8] | None = None
        try:
            if size is not None:
                os.ftruncate(self._buffered, size)
            # NFS writes whole pages of a file that may be read, over what other machines wrote.
            self._writing = os.open(path, os.O_WRONLY | NO_LINKS)
            self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT)
        except (AttributeError, OSError) as error:  # no O_DIRECT on this system or file system
            if getattr(error, "errno", errno.EINVAL) != errno.EINVAL:
                self.close()
                raise

    def reserve(self) -> None:
        """Take the room on the disk, where the system can do that at once.

        Direct writes into room that is taken need not wait for each other. A file that lies in
        memory is mapped then, because writes to it would wait for each other too.
        """
        size = os.fstat(self._buffered).st_size
        if size and _take_room(self._buffered, size) and _is_in_memory(self._buffered):
            self._memory = np.frombuffer(mmap.mmap(self._buffered, size), np.uint8)

    def place(self, position: int, nbytes: int) -> NDArray[np.uint8] | None:
        """Return some bytes of a file in memory, to be written there; None of any other file."""
        return None if self._memory is None else self._memory[position : position + nbytes]

    def write(self, data: Bytes, position: int) -> None:
        """Write a buffer; directly, where its alignment in memory and file agree."""
        view = memoryview(data) if isinstance(data, bytes) else data.data
        first = min(-position % ALIGNMENT, len(view))
        last = max(first, len(view) - (position + len(view)) % ALIGNMENT)
        address = data.ctypes.data if isinstance(data, np.ndarray) else 1  # bytes are never aligned
        if self._direct < 0 or first == last or (address + first) % ALIGNMENT:
            first = last = 0
        written = first
        if first < last:
            written = self._write_directly(view[first:last], position + first) + first
        _write_all(self._writing, view[:first], position)
        _write_all(self._writing, view[written:], position + written)

    def _write_directly(self, view: memoryview, position: int) -> int:
        """Write whole pages; return how many bytes went this way."""
        done = 0
        while done < len(view):
            try:
                count = write_some(self._direct, view[done:], position + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                break  # the device wants something else: leave the rest to the page cache
            done += count
            if count % ALIGNMENT:
                break
        return done

    def read(self, position: int, nbytes: int) -> bytes:
        """Read bytes back, or as many as there are."""
        found = bytearray(nbytes)
        return bytes(found[: read_at(self._buffered, memoryview(found), position)])

    def unwritten_bytes(self) -> int:
        """Return about how much of the file has no place on the disk yet."""
        status = os.fstat(self._buffered)
        blocks = getattr(status, "st_blocks", status.st_size)  # Windows has them when it has a size
        return max(0, status.st_size - blocks * 512)

    def sync(self) -> None:
        """Wait until everything is on the disk."""
        os.fsync(self._buffered)

    def close(self) -> None:
        """Close."""
        for file_descriptor in (self._buffered, self._writing, self._direct):
            if file_descriptor >= 0:
                os.close(file_descriptor)
        self._buffered = self._writing = self._direct = -1
        self._memory = None


MEMORY_FILE_SYSTEMS = (0x01021994, 0x858458F6)  # the numbers of tmpfs and ramfs on Linux


def _take_room(file_descriptor: int, size: int) -> bool:
    """Have all of a file allocated; False if that cannot be done without writing it."""
    take = system_call("fallocate")  # os.posix_fallocate writes where this is not known
    whole = 0, ctypes.c_longlong(0), ctypes.c_longlong(size)
    return take is not None and bool(take(file_descriptor, *whole) == 0)


def _is_in_memory(file_descriptor: int) -> bool:
    status = (ctypes.c_long * 32)()  # the first of it is the kind
    ask = system_call("fstatfs")
    return ask and ask(file_descriptor, status) == 0 and status[0] in MEMORY_FILE_SYSTEMS


def _write_all(file_descriptor: int, rest: memoryview, position: int) -> None:
    while rest:
        count = write_some(file_descriptor, rest, position)
        rest = rest[count:]
        position += count


# ---------------------------------------------------------------- files of this user alone


def is_safe(folder: Path) -> bool:
    """Return whether only this user and root can write to a folder, or put another in its place.

    Others can write to a sticky folder above it, such as the system's for temporary files, but
    cannot rename or remove files that are not theirs.
    """
    if not IS_POSIX:
        return True
    above = {*folder.absolute().parents, *folder.resolve().parents}
    return _is_private(folder.stat()) and all(
        _is_private(each.stat(), or_sticky=True) for each in above
    )


def _is_private(status: os.stat_result, *, or_sticky: bool = False) -> bool:
    is_sticky = or_sticky and bool(status.st_mode & stat.S_ISVTX)
    is_open = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)) and not is_sticky
    return status.st_uid in (0, os.geteuid()) and not is_open


def read_private(file: Path) -> bytes:
    """Read a file that nobody but this user and root can write to; PermissionError if it is not."""
    with open(file, "rb", opener=lambda path, flags: os.open(path, flags | NO_LINKS)) as opened:
        is_private = not IS_POSIX or _is_private(os.fstat(opened.fileno()))
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


def make_private(folder: Path) -> None:
    """Make a folder, and those above it, for this user alone, whatever the umask is."""
    if not folder.is_dir():
        make_private(folder.parent)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)


def cache_folder() -> Path:
    """Return the folder in which this user's programs keep files that they can make again."""
    variables = ["XDG_CACHE_HOME"] + ["LOCALAPPDATA"] * (sys.platform == "win32")
    given = (Path(os.environ.get(name, "")) for name in variables)
    if home := next(filter(Path.is_absolute, given), None):
        return home / "dare"
    with suppress(RuntimeError):  # no HOME, and nobody is known by this number
        return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "dare"
    return temporary_folder()


def temporary_folder() -> Path:
    """Return the folder of this user's files if there is no home."""
    user = os.geteuid() if IS_POSIX else "user"
    return Path(os.environ.get("TMPDIR") or "/tmp") / f"dare-{user}"  # noqa: S108 (if it is safe)
