"""A file system that forgets what was not synced, as a disk does when the power is cut.

It speaks the protocol of the kernel's FUSE itself, on a disk of `power.py` in memory, so it needs
no library. After a given number of changes the power fails: what is left is worked out, and every
later call fails. Run as a program, in mount and user namespaces of its own, it merges on this file
system, cuts the power, and takes the merge up again on an ordinary one:

    unshare --user --map-root-user --mount python tests/attack/forgetful.py FOLDER NAME SIZE SEED
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import struct
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self

from interposing import CANNOT_MOUNT
from power import Call, Contents, Disk, File, Folder

Node = Folder | File
HEADER = struct.Struct("<IIQQIIIHH")
ANSWER = struct.Struct("<IiQ")
ATTRIBUTES = struct.Struct("<6Q10I")
ENTRY = struct.Struct("<4Q2I")
OPENED = struct.Struct("<QIi")
INIT = struct.Struct("<4I2H2I2HI7I")
LARGEST_WRITE = 1 << 17
BIG_WRITES = 1 << 5
SIZE_IS_SET = 1 << 3
NO_REPLACE, EXCHANGE = 1, 2
OPCODES = {
    1: "look_up",
    3: "describe",
    4: "change",
    9: "make_folder",
    10: "remove",
    11: "remove",
    12: "rename_over",
    13: "link",
    14: "open",
    15: "read",
    16: "write",
    17: "describe_disk",
    18: "ignore",
    20: "sync",
    25: "ignore",
    26: "start",
    27: "open",
    28: "list",
    29: "ignore",
    30: "sync",
    35: "create",
    45: "rename",
}
MOST_CUTS = 60
UNANSWERED = (2, 36, 42)
"""Forgetting of nodes, and interrupts."""


class PowerCutError(Exception):
    """The power is off."""


class Forgetful:
    """The file system at a folder; a context manager."""

    def __init__(
        self, folder: Path, start: Contents, cut_after: int = 0, seed: object | None = None
    ) -> None:
        self.disk = Disk(start)
        self.changes = 0
        """Calls that changed something, a sync among them."""
        self.left: Contents | None = None
        """What is left after the power cut."""
        self._folder = folder
        self._cut_after = cut_after
        self._seed = seed
        self._nodes: dict[int, Node] = {1: self.disk.root}
        self._numbers: dict[Node, int] = {self.disk.root: 1}

    def __enter__(self) -> Self:
        self._device = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0"
        if _system().mount(b"forgetful", os.fsencode(self._folder), b"fuse", 0, options.encode()):
            number = ctypes.get_errno()
            os.close(self._device)
            raise OSError(number, os.strerror(number), str(self._folder))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        detached = 2
        _system().umount2(os.fsencode(self._folder), detached)
        self._thread.join(timeout=10)
        os.close(self._device)

    def _serve(self) -> None:
        while True:
            try:
                request = os.read(self._device, LARGEST_WRITE + (1 << 16))
            except OSError as error:
                if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                    continue
                return  # unmounted
            _, opcode, unique, node, *_ = HEADER.unpack_from(request)
            if opcode in UNANSWERED:
                continue
            try:
                answer, number = self._answer(opcode, node, request[HEADER.size :]), 0
            except OSError as error:
                answer, number = b"", -(error.errno or errno.EIO)
            except PowerCutError:
                answer, number = b"", -errno.EIO
            try:
                os.write(
                    self._device, ANSWER.pack(ANSWER.size + len(answer), number, unique) + answer
                )
            except OSError:  # interrupted, or unmounted
                continue

    def _answer(self, opcode: int, node: int, given: bytes) -> bytes:
        if opcode not in OPCODES:
            raise OSError(errno.ENOSYS, "not needed here")
        does: Callable[[Node, bytes], bytes] = getattr(self, f"_{OPCODES[opcode]}")
        return does(self._nodes.get(node, self.disk.root), given)

    # ------------------------------------------------------------ changes

    def _play(
        self, name: str, path: str, other: str = "", offset: int = 0, data: bytes = b""
    ) -> None:
        """Change the disk, unless the power is off; perhaps that was the last change."""
        if self.left is not None:
            raise PowerCutError
        self.disk.play(Call(name, path, other, offset, data))
        self.changes += 1
        if self.changes == self._cut_after:
            luck = None if self._seed is None else random.Random(repr(self._seed))
            self.left = self.disk.after_cut(luck)

    def _path(self, node: Node) -> str:
        """Where a node is now: folders are few, so they are searched."""
        return "." if node is self.disk.root else _find(self.disk.root, node, "")

    def _below(self, folder: Node, name: bytes) -> str:
        path = self._path(folder)
        text = os.fsdecode(name.rstrip(b"\0"))
        return text if path == "." else f"{path}/{text}"

    def _create(self, folder: Node, given: bytes) -> bytes:
        path = self._below(folder, given[16:])
        self._play("create", path)
        return self._entry(self._at(path)) + OPENED.pack(0, 0, 0)

    def _make_folder(self, folder: Node, given: bytes) -> bytes:
        path = self._below(folder, given[8:])
        self._play("mkdir", path)
        return self._entry(self._at(path))

    def _remove(self, folder: Node, given: bytes) -> bytes:
        path = self._below(folder, given)
        node = self._at(path)
        if isinstance(node, Folder) and node.names:
            raise OSError(errno.ENOTEMPTY, "not empty")
        self._play("unlink", path)
        return b""

    def _rename_over(self, folder: Node, given: bytes) -> bytes:
        return self._rename(folder, given[:8] + bytes(8) + given[8:])

    def _rename(self, folder: Node, given: bytes) -> bytes:
        into, flags = struct.unpack_from("<QI", given)
        old, new = given[16:].rstrip(b"\0").split(b"\0")
        first, second = self._below(folder, old), self._below(self._nodes[into], new)
        there = self._try(second)
        if flags & NO_REPLACE and there is not None:
            raise OSError(errno.EEXIST, "exists")
        if isinstance(there, Folder) and there.names and not flags & EXCHANGE:
            raise OSError(errno.ENOTEMPTY, "not empty")
        self._play("exchange" if flags & EXCHANGE else "rename", first, second)
        return b""

    def _link(self, folder: Node, given: bytes) -> bytes:
        (number,) = struct.unpack_from("<Q", given)
        path = self._below(folder, given[8:])
        self._play("link", self._path(self._nodes[number]), path)
        return self._entry(self._at(path))

    def _write(self, node: Node, given: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", given)
        self._play_on(node, "write", offset, given[40 : 40 + size])
        return struct.pack("<II", size, 0)

    def _change(self, node: Node, given: bytes) -> bytes:
        valid, _, _, size = struct.unpack_from("<IIQQ", given)
        if valid & SIZE_IS_SET:
            self._play_on(node, "resize", size, b"")
        return self._describe(node, b"")

    def _sync(self, node: Node, _given: bytes) -> bytes:
        self._play_on(node, "sync", 0, b"")
        return b""

    def _play_on(self, node: Node, name: str, offset: int, data: bytes) -> None:
        """Change an open file, which may have lost its name."""
        path = self._path(node)
        if path:
            self._play(name, path, "", offset, data)
        elif isinstance(node, File) and name == "write":
            node.write(offset, data)
        elif isinstance(node, File) and name == "resize":
            node.resize(offset)

    # ------------------------------------------------------------ questions

    def _try(self, path: str) -> Node | None:
        node: Node = self.disk.root
        for part in path.split("/"):
            if not isinstance(node, Folder) or part not in node.names:
                return None
            node = node.names[part]
        return node

    def _at(self, path: str) -> Node:
        node = self._try(path)
        if node is None:
            raise OSError(errno.ENOENT, "no such file")
        return node

    def _look_up(self, folder: Node, given: bytes) -> bytes:
        return self._entry(self._at(self._below(folder, given)))

    def _entry(self, node: Node) -> bytes:
        if node not in self._numbers:
            number = len(self._numbers) + 1
            self._numbers[node], self._nodes[number] = number, node
        return ENTRY.pack(self._numbers[node], 0, 0, 0, 0, 0) + self._attributes(node)

    def _attributes(self, node: Node) -> bytes:
        mode, size = (0o40755, 4096) if isinstance(node, Folder) else (0o100644, node.size)
        times = (0,) * 6
        blocks = -(-size // 512)
        return ATTRIBUTES.pack(self._numbers[node], size, blocks, *times, mode, 1, 0, 0, 0, 4096, 0)

    def _describe(self, node: Node, _given: bytes) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + self._attributes(node)

    def _describe_disk(self, _node: Node, _given: bytes) -> bytes:
        free = 1 << 24
        return struct.pack("<5Q10I", free, free, free, free, free, 4096, 255, 4096, *[0] * 7)

    def _open(self, _node: Node, _given: bytes) -> bytes:
        return OPENED.pack(0, 0, 0)

    def _read(self, node: Node, given: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", given)
        assert isinstance(node, File)
        return node.after([True] * len(node.pending))[offset : offset + size]

    def _list(self, node: Node, given: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", given)
        assert isinstance(node, Folder)
        listed = b""
        for place, (name, below) in enumerate(sorted(node.names.items()), start=1):
            raw = os.fsencode(name)
            kind = 4 if isinstance(below, Folder) else 8
            line = struct.pack("<QQII", place + 1, place, len(raw), kind) + raw
            line += bytes(-len(line) % 8)
            if place > offset and len(listed) + len(line) <= size:
                listed += line
        return listed

    def _start(self, _node: Node, given: bytes) -> bytes:
        major, minor, ahead = struct.unpack_from("<3I", given)
        return INIT.pack(
            major, min(minor, 31), ahead, BIG_WRITES, 16, 12, LARGEST_WRITE, 1, 32, 0, 0, *[0] * 7
        )

    def _ignore(self, _node: Node, _given: bytes) -> bytes:
        return b""


def _find(folder: Folder, wanted: Node, prefix: str) -> str:
    """The path of a node, or nothing if it has none any more."""
    for name, node in folder.names.items():
        if node is wanted:
            return prefix + name
        if isinstance(node, Folder) and (found := _find(node, wanted, f"{prefix}{name}/")):
            return found
    return ""


def _system() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def why_not(folder: Path) -> str:
    """Say why it cannot be mounted here, or nothing."""
    try:
        with Forgetful(folder, {}):
            return ""
    except OSError as error:
        return f"FUSE cannot be mounted: {error.strerror}"


def main(folder: Path, name: str, size: int, seed: int) -> int:
    """Cut the power of a scenario's merges; return an exit status."""
    from interposing import Warm, build
    from scenarios import BY_NAME, Place, check_between, check_end, chosen

    if reason := why_not(folder):
        print(reason)
        return CANNOT_MOUNT
    scenario = BY_NAME[name]
    with Warm(build(folder), folder / "errors") as warm:
        place = Place(folder / "place", warm)
        start = place.end(scenario).start
        place.reset(start)
        with Forgetful(place.work, start) as whole:
            outcome = place.run(scenario.command)
        assert outcome.status == 0, f"{name}: {outcome.err}"
        for luck in (None, 1, 2):
            place.reset(whole.disk.after_cut(luck and random.Random(luck)))
            assert check_between(place, scenario, f"{name}, done"), f"{name}: done, and lost"
        moments = [(at, luck) for at in range(1, whole.changes + 1) for luck in (None, (seed, at))]
        cuts = chosen((seed, name), size, moments)[:MOST_CUTS]
        for at, luck in cuts:
            place.reset(start)
            with Forgetful(place.work, start, at, luck) as cut:
                place.run(scenario.command)
            assert cut.left is not None, f"{name}: change {at} never came"
            place.reset(cut.left)
            check_end(place, scenario, f"{name}, power cut at change {at}, {luck}")
    print(f"{len(cuts)} power cuts in {whole.changes} changes")
    return 0


if __name__ == "__main__":
    tests = Path(__file__).parents[1]
    sys.path += [str(tests), str(tests / "lora")]
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
