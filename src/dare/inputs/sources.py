"""Sources of weights: tensors by name, whatever holds them.

A source is opened twice: once to read headers, for the plan, and once to read weights. In between
no file is held open, and the second time each file must still be the one that was planned for.


Stored weights as numbers, the one walk over the chunks of a tensor, and sources in memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from dare import kernels
from dare.documents.notices import Notice
from dare.errors import HeaderError, InputError
from dare.stores.locations import StorePath, to_path
from dare.tensors.chunks import CHUNK, bytes_digest, chunk_count, chunk_span, chunk_spans
from dare.tensors.dtypes import StorageType
from dare.tensors.files import (
    InputFile,
    Stamp,
    is_directory,
    list_names,
    open_input,
    prefetch_beginnings,
    read_limited,
    share_ahead,
)
from dare.tensors.header import Header, TensorInfo, admit, read_header
from dare.tensors.names import some_of

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_INDEX_BYTES = 100_000_000

Raw = NDArray[Any]  # elements as they are stored, flat

_NONE: dict[str, Any] = {}


class Drop(NamedTuple):
    """The mask by which elements of a delta were dropped before it was stored."""

    rate: float
    seed: int
    name: str


class Source:
    """Tensors by name, readable from any element on, from any thread.

    The defaults are those of a whole model in memory; every form of model changes what it must.
    """

    tensors: Mapping[str, TensorInfo]
    files: tuple[Path, ...] = ()  # the files behind the source; none for arrays
    remarks: tuple[Notice, ...] = ()
    is_partial: bool = False  # True if a tensor that it lacks is unchanged, as in an adapter
    was_dropped: bool = False  # True if randomly dropped changes are made up for as it is read
    reading_bytes: int = 0  # memory for each thread that reads, beside the buffer that is filled
    ahead_bytes: int = 0  # memory for reading ahead of a store, of all threads together
    ties: Mapping[str, str] = _NONE  # further names of tensors, and the name each stands for

    def holds_delta(self, name: str) -> bool:  # noqa: ARG002
        """Return whether a tensor is the change to the base, in float32, instead of the weights."""
        return False

    def drop_of(self, name: str) -> Drop | None:  # noqa: ARG002
        """Return the mask by which a tensor's change was dropped; the rest is not rescaled."""
        return None

    def original_digest(self, name: str) -> str | None:  # noqa: ARG002
        """Return the digest of the whole tensor, if all that is left of it is unchanged."""
        return None

    def base_digest(self, name: str) -> str | None:  # noqa: ARG002
        """Return the digest that the base's tensor must have for this one to mean anything."""
        return None

    def bytes_for(self, name: str, count: int) -> int:
        """Return about how many bytes of its files so many elements of a tensor take."""
        return count * self.tensors[name].dtype.itemsize

    def fingerprint(self) -> list[Any]:
        """Return what identifies it in headers and configurations, to resume a merge."""
        lines = (f"{i.name}\t{i.dtype.name}\t{i.shape}\t{i.start}" for i in self.tensors.values())
        return [bytes_digest("\n".join(lines).encode())]

    def stamps(self) -> list[Any]:
        """Return the facts by which its files are known to be the same, without reading them."""
        return []

    def read(self, name: str, start: int, into: Raw) -> None:
        """Fill `into`, an array of the tensor's carrier type, with its elements from `start` on."""
        raise NotImplementedError

    def read_beside(self, name: str, start: int, into: Raw, base: Raw) -> None:  # noqa: ARG002
        """Fill `into` likewise, with the base's elements at hand."""
        self.read(name, start, into)

    def view(self, name: str, start: int, count: int) -> Raw | None:  # noqa: ARG002
        """Return elements where they lie in memory, not to be changed; None: they must be read."""
        return None

    def chunk_digest(self, name: str, chunk: int) -> str | None:  # noqa: ARG002
        """Return the digest of a chunk, if it is known without reading."""
        return None

    def place(self, name: str) -> Hashable:  # noqa: ARG002
        """Return the place of a tensor, the same for two names of one tensor; None: unknown."""
        return None

    def prefetch(self, name: str, start: int, count: int) -> None:
        """Say that these elements will be read soon."""

    def limit_ahead(self, nbytes: int) -> None:
        """Read no more than this ahead of a store."""
        self.ahead_bytes = min(self.ahead_bytes, nbytes)

    def __enter__(self) -> Self:
        """Open for reading weights."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close."""

    def check_unchanged(self) -> None:
        """Raise InputError if what was read may no longer be what was planned for."""


class InputFiles(Source):
    """A source in files: as they were for the plan, and open while weights are read."""

    def __init__(self) -> None:
        self._stamps: dict[Path, Stamp] = {}
        self._open: dict[Path, InputFile] = {}
        self._users = 0  # the number of those who have entered: others may read rows through theirs
        self.tensors: dict[str, TensorInfo] = {}
        self._home: dict[str, Path] = {}

    @contextmanager
    def open_header(self, file: Path) -> Iterator[InputFile]:
        """Open a file to read its header, and remember its stamp."""
        opened = open_input(file)
        try:
            yield opened
            self._stamps[file] = opened.stamp
            self.files = tuple(self._stamps)
            if isinstance(file, StorePath):
                from dare.stores.ahead import AHEAD_BYTES, LONE_BYTES

                self.ahead_bytes, self.reading_bytes = AHEAD_BYTES, LONE_BYTES
        except OSError as error:
            raise InputError(f"{file}: cannot be read: {error.strerror or error}") from error
        finally:
            opened.close()

    def stamps(self) -> list[Any]:
        # without the device, to which machines that share the files give other numbers
        return [(*stamp[:2], *stamp[3:]) for stamp in self._stamps.values()]

    def __enter__(self) -> Self:
        self._users += 1
        try:
            if self._users == 1:
                ahead = share_ahead(self.ahead_bytes) if self.ahead_bytes else None
                for file, stamp in self._stamps.items():
                    self._open[file] = open_input(file, stamp, ahead)
            self.check_unchanged()
        except InputError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._users = max(0, self._users - 1)
        if not self._users:
            for opened in self._open.values():
                opened.close()
            self._open = {}

    def check_unchanged(self) -> None:
        for file, stamp in self._stamps.items():
            if self._open[file].stamp[:-1] != stamp[:-1]:
                text = f"{file}: changed since the merge was planned; run the merge again"
                raise InputError(text)

    def read(self, name: str, start: int, into: Raw) -> None:
        self.read_bytes(self._home[name], self.tensors[name].position(start), into, name)

    def prefetch(self, name: str, start: int, count: int) -> None:
        info = self.tensors[name]
        nbytes = count * info.dtype.itemsize
        self.prefetch_bytes(self._home[name], info.position(start), nbytes)

    def read_bytes(self, file: Path, position: int, into: Raw, what: str) -> None:
        """Fill `into` from a position in a file on; `what` is being read, for messages."""
        try:
            count = self._open[file].read_at(into.view(np.uint8).data, position)
        except OSError as error:
            raise InputError(f"{file}: cannot read {what}: {error.strerror or error}") from error
        if count < into.nbytes:
            text = f"{file}: ends inside {what}; the file was cut while it was being read"
            raise InputError(text)

    def prefetch_bytes(self, file: Path, position: int, nbytes: int) -> None:
        """Say that these bytes will be read soon."""
        self._open[file].prefetch(position, nbytes)


class FileSource(InputFiles):
    """One safetensors file, or the shards of one model."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.headers: dict[Path, Header] = {}
        files = find_files(path, INDEX_NAME, SINGLE_NAME)
        prefetch_beginnings(files)
        for file, promised in files.items():
            with self.open_header(file) as opened:
                header = self.headers[file] = read_header(opened, str(file))
            if promised is not None:
                check_against_index(path / INDEX_NAME, file, set(header.tensors), promised)
            self.tensors |= header.tensors
            self._home |= dict.fromkeys(header.tensors, file)


class ArraySource(Source):
    """Arrays in memory, each flat, as bytes or as elements of its carrier type."""

    def __init__(
        self,
        arrays: Mapping[str, tuple[StorageType, tuple[int, ...], Raw]],
        *,
        label: str = "arrays",
        places: Mapping[str, Hashable] = _NONE,
    ) -> None:
        self._places = places
        self.tensors: dict[str, TensorInfo] = {}
        for name, (dtype, shape, _) in arrays.items():
            admit(info := TensorInfo(name, dtype, shape, 0), self.tensors, label)
            self.tensors[name] = info
        self._elements = {name: raw.view(kind.carrier) for name, (kind, _, raw) in arrays.items()}

    def place(self, name: str) -> Hashable:
        return self._places.get(name)

    def read(self, name: str, start: int, into: Raw) -> None:
        into[:] = self._elements[name][start : start + into.size]


# ---------------------------------------------------------------- other views of a source


class SourceView(Source):
    """Another source as it is; subclasses present some of it differently."""

    def __init__(
        self,
        inner: Source,
        tensors: Mapping[str, TensorInfo],
        names: Mapping[str, str] = _NONE,
        *,
        opened: Sequence[Source] | None = None,
    ) -> None:
        self.inner = inner
        self.tensors = tensors
        self.names = names  # the names of tensors in the source, where they differ
        self._opened = (inner,) if opened is None else opened  # together with this one
        self.files, self.remarks = inner.files, inner.remarks
        self.is_partial, self.reading_bytes = inner.is_partial, inner.reading_bytes
        self.ties, self.was_dropped = inner.ties, inner.was_dropped
        self.ahead_bytes = inner.ahead_bytes

    def holds_delta(self, name: str) -> bool:
        return self.inner.holds_delta(self.names.get(name, name))

    def drop_of(self, name: str) -> Drop | None:
        return self.inner.drop_of(self.names.get(name, name))

    def original_digest(self, name: str) -> str | None:
        return self.inner.original_digest(self.names.get(name, name))

    def base_digest(self, name: str) -> str | None:
        return self.inner.base_digest(self.names.get(name, name))

    def fingerprint(self) -> list[Any]:
        names = sorted(self.names.items())
        return [*super().fingerprint(), names, self.inner.fingerprint()]

    def stamps(self) -> list[Any]:
        return self.inner.stamps()

    def read(self, name: str, start: int, into: Raw) -> None:
        self.inner.read(self.names.get(name, name), start, into)

    def place(self, name: str) -> Hashable:
        return self.inner.place(self.names.get(name, name))

    def prefetch(self, name: str, start: int, count: int) -> None:
        self.inner.prefetch(self.names.get(name, name), start, count)

    def limit_ahead(self, nbytes: int) -> None:
        self.inner.limit_ahead(nbytes)
        self.ahead_bytes = self.inner.ahead_bytes

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for source in self._opened:
                stack.enter_context(source)
            stack.pop_all()  # if nothing went wrong, they stay open
        return self

    def __exit__(self, *error: object) -> None:
        for source in self._opened:
            source.__exit__(*error)

    def check_unchanged(self) -> None:
        for source in self._opened:
            source.check_unchanged()


class RenamedSource(SourceView):
    """The tensors of a source under other names, and only those; two names may be of one tensor."""

    def __init__(
        self, inner: Source, names: Mapping[str, str], ties: Mapping[str, str] = _NONE
    ) -> None:
        if isinstance(inner, RenamedSource):  # so that what is inside is found at once
            names = {new: inner.names[old] for new, old in names.items()}
            inner = inner.inner
        tensors = {new: replace(inner.tensors[old], name=new) for new, old in names.items()}
        super().__init__(inner, tensors, names)
        self.ties = ties or inner.ties

    def bytes_for(self, name: str, count: int) -> int:
        return self.inner.bytes_for(self.names[name], count)

    def read_beside(self, name: str, start: int, into: Raw, base: Raw) -> None:
        self.inner.read_beside(self.names[name], start, into, base)


# ---------------------------------------------------------------- files of safetensors


def open_source(path: str | os.PathLike[str]) -> FileSource:
    """Read the headers of a safetensors file, or of a directory with one or with shards."""
    return FileSource(to_path(path))


def find_files(path: Path, index: str, single: str) -> dict[Path, set[str] | None]:
    """Find the files of a model, each with the tensors that its index promises, if any.

    In a directory, that is the index, or the usual single file, or the only one that ends alike.
    """
    if not is_directory(path):
        return {path: None}
    names, kind = list_names(path), single.rpartition(".")[2]
    if index in names:
        return dict(read_index(path / index))
    weights = [name for name in names if name.endswith(f".{kind}")]
    if single in weights or len(weights) == 1:
        return {path / (single if single in weights else weights[0]): None}
    if weights:
        raise InputError(f"{path}: has {len(weights)} {kind} files and no {index}; name one file")
    raise InputError(f"{path}: has no {kind} file and no {index}")


def read_index(index: Path) -> dict[Path, set[str]]:
    """Return the shards that an index names, each with the tensors it promises."""
    text = read_limited(index, MAX_INDEX_BYTES)
    try:
        weight_map = json.loads(text)["weight_map"]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise HeaderError(f"{index}: must be JSON with a weight_map") from None
    if not isinstance(weight_map, dict) or not weight_map:
        raise HeaderError(f"{index}: weight_map must map tensors to files")
    shards: dict[Path, set[str]] = {}
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or name != os.path.basename(name) or name in ("", ".", ".."):
            must = "a shard must be a file in the same folder"
            raise HeaderError(f"{index}: {tensor} is in {name!r}; {must}")
        shards.setdefault(index.parent / name, set()).add(tensor)
    return shards


def check_against_index(index: Path, file: Path, held: set[str], promised: set[str]) -> None:
    """Refuse a shard that holds other tensors than its index promises."""
    for tensors, complaint in ((promised - held, "lacks"), (held - promised, "also holds")):
        if tensors:
            names = some_of(sorted(tensors))
            raise HeaderError(f"{index}: {file.name} {complaint} {names}; they do not fit")


# ----------------------------------------------------------------


Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

CHUNKS_AHEAD = 4  # chunks of a tensor that are asked for beyond those that are read next

SAMPLES, SAMPLE_ELEMENTS = 64, 4096  # compared first where two tensors may be the same


@contextmanager
def hold_open(sources: Sequence[Source], *, checks: bool = False) -> Iterator[None]:
    """Hold sources open; `checks` refuses at the end those that have changed meanwhile."""
    with ExitStack() as stack:
        for source in sources:
            stack.enter_context(source)
        yield
        for source in sources if checks else ():
            source.check_unchanged()


def read_chunks(
    sources: Sequence[Source],
    name: str,
    start: int = 0,
    count: int | None = None,
    *,
    buffers: Sequence[Bytes] | None = None,
    base_first: bool = False,
    at_once: int = CHUNK,
    together: int = CHUNK,
) -> Iterator[tuple[int, list[Raw]]]:
    """Yield stored elements of a tensor, of several sources at once, chunk after chunk.

    Each time these are the index of the first element, and the elements of each source. The next
    chunks fill the same buffers: bytes for `at_once` elements of each source, made here unless
    given. If the first source is the base, the others need not read it for themselves. As many
    elements come `together`: some chunks.
    """
    count = sources[0].tensors[name].elements - start if count is None else count
    if buffers is None:
        sizes = (source.tensors[name].dtype.itemsize for source in sources)
        buffers = [np.empty(min(count, at_once) * size, np.uint8) for size in sizes]
    asked = count if count <= at_once else 0  # whoever reads no more has asked for it before
    for offset in range(0, count, at_once):
        read = min(at_once, count - offset)
        wanted = min(offset + at_once + CHUNKS_AHEAD * CHUNK, count)
        for source in sources if asked < wanted else ():
            source.prefetch(name, start + asked, wanted - asked)
        asked = max(asked, wanted)
        found: list[Raw] = []
        for source, buffer in zip(sources, buffers, strict=True):
            beside = found[0] if found and base_first else None
            found.append(read_stored(source, name, start + offset, read, buffer, beside))
        for first in range(0, read, together):
            yield start + offset + first, [raw[first : first + together] for raw in found]


def read_float_chunks(sources: Sequence[Source], name: str) -> Iterator[tuple[int, list[Floats]]]:
    """Yield the chunks of a whole tensor in float32, in arrays that stay."""
    for start, stored in read_chunks(sources, name):
        yield start, [decoded(raw) for raw in stored]


def read_stored(
    source: Source, name: str, start: int, count: int, buffer: Bytes, base: Raw | None = None
) -> Raw:
    """Read some elements of a tensor as they are stored, into a buffer that has room for them.

    Those of a source in memory are returned where they are: nobody may change them. `base` are
    those of the base, if they are there already.
    """
    if (held := source.view(name, start, count)) is not None:
        return held
    dtype = source.tensors[name].dtype
    raw: Raw = buffer[: count * dtype.itemsize].view(dtype.carrier)
    if base is None:
        source.read(name, start, raw)
    else:
        source.read_beside(name, start, raw, base)
    return raw


def read_floats(
    source: Source, name: str, start: int, count: int, backend: str = "reference"
) -> Floats:
    """Read some elements of a tensor, in float32."""
    values = np.empty(count, np.float32)
    decode = kernels.load(backend).decode
    for place, (raw,) in read_chunks([source], name, start, count):
        decode(raw, values[place - start :][: raw.size])
    return values


def decoded(raw: Raw, backend: str = "reference") -> Floats:
    """Decode stored elements to float32; the backend `cpu` is faster, once Numba is loaded."""
    values = np.empty(raw.shape, np.float32)
    kernels.load(backend).decode(raw, values)
    return values


def hold_same(source: Source, name: str, other: str, *, whole: bool = True) -> bool:
    """Return whether two tensors have the same bytes in some places and, if `whole`, in all."""
    one, two = source.tensors[name], source.tensors[other]
    if (one.shape, one.dtype) != (two.shape, two.dtype):
        return False
    count, step = SAMPLE_ELEMENTS, max(SAMPLE_ELEMENTS, one.elements // SAMPLES)
    spans = [(at, min(count, one.elements - at)) for at in range(0, one.elements, step)]
    spans += chunk_spans(one.elements) if whole else ()
    buffers = np.empty((2, max((count for _, count in spans), default=0)), one.dtype.carrier)
    with source:
        for start, count in spans:
            source.read(name, start, buffers[0, :count])
            source.read(other, start, buffers[1, :count])
            left, right = buffers[:, :count].view(np.uint8)
            if not np.array_equal(left, right):
                return False
    return True


class Held(NamedTuple):
    """The tensors of a source: their elements and the digests of their chunks, by name."""

    elements: dict[str, Raw]
    digests: dict[str, list[str]]

    @property
    def nbytes(self) -> int:
        """Its size in memory."""
        return sum({id(raw): raw.nbytes for raw in self.elements.values()}.values())


class HeldSource(SourceView):
    """A source as it is, but for its elements, which are held in memory; its files stay closed."""

    def __init__(self, inner: Source, held: Held) -> None:
        super().__init__(inner, inner.tensors, opened=())
        self._held = held
        self.reading_bytes = self.ahead_bytes = 0

    def view(self, name: str, start: int, count: int) -> Raw | None:
        return self._held.elements[name][start : start + count]

    def chunk_digest(self, name: str, chunk: int) -> str | None:
        return self._held.digests[name][chunk]

    def read(self, name: str, start: int, into: Raw) -> None:
        into[:] = self._held.elements[name][start : start + into.size]

    def prefetch(self, name: str, start: int, count: int) -> None:
        """Do nothing: it is there already."""


def hold(base: Source, models: Sequence[Source], threads: int) -> list[Held]:
    """Read the base, and the tensors of the models that fit it; the base comes first."""
    sources = [base, *models]
    every = [_room(base, source) for source in sources]
    chunks = [
        (name, number)
        for name, info in base.tensors.items()
        if name not in base.ties
        for number in range(chunk_count(info.elements))
    ]

    def read(chunk: tuple[str, int]) -> None:
        name, number = chunk
        start, count = chunk_span(number, base.tensors[name].elements)
        first: Raw | None = None
        for source, held in zip(sources, every, strict=True):
            if name in held.elements:
                into = held.elements[name][start : start + count]
                if first is None:
                    source.read(name, start, into)
                    first = into
                else:
                    source.read_beside(name, start, into, first)
                held.digests[name][number] = bytes_digest(into.data)

    with hold_open(sources, checks=True), ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, chunks))
    return every


def _room(base: Source, source: Source) -> Held:
    """Make arrays for the tensors that fit the base; names of one tensor have one array."""
    held = Held({}, {})
    for name, info in source.tensors.items():
        if name in base.tensors and info.shape == base.tensors[name].shape:
            first = base.ties.get(name, name)
            if first not in held.elements:
                held.elements[first] = np.empty(info.elements, info.dtype.carrier)
                held.digests[first] = [""] * chunk_count(info.elements)
            held.elements[name] = held.elements[first]
            held.digests[name] = held.digests[first]
    return held
