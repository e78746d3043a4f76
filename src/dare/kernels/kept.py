"""Kernels as machine code: compiled once by Numba, kept in files, and run by LLVM alone.

Importing Numba takes longer than a small merge. So what it makes of a kernel, for arguments of some
types, is kept and runs by itself from then on. Only public parts of Numba and llvmlite are used: a
C callback that calls the kernel, its LLVM code, and LLVM's linker. A kernel therefore neither makes
arrays nor raises errors; a `room` brings the scratch arrays that it needs.

A file is for one kernel, for arguments of some types. Its name says for which processor and which
versions; in it stand a digest, the digest of the sources that it was made from, and an object file.
One that is damaged, or made from other sources, counts as none.

The digest shows damage and does not say who wrote the file. So files are only kept in, and loaded
from, folders that nobody but this user and root can write to. Where there is none, kernels are
compiled for this process alone.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dare.tensors.files import (
    HAS_OWNERS,
    cache_folder,
    is_safe,
    make_private,
    read_private,
    temporary_folder,
    write_private,
)

PACKAGE = Path(__file__).parents[1]
SOURCES = (
    *("kernels/__init__.py", "kernels/cpu.py", "kernels/kept.py", "kernels/reference.py"),
    *("tensors/chunks.py", "tensors/mask.py"),
)
"""The files that decide the machine code of the kernels in `cpu`."""
DIGEST_BYTES = 16
SYMBOL = "dare_kernel"
PLAIN = 0x1 | 0x100
"""Flags of an array that is C-contiguous and aligned."""
DATA, LENGTHS = object.__basicsize__, object.__basicsize__ + 16
"""Where an array has the address of its data and of its lengths, counted in bytes (NumPy's ABI)."""

_loading = threading.Lock()
_announcers: list[Callable[[], None]] = []
_engines: list[Any] = []


class Kernel:
    """A kernel with machine code for each kind of arguments."""

    def __init__(
        self,
        name: str,
        module: str,
        sources: Sequence[str],
        room: Callable[..., Sequence[Any]] | None = None,
    ) -> None:
        self.name, self._module, self._sources, self._room = name, module, sources, room
        self._variants: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def __call__(self, *arguments: Any) -> Any:
        """Run it; only here the interpreter's lock is held."""
        if self._room:
            arguments = (*arguments, *self._room(*arguments))
        kinds: list[Any] = []
        values: list[Any] = []
        copies: list[tuple[Any, Any]] = []
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                array = argument
                if array.flags.num & PLAIN != PLAIN:
                    array = np.require(argument, requirements=["C", "A"])
                    copies.append((argument, array))
                kinds += (array.dtype.str, array.ndim)
                values.append(id(array))  # its address, where the kernel finds data and shape
            else:
                kinds.append(type(argument))
                values.append(argument.item() if isinstance(argument, np.generic) else argument)
        run = self._variants.get(key := tuple(kinds)) or self._load(key, arguments)
        result = run(values)
        for given, copy in copies:
            if given.flags.writeable:
                given[...] = copy
        return result

    def _load(self, key: tuple[Any, ...], arguments: Sequence[Any]) -> Callable[..., Any]:
        types = [describe(argument) for argument in arguments]
        with _loading:
            if key not in self._variants:
                code = self._find(types) or self._compile(types)
                self._variants[key] = _link(types, code)
            return self._variants[key]

    def _compile(self, types: Sequence[str]) -> Code:
        for announce in _announcers:
            announce()
        code = compile_kernel(self._module, self.name, types)
        described = {"source": _digest_of(self._sources), "returns": code.returns}
        rest = json.dumps(described).encode() + b"\n" + code.machine_code
        with suppress(OSError):
            write_private(folder() / self._file_name(types), _digest(rest) + rest)
        return code

    def _find(self, types: Sequence[str]) -> Code | None:
        with suppress(OSError, ValueError, KeyError, TypeError):
            content = read_private(folder() / self._file_name(types))
            digest, rest = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
            if digest == _digest(rest):
                line, _, machine_code = rest.partition(b"\n")
                described = json.loads(line)
                if described["source"] == _digest_of(self._sources):
                    return Code(described["returns"], machine_code)
        return None

    def _file_name(self, types: Sequence[str]) -> str:
        made_for = json.dumps([self._module, *types, *_machine()])
        return f"{self.name}-{_digest(made_for.encode()).hex()}.kernel"


class Kernels:
    """The kernels of a module, as attributes.

    Sources are the files that decide their machine code; rooms make scratch arrays of kernels that
    need some, which follow their other arguments.
    """

    def __init__(
        self, module: str, sources: Sequence[str], rooms: Mapping[str, Callable[..., Any]]
    ) -> None:
        self._module, self._sources, self._rooms = module, sources, rooms

    def __getattr__(self, name: str) -> Kernel:
        made = Kernel(name, self._module, self._sources, self._rooms.get(name))
        kernel: Kernel = self.__dict__.setdefault(name, made)
        return kernel


def describe(argument: Any) -> str:
    """The type of an argument, as a kernel is compiled for it.

    >>> describe(np.zeros((2, 3), np.float32)), describe(7), describe(np.uint8(7))
    ('float32 2', 'int64', 'uint8')
    """
    if not isinstance(argument, np.ndarray):
        return np.dtype(type(argument)).name
    if not argument.dtype.isnative:
        raise TypeError(f"a kernel needs the byte order of the machine, not {argument.dtype.str}")
    return f"{argument.dtype.name} {argument.ndim}"


@contextmanager
def announcing(announce: Callable[[], None]) -> Iterator[None]:
    """Call `announce` once if anything has to be compiled inside the `with` block."""
    waiting = [announce]

    def once() -> None:
        if waiting:
            waiting.pop()()

    _announcers.append(once)
    try:
        yield
    finally:
        _announcers.remove(once)


# ---------------------------------------------------------------- compiling and linking


class Code(NamedTuple):
    """Machine code of a kernel, for arguments of some types."""

    returns: str
    """One letter for each number that it returns, q or d as in `struct`; in parentheses if they
    are a tuple."""
    machine_code: bytes
    """An object file."""


def compile_kernel(module: str, name: str, types: Sequence[str]) -> Code:
    """Compile a kernel to an object file with one function, which takes the address of a block.

    The block has a word for each argument (for an array its address), then one for each result.
    """
    cpu: Any = importlib.import_module("dare.kernels.cpu")
    entry, returns = cpu.entry_of(getattr(importlib.import_module(module), name), types)
    llvm = _llvm()
    made = llvm.parse_assembly(entry.inspect_llvm())
    for part in (*made.functions, *made.global_variables):
        if part.name == entry.native_name:
            part.name = SYMBOL
        elif not part.is_declaration:
            part.linkage = "internal"
    target = _target_machine()
    passes = llvm.create_pass_builder(target, llvm.create_pipeline_tuning_options(speed_level=1))
    passes.getModulePassManager().run(made, passes)  # removes what only errors would need
    foreign = [each.name for each in made.functions if each.is_declaration]
    if foreign := [each for each in foreign if not each.startswith("llvm.")]:
        raise TypeError(f"the kernel {name} makes arrays or raises errors: it needs {foreign}")
    return Code(returns, target.emit_object(made))


def _link(types: Sequence[str], code: Code) -> Callable[..., Any]:
    """A function that runs machine code, without the interpreter's lock."""
    llvm = _llvm()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code.machine_code))
    engine.finalize_object()
    _engines.append(engine)  # it owns the machine code
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(engine.get_function_address(SYMBOL))
    letters = ["d" if text in {"float32", "float64"} else "q" for text in types]
    letters += code.returns.strip("()")
    kinds = {"d": ctypes.c_double, "q": ctypes.c_int64}
    fields = [(f"_{place}", kinds[letter]) for place, letter in enumerate(letters)]
    block_type = type("Block", (ctypes.Structure,), {"_fields_": fields})
    results = [field for field, _ in fields[len(types) :]]
    reference, is_tuple = ctypes.byref, code.returns.startswith("(")

    def run(values: Sequence[Any]) -> Any:
        block = block_type(*values)
        call(reference(block))
        if is_tuple:
            return tuple(getattr(block, field) for field in results)
        return getattr(block, results[0]) if results else None

    return run


@cache
def _llvm() -> Any:
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding


def _target_machine() -> Any:
    """The machine that code is made for, in the way that Numba describes it."""
    llvm = _llvm()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
        reloc="static" if target.name.startswith("x86") else "default",
        codemodel="jitdefault",
        jit=True,
    )


@cache
def _machine() -> list[str]:
    """What machine code is made for and by, besides the sources of the kernels."""
    import llvmlite

    llvm = _llvm()
    settings = {k: v for k, v in os.environ.items() if k.startswith("NUMBA_")}
    settings.pop("NUMBA_CACHE_DIR", None)
    return [
        llvm.get_default_triple(),
        llvm.get_host_cpu_name(),
        llvm.get_host_cpu_features().flatten(),
        sys.implementation.cache_tag or "",
        str(DATA),
        *(llvmlite.__version__, numba_version(), np.__version__),
        json.dumps(settings, sort_keys=True),
    ]


@cache
def numba_version() -> str:
    """Which Numba is installed, without importing it or `importlib.metadata`, which takes long."""
    found = importlib.util.find_spec("numba")
    place = Path(found.origin or "").parent if found else Path()
    names = sorted(each.stem for each in place.parent.glob("numba-*.dist-info"))
    return names[-1].removeprefix("numba-") if names else "unknown"


@cache
def _digest_of(sources: Sequence[str]) -> str:
    return _digest(b"".join((PACKAGE / source).read_bytes() for source in sources)).hex()


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=DIGEST_BYTES).digest()


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
    """Where kernels may be kept: as the user says, beside the sources, or in this user's cache.

    Windows has no owners and modes to ask for, so there it is the user's profile alone.
    """
    if HAS_OWNERS:
        if given := os.environ.get("NUMBA_CACHE_DIR"):
            yield Path(given)
        yield PACKAGE / "kernels" / "__pycache__"
    yield cache_folder() / "kernels"
    if HAS_OWNERS:
        yield temporary_folder() / "kernels"
