from __future__ import annotations

import json
import os
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import safetensors
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.numpy import load_file

from dare.errors import HeaderError
from dare.tensors.dtypes import STORAGE_TYPES
from dare.tensors.files import LocalFile
from dare.tensors.header import Header, TensorInfo, build_header, parse_header, read_header
from helpers import entry, file_bytes, save

U8, F32, I64 = STORAGE_TYPES["U8"], STORAGE_TYPES["F32"], STORAGE_TYPES["I64"]


def read(folder: Path, content: bytes) -> Header:
    path = folder / "f.safetensors"
    path.write_bytes(content)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return read_header(LocalFile(descriptor), "f.safetensors")
    finally:
        os.close(descriptor)


@contextmanager
def refused(match: str) -> Iterator[None]:
    """HeaderError with this message, within seconds of the processor and a few megabytes."""
    tracemalloc.start()
    started = time.thread_time()
    try:
        with pytest.raises(HeaderError, match=match):
            yield
        assert time.thread_time() - started < 3  # of which tracemalloc takes most
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


# ---------------------------------------------------------------- files that are cut


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "^f.safetensors: 0 bytes"),
        (file_bytes({})[:7], "7 bytes"),
        (file_bytes({"w": entry("U8", [2], 0, 2)}, b"ab")[:-3], "truncated"),
        (file_bytes({"w": entry("F32", [2], 0, 8)}, b"1234567"), "w .*truncated"),
        (file_bytes({}, length=99_999_999), "99999999 bytes"),
        *((file_bytes({}, length=size), str(size)) for size in (100_000_001, 2**63, 2**64 - 1)),
    ],
)
def test_a_file_that_is_cut_or_says_so_is_refused(tmp_path, content, match):
    with refused(match):
        read(tmp_path, content)


# ---------------------------------------------------------------- offsets


@pytest.mark.parametrize(
    ("spans", "match"),
    [
        ({"a": (0, 8), "b": (4, 12)}, "b overlaps a"),
        ({"a": (0, 8), "b": (0, 8)}, "b overlaps a"),
        ({"a": (0, 12), "b": (2, 4)}, "b overlaps a"),
        ({"a": (0, 8), "z": (4, 4)}, "z overlaps a"),
        ({"a": (0, 4), "b": (8, 12)}, "4 bytes before b "),
        ({"a": (4, 12)}, "4 bytes before a "),
        ({"a": (10**15, 10**15 + 4)}, "1000000000000000 bytes before a "),
        ({"a": (0, 10**15)}, "a ends at byte 1000000000000000 of the data, and there are only 12"),
        ({"a": (0, 9)}, "3 bytes at the end "),
        ({}, "12 bytes at the end "),
    ],
)
def test_tensors_that_do_not_tile_the_data_are_refused(tmp_path, spans, match):
    header = {name: entry("U8", [end - begin], begin, end) for name, (begin, end) in spans.items()}
    with refused(match):
        read(tmp_path, file_bytes(header, bytes(12)))


@pytest.mark.parametrize(
    "offsets", [[0], [0, 4, 8], [-4, 0], [0.0, 4.0], [False, 4], ["0", "4"], 4, {"0": 4}, None]
)
def test_offsets_that_are_not_two_whole_numbers_are_refused(tmp_path, offsets):
    header = {"w": {"dtype": "U8", "shape": [4], "data_offsets": offsets}}
    with refused(r"w: data_offsets "):
        read(tmp_path, file_bytes(header, bytes(4)))


@pytest.mark.parametrize(("offsets", "span"), [((0, 4), 4), ((0, 12), 12), ((8, 0), -8)])
def test_a_span_that_does_not_fit_the_shape_is_refused(tmp_path, offsets, span):
    header = {"w": entry("F32", [2, 1], *offsets)}
    match = rf"w: 2×1 F32 takes 8 bytes, and data_offsets .* span {span}$"
    with refused(match):
        read(tmp_path, file_bytes(header, bytes(12)))


# ---------------------------------------------------------------- shapes and types


@pytest.mark.parametrize(
    "shape", [[-2], [2.0], [True, 2], ["2"], [None], [[2]], 2, None, "2", {"2": 2}, [float("nan")]]
)
def test_a_shape_that_is_not_a_list_of_whole_numbers_is_refused(tmp_path, shape):
    with refused("w: shape "):
        read(tmp_path, file_bytes({"w": entry("U8", shape, 0, 2)}, b"ab"))


@pytest.mark.parametrize(
    "shape",
    [[2**63], [2**62, 2**62], [10**400] * 20, [9] * 100_000],
    ids=["2**63", "2**124", "a product of 8000 digits", "100000 dimensions"],
)
def test_a_shape_beyond_any_file_is_refused(tmp_path, shape):
    content = file_bytes({"w": entry("U8", shape, 0, 2)}, b"ab")
    with refused("^f.safetensors: w: "):
        read(tmp_path, content)


PACKED = {"F4": 16, "F6_E2M3": 24, "F6_E3M2": 24, "F8_E4M3FNUZ": 32, "F8_E5M2FNUZ": 32}
"""Bytes of 32 elements."""


@pytest.mark.parametrize("dtype", PACKED)
def test_elements_that_share_bytes_are_counted_as_the_library_does(tmp_path, dtype):
    nbytes = PACKED[dtype]
    content = file_bytes({"w": entry(dtype, [4, 8], 0, nbytes)}, bytes(range(nbytes)))
    ((name, stored),) = deserialize(content)
    info = read(tmp_path, content).tensors["w"]
    assert (name, stored["dtype"], stored["shape"]) == ("w", info.dtype.name, list(info.shape))
    assert info.nbytes == len(stored["data"]) == nbytes
    with refused(f"w: 4×8 {dtype} takes {nbytes} bytes"):
        read(tmp_path, file_bytes({"w": entry(dtype, [4, 8], 0, 33)}, bytes(33)))


@pytest.mark.parametrize(("dtype", "shape"), [("F4", [3]), ("F4", []), ("F6_E2M3", [2, 3])])
def test_elements_that_do_not_fill_whole_bytes_are_refused(tmp_path, dtype, shape):
    content = file_bytes({"w": entry(dtype, shape, 0, 2)}, b"ab")
    with pytest.raises(SafetensorError):
        deserialize(content)
    with refused("w: .* does not fill whole bytes"):
        read(tmp_path, content)


@pytest.mark.parametrize("dtype", ["F33", "f32", "", 32, None, ["F32"], {"F32": 1}])
def test_an_unknown_dtype_is_refused_with_the_known_ones(tmp_path, dtype):
    with refused(r"w: unknown dtype .*; known: F64, F32, .*BOOL"):
        read(tmp_path, file_bytes({"w": entry(dtype, [2], 0, 2)}, b"ab"))


@pytest.mark.parametrize(
    "body", [{}, {"dtype": "U8", "shape": [2]}, {**entry("U8", [2], 0, 2), "strides": [1]}, []]
)
def test_an_entry_without_exactly_its_three_keys_is_refused(tmp_path, body):
    with refused("w: .*dtype, shape and data_offsets"):
        read(tmp_path, file_bytes({"w": body}, b"ab"))


# ---------------------------------------------------------------- names and JSON


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (b'{"w":{"dtype":"U8","shape":[9],"shape":[2],"data_offsets":[0,2]}}', "shape"),
        (b'{"__metadata__":{"k":"1","k":"2"}}', "k"),
    ],
)
def test_a_key_that_occurs_twice_is_refused(tmp_path, text, name):
    with refused(f"'{name}' occurs twice"):
        read(tmp_path, file_bytes(text, b"ab"))


def test_a_duplicate_among_many_names_is_found_quickly(tmp_path):
    names, empty = [*range(5_000), 4_999], json.dumps(entry("U8", [0], 0, 0))
    text = "{" + ",".join(f'"{name}":{empty}' for name in names) + "}"
    with refused("'4999' occurs twice in the header"):
        read(tmp_path, file_bytes(text.encode()))


@pytest.mark.parametrize(
    "text",
    [
        *(
            b"",
            b"{",
            b"{}x",
            b"\x00\x00",
            b"{'w':1}",
            b"\x80PK",
            b"[" * 100_000,
            b'{"a":' * 100_000,
        ),
        *(b'{"\xff":1}', b'{"\xc0\xaf":1}', '{"w":1}'.encode("utf-16"), b"[]", b"5", b"null"),
        rb'{"\ud800":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',  # which nobody can write
        b'{"w":{"dtype":"U8","shape":[%s],"data_offsets":[0,2]}}' % (b"9" * 5_000),
    ],
)
def test_a_header_that_is_no_object_of_json_is_refused(tmp_path, text):
    with refused("^f.safetensors: "):
        read(tmp_path, file_bytes(text, b"ab"))


def test_a_fault_in_json_is_placed_in_the_whole_header(tmp_path):
    with refused(r"\(char 6\)"):
        read(tmp_path, file_bytes(b'{"a": oops}', b"ab"))


@pytest.mark.parametrize("metadata", [[], "text", None, {"k": 1}, {"k": None}, {"k": {"a": "b"}}])
def test_metadata_that_is_not_text_to_text_is_refused(tmp_path, metadata):
    with refused("__metadata__ must map text to text"):
        read(tmp_path, file_bytes({"__metadata__": metadata}))


# ---------------------------------------------------------------- what is accepted


def test_a_header_says_where_every_tensor_lies(tmp_path):
    header = {
        "__metadata__": {"format": "pt"},
        "b": entry("F32", [2], 1, 9),
        "a": entry("U8", [1, 1], 0, 1),
    }
    found = read(tmp_path, file_bytes(header, bytes(9)))
    start = 8 + len(json.dumps(header))
    assert found.data_start == start
    assert found.metadata == {"format": "pt"}
    assert found.tensors == {
        "b": TensorInfo("b", F32, (2,), start + 1),
        "a": TensorInfo("a", U8, (1, 1), start),
    }


def test_scalars_and_empty_tensors_are_accepted(tmp_path):
    header = {
        "empty at the start": entry("F32", [0], 0, 0),
        "scalar": entry("F32", [], 0, 4),
        "empty between": entry("F32", [2, 0, 3], 4, 4),
        "one": entry("I64", [1], 4, 12),
        "empty at the end": entry("F32", [0, 2**40], 12, 12),
    }
    found = read(tmp_path, file_bytes(header, bytes(12))).tensors
    assert {name: (info.shape, info.elements, info.nbytes) for name, info in found.items()} == {
        "empty at the start": ((0,), 0, 0),
        "scalar": ((), 1, 4),
        "empty between": ((2, 0, 3), 0, 0),
        "one": ((1,), 1, 8),
        "empty at the end": ((0, 2**40), 0, 0),
    }


# ---------------------------------------------------------------- there and back


def test_a_built_header_is_these_bytes():
    first, placed = build_header([("w", F32, (2, 3)), ("n", I64, ())], {"k": "v"})
    text = (
        b'{"__metadata__":{"k":"v"},"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},'
        b'"n":{"dtype":"I64","shape":[],"data_offsets":[24,32]}}'
    )
    assert first[:8] == (len(first) - 8).to_bytes(8, "little")
    assert first[8:].rstrip(b" ") == text
    assert len(first) == 4096  # the data begins on a page
    assert placed == {
        "w": TensorInfo("w", F32, (2, 3), len(first)),
        "n": TensorInfo("n", I64, (), len(first) + 24),
    }


def test_the_safetensors_library_reads_a_built_header(tmp_path):
    arrays = {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "ü": np.array([], np.int64),
        "s": np.array(7, np.float16),
    }
    described = [("w", F32, (2, 3)), ("ü", I64, (0,)), ("s", STORAGE_TYPES["F16"], ())]
    first, _ = build_header(described, {"format": "pt"})
    path = tmp_path / "f.safetensors"
    path.write_bytes(first + b"".join(array.tobytes() for array in arrays.values()))
    found = load_file(path)
    assert {name: (a.dtype, a.shape, a.tobytes()) for name, a in found.items()} == {
        name: (a.dtype, a.shape, a.tobytes()) for name, a in arrays.items()
    }


def test_the_safetensors_library_knows_every_type_of_the_table():
    first, placed = build_header([(name, kind, (4,)) for name, kind in STORAGE_TYPES.items()], {})
    size = sum(info.nbytes for info in placed.values())
    found = dict(safetensors.deserialize(first + bytes(size)))
    assert {name: (body["dtype"], body["shape"]) for name, body in found.items()} == {
        name: (name, [4]) for name in STORAGE_TYPES
    }


def test_a_file_of_the_safetensors_library_is_read(tmp_path):
    arrays = {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "n": np.array([-1, 2], np.int64),
        "s": np.array(0.5, np.float16),
        "e": np.empty((0, 4), np.bool_),
    }
    content = save(tmp_path / "g.safetensors", arrays).read_bytes()
    found = read(tmp_path, content).tensors
    assert {
        name: (info.dtype.name, info.shape, content[info.start : info.start + info.nbytes])
        for name, info in found.items()
    } == {
        "w": ("F32", (2, 3), arrays["w"].tobytes()),
        "n": ("I64", (2,), arrays["n"].tobytes()),
        "s": ("F16", (), arrays["s"].tobytes()),
        "e": ("BOOL", (0, 4), b""),
    }


described_tensors = st.lists(
    st.tuples(
        st.text(max_size=5).filter(lambda name: name != "__metadata__"),
        st.sampled_from(list(STORAGE_TYPES.values())),
        st.lists(st.integers(0, 5), max_size=4).map(lambda shape: (*shape, 4)),  # whole bytes
    ),
    max_size=6,
    unique_by=lambda tensor: tensor[0],
)


@given(described_tensors, st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3))
def test_a_built_header_parses_to_what_it_was_built_from(tensors, metadata):
    first, placed = build_header(tensors, metadata)
    size = sum(info.nbytes for info in placed.values())
    assert parse_header(first[8:], size, "f") == Header(placed, metadata, len(first))
