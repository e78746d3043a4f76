"""Delta files: a fine-tune stored as its change to a base, presented as the model it represents.

A tensor reads as the model's value where that was kept, and as the base's elsewhere; quantised
values read as the change, and as zero elsewhere. Kept values are not rescaled: `delta_of` says that
randomly chosen changes must be divided by 1 - p, or it is done here if `rescales` is set. Every
chunk is checked against its digest whenever it is read. docs/delta-files.md describes the format,
and the notes, which are the JSON in the header.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path, PurePosixPath
from shutil import rmtree
from tempfile import mkdtemp
from typing import Annotated, Any, Literal, NamedTuple
from weakref import finalize

import numpy as np
import xxhash
from numpy.typing import NDArray

from dare import kernels
from dare.documents.notices import notice
from dare.documents.values import Limits, checked, read_json
from dare.errors import InputError
from dare.inputs.sources import (
    Bytes,
    DeltaInfo,
    Drop,
    FileSource,
    Opening,
    Raw,
    Source,
    SourceView,
)
from dare.kernels import LANES_MULTIPLE
from dare.kernels.reference import SCALE_GROUP
from dare.tensors.chunks import CHUNK, UNKNOWN, Digest, bytes_digest, chunk_count, chunk_span
from dare.tensors.dtypes import STORAGE_TYPES, StorageType
from dare.tensors.files import read_limited
from dare.tensors.header import TensorInfo, admit, stored_elements
from dare.tensors.mask import MASK_VERSION, keep_threshold, mask_key
from dare.tensors.planes import unpack

KEY = "dare.delta"  # the key of the notes in a header, which identifies a delta file
VERSION: Literal[1] = 1
INDEX = "index"
AS_IN_BASE = -1  # instead of a count: the chunk is the same as the base's
MAX_FILE_BYTES = 256_000_000
MAX_FOLDER_BYTES = 8 * MAX_FILE_BYTES  # of all files: a small delta file must not fill a disk
MAX_REASON_CHARACTERS = 300
MAX_NAME_BYTES = 255  # the limit for a part of a path, on every file system that people use

Rate = Annotated[float, Limits(ge=0, lt=1)]
Size = Annotated[int, Limits(ge=0, lt=1 << 48)]
Bits = Literal["native", 8, 4, 2, 1]


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of the model. Digests are those of whole tensors."""

    shape: Annotated[tuple[Size, ...], Limits(max_length=64)]
    dtype: str
    model: Digest
    base: Digest | None = None  # the base's tensor that it is coded against, if any
    base_name: str | None = None
    drop_rate: Rate | None = None
    tied_to: str | None = None  # the tensor that this is another name for; nothing is stored here

    @property
    def kind(self) -> StorageType:
        """The storage type."""
        return STORAGE_TYPES[self.dtype]

    @property
    def elements(self) -> int:
        """The number of its elements; of bytes, if elements share them."""
        return stored_elements(self.kind, self.shape)


@dataclass(frozen=True)
class StoredFile:
    """A file of the model that has more than tensors."""

    # Its part before the tensors is stored, or all of it, or nothing as the base has the same file.
    kind: Literal["header", "whole", "base"]
    size: Annotated[int, Limits(ge=0, le=MAX_FILE_BYTES)]
    digest: Digest
    coded: Digest | None = None


@dataclass(frozen=True, kw_only=True)
class DeltaNotes:
    """All notes of a delta file."""

    version: Literal[1]
    mask: Literal[1] | None = None  # the version of the mask, if one decides what is kept
    scheme: Literal["random", "lossless"]
    bits: Bits = "native"
    seed: Annotated[int, Limits(ge=0)] | None = None
    drop_rate: Rate | None = None  # the rate of most tensors; each tensor has a rate, too
    base: Digest
    model: Digest
    sample: Digest  # a digest of a few elements of the base, to recognise a wrong one at once
    tensors: dict[str, StoredTensor]
    # The files of the model's folder: configuration, tokenizer; lossless also its weights.
    files: dict[str, StoredFile] = field(default_factory=dict)
    index: Digest
    check: Digest  # the digest of the header while this is all zeros

    def __post_init__(self) -> None:
        """Refuse what does not fit together."""
        is_random = self.scheme == "random"
        if is_random != (self.mask is not None) or is_random != (self.seed is not None):
            raise ValueError("mask and seed are needed if the scheme is random, and only then")
        if self.scheme != "lossless" and self.drop_rate is None:
            raise ValueError("has no drop_rate")
        for name, tensor in self.tensors.items():
            if tensor.dtype not in STORAGE_TYPES:
                raise ValueError(f"{name}: unknown dtype {tensor.dtype!r}")
            if tensor.tied_to is not None:
                first = self.tensors.get(tensor.tied_to)
                found = first and (first.tied_to, first.shape, first.dtype)
                if found != (None, tensor.shape, tensor.dtype):
                    which = f"{tensor.tied_to!r}, which is missing or has another shape or type"
                    raise ValueError(f"{name}: is tied to {which}")
            if self.scheme != "lossless" and (tensor.drop_rate is None or tensor.base is None):
                raise ValueError(f"{name}: has no drop_rate or no base")
        for name, file in self.files.items():
            place = PurePosixPath(name)
            if not is_inside(name) or (file.kind == "header" and len(place.parts) > 1):
                raise ValueError(f"{name!r}: a file must be inside the model's folder")
            if not self.files.keys().isdisjoint(map(str, place.parents)):
                raise ValueError(f"{name!r}: is inside another file, not in a folder")
        if sum(file.size for file in self.files.values()) > MAX_FOLDER_BYTES:
            raise ValueError(f"the model's other files have more than {MAX_FOLDER_BYTES} bytes")

    def to_json(self) -> str:
        """Return the text for the header."""
        return json.dumps(_without_defaults(self), ensure_ascii=False, separators=(",", ":"))


def _without_defaults(notes: Any) -> Any:
    """Return notes for JSON, without fields that have their default values."""
    if isinstance(notes, dict):
        return {name: _without_defaults(each) for name, each in notes.items()}
    if not is_dataclass(notes):
        return notes
    given = {}
    for each in fields(notes):
        default = each.default_factory() if callable(each.default_factory) else each.default
        if (value := getattr(notes, each.name)) != default:
            given[each.name] = _without_defaults(value)
    return given


def is_inside(name: str) -> bool:
    """Return whether a name leads to a file in a folder or below it, on every system."""
    parts = PurePosixPath(name).parts
    return (
        parts != ()
        and "/".join(parts) == name
        and not {"..", "/"} & set(parts)
        and name.isprintable()
        and "\\" not in name
        and max(len(part.encode()) for part in parts) <= MAX_NAME_BYTES
    )


def read_notes(text: str, where: str) -> DeltaNotes:
    """Check the notes in a header; refuse newer versions as such."""
    try:
        document = read_json(text)
        for what, ours in (("version", VERSION), ("mask", MASK_VERSION)):
            theirs = document.get(what, ours)
            if type(theirs) is int and theirs > ours:
                raise InputError(f"{where}: has {what} {theirs}, not {ours}; install a newer dare")
        if document.get("scheme") == "magnitude":
            raise InputError(
                f"{where}: is a delta file of the largest changes, which an earlier dare 0.1 wrote "
                "with --keep magnitude; apply it with that version, or compress the model again"
            )
        notes: DeltaNotes = checked(document, DeltaNotes)
        return notes
    except (ValueError, RecursionError, AttributeError) as error:
        reason = str(error)
    raise InputError(f"{where}: its notes are damaged: {reason[:MAX_REASON_CHARACTERS]}")


# ---------------------------------------------------------------- chunks

F32, U8, BF16 = (STORAGE_TYPES[name] for name in ("F32", "U8", "BF16"))
SAMPLED_TENSORS, SAMPLED_ELEMENTS = 256, 1024


class Piece(NamedTuple):
    """The stored elements of one chunk: their starts and numbers in each part."""

    kept: int  # the number of values, or of coded bytes; AS_IN_BASE
    digest: bytes
    starts: tuple[int, ...]
    sizes: tuple[int, ...]


class DeltaFile:
    """The content of a delta file, chunk by chunk; decoding it needs the base."""

    def __init__(self, stored: FileSource) -> None:
        if len(stored.headers) != 1:
            raise InputError(f"{stored.path}: a delta file is one file, and this model has several")
        ((self.path, header),) = stored.headers.items()
        self.stored = stored
        self.notes = read_notes(header.metadata[KEY], str(self.path))
        self._local = threading.local()
        self._check_header()
        # The pieces of the chunks of each tensor; none for other names of a tensor.
        self.pieces = dict(self._read_index())

    def _check_header(self) -> None:
        raw = np.empty(self.stored.headers[self.path].data_start, np.uint8)
        with self.stored:
            self.stored.read_bytes(self.path, 0, raw, "the header")
        check = self.notes.check.encode()
        if bytes_digest(raw.tobytes().replace(check, UNKNOWN.encode(), 1)) != self.notes.check:
            raise self.damaged("its header has been changed")

    def _read_index(self) -> Iterator[tuple[str, list[Piece]]]:
        """Read where each chunk is stored, and how much of it; the index must cover the file."""
        infos = self.stored.tensors
        stored = {name: t for name, t in sorted(self.notes.tensors.items()) if t.tied_to is None}
        counts = {name: chunk_count(tensor.elements) for name, tensor in stored.items()}
        info = infos.get(INDEX)
        if info is None or (info.dtype.name, info.shape) != ("I64", (sum(counts.values()), 3)):
            raise self.damaged("it has no index of its chunks")
        rows = np.empty(info.shape, np.int64)
        with self.stored:
            self.stored.read(INDEX, 0, rows.reshape(-1))
        if bytes_digest(rows.tobytes()) != self.notes.index:
            raise self.damaged("the index of its chunks has changed")
        files = self.notes.files.items()
        expected = {INDEX, *(file_part(name) for name, file in files if file.kind != "base")}
        first = 0
        for name, tensor in stored.items():
            parts, last = part_names(self.notes, name), first + counts[name]
            sizes = list(self._sizes(tensor, rows[first:last, 0].tolist()))
            starts = [tuple(accumulate(of_part, initial=0)) for of_part in zip(*sizes, strict=True)]
            for part, places in zip(parts, starts, strict=False):
                info, kind = infos.get(part), part_type(self.notes, part, tensor)
                if ((info.dtype, info.elements) if info else (kind, 0)) != (kind, places[-1]):
                    raise self.damaged(f"{part} does not match the index")
            expected |= set(parts) if counts[name] else set()
            pieces = [
                Piece(int(row[0]), row[1:].tobytes(), tuple(p[chunk] for p in starts), size)
                for chunk, (row, size) in enumerate(zip(rows[first:last], sizes, strict=True))
            ]
            yield name, pieces
            first = last
        if more := sorted(set(infos) - expected):
            raise self.damaged(f"{more[0]} is not in the index")

    def _sizes(self, tensor: StoredTensor, counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Yield the elements of each chunk of a tensor in each part."""
        for chunk, count in enumerate(counts):
            size = chunk_span(chunk, tensor.elements)[1]
            most = size if tensor.kind.is_weight else -1  # no other type is dropped or rounded
            if self.notes.scheme == "lossless":
                most = size * tensor.kind.itemsize + 1
            if not (0 <= count <= most or (count == AS_IN_BASE and tensor.base is not None)):
                raise self.damaged("a chunk has more values than elements")
            yield part_sizes(self.notes, count)

    def damaged(self, reason: str) -> InputError:
        """Return the error to raise if something is not as it was written."""
        return InputError(f"{self.path}: the delta file is damaged: {reason}; get it again")

    def spans(self, name: str, chunk: int) -> Iterator[tuple[str, int, int]]:
        """Yield the stored parts of a chunk: name, first element and number of elements."""
        piece = self.pieces[name][chunk]
        yield from zip(part_names(self.notes, name), piece.starts, piece.sizes, strict=True)

    def read_parts(self, name: str, chunk: int) -> list[Raw]:
        """Read the stored parts of a chunk, checked against its digest."""
        digest = xxhash.xxh3_128()
        stored = []
        for part, start, size in self.spans(name, chunk):
            raw: Raw = np.empty(size, part_type(self.notes, part, self.notes.tensors[name]).carrier)
            if size:
                self.stored.read(part, start, raw)
            digest.update(raw.data)
            stored.append(raw)
        if digest.digest() != self.pieces[name][chunk].digest:
            raise self.damaged(f"chunk {chunk} of {name} has changed since it was written")
        return stored

    def uncode(self, name: str, blob: Raw, base: Raw | None, into: Raw) -> None:
        """Undo `pack` of a chunk or a file."""
        against = None if base is None else base.view(np.uint8)
        try:
            unpack(blob.data, against, into.itemsize, into.view(np.uint8))
        except InputError as error:
            raise self.damaged(f"{name}: {error}") from None

    def read_file(self, name: str) -> bytes:
        """Read one of the model's files."""
        file, part = self.notes.files[name], file_part(name)
        info = self.stored.tensors.get(part)
        if info is None or info.dtype != U8:
            raise self.damaged(f"it lacks {part}")
        blob, content = np.empty(info.elements, np.uint8), np.empty(file.size, np.uint8)
        with self.stored:
            self.stored.read(part, 0, blob)
        if bytes_digest(blob.data) != file.coded:
            raise self.damaged(f"{part} has changed since it was written")
        self.uncode(name, blob, None, content)
        if bytes_digest(content.data) != file.digest:
            raise self.damaged(f"{name} is not as it was written")
        return content.tobytes()

    def fill_folder(self, folder: Path, base: Path | None) -> None:
        """Put the model's configuration and tokenizer into a folder, some from the base's."""
        for name, file in self.notes.files.items():
            if file.kind == "header" or (file.kind == "base" and base is None):
                continue
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            if file.kind == "whole":
                place.write_bytes(self.read_file(name))
            elif base is not None:
                try:
                    content = read_limited(base / name, MAX_FILE_BYTES)
                except InputError as error:
                    raise InputError(f"{self.path}: needs {error}; give its base") from None
                if bytes_digest(content) != file.digest:
                    raise InputError(f"{base / name}: changed since {self.path}; give its base")
                place.write_bytes(content)

    def lanes(self, name: str, chunk: int) -> Bytes:
        """Return 255 for each kept element of a chunk, else 0; a thread reuses its array."""
        tensor, piece = self.notes.tensors[name], self.pieces[name][chunk]
        start, size = chunk_span(chunk, tensor.elements)
        if not hasattr(self._local, "lanes"):
            self._local.lanes = np.empty(-(-CHUNK // LANES_MULTIPLE) * LANES_MULTIPLE, np.uint8)
        lanes: Bytes = self._local.lanes
        assert self.notes.seed is not None  # only a lossless file has none
        high, low = divmod(keep_threshold(tensor.drop_rate or 0.0), 1 << 32)
        if high == 256:  # everything is kept
            count = size
            lanes[:size], lanes[size:] = 255, 0
        else:
            key0, key1 = map(np.uint32, mask_key(self.notes.seed, name))
            count = kernels.load("cpu").draw(lanes, size, start, key0, key1, high, np.uint32(low))
        if count != piece.kept:
            raise self.damaged(f"{name} has {piece.kept} values, and the mask keeps {count}")
        return lanes

    def kept_changes(
        self, count: int, parts: Sequence[Raw], base: Raw | None, lanes: Bytes
    ) -> NDArray[np.float32]:
        """Return the changes of kept elements, not rescaled; a thread reuses its array."""
        run = kernels.load("cpu")
        if not hasattr(self._local, "change"):
            self._local.change = np.empty(CHUNK, np.float32)
        change: NDArray[np.float32] = self._local.change[:count]
        if self.notes.bits != "native":
            run.dequantise(parts[0], parts[1], self.notes.bits, change)
            return change
        assert base is not None  # stored values mean nothing without it
        run.decode(parts[0], change)
        kept = np.empty(count, base.dtype)
        run.select(base, lanes, kept)
        origin = np.empty(count, np.float32)
        run.decode(kept, origin)
        is_same = change == origin  # infinities too
        with np.errstate(invalid="ignore", over="ignore"):
            change -= origin
        change[is_same] = 0
        return change


class DeltaSource(SourceView):
    """The tensors of the model that a delta file represents, given its base."""

    def __init__(self, file: DeltaFile, base: Source, *, rescales: bool = False) -> None:
        self.file, self.notes, self.base = file, file.notes, base
        self._rescales = rescales
        self._is_lossless = self.notes.scheme == "lossless"
        self._local = threading.local()
        self._check_base()
        tensors = {}
        for name, tensor in self.notes.tensors.items():
            info = TensorInfo(name, tensor.kind, tensor.shape, 0)
            admit(info, (), str(file.path))
            tensors[name] = replace(info, dtype=F32) if self._is_change(name) else info
        super().__init__(file.stored, tensors, opened=(base, file.stored))
        self.cost = self.cost.with_reading(CHUNK * (1 + 5 * 4))
        if self.notes.seed is not None and rescales:
            self.remarks = (notice("rescaled_delta", rate=self.notes.drop_rate),)

    def _check_base(self) -> None:
        """Refuse a base other than the one that the delta file was made for."""
        for name, tensor in self.notes.tensors.items():
            if tensor.base is not None:
                base_name = tensor.base_name or name
                info = self.base.tensors.get(base_name)
                if info is None or info.shape != tensor.shape:
                    raise self._wrong_base(f"{base_name} is missing or has another shape")
                converts = not self._is_lossless and tensor.kind.is_weight and info.dtype.is_weight
                if info.dtype != tensor.kind and not converts:
                    raise self._wrong_base(f"{base_name} is {info.dtype.name}")
        if sample(self.base) != self.notes.sample:
            raise self._wrong_base("its weights are different")

    def _wrong_base(self, reason: str) -> InputError:
        which = f"{reason}; give the base with the digest {self.notes.base}"
        return InputError(f"{self.file.path}: was made for another base: {which}")

    # ------------------------------------------------------------ its content

    def _tensor(self, name: str) -> tuple[str, StoredTensor]:
        """Return the tensor that a name refers to, and its notes."""
        name = self.notes.tensors[name].tied_to or name
        return name, self.notes.tensors[name]

    def _base_info(self, name: str, tensor: StoredTensor) -> TensorInfo:
        return self.base.tensors[tensor.base_name or name]

    def _is_rescaled(self, tensor: StoredTensor) -> bool:
        return self._rescales and self.notes.seed is not None and bool(tensor.drop_rate)

    def _is_change(self, name: str) -> bool:
        name, tensor = self._tensor(name)
        if self._is_lossless or not tensor.kind.is_weight:
            return False
        if self.notes.bits == "native" and not tensor.drop_rate:
            return False  # all values are the model's, whatever the base's type
        differs = self._base_info(name, tensor).dtype != tensor.kind
        return differs or self._is_rescaled(tensor) or self.notes.bits != "native"

    def delta_of(self, name: str) -> DeltaInfo:
        is_change = self._is_change(name)
        name, tensor = self._tensor(name)
        rate, seed = tensor.drop_rate, self.notes.seed
        is_dropped = rate and seed is not None and tensor.kind.is_weight
        drop = Drop(rate or 0.0, seed or 0, name) if is_dropped and not self._rescales else None
        infos = (self.inner.tensors.get(part) for part in part_names(self.notes, name))
        return DeltaInfo(
            is_change,
            drop,
            is_rescaled=self._rescales and seed is not None,
            original_digest=None if is_change else tensor.model,
            base_digest=tensor.base,
            stored_bytes=sum(info.nbytes for info in infos if info is not None),
        )

    def fingerprint(self) -> list[Any]:
        return [*super().fingerprint(), self.notes.to_json(), self._rescales]

    def place(self, name: str) -> Hashable:
        return str(self.file.path), self._tensor(name)[0]

    @cached_property
    def folder(self) -> Path | None:
        """A temporary folder with the files that were beside the model's weights."""
        if not any(file.kind != "header" for file in self.notes.files.values()):
            return None
        folder = Path(mkdtemp(prefix="dare-delta-"))
        finalize(self, rmtree, folder, ignore_errors=True)
        self.file.fill_folder(folder, self.base.folder)
        return folder

    # ------------------------------------------------------------ reading

    def prefetch(self, name: str, start: int, count: int) -> None:
        for chunk in range(start // CHUNK, chunk_count(start + count)):
            for part, first, size in self.file.spans(self._tensor(name)[0], chunk):
                if size:
                    self.inner.prefetch(part, first, size)

    def read(self, name: str, start: int, into: Raw, base: Raw | None = None) -> None:
        name, tensor = self._tensor(name)
        whole = chunk_span(start // CHUNK, tensor.elements)
        beside = base if (start, into.size) == whole else None
        place, end = start, start + into.size
        while place < end:
            chunk = place // CHUNK
            first, count = chunk_span(chunk, tensor.elements)
            stop = min(end, first + count)
            part = into[place - start : stop - start]
            if part.size == count:
                self._decode(name, chunk, beside, part)
            else:
                part[:] = self._decoded(name, chunk, count)[place - first : stop - first]
            place = stop

    def _decoded(self, name: str, chunk: int, count: int) -> Raw:
        """Decode a whole chunk, of which a part is needed; the next part is often of the same."""
        if getattr(self._local, "place", None) != (name, chunk):
            whole = np.empty(count, self.tensors[name].dtype.carrier)
            self._decode(name, chunk, None, whole)
            self._local.place, self._local.whole = (name, chunk), whole
        decoded: Raw = self._local.whole
        return decoded

    def _decode(self, name: str, chunk: int, base: Raw | None, into: Raw) -> None:
        """Fill a whole chunk; read the base's elements of it if they are not given."""
        tensor, piece = self.notes.tensors[name], self.file.pieces[name][chunk]
        is_change = self._is_change(name)
        if tensor.base is None or (is_change and self.notes.bits != "native"):
            base = None
        elif base is None:
            info = self._base_info(name, tensor)
            base = np.empty(into.size, info.dtype.carrier)
            self.base.read(info.name, chunk * CHUNK, base)
        if piece.kept == AS_IN_BASE:
            if base is not None and base.dtype != into.dtype and not is_change:
                raise self.file.damaged(f"{name} has the base's values, in another type")
            into[:] = 0 if is_change else base
            return
        parts = self.file.read_parts(name, chunk)
        if self._is_lossless:
            self.file.uncode(name, parts[0], base, into)
            return
        lanes = self.file.lanes(name, chunk)
        expand = kernels.load("cpu").expand
        if not is_change:
            if tensor.drop_rate:  # else no value is the base's, which may have another type
                into[:] = base
            expand(parts[0], lanes, into)
            return
        change = self.file.kept_changes(piece.kept, parts, base, lanes)
        if self._is_rescaled(tensor):
            with np.errstate(over="ignore"):  # infinities are counted where they are stored
                change *= np.float32(1.0 / (1.0 - (tensor.drop_rate or 0.0)))
        into[:] = 0
        expand(change, lanes, into)


def part_names(notes: DeltaNotes, name: str) -> tuple[str, ...]:
    """Return the stored tensors that a tensor of the model is made of."""
    if notes.scheme == "lossless":
        return (f"coded:{name}",)
    return (f"values:{name}",) if notes.bits == "native" else (f"values:{name}", f"scales:{name}")


def part_type(notes: DeltaNotes, part: str, tensor: StoredTensor) -> StorageType:
    """Return the storage type of a stored tensor."""
    kind = part.partition(":")[0]
    if kind == "values" and notes.bits == "native":
        return tensor.kind
    return BF16 if kind == "scales" else U8


def part_sizes(notes: DeltaNotes, count: int) -> tuple[int, ...]:
    """Return the elements of a chunk in each part, from its count of kept values."""
    if count == AS_IN_BASE:
        return (0,) * len(part_names(notes, ""))
    if notes.scheme == "lossless" or notes.bits == "native":
        return (count,)
    return -(-count * notes.bits // 8), -(-count // SCALE_GROUP)


def file_part(name: str) -> str:
    """Return the stored tensor that holds one of the model's files, or its header."""
    return f"file:{name}"


def sample(base: Source) -> str:
    """Return a digest of a few elements of a model: from the middle of some of its tensors."""
    names = sorted(name for name, info in base.tensors.items() if info.elements)
    step = max(1, -(-len(names) // SAMPLED_TENSORS))
    digest = xxhash.xxh3_128()
    with base:
        for name in names[::step]:
            info = base.tensors[name]
            raw = np.empty(min(info.elements, SAMPLED_ELEMENTS), info.dtype.carrier)
            base.read(name, (info.elements - raw.size) // 2, raw)
            digest.update(f"{name}\n".encode())
            digest.update(raw.data)
    return digest.hexdigest()


def is_delta_file(source: FileSource) -> bool:
    """Return whether safetensors files are a delta file."""
    return source.has_note(KEY)


def open_form(opening: Opening) -> DeltaSource:
    """Open a delta file, which needs its base."""
    if opening.base is None:
        text = "is a delta file; first run `dare apply BASE DELTA -o OUT`"
        raise InputError(f"{opening.path}: {text}")
    return DeltaSource(DeltaFile(opening.stored), opening.base, rescales=opening.rescales)
