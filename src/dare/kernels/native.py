"""Kernels as machine code: compiled once by Numba, kept in files, and run by LLVM alone.

Importing Numba takes longer than a small merge. So the machine code that it makes of a kernel, for
arguments of some types, is kept and runs by itself from then on. Only public parts of Numba and
llvmlite are used: a C callback that calls the kernel, its LLVM code, and LLVM's linker. A kernel
therefore neither makes arrays nor raises errors; its `room` brings the scratch arrays.

A file is for one kernel, for arguments of some types. Its name says for which processor and which
versions; it holds a digest, the digest of the sources that it was made from, and an object file.
One that is damaged, or made from other sources, counts as none.

The digest shows damage and does not say who wrote the file. So files are only kept in, and loaded
from, folders that nobody but this user and root can write to. Where there is none, kernels are
compiled for this process alone.

A public name here that is not written out is a kernel of `cpu`; `reference` says what each
computes.
"""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from itertools import compress, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dare.kernels import LANES_MULTIPLE, ROW, Operand, reference
from dare.kernels.reference import SCALE_GROUP, SUM_LANES, Floats, Lanes, Raw
from dare.tensors.chunks import CHUNK, chunk_count, chunk_spans
from dare.tensors.files import (
    cache_folder,
    is_safe,
    make_private,
    read_private,
    temporary_folder,
    write_private,
)
from dare.tensors.mask import CALLS_PER_GROUP, GROUP
from dare.tensors.system import IS_POSIX

PACKAGE = Path(__file__).parents[1]
# The files that decide the machine code of the kernels in `cpu`.
SOURCES = (
    *("kernels/__init__.py", "kernels/cpu.py", "kernels/native.py", "kernels/reference.py"),
    *("tensors/chunks.py", "tensors/mask.py"),
)
DIGEST_BYTES = 16
SYMBOL = "dare_kernel"
PLAIN_FLAGS = 0x1 | 0x100  # flags of an array that is C-contiguous and aligned
# Offsets, in bytes, of the addresses of an array's data and of its lengths (NumPy's ABI).
DATA_OFFSET, LENGTHS_OFFSET = object.__basicsize__, object.__basicsize__ + 16

# Seconds of compiling that nothing is said about, where other kernels were kept before.
UNSAID_SECONDS = 1.0

_loading = threading.Lock()
_announcers: list[Callable[[], None]] = []
_announced: list[bool] = []
_compiling: list[float] = []  # seconds for each kernel that was compiled in this process
_engines: list[Any] = []


@dataclass(eq=False)
class Kernel:
    """A kernel with machine code for each kind of arguments.

    Sources are the files that decide it; `room` makes the scratch arrays after its arguments.
    """

    name: str
    module: str
    sources: Sequence[str]
    room: Callable[..., Sequence[Any]] | None = None
    variants: dict[tuple[Any, ...], Callable[..., Any]] = field(default_factory=dict, init=False)

    def __call__(self, *arguments: Any) -> Any:
        """Run it; only here the interpreter's lock is held."""
        if self.room:
            arguments = (*arguments, *self.room(*arguments))
        kinds: list[Any] = []
        values: list[Any] = []
        copies: list[tuple[Any, Any]] = []
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                array = argument
                if array.flags.num & PLAIN_FLAGS != PLAIN_FLAGS:
                    array = np.require(argument, requirements=["C", "A"])
                    copies.append((argument, array))
                kinds += (array.dtype.str, array.ndim)
                values.append(id(array))  # its address, where the kernel finds data and shape
            else:
                kinds.append(type(argument))
                values.append(argument.item() if isinstance(argument, np.generic) else argument)
        run = self.variants.get(key := tuple(kinds)) or self._load(key, arguments)
        result = run(values)
        for given, copy in copies:
            if given.flags.writeable:
                given[...] = copy
        return result

    def _load(self, key: tuple[Any, ...], arguments: Sequence[Any]) -> Callable[..., Any]:
        types = [describe(argument) for argument in arguments]
        with _loading:
            if key not in self.variants:
                self.variants[key] = _link(types, self._find(types) or self._compile(types))
            return self.variants[key]

    def _compile(self, types: Sequence[str]) -> Code:
        began = time.perf_counter()
        is_long = _is_first_time() or sum(_compiling) > UNSAID_SECONDS
        if is_long and _announcers and not _announced:
            _announced.append(True)
            for announce in _announcers:
                announce()
        code = compile_kernel(self.module, self.name, types)
        described = {"source": _digest_of(self.sources), "returns": code.returns}
        rest = json.dumps(described).encode() + b"\n" + code.machine_code
        with suppress(OSError):
            write_private(kernel_folder() / self._file_name(types), _digest(rest) + rest)
        _compiling.append(time.perf_counter() - began)
        return code

    def _find(self, types: Sequence[str]) -> Code | None:
        with suppress(OSError, ValueError, KeyError, TypeError):
            content = read_private(kernel_folder() / self._file_name(types))
            digest, rest = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
            if digest == _digest(rest):
                line, _, machine_code = rest.partition(b"\n")
                described = json.loads(line)
                if described["source"] == _digest_of(self.sources):
                    return Code(described["returns"], machine_code)
        return None

    def _file_name(self, types: Sequence[str]) -> str:
        made_for = json.dumps([self.module, *types, *_machine()])
        return f"{self.name}-{_digest(made_for.encode()).hex()}.kernel"


@dataclass(eq=False)
class Kernels:
    """The kernels of a module, as attributes; rooms are those of kernels that need some."""

    module: str
    sources: Sequence[str]
    rooms: Mapping[str, Callable[..., Any]]

    def __getattr__(self, name: str) -> Kernel:
        made = Kernel(name, self.module, self.sources, self.rooms.get(name))
        kernel: Kernel = self.__dict__.setdefault(name, made)
        return kernel


def describe(argument: Any) -> str:
    """Return the type of an argument, as a kernel is compiled for it.

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
    """Call `announce` if kernels are compiled for some time, once in a process."""
    _announcers.append(announce)
    try:
        yield
    finally:
        _announcers.remove(announce)


def working_seconds() -> float:
    """Return the time of a clock that leaves out what it took to compile kernels."""
    return time.perf_counter() - sum(_compiling)


@cache
def _is_first_time() -> bool:
    """Tell whether no kernels were kept, newer than this module, when it was first asked."""
    with suppress(OSError):
        changed = Path(__file__).stat().st_mtime
        return all(file.stat().st_mtime <= changed for file in kernel_folder().glob("*.kernel"))
    return True


# ---------------------------------------------------------------- compiling and linking


class Code(NamedTuple):
    """Machine code of a kernel, for arguments of some types."""

    # One letter for each number that it returns, q or d as in `struct`; in parentheses if they are
    # a tuple.
    returns: str
    machine_code: bytes  # an object file


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
    """Return a function that runs machine code, without the interpreter's lock."""
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
    """Return the machine that code is made for, in the way that Numba describes it."""
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
    """List what machine code depends on, besides the sources of the kernels."""
    import llvmlite

    llvm = _llvm()
    names = {k for k in os.environ if k.startswith("NUMBA_")} - {"NUMBA_CACHE_DIR"}
    return [
        llvm.get_default_triple(),
        llvm.get_host_cpu_name(),
        llvm.get_host_cpu_features().flatten(),
        sys.implementation.cache_tag or "",
        str(DATA_OFFSET),
        *(llvmlite.__version__, numba_version(), np.__version__),
        json.dumps({name: os.environ[name] for name in sorted(names)}),
    ]


@cache
def numba_version() -> str:
    """Return Numba's version, without importing it or `importlib.metadata`, which takes long."""
    found = importlib.util.find_spec("numba")
    place = Path(found.origin or "").parent if found else Path()
    names = sorted(each.stem for each in place.parent.glob("numba-*.dist-info"))
    return names[-1].removeprefix("numba-") if names else "unknown"


@cache
def _digest_of(sources: Sequence[str]) -> str:
    return _digest(b"".join((PACKAGE / source).read_bytes() for source in sources)).hex()


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=DIGEST_BYTES).digest()


def kernel_folder() -> Path:
    """Find or make the folder of compiled kernels; OSError if none may be kept."""
    for place in _folders():
        with suppress(OSError):
            make_private(place)
            if os.access(place, os.W_OK) and is_safe(place):
                return place.resolve()
    raise FileNotFoundError("there is no folder that only this user can write to")


def _folders() -> Iterator[Path]:
    """Yield folders for kernels: the user's choice, beside the sources, in the user's cache.

    Windows has no owners and modes to ask for, so there it is the user's profile alone.
    """
    if IS_POSIX:
        if given := os.environ.get("NUMBA_CACHE_DIR"):
            yield Path(given)
        yield PACKAGE / "kernels" / "__pycache__"
    yield cache_folder() / "kernels"
    if IS_POSIX:
        yield temporary_folder() / "kernels"


# ---------------------------------------------------------------- the kernels of `cpu`

TILE = LANES_MULTIPLE  # elements whose lanes, values and sums stay in a close cache
DIGITS = 256
PLACES_AT_ONCE = 8  # lanes found of each 64 without counting those that are set


class _Scratch(threading.local):
    """Arrays that a thread uses again for each call, since making them takes as long as some."""

    def __init__(self) -> None:
        calls = TILE + CALLS_PER_GROUP
        words = (np.empty(calls, kind) for kind in (np.uint64, np.uint32))
        floats = (np.empty(count, np.float32) for count in (TILE, 4 * ROW))
        self.draw = [np.empty(TILE, np.uint8), *words]
        self.combine = [*self.draw, np.empty(TILE, np.uint8), *floats]
        kinds = (np.uint8, np.uint16, np.float64, np.float64, np.float32)
        self.scores = [np.empty(TILE + PLACES_AT_ONCE, kind) for kind in kinds]
        self.measure = [np.empty(TILE, kind) for kind in (np.uint32, np.uint8)]


_scratch = _Scratch()


def _rank_room(keys: NDArray[Any], *_others: Any) -> list[NDArray[Any]]:
    return [*np.empty((2, keys.shape[1]), np.uint64), np.empty(DIGITS + 1, np.uint32)]


def _drop_room(values: Floats, _left: Any, columns: int, *_others: Any) -> list[NDArray[Any]]:
    lanes = np.empty(values.size + GROUP, np.uint8)
    numbers = np.empty((5, max(columns + 4, DIGITS + 1)), np.uint32)
    return [lanes, numbers, np.zeros((3, columns + CALLS_PER_GROUP), np.uint64)]


# Scratch arrays of kernels that need some, after their other arguments.
ROOMS = {
    "draw": lambda *_: _scratch.draw,
    "combine_tiles": lambda *_: _scratch.combine,
    "collect_keys": lambda *_: _scratch.measure,
    "count_bins": lambda *_: _scratch.measure,
    "sum_products": lambda *_: [np.zeros(SUM_LANES)],
    "draw_order": lambda out, *_: [
        *(np.zeros(out.size + GROUP, kind) for kind in (np.uint8, np.uint8)),
        *(np.zeros(CALLS_PER_GROUP + 1, kind) for kind in (np.uint64, np.uint32)),
    ],
    "drop_by_rank": _drop_room,
    "rank_left": _rank_room,
    "select_ranks": _rank_room,
    "quantise": lambda *_: [np.empty(SCALE_GROUP, kind) for kind in (np.int32, np.uint8)],
    "balance_scores": lambda *_: _scratch.scores,
    "apply_packed": lambda base, *_: [
        np.empty(TILE + PLACES_AT_ONCE, np.uint16),
        np.empty(TILE, base.dtype),
    ],
    "digest_pieces": lambda *_: [np.empty(8, np.uint64)],
}


KERNELS = Kernels("dare.kernels.cpu", SOURCES, ROOMS)


def __getattr__(name: str) -> Kernel:
    if name.startswith("_") or not callable(getattr(reference, name, None)):
        raise AttributeError(f"there is no kernel {name!r}")
    kernel: Kernel = globals().setdefault(name, getattr(KERNELS, name))
    return kernel


def combine(
    base: Raw, operands: list[Operand], start: int, elects: bool, threshold_bits: int, out: Floats
) -> NDArray[np.int64]:
    figures = np.zeros((chunk_count(base.size), len(operands), 4), np.int64)
    selections = [
        (*(each.mask or (0, 0, 256, 0)), *(each.band or (-1, 0, 0, 0))) for each in operands
    ]
    KERNELS.combine_tiles(
        base,
        operands[0].tuned[:0],
        np.array([each.tuned.ctypes.data for each in operands], np.int64),
        start,
        np.array(selections, np.int64),
        np.array([(each.weight, each.share) for each in operands], np.float32),
        elects,
        threshold_bits,
        out,
        figures,
    )
    return figures


SHORT_BYTES = 240  # bytes up to which a digest is computed in another way
# The bytes that XXH3 mixes its input with.
SECRET = np.frombuffer(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
        "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
        "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
        "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
        "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    np.uint8,
)
SECRET_WORDS = np.concatenate([SECRET[at : at + 64].copy().view("<u8") for at in (128, 11, 117)])


def digests(raws: Sequence[NDArray[Any]]) -> list[list[str]]:
    spans = [[count * raw.itemsize for _, count in chunk_spans(raw.size)] for raw in raws]
    is_long = [min(sizes, default=0) > SHORT_BYTES for sizes in spans]
    pieces = [
        (raw.ctypes.data + CHUNK * raw.itemsize * chunk, size)
        for raw, sizes in compress(zip(raws, spans, strict=True), is_long)
        for chunk, size in enumerate(sizes)
    ]
    addresses, sizes = np.array(pieces, np.int64).reshape(-1, 2).T.copy()
    out = np.empty((len(pieces), 2), np.uint64)
    if pieces:
        KERNELS.digest_pieces(addresses, sizes, SECRET, SECRET_WORDS, out)
    found = (f"{high:016x}{low:016x}" for high, low in out.tolist())
    return [
        list(islice(found, len(sizes))) if long else reference.digests([raw])[0]
        for raw, sizes, long in zip(raws, spans, is_long, strict=True)
    ]


def select(raw: Raw, lanes: Lanes, out: Raw) -> int:
    return int(KERNELS.select_integers(_as_integers(raw), lanes, _as_integers(out)))


def expand(packed: Raw, lanes: Lanes, into: Raw) -> int:
    return int(KERNELS.expand_integers(_as_integers(packed), lanes, _as_integers(into)))


def _as_integers(raw: Raw) -> Raw:
    """View carriers as unsigned integers, so that kernels that move them are compiled per width."""
    return raw.view(f"u{raw.dtype.itemsize}")
