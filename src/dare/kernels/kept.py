"""Machine code that was compiled once: kept in files, loaded with LLVM alone.

A file is for one kernel, for arguments of some types. Its name says for which processor and which
versions; in it stand a digest, the text of the kernels it was made from, and an object file. One
that is spoilt, or made from another text, counts as none.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
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
        content = _file(name, types).read_bytes()
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
    file = _file(name, types)
    partial = file.with_name(f"{file.name}.{os.getpid()}.partial")
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(_digest(rest) + rest)
        partial.replace(file)


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


def _file(name: str, types: Sequence[str]) -> Path:
    made_for = _digest(json.dumps([list(types), _machine()]).encode()).hex()
    return folder() / f"{name}-{made_for}.kernel"


def folder() -> Path:
    """Where Numba, too, keeps what it has compiled, or among what this user's programs keep."""
    if given := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(given)
    beside = HERE / "__pycache__"
    if os.access(beside if beside.exists() else HERE, os.W_OK):
        return beside
    return cache_folder() / "kernels"


def cache_folder() -> Path:
    """Where this user's programs keep what they can make again."""
    home = os.environ.get("XDG_CACHE_HOME")
    if home is None and sys.platform == "win32":
        home = os.environ.get("LOCALAPPDATA")
    if home:
        return Path(home) / "dare"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "dare"


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
