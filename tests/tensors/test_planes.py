from __future__ import annotations

import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from dare import InputError
from dare.tensors.planes import (
    ALONE,
    BLOCK,
    DIFFERENCE,
    PLAIN,
    RAW,
    SCATTERED,
    ZEROS,
    ZSTD,
    pack,
    unpack,
)

ITEMSIZES = [1, 2, 4, 8]


def unpacked(blob, base, itemsize: int, size: int) -> np.ndarray:
    into = np.full(size, 0xA5, np.uint8)
    unpack(blob, base, itemsize, into)
    return into


def as_bytes(values: np.ndarray) -> np.ndarray:
    return values.view(np.uint8)


def numbers(*values: int) -> np.ndarray:
    return as_bytes(np.array(values, "<u2"))


def fine_tune(elements: int = 5000, dtype=ml_dtypes.bfloat16) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(3)
    base = generator.normal(0, 0.02, elements).astype(dtype)
    model = (base.astype(np.float64) + generator.normal(0, 0.001, elements)).astype(dtype)
    return as_bytes(model), as_bytes(base)


@st.composite
def chunks(draw) -> tuple[np.ndarray, np.ndarray | None, int]:
    """A model's bytes, the base's and the itemsize: equal, near, partly changed, or unrelated."""
    itemsize = draw(st.sampled_from(ITEMSIZES))
    elements = draw(st.integers(0, 9) | st.integers(0, 3000))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = np.dtype(f"<u{itemsize}")
    few_values = draw(st.sampled_from([1, 4, 256]))
    base = generator.integers(0, few_values, elements * itemsize, np.uint8).view(kind)
    span = draw(st.sampled_from([0, 1, 3, 100, 2**7 - 1]))
    changes = generator.integers(-span, span + 1, elements).astype(f"<i{itemsize}").view(kind)
    rate = draw(st.sampled_from([0.001, 0.02, 0.2, 0.5, 1]))
    if draw(st.booleans()):
        changes[generator.random(elements) >= rate] = 0
    else:  # a run
        changes[int(rate * elements) :] = 0
    model = base + changes
    if draw(st.booleans()):
        return as_bytes(model), as_bytes(base), itemsize
    unrelated = generator.integers(0, 256, base.nbytes, np.uint8)
    return as_bytes(model), draw(st.sampled_from([None, unrelated])), itemsize


@given(chunks())
def test_what_is_unpacked_is_what_was_packed(chunk):
    model, base, itemsize = chunk
    blob = pack(model, base, itemsize)
    assert len(blob) <= model.size + 1
    assert pack(model, base, itemsize) == blob
    np.testing.assert_array_equal(unpacked(blob, base, itemsize, model.size), model)


@pytest.mark.parametrize("itemsize", ITEMSIZES)
def test_the_whole_range_of_differences_comes_back(itemsize):
    ends = [0, 1, 2 ** (8 * itemsize - 1) - 1, 2 ** (8 * itemsize - 1), 2 ** (8 * itemsize) - 1]
    pairs = np.array([(a, b) for a in ends for b in ends] * 50, f"<u{itemsize}")
    model, base = as_bytes(pairs[:, 0].copy()), as_bytes(pairs[:, 1].copy())
    blob = pack(model, base, itemsize)
    assert blob[0] != RAW
    np.testing.assert_array_equal(unpacked(blob, base, itemsize, model.size), model)


@pytest.mark.parametrize("itemsize", ITEMSIZES)
@pytest.mark.parametrize("elements", [BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5])
def test_blocks_fit_together(itemsize, elements):
    generator = np.random.default_rng(elements)
    base = generator.integers(0, 256, elements * itemsize, np.uint8)
    changes = generator.integers(0, 4, elements).astype(f"<u{itemsize}")
    model = as_bytes(base.view(changes.dtype) + changes)
    cases = ((model, base, DIFFERENCE), (as_bytes(changes), None, ALONE))
    for data, against, code in cases:
        blob = pack(data, against, itemsize)
        assert blob[0] == code
        np.testing.assert_array_equal(unpacked(blob, against, itemsize, data.size), data)


@pytest.mark.parametrize("itemsize", ITEMSIZES)
def test_what_is_equal_costs_nothing(itemsize):
    base = np.arange(4096, dtype=np.uint8)
    assert pack(base.copy(), base, itemsize) == b""
    np.testing.assert_array_equal(unpacked(b"", base, itemsize, base.size), base)


@pytest.mark.parametrize("base", [None, np.empty(0, np.uint8)])
def test_an_empty_chunk_is_an_empty_blob(base):
    assert pack(np.empty(0, np.uint8), base, 4) == b""
    assert unpacked(b"", base, 4, 0).size == 0


HIGH = 0x3F80
VECTORS = {
    "raw": (numbers(0x1234), numbers(0), "00 3412"),
    "alone": (numbers(0x0041, 0x0042, 0x0043), None, "01 01414243 00"),
    # 1 more, 1 less, equal, 3 more, 128 less
    "difference": (
        numbers(HIGH + 1, HIGH - 1, HIGH, HIGH + 3, HIGH - 128),
        numbers(*[HIGH] * 5),
        "02 01 02 01 00 06 ff 00",
    ),
    # element 3 is 1 more, element 12 is 128 more; both bytes of that one are in the second plane
    "scattered": (
        numbers(*[7] * 3, 8, *[7] * 8, 135, *[7] * 3),
        numbers(*[7] * 16),
        "02 03 01000000 0103 0102 03 01000000 010c 0101",
    ),
    # 255 zeros, then 2 more, then a 1
    "a long gap": (
        numbers(*[7] * 257, 6, *[7] * 42),
        numbers(*[7] * 300),
        "02 03 02000000 01ff02 0101 00",
    ),
}


@pytest.mark.parametrize(("model", "base", "blob"), VECTORS.values(), ids=VECTORS)
def test_the_bytes_of_a_blob(model, base, blob):
    assert pack(model, base, 2).hex() == blob.replace(" ", "")
    np.testing.assert_array_equal(unpacked(bytes.fromhex(blob), base, 2, model.size), model)


def test_a_frame_stands_after_its_length():
    plane = bytes(range(50)) * 20
    blob = pack(np.frombuffer(plane, np.uint8), None, 1)
    assert blob[:2] == bytes([ALONE, ZSTD])
    assert int.from_bytes(blob[2:6], "little") == len(blob) - 6 < 200
    assert zstandard.get_frame_parameters(blob[6:]).content_size == len(plane)
    assert zstandard.decompress(blob[6:]) == plane


def test_what_can_be_read_is_wider_than_what_is_written():
    base = numbers(1, 2, 3)
    frame = zstandard.ZstdCompressor(level=19, write_checksum=True).compress(bytes([2, 0, 1]))
    blob = bytes([DIFFERENCE, ZSTD, len(frame), 0, 0, 0]) + frame + bytes([PLAIN, 0, 1, 0])
    np.testing.assert_array_equal(unpacked(blob, base, 2, 6), numbers(2, 130, 2))


def test_a_fine_tune_needs_less_with_its_base_than_without():
    model, base = fine_tune(100_000)
    assert len(pack(model, base, 2)) < 0.45 * model.size
    assert 0.64 * model.size < len(pack(model, None, 2)) < 0.70 * model.size


def test_a_base_that_is_of_no_help_is_not_used():
    model, _ = fine_tune(100_000)
    other = np.random.default_rng(0).integers(0, 256, model.size, np.uint8)
    assert pack(model, other, 2) == pack(model, None, 2)


def test_few_changes_need_little_more_than_a_byte_each():
    _, base = fine_tune(1 << 17)
    model = base.copy()
    changed = np.random.default_rng(1).random(1 << 17) < 0.01
    model.view("<u2")[changed] += 1
    assert len(pack(model, base, 2)) < 1.1 * np.count_nonzero(changed)


def test_blobs_and_arrays_may_lie_anywhere():
    model, base = fine_tune()
    memory = np.zeros(3 * model.size + 1, np.uint8)
    odd_model, odd_base, into = np.split(memory[1:], 3)
    odd_model[:], odd_base[:] = model, base
    odd_base.flags.writeable = False
    blob = pack(odd_model, odd_base, 2)
    assert blob == pack(model, base, 2)
    unpack(memoryview(b"x" + blob)[1:], odd_base, 2, into)
    np.testing.assert_array_equal(into, model)
    np.testing.assert_array_equal(odd_base, base)


@pytest.mark.parametrize("elements", [5, 300])
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
def test_every_truncation_is_refused(elements, dtype):
    model, base = fine_tune(elements, dtype)
    itemsize = np.dtype(dtype).itemsize
    blob = pack(model, base, itemsize)
    for length in range(1, len(blob)):
        with pytest.raises(InputError):
            unpacked(blob[:length], base, itemsize, model.size)
    with pytest.raises(InputError, match="has 1 byte too many"):
        unpacked(blob + b"\0", base, itemsize, model.size)


@given(st.data())
def test_damage_is_refused_or_gives_other_bytes(data):
    model, base, itemsize = data.draw(chunks())
    blob = bytearray(pack(model, base, itemsize))
    for _ in range(data.draw(st.integers(1, 3)) if blob else 0):
        place = data.draw(st.integers(0, len(blob) - 1))
        blob[place] ^= 1 << data.draw(st.integers(0, 7))
    try:
        unpacked(bytes(blob), base, itemsize, model.size)
    except InputError:
        assert blob


@given(st.binary(max_size=200), st.sampled_from(ITEMSIZES), st.integers(0, 50))
def test_any_bytes_are_refused_or_unpacked(blob, itemsize, elements):
    base = np.zeros(elements * itemsize, np.uint8)
    try:
        unpacked(blob, base, itemsize, base.size)
    except InputError:
        assert blob


def framed(frame: bytes) -> bytes:
    return bytes([ALONE, ZSTD]) + len(frame).to_bytes(4, "little") + frame


EIGHT = zstandard.ZstdCompressor().compress(bytes(8))
NINE = zstandard.ZstdCompressor().compress(bytes(9))
WITHOUT_SIZE = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(8))
GIBIBYTE = bytes.fromhex("28b52ffd a0 00000040 03001000")  # says that it holds one; then a run
SKIPPABLE = bytes.fromhex("502a4d18 08000000") + bytes(8)
DAMAGED = {
    "unknown code": (bytes([3]), "3 is not a known code"),
    "unknown plane": (bytes([ALONE, 4]), "4 is not a known way"),
    "raw, too short": (bytes([RAW]) + bytes(7), "ends too early"),
    "raw, too long": (bytes([RAW]) + bytes(9), "1 byte too many"),
    "plane too short": (bytes([ALONE, PLAIN]) + bytes(7), "ends too early"),
    "no length": (bytes([ALONE, ZSTD, 1, 0]), "ends too early"),
    "frame longer than the blob": (bytes([ALONE, ZSTD]) + b"\xff" * 4, "ends too early"),
    "no frame": (framed(b"not zstd"), "damaged"),
    "empty frame": (framed(b""), "damaged"),
    "frame of 9 bytes": (framed(NINE), "does not hold 8 bytes"),
    "frame of a GiB": (framed(GIBIBYTE), "does not hold 8 bytes"),
    "frame without size": (framed(WITHOUT_SIZE), "does not hold 8 bytes"),
    "two frames": (framed(EIGHT + EIGHT), "damaged"),
    "skippable frame": (framed(SKIPPABLE), "damaged"),
    "scattered in scattered": (
        bytes([ALONE, SCATTERED, 1, 0, 0, 0, SCATTERED]),
        "3 is not a known way",
    ),
    "more gaps than bytes": (bytes([ALONE, SCATTERED, 9, 0, 0, 0, ZEROS]), "9 gaps among 8"),
    "gap beyond the end": (
        bytes([ALONE, SCATTERED, 2, 0, 0, 0, PLAIN, 3, 4, PLAIN, 1, 1]),
        "beyond its end",
    ),
    "long gap at the end": (
        bytes([ALONE, SCATTERED, 2, 0, 0, 0, PLAIN, 3, 255, PLAIN, 1]),
        "beyond its end",
    ),
}


@pytest.mark.parametrize(("blob", "message"), DAMAGED.values(), ids=DAMAGED)
def test_damage_is_named_and_takes_no_memory(blob, message):
    into = np.empty(8, np.uint8)
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match=message):
            unpack(blob, None, 1, into)
        assert tracemalloc.get_traced_memory()[1] < 1 << 18
    finally:
        tracemalloc.stop()


def test_gaps_may_fill_a_plane():
    blob = bytes([ALONE, SCATTERED, 2, 0, 0, 0, PLAIN, 3, 3, PLAIN, 5, 6])
    assert unpacked(blob, None, 1, 8).tolist() == [0, 0, 0, 5, 0, 0, 0, 6]


@pytest.mark.parametrize("blob", [b"", bytes([DIFFERENCE, ZEROS])])
def test_a_blob_that_needs_a_base_must_have_one(blob):
    with pytest.raises(InputError, match="a tensor that the base does not have"):
        unpacked(blob, None, 1, 8)
