"""Safetensors headers and other JSON: read what may be hostile, build what is exact.

The format is eight bytes of length N (little endian), N bytes of JSON, then the data. A header is
believed only after every claim in it has been checked against the others and against the size of
the file; nothing is allocated on its word.
"""

from __future__ import annotations

import io
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dare.documents.shown import json_ready
from dare.errors import UNSAFE_CHARACTERS, HeaderError, InputError
from dare.tensors.dtypes import STORAGE_TYPES, WEIGHT_TYPES, StorageType
from dare.tensors.files import InputFile, read_up_to

MAX_CONFIG_BYTES = 10_000_000


def printable_json(document: str) -> str:
    r"""Return a document with all escaped that a terminal would act on.

    >>> print(printable_json('{"name": "\x9b2J"}'))
    {"name": "\u009b2J"}
    """
    return UNSAFE_CHARACTERS.sub(
        lambda m: m[0] if m[0] == "\n" else json.dumps(m[0])[1:-1], document
    )


def json_bytes(value: Any, indent: int) -> bytes:
    """Return a document with a line's end, made piece by piece to save memory."""
    written = io.BytesIO()
    for piece in json.JSONEncoder(indent=indent).iterencode(json_ready(value)):
        written.write(piece.encode())
    written.write(b"\n")
    return written.getvalue()


def parse_json(text: bytes, where: Path) -> Any:
    """Read JSON; raise InputError, which names its origin `where`, if it is not valid."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: is not valid JSON: {error}") from None


def dump_json(document: object, where: Path, *, indent: int | None = 2) -> bytes:
    """Write JSON as transformers does, in the order of the keys; errors name its origin `where`."""
    try:
        return json.dumps(document, indent=indent, ensure_ascii=False).encode() + b"\n"
    except (ValueError, RecursionError) as error:  # half a character, or too deep
        raise InputError(f"{where}: cannot be written again: {error}") from None


# ---------------------------------------------------------------- headers of safetensors

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
MAX_DIMENSIONS = 64
MAX_TENSORS = 300_000  # the limit for one file, more than any model has in all its files
MAX_ENTRY = 2048  # characters of a tensor's entry; 64 dimensions take 1500
MAX_METADATA = 8_000_000  # characters of notes; some programs keep all of a training there
_SPACE = re.compile(r"[ \t\n\r]+")
_LENGTH_BYTES = 8
# Our own headers end on a page, so that weights can be written past the page cache and mapped.
_ALIGNMENT = 4096

METADATA = "__metadata__"  # the key of a header's notes, so that no tensor can be called that

Described = tuple[str, StorageType, tuple[int, ...]]


def show_shape(shape: Iterable[int]) -> str:
    """Return a shape for people.

    >>> show_shape((4096, 11008)), show_shape([3]), show_shape(())
    ('4096×11008', '3', 'a scalar')
    """
    return "×".join(map(str, shape)) or "a scalar"


def stored_elements(dtype: StorageType, shape: Iterable[int]) -> int:
    """Return the number of a tensor's elements, or of its bytes if elements share them.

    >>> stored_elements(STORAGE_TYPES["F4"], (3, 4)), stored_elements(STORAGE_TYPES["BF16"], ())
    (6, 1)
    """
    count = math.prod(shape)
    return int(-(-count * dtype.packed_bits // 8)) if dtype.packed_bits else count


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as a header describes it."""

    name: str
    dtype: StorageType
    shape: tuple[int, ...]
    start: int  # offset of the first byte, from the start of the file

    @property
    def elements(self) -> int:
        """The number of stored elements; 1 for a scalar. Bytes, if elements share them."""
        return stored_elements(self.dtype, self.shape)

    @property
    def is_counter(self) -> bool:
        """True for a single integer, such as BatchNorm's steps; several may be weights."""
        return not self.dtype.is_weight and self.elements == 1

    @property
    def form(self) -> str:
        """The shape for people: 4096×11008."""
        return show_shape(self.shape)

    @property
    def described(self) -> str:
        """Shape and type for people: 4096×11008 BF16."""
        return f"{self.form} {self.dtype.name}"

    @property
    def nbytes(self) -> int:
        """Size of the data."""
        return self.elements * self.dtype.itemsize

    def position(self, element: int) -> int:
        """Offset of an element's first byte, from the start of the file."""
        return self.start + element * self.dtype.itemsize


def admit(info: TensorInfo, known: Container[str], where: str, *, as_weight: bool = False) -> None:
    """Refuse a tensor that no output could hold; every tensor of every input passes here.

    Its name must be text that a header can hold and that is not `known` yet. `as_weight` asks for a
    type that is computed with.
    """
    name: object = info.name
    if not isinstance(name, str):
        raise HeaderError(f"{where}: the tensor name {shorten(name)} is not text; rename it")
    if re.search("[\ud800-\udfff]", name):  # JSON can spell halves of characters
        raise HeaderError(f"{where}: the tensor name {name!r} is not valid Unicode")
    if name == METADATA:
        raise HeaderError(f"{where}: a tensor is called {METADATA}; rename it")
    if name in known:
        raise HeaderError(f"{where}: {name} occurs twice; leave one of them out")
    if as_weight and not info.dtype.is_weight:
        must = "must have one of these types"
        kinds = ", ".join(kind.name for kind in WEIGHT_TYPES)
        raise HeaderError(f"{where}: {name} is {info.described}, and {must}: {kinds}")


@dataclass(frozen=True)
class Header:
    """A checked header."""

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    data_start: int


def read_header(file: InputFile, where: str) -> Header:
    """Read and check the header of an open file; `where` names it in errors."""
    file_size = file.size
    prefix = read_up_to(file, _LENGTH_BYTES, 0)
    if len(prefix) < _LENGTH_BYTES:
        what = f"{file_size} bytes is too short for a safetensors file"
        raise HeaderError(f"{where}: {what}; the download is probably incomplete")
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        what = f"its header would take {length} bytes, more than the limit of {MAX_HEADER_BYTES}"
        raise HeaderError(f"{where}: is not a safetensors file: {what}; save it as safetensors")
    if _LENGTH_BYTES + length > file_size:
        what = f"the header claims {length} bytes, and the file has {file_size} in all"
        raise HeaderError(f"{where}: {what}; the file is truncated")
    text = read_up_to(file, length, _LENGTH_BYTES)
    return parse_header(text, file_size - _LENGTH_BYTES - length, where)


def parse_header(text: bytes | bytearray, data_bytes: int, where: str) -> Header:
    """Check a header's JSON against the number of data bytes that follow it.

    Entries are taken one after the other, so that only one of them is in memory twice.
    """
    data_start = _LENGTH_BYTES + len(text)
    metadata: object = {}
    tensors: dict[str, TensorInfo] = {}
    has_metadata = False
    for name, entry in _entries(text, where):
        if name == METADATA and not has_metadata:
            metadata, has_metadata = entry, True
            continue
        if name in tensors or name == METADATA:
            raise HeaderError(f"{where}: {name!r} occurs twice in the header")
        if len(tensors) == MAX_TENSORS:
            what = f"has more than {MAX_TENSORS} tensors; cut it into several files"
            raise HeaderError(f"{where}: {what}")
        dtype, shape, begin = _check_entry(name, entry, where)
        info = TensorInfo(sys.intern(name), dtype, shape, data_start + begin)
        admit(info, tensors, where)
        tensors[info.name] = info
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise HeaderError(f"{where}: {METADATA} must map text to text")
    _check_spans(tensors.values(), data_start, data_bytes, where)
    return Header(tensors, metadata, data_start)


def _entries(coded: bytes | bytearray, where: str) -> Iterator[tuple[str, Any]]:
    """Yield the names in a JSON object with their values, one after the other."""

    def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
            raise HeaderError(f"{where}: {twice!r} occurs twice in the header")
        return found

    decode = json.JSONDecoder(object_pairs_hook=without_duplicates).raw_decode
    try:
        text = coded.decode()
        place = _after_space(text, 0)
        if text[place : place + 1] != "{":
            decode(text, place)
            raise HeaderError(f"{where}: the header must be a JSON object")
        place = _after_space(text, place + 1)
        mark = text[place : place + 1]
        while mark != "}":
            if text[place : place + 1] != '"':
                raise json.JSONDecodeError("expected a name in double quotes", text, place)
            name, place = decode(text, place)
            place = _expect(":", text, _after_space(text, place))
            limit = MAX_METADATA if name == METADATA else MAX_ENTRY
            try:  # no more of it is read, whatever follows
                value, length = decode(text[place : place + limit])
            except json.JSONDecodeError as error:
                if len(text) - place < limit:
                    raise json.JSONDecodeError(error.msg, text, place + error.pos) from None
                what = f"its entry in the header is longer than {limit} characters, or not JSON"
                raise HeaderError(f"{where}: {name}: {what}") from None
            yield name, value
            place = _after_space(text, place + length)
            mark = text[place : place + 1]
            place = place if mark == "}" else _expect(",", text, place)
        rest = _after_space(text, place + 1)
        if rest < len(text):
            raise json.JSONDecodeError("text after the end", text, rest)
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"{where}: the header is not valid JSON: {error}") from None


def _after_space(text: str, place: int) -> int:
    match = _SPACE.match(text, place)
    return match.end() if match else place


def _expect(mark: str, text: str, place: int) -> int:
    """Return the place after a mark that must be there, and after the space behind it."""
    if text[place : place + 1] != mark:
        raise json.JSONDecodeError(f"expected {mark!r}", text, place)
    return _after_space(text, place + 1)


def _check_entry(name: str, entry: object, where: str) -> tuple[StorageType, tuple[int, ...], int]:
    place = f"{where}: {name}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise HeaderError(f"{place}: needs exactly dtype, shape and data_offsets")
    dtype = STORAGE_TYPES.get(entry["dtype"]) if isinstance(entry["dtype"], str) else None
    if dtype is None:
        known = ", ".join(STORAGE_TYPES)
        raise HeaderError(f"{place}: unknown dtype {entry['dtype']!r}; known: {known}")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not _are_counts(shape) or len(shape) > MAX_DIMENSIONS:
        raise HeaderError(f"{place}: shape {shorten(shape)} is not a list of whole numbers")
    if not _are_counts(offsets) or len(offsets) != 2:
        raise HeaderError(f"{place}: data_offsets {shorten(offsets)} are not two whole numbers")
    begin, end = offsets
    if math.prod(shape) * dtype.packed_bits % 8:
        raise HeaderError(f"{place}: {show_shape(shape)} {dtype.name} does not fill whole bytes")
    expected = stored_elements(dtype, shape) * dtype.itemsize
    if end - begin != expected:
        what = f"{show_shape(shape)} {dtype.name} takes {expected} bytes"
        raise HeaderError(f"{place}: {what}, and data_offsets {offsets} span {end - begin}")
    return dtype, tuple(shape), begin


def _are_counts(values: object) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in values)


def shorten(value: object) -> str:
    """Return the beginning of a value as text; it may be huge, or nested too deeply to show."""
    try:
        text = ascii(value[:8] if isinstance(value, list) else value)
    except (ValueError, RecursionError):  # a number of thousands of digits
        return f"a {type(value).__name__}"
    return text if len(text) <= 80 else text[:80] + "…"


def _check_spans(
    tensors: Iterable[TensorInfo], data_start: int, data_bytes: int, where: str
) -> None:
    """Check that the tensors tile the data: no overlap, no hole, nothing left over."""
    position, previous = 0, "the header"
    for info in sorted(tensors, key=lambda info: (info.start, info.nbytes, info.name)):
        begin, name = info.start - data_start, info.name
        if begin < position:
            raise HeaderError(f"{where}: {name} overlaps {previous}")
        if begin > position:
            raise HeaderError(f"{where}: {begin - position} bytes before {name} are unused")
        position, previous = begin + info.nbytes, name
    if position > data_bytes:
        what = f"ends at byte {position} of the data, and there are only {data_bytes}"
        raise HeaderError(f"{where}: {previous} {what}; the file is truncated")
    if position < data_bytes:
        raise HeaderError(f"{where}: {data_bytes - position} bytes at the end are unused")


def build_header(
    tensors: Iterable[Described], metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, TensorInfo]]:
    """Lay tensors out one after the other; return the file's first bytes and where each begins."""
    entries: dict[str, Any] = {METADATA: dict(metadata)}
    position = 0
    placed = []
    for name, dtype, shape in tensors:
        info = TensorInfo(name, dtype, shape, position)
        placed.append(info)
        entries[name] = {
            "dtype": dtype.name,
            "shape": list(shape),
            "data_offsets": [position, position + info.nbytes],
        }
        position += info.nbytes
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
    data_start = _LENGTH_BYTES + len(text)
    beginning = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return beginning, {i.name: replace(i, start=data_start + i.start) for i in placed}
