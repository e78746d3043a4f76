"""One chunk of a tensor, coded without loss against the same chunk of the base.

    pack(model bytes, base bytes) -> blob        unpack(blob, base bytes) -> model bytes

Elements are taken as whole numbers, whatever they mean. A weight that training moved a little is a
number near the base's: the difference, with its sign in the lowest bit, is small, so its upper
bytes are nearly always 0. Byte k of every element goes into plane k, and each plane is packed by
zstd. If a plane has few bytes that are not 0, scattered, their places and values are packed. An
equal chunk is an empty blob, and no blob is longer than the chunk and one byte.

The first byte of a blob says how the chunk is coded (`RAW` to `DIFFERENCE`), and in front of each
plane one says how it is stored (`ZEROS` to `SCATTERED`). The choice depends on the bytes and on the
version of zstd alone. Any choice can be read: a reader needs no rule that the writer went by.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from dare.documents.words import counted
from dare.errors import InputError

# Codes of a chunk: unchanged, as its planes, or as those of its difference from the base.
RAW, ALONE, DIFFERENCE = range(3)

# Forms of a plane: not stored, byte by byte, as a frame, or as gaps and the bytes after them.
ZEROS, PLAIN, ZSTD, SCATTERED = range(4)

BLOCK = 1 << 15  # elements that are taken apart or put together at once: they stay in the cache

LENGTH = struct.Struct("<I")
LEVEL = 1
# Settings of zstd with which it finds hardly a repetition but runs. In weights, others are chance
# and cost more than they save: bfloat16 without a base is 2% smaller than at level 1, and faster.
SETTINGS = {"window_log": 17, "hash_log": 8, "min_match": 7}
LONG_GAP = 255  # an entry of a list of gaps: this many zeros, and the gap continues

Bytes = NDArray[np.uint8]
Numbers = NDArray[np.unsignedinteger]


def pack(model: Bytes, base: Bytes | None, itemsize: int) -> bytes:
    """Code a chunk against the base's, or by itself if the base has no such tensor.

    >>> base = np.zeros(1000, np.uint8)
    >>> model = base.copy()
    >>> model[6] = 1  # of the fourth element
    >>> pack(base, base, 2).hex(" "), pack(model, base, 2).hex(" ")
    ('', '02 03 01 00 00 00 01 03 01 02 00')
    """
    if not model.size or (base is not None and np.array_equal(model, base)):
        return b""
    numbers = model.view(f"<u{itemsize}")
    if base is None:
        code, planes = ALONE, _pack_planes(numbers, None)
    else:
        code, planes = DIFFERENCE, _pack_planes(numbers, base.view(numbers.dtype))
        if 3 * sum(map(len, planes)) > 2 * model.size:  # the base may have been of no help
            highest = _pack_plane(model[itemsize - 1 :: itemsize].copy())
            if len(highest) < len(planes[-1]):
                code, planes = ALONE, _pack_planes(numbers, None)
    blob = b"".join([bytes([code]), *planes])
    return blob if len(blob) <= model.size else bytes([RAW]) + model.tobytes()


def unpack(blob: bytes | memoryview, base: Bytes | None, itemsize: int, into: Bytes) -> None:
    """Decode the chunk in a blob into an array that does not overlap the base.

    Raises InputError if it is not a coded chunk. The array's content is undefined then.
    """
    if not len(blob):
        if into.size:
            into[:] = _needed(base)
        return
    reader = _Reader(memoryview(blob))
    numbers = into.view(f"<u{itemsize}")
    code = reader.byte()
    if code == RAW:
        into[:] = reader.take(into.size)
    elif code in (ALONE, DIFFERENCE):
        planes = [reader.plane(numbers.size) for _ in range(itemsize)]
        _join(planes, _needed(base).view(numbers.dtype) if code == DIFFERENCE else None, numbers)
    else:
        raise InputError(f"a coded chunk is damaged: {code} is not a known code")
    reader.finish()


def _needed(base: Bytes | None) -> Bytes:
    if base is None:
        raise InputError("a chunk needs a tensor that the base does not have")
    return base


def _fold(changes: Numbers) -> Numbers:
    """Put the sign into the lowest bit: 0, -1, 1, -2 become 0, 1, 2, 3."""
    signed = changes.view(f"<i{changes.itemsize}")
    signs = signed >> (8 * changes.itemsize - 1)
    signed <<= 1
    signed ^= signs
    return changes


def _unfold(folded: Numbers) -> None:
    signs = folded & 1
    np.negative(signs, out=signs)
    folded >>= 1
    folded ^= signs


def _pack_planes(numbers: Numbers, base: Numbers | None) -> list[bytes]:
    """Pack the planes of numbers, or of their differences from a base."""
    planes = np.empty((numbers.itemsize, numbers.size), np.uint8)
    for start in range(0, numbers.size, BLOCK):
        part = slice(start, start + BLOCK)
        block = numbers[part] if base is None else _fold(numbers[part] - base[part])
        for k, plane in enumerate(planes):
            plane[part] = block.view(np.uint8)[k :: numbers.itemsize]
    return [_pack_plane(plane) for plane in planes]


def _join(planes: list[Bytes], base: Numbers | None, into: Numbers) -> None:
    """Put numbers together from their planes, which may be of differences from a base."""
    for start in range(0, into.size, BLOCK):
        part = slice(start, start + BLOCK)
        block = into[part]
        for k, plane in enumerate(planes):
            block.view(np.uint8)[k :: into.itemsize] = plane[part]
        if base is not None:
            _unfold(block)
            block += base[part]


def _pack_plane(plane: Bytes) -> bytes:
    used = plane != 0
    count = np.count_nonzero(used)
    is_rare = 0 < 4 * count <= used.size
    if not is_rare or 2 * np.count_nonzero(used[1:] & used[:-1]) >= count:
        return _pack_stream(plane)  # zstd packs whole rows better
    places = np.flatnonzero(used)
    gaps = _pack_gaps(places)
    head = bytes([SCATTERED]) + LENGTH.pack(gaps.size)
    return head + _pack_stream(gaps) + _pack_stream(plane[places])


def _pack_gaps(places: NDArray[np.intp]) -> Bytes:
    """Count the zeros before each place: 255 as often as it goes into them, then the rest."""
    gaps = (np.diff(places, prepend=-1) - 1).astype(np.uint32)
    long_gaps = gaps // LONG_GAP
    ends = np.cumsum(long_gaps + 1) - 1
    coded = np.full(int(ends[-1]) + 1, LONG_GAP, np.uint8)
    coded[ends] = gaps - long_gaps * LONG_GAP
    return coded


def _pack_stream(stream: Bytes) -> bytes:
    import zstandard

    if not stream.any():
        return bytes([ZEROS])
    settings = zstandard.ZstdCompressionParameters.from_level(LEVEL, **SETTINGS)
    frame = zstandard.ZstdCompressor(compression_params=settings).compress(stream.data)
    if LENGTH.size + len(frame) < stream.size:
        return bytes([ZSTD]) + LENGTH.pack(len(frame)) + frame
    return bytes([PLAIN]) + stream.tobytes()


class _Reader:
    """Goes through a blob from its second byte on, and never beyond its end."""

    def __init__(self, blob: memoryview) -> None:
        self._rest = blob

    def take(self, count: int) -> memoryview:
        if count > len(self._rest):
            raise InputError("a coded chunk ends too early")
        taken, self._rest = self._rest[:count], self._rest[count:]
        return taken

    def byte(self) -> int:
        return self.take(1)[0]

    def length(self) -> int:
        return int.from_bytes(self.take(LENGTH.size), "little")

    def plane(self, size: int) -> Bytes:
        how = self.byte()
        if how != SCATTERED:
            return self.stream(how, size)
        places = self.places(size)
        plane = np.zeros(size, np.uint8)
        plane[places] = self.stream(self.byte(), places.size)
        return plane

    def places(self, size: int) -> NDArray[np.intp]:
        count = self.length()
        if count > size:  # each gap of 0 to 254 has a byte after it
            raise InputError(f"a coded chunk is damaged: {count} gaps among {size} bytes")
        gaps = self.stream(self.byte(), count)
        ends = np.flatnonzero(gaps != LONG_GAP)
        places = np.cumsum(gaps, dtype=np.intp)[ends] + np.arange(ends.size)
        if count and (gaps[-1] == LONG_GAP or places[-1] >= size):
            raise InputError("a coded chunk is damaged: a gap reaches beyond its end")
        return places

    def stream(self, how: int, size: int) -> Bytes:
        if how == ZEROS:
            return np.zeros(size, np.uint8)
        if how == PLAIN:
            return np.frombuffer(self.take(size), np.uint8)
        if how == ZSTD:
            return _decompress(self.take(self.length()), size)
        raise InputError(f"a coded chunk is damaged: {how} is not a known way to store bytes")

    def finish(self) -> None:
        if len(self._rest):
            raise InputError(f"a coded chunk has {counted(len(self._rest), 'byte')} too many")


def _decompress(frame: memoryview, size: int) -> Bytes:
    """Unpack a frame that must declare the expected size, so that it takes no more memory."""
    import zstandard

    try:
        if zstandard.get_frame_parameters(frame).content_size == size:
            data = zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
            if len(data) == size:
                return np.frombuffer(data, np.uint8)
    except zstandard.ZstdError as error:
        raise InputError(f"a coded chunk is damaged: {error}") from None
    raise InputError(f"a coded chunk is damaged: a frame does not hold {size} bytes")
