"""GGUF files as llama.cpp writes them, presented with the names and shapes of Hugging Face models.

Quantised tensors are presented as float32: the blocks that cover a range are read and dequantised
by the `gguf` package, NumPy arithmetic in float32 without sums, so that a range gives the same
bytes as the same part of the whole. F64, F32, F16, BF16 and integers are presented as
they are stored.

The header is read here and not by `gguf.GGUFReader`, which makes an object of every token in the
vocabulary (5 s for a model of 135 million parameters) and believes the counts and offsets it
finds. Here no memory is allocated because a header says so.
"""

from __future__ import annotations

import math
import re
import struct
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from dare.documents.notices import notice
from dare.errors import HeaderError, InputError, install_command, needed
from dare.inputs.sources import InputFiles, Opening, Raw
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.files import as_stream
from dare.tensors.header import MAX_TENSORS, TensorInfo, admit, show_shape
from dare.tensors.names import some_of

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

MAGIC = b"GGUF"
MAX_HEADER_BYTES = 64 << 20  # a vocabulary of 262,144 tokens takes about 16 MB
MAX_ARRAY_ITEMS = 1 << 21
MAX_PAIRS = 1 << 16
MAX_EXPERTS = 1 << 12
MAX_DIMENSIONS = 4  # the limit of ggml
DEFAULT_ALIGNMENT = 32
PIECE_ELEMENTS = 1 << 16  # dequantised at once; with all intermediate values they fit a cache

_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
AS_STORED = ("F64", "F32", "F16", "BF16", "I8", "I16", "I32", "I64")
_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")

Metadata = Mapping[str, Any]  # numbers and texts; for an array, a text that says how long it is


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file, under its name in GGUF."""

    name: str
    file: Path
    kind: GGMLQuantizationType
    shape: tuple[int, ...]  # outermost dimension first, as everywhere except in GGUF
    start: int
    block_elements: int
    block_bytes: int
    head_rows: int = 0  # rows of an attention head, if the converter interleaved its halves
    shift: float = 0.0

    @property
    def nbytes(self) -> int:
        """Size of the data."""
        return math.prod(self.shape) // self.block_elements * self.block_bytes

    @property
    def row_bytes(self) -> int:
        """Size of everything below the outermost dimension."""
        return self.nbytes // self.shape[0]

    @property
    def is_computed(self) -> bool:
        """True if it is presented as float32 instead of its stored bytes."""
        return self.kind.name not in AS_STORED or self.shift != 0

    def row_in_file(self, row: int) -> int:
        """Return a row's place: llama.cpp interleaves the rows of the two halves of each head."""
        head, within = divmod(row, self.head_rows)
        half, index = divmod(within, self.head_rows // 2)
        return head * self.head_rows + 2 * index + half


@dataclass(frozen=True)
class Family:
    """The names of an architecture's tensors, and the converter's changes to them."""

    parts: Mapping[str, str]  # of a layer; `*` stands for the number of an expert
    interleaves_heads: bool = False
    norm_shift: float = 0.0  # added to the weights of norms, to undo the converter's change

    @cached_property
    def names(self) -> Mapping[str, str]:
        """The parts in GGUF, by those of a layer."""
        return _inverse(self.parts)


def _inverse(parts: Mapping[str, str]) -> dict[str, str]:
    return {name: part for part, name in parts.items()}


_TABLES = tomllib.loads(files("dare.inputs").joinpath("gguf.toml").read_text("utf-8"))
_OUTSIDE_LAYERS = _TABLES["outside_layers"]
_OUTSIDE_NAMES = _inverse(_OUTSIDE_LAYERS)
FAMILIES = {
    name: Family({k: v for part in table.pop("parts") for k, v in _TABLES[part].items()}, **table)
    for name, table in _TABLES["families"].items()
}

_NAME = re.compile(r"(?:blk\.(\d+)\.)?([\w.]+)", re.ASCII)
_HUGGING_FACE_NAME = re.compile(r"(?:model\.layers\.(\d+)\.)?([\w.*]+)", re.ASCII)
_EXPERT = re.compile(r"(?<=\.experts\.)(?:0|[1-9]\d{0,5})(?=\.)", re.ASCII)
# Tensors that llama.cpp computes from the configuration; no Hugging Face model has them.
NOT_WEIGHTS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")


class GgufSource(InputFiles):
    """A GGUF model in one file or in parts, with the names of its Hugging Face counterpart.

    The path leads to the file, or to one of its parts.
    """

    def __init__(self, path: Path, most_ahead_bytes: int | None = None) -> None:
        super().__init__(path, most_ahead_bytes)
        self.metadata: Metadata = {}
        self.pairs: Mapping[str, tuple[int, int]] = {}  # by key: where the pair begins and ends
        self.stored: dict[str, Stored] = {}
        self.left_out: tuple[Stored, ...] = ()  # tensors that are no weights
        tensors = self._read_parts()
        self.architecture = str(self.metadata.get("general.architecture", "unknown"))
        if self.metadata.get("general.type", "model") == "adapter":
            raise InputError(f"{path}: is a LoRA adapter in GGUF; give it as PEFT saved it")
        self._name(tensors)
        self.tied = "lm_head.weight" not in self.tensors or None
        self._dequantize = _checked_dequantize(path, self.stored.values())

    def _read_parts(self) -> list[Stored]:
        tensors: list[Stored] = []
        parts = [self.path.with_name(name) for name in part_names(self.path.name)]
        for number, part in enumerate(parts):
            with self.open_header(part) as opened, as_stream(opened, closes=False) as stream:
                metadata, pairs, stored = read_header(stream, part, opened.size)
            count, place = metadata.get("split.count", 0) or 1, metadata.get("split.no", 0)
            if (count, place) != (len(parts), number):
                raise HeaderError(
                    f"{self.path}: by its name it is part {number + 1} of {len(parts)}, but it says"
                    f" split.no = {place} and split.count = {count}; keep the parts' original names"
                )
            if number == 0:
                self.metadata, self.pairs = metadata, pairs
            tensors += stored
        return tensors

    def _name(self, tensors: Iterable[Stored]) -> None:
        """Add tensors under their Hugging Face names, if these are known."""
        family = FAMILIES.get(self.architecture)
        unknown = []
        for tensor in tensors:
            name = hugging_face_name(tensor.name, family) if family else None
            if family and tensor.name in NOT_WEIGHTS:
                self.left_out += (tensor,)
            elif family and name:
                for own, part in _experts(name, with_changes(tensor, family, self.metadata)):
                    self._add(own, part)
            else:
                unknown.append(tensor.name)
                self._add(tensor.name, tensor)
        if family is None:
            known, architecture = ", ".join(FAMILIES), self.architecture
            self.remarks += (
                notice("unknown_architecture", architecture=architecture, known=known),
            )
        elif unknown:
            self.remarks += (notice("unknown_names", names=some_of(unknown)),)
        if self.left_out:
            names = some_of([tensor.name for tensor in self.left_out])
            self.remarks += (notice("not_weights", names=names),)

    def _add(self, name: str, tensor: Stored) -> None:
        if name in self.tensors:
            raise HeaderError(f"{self.path}: {name} occurs twice, the second time as {tensor.name}")
        if len(self.tensors) == MAX_TENSORS:
            raise HeaderError(f"{self.path}: more than {MAX_TENSORS} tensors, with {tensor.name}")
        self.stored[name] = tensor
        kind = STORAGE_TYPES["F32" if tensor.is_computed else tensor.kind.name]
        self.tensors[name] = TensorInfo(name, kind, tensor.shape, tensor.start)
        admit(self.tensors[name], (), str(self.path))

    @property
    def first(self) -> Path:
        """The file that has the metadata."""
        return next(iter(self.files))

    def fingerprint(self) -> list[Any]:
        undone = [(name, t.kind.name, t.head_rows, t.shift) for name, t in self.stored.items()]
        return [*super().fingerprint(), undone]

    def read(self, name: str, start: int, into: Raw, _base: Raw | None = None) -> None:
        tensor, block = self.stored[name], self.stored[name].block_elements
        if not tensor.is_computed:
            self._read_stored(tensor, start * tensor.block_bytes, into.view(np.uint8))
            return
        end = -(-(start + into.size) // block)
        step = max(1, PIECE_ELEMENTS // block)
        for first in range(start // block, end, step):
            piece = self._decode(tensor, first, min(step, end - first))
            place = first * block - start
            begin, stop = max(place, 0), min(place + piece.size, into.size)
            into[begin:stop] = piece[begin - place : stop - place]

    def _decode(self, tensor: Stored, first: int, count: int) -> NDArray[np.float32]:
        """Read blocks as float32; every NaN has the same bits on every machine."""
        raw = np.empty((1, count * tensor.block_bytes), np.uint8)
        self._read_stored(tensor, first * tensor.block_bytes, raw[0])
        with np.errstate(all="ignore"):
            values: NDArray[np.float32] = self._dequantize(raw, tensor.kind).reshape(-1)
            if tensor.shift:
                values = values + np.float32(tensor.shift)
        np.copyto(values, np.float32(np.nan), where=np.isnan(values))
        return values

    def _read_stored(self, tensor: Stored, offset: int, into: NDArray[np.uint8]) -> None:
        """Read stored bytes, as if the rows lay in Hugging Face's order."""
        if not tensor.head_rows:
            self.read_bytes(tensor.file, tensor.start + offset, into, tensor.name)
            return
        row_bytes, done = tensor.row_bytes, 0
        while done < into.size:
            row, within = divmod(offset + done, row_bytes)
            count = min(row_bytes - within, into.size - done)
            position = tensor.start + tensor.row_in_file(row) * row_bytes + within
            self.read_bytes(tensor.file, position, into[done : done + count], tensor.name)
            done += count

    def read_left_out(self, tensor: Stored) -> NDArray[np.float32]:
        """Return a tensor that does not hold weights."""
        return self._decode(tensor, 0, math.prod(tensor.shape) // tensor.block_elements)

    def prefetch(self, name: str, start: int, count: int) -> None:
        tensor, block = self.stored[name], self.stored[name].block_elements
        if not tensor.nbytes:
            return
        unit = tensor.head_rows * tensor.row_bytes if tensor.head_rows else tensor.block_bytes
        first = start // block * tensor.block_bytes // unit * unit
        last = -(-(start + count) // block) * tensor.block_bytes
        nbytes = min(-(-last // unit) * unit, tensor.nbytes) - first
        self.prefetch_bytes(tensor.file, tensor.start + first, nbytes)


def with_changes(tensor: Stored, family: Family, metadata: Metadata) -> Stored:
    """Note the converter's changes to a tensor, to undo them in reading and redo them in writing.

    The metadata has the numbers of heads; the tensor's file is named where they do not fit.
    """
    if family.norm_shift and tensor.name.endswith("norm.weight"):
        return replace(tensor, shift=family.norm_shift)
    part = tensor.name.split(".")[-2]
    if part == "ffn_gate_inp_shexp":
        return replace(tensor, shape=(1, *tensor.shape[-1:]))  # older converters left out the 1
    if not family.interleaves_heads or part not in ("attn_q", "attn_k"):
        return tensor
    key = f"{metadata.get('general.architecture')}.attention.head_count"
    heads = metadata.get(key)
    if part == "attn_k":
        heads = metadata.get(f"{key}_kv", heads)
    if type(heads) is not int or heads < 1:
        raise InputError(f"{tensor.file}: {key} is {heads!r}; expected a whole number above 0")
    rows = tensor.shape[0] if tensor.shape else 1
    if rows % (2 * heads):
        what = f"{tensor.name} has {rows} rows, not {heads} heads of even size"
        raise HeaderError(f"{tensor.file}: {what}")
    return replace(tensor, head_rows=rows // heads)


def _experts(name: str, tensor: Stored) -> Iterator[tuple[str, Stored]]:
    """Yield the experts of a stack, which Hugging Face's files have one by one."""
    if "*" not in name:
        yield name, tensor
        return
    if len(tensor.shape) != 3 or tensor.shape[0] > MAX_EXPERTS:
        what = f"{tensor.name} is {show_shape(tensor.shape)}, not a stack of experts"
        raise HeaderError(f"{tensor.file}: {what}")
    one = replace(tensor, shape=tensor.shape[1:])
    for number in range(tensor.shape[0]):
        begin = tensor.start + number * one.nbytes
        yield name.replace("*", str(number)), replace(one, start=begin)


def open_form(opening: Opening) -> GgufSource:
    """Open a GGUF file, or all parts of one."""
    return GgufSource(opening.path, opening.most_ahead_bytes)


def part_names(file: str) -> list[str]:
    """Return the files that belong to a model, by the names that llama.cpp gives them.

    >>> part_names("m-00001-of-00002.gguf"), part_names("m.gguf")
    (['m-00001-of-00002.gguf', 'm-00002-of-00002.gguf'], ['m.gguf'])
    """
    numbered = _PART.fullmatch(file)
    if numbered is None or int(numbered[3]) == 0:
        return [file]
    stem, _, count = numbered.groups()
    return [f"{stem}-{n + 1:05}-of-{count}.gguf" for n in range(int(count))]


def hugging_face_name(name: str, family: Family) -> str | None:
    """Translate a tensor's name; None if there is no translation.

    >>> hugging_face_name("blk.7.attn_q.weight", FAMILIES["llama"])
    'model.layers.7.self_attn.q_proj.weight'
    >>> hugging_face_name("blk.0.ffn_up_exps.weight", FAMILIES["qwen3moe"])  # all of them
    'model.layers.0.mlp.experts.*.up_proj.weight'
    """
    return _translate(_NAME.fullmatch(name), _OUTSIDE_LAYERS, family.parts, "model.layers")


def gguf_name(name: str, family: Family) -> str | None:
    """Translate a Hugging Face name back; None if there is no translation.

    >>> gguf_name("model.layers.7.self_attn.q_proj.weight", FAMILIES["llama"])
    'blk.7.attn_q.weight'
    >>> gguf_name("model.layers.0.mlp.experts.3.up_proj.weight", FAMILIES["qwen3moe"])
    'blk.0.ffn_up_exps.weight'
    """
    parsed = _HUGGING_FACE_NAME.fullmatch(_EXPERT.sub("*", name))
    return _translate(parsed, _OUTSIDE_NAMES, family.names, "blk")


def expert_of(name: str) -> int | None:
    """Return the number of the expert that a Hugging Face name has, if any."""
    found = _EXPERT.search(name)
    return int(found[0]) if found else None


def _translate(
    parsed: re.Match[str] | None, outside: Mapping[str, str], inside: Mapping[str, str], layers: str
) -> str | None:
    """Build a name from the names of its layer and its part, whose ending both have or none."""
    layer, whole = parsed.groups() if parsed else (None, "")
    names, (part, _, ending) = outside if layer is None else inside, whole.rpartition(".")
    translated = names.get(whole)
    if translated is None and part in names and ending in ("weight", "bias"):
        translated = f"{names[part]}.{ending}"
    within = "" if layer is None else f"{layers}.{layer}."
    return f"{within}{translated}" if translated else None


class _Cursor:
    """Reads a header from front to back, and nothing after it."""

    def __init__(self, stream: BinaryIO, file: Path, size: int) -> None:
        self.file = file
        self.position = 0
        self.size = size
        self._stream = stream

    def require(self, holds: bool, text: str) -> None:
        """Refuse the file unless something holds."""
        if not holds:
            raise HeaderError(f"{self.file}: {text}")

    def take(self, count: int) -> bytes:
        """Read the next bytes."""
        self.position += count
        if self.position > min(self.size, MAX_HEADER_BYTES):
            text = f"truncated or not GGUF: {self.size} bytes, and the header needs {self.position}"
            self.require(self.position <= self.size, text)
            self.require(False, f"the header is larger than {MAX_HEADER_BYTES} bytes")
        data = self._stream.read(count)
        self.require(len(data) == count, "the file became shorter while it was being read")
        return data

    def number(self, code: str) -> Any:
        """Read a number by its code in `struct`."""
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def count(self, code: str, most: int, what: str, whose: str = "") -> int:
        """Read how many there are of something."""
        count: int = self.number(code)
        self.require(count <= most, f"{whose}claims {count} {what}; the limit is {most}")
        return count

    def text(self, what: str) -> str:
        try:
            return self.take(self.number("Q")).decode()
        except UnicodeDecodeError:
            raise HeaderError(f"{self.file}: {what} is not valid UTF-8") from None

    def value(self, key: str) -> Any:
        """Read a value of the metadata."""
        kind = self.number("I")
        if kind == _TEXT:
            return self.text(key)
        if kind == _ARRAY:
            return self._pass_over_array(key)
        self.require(kind in _SCALARS, f"{key} is of type {kind}, which GGUF does not have")
        return self.number(_SCALARS[kind])

    def _pass_over_array(self, key: str) -> str:
        kind, count = self.number("I"), self.count("Q", MAX_ARRAY_ITEMS, "items", f"{key} ")
        is_known = kind in _SCALARS or kind == _TEXT
        self.require(is_known, f"{key} is an array of type {kind}, which is not allowed")
        if kind == _TEXT:  # a vocabulary has hundreds of thousands, so this loop is tight
            read, limit = self._stream.read, min(self.size, MAX_HEADER_BYTES)
            for _ in range(count):
                length = int.from_bytes(read(8), "little")
                self.position += 8 + length
                if self.position > limit:
                    break
                read(length)
            self.take(0)
        else:
            self.take(count * struct.calcsize(f"<{_SCALARS[kind]}"))
        return f"an array of {count}"

    def tensor(self, name: str) -> Stored:
        """Read a tensor's entry; its start is counted from the start of the data here."""
        dimensions = self.count("I", MAX_DIMENSIONS, "dimensions", f"{name} ")
        shape = tuple(self.number("Q") for _ in range(dimensions))[::-1]
        number, offset = self.number("I"), self.number("Q")
        gguf = import_gguf(self.file)
        try:
            kind = gguf.GGMLQuantizationType(number)
            elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            known = ", ".join(kind.name for kind in gguf.GGML_QUANT_SIZES)
            text = f"{self.file}: {name} is of type {number}; the gguf package knows {known}; "
            raise InputError(f"{text}try: pip install --upgrade gguf") from None
        row = shape[-1] if shape else 1
        text = f"{name} has rows of {row} elements, and {kind.name} comes in blocks of {elements}"
        self.require(row % elements == 0, text)
        return Stored(name, self.file, kind, shape, offset, elements, nbytes)


Header = tuple[Metadata, Mapping[str, tuple[int, int]], list[Stored]]


def read_header(stream: BinaryIO, file: Path, size: int) -> Header:
    """Read and check the header of an open file of a known size.

    Return the metadata, where in the file each of its pairs is, and the tensors.
    """
    cursor = _Cursor(stream, file, size)
    magic = cursor.take(min(len(MAGIC), cursor.size))
    start = repr(magic) if len(magic) == len(MAGIC) else f"only {len(magic)} bytes"
    cursor.require(magic == MAGIC, f"not a GGUF file: it begins with {start}, not {MAGIC!r}")
    version = cursor.number("I")
    text = "written for big-endian machines; convert it with gguf-convert-endian"
    cursor.require(version == 0 or version & 0xFFFF != 0, text)
    cursor.require(version in (2, 3), f"GGUF version {version}; versions 2 and 3 are supported")
    tensor_count = cursor.count("Q", MAX_TENSORS, "tensors")
    pair_count = cursor.count("Q", MAX_PAIRS, "keys")
    metadata: dict[str, Any] = {}
    pairs = {}
    for number in range(pair_count):
        begin = cursor.position
        key = cursor.text(f"key {number} of the metadata")
        cursor.require(key not in metadata, f"{key!r} occurs twice in the metadata")
        metadata[key] = cursor.value(key)
        pairs[key] = begin, cursor.position
    tensors: dict[str, Stored] = {}
    for number in range(tensor_count):
        name = cursor.text(f"the name of tensor {number}")
        cursor.require(name not in tensors, f"the tensor {name!r} occurs twice")
        tensors[name] = cursor.tensor(name)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    is_power = type(alignment) is int and alignment > 0 and not alignment & (alignment - 1)
    cursor.require(is_power, f"general.alignment is {alignment!r}, not a power of two")
    begin = -(-cursor.position // alignment) * alignment
    names = list(tensors)  # each old entry is freed before the next new one is made
    stored = [replace(old, start=begin + old.start) for old in map(tensors.pop, names)]
    position, previous = 0, ""
    for tensor in sorted(stored, key=lambda tensor: (tensor.start, tensor.nbytes)):
        cursor.require(tensor.start >= position, f"{tensor.name} overlaps {previous}")
        position, previous = tensor.start + tensor.nbytes, tensor.name
        text = f"{previous} ends at byte {position} of {cursor.size}; the file is truncated"
        cursor.require(position <= cursor.size, text)
    return metadata, pairs, stored


def import_gguf(path: Path) -> Any:
    """Return the gguf package; if it is missing, the error names the path."""
    with needed(InputError(f"{path}: GGUF needs a package: {install_command('gguf')}")):
        import gguf
    return gguf


def _checked_dequantize(path: Path, stored: Iterable[Stored]) -> Any:
    """Return the gguf package's function, tried on zeros of every type that will be needed."""
    gguf = import_gguf(path)
    for tensor in {tensor.kind: tensor for tensor in stored if tensor.is_computed}.values():
        if not _can_dequantise(gguf, tensor.kind):
            known = ", ".join(k.name for k in gguf.GGML_QUANT_SIZES if _can_dequantise(gguf, k))
            raise InputError(
                f"{path}: {tensor.name} is of type {tensor.kind.name}, which the gguf package "
                f"cannot dequantise; make the GGUF again with another type: {known}"
            )
    return gguf.quants.dequantize


def _can_dequantise(gguf: Any, kind: GGMLQuantizationType) -> bool:
    """Try the gguf package's function on a block of zeros."""
    try:
        gguf.quants.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True
