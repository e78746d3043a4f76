"""Machine code that was compiled once: kept in files, loaded with LLVM alone.

A file is for one kernel, for arguments of some types. Its name says for which processor and which
versions; in it stand a digest, the text of the kernels it was made from, and an object file. One
that is spoilt, or made from another text, counts as none.

The digest shows damage and does not say who wrote the file. So files are only kept in, and loaded
from, folders that nobody but this user and root can write to. Where there is none, kernels are
compiled for this process alone.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
SOURCES = (
    *("__init__.py", "compiling.py", "cpu.py", "kept.py", "reference.py", "xxh3.py"),
    *("../tensors/chunks.py", "../tensors/mask.py"),
)
"""What the machine code of a kernel depends on."""
DIGEST_BYTES = 16
HAS_OWNERS = hasattr(os, "geteuid")
"""Whether files have owners and modes, which Windows' do not."""
NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
FINE = (0, -2)
"""What a kernel returns that has not failed: with a result, and without one."""


class Code(NamedTuple):
    """Machine code of a kernel, for arguments of some types."""

    symbol: str
    """What its entry is called."""
    arguments: Sequence[str]
    """Their types, by the names in ctypes."""
    returns: Sequence[str]
    """As well."""
    is_tuple: bool
    """Whether it returns them as a tuple."""
    machine_code: bytes
    """An object file; empty if only Numba can run the kernel."""


def find(name: str, types: Sequence[str]) -> Code | None:
    """What was kept of a kernel for these types."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        content = read_private(folder() / _file_name(name, types))
        digest, rest = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
        if digest == _digest(rest):
            line, _, machine_code = rest.partition(b"\n")
            described = json.loads(line)
            if described.pop("source") == _source():
                return Code(machine_code=machine_code, **described)
    return None


def keep(name: str, types: Sequence[str], code: Code) -> None:
    """Write a file, or none where that cannot be done."""
    described = code._asdict()
    machine_code = described.pop("machine_code")
    rest = json.dumps({**described, "source": _source()}).encode() + b"\n" + machine_code
    with suppress(OSError):
        write_private(folder() / _file_name(name, types), _digest(rest) + rest)


def load(name: str, code: Code) -> Callable[..., Any]:
    """A function that runs machine code, without the interpreter's lock."""
    engine = _engine()
    llvm = _llvm()
    engine.add_object_file(llvm.ObjectFileRef.from_data(code.machine_code))
    engine.finalize_object()
    arguments = [getattr(ctypes, kind) for kind in code.arguments]
    prototype = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, *arguments)
    call = prototype(engine.get_function_address(code.symbol))
    fields = [(f"_{place}", getattr(ctypes, kind)) for place, kind in enumerate(code.returns)]
    room = type("Returned", (ctypes.Structure,), {"_fields_": fields})
    reference, is_tuple = ctypes.byref, code.is_tuple

    def run(_arguments: Any, values: Any) -> Any:
        returned = room()
        if (status := call(reference(returned), *values)) not in FINE:
            raise MemoryError(f"the kernel {name} could not be run (status {status})")
        if is_tuple:
            return tuple(getattr(returned, field) for field, _ in fields)
        return getattr(returned, fields[0][0]) if fields else None

    return run


def _file_name(name: str, types: Sequence[str]) -> str:
    made_for = _digest(json.dumps([list(types), _machine()]).encode()).hex()
    return f"{name}-{made_for}.kernel"


# ---------------------------------------------------------------- folders


def folder() -> Path:
    """Find or make the folder of compiled kernels; OSError if nobody may keep any."""
    for place in _places():
        with suppress(OSError):
            make_private(place)
            if os.access(place, os.W_OK) and is_safe(place):
                return place.resolve()
    raise FileNotFoundError("there is no folder that only this user can write to")


def _places() -> Iterator[Path]:
    """Where kernels may be kept: as the user says, or where Numba would, or in this user's cache.

    Windows has no owners and modes to ask for, so there it is the user's profile alone.
    """
    if HAS_OWNERS:
        if given := os.environ.get("NUMBA_CACHE_DIR"):
            yield Path(given)
        yield HERE / "__pycache__"
    yield cache_folder() / "kernels"
    if HAS_OWNERS:
        yield _temporary_folder() / "kernels"


def is_safe(place: Path) -> bool:
    """Whether nobody but this user and root can write to a folder, or put another in its place.

    In a sticky folder above it, such as the system's for temporary files, others can write, but
    cannot rename or remove what is not theirs.
    """
    if not HAS_OWNERS:
        return True
    above = {*place.absolute().parents, *place.resolve().parents}
    return _is_private(place.stat()) and all(_keeps_entries(each.stat()) for each in above)


def _keeps_entries(status: os.stat_result) -> bool:
    is_sticky = bool(status.st_mode & stat.S_ISVTX)
    return _is_private(status) or (is_sticky and _is_ours(status))


def _is_private(status: os.stat_result) -> bool:
    return _is_ours(status) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _is_ours(status: os.stat_result) -> bool:
    return status.st_uid in (0, os.geteuid())


def read_private(file: Path) -> bytes:
    """Read a file that nobody but this user and root can write to; PermissionError if it is not."""
    with open(file, "rb", opener=lambda path, flags: os.open(path, flags | NOFOLLOW)) as opened:
        is_private = not HAS_OWNERS or _is_private(os.fstat(opened.fileno()))
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


def make_private(place: Path) -> None:
    """Make a folder, and those above it, for this user alone, whatever the umask is."""
    if not place.is_dir():
        make_private(place.parent)
        with suppress(FileExistsError):
            place.mkdir(mode=0o700)


def cache_folder() -> Path:
    """Where this user's programs keep what they can make again."""
    home = os.environ.get("XDG_CACHE_HOME")
    if home is None and sys.platform == "win32":
        home = os.environ.get("LOCALAPPDATA")
    if home:
        return Path(home) / "dare"
    with suppress(RuntimeError):  # no HOME, and nobody is known by this number
        return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "dare"
    return _temporary_folder()


def _temporary_folder() -> Path:
    user = os.geteuid() if HAS_OWNERS else "user"
    return Path(os.environ.get("TMPDIR") or "/tmp") / f"dare-{user}"  # noqa: S108 (if it is safe)


def numba_folder() -> str:
    """Find or make the folder for Numba's own cache of pickles; empty if there is no safe one.

    Nobody else may even enter it: Numba makes folders in it by the umask.
    """
    with suppress(OSError):
        place = folder() / "numba"
        make_private(place)
        if not HAS_OWNERS or stat.S_IMODE(place.stat().st_mode) == 0o700:
            return str(place)
    return ""


@cache
def _machine() -> list[str]:
    """What machine code is made for and by, besides the text of the kernels."""
    import llvmlite

    llvm = _llvm()
    settings = {k: v for k, v in os.environ.items() if k.startswith("NUMBA_")}
    settings.pop("NUMBA_CACHE_DIR", None)
    return [
        llvm.get_default_triple(),
        llvm.get_host_cpu_name(),
        llvm.get_host_cpu_features().flatten(),
        sys.implementation.cache_tag or "",
        str(object.__basicsize__),
        llvmlite.__version__,
        numba_version(),
        json.dumps(settings, sort_keys=True),
    ]


@cache
def numba_version() -> str:
    """Which Numba there is, without importing it; that takes long."""
    found = importlib.util.find_spec("numba")
    with suppress(OSError):
        text = Path(found.origin or "").with_name("_version.py").read_text() if found else ""
        if version := re.search(r"""version['"]?:\s*['"]([^'"]+)['"]""", text):
            return version[1]
    return "unknown"


@cache
def _source() -> str:
    return _digest(b"".join((HERE / source).read_bytes() for source in SOURCES)).hex()


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=DIGEST_BYTES).digest()


def _llvm() -> Any:
    from llvmlite import binding

    return binding


@cache
def _engine() -> Any:
    llvm = _llvm()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple().create_target_machine()
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), target)
