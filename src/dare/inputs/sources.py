"""Sources of weights: tensors by name, whatever holds them, and the one loop over their chunks.

A source is opened twice: once to read headers, for the plan, and once to read weights. In between
no file is held open, and the second time each file must still be the one that was planned for.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Self, cast

import numpy as np
from numpy.typing import NDArray

from dare import kernels
from dare.documents.notices import Notice
from dare.errors import InputError
from dare.inputs.shards import STEMS, check_against_index, find_files, folders_of
from dare.kernels import OnGpu
from dare.stores.locations import to_path
from dare.tensors.chunks import CHUNK, bytes_digest, chunk_count, chunk_span, chunk_spans
from dare.tensors.dtypes import StorageType
from dare.tensors.files import (
    InputFile,
    Stamp,
    is_there,
    open_input,
    prefetch_beginnings,
    read_limited,
    share_ahead,
)
from dare.tensors.header import (
    MAX_CONFIG_BYTES,
    Header,
    TensorInfo,
    admit,
    parse_json,
    read_header,
)

MEAN_PIECE = 1 << 16  # elements of a mean that are computed at once

Raw = NDArray[Any]  # elements as they are stored, flat

EMPTY: Mapping[Any, Any] = {}  # typed as read-only; a MappingProxyType could not be pickled


class Drop(NamedTuple):
    """The mask by which elements of a delta were dropped before it was stored."""

    rate: float
    seed: int
    name: str


class DeltaInfo(NamedTuple):
    """A tensor that may be stored as a change to the base; the defaults are those of weights."""

    is_change: bool = False  # True if it reads as the change, in float32, instead of the weights
    drop: Drop | None = None  # the mask that dropped some of the change, which is not rescaled
    is_rescaled: bool = False  # True if it is rescaled for dropped elements as it is read
    original_digest: str | None = None  # of the whole tensor, if the kept elements are unchanged
    base_digest: str | None = None  # of the base's tensor that it belongs to
    stored_bytes: int | None = None  # bytes in its files, if not those of its elements


WEIGHTS = DeltaInfo()


@dataclass(frozen=True, slots=True)
class CodedInfo(TensorInfo):
    """A tensor that is decoded as it is read."""

    code: object  # how it is stored, by its format's module


class ReadingCost(NamedTuple):
    """The memory that reading takes, in addition to the buffers that are filled."""

    reading_bytes: int = 0  # for each thread
    ahead_bytes: int = 0  # for reading ahead of a store, of all threads together

    def with_reading(self, nbytes: int) -> ReadingCost:
        """Return the cost with more memory for each thread."""
        return self._replace(reading_bytes=self.reading_bytes + nbytes)


class HeldTensor(NamedTuple):
    """A tensor in memory: its elements, not to be changed, and the digests of its chunks."""

    elements: Raw
    digests: list[str]
    on_gpu: OnGpu | None = None  # the same elements, if a GPU has them too


WasRead = tuple[str, int, str | None]  # a tensor, its place in records, and its original digest
ModelDigests = tuple[dict[str, str], str]  # by tensor, and of a model of these tensors


class Source:
    """Tensors by name, readable from any element on, from any thread.

    The defaults are right for a whole model in memory; other forms of models override some.
    """

    tensors: Mapping[str, TensorInfo]
    files: Mapping[Path, Stamp] = EMPTY  # the files behind it, with the stamps they had
    remarks: tuple[Notice, ...] = ()
    is_partial: bool = False  # True if missing tensors count as unchanged, as in an adapter
    cost: ReadingCost = ReadingCost()
    ties: Mapping[str, str] = EMPTY  # further names of tensors, each with the first name
    tied: bool | None = None  # whether its head is its embedding, whatever a configuration says
    # For a stack of layers: the folder that each layer is from, and its number there.
    layers: Sequence[tuple[Path | None, int]] = ()
    extras: Mapping[str, Sequence[int]] = EMPTY  # tensors of models only, with the models' numbers
    metadata: Mapping[str, str] = EMPTY  # of its file's header
    digests: dict[tuple[WasRead, ...], ModelDigests] | None = None  # known of tensors in memory
    unchanged: tuple[str, ...] = ()  # prefixes of further tensors that count as unchanged
    _opened: Sequence[Source] = ()  # the sources that it reads, open while this one is

    @property
    def folder(self) -> Path | None:
        """The folder with its configuration and tokenizer, if there is one."""
        return None

    def treats_as_unchanged(self, name: str) -> bool:
        """Return whether a missing tensor counts as unchanged."""
        return self.is_partial or name.startswith(self.unchanged)

    def delta_of(self, name: str) -> DeltaInfo:  # noqa: ARG002
        """Return how a tensor is stored, if it is stored as a change to the base."""
        return WEIGHTS

    def fingerprint(self) -> list[Any]:
        """Return what identifies it, by headers and configurations, to resume a merge."""
        lines = (f"{i.name}\t{i.dtype.name}\t{i.shape}\t{i.start}" for i in self.tensors.values())
        return [bytes_digest("\n".join(lines).encode())]

    def read(self, name: str, start: int, into: Raw, base: Raw | None = None) -> None:
        """Fill `into`, an array of the tensor's carrier type, with its elements from `start` on.

        `base` has the base's elements of the same range, if they are already read.
        """
        raise NotImplementedError

    def held(self, name: str) -> HeldTensor | None:  # noqa: ARG002
        """Return a tensor that is in memory; None if it must be read."""
        return None

    def on_gpu(self, name: str) -> OnGpu | None:  # noqa: ARG002
        """Return a tensor that is in a GPU's memory, with the very elements that `read` gives."""
        return None

    def place(self, name: str) -> Hashable:  # noqa: ARG002
        """Return the place of a tensor, the same for all its names; None if it is unknown."""
        return None

    def prefetch(self, name: str, start: int, count: int) -> None:
        """Announce that these elements will be read soon."""

    def __enter__(self) -> Self:
        """Open for reading weights; raise InputError if they may not be those planned for.

        If one of the sources that it reads cannot be opened, none of them stays open.
        """
        with ExitStack() as stack:
            for source in self._opened:
                stack.enter_context(source)
            stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        """Close."""
        for source in self._opened:
            source.__exit__(*error)


def bytes_for(source: Source, name: str, count: int) -> int:
    """Return about how many bytes `count` elements of a tensor take in a source's files."""
    info, stored = source.tensors[name], source.delta_of(name).stored_bytes
    if stored is None:
        return count * info.dtype.itemsize
    return stored * count // max(1, info.elements)


def home_of(source: Source) -> str:
    """Return the file of a source, or the folder of several, for messages."""
    first, *others = source.files or [Path("the model")]
    return str(first.parent if others else first)


def stamps_of(source: Source) -> list[Any]:
    """Return what identifies the files of a source without reading them."""
    # without the device, whose number differs between machines that share the files
    return [(*stamp[:2], *stamp[3:]) for stamp in source.files.values() if stamp]


def check_unchanged(sources: Iterable[Source]) -> None:
    """Raise InputError if a source may have changed since it was planned for."""
    for source in sources:
        with source:
            pass


class InputFiles(Source):
    """A source in files, which must be those of the plan, and are open while weights are read."""

    def __init__(self, path: Path, most_ahead_bytes: int | None = None) -> None:
        self.path = path
        self.files: dict[Path, Stamp] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._most_ahead = most_ahead_bytes
        self._open: dict[Path, InputFile] = {}
        self._users = 0  # how often it has been entered: other sources may read its rows, too
        self._home: dict[str, Path] = {}

    @property
    def folder(self) -> Path | None:
        return self.path if self.path.is_dir() else None

    @contextmanager
    def open_header(self, file: Path) -> Iterator[InputFile]:
        """Open a file to read its header, and remember its stamp."""
        opened = open_input(file)
        try:
            yield opened
            self.files[file] = opened.stamp
            most = opened.ahead_bytes if self._most_ahead is None else self._most_ahead
            self.cost = ReadingCost(opened.lone_bytes, min(opened.ahead_bytes, most))
        except OSError as error:
            raise InputError(f"{file}: cannot be read: {error.strerror or error}") from error
        finally:
            opened.close()

    def __enter__(self) -> Self:
        self._users += 1
        try:
            if self._users == 1:
                ahead = share_ahead(self.cost.ahead_bytes) if self.cost.ahead_bytes else None
                for file, stamp in self.files.items():
                    self._open[file] = open_input(file, stamp, ahead)
            for file, stamp in self.files.items():
                if self._open[file].stamp[:-1] != stamp[:-1]:
                    text = f"{file}: changed since the merge was planned; run the merge again"
                    raise InputError(text)
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

    def add(self, info: TensorInfo, file: Path) -> None:
        """Add a tensor that is in a file from its `start` on."""
        self.tensors[info.name] = info
        self._home[info.name] = file

    def read(self, name: str, start: int, into: Raw, _base: Raw | None = None) -> None:
        self.read_bytes(self._home[name], self.tensors[name].position(start), into, name)

    def prefetch(self, name: str, start: int, count: int) -> None:
        info = self.tensors[name]
        self.prefetch_bytes(self._home[name], info.position(start), count * info.dtype.itemsize)

    def read_bytes(self, file: Path, position: int, into: Raw, what: str) -> None:
        """Fill `into` from a position in a file on; messages name `what` is read."""
        try:
            count = self._open[file].read_at(into.view(np.uint8).data, position)
        except OSError as error:
            raise InputError(f"{file}: cannot read {what}: {error.strerror or error}") from error
        if count < into.nbytes:
            text = f"{file}: ends inside {what}; the file was cut while it was being read"
            raise InputError(text)

    def prefetch_bytes(self, file: Path, position: int, nbytes: int) -> None:
        """Announce that these bytes will be read soon."""
        self._open[file].prefetch(position, nbytes)


class FileSource(InputFiles):
    """One safetensors file, the shards of one model, or all models in the folder of a pipeline."""

    def __init__(self, path: Path, most_ahead_bytes: int | None = None) -> None:
        super().__init__(path, most_ahead_bytes)
        self.headers: dict[Path, Header] = {}
        folders = folders_of(path)
        files = {
            file: (prefix, shard)
            for prefix, folder in folders.items()
            for file, shard in find_files(folder, "safetensors", *STEMS).items()
        }
        prefetch_beginnings(files)
        for file, (prefix, shard) in files.items():
            with self.open_header(file) as opened:
                header = self.headers[file] = read_header(opened, str(file))
            if shard is not None:
                check_against_index(shard, file, set(header.tensors))
            for info in header.tensors.values():
                self.add(replace(info, name=prefix + info.name) if prefix else info, file)
        self.metadata = next(iter(self.headers.values())).metadata if "" in folders else {}

    def has_note(self, key: str) -> bool:
        """Return whether a header has a note of this name."""
        return any(key in header.metadata for header in self.headers.values())


class TensorOnGpu(OnGpu):
    """A flat tensor of torch, in the memory of a GPU."""

    def __init__(self, gpu: int, tensor: Any, carrier: np.dtype[Any]) -> None:
        super().__init__(gpu, tensor.data_ptr(), carrier, tensor.numel())
        self._bytes = tensor.view(sys.modules["torch"].uint8)
        sys.modules["torch"].cuda.current_stream(gpu).synchronize()  # others will read there

    def read(self, start: int, into: Raw) -> None:
        """Fill an array with elements from `start` on."""
        raw, first = into.view(np.uint8), start * self.itemsize
        sys.modules["torch"].from_numpy(raw).copy_(self._bytes[first : first + raw.size])


class ArraySource(Source):
    """Arrays in memory, each flat, as bytes or as elements of its carrier type."""

    def __init__(
        self,
        arrays: Mapping[str, tuple[StorageType, tuple[int, ...], Raw | TensorOnGpu]],
        *,
        label: str = "arrays",
        places: Mapping[str, Hashable] = EMPTY,
    ) -> None:
        self._places = places
        self.tensors: dict[str, TensorInfo] = {}
        for name, (dtype, shape, _) in arrays.items():
            admit(info := TensorInfo(name, dtype, shape, 0), self.tensors, label)
            self.tensors[name] = info
        self._elements: dict[str, Any] = {
            name: raw if isinstance(raw, TensorOnGpu) else raw.view(kind.carrier)
            for name, (kind, _, raw) in arrays.items()
        }

    def place(self, name: str) -> Hashable:
        return self._places.get(name)

    def read(self, name: str, start: int, into: Raw, _base: Raw | None = None) -> None:
        if isinstance(elements := self._elements[name], TensorOnGpu):
            elements.read(start, into)
        else:
            into[:] = elements[start : start + into.size]

    def on_gpu(self, name: str) -> OnGpu | None:
        elements = self._elements[name]
        return elements if isinstance(elements, TensorOnGpu) else None


# ---------------------------------------------------------------- other views of a source


class SourceView(Source):
    """Another source as it is; subclasses compute some of its tensors, by `compute`."""

    def __init__(
        self,
        inner: Source,
        tensors: Mapping[str, TensorInfo],
        names: Mapping[str, str] = EMPTY,
        *,
        computed: Container[str] = (),
        opened: Sequence[Source] | None = None,
    ) -> None:
        self.inner = inner
        self.tensors = tensors
        self.names = names  # the names of tensors in the inner source, where they differ
        self.computed = computed  # the names of tensors that `compute` fills
        self._opened = (inner,) if opened is None else opened
        self.files, self.remarks, self.ties = inner.files, inner.remarks, inner.ties
        self.is_partial, self.cost = inner.is_partial, inner.cost
        self.layers, self.extras = inner.layers, inner.extras
        self.metadata, self.unchanged, self.tied = inner.metadata, inner.unchanged, inner.tied

    @property
    def folder(self) -> Path | None:
        return self.inner.folder

    def delta_of(self, name: str) -> DeltaInfo:
        return self.inner.delta_of(self.names.get(name, name))

    def fingerprint(self) -> list[Any]:
        return [*super().fingerprint(), sorted(self.names.items()), self.inner.fingerprint()]

    def compute(self, name: str, start: int, into: Raw) -> None:
        """Fill `into` with elements of a tensor that is computed."""
        raise NotImplementedError

    def read(self, name: str, start: int, into: Raw, base: Raw | None = None) -> None:
        if name in self.computed:
            with np.errstate(all="ignore"):  # values that are not finite are counted in the merge
                self.compute(name, start, into)
        else:
            self.inner.read(self.names.get(name, name), start, into, base)

    def place(self, name: str) -> Hashable:
        return self.inner.place(self.names.get(name, name))

    def prefetch(self, name: str, start: int, count: int) -> None:
        if name not in self.computed:
            self.inner.prefetch(self.names.get(name, name), start, count)


class RenamedSource(SourceView):
    """Some tensors of a source under other names; a tensor may have several names."""

    def __init__(
        self, inner: Source, names: Mapping[str, str], ties: Mapping[str, str] = EMPTY
    ) -> None:
        if isinstance(inner, RenamedSource):  # so that views do not pile up
            names = {new: inner.names[old] for new, old in names.items()}
            inner = inner.inner
        tensors = {new: replace(inner.tensors[old], name=new) for new, old in names.items()}
        super().__init__(inner, tensors, names)
        self.ties = ties or inner.ties

    def on_gpu(self, name: str) -> OnGpu | None:
        return self.inner.on_gpu(self.names[name])


class StackedSource(Source):
    """Tensors of several sources under new names, as one model."""

    folder: Path | None = None

    def __init__(
        self,
        homes: Mapping[str, tuple[Source, str]],  # by new name: a source, and its name there
        folder: Path | None = None,
        layers: Sequence[tuple[Path | None, int]] = (),
        ties: Mapping[str, str] = EMPTY,
        tied: bool | None = None,
    ) -> None:
        self._homes = homes
        self.folder, self.layers, self.ties, self.tied = folder, layers, ties, tied
        self._opened = list({id(source): source for source, _ in homes.values()}.values())
        self.tensors = {
            name: replace(source.tensors[inner], name=name, start=0)
            for name, (source, inner) in homes.items()
        }
        self.files = {file: stamp for s in self._opened for file, stamp in s.files.items()}
        self.remarks = tuple(dict.fromkeys(note for s in self._opened for note in s.remarks))
        reading = max((source.cost.reading_bytes for source in self._opened), default=0)
        self.cost = ReadingCost(reading, sum(source.cost.ahead_bytes for source in self._opened))

    def delta_of(self, name: str) -> DeltaInfo:
        source, inner = self._homes[name]
        return source.delta_of(inner)

    def fingerprint(self) -> list[Any]:
        numbers = {id(source): number for number, source in enumerate(self._opened)}
        homes = [[name, numbers[id(s)], inner] for name, (s, inner) in self._homes.items()]
        return [*super().fingerprint(), homes, [s.fingerprint() for s in self._opened]]

    def read(self, name: str, start: int, into: Raw, base: Raw | None = None) -> None:
        source, inner = self._homes[name]
        source.read(inner, start, into, base)

    def held(self, name: str) -> HeldTensor | None:
        source, inner = self._homes[name]
        return source.held(inner)

    def on_gpu(self, name: str) -> OnGpu | None:
        source, inner = self._homes[name]
        return source.on_gpu(inner)

    def place(self, name: str) -> Hashable:
        source, inner = self._homes[name]
        place = source.place(inner)
        return None if place is None else (id(source), place)

    def prefetch(self, name: str, start: int, count: int) -> None:
        source, inner = self._homes[name]
        source.prefetch(inner, start, count)


def extras_of(base: Source, models: Sequence[Source]) -> dict[str, list[int]]:
    """Return the tensors that only models have, by name, each with the models that have it."""
    names = sorted({name for model in models for name in model.tensors} - base.tensors.keys())
    return {name: [n for n, m in enumerate(models) if name in m.tensors] for name in names}


class ExtendedSource(SourceView):
    """A base with the tensors that only models have: the first one's, or the mean of theirs."""

    def __init__(
        self,
        inner: Source,
        models: Sequence[Source],
        extras: Mapping[str, Sequence[int]],
        kind: StorageType | None,
    ) -> None:
        taken = {}
        for name, owners in extras.items():
            info = replace(models[owners[0]].tensors[name], start=0)
            taken[name] = replace(info, dtype=kind) if kind and len(owners) > 1 else info
        opened = (inner, *models)
        super().__init__(inner, {**inner.tensors, **taken}, computed=taken, opened=opened)
        self.extras = extras

    def fingerprint(self) -> list[Any]:
        return [*super().fingerprint(), self.extras]

    def compute(self, name: str, start: int, into: Raw) -> None:
        owners = [self._opened[1 + number] for number in self.extras[name]]
        if len(owners) == 1:
            owners[0].read(name, start, into)
            return
        for done in range(0, into.size, MEAN_PIECE):
            part = into[done : done + MEAN_PIECE]
            floats = [read_floats(owner, name, start + done, part.size) for owner in owners]
            with np.errstate(invalid="ignore", over="ignore"):
                mean = np.sum(floats, axis=0, dtype=np.float32) / np.float32(len(owners))
            kernels.load("reference").encode(mean, part)


@dataclass(frozen=True)
class Aligned:
    """Sources with rows in one order, and everything else an output with that order needs."""

    base: Source
    models: tuple[Source, ...]
    rows: tuple[int | None, ...] = ()  # of embeddings: the output's, the base's, each model's
    tokenizer: int | None = None  # the only input whose tokenizer fits the output; 0: the base
    tokenizer_files: Mapping[str, bytes] = field(default_factory=dict)  # its files that change
    # The output's id for each id of the base and of each model; empty if no id changes.
    token_ids: tuple[Mapping[int, int | None] | None, ...] = ()
    # The ids of tokens: the output's, the base's, and each model's.
    tokens: tuple[Mapping[str, int] | None, ...] = field(default=(), compare=False)
    differences: Mapping[str, str] = field(default_factory=dict)  # by the model's name
    notes: tuple[Notice, ...] = ()

    def resized(self, chosen: int = 0) -> tuple[int, int] | None:
        """Return the rows of an input (0 is the base) and of the output, if they differ."""
        if not self.rows:
            return None
        output, before = self.rows[0], self.rows[1 + chosen]
        return None if output is None or before in (None, output) else (before, output)


# ---------------------------------------------------------------- opening a model

CONFIG = "config.json"
TIED = "tie_word_embeddings"  # in configurations


@dataclass(frozen=True)
class Opening:
    """A model to open: the user's path and settings, and the content of headers."""

    path: Path
    allow_pickle: bool = False
    base: Source | None = None
    base_config: Mapping[str, Any] | None = None  # the base's config.json, if it is known
    rescales: bool = True  # a delta file is rescaled for its dropped elements
    most_ahead_bytes: int | None = None  # memory for reading ahead of a store
    keeps_scales: bool = False  # of activations, for an output in the format of this model
    made: Source | None = None  # the source itself, if it is the result of another merge

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The `config.json` beside the weights; empty if there is none."""
        return {} if self.made and self.made.folder is None else read_config(self.path)

    @cached_property
    def stored(self) -> FileSource:
        """The tensors in its safetensors files."""
        return FileSource(self.path, self.most_ahead_bytes)


def open_form(opening: Opening) -> Source:
    """Open plain safetensors."""
    return opening.stored


def read_config(path: Path) -> Mapping[str, Any]:
    """Read the `config.json` of a model folder, or beside a file; empty if there is none."""
    try:
        file = (path if path.is_dir() else path.parent) / CONFIG
        if not is_there(file):
            return {}
    except (OSError, ValueError):  # not a possible name of a file
        return {}
    config = parse_json(read_limited(file, MAX_CONFIG_BYTES), file)
    return config if isinstance(config, dict) else {}


def says_tied(config: Mapping[str, Any]) -> bool | None:
    """Return whether a configuration ties the head of its model; None if it says nothing.

    >>> says_tied({"text_config": {"tie_word_embeddings": True}}), says_tied({})
    (True, None)
    """
    for table in (config, config.get("text_config")):
        said = table.get(TIED) if isinstance(table, dict) else None
        if isinstance(said, bool):
            return said
    return None


def open_source(path: str | os.PathLike[str]) -> FileSource:
    """Read the headers of a safetensors file, or of a folder with one or with shards."""
    return FileSource(to_path(path))


# ---------------------------------------------------------------- reading

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

CHUNKS_AHEAD = 4  # chunks of a tensor to prefetch beyond those that are read next

SAMPLES, SAMPLE_ELEMENTS = 64, 4096  # compared first when two tensors may be the same


@contextmanager
def hold_open(sources: Sequence[Source], *, checks: bool = False) -> Iterator[None]:
    """Hold sources open; with `checks`, refuse at the end sources that have changed meanwhile."""
    with ExitStack() as stack:
        for source in sources:
            stack.enter_context(source)
        yield
        check_unchanged(sources if checks else ())


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
    leaves: bool = False,
) -> Iterator[tuple[int, list[Raw]]]:
    """Yield stored elements of a tensor, of several sources at once, chunk after chunk.

    Each item is the index of the first element, and the elements of each source. The next chunks
    fill the same buffers: bytes for `at_once` elements of each source, made here unless given. If
    the first source is the base (`base_first`), the others need not read it again. Each item has
    `together` elements, a multiple of a chunk. With `leaves`, elements stay on the GPU that has
    them, and items have `OnGpu`.
    """
    count = sources[0].tensors[name].elements - start if count is None else count
    if buffers is None:
        sizes = (source.tensors[name].dtype.itemsize for source in sources)
        buffers = [np.empty(min(count, at_once) * size, np.uint8) for size in sizes]
    fetched = count if count <= at_once else 0  # callers who read only this have prefetched it
    for offset in range(0, count, at_once):
        size = min(at_once, count - offset)
        wanted = min(offset + at_once + CHUNKS_AHEAD * CHUNK, count)
        for source in sources if fetched < wanted else ():
            source.prefetch(name, start + fetched, wanted - fetched)
        fetched = max(fetched, wanted)
        stored: list[Raw] = []
        for source, buffer in zip(sources, buffers, strict=True):
            base = stored[0] if stored and base_first else None
            read = _leave if leaves else read_stored
            stored.append(read(source, name, start + offset, size, buffer, base))
        for first in range(0, size, together):
            yield start + offset + first, [raw[first : first + together] for raw in stored]


def read_float_chunks(
    sources: Sequence[Source], name: str, *span: int
) -> Iterator[tuple[int, list[Floats]]]:
    """Yield the chunks of a tensor, or of a span of it, in float32, each in a new array."""
    for start, stored in read_chunks(sources, name, *span):
        yield start, [decoded(raw) for raw in stored]


def read_stored(
    source: Source, name: str, start: int, count: int, buffer: Bytes, base: Raw | None = None
) -> Raw:
    """Read some elements of a tensor as they are stored, into a buffer that has room for them.

    Elements that are in memory already are returned without a copy: nobody may change them. `base`
    has the base's elements, if they are already read.
    """
    if (held := source.held(name)) is not None:
        return held.elements[start : start + count]
    dtype = source.tensors[name].dtype
    raw: Raw = buffer[: count * dtype.itemsize].view(dtype.carrier)
    source.read(name, start, raw, base)
    return raw


def _leave(source: Source, name: str, start: int, count: int, *_: object) -> Raw:
    return cast("Raw", cast("OnGpu", source.on_gpu(name))[start : start + count])


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
    """Decode stored elements to float32; the backend `cpu` is faster."""
    values = np.empty(raw.shape, np.float32)
    kernels.load(backend).decode(raw, values)
    return values


def same_bytes(source: Source, name: str, other: str, *, whole: bool = True) -> bool:
    """Return whether two tensors have the same bytes in a sample and, if `whole`, everywhere."""
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


Held = dict[str, HeldTensor]  # tensors of a source; several names of a tensor share an array


def held_bytes(held: Held) -> int:
    """Return the memory that tensors take."""
    return sum({id(each.elements): each.elements.nbytes for each in held.values()}.values())


class HeldSource(SourceView):
    """A source whose elements are held in memory; its files stay closed."""

    def __init__(self, inner: Source, held: Held) -> None:
        super().__init__(inner, inner.tensors, computed=inner.tensors, opened=())
        self._held = held
        self.digests = {}
        self.cost = ReadingCost()

    def held(self, name: str) -> HeldTensor | None:
        return self._held[name]

    def on_gpu(self, name: str) -> OnGpu | None:
        return self._held[name].on_gpu

    def compute(self, name: str, start: int, into: Raw) -> None:
        into[:] = self._held[name].elements[start : start + into.size]


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
            if name in held:
                into = held[name].elements[start : start + count]
                source.read(name, start, into, first)
                first = into if first is None else first
                held[name].digests[number] = bytes_digest(into.data)

    with hold_open(sources, checks=True), ThreadPoolExecutor(threads) as pool:
        list(pool.map(read, chunks))
    return every


def with_copies(held: Held, copy_of: Callable[[Raw], OnGpu | None]) -> Held:
    """Return tensors in memory with the copies that a GPU has of them."""
    return {n: each._replace(on_gpu=copy_of(each.elements)) for n, each in held.items()}


def _room(base: Source, source: Source) -> Held:
    """Make arrays for the tensors that fit the base; several names of a tensor share an array."""
    held: Held = {}
    for name, info in source.tensors.items():
        if name in base.tensors and info.shape == base.tensors[name].shape:
            first = base.ties.get(name, name)
            if first not in held:
                elements = np.empty(info.elements, info.dtype.carrier)
                held[first] = HeldTensor(elements, [""] * chunk_count(info.elements))
            held[name] = held[first]
    return held
